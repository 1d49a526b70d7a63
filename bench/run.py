"""``syncline bench run``: what a push takes on this machine, beside the machine's own copy rate and a naive peer.

Every row is one JSON line: seconds (min, median, max), bytes, GB/s, ratio to a single-thread memcpy of the same bytes in
the same run, watermark, knobs, machine, versions, and whether every element arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from .peer import Weights, measure, times

Suite = Literal["shm", "gloo", "direct", "vllm", "driver", "plan"]
_PACKAGES = ("syncline", "torch", "numpy", "msgspec", "uvloop", "xxhash", "aiohttp")


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Measure pushes on this machine; one JSON line a row."""

    suites: tuple[Suite, ...] = ("shm", "gloo", "direct", "vllm", "driver", "plan")
    """What to measure."""
    repeat: int = 12
    """Pushes of each row."""
    tensors: int = 40
    nbytes: int = 409_600_000
    """Bytes of each push, float32, in ``tensors`` tensors."""
    max_tmp_bytes: str = "256MiB"
    bucket_bytes: str = "32MiB"
    awex_python: Path | None = None
    """Interpreter of an environment with Awex (and syncline) in it, for its row in ``direct``; by default this one."""
    out: Path | None = None
    """Also append the rows to this file."""


class Bench:
    """One run: its floor, its rows, and where they go."""

    def __init__(self, args: RunArgs) -> None:
        self.args = args
        self.memcpy_s = 0.0
        self.machine = {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "python": platform.python_version(),
        }
        self.versions = {name: metadata.version(name) for name in _PACKAGES if _is_installed(name)}

    def row(self, name: str, seconds: Sequence[float], *, nbytes: int, integrity: bool | None, **more: Any) -> dict[str, Any]:
        """Print one row. The first measurement is reported apart as ``first_s`` and not among the others."""
        later = list(seconds[1:]) or list(seconds)
        median = statistics.median(later)
        row = {
            "row": name,
            "n": len(later),
            "seconds": {"min": min(later), "median": median, "max": max(later)},
            "first_s": seconds[0],
            "first_to_median": seconds[0] / median,
            "bytes": nbytes,
            "gb_s": nbytes / median / 1e9 if nbytes else None,
            "ratio_to_memcpy": self.memcpy_s / median if nbytes == self.args.nbytes and self.memcpy_s else None,
            "integrity": integrity,
            **more,
            "machine": self.machine,
            "versions": self.versions,
        }
        self._put(row)
        return row

    def note(self, name: str, reason: str) -> None:
        """Print a row that was not measured, and why."""
        self._put({"row": name, "skipped": reason})

    def _put(self, row: dict[str, Any]) -> None:
        line = json.dumps(row)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if self.args.out is not None:
            with self.args.out.open("a") as file:
                file.write(line + "\n")

    def memcpy(self) -> None:
        """The floor: one thread copies the same bytes, tensor by tensor, between memory that was touched before."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        source = [torch.ones(self.args.nbytes // 4 // self.args.tensors) for _ in range(self.args.tensors)]
        target = [torch.zeros_like(tensor) for tensor in source]

        def copy() -> None:
            for destination, tensor in zip(target, source, strict=True):
                destination.copy_(tensor)

        seconds = times(copy, self.args.repeat)
        torch.set_num_threads(before)
        self.memcpy_s = statistics.median(seconds[1:])
        self.row("memcpy, 1 thread", seconds, nbytes=self.args.nbytes, integrity=None)


class Peer:
    """A peer process (see `syncline.bench.peer`)."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    async def answer(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measured process ended:\n{self.log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.tell(**command)
        return await self.answer()


@contextlib.asynccontextmanager
async def peers(folder: Path, commands: Sequence[Sequence[str]]) -> AsyncIterator[list[Peer]]:
    """Run peer processes; all have ended when this returns."""
    started: list[Peer] = []
    try:
        for number, arguments in enumerate(commands):
            log = folder / f"{arguments[1]}-{number}.log"
            with log.open("w") as file:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "syncline.bench.peer", *arguments,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file, limit=2**22,
                )  # fmt: skip
            started.append(Peer(process, log))
        yield started
    finally:
        for peer in started:
            if peer.process.stdin is not None:
                peer.process.stdin.close()
        for peer in started:
            try:
                await asyncio.wait_for(peer.process.wait(), 20)
            except TimeoutError:
                peer.process.kill()
                await peer.process.wait()


def sizes(args: RunArgs) -> list[str]:
    """Arguments of a peer process: how many tensors, of how many bytes in all."""
    return ["--tensors", str(args.tensors), "--nbytes", str(args.nbytes)]


def _receivers(args: RunArgs, folder: Path, count: int, *, movable: bool = False) -> list[list[str]]:
    flags = ["--movable"] if movable else []
    return [["--role", "receiver", *sizes(args), "--address", f"unix:{folder}/r{n}.sock", *flags] for n in range(count)]


async def shm_row(bench: Bench, landing: str, count: int) -> None:
    """One source rank in this process to ``count`` receivers over shared memory."""
    from syncline.adapters.trainers import ModuleSource
    from syncline.engine import RemoteTarget, TransferConfig, TransferEngine

    args = bench.args
    model = Weights(args.tensors, args.nbytes)
    model.stamp(1)
    knobs: dict[str, Any] = {"max_tmp_bytes": args.max_tmp_bytes, "bucket_bytes": args.bucket_bytes, "landing": landing}
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        async with peers(Path(name), _receivers(args, Path(name), count, movable=landing == "mapped")) as receivers:
            targets = [RemoteTarget((await receiver.answer())["address"]) for receiver in receivers]
            config = TransferConfig(**knobs, transport="shm", trace=False)
            async with TransferEngine(source=ModuleSource(model), targets=targets, config=config) as engine:
                result = await measure(engine, args.repeat)
                checks = [await receiver.ask(do="verify", version=1) for receiver in receivers]
    _push_row(bench, f"shm {landing}, 1 source rank to {count}", result, checks, knobs)


