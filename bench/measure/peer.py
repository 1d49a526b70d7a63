"""One process of a measurement: one rank of a source or of a target. Started by `syncline.bench.measure.bed`, not by users.

Commands come in as JSON lines on standard input, answers go out as JSON lines on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
import tyro
import uvloop

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.named_box import BoxTable
from syncline.adapters.trainers import FSDPSource, ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.scheduler.errors import SynclineError

from .corruption import corrupted
from .naive import receive_naively, send_naively
from .pushes import Pushes, error_text, push_repeatedly
from .shards import Shards
from .timing import times

SourceKind = Literal["module", "fsdp", "tp"]


@dataclass(frozen=True, kw_only=True)
class PeerArgs:
    """Arguments of one peer process."""

    role: Literal["source", "target"]
    kind: SourceKind = "module"
    tensors: int
    rows: int
    rank: int = 0
    world_size: int = 1
    store: Path | None = None
    """Source: where its ranks meet."""
    address: str = ""
    """Target: where it listens."""
    leader: str | None = None
    movable: bool = False


class Command(msgspec.Struct, kw_only=True):
    """What to do next. Every push of one command has the content of version ``content``.

    Attributes:
        first, repeat: versions that are pushed.
        store, place, size: of the group of naive pushes: where it meets, this process's rank in it, how many there are.
    """

    do: Literal["push", "verify", "naive"]
    content: int
    repeat: int = 1
    first: int = 1
    config: dict[str, Any] = {}
    targets: tuple[str, ...] = ()
    corrupt: bool = False
    store: str = ""
    place: int = 0
    size: int = 0


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came of it."""

    address: str = ""
    ok: bool = False
    state: str = ""
    seconds: list[float] = []
    pushes: Pushes | None = None


def say(answer: Answer) -> None:
    """One answer to the parent."""
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


async def commands() -> AsyncIterator[Command]:
    """Commands of the parent, one JSON object a line, until it closes the pipe."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield msgspec.json.decode(line, type=Command)


async def target(args: PeerArgs) -> None:
    """One rank of a target over plain tensors."""
    model = Shards(args.tensors, args.rows, rank=args.rank, size=args.world_size)
    layout = model.boxes if args.world_size > 1 else None
    loader = ModuleLoader(model, layout=layout, movable=args.movable)
    async with Receiver(
        loader=loader, listen=args.address, rank=args.rank, world_size=args.world_size, leader=args.leader
    ) as receiver:
        say(Answer(address=receiver.address))
        async for command in commands():
            if command.do == "naive":
                await asyncio.to_thread(receive_naively, model, command)
            ok = await asyncio.to_thread(model.is_stamped, command.content)
            say(Answer(ok=ok, state=receiver.state))


async def source(args: PeerArgs) -> None:
    """One rank of a source."""
    size = args.world_size if args.kind == "tp" else 1
    model = Shards(args.tensors, args.rows, rank=args.rank if size > 1 else 0, size=size)
    model.stamp(1)
    with _group(args):
        weights = _source(args.kind, model)
        say(Answer())
        async for command in commands():
            await asyncio.to_thread(model.restamp, command.content)
            if command.do == "push":
                say(Answer(pushes=await _push(weights, command)))
            elif command.do == "naive":
                send = send_naively(args.kind, model, command)
                say(Answer(seconds=await asyncio.to_thread(times, send, command.repeat)))


@contextlib.contextmanager
def _group(args: PeerArgs) -> Iterator[None]:
    """The trainer's own process group, where it has one."""
    if args.world_size == 1 and args.kind != "fsdp":
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _source(kind: SourceKind, model: Shards) -> ModuleSource:
    if kind == "module":
        return ModuleSource(model)
    if kind == "tp":
        return ModuleSource(model, names=BoxTable(model.boxes))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return FSDPSource(model)


async def _push(weights: ModuleSource, command: Command) -> Pushes:
    targets = [RemoteTarget(address) for address in command.targets]
    with corrupted() if command.corrupt else contextlib.nullcontext():
        try:
            engine = TransferEngine(source=weights, targets=targets, config=TransferConfig(**command.config))
        except SynclineError as refused:
            return Pushes(error=error_text(refused))
        return await push_repeatedly(engine, command.repeat, first=command.first)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of one peer process."""
    args = tyro.cli(PeerArgs, args=argv)
    torch.set_num_threads(1)
    uvloop.run({"source": source, "target": target}[args.role](args))


if __name__ == "__main__":
    main()
