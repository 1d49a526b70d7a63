"""Simulated ranks of a source: the real driver and machine, with stages that take virtual time."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.scheduler.driver import Driver, Limits, PushOutcome, TaskSpec
from syncline.scheduler.events import StageName
from syncline.scheduler.poller import SPIN_S

from .legs import Leg, Then
from .load import Share
from .receivers import Receiver
from .world import World

_NEVER_S = 1e9


class Done:
    """Implements `Completion`: ends when it is told to."""

    __slots__ = ("_callback", "_over")

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None
        self._over = False

    def poll(self) -> bool:
        return self._over

    def subscribe(self, callback: Callable[[], None]) -> bool:
        self._callback = callback
        if self._over:
            asyncio.get_running_loop().call_soon(callback)
        return True

    def end(self) -> None:
        self._over = True
        if self._callback is not None:
            self._callback()


class Looks:
    """When the driver's poller sees that work has ended: at once while it spins, at its next look when it has backed off.

    The poller itself turns the loop while it spins, which takes no virtual time; this one keeps to the same pace by timers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop, self._interval_s = loop, interval_s
        self._quick = True
        self._since = 0.0
        self._over: list[tuple[float, Callable[[], None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Work was started: the poller looks at everything at once, and begins anew."""
        self._since = self._loop.time()
        if self._over:
            self._plan(self._since)

    def ended(self, started: float, then: Callable[[], None]) -> None:
        """Work ended now that was ``started`` then. ``then`` is called when that is seen."""
        self._over.append((started, then))
        at = self._next(self._loop.time())
        if self._timer is None or self._timer.when() > at:
            self._plan(at)

    def _plan(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _next(self, now: float) -> float:
        """The first look from ``now`` on, if nothing happens before."""
        look = self._since + (SPIN_S if self._quick else 0.0)
        if now <= look:
            return now if self._quick else look
        pause = self._interval_s / 8
        while pause < self._interval_s and look + pause < now:
            look += pause
            pause = min(2 * pause, self._interval_s)
        return look + pause * max(1, math.ceil((now - look) / pause - 1e-9))

    def _look(self) -> None:
        self._timer = None
        over, self._over = self._over, []
        self._since = self._loop.time()
        for started, then in over:
            self._quick = self._since - started <= SPIN_S
            then()


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What a driver is told. ``offloaded``: the source's weights are in host memory, and go through ``h2d``."""

    limits: Limits
    poll_interval_s: float = 0.001
    offloaded: bool = False


class _Stage:
    """Implements `Stage`."""

    def __init__(self, start: Callable[[int], Done | None]) -> None:
        self.start = start


class Meeting:
    """Messages between source ranks: one moves when its sender has packed it and its owner has asked for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[tuple[int, int], list[Then]] = {}

    def join(self, task: int, rank: int, owner: int, nbytes: int, *, after: Leg, then: Then) -> None:
        """Called by both; the one that comes last gets it moving. Both hear of its end."""
        waiting = self._waiting.setdefault((task, rank), [])
        waiting.append(then)
        if len(waiting) == 2:
            del self._waiting[task, rank]

            def both(leg: Leg) -> None:
                for each in waiting:
                    each(leg)

            self._world.message(rank, owner, nbytes, task=task, after=after, then=both)


class Barriers:
    """Ends for all ranks when all have entered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, world: World, ranks: int) -> None:
        self._loop, self._world, self._ranks = loop, world, ranks
        self._entered: dict[int, list[tuple[Leg | None, Callable[[Leg], None]]]] = {}

    def enter(self, group: int, after: Leg | None, then: Callable[[Leg], None]) -> None:
        entered = self._entered.setdefault(group, [])
        entered.append((after, then))
        if len(entered) == self._ranks:
            now = self._loop.time()
            leg = Leg("barrier", "all source ranks", -1, start=now, end=now + self._world.barrier_s(), after=after)
            for _, each in entered:
                self._loop.call_at(leg.end, each, leg)


@dataclass(frozen=True, kw_only=True)
class Around:
    """What all ranks share. ``targets``: of each receiver; ``alone``: there is one rank; ``begin``: the first leg."""

    loop: asyncio.AbstractEventLoop
    world: World
    knobs: Knobs
    meeting: Meeting
    barriers: Barriers
    receivers: Sequence[Receiver]
    targets: Sequence[int]
    alone: bool
    begin: Leg


class SourceRank:
    """One rank of the source."""

    def __init__(self, rank: int, shares: Sequence[Share], around: Around) -> None:
        self.rank = rank
        self._loop, self._world, self._knobs = loop, world, knobs = around.loop, around.world, around.knobs
        self._meeting, self._barriers, self._receivers = around.meeting, around.barriers, around.receivers
        self._alone = around.alone
        self._shares = {share.index: share for share in shares}
        self.last = self._begin = around.begin
        self._ended: dict[int, Leg] = {}
        self._flying: dict[StageName, int] = {"h2d": 0, "prepare": 0, "send": 0}
        self._ring = Ring(world.ring)
        self._looks = Looks(loop, knobs.poll_interval_s)
        self.specs = tuple(spec_of(share, around.targets, offloaded=knobs.offloaded) for share in shares)
        self.driver = Driver(
            stages={"h2d": _Stage(self._h2d), "prepare": _Stage(self._prepare), "send": _Stage(self._send)},
            barrier=self._barrier,
            limits=knobs.limits,
            release=lambda _push, task: self._ring.release(task),
            drop_target=lambda _target, _at_task: None,
            poll_interval_s=knobs.poll_interval_s,
            clock=loop.time,
        )

    async def push(
        self, groups: tuple[int, ...], targets: frozenset[int], votes: Callable[[SourceRank], asyncio.Future[None]]
    ) -> PushOutcome:
        """Run the real driver through one push."""

        async def collect() -> None:
            await votes(self)

        return await self.driver.run(
            1, self.specs, groups, targets, collect_votes=collect, deadline_s=_NEVER_S, on_source_free=lambda: None
        )

    # ------------------------------------------------------------------------------------------------------- stages

    def _h2d(self, task: int) -> Done:
        done, after = self._starts("h2d", task)
        self._world.h2d(self.rank, self._shares[task], after, lambda leg: self._ends("h2d", task, leg, done, after))
        return done

    def _prepare(self, task: int) -> Done:
        done, after = self._starts("prepare", task)
        share = self._shares[task]

        def end(leg: Leg) -> None:
            self._ends("prepare", task, leg, done, after)

        if share.owner:
            self._ring.claim(task, share.nbytes, after, lambda leg: self._assemble(share, leg, end))
        else:
            self._world.pack(self.rank, share, after, lambda leg: self._contribute(share, leg, end))
        return done

    def _assemble(self, share: Share, after: Leg, end: Then) -> None:
        left = 1 + len(share.takes)

        def one(leg: Leg) -> None:
            nonlocal left
            left -= 1
            if left == 0 and share.takes:
                self._world.late(self.rank, share, leg, end)
            elif left == 0:
                end(leg)

        for peer, nbytes in share.takes:
            self._meeting.join(share.index, peer, self.rank, nbytes, after=after, then=one)
        self._world.early(self.rank, share, after, one)

    def _contribute(self, share: Share, after: Leg, end: Then) -> None:
        left = len(share.gives)

        def one(leg: Leg) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                end(leg)

        for owner, nbytes in share.gives:
            self._meeting.join(share.index, self.rank, owner, nbytes, after=after, then=one)
        if not share.gives:
            end(after)

    def _send(self, task: int) -> Done | None:
        share = self._shares[task]
        if self._world.instant:
            for receiver in share.receivers:
                self._receivers[receiver].offer(self.rank, share, self._cause("send", task), lambda _leg: None)
            return None
        done, after = self._starts("send", task)
        left = len(share.receivers)

        def one(leg: Leg) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._ends("send", task, leg, done, after)

        for receiver in share.receivers:
            self._receivers[receiver].offer(self.rank, share, after, one)
        return done

    def _barrier(self, group: int) -> Done | None:
        if self._alone:
            return None
        done, began = Done(), self._loop.time()
        self._looks.watch()
        self._barriers.enter(group, self.last, lambda leg: self._see(began, leg, done))  # polled on every machine
        return done

    # -------------------------------------------------------------------------------------------- causes and ends

    def _starts(self, stage: StageName, task: int) -> tuple[Done, Leg]:
        cause = self._cause(stage, task)
        self._flying[stage] += 1
        if self._world.polled:
            self._looks.watch()
        return Done(), cause

    def _cause(self, stage: StageName, task: int) -> Leg:
        """What the task waited for last: its own stage before, or whatever made room for it."""
        before = self._ended.get(task)
        if before is not None and (before is self.last or before.end >= self._loop.time() - 1e-9):
            return before
        first = self._shares[task].index == task and task not in self._ended
        last = self.last
        full = self._flying[stage] + 1 >= getattr(self._knobs.limits, stage)
        why = "" if last is self._begin else "its stage is full" if full or not first else "the watermark is reached"
        return Leg(
            "wait", f"source rank {self.rank}", task, start=self._loop.time(), end=self._loop.time(), after=last, why=why
        )

    def _ends(self, stage: StageName, task: int, leg: Leg, done: Done, began: Leg) -> None:
        self._flying[stage] -= 1
        if self._world.polled:
            self._see(began.end, leg, done)
        else:
            self._ended[task] = self.last = leg
            done.end()

    def _see(self, began: float, leg: Leg, done: Done) -> None:
        """The driver's poller sees the end of ``leg`` some time after it."""
        poll = Leg("poll", f"source rank {self.rank}", leg.task, start=leg.end, end=leg.end, after=leg)

        def seen() -> None:
            poll.end = self._loop.time()
            self._ended[leg.task] = self.last = poll
            done.end()

        self._looks.ended(began, seen)


class Ring:
    """Bytes of shared memory that buckets are assembled in, first come, first served; None: there is no such limit."""

    def __init__(self, nbytes: int | None) -> None:
        self._left = nbytes
        self._held: dict[int, int] = {}
        self._waiting: deque[tuple[int, int, Leg, Then]] = deque()

    def claim(self, task: int, nbytes: int, after: Leg, then: Then) -> None:
        """Call ``then`` when there is room."""
        if self._left is None:
            then(after)
            return
        self._waiting.append((task, nbytes, after, then))
        self._serve()

    def release(self, task: int) -> None:
        if self._left is not None and task in self._held:
            self._left += self._held.pop(task)
            self._serve()

    def _serve(self) -> None:
        while self._left is not None and self._waiting and self._waiting[0][1] <= self._left:
            task, nbytes, after, then = self._waiting.popleft()
            self._left -= nbytes
            self._held[task] = nbytes
            then(after)


def spec_of(share: Share, targets: Sequence[int], *, offloaded: bool) -> TaskSpec:
    """What the driver is told of a share, as the engine tells it."""
    to = frozenset(targets[receiver] for receiver in share.receivers)
    stages: list[StageName] = ["h2d"] if share.files or (offloaded and share.own) else []
    stages += ["prepare", *(["send"] if to else [])]  # type: ignore[list-item]
    return TaskSpec(index=share.index, group=share.group, tmp_bytes=share.tmp_bytes, stages=tuple(stages), targets=to)
