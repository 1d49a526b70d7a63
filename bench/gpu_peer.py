"""One process of a measurement on a GPU: one rank of a source or of a target. Started by `syncline.bench.gpu_bed`.

Commands come in as JSON lines on standard input, answers go out as JSON lines on standard output. With ``--device cpu`` the
same runs without a GPU: so the measurement itself is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
import tyro
import uvloop
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.named_box import BoxTable, named_box
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.scheduler.errors import SynclineError
from syncline.scheduler.formats import parse_format
from syncline.stages.kernels.plain import quantize

from .measure.pushes import Push, Pushes, error_text, push_repeatedly

FORMAT = "fp8_e4m3:128x128"
_SEED_STEP = 1_000_003

Place = Literal["device", "padded", "pinned", "host"]
"""Where a source keeps its weights: on the device, there in rows with room between them (so that they have to be gathered), in
page-locked memory, in ordinary memory."""


@dataclass(frozen=True, kw_only=True)
class PeerArgs:
    """Arguments of one peer process."""

    role: Literal["source", "target"]
    device: str = "cuda"
    tensors: int = 4
    rows: int = 256
    columns: int = 512
    place: Place = "device"
    fp8: bool = False
    """The target holds FP8 codes and scales."""
    rank: int = 0
    world_size: int = 1
    store: Path | None = None
    address: str = ""


class Command(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the parent asks for.

    Attributes:
        do: ``push``, ``verify`` or ``facts``.
        content: which content is pushed, or expected.
        repeat: pushes. first: version of the first of them.
        config: knobs of `TransferConfig`. targets: addresses.
        keep: go on with the engine of the last such command, and leave it open; end at the first push that is not committed.
    """

    do: Literal["push", "verify", "facts"]
    content: int = 0
    repeat: int = 1
    first: int = 1
    config: dict[str, Any] = {}
    targets: tuple[str, ...] = ()
    keep: bool = False


