"""A push taken apart: how long each piece of work took by itself, without what it waited for.

What is left can be played back under other knobs (see `syncline.bench.tracing.playback`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from syncline.engine.trace import Trace, limits_of
from syncline.engine.trace_log import Span
from syncline.engine.trace_peers import together
from syncline.scheduler.events import TaskSpec
from syncline.scheduler.machine import Limits


class Piece(NamedTuple):
    """One stage of one task (or a barrier of a group) on one rank."""

    rank: int
    stage: str
    task: int


class Cost(NamedTuple):
    """Seconds of a piece of work: what the rank does by itself, then what is left once all ranks have done their own.

    Where only one rank takes part the second is 0.
    """

    own: float
    rest: float = 0.0

    def scaled(self, factor: float) -> Cost:
        """The same work, ``factor`` times as long."""
        return Cost(self.own * factor, self.rest * factor)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a push consisted of.

    Attributes:
        tasks: for each rank what it ran, with the stages that it ran.
        groups: for each rank its mesh groups.
        costs: of each piece.
        shared: stage and index -> the ranks that take part, where these are more than one.
        starts: when each rank's pipeline began, in seconds since the push began.
        dispatch_s: that the event loop takes until it has started what may start, each time.
        after_s: from the end of the last rank's pipeline to the last vote.
        limits: that it ran under.
        seconds: of the whole push, as recorded.
    """

    tasks: Sequence[Sequence[TaskSpec]]
    groups: Sequence[Sequence[int]]
    costs: Mapping[Piece, Cost]
    shared: Mapping[tuple[str, int], frozenset[int]]
    starts: Sequence[float]
    dispatch_s: float
    after_s: float
    limits: Limits
    seconds: float

    @classmethod
    def of(cls, trace: Trace) -> Work:
        """Take a recorded push apart."""
        parts = together(trace.details)
        costs: dict[Piece, Cost] = {}
        for rank, details in enumerate(trace.details):
            for group in details.groups:  # a push whose targets are all lost ends before its barriers
                costs[Piece(rank, "barrier", group)] = Cost(0.0)
            for span in details.spans:
                costs[Piece(rank, span.stage, span.task)] = Cost(span.end - span.start)
        for (stage, index), ranks in parts.items():
            met = max(part.own_end for part in ranks.values())
            for rank, part in ranks.items():
                rest = max(0.0, part.span.end - max(met, part.own_end))
                costs[Piece(rank, stage, index)] = Cost(part.own_end - part.span.start, rest)
        done = max((details.done for details in trace.details), default=0.0)
        return cls(
            tasks=[_ran(details.tasks, details.spans) for details in trace.details],
            groups=[details.groups for details in trace.details],
            costs=costs,
            shared={key: frozenset(ranks) for key, ranks in parts.items()},
            starts=[details.piped for details in trace.details],
            dispatch_s=_dispatch(trace),
            after_s=trace.seconds - done,
            limits=limits_of(trace.knobs),
            seconds=trace.seconds,
        )

    @cached_property
    def owners(self) -> Mapping[int, int]:
        """Task -> the rank that sends it."""
        return {task.index: rank for rank, tasks in enumerate(self.tasks) for task in tasks if "send" in task.stages}

    def paces(self, stage: str) -> Iterator[Mapping[int, float]]:
        """Mean seconds of a piece of ``stage`` on each rank, without what it waits for; owners apart from contributors."""
        for owns in (True, False):
            found: dict[int, list[float]] = {}
            for piece, cost in self.costs.items():
                if piece.stage == stage and (self.owners.get(piece.task) == piece.rank) == owns:
                    found.setdefault(piece.rank, []).append(cost.own + cost.rest)
            yield {rank: statistics.fmean(costs) for rank, costs in found.items()}


def _ran(rows: Sequence[object], spans: Sequence[Span]) -> list[TaskSpec]:
    ran = {(span.stage, span.task) for span in spans}
    found = []
    for row in rows:
        spec: TaskSpec = row.spec()  # type: ignore[attr-defined]
        stages = tuple(stage for stage in spec.stages if (stage, spec.index) in ran)
        if stages:
            targets = spec.targets if "send" in stages else frozenset[int]()
            found.append(TaskSpec(index=spec.index, group=spec.group, tmp_bytes=spec.tmp_bytes, stages=stages, targets=targets))
    return found


def _dispatch(trace: Trace) -> float:
    seconds = [wait.end - wait.start for waits in trace.waits for wait in waits if wait.cause == "loop"]
    return statistics.median(seconds) if seconds else 0.0
