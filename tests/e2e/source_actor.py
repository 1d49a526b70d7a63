"""One rank of a source, as a worker process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import models
import torch
import torch.distributed as dist
from actor import Actor, Points
from torch import nn

from syncline.adapters.trainers import FSDPSource, ModuleSource
from syncline.engine import PushReport, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.session import Session
from syncline.stages.barrier import GroupBarrier
from syncline.stages.prepare import PrepareStage
from syncline.stages.send import SendStage

MEET_S = 60.0


class SourceActor(Actor):
    """Holds a model and an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module
        self.source: ModuleSource
        self.engine: TransferEngine
        self.version = 0
        hook_source(self.points)

    def do_init(self, rank: int, world_size: int, store: str) -> None:
        """Join the trainer's process group."""
        limit = timedelta(seconds=MEET_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)

    def do_build(self, model: Mapping[str, Any], layout: str = "replicated", offload: bool = False) -> None:
        self.model = models.build(model)
        if isinstance(self.model, models.StampNet):
            self.model.stamp(0)
        if layout == "replicated":
            self.source = ModuleSource(self.model)
        else:
            models.shard(self.model, layout, offload=offload)
            self.source = FSDPSource(self.model)

    def do_become(self, version: int) -> None:
        """A `StampNet` becomes ``version``."""
        models.advance(self.model, version - self.version)
        self.version = version

    def do_engine(self, addresses: Sequence[str], config: Mapping[str, Any]) -> None:
        targets = [RemoteTarget(address) for address in addresses]
        self.engine = TransferEngine(
            source=_HookedSource(self.source, self.points), targets=targets, config=TransferConfig(**config)
        )

    async def do_connect(self, blocking: bool = False) -> None:
        if blocking:
            await asyncio.to_thread(self.engine.connect_blocking)
        else:
            await self.engine.connect()

    async def do_push(self, version: int, blocking: bool = False, check_free: bool = False) -> dict[str, Any]:
        began = time.monotonic()
        if blocking:
            report = await asyncio.to_thread(self.engine.push_blocking, version)
            free = True
        else:
            handle = self.engine.start_push(version)
            report = await handle.result
            free = handle.source_free.done()
        assert free or not check_free
        return {**as_json(report), "took_s": time.monotonic() - began}

    async def do_push_and_step(self, version: int) -> dict[str, Any]:
        """Push, and overwrite the weights as soon as the source is said to be free."""
        handle = self.engine.start_push(version)
        await handle.source_free
        early = not handle.result.done()
        models.advance(self.model, 1000)
        report = await handle.result
        models.advance(self.model, -1000)
        return {**as_json(report), "early": early}

    async def do_close(self, blocking: bool = False) -> None:
        if blocking:
            await asyncio.to_thread(self.engine.close_blocking)
        else:
            await self.engine.close()

    def do_leave_group(self) -> None:
        dist.destroy_process_group()

    async def do_gather_all(self) -> int:
        """The naive way, for comparison: every rank holds every whole tensor at once. Returns their bytes."""
        whole = [p.full_tensor() for p in self.model.parameters()]
        return sum(t.numel() * t.element_size() for t in whole)


def hook_source(points: Points) -> None:
    """Points ``step:…`` (before this rank contributes to a step), ``prepare``, ``send``, ``barrier`` (before it starts)."""
    exchange = Session._exchange

    async def hooked(session: Session, name: str, *rest: Any) -> bytes:
        points.hit(f"step:{name}")
        return await exchange(session, name, *rest)

    Session._exchange = hooked  # type: ignore[method-assign]
    for kind, method, point in (
        (PrepareStage, "start", "prepare"),
        (SendStage, "start", "send"),
        (GroupBarrier, "__call__", "barrier"),
    ):
        setattr(kind, method, points.before(getattr(kind, method), point))


class _HookedSource:
    """A source with the point ``manifest``."""

    def __init__(self, source: ModuleSource, points: Points) -> None:
        self._source, self._points = source, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def rank(self) -> int:
        return self._source.rank

    @property
    def world_size(self) -> int:
        return self._source.world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._source.process_group

    def manifest(self) -> Any:
        self._points.hit("manifest")
        return self._source.manifest()

    def buffers(self) -> Sequence[torch.Tensor]:
        return self._source.buffers()


def as_json(report: PushReport) -> dict[str, Any]:
    """A push report as JSON."""
    return {
        "ok": report.ok,
        "version": report.version,
        "digest": report.digest,
        "seconds": report.seconds,
        "bytes": report.bytes,
        "tasks": report.tasks,
        "peak_tmp_bytes": report.peak_tmp_bytes,
        "landing_bytes": report.landing_bytes,
        "busy_s": {name: stage.busy_s for name, stage in report.stages.items()},
        "text": str(report),
        "routing": {
            "messages": report.routing.messages,
            "moved": report.routing.moved_nbytes,
            "gathered": report.routing.gathered_tensors,
            "direct": report.routing.direct_tensors,
        },
        "targets": {
            address: {
                "ok": target.ok,
                "state": target.state,
                "version": target.version,
                "already": target.already,
                "landing_bytes": target.landing_bytes,
                "error": [kind.__name__ for kind in type(target.error).__mro__] if target.error else [],
                "message": str(target.error or ""),
            }
            for address, target in report.targets.items()
        },
    }
