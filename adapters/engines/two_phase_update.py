"""One update from a source that speaks only the two-phase document: received into temporary memory, then pushed on.

Whole tensors come by broadcast, in the order in which they were announced, and stay in memory of their own. What is there
then is a source like any other, of one rank, and a `TransferEngine` pushes it into the target: plan, proof, digests, votes,
pause, commit and fence are those of every push, for any number of ranks and any loader.

    checked ──▶ receiving ──▶ received ──▶ applying ──▶ over
                    │             │
                    └──── failed ─┘  (the target never heard of it: its old version goes on)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from syncline.adapters.trainers.module import ModuleSource
from syncline.engine import RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import PlanError, ProtocolError, PushError, SynclineError, TargetLost, VersionConflict
from syncline.engine.report import TargetReport
from syncline.stages.completions import Signal

from ..names import NameMap
from .two_phase_memory import Arena
from .two_phase_messages import Announced
from .update_group import UpdateGroup

_ATTEMPTS = 3


class Update:
    """An update under way. Made by the service, which asks for one step after the other.

    Args:
        tensors: what comes, in order.
        buckets: number of buckets.
        names: a `NameMap` for tensors that the source names otherwise than checkpoints do.
    """

    def __init__(self, tensors: Sequence[Announced], buckets: int, names: NameMap | None) -> None:
        self._tensors = tensors
        self._buckets = buckets
        self._names = names
        self._arena: Arena | None = None
        self._engine: TransferEngine | None = None
        self._arrivals: list[Signal[None]] = []
        self._receiving: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self.completing = False
        """A complete has come: it waits for the last tensor, or applies them. Set by the service."""
        self.applying = False
        self.error = ""
        """Why it failed; empty while it has not."""

    async def check(self, target: RemoteTarget, config: TransferConfig) -> None:
        """Plan the way into the target and prove it. Raises what does not fit: `PlanError` lists everything."""
        self._arena = Arena(self._tensors)
        source = ModuleSource(self._arena.weights, world_size=1, names=self._names)
        self._engine = TransferEngine(source=source, targets=[target], config=config)
        await self._engine.connect()

    def start(self, group: UpdateGroup, timeout_s: float, failed: Callable[[Update], None]) -> None:
        """Begin to receive. From here on broadcasts are taken as they come.

        Args:
            timeout_s: longest time between two tensors, and from the last one to complete.
            failed: called once the update has failed; not by `give_up`.
        """
        assert self._arena is not None
        memory = zip(self._arena.weights.values(), self._arena.rooms, strict=True)
        self._arrivals = [group.broadcast(tensor, patience_s=timeout_s, room=room) for tensor, room in memory]
        self._receiving = asyncio.create_task(self._receive(timeout_s, failed), name="syncline-two-phase-receive")

    async def _receive(self, timeout_s: float, failed: Callable[[Update], None]) -> None:
        try:
            for index, arrival in enumerate(self._arrivals):
                await self._arrived(index, arrival)
        except SynclineError as error:
            await self._fail(f"{type(error).__name__}: {error}", failed)
            return
        reason = f"the source did not complete its update within {timeout_s:g} s of its last broadcast"
        self._expiry = asyncio.get_running_loop().call_later(timeout_s, self._expire, reason, failed)

    async def _arrived(self, index: int, arrival: Signal[None]) -> None:
        try:
            await arrival
        except SynclineError as error:
            raise PushError(f"{self._tensors[index]} did not come: {error}") from error
        assert self._arena is not None
        self._arena.check(index)

    def _expire(self, reason: str, failed: Callable[[Update], None]) -> None:
        if not self.completing:
            self._receiving = asyncio.create_task(self._fail(reason, failed), name="syncline-two-phase-expire")

    async def _fail(self, reason: str, failed: Callable[[Update], None]) -> None:
        self.error = reason
        await self._release()
        failed(self)

    @property
    def buckets_received(self) -> int:
        """Buckets of which every tensor has come."""
        missing = {
            tensor.bucket
            for tensor, arrival in zip(self._tensors, self._arrivals, strict=True)
            if not arrival.done or arrival.error is not None
        }
        return self._buckets - len(missing)

    async def received(self, timeout_s: float) -> bool:
        """Wait until everything has come, or it is clear that it won't. False if that took too long."""
        if self._receiving is None:  # it was given up
            return True
        done, _ = await asyncio.wait({self._receiving}, timeout=timeout_s)
        return bool(done)

    async def apply(self, next_version: Callable[[], Awaitable[int]], *, flush_cache: bool) -> TargetReport:
        """Push what was received into the target. The report says what became of it.

        Args:
            next_version: a version that the target has not had.
            flush_cache: drop cached keys and values, too.

        Raises:
            SynclineError: the push failed as a whole.
        """
        self.applying = True
        if self._expiry is not None:
            self._expiry.cancel()
        engine = self._engine
        assert engine is not None
        for last in [False] * (_ATTEMPTS - 1) + [True]:
            try:
                report = await engine.push(await next_version(), flush_cache=flush_cache)
            except VersionConflict:  # somebody else has just used this number
                if last:
                    raise
                continue
            (target,) = report.targets.values()
            # Another source has linked with the target since, or it has restarted: the next attempt links anew.
            if target.ok or last or not isinstance(target.error, (PlanError, ProtocolError, TargetLost)):
                return target
        raise AssertionError("unreachable")

    async def give_up(self, reason: str) -> None:
        """End it, and let all memory go."""
        failing, self.error = bool(self.error), self.error or reason
        task, self._receiving = self._receiving, None
        if task is not None:
            if not failing:  # else it is letting everything go already
                task.cancel()
            await asyncio.wait({task})
        await self._release()

    async def _release(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(SynclineError):
                await engine.close()
        self._arena = None
