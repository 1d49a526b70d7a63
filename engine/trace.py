"""The timeline of a push: what every rank did and waited for, on one time axis. Opens in Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from syncline.scheduler.machine import Limits
from syncline.scheduler.outcome import SPAN_NAMES, Span as PlainSpan
from syncline.scheduler.waits import Wait, find_waits

from .errors import TraceError
from .messages import LandingTime
from .trace_check import contradictions
from .trace_log import RankLog, Span, SpanView, Step, TargetLog, TaskRow

__all__ = ["STAGES", "RankTrace", "Span", "Step", "TargetTrace", "TaskRow", "Trace", "Wait"]

STAGES = SPAN_NAMES

Knobs = Mapping[str, int | str]

_PIDS = 1_000_000
"""Process numbers that a push takes in a file with several."""
_ONE_RUN_S = 86_400.0
"""Pushes whose clocks are further apart are not of one process."""
_SHOWN = 10
"""Contradictions of a file that are told one by one."""
FORMAT = 1
"""Of what `Trace.save` writes beside the trace events."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One source rank in a push. Times are seconds since the push began.

    Attributes:
        spans: its work; `SPAN_NAMES` says of what kinds.
        tasks: what it takes part in, in plan order.
        groups: mesh groups in order.
        local_ends: task -> when the rank's own part of its ``prepare`` was done, whatever others still had to do.
        steps: what all ranks decided together before the pipeline.
        began, piped, done: when push was called here, when the pipeline began, when nothing was left to do.
        clock_error_s: how far off its times may be against rank 0's.
    """

    spans: Sequence[Span]
    tasks: Sequence[TaskRow] = ()
    groups: Sequence[int] = ()
    local_ends: Mapping[int, float] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    began: float = 0.0
    piped: float = 0.0
    done: float = 0.0
    clock_error_s: float = 0.0

    @classmethod
    def of(cls, log: RankLog, shift: float, error_s: float) -> Self:
        """What a rank told, ``shift`` seconds later."""
        return cls(
            spans=SpanView(log.spans, shift),
            tasks=list(log.tasks.rows()),
            groups=log.groups,
            local_ends=log.local_ends.moments(shift),
            steps=[Step(step.name, step.start + shift, step.end + shift) for step in log.steps],
            began=log.began + shift,
            piped=log.piped + shift,
            done=log.done + shift,
            clock_error_s=error_s,
        )


@dataclass(frozen=True, kw_only=True)
class TargetTrace:
    """One target in a push, as rank 0 saw it. Times are seconds since the push began; None: it did not come to that.

    Attributes:
        address: names it.
        ready: it had said that it is ready to receive.
        asked, answered: it was asked to vote and commit, and had done so.
        commit_s, pause_s: as in `TargetReport`.
        landings: one for each of its ranks, if the target says.
        error: why it did not commit, as ``"TargetLost: ..."``; empty if it did.
    """

    address: str
    ready: float | None = None
    asked: float | None = None
    answered: float | None = None
    commit_s: float = 0.0
    pause_s: float = 0.0
    landings: Sequence[LandingTime] = ()
    error: str = ""

    @classmethod
    def of(cls, address: str, log: TargetLog, shift: float, error: str) -> Self:
        """What rank 0 took down, ``shift`` seconds later."""
        ready, asked, answered = (None if at is None else at + shift for at in (log.ready, log.asked, log.answered))
        return cls(
            address=address, ready=ready, asked=asked, answered=answered, commit_s=log.commit_s, pause_s=log.pause_s,
            landings=log.landings, error=error,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole push.

    Attributes:
        version: the version pushed.
        details: for each source rank what it did. Their clocks are aligned by the round trips of the push's own steps (see
            `syncline.engine.trace_clock`); `RankTrace.clock_error_s` says how far off that may be.
        targets: for each target what is known of it.
        voting: when all ranks had nothing left to do, and when all targets had voted.
        knobs: the config that it ran with: those that shape the pipeline.
        origin: rank 0's clock at the beginning, in seconds: traces of one process fit together by it.
    """

    version: int
    details: Sequence[RankTrace]
    targets: Sequence[TargetTrace] = ()
    voting: tuple[float, float] = (0.0, 0.0)
    knobs: Knobs = field(default_factory=dict)
    origin: float = 0.0

    @property
    def ranks(self) -> Sequence[Sequence[Span]]:
        """For each source rank its spans."""
        return [rank.spans for rank in self.details]

    @property
    def seconds(self) -> float:
        """From the first rank's call to the last vote."""
        return max([self.voting[1], *(rank.done for rank in self.details)], default=0.0)

    @cached_property
    def waits(self) -> Sequence[Sequence[Wait]]:
        """For each source rank why its tasks waited (see `syncline.scheduler.waits`)."""
        return [rank_waits(rank, limits_of(self.knobs)) for rank in self.details]

    def events(self) -> list[dict[str, Any]]:
        """The trace events of Chrome's format; times in microseconds. See `syncline.engine.trace_events`."""
        from .trace_events import events_of

        return events_of(self)

    def to_json(self) -> str:
        """The trace as the JSON text of Chrome's trace format, with what `load` needs beside the events."""
        plain = replace(self, details=[replace(rank, spans=list(rank.spans)) for rank in self.details])
        more = {"format": FORMAT, "syncline": msgspec.to_builtins(plain)}
        return json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms", **more})

    def save(self, path: str | Path) -> None:
        """Write the trace to a file that Perfetto and chrome://tracing open, and `load` reads."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote.

        Raises:
            TraceError: the file cannot be read, is no such trace, or what it says does not fit together (it was edited).
        """
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=_File)
        except OSError as error:
            raise TraceError(f"the trace {path} cannot be read: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path} is no trace that this version of syncline has written: {error}") from error
        problems = contradictions(found.syncline)
        if problems:
            more = [f"and {len(problems) - _SHOWN} more like these"] if len(problems) > _SHOWN else []
            raise TraceError("\n  - ".join((f"{path} does not fit together; was it edited?", *problems[:_SHOWN], *more)))
        return found.syncline


