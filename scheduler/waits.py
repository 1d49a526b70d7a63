"""Why tasks waited: the rules of `PipelineMachine`, played back over the spans of a push that is over.

Nothing is taken down for this while a push runs. Which work ran when says, together with the tasks and the limits, what kept
each stage of each task from starting at every moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from .events import STAGES, StageName, TaskSpec
from .machine import Limits
from .outcome import Span

Cause = Literal["watermark", "slot", "order", "queue", "barrier", "loop"]
"""``watermark``: bytes are missing. ``slot``: the stage is full. ``order``: an earlier task of the plan goes first and is not
ready. ``queue``: one that is ready goes first: what it waits for, this one waits for. ``barrier``: an earlier group's barrier
is not done. ``loop``: nothing; the event loop had not come to it yet."""


class Wait(NamedTuple):
    """A stage of a task could not start from ``start`` to ``end`` (seconds, as in the spans).

    ``on`` is the task that had to start first (``order``: the next of the stage, ``queue``: the one just before), or the group
    whose barrier was awaited (``barrier``); else -1.
    """

    stage: StageName
    task: int
    cause: Cause
    on: int
    start: float
    end: float


def find_waits(
    tasks: Sequence[TaskSpec], groups: Sequence[int], limits: Limits, spans: Iterable[Span], *, began: float
) -> list[Wait]:
    """The waits of one rank's push, in the order in which they ended.

    Of the tasks that were not admitted yet only the next one counts as waiting: all behind it wait for their turn.

    Args:
        tasks, groups, limits: what the rank's driver ran with. Tasks and stages without a span were passed over.
        spans: of the whole push, in any order, on one time axis.
        began: when the rank's pipeline began, on the same axis.
    """
    return _Playback(tasks, groups, limits, list(spans)).run(began)


class _Open(NamedTuple):
    cause: Cause
    on: int
    since: float


class _Playback:
    """The machine's counters, moved by what happened instead of by rules."""

    def __init__(self, tasks: Sequence[TaskSpec], groups: Sequence[int], limits: Limits, spans: Sequence[Span]) -> None:
        ran = {(span.stage, span.index) for span in spans}
        self._stages: dict[int, list[StageName]] = {}
        for spec in tasks:
            stages = [stage for stage in spec.stages if (stage, spec.index) in ran]
            if stages:
                self._stages[spec.index] = stages
        self._tasks = [spec for spec in tasks if spec.index in self._stages]
        self._specs = {spec.index: spec for spec in self._tasks}
        self._queues = {stage: [i for i, stages in self._stages.items() if stage in stages] for stage in STAGES}
        self._before = {(stage, i): h for stage, queue in self._queues.items() for h, i in pairwise(queue)}
        self._heads: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._flying: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._capacity: dict[str, int] = {"h2d": limits.h2d, "prepare": limits.prepare, "send": limits.send}
        self._limit = limits.max_tmp_bytes
        self._in_use = 0
        self._admitted = 0
        self._groups = tuple(groups)
        self._place = {group: place for place, group in enumerate(groups)}
        self._gate = 0
        self._between: dict[int, StageName] = {}
        self._lines: dict[StageName, set[int]] = {stage: set() for stage in STAGES}
        self._seen: dict[StageName, tuple[int, bool]] = {}
        self._joined: list[int] = []
        self._open: dict[int, _Open] = {}
        self._found: list[Wait] = []
        self._moments = sorted(moment for span in spans for moment in _moments(span))

    def run(self, began: float) -> list[Wait]:
        self._look(began)
        for place, (now, step, stage, index) in enumerate(self._moments):
            if stage == "barrier":
                self._gate += step != _START
            elif step == _START:
                self._started(now, stage, index)  # type: ignore[arg-type]
            else:
                self._ended(stage, index)
            if place + 1 == len(self._moments) or self._moments[place + 1][:2] != (now, step):
                self._look(now)
        return self._found

    def _started(self, now: float, stage: StageName, index: int) -> None:
        if self._stages[index][0] == stage:
            self._admitted += 1
            self._in_use += self._specs[index].tmp_bytes
        self._between.pop(index, None)
        self._lines[stage].discard(index)
        self._heads[stage] += 1
        self._flying[stage] += 1
        self._close(index, stage, now)

    def _ended(self, stage: str, index: int) -> None:
        self._flying[stage] -= 1
        stages = self._stages[index]
        later = stages[stages.index(stage) + 1 :]  # type: ignore[arg-type]
        if later:
            self._between[index] = later[0]
            self._lines[later[0]].add(index)
            self._joined.append(index)
        else:
            self._in_use -= self._specs[index].tmp_bytes

    def _look(self, now: float) -> None:
        """Note what everything that waits is waiting for from now on.

        Most of what waits is in line: it is looked at again only when the head of its line changes from ready to not, or back.
        """
        if self._admitted < len(self._tasks):
            index = self._tasks[self._admitted].index
            self._lines[self._stages[index][0]].add(index)
            self._joined.append(index)
        joined, self._joined = self._joined, []
        for stage, line in self._lines.items():
            queue, place = self._queues[stage], self._heads[stage]
            head = queue[place] if place < len(queue) else -1
            ready = head in line
            known, self._seen[stage] = self._seen.get(stage), (-1 if ready else head, ready)
            for index in line if known != self._seen[stage] else line.intersection((*joined, head)):
                self._note(index, stage, *self._obstacle(index, stage, head, ready=ready), now)

    def _obstacle(self, index: int, stage: StageName, head: int, *, ready: bool) -> tuple[Cause, int]:
        """What keeps a task from starting a stage."""
        if index != head:
            return ("queue", self._before[stage, index]) if ready else ("order", head)
        if self._flying[stage] >= self._capacity[stage]:
            return "slot", -1
        spec = self._specs[index]
        if stage != "h2d" and self._place.get(spec.group, 0) > self._gate:
            return "barrier", self._groups[self._gate]
        if index not in self._between and self._in_use + spec.tmp_bytes > self._limit:
            return "watermark", -1
        return "loop", -1

    def _note(self, index: int, stage: StageName, cause: Cause, on: int, now: float) -> None:
        known = self._open.get(index)
        if known is None or (known.cause, known.on) != (cause, on):
            self._close(index, stage, now)
            self._open[index] = _Open(cause, on, now)

    def _close(self, index: int, stage: StageName, now: float) -> None:
        known = self._open.pop(index, None)
        if known is not None and now > known.since:
            self._found.append(Wait(stage, index, known.cause, known.on, known.since, now))


_END, _START, _END_AT_ONCE = 0, 1, 2


def _moments(span: Span) -> list[tuple[float, int, str, int]]:
    """Start and end. What ended gives back what it held before anything starts at the same instant."""
    end = _END if span.end > span.start else _END_AT_ONCE
    return [(span.start, _START, span.stage, span.index), (span.end, end, span.stage, span.index)]
