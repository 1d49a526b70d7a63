"""Plays a recorded push back on the same `PipelineMachine`, all ranks at once, with other knobs or faster work.

What comes out is what would have happened if nothing else had changed: work takes as long as it took, however much of it runs
side by side.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from syncline.scheduler.events import (
    BarrierDone,
    CollectVotes,
    Event,
    FailPush,
    PushStarted,
    StageDone,
    StartBarrier,
    StartStage,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.schedule import Schedule

from .work import Cost, Piece, Work

Change = Callable[[Piece, Cost], Cost]
"""What a piece of work would cost."""


def as_it_was(_piece: Piece, cost: Cost) -> Cost:
    """Changes nothing."""
    return cost


def play(work: Work, *, limits: Limits | None = None, change: Change = as_it_was, dispatch_s: float | None = None) -> float:
    """Seconds of the whole push, under ``limits``, with every cost put through ``change``."""
    return _Player(work, limits or work.limits, change, work.dispatch_s if dispatch_s is None else dispatch_s).run()


class _Player:
    def __init__(self, work: Work, limits: Limits, change: Change, dispatch_s: float) -> None:
        self._work = work
        self._change = change
        self._dispatch_s = dispatch_s
        self._machines = [PipelineMachine(limits) for _ in work.tasks]
        self._loops = list(work.starts)
        self._heap: list[tuple[float, int, int, Event]] = []
        self._numbers = count()
        self._met: dict[tuple[str, int], dict[int, float]] = {}
        self._done: dict[int, float] = {}

    def run(self) -> float:
        for rank, (tasks, groups) in enumerate(zip(self._work.tasks, self._work.groups, strict=True)):
            schedule, now = Schedule.of(tasks, groups), self._work.starts[rank]
            self._post(rank, PushStarted(now=now, push_id=1, schedule=schedule, targets=frozenset({0})))
        while self._heap:
            now, _, rank, event = heapq.heappop(self._heap)
            for order in self._machines[rank].handle(event):
                if isinstance(order, StartStage):
                    self._start(Piece(rank, order.stage, order.task), now)
                elif isinstance(order, StartBarrier):
                    self._start(Piece(rank, "barrier", order.group), now)
                elif isinstance(order, CollectVotes):
                    self._done[rank] = now
                elif isinstance(order, FailPush):
                    raise order.error
        return max(self._done.values(), default=0.0) + self._work.after_s

    def _start(self, piece: Piece, now: float) -> None:
        """A rank's loop starts one piece after the other, which takes its time."""
        began = self._loops[piece.rank] = max(now, self._loops[piece.rank]) + self._dispatch_s
        cost = self._change(piece, self._work.costs[piece])
        key = piece.stage, piece.task
        if key not in self._work.shared:
            self._end(piece, began + cost.own + cost.rest)
            return
        met = self._met.setdefault(key, {})
        met[piece.rank] = began + cost.own
        if len(met) == len(self._work.shared[key]):
            together = max(met.values())
            for rank in met:
                other = Piece(rank, *key)
                self._end(other, together + self._change(other, self._work.costs[other]).rest)

    def _end(self, piece: Piece, now: float) -> None:
        if piece.stage == "barrier":
            self._post(piece.rank, BarrierDone(now=now, push_id=1, group=piece.task))
        else:
            self._post(piece.rank, StageDone(now=now, push_id=1, task=piece.task, stage=piece.stage))  # type: ignore[arg-type]

    def _post(self, rank: int, event: Event) -> None:
        heapq.heappush(self._heap, (event.now, next(self._numbers), rank, event))
