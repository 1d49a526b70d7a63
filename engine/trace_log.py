"""What a rank tells of its part in a push, in columns: of ten thousand tasks nothing is made one by one while a push runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from syncline.scheduler.events import STAGES, StageName, TaskSpec
from syncline.scheduler.outcome import SPAN_NAMES, Moments, Spans

from .messages import LandingTime
from .trace_clock import Trip


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One piece of work: stage, task (or mesh group for ``barrier``), start and end in seconds since the push began."""

    stage: str
    task: int
    start: float
    end: float

    @property
    def name(self) -> str:
        """As it is called in every trace, profiler and table."""
        return span_name(self.stage, self.task)


def span_name(stage: str, index: int) -> str:
    """What the work of a stage on a task (of a barrier on a group) is called: ``"send 7"``."""
    return f"{stage} {index}"


class SpanColumns(msgspec.Struct, frozen=True, array_like=True):
    """Spans as bytes: a code for each stage, its task as int64, start and end as float64 (little-endian)."""

    stages: bytes = b""
    tasks: bytes = b""
    times: bytes = b""

    @classmethod
    def of(cls, spans: Spans) -> SpanColumns:
        """A copy of the columns that the driver has filled."""
        return cls(*spans.columns())


class SpanView(Sequence[Span]):
    """Columns as a sequence of spans, ``shift`` seconds later."""

    def __init__(self, columns: SpanColumns, shift: float) -> None:
        self._stages = columns.stages
        self._tasks = array("q", columns.tasks)
        self._times = array("d", columns.times)
        self._shift = shift

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> list[Span]: ...
    def __getitem__(self, place: int | slice) -> Span | list[Span]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        row = range(len(self))[place]
        times, shift = self._times, self._shift
        return Span(SPAN_NAMES[self._stages[row]], self._tasks[row], times[2 * row] + shift, times[2 * row + 1] + shift)


class TaskRow(msgspec.Struct, frozen=True, array_like=True):
    """A task as one rank had it (see `TaskSpec`), and the bytes of its bucket."""

    index: int
    group: int
    tmp_bytes: int
    nbytes: int
    stages: tuple[StageName, ...]

    def spec(self) -> TaskSpec:
        """For `find_waits` and for playing the push back."""
        targets = frozenset({0}) if "send" in self.stages else frozenset()
        return TaskSpec(index=self.index, group=self.group, tmp_bytes=self.tmp_bytes, stages=self.stages, targets=targets)


class TaskColumns(msgspec.Struct, frozen=True, array_like=True):
    """`TaskRow` as bytes: four int64 for each task, and a bit for each stage."""

    numbers: bytes = b""
    stages: bytes = b""

    @classmethod
    def of(cls, rows: Sequence[TaskRow]) -> TaskColumns:
        """Made once for a plan."""
        numbers = array("q", (n for row in rows for n in (row.index, row.group, row.tmp_bytes, row.nbytes)))
        stages = bytes(sum(1 << STAGES.index(stage) for stage in row.stages) for row in rows)
        return cls(numbers.tobytes(), stages)

    def rows(self) -> Iterator[TaskRow]:
        """The inverse of `of`."""
        numbers = array("q", self.numbers)
        for row, bits in enumerate(self.stages):
            stages = tuple(stage for place, stage in enumerate(STAGES) if bits >> place & 1)
            index, group, tmp_bytes, nbytes = numbers[4 * row : 4 * row + 4]
            yield TaskRow(index, group, tmp_bytes, nbytes, stages)


class MarkColumns(msgspec.Struct, frozen=True, array_like=True):
    """Moments of tasks as bytes: each task as int64, its moment as float64."""

    tasks: bytes = b""
    times: bytes = b""

    @classmethod
    def of(cls, moments: Moments) -> MarkColumns:
        """A copy of the columns that a stage has filled."""
        return cls(*moments.columns())

    def moments(self, shift: float) -> dict[int, float]:
        """From task to seconds, ``shift`` seconds later."""
        return {task: at + shift for task, at in zip(array("q", self.tasks), array("d", self.times), strict=True)}


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A step that all ranks took together (``enter``, ``start``, …), from this rank's contribution to the decision."""

    name: str
    start: float
    end: float


class RankLog(msgspec.Struct, kw_only=True):
    """One rank's side of a push. All times are of its own clock.

    Attributes:
        began: when the push was called; ``piped``: when its pipeline began; ``done``: when it had nothing left to do.
        spans, tasks: see `SpanColumns`, `TaskColumns`.
        local_ends: when the rank's own part of each ``prepare`` was done.
        steps: before the pipeline.
        trips: see `ClockLog.trips`.
    """

    began: float
    piped: float
    done: float
    spans: SpanColumns = SpanColumns()
    tasks: TaskColumns = TaskColumns()
    groups: list[int] = []
    local_ends: MarkColumns = MarkColumns()
    steps: list[Step] = []
    trips: list[Trip] = []


class TargetLog(msgspec.Struct, kw_only=True):
    """One target as rank 0 saw it, in seconds on rank 0's clock; None: it did not come to that."""

    ready: float | None = None
    asked: float | None = None
    answered: float | None = None
    commit_s: float = 0.0
    pause_s: float = 0.0
    landings: list[LandingTime] = []