class Facts(msgspec.Struct, kw_only=True):
    """What a process holds.

    Attributes:
        device_bytes, device_peak_bytes: of torch's allocator: now, and the most since the last question (after pushes: the
            most above what there was before them).
        pinned_bytes: page-locked memory of torch's allocator.
        descriptors, threads: of the process.
    """

    device_bytes: int = 0
    device_peak_bytes: int = 0
    pinned_bytes: int = 0
    descriptors: int = 0
    threads: int = 0

    @classmethod
    def here(cls, device: torch.device) -> Facts:
        """Of this process, when what nobody uses any more is gone."""
        gc.collect()
        facts = cls(
            descriptors=len(list(Path("/proc/self/fd").iterdir())), threads=len(list(Path("/proc/self/task").iterdir()))
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            facts.device_bytes = torch.cuda.memory_allocated(device)
            facts.device_peak_bytes = torch.cuda.max_memory_allocated(device)
            facts.pinned_bytes = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
            torch.cuda.reset_peak_memory_stats(device)
        return facts


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came of it."""

    address: str = ""
    pid: int = 0
    ok: bool = False
    state: str = ""
    pushes: Pushes | None = None
    facts: Facts | None = None


class Weights(nn.Module):
    """Matrices ``layers.N.weight``, and beside each its scales if they are held as FP8."""

    def __init__(self, args: PeerArgs) -> None:
        super().__init__()
        self.device = torch.device(args.device)
        self.args = args
        self.layers = nn.ModuleList(self._layer() for _ in range(args.tensors))

    def fill(self, content: int) -> None:
        """Write a content into the weights."""
        start = self.rows * self.args.rank if self.sharded else 0
        for index in range(self.args.tensors):
            own = self._held(index, "weight")
            own.copy_(self.made(index, content)[start : start + own.shape[0]])
        self._synchronize()

    def is_filled(self, content: int) -> bool:
        """Whether every element is that of a content: bit for bit, codes and scales as the format defines them."""
        for index in range(self.args.tensors):
            made = self.made(index, content)
            if self.args.fp8:
                codes, scales = quantize(made, parse_format(FORMAT))
                same = _same(self._held(index, "weight"), codes)
                same = same and _same(self._held(index, "weight_scale_inv"), scales.float())
            else:
                same = _same(self._held(index, "weight"), made)
            if not same:
                return False
        return True

    def made(self, index: int, content: int) -> torch.Tensor:
        """The reference: a whole matrix of a content, bf16."""
        generator = torch.Generator(self.device).manual_seed(content * _SEED_STEP + index)
        shape = (self.args.rows, self.args.columns)
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=self.device)

    @property
    def sharded(self) -> bool:
        """Each rank of a source holds some of the rows."""
        return self.args.role == "source" and self.args.world_size > 1

    @property
    def rows(self) -> int:
        """That this rank holds."""
        return self.args.rows // self.args.world_size if self.sharded else self.args.rows

    def boxes(self) -> BoxTable:
        """Which rows of each matrix this rank holds."""
        shape, start, size = (
            (self.args.rows, self.args.columns),
            (self.rows * self.args.rank, 0),
            (self.rows, self.args.columns),
        )
        names = [f"layers.{index}.weight" for index in range(self.args.tensors)]
        return BoxTable({name: named_box(name, shape, start=start, size=size) for name in names})

    def _held(self, index: int, name: str) -> torch.Tensor:
        return self.get_parameter(f"layers.{index}.{name}").data

    def _layer(self) -> nn.Module:
        layer, args = nn.Module(), self.args
        if args.role == "target" and args.fp8:
            codes = torch.zeros(args.rows, args.columns, dtype=torch.uint8, device=self.device).view(torch.float8_e4m3fn)
            layer.weight = nn.Parameter(codes, requires_grad=False)
            scales = torch.zeros(-(-args.rows // 128), -(-args.columns // 128), device=self.device)
            layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        else:
            layer.weight = nn.Parameter(self._memory(), requires_grad=False)
        return layer

    def _memory(self) -> torch.Tensor:
        shape, place = (self.rows, self.args.columns), self.args.place if self.args.role == "source" else "device"
        if place == "padded":
            room = torch.empty(shape[0], shape[1] + 64, dtype=torch.bfloat16, device=self.device)
            return room[:, : shape[1]]
        if place == "device" or self.device.type == "cpu":
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return torch.empty(shape, dtype=torch.bfloat16, pin_memory=place == "pinned")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def say(answer: Answer) -> None:
    """One answer to the parent."""
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


async def commands() -> AsyncIterator[Command]:
    """Commands of the parent, one JSON object a line, until it closes the pipe."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield msgspec.json.decode(line, type=Command)


async def target(args: PeerArgs) -> None:
    """The one rank of a target."""
    model = Weights(args)
    async with Receiver(loader=ModuleLoader(model), listen=args.address) as receiver:
        say(Answer(address=receiver.address, pid=os.getpid()))
        async for command in commands():
            if command.do == "facts":
                say(Answer(facts=Facts.here(model.device)))
                continue
            ok = await asyncio.to_thread(model.is_filled, command.content)
            say(Answer(ok=ok, state=receiver.state))


async def source(args: PeerArgs) -> None:
    """One rank of a source."""
    model = Weights(args)
    with _group(args):
        weights = ModuleSource(model, names=model.boxes()) if model.sharded else ModuleSource(model)
        kept = Kept(weights)
        say(Answer(pid=os.getpid()))
        async for command in commands():
            if command.do == "facts":
                say(Answer(facts=Facts.here(model.device)))
                continue
            await asyncio.to_thread(model.fill, command.content)
            before = Facts.here(model.device)
            pushes = await kept.push(command) if command.keep else await _push(weights, command)
            after = Facts.here(model.device)
            after.device_peak_bytes -= before.device_bytes
            say(Answer(pushes=pushes, facts=after))
        await kept.close()


class Kept:
    """An engine that is used by several commands."""

    def __init__(self, weights: ModuleSource) -> None:
        self._weights = weights
        self._engine: TransferEngine | None = None

    async def push(self, command: Command) -> Pushes:
        """Push until one is not committed, at most ``repeat`` times. Errors of ours are results."""
        reports: list[Push] = []
        try:
            if self._engine is None:
                targets = [RemoteTarget(address) for address in command.targets]
                self._engine = TransferEngine(source=self._weights, targets=targets, config=TransferConfig(**command.config))
                await self._engine.connect()
            for version in range(command.first, command.first + command.repeat):
                began = time.perf_counter()
                reports.append(Push.of(await self._engine.push(version), time.perf_counter() - began))
                if not reports[-1].ok:
                    break
        except SynclineError as raised:
            return Pushes(reports=tuple(reports), error=error_text(raised))
        return Pushes(reports=tuple(reports))

    async def close(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            await self._engine.close()


async def _push(weights: ModuleSource, command: Command) -> Pushes:
    targets = [RemoteTarget(address) for address in command.targets]
    try:
        engine = TransferEngine(source=weights, targets=targets, config=TransferConfig(**command.config))
    except SynclineError as refused:
        return Pushes(error=error_text(refused))
    return await push_repeatedly(engine, command.repeat, first=command.first)


@contextlib.contextmanager
def _group(args: PeerArgs) -> Iterator[None]:
    """The trainer's own process group, where there are several ranks."""
    if args.world_size == 1:
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of one peer process."""
    args = tyro.cli(PeerArgs, args=argv)
    torch.set_num_threads(1)
    if args.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device))
    uvloop.run({"source": source, "target": target}[args.role](args))


if __name__ == "__main__":
    main()
