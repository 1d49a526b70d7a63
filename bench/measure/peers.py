"""``syncline bench run --peers``: other people's transfers of the same tensors, beside ours and the floors, in one run.

One source to two targets that take everything, then two sharded ranks to two. Packages that are not in this environment are run
in the one that is named for them, or skipped with the reason. None of them digests what it moved, or fences the target.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
from pathlib import Path
from typing import Any

from syncline.engine import TransferConfig

from .bed import bed
from .bench import Bench
from .direct import direct_rows
from .errors import BenchError
from .foreign import Package, run_ranks, version
from .shards import nbytes_of, rows_for
from .torchrl_peer import SCHEMES
from .vllm_row import vllm_rows

_TARGETS = 2
LEAST = 10
"""Pushes of each row, so that at least five are warm, whatever the ramp is like."""
TORCHRL = Package(distribution="torchrl", imports="torchrl.weight_update", module="syncline.bench.measure.torchrl_peer")
ENGINE = Package(
    distribution="checkpoint-engine", imports="checkpoint_engine.ps", module="syncline.bench.measure.checkpoint_engine_peer"
)
NAMES = ("awex", "torchrl", "checkpoint-engine", "vllm")


async def peer_rows(bench: Bench) -> None:
    """All rows."""
    where = f"1 source rank to {_TARGETS}"
    async with bed(bench.setup(targets=_TARGETS, movable=True)) as here:
        for transport, landing in (("shm", "mapped"), ("shm", "staged"), ("gloo", "staged")):
            for verify in (True, False):
                name = f"{transport} {landing}, {'digests' if verify else 'no digests'}, {where}"
                await bench.push_row(name, here, transport=transport, landing=landing, verify=verify)
        await bench.naive_row(f"naive: broadcast tensor by tensor, {where}", here)
    for scheme in SCHEMES:
        await _foreign_row(bench, TORCHRL, f"torchrl {scheme}, {where}", [{"scheme": scheme, "workers": _TARGETS}])
    shared = {"workers": _TARGETS, "port": _free_port(), "token": secrets.token_hex(4)}
    shared["bucket_bytes"] = TransferConfig(**bench.knobs).bucket
    ranks = [{**shared, "rank": rank} for rank in range(_TARGETS)]
    await _foreign_row(bench, ENGINE, f"checkpoint-engine gloo and shm, 1 of {_TARGETS} ranks to all workers", ranks)
    await direct_rows(bench)
    await vllm_rows(bench)


async def _foreign_row(bench: Bench, package: Package, name: str, ranks: list[dict[str, Any]]) -> None:
    """A row of processes of somebody else's; integrity by what they all say."""
    python = bench.python_of(package.distribution)
    found, reason = await version(package, python)
    if not found:
        remedy = f"give an interpreter that has it: --peer-python {package.distribution}=PYTHON"
        bench.note(name, f"{package.distribution} is not there ({reason}); {remedy}")
        return
    rows = rows_for(bench.tensors, bench.nbytes)
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        shared = {"store": str(Path(folder) / "store"), "repeat": bench.repeat, "tensors": bench.tensors, "rows": rows}
        try:
            answers = await run_ranks(package, python, [{**shared, **rank} for rank in ranks])
        except BenchError as error:
            bench.note(name, str(error))
            return
    bench.add(
        name, answers[0]["seconds"], kind="peer", nbytes=nbytes_of(bench.tensors, rows),
        integrity=all(answer["ok"] for answer in answers), digests=False, versions={package.distribution: found},
    )  # fmt: skip


def _free_port() -> int:
    """A port of loopback that nobody had just now: checkpoint-engine wants to be told one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
