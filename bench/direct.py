"""The rows of ``syncline bench run --suites direct``: tensor-parallel shards to tensor-parallel shards over gloo.

Two source ranks, two ranks of one target, both sharded in the same way. Beside the direct route, in the same run: the same
push gathered by owners, the naive way (gather each tensor, broadcast it whole), and Awex's transport where that is installed.
Awex writes straight into the parameters, as ``streamed`` landing does, and computes no digests.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from .run import Bench, Peer, peers, sizes

_RANKS = 2
_DEADLINE_S = 600.0


class Case(NamedTuple):
    """One way to push."""

    route: str
    landing: str
    verify: bool

    @property
    def name(self) -> str:
        digests = "digests" if self.verify else "no digests"
        return f"gloo {self.route}, {self.landing}, {digests}, TP{_RANKS} to TP{_RANKS}"


CASES = (
    Case("direct", "streamed", False),
    Case("direct", "streamed", True),
    Case("direct", "staged", False),
    Case("direct", "staged", True),
    Case("gather", "staged", True),
)


async def direct_rows(bench: Bench) -> None:
    """Measure and print all rows of this suite, each with its time over that of gather-and-broadcast, and over Awex's."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        awex = await _awex_row(bench, folder)
        async with peers(folder, _commands(bench, folder)) as everyone:
            receivers, sources = everyone[:_RANKS], everyone[_RANKS:]
            answers = [await peer.answer() for peer in everyone]
            naive = await _naive_row(bench, folder, receivers, sources)
            version = 1
            for case in CASES:
                await _case_row(
                    bench, case, receivers, sources, target=answers[0]["address"], first=version, peers_s=(naive, awex)
                )
                version += bench.args.repeat


def _commands(bench: Bench, folder: Path) -> list[list[str]]:
    address = [f"unix:{folder}/t{rank}.sock" for rank in range(_RANKS)]
    place = [["--rank", str(rank), "--world-size", str(_RANKS), *sizes(bench.args)] for rank in range(_RANKS)]
    targets = [
        ["--role", "tp-receiver", *place[rank], "--address", address[rank], *(["--leader", address[0]] if rank else [])]
        for rank in range(_RANKS)
    ]
    return [*targets, *(["--role", "tp-source", *place[rank], "--store", f"{folder}/store"] for rank in range(_RANKS))]


async def _case_row(
    bench: Bench, case: Case, receivers: list[Peer], sources: list[Peer], *, target: str, first: int,
    peers_s: tuple[float, float | None],
) -> None:  # fmt: skip
    args = bench.args
    knobs = {
        "max_tmp_bytes": args.max_tmp_bytes, "bucket_bytes": args.bucket_bytes, "landing": case.landing, "route": case.route,
    }  # fmt: skip
    for receiver in receivers:
        await receiver.ask(do="clear")
    config = {**knobs, "transport": "gloo", "trace": False, "verify": case.verify}
    command = {"do": "push", "config": config, "targets": [target], "repeat": args.repeat, "first": first}
    result = (await asyncio.gather(*(peer.ask(**command) for peer in sources)))[0]
    checks = [await receiver.ask(do="verify", version=1) for receiver in receivers]
    intact = result["ok"] and all(check["ok"] and check["state"] == "COMMITTED" for check in checks)
    median = statistics.median(result["seconds"][1:] or result["seconds"])
    naive, awex = peers_s
    keys = ("tasks", "peak_tmp_bytes", "landing_bytes", "busy_s", "gather_messages")
    bench.row(
        case.name, result["seconds"], nbytes=args.nbytes, integrity=intact, digests=case.verify, knobs=knobs,
        ratio_to_gather_and_broadcast=median / naive, ratio_to_awex=None if awex is None else median / awex,
        **{key: result[key] for key in keys},
    )  # fmt: skip


async def _naive_row(bench: Bench, folder: Path, receivers: list[Peer], sources: list[Peer]) -> float:
    """Gather and broadcast; returns its median."""
    command = {"do": "naive", "store": f"{folder}/naive", "size": 1 + _RANKS, "repeat": max(4, bench.args.repeat // 2)}
    for rank, receiver in enumerate(receivers, start=1):
        receiver.tell(**command, rank=rank)
    results = await asyncio.gather(*(peer.ask(**command) for peer in sources))
    for receiver in receivers:
        await receiver.answer()
    checks = [await receiver.ask(do="verify", version=1) for receiver in receivers]
    row = bench.row(
        f"naive: all_gather and broadcast by rank 0, TP{_RANKS} to TP{_RANKS}", results[0]["seconds"], nbytes=bench.args.nbytes,
        integrity=all(check["ok"] for check in checks), digests=False,
    )  # fmt: skip
    return float(row["seconds"]["median"])


async def _awex_row(bench: Bench, folder: Path) -> float | None:
    """Awex's gloo transport; its median, or None where it is not installed."""
    python = str(bench.args.awex_python or sys.executable)
    version = await _awex_version(python)
    if version is None:
        bench.note("awex gloo, TP2 to TP2", "awex is not installed in this environment; give one that has it: --awex-python")
        return None
    shared = {
        "infer": _RANKS, "train": _RANKS, "store": f"{folder}/awex", "repeat": bench.args.repeat,
        "tensors": bench.args.tensors, "nbytes": bench.args.nbytes,
    }  # fmt: skip
    ranks = [
        await asyncio.create_subprocess_exec(
            python, "-m", "syncline.bench.awex_peer", json.dumps({**shared, "rank": rank}),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )
        for rank in range(2 * _RANKS)
    ]  # fmt: skip
    try:
        async with asyncio.timeout(_DEADLINE_S):
            said = [await rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()
    answers = [json.loads(out.splitlines()[-1]) for out, _ in said[:_RANKS]]
    row = bench.row(
        f"awex {version} gloo, TP{_RANKS} to TP{_RANKS}", answers[0]["seconds"], nbytes=bench.args.nbytes,
        integrity=all(answer["ok"] for answer in answers), digests=False,
    )  # fmt: skip
    return float(row["seconds"]["median"])


async def _awex_version(python: str) -> str | None:
    script = "import awex.transfer.nccl_comm, importlib.metadata as m; print(m.version('awex'))"
    try:
        asked = await asyncio.create_subprocess_exec(
            python, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return None
    out, _ = await asked.communicate()
    return out.decode().split()[-1] if asked.returncode == 0 else None