async def gloo_rows(bench: Bench) -> None:
    """Two FSDP2 ranks to two receivers, each getting the whole; then the naive way in the same processes."""
    args = bench.args
    knobs: dict[str, Any] = {"max_tmp_bytes": args.max_tmp_bytes, "bucket_bytes": args.bucket_bytes, "landing": "staged"}
    repeat = max(4, args.repeat // 2)
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        ranks = [
            ["--role", "source", *sizes(args), "--rank", str(rank), "--world-size", "2", "--store", f"{folder}/store"]
            for rank in range(2)
        ]
        async with peers(folder, [*_receivers(args, folder, 2), *ranks]) as all_peers:
            receivers, sources = all_peers[:2], all_peers[2:]
            answers = [await peer.answer() for peer in all_peers]
            targets = [answer["address"] for answer in answers[:2]]
            config = {**knobs, "transport": "gloo", "trace": False}
            results = await asyncio.gather(
                *(peer.ask(do="push", config=config, targets=targets, repeat=repeat) for peer in sources)
            )
            checks = [await receiver.ask(do="verify", version=1) for receiver in receivers]
            _push_row(bench, "gloo staged, 2 source ranks to 2", results[0], checks, knobs)
            await _naive_row(bench, folder, receivers, sources, repeat)


async def _naive_row(bench: Bench, folder: Path, receivers: list[Peer], sources: list[Peer], repeat: int) -> None:
    store, size = f"{folder}/naive", 1 + len(receivers)
    for rank, receiver in enumerate(receivers, start=1):
        receiver.tell(do="naive", store=store, rank=rank, size=size, repeat=repeat)
    results = await asyncio.gather(*(peer.ask(do="naive", store=store, size=size, repeat=repeat) for peer in sources))
    for receiver in receivers:
        await receiver.answer()
    checks = [await receiver.ask(do="verify", version=1) for receiver in receivers]
    bench.row(
        "naive: full_tensor() and broadcast by rank 0, 2 source ranks to 2", results[0]["seconds"], nbytes=bench.args.nbytes,
        integrity=all(check["ok"] for check in checks),
    )  # fmt: skip


def _push_row(bench: Bench, name: str, result: dict[str, Any], checks: list[dict[str, Any]], knobs: dict[str, Any]) -> None:
    intact = result["ok"] and all(check["ok"] and check["state"] == "COMMITTED" for check in checks)
    more = {key: result[key] for key in ("tasks", "peak_tmp_bytes", "landing_bytes", "busy_s")}
    bench.row(name, result["seconds"], nbytes=bench.args.nbytes, integrity=intact, digests=True, knobs=knobs, **more)


def driver_row(bench: Bench, tasks: int = 10_000) -> None:
    """What the scheduler itself costs: all stages do nothing."""
    from syncline.scheduler.driver import Driver, Limits, TaskSpec

    specs = tuple(
        TaskSpec(index=i, group=0, tmp_bytes=1, stages=("h2d", "prepare", "send"), targets=frozenset({0})) for i in range(tasks)
    )

    class Nothing:
        def start(self, task: int) -> None:
            return None

    async def once(driver: Driver, push_id: int) -> None:
        async def votes() -> None:
            return None

        await driver.run(push_id, specs, (0,), frozenset({0}), collect_votes=votes, deadline_s=120, on_source_free=lambda: None)

    async def every() -> list[float]:
        nothing = Nothing()
        driver = Driver(
            stages={"h2d": nothing, "prepare": nothing, "send": nothing},
            barrier=lambda _group: None,
            limits=Limits(max_tmp_bytes=64, h2d=2, prepare=2, send=2),
            release=lambda _push, _task: None,
            drop_target=lambda _target, _at_task: None,
        )
        seconds = []
        for push_id in range(1, bench.args.repeat + 1):
            began = time.perf_counter()
            await once(driver, push_id)
            seconds.append(time.perf_counter() - began)
        await driver.close(5)
        return seconds

    import uvloop

    seconds = uvloop.run(every())
    per_task = statistics.median(seconds[1:]) / tasks
    bench.row(f"driver, {tasks} tasks of no-op stages, uvloop", seconds, nbytes=0, integrity=None, us_per_task=per_task * 1e6)


def plan_row(bench: Bench) -> None:
    """Planning for Kimi-K2's shapes, in a process of its own so that its peak memory can be told."""
    import subprocess

    script = "from syncline.bench.planning import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    result = json.loads(done.stdout.splitlines()[-1])
    bench.row("plan: Kimi-K2 shapes, 256 ranks (8 x 32) to 4 x 32", [result.pop("seconds")], nbytes=0, integrity=None, **result)


async def run_async(bench: Bench) -> None:
    """The suites that move bytes."""
    if "shm" in bench.args.suites:
        for landing in ("mapped", "streamed", "staged"):
            for count in (1, 2):
                await shm_row(bench, landing, count)
    if "gloo" in bench.args.suites:
        await gloo_rows(bench)
    if "direct" in bench.args.suites:
        from .direct import direct_rows

        await direct_rows(bench)
    if "vllm" in bench.args.suites:
        from .vllm_row import vllm_rows

        await vllm_rows(bench)


def main(args: RunArgs) -> int:
    """Entry point of the command line."""
    bench = Bench(args)
    bench.memcpy()
    import uvloop

    uvloop.run(run_async(bench))
    if "driver" in args.suites:
        driver_row(bench)
    if "plan" in args.suites:
        plan_row(bench)
    return 0


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
