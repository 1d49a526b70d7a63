"""Simulated receivers: they let buckets come in plan order, a few at a time, land them, vote and commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from .legs import Leg, Then
from .load import Share
from .world import World

_Offer = tuple[int, Share, Leg, Then]


class Receiver:
    """One rank of a target.

    Attributes:
        landed: buckets that have landed.
        last: what the last one ended with.
    """

    def __init__(self, number: int, tasks: Sequence[int], world: World, begin: Leg, complete: Callable[[], None]) -> None:
        self._number, self._tasks, self._world = number, tasks, world
        self._complete = complete
        self._posted = len(tasks) if world.window is None else min(world.window, len(tasks))
        self._place = {task: place for place, task in enumerate(tasks)}
        self._offers: dict[int, _Offer] = {}
        self._arrived: dict[int, tuple[Leg, Then]] = {}
        self._next = 0
        self._landing = 0
        self.landed = 0
        self.last = begin

    @property
    def done(self) -> bool:
        return self.landed == len(self._tasks)

    def offer(self, rank: int, share: Share, after: Leg, then: Then) -> None:
        """A source rank can send a bucket. It moves once it is posted; ``then`` is called when the sender is done with it."""
        place = self._place[share.index]
        if place < self._posted:
            self._move((rank, share, after, then))
        else:
            self._offers[place] = (rank, share, after, then)

    def _move(self, offer: _Offer) -> None:
        rank, share, after, then = offer
        self._world.deliver(rank, self._number, share, after, lambda leg: self._arrive(share.index, leg, then))

    def _arrive(self, task: int, leg: Leg, then: Then) -> None:
        self._arrived[task] = (leg, then)
        if self._world.frees == "arrival":
            self._post(leg)
        if not self._world.acknowledged:
            then(leg)
        self._land()

    def _post(self, leg: Leg) -> None:
        """Let the next one come."""
        if self._posted < len(self._tasks):
            offer = self._offers.pop(self._posted, None)
            self._posted += 1
            if offer is not None:
                rank, share, _, then = offer
                wait = Leg(
                    "wait", f"receiver {self._number}", share.index, start=leg.end, end=leg.end, after=leg,
                    why="the receiver's window is full",
                )  # fmt: skip
                self._move((rank, share, wait, then))

    def _land(self) -> None:
        """In plan order, a few side by side."""
        while self._landing < self._world.landers and self._next < len(self._tasks):
            task = self._tasks[self._next]
            if task not in self._arrived:
                return
            self._next += 1
            self._landing += 1
            leg, then = self._arrived.pop(task)
            after = leg if leg.end >= self.last.end or self._landing < self._world.landers else self.last
            self._world.land(self._number, task, after, lambda ended, then=then: self._end(ended, then))  # type: ignore[misc]

    def _end(self, leg: Leg, then: Then) -> None:
        self._landing -= 1
        self.landed += 1
        self.last = leg
        if self._world.acknowledged:
            then(leg)
        if self._world.frees == "landing":
            self._post(leg)
        if self.done:
            self._complete()
        else:
            self._land()


class Ending:
    """The end of a push: all ranks have sent, each target's ranks have landed everything, vote, commit; all hear of it.

    Attributes:
        over: ends with the push.
        last: its last leg.
        commit_s: seconds of the longest commit.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, world: World, ranks: int) -> None:
        self._loop, self._world, self._ranks = loop, world, ranks
        self.receivers: Sequence[Receiver] = ()
        self._targets: dict[int, list[int]] = {}
        self._asked: Leg | None = None
        self._left = 0
        self.over: asyncio.Future[None] = loop.create_future()
        self.last: Leg | None = None
        self.data_end = 0.0
        self.commit_s = 0.0

    def of(self, receivers: Sequence[Receiver], target_of: Sequence[int]) -> None:
        """Whose end it is."""
        self.receivers = receivers
        for number, target in enumerate(target_of):
            self._targets.setdefault(target, []).append(number)
        self._left = len(self._targets)

    def sent(self, last: Leg) -> asyncio.Future[None]:
        """A rank has sent everything."""
        self._ranks -= 1
        if self._ranks == 0:
            self._asked = last
            self.landed()
        return self.over

    def landed(self) -> None:
        """Something is complete: targets all of whose ranks are vote and commit, once they have been asked."""
        if self._asked is None:
            return
        for target in [t for t, ranks in self._targets.items() if all(self.receivers[r].done for r in ranks)]:
            self._commit(self._targets.pop(target), self._asked)

    def _commit(self, ranks: list[int], asked: Leg) -> None:
        began, left = self._loop.time(), len(ranks)
        self.data_end = max(self.data_end, began)
        last = max((self.receivers[r].last for r in ranks), key=lambda leg: leg.end)
        cause = last if last.end > asked.end else asked

        def one(leg: Leg) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.commit_s = max(self.commit_s, self._loop.time() - began)
                self._committed(leg)

        for rank in ranks:
            self._world.commit(rank, cause, one)

    def _committed(self, leg: Leg) -> None:
        self._left -= 1
        if self._left == 0:
            now, seconds = self._loop.time(), self._world.control_s()[1]
            self.last = Leg("control", "all", -1, start=now, end=now + seconds, after=leg)
            self._loop.call_at(self.last.end, self.over.set_result, None)
