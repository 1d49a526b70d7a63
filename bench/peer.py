"""One process of a measurement: a receiver, or one rank of a source. Started by `syncline bench run`, not by users.

Commands come in as JSON lines on standard input, answers go out as JSON lines on standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
import uvloop
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.named_box import BoxTable
from syncline.adapters.trainers import FSDPSource, ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine

from .shards import Shards


@dataclass(frozen=True, kw_only=True)
class PeerArgs:
    """Arguments of one peer process."""

    role: Literal["receiver", "source", "tp-receiver", "tp-source"]
    tensors: int = 40
    nbytes: int = 409_600_000
    address: str = "tcp://127.0.0.1:0"
    movable: bool = False
    rank: int = 0
    world_size: int = 1
    store: Path | None = None
    leader: str | None = None
    targets: tuple[str, ...] = ()


class Weights(nn.Module):
    """``tensors`` float32 matrices of ``nbytes`` bytes in all."""

    def __init__(self, tensors: int, nbytes: int) -> None:
        super().__init__()
        rows = nbytes // 4 // tensors // 1024
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(rows, 1024)) for _ in range(tensors))

    @torch.no_grad()
    def stamp(self, version: int) -> None:
        """Fill with content that depends on version, tensor and element, computable by anyone."""
        for number, tensor in enumerate(self.layers):
            torch.arange(tensor.numel(), out=tensor.view(-1)).add_(version * 7 + number)

    def is_stamped(self, version: int) -> bool:
        """Whether every element is what `stamp` of ``version`` writes."""
        return all(
            torch.equal(tensor.detach().view(-1), torch.arange(tensor.numel(), dtype=torch.float32).add_(version * 7 + number))
            for number, tensor in enumerate(self.layers)
        )


def say(**fields: Any) -> None:
    """One answer to the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def commands() -> Any:
    """Commands of the parent, one JSON object a line, until it closes the pipe."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


def times(work: Callable[[], object], repeat: int) -> list[float]:
    """Seconds of each of ``repeat`` calls."""
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def broadcast_group(path: str, rank: int, size: int) -> dist.ProcessGroupGloo:
    """A gloo group of rank 0 of the source and the receivers, as a naive implementation makes it."""
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]  # public, but not listed as such
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=120))


def broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Blocking broadcast from the group's rank 0."""
    group.broadcast([tensor], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]  # missing in torch's stubs


async def receiver(args: PeerArgs) -> None:
    """A target of one rank over plain tensors."""
    model = Weights(args.tensors, args.nbytes)
    async with Receiver(loader=ModuleLoader(model, movable=args.movable), listen=args.address) as target:
        say(address=target.address)
        async for command in commands():
            if command["do"] == "verify":
                say(ok=await asyncio.to_thread(model.is_stamped, command["version"]), state=target.state)
            elif command["do"] == "naive":
                await asyncio.to_thread(_receive_naively, model, command)
                say(ok=True)


def _receive_naively(model: Weights, command: dict[str, Any]) -> None:
    group = broadcast_group(command["store"], command["rank"], command["size"])
    received = torch.empty_like(model.layers[0])
    for _ in range(command["repeat"]):
        for tensor in model.layers:
            broadcast(group, received)
            tensor.data.copy_(received)


