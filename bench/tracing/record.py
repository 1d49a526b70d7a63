"""``syncline bench trace``: push once more, between real processes of this machine, and keep the trace; or merge traces."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import FSDPSource, ModuleSource
from syncline.bench.endings import tied
from syncline.bench.outputs import check_outputs
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ConfigError
from syncline.engine.trace import Trace, merged_json

from .explain import Explanation

_PATIENCE_S = 600.0
_END_S = 10.0
_WIDTH = 1024


@dataclass(frozen=True, kw_only=True)
class TraceArgs:
    """Record the trace of a push on this machine, or merge traces into one file."""

    merge: tuple[Path, ...] = ()
    """Traces to put into one file, instead of recording one."""
    out: Path = Path("trace.json")
    """Where the trace goes; opens in Perfetto, and `syncline bench explain` reads it (not merged ones)."""
    ranks: int = 2
    """Ranks of the source, each a process of its own: FSDP2, or a plain module if it is one."""
    targets: int = 1
    """Targets, each a process of its own."""
    mebibytes: int = 128
    """Size of the weights (float32 matrices)."""
    pushes: int = 3
    """Pushes; the last one is kept. The first makes memory and links warm."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    landing: Literal["staged", "streamed", "mapped"] = "staged"
    route: Literal["auto", "gather", "direct"] = "auto"
    max_tmp_bytes: str = "64MiB"
    bucket_bytes: str | None = None
    h2d_concurrency: int = 2
    prepare_concurrency: int = 2
    send_concurrency: int = 2

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("ranks", "targets", "mebibytes", "pushes")
            if getattr(self, name) < 1
        ]
        if problems:
            raise ConfigError(problems)

    def config(self) -> TransferConfig:
        """The knobs of the push."""
        return TransferConfig(
            transport=self.transport, landing=self.landing, route=self.route, max_tmp_bytes=self.max_tmp_bytes,
            bucket_bytes=self.bucket_bytes, h2d_concurrency=self.h2d_concurrency,
            prepare_concurrency=self.prepare_concurrency, send_concurrency=self.send_concurrency, push_timeout_s=_PATIENCE_S,
        )  # fmt: skip


class Part(msgspec.Struct, kw_only=True):
    """What one process of the recording is told."""

    role: Literal["source", "target"]
    rank: int
    args: TraceArgs
    folder: Path

    def address(self, target: int) -> str:
        return f"unix:{self.folder}/target-{target}.sock"


def main(args: TraceArgs) -> int:
    """Entry point of the command line."""
    check_outputs(args.out)
    if args.merge:
        args.out.write_text(merged_json([Trace.load(path) for path in args.merge]))
        print(f"{len(args.merge)} traces merged into {args.out}")
        return 0
    args.config()
    asyncio.run(record(args))
    print(Explanation.of(Trace.load(args.out)))
    print(f"\nwritten: {args.out}")
    return 0


async def record(args: TraceArgs) -> None:
    """Run the processes; the trace is in ``args.out`` when they have ended. Raises `ConfigError` with what one of them said."""
    with tempfile.TemporaryDirectory(prefix="syncline-trace-") as name:
        folder = Path(name)
        parts = [Part(role="target", rank=target, args=args, folder=folder) for target in range(args.targets)]
        parts += [Part(role="source", rank=rank, args=args, folder=folder) for rank in range(args.ranks)]
        processes: list[asyncio.subprocess.Process] = []
        try:
            for part in parts:
                if part.role == "source" and part.rank == 0:  # an engine does not wait for targets that are not there yet
                    await asyncio.gather(*(listening(process) for process in processes))
                processes.append(await start(part))
            async with asyncio.timeout(_PATIENCE_S):
                said = await asyncio.gather(*(_ended(process) for process in processes[args.targets :]))
        finally:
            await asyncio.gather(*(end(process) for process in processes))
        failed = [text for code, text in said if code != 0]
        if failed:
            raise ConfigError([f"a rank of the recording failed:\n{text[-3000:]}" for text in failed])


async def start(part: Part) -> asyncio.subprocess.Process:
    """A process of a recording. A target's says on its standard output when it is `listening`."""
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-m", "syncline.bench.tracing.record"]),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE if part.role == "target" else None,
        stderr=asyncio.subprocess.PIPE if part.role == "source" else None,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(part, enc_hook=str) + b"\n")
    return process


async def listening(target: asyncio.subprocess.Process) -> None:
    """Wait until a target may be connected to. Raises `ConfigError` if its process ends before that."""
    assert target.stdout is not None
    async with asyncio.timeout(_PATIENCE_S):
        if not await target.stdout.readline():
            raise ConfigError(["a target of the recording ended before it could be connected to; its output says why"])


async def _ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    assert process.stderr is not None
    said = await process.stderr.read()
    return await process.wait(), said.decode(errors="replace")


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process of a recording."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def model_of(args: TraceArgs) -> nn.Module:
    """Matrices of about so many bytes in all."""
    count = max(1, args.mebibytes * 2**20 // (4 * _WIDTH * _WIDTH))
    return nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)])


async def serve(part: Part) -> None:
    """One target: receives until it is told to end."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    loader = ModuleLoader(model_of(part.args), movable=part.args.landing == "mapped")
    async with Receiver(loader, part.address(part.rank)):
        print("listening", flush=True)
        await stop.wait()


async def push(part: Part) -> None:
    """One rank of the source."""
    args, model = part.args, model_of(part.args)
    if args.ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (args.ranks,)))
    source = FSDPSource(model) if args.ranks > 1 else ModuleSource(model)
    targets = [RemoteTarget(part.address(target)) for target in range(args.targets)]
    async with TransferEngine(source=source, targets=targets, config=args.config()) as engine:
        for version in range(1, args.pushes):
            await engine.push(version)
        report = await engine.push(args.pushes)
    if part.rank == 0 and report.trace is not None:
        report.trace.save(args.out)


def run_part() -> None:
    """Entry point of one process of a recording (not for users)."""
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=Part, dec_hook=lambda kind, value: kind(value))
    torch.set_num_threads(1)
    if part.role == "target":
        asyncio.run(serve(part))
        return
    store = f"file://{part.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=part.rank, world_size=part.args.ranks)
    try:
        asyncio.run(push(part))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_part()
