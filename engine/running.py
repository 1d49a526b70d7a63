"""The pipeline of one push on one rank: from the targets' ``ready`` to this rank's ``done``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from syncline.scheduler.driver import PushOutcome
from syncline.scheduler.errors import AllTargetsLost
from syncline.scheduler.events import Cancelled, TargetLost

from .errors import PushTimeout, SynclineError
from .steps import Done, HeadNote, Outcome, Start
from .trace import STAGES
from .trace_log import RankLog
from .wiring import Wiring

_LOOKS_PER_TIMEOUT = 8
_STALE_LOOKS = 3


class PushRun:
    """Runs the driver for one push, and takes what happens meanwhile: lost targets, an abort from elsewhere.

    Args:
        attempt: counts pushes of this engine; the driver's push id.
        start: who takes part (rank 0's decision).
        wiring: the plan's stages and links on this rank.
        unless_aborted: runs what it is given, but no longer than until another rank has failed; then it raises that error.
        report_loss: called on the loop with a target that this rank cannot reach any more.
        tell_head: called from time to time with what this rank has still to send; rank 0 gives it to `heard_head`.
        log: makes what the trace needs of the pipeline's outcome; None when tracing is off.

    Attributes:
        lost: target -> reason, as rank 0 decided.
    """

    def __init__(
        self,
        attempt: int,
        version: int,
        start: Start,
        *,
        wiring: Wiring,
        unless_aborted: Callable[[Coroutine[Any, Any, None]], Awaitable[None]],
        report_loss: Callable[[int, SynclineError], None],
        tell_head: Callable[[HeadNote], None],
        log: Callable[[PushOutcome | None], RankLog] | None = None,
    ) -> None:
        self.version = version
        self.lost: dict[int, str] = {}
        self._attempt = attempt
        self._start = start
        self._wiring = wiring
        self._unless_aborted = unless_aborted
        self._called_off: SynclineError | None = None
        self._report_loss = report_loss
        self._tell_head = tell_head
        self._heads: dict[int, tuple[float, HeadNote]] = {}
        self._reported: set[int] = set()
        self._began = time.perf_counter()
        self._log = log
        self._free_s = 0.0
        self._finish: Callable[[bytes], Awaitable[bytes]] | None = None
        self._decision = b""
        self._deciding = False

    async def run(
        self, deadline_s: float, on_source_free: Callable[[], None], finish: Callable[[bytes], Awaitable[bytes]]
    ) -> Outcome:
        """Run to the end. ``finish`` contributes this rank's `Done` and returns rank 0's decision, an `Outcome`."""
        self._finish = finish

        def source_free() -> None:
            self._free_s = time.perf_counter() - self._began
            on_source_free()

        if not self._start.live and not self._start.already:
            source_free()
            return self._decided(await finish(self._done(None)))
        until = time.monotonic() + deadline_s
        outcome: Outcome | None = None
        try:
            await self._begin(deadline_s)
            if self._live() or self._start.already:
                outcome = await self._watched(max(0.0, until - time.monotonic()), source_free)
            else:
                source_free()
                outcome = self._decided(await finish(self._done(None)))
        finally:
            await self._end(outcome)
        return outcome

    async def _begin(self, deadline_s: float) -> None:
        """Begin on this rank, unless the push is called off meanwhile: a device may take its time before it can be read."""
        beginning = self._wiring.begin(self._attempt, self._start.live, timeout_s=deadline_s, on_lost=self._noticed)
        await self._unless_aborted(beginning)
        if self._called_off is not None:
            raise self._called_off

    def _live(self) -> frozenset[int]:
        """Targets that get anything: those that were lost before the pipeline started are not even told to it."""
        return frozenset(self._start.live).difference(self.lost)

    async def _watched(self, deadline_s: float, source_free: Callable[[], None]) -> Outcome:
        try:
            async with asyncio.TaskGroup() as scope:
                watch = scope.create_task(self._watch_progress())
                try:
                    return await self._drive(deadline_s, source_free)
                finally:
                    watch.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the watch never raises: there is one error, and it is the push's

    async def _end(self, outcome: Outcome | None) -> None:
        """Links of targets that committed stay; those of all others are made anew before the next push."""
        good = {index for index, target in enumerate(outcome.targets) if target.ok} if outcome else set()
        await self._wiring.end(good)  # also those that held this version already: nothing was sent to them, their links stand
        self._wiring.drop_targets(set(self._start.live) - good)

    async def _drive(self, deadline_s: float, source_free: Callable[[], None]) -> Outcome:
        driver, live = self._wiring.driver, self._live()
        try:
            await driver.run(
                self._attempt,
                self._wiring.specs(live),
                self._wiring.program.groups,
                live | frozenset(self._start.already),
                collect_votes=self._collect_votes,
                deadline_s=deadline_s,
                on_source_free=source_free,
            )
        except AllTargetsLost:
            # Nobody is left to send to. That is a result like another: every target is reported with what befell it.
            assert self._finish is not None
            self._decision = await self._finish(self._done(driver.snapshot()))
        return self._decided(self._decision)

    @staticmethod
    def _decided(payload: bytes) -> Outcome:
        return msgspec.msgpack.decode(payload, type=Outcome)

    async def _collect_votes(self) -> None:
        assert self._finish is not None
        self._deciding = True
        self._decision = await self._finish(self._done(self._wiring.driver.snapshot()))

    def drop(self, target: int, at_task: int, reason: str) -> None:
        """Rank 0 decided that ``target`` is lost."""
        if target in self.lost:
            return
        self.lost[target] = reason
        self._wiring.drop_targets([target])
        if self._deciding:
            return  # every send has ended; rank 0 hears of the loss with the votes, and a second decision is not to be had
        driver = self._wiring.driver
        driver.post(TargetLost(now=driver.clock(), target=target, at_task=at_task, reason=reason))

    def abort(self, error: SynclineError) -> None:
        """Another rank failed, or went away: leave the push with its error."""
        self._called_off = self._called_off or error
        driver = self._wiring.driver
        driver.post(Cancelled(now=driver.clock(), reason=str(error), error=error))

    def _noticed(self, target: int, error: SynclineError) -> None:
        if target not in self._reported:
            self._reported.add(target)
            self._report_loss(target, error)

    async def _watch_progress(self) -> None:
        """A target that takes nothing for ``target_timeout_s`` while it holds up the others is lost."""
        timeout_s = self._wiring.config.target_timeout
        pause_s = timeout_s / _LOOKS_PER_TIMEOUT
        while True:
            await asyncio.sleep(pause_s)
            task, waits = self._wiring.head() or (None, {})
            self._tell_head(
                HeadNote(
                    attempt=self._attempt,
                    rank=self._wiring.program.rank,
                    task=task,
                    waits={str(target): seconds for target, seconds in waits.items()},
                )
            )
            for target, waited_s in self._holding_up(_STALE_LOOKS * pause_s).items():
                if waited_s > timeout_s and target not in self.lost:
                    limit = f"it took no byte for {waited_s:.3g} s (target_timeout_s is {timeout_s:g})"
                    self._noticed(target, PushTimeout(limit))

    def heard_head(self, note: HeadNote) -> None:
        """Rank 0: what a rank has still to send."""
        self._heads[note.rank] = (time.monotonic(), note)

    def _holding_up(self, stale_s: float) -> dict[int, float]:
        """Rank 0: targets that the first unsent task of all ranks waits for, with the seconds.

        Every target takes tasks in plan order: these wait for nothing else. A target that a later task waits for may itself
        be waiting behind them, for a task that another rank cannot send yet; it is not to blame.
        """
        oldest = time.monotonic() - stale_s
        notes = [note for at, note in self._heads.values() if at >= oldest]
        if len(notes) < self._wiring.program.world_size:
            return {}  # a rank that says nothing may be what everybody waits for
        first = min((note for note in notes if note.task is not None), key=lambda note: note.task or 0, default=None)
        return {} if first is None else {int(target): seconds for target, seconds in first.waits.items()}

    def _done(self, outcome: PushOutcome | None) -> bytes:
        wiring = self._wiring
        done = Done(
            digests=wiring.digests(),
            peak_tmp_bytes=outcome.peak_tmp_bytes if outcome else 0,
            landing_bytes=wiring.landing_bytes,
            bytes=wiring.sent_bytes,
            source_free_s=self._free_s,
            busy_s=dict(outcome.busy_s) if outcome else {},  # type: ignore[arg-type]  # names of stages are strings
            tasks=dict(_count(outcome)),
            log=self._log(outcome) if self._log is not None else None,
        )
        return msgspec.msgpack.encode(done)


def _count(outcome: PushOutcome | None) -> Mapping[str, int]:
    counts = Counter(span.stage for span in outcome.spans) if outcome else Counter()
    return {stage: counts[stage] for stage in STAGES}
