"""What a push leaves behind on one rank: when each stage of each task ran, how busy the stages were, who was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from .events import LostTarget

SpanName = Literal["h2d", "prepare", "send", "barrier"]

SPAN_NAMES: tuple[SpanName, ...] = ("h2d", "prepare", "send", "barrier")


class Span(msgspec.Struct, frozen=True, gc=False):
    """One stage of one task, or the barrier of one group. ``start`` and ``end`` are seconds on the driver's clock.

    ``index`` is the task's place in plan order, or the mesh group for a barrier.
    """

    stage: SpanName
    index: int
    start: float
    end: float


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
    spans: tuple[Span, ...]
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
        self.spans: list[Span] = []
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
        self.spans.append(Span(stage, index, started, now))

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
            spans=tuple(self.spans),
            busy_s=busy,
            peak_tmp_bytes=peak_tmp_bytes,
            lost=dict(self.lost),
        )
