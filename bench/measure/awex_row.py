"""The row of Awex's own transport over gloo: two sharded ranks to two."""

from __future__ import annotations

import tempfile

from .bench import Bench
from .foreign import Package, run_ranks, version
from .rows import Row
from .shards import nbytes_of, rows_for

_RANKS = 2
AWEX = Package(distribution="awex", imports="awex.transfer.nccl_comm", module="syncline.bench.measure.awex_peer")


async def awex_row(bench: Bench) -> Row | None:
    """Measure and print it; None where it cannot be."""
    where = f"gloo, TP{_RANKS} to TP{_RANKS}"
    python = bench.python_of("awex")
    found, reason = await version(AWEX, python)
    if not found:
        bench.note(f"awex {where}", f"awex is not there ({reason}); give an interpreter that has it: --peer-python awex=PYTHON")
        return None
    rows = rows_for(bench.tensors, bench.nbytes, _RANKS)
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        shared = {"infer": _RANKS, "train": _RANKS, "store": f"{folder}/awex"}
        shared |= {"repeat": bench.repeat, "tensors": bench.tensors, "rows": rows}
        answers = await run_ranks(AWEX, python, [{**shared, "rank": rank} for rank in range(2 * _RANKS)])
    return bench.add(
        f"awex {where}", answers[0]["seconds"], kind="peer", nbytes=nbytes_of(bench.tensors, rows),
        integrity=all(answer["ok"] for answer in answers[:_RANKS]), digests=False, versions={"awex": found},
    )  # fmt: skip
