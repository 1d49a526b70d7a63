"""What a push leaves behind on one rank: when each stage of each task ran, how busy the stages were, who was lost."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import msgspec

from .events import LostTarget

SpanName = Literal["h2d", "prepare", "send", "barrier"]

SPAN_NAMES: tuple[SpanName, ...] = ("h2d", "prepare", "send", "barrier")

_CODES: dict[SpanName, int] = {name: code for code, name in enumerate(SPAN_NAMES)}


class Span(msgspec.Struct, frozen=True, gc=False):
    """One stage of one task, or the barrier of one group. ``start`` and ``end`` are seconds on the driver's clock.

    ``index`` is the task's place in plan order, or the mesh group for a barrier.
    """

    stage: SpanName
    index: int
    start: float
    end: float


class Spans(Sequence[Span]):
    """Spans in columns. Of ten thousand tasks there are thirty thousand: as objects, freeing them would hold up the loop."""

    def __init__(self) -> None:
        self._stages = bytearray()
        self._indexes = array("q")
        self._times = array("d")

    def add(self, stage: SpanName, index: int, start: float, end: float) -> None:
        """Append one."""
        self._stages.append(_CODES[stage])
        self._indexes.append(index)
        self._times.append(start)
        self._times.append(end)

    def copy(self) -> Spans:
        """The spans so far, to be kept."""
        other = Spans()
        other._stages, other._indexes, other._times = self._stages[:], self._indexes[:], self._times[:]
        return other

    def columns(self) -> tuple[bytes, bytes, bytes]:
        """A code for each span's stage (its place in `SPAN_NAMES`), its index as int64, its start and end as float64."""
        return bytes(self._stages), self._indexes.tobytes(), self._times.tobytes()

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> list[Span]: ...
    def __getitem__(self, place: int | slice) -> Span | list[Span]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        row = range(len(self))[place]  # IndexError beyond the end, and counts from the end below 0
        return Span(SPAN_NAMES[self._stages[row]], self._indexes[row], self._times[2 * row], self._times[2 * row + 1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows


class Moments:
    """One moment for each of many tasks, in columns."""

    def __init__(self) -> None:
        self._tasks = array("q")
        self._times = array("d")

    def add(self, task: int, now: float) -> None:
        """Append one."""
        self._tasks.append(task)
        self._times.append(now)

    def columns(self) -> tuple[bytes, bytes]:
        """Each task as int64, its moment as float64."""
        return self._tasks.tobytes(), self._times.tobytes()

    def __len__(self) -> int:
        return len(self._tasks)


@dataclass(frozen=True, kw_only=True)
class PushOutcome:
    """What happened in a push on this rank.

    Attributes:
        push_id: the push.
        started, ended: seconds on the driver's clock; ``ended`` is None while it runs.
        spans: in the order in which they ended. Of a push that failed, those that ended so far.
        busy_s: for each stage, seconds in which at least one of its tasks was in flight.
        peak_tmp_bytes: the most temporary bytes reserved at once, abandoned work of earlier pushes included.
        lost: targets that were lost, by target.
    """

    push_id: int
    started: float
    ended: float | None
    spans: Sequence[Span]
    busy_s: Mapping[SpanName, float]
    peak_tmp_bytes: int
    lost: Mapping[int, LostTarget]


class PushLog:
    """Takes down spans and busy time of one push while it runs."""

    def __init__(self, push_id: int, started: float) -> None:
        self.push_id = push_id
        self.started = started
        self.ended: float | None = None
        self.lost: dict[int, LostTarget] = {}
        self.spans = Spans()
        self._busy_s: dict[SpanName, float] = dict.fromkeys(SPAN_NAMES, 0.0)
        self._flying: dict[SpanName, int] = dict.fromkeys(SPAN_NAMES, 0)
        self._since: dict[SpanName, float] = dict.fromkeys(SPAN_NAMES, 0.0)

    def took_off(self, stage: SpanName, now: float) -> None:
        """Work of ``stage`` was started."""
        if self._flying[stage] == 0:
            self._since[stage] = now
        self._flying[stage] += 1

    def landed(self, stage: SpanName, index: int, started: float, now: float) -> None:
        """Work of ``stage`` that was started at ``started`` has ended."""
        self._flying[stage] -= 1
        if self._flying[stage] == 0:
            self._busy_s[stage] += now - self._since[stage]
        self.spans.add(stage, index, started, now)

    def outcome(self, now: float, peak_tmp_bytes: int) -> PushOutcome:
        """The push so far. Work in flight counts as busy until ``now``."""
        busy = {
            stage: seconds + (now - self._since[stage] if self._flying[stage] else 0.0)
            for stage, seconds in self._busy_s.items()
        }
        return PushOutcome(
            push_id=self.push_id,
            started=self.started,
            ended=self.ended,
            spans=self.spans.copy(),
            busy_s=busy,
            peak_tmp_bytes=peak_tmp_bytes,
            lost=dict(self.lost),
        )