def merged_json(traces: Sequence[Trace]) -> str:
    """Several pushes in one file of trace events: those of one process at the times when they were, others side by side."""
    first = min((trace.origin for trace in traces), default=0.0)
    together = max((trace.origin for trace in traces), default=0.0) - first < _ONE_RUN_S
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        later = (trace.origin - first) * 1e6 if together else 0.0
        for event in trace.events():
            moved = {**event, "pid": event["pid"] + number * _PIDS}
            if "ts" in event:
                moved["ts"] = round(event["ts"] + later, 3)
            if "id" in event:
                moved["id"] = f"{number}/{event['id']}"
            if event["name"] == "process_name":
                moved["args"] = {"name": f"push {trace.version}, {event['args']['name']}"}
            events.append(moved)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


class _File(msgspec.Struct):
    """What `Trace.load` reads of a file."""

    format: Literal[1]
    syncline: Trace


def limits_of(knobs: Knobs) -> Limits:
    """The watermark and concurrency limits among the knobs."""
    return Limits(
        max_tmp_bytes=int(knobs["max_tmp_bytes"]),
        h2d=int(knobs["h2d_concurrency"]),
        prepare=int(knobs["prepare_concurrency"]),
        send=int(knobs["send_concurrency"]),
    )


def rank_waits(rank: RankTrace, limits: Limits) -> list[Wait]:
    """Why the tasks of one rank waited."""
    specs = [task.spec() for task in rank.tasks]
    spans = [PlainSpan(span.stage, span.task, span.start, span.end) for span in rank.spans]  # type: ignore[arg-type]
    return find_waits(specs, rank.groups, limits, spans, began=rank.piped)
