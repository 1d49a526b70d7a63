"""The critical path of a push: from its end back to its beginning, always to what the work at hand had waited for.

Its segments follow each other without a gap and fill the whole push. What is not on it could have been slower for nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from syncline.engine.trace import RankTrace, Trace
from syncline.engine.trace_log import Span
from syncline.engine.trace_peers import together
from syncline.scheduler.waits import Wait

_EPS = 1e-9


class Segment(NamedTuple):
    """From ``start`` to ``end`` (seconds since the push began) the push waited for this.

    Attributes:
        rank: of the source; -1 for the targets' votes.
        what: a stage, ``loop`` (an event loop had not come to it), ``steps`` (all ranks and targets get ready), ``votes``,
            or ``abandoned`` (work without an end, because every target was lost).
        task: the task, or group of a barrier; -1 where there is none.
        via: what it held up until it was over: the cause of a wait (see `syncline.scheduler.waits`), ``task`` (the same task's
            next stage), ``rank`` (work of another rank on the same task), ``end``.
    """

    rank: int
    what: str
    task: int
    start: float
    end: float
    via: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def critical_path(trace: Trace) -> list[Segment]:
    """The path, from the beginning to the end of the push."""
    return [segment for segment in _Walk(trace).back() if segment.seconds > 0][::-1]


class _Rank:
    """Look-ups in one rank's spans and waits."""

    def __init__(self, details: RankTrace, waits: Sequence[Wait]) -> None:
        self.details = details
        self.spans = {(span.stage, span.task): span for span in details.spans}
        self.rows = {row.index: row for row in details.tasks}
        stages: dict[int, list[str]] = {}
        for row in details.tasks:
            stages[row.index] = [stage for stage in row.stages if (stage, row.index) in self.spans]
        self.stages = {index: ran for index, ran in stages.items() if ran}
        self.order = list(self.stages)
        self.places = {index: place for place, index in enumerate(self.order)}
        self.waits: dict[tuple[str, int], list[Wait]] = {}
        for wait in waits:
            self.waits.setdefault((wait.stage, wait.task), []).append(wait)
        spans = sorted(details.spans, key=lambda span: span.end)
        self._ended = {name: [s for s in spans if s.stage == name] for name in ("h2d", "prepare", "send", "barrier")}
        self._ended["last"] = [s for s in spans if s.stage != "barrier" and self.stages[s.task][-1] == s.stage]
        self._ended["gate"] = [s for s in spans if s.stage in ("prepare", "barrier")]
        self._ended["any"] = spans
        self._ends = {name: [span.end for span in found] for name, found in self._ended.items()}

    def last_ended(self, kind: str, now: float, but: tuple[str, int] = ("", -1)) -> Span | None:
        """The last to end by ``now`` of a stage, of tasks' ``last`` stages, of what opens a ``gate``, or of ``any``."""
        for place in range(bisect_right(self._ends[kind], now + _EPS) - 1, -1, -1):
            span = self._ended[kind][place]
            if (span.stage, span.task) != but:
                return span
        return None


class _Walk:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ranks = [_Rank(details, trace.waits[rank]) for rank, details in enumerate(trace.details)]
        self._shared = together(trace.details)
        self._at = ("", -1)
        barriers = sum(span.stage == "barrier" for details in trace.details for span in details.spans)
        self._cut = barriers < sum(len(details.groups) for details in trace.details)

    def back(self) -> Iterator[Segment]:
        details = self._trace.details
        rank = max(range(len(details)), key=lambda rank: details[rank].done)
        now = details[rank].done
        if self._trace.seconds > now:
            yield Segment(-1, "votes", -1, now, self._trace.seconds, "end")
        span, via = self._ranks[rank].last_ended("any", now), "end"
        for _ in range(4 * sum(len(each.spans) for each in details) + 1):
            if span is None:
                break
            if span.end < now:
                yield Segment(rank, "abandoned" if via == "end" and self._cut else "loop", -1, span.end, now, via)
            rank, now = yield from self._work(rank, span, min(now, span.end), via)
            span, now, via = yield from self._before(rank, now)
        began = min(each.began for each in details)
        piped = min(now, details[rank].piped)
        if now > piped:
            yield Segment(rank, "loop", -1, piped, now, via)
        yield Segment(rank, "steps", -1, began, piped, "task")

    def _work(self, rank: int, span: Span, now: float, via: str) -> Generator[Segment, None, tuple[int, float]]:
        """The segments of a piece of work; returns the rank whose part of it began last to matter, and when it began."""
        parts = self._shared.get((span.stage, span.task))
        if parts is not None:
            last = max(parts, key=lambda each: parts[each].own_end)
            met = min(parts[last].own_end, now)
            if last != rank and met > span.start:
                yield Segment(rank, span.stage, span.task, met, now, via)
                rank, span, now, via = last, parts[last].span, met, "rank"
        self._at = (span.stage, span.task)
        yield Segment(rank, span.stage, span.task, span.start, now, via)
        return rank, span.start

    def _before(self, rank: int, now: float) -> Generator[Segment, None, tuple[Span | None, float, str]]:
        """What the work that began at ``now`` had waited for: its span, until when, and why."""
        here, (stage, index) = self._ranks[rank], self._at
        while True:
            if stage == "barrier":
                return here.last_ended("gate", now, self._at), now, "task"
            cause, on, since = _cause(here.waits.get((stage, index), []), now)
            if since < now:
                yield Segment(rank, "loop", index, since, now, "task")
                now = since
            if cause in ("slot", "watermark", "barrier"):
                kind = {"slot": stage, "watermark": "last", "barrier": "barrier"}[cause]
                return here.last_ended(kind, now, (stage, index)), now, cause
            stages = here.stages[index]
            if cause not in ("order", "queue") and stages[0] != stage:
                return here.spans[stages[stages.index(stage) - 1], index], now, "task"
            if cause not in ("order", "queue"):
                place = here.places[index]
                if place == 0:
                    return None, now, "task"
                on = here.order[place - 1]
                stage = here.stages[on][0]
            first = here.spans[stage, on].start
            if first < now:
                yield Segment(rank, "loop", on, first, now, "order")
                now = first
            index = on


def _cause(waits: Sequence[Wait], now: float) -> tuple[str, int, float]:
    """Why work that began at ``now`` had not begun before, on what, and since when nothing but the loop kept it."""
    for place in range(len(waits) - 1, -1, -1):
        wait = waits[place]
        if wait.cause != "loop" and wait.end >= now - _EPS:
            return wait.cause, wait.on, now
        if wait.cause == "loop" and wait.end >= now - _EPS:
            now = wait.start
        elif wait.end < now - _EPS:
            break
    return "", -1, now