async def source(args: PeerArgs) -> None:
    """One rank of an FSDP2 source."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    model = Weights(args.tensors, args.nbytes)
    model.stamp(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (args.world_size,)))
    say(ready=True)
    async for command in commands():
        if command["do"] == "push":
            say(**await _push_repeatedly(FSDPSource(model), command))
        elif command["do"] == "naive":
            say(seconds=await asyncio.to_thread(_send_naively, model, args.rank, command))
    dist.destroy_process_group()


async def tp_receiver(args: PeerArgs) -> None:
    """One rank of a tensor-parallel target over plain tensors."""
    model = Shards(args.tensors, args.nbytes, rank=args.rank, size=args.world_size)
    loader = ModuleLoader(model, layout=model.boxes)
    async with Receiver(
        loader=loader, listen=args.address, rank=args.rank, world_size=args.world_size, leader=args.leader
    ) as target:
        say(address=target.address)
        async for command in commands():
            if command["do"] == "verify":
                say(ok=await asyncio.to_thread(model.is_stamped, command["version"]), state=target.state)
            elif command["do"] == "clear":
                await asyncio.to_thread(model.clear)
                say(ok=True)
            elif command["do"] == "naive":
                await asyncio.to_thread(_receive_slices_naively, model, command)
                say(ok=True)


@torch.no_grad()
def _receive_slices_naively(model: Shards, command: dict[str, Any]) -> None:
    group = broadcast_group(command["store"], command["rank"], command["size"])
    received = torch.empty(next(iter(model.boxes.values())).shape)
    for _ in range(command["repeat"]):
        for name, tensor in model.named_parameters():
            broadcast(group, received)
            tensor.copy_(received[model.slices(name)])


async def tp_source(args: PeerArgs) -> None:
    """One rank of a trainer that is sharded as tensor-parallel ones are."""
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    model = Shards(args.tensors, args.nbytes, rank=args.rank, size=args.world_size)
    model.stamp(1)
    say(ready=True)
    async for command in commands():
        if command["do"] == "push":
            source = ModuleSource(model, names=BoxTable(model.boxes))
            say(**await _push_repeatedly(source, command))
        elif command["do"] == "naive":
            say(seconds=await asyncio.to_thread(_gather_and_broadcast, model, args.rank, command))
    dist.destroy_process_group()


def _gather_and_broadcast(model: Shards, rank: int, command: dict[str, Any]) -> list[float]:
    """What people write first: every rank gathers each tensor whole, and rank 0 broadcasts it."""
    group = broadcast_group(command["store"], 0, command["size"]) if rank == 0 else None

    def push() -> None:
        for number, tensor in enumerate(model.parameters()):
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor.detach())
            if group is not None:
                broadcast(group, torch.cat(parts, dim=number % 2))

    return times(push, command["repeat"])


async def _push_repeatedly(source: ModuleSource, command: dict[str, Any]) -> dict[str, Any]:
    config = TransferConfig(**command["config"])
    targets = [RemoteTarget(address) for address in command["targets"]]
    async with TransferEngine(source=source, targets=targets, config=config) as engine:
        return await measure(engine, command["repeat"], first=command.get("first", 1))


async def measure(engine: TransferEngine, repeat: int, *, first: int = 1) -> dict[str, Any]:
    """Push ``repeat`` versions of unchanged content, from ``first`` on; what each took."""
    seconds: list[float] = []
    reports = []
    for version in range(first, first + repeat):
        began = time.perf_counter()
        reports.append(await engine.push(version))
        seconds.append(time.perf_counter() - began)
    last = reports[-1]
    return {
        "seconds": seconds,
        "ok": all(report.ok for report in reports),
        "bytes": last.bytes,
        "tasks": last.tasks,
        "peak_tmp_bytes": max(report.peak_tmp_bytes for report in reports),
        "landing_bytes": last.landing_bytes,
        "busy_s": {name: stage.busy_s for name, stage in last.stages.items()},
        "gather_messages": last.routing.messages,
    }


def _send_naively(model: nn.Module, rank: int, command: dict[str, Any]) -> list[float]:
    """What people write first: gather each tensor whole, and broadcast it from rank 0."""
    group = broadcast_group(command["store"], 0, command["size"]) if rank == 0 else None

    def push() -> None:
        for tensor in model.parameters():
            whole = tensor.full_tensor()  # type: ignore[attr-defined]  # a DTensor
            if group is not None:
                broadcast(group, whole.detach())

    return times(push, command["repeat"])


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of one peer process."""
    args = tyro.cli(PeerArgs, args=argv)
    torch.set_num_threads(1)
    roles = {"receiver": receiver, "source": source, "tp-receiver": tp_receiver, "tp-source": tp_source}
    uvloop.run(roles[args.role](args))


if __name__ == "__main__":
    main()
