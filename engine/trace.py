"""The timeline of a push in Chrome's trace format (opens in Perfetto): one process per source rank, one track per stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

STAGES = ("h2d", "prepare", "send", "barrier")
_CONTROL = "control"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One piece of work: stage, task (or mesh group for ``barrier``), start and end in seconds since the push began."""

    stage: str
    task: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All spans of a push.

    Attributes:
        version: the version pushed.
        ranks: for each source rank its spans. Ranks on other hosts are aligned by wall clock.
    """

    version: int
    ranks: Sequence[Sequence[Span]]

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace events of Chrome's format; times in microseconds."""
        for rank, spans in enumerate(self.ranks):
            yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"source rank {rank}"}}
            lanes = _lanes(spans)
            for track, name in enumerate(_track_names(lanes)):
                yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
            tracks = {name: track for track, name in enumerate(_track_names(lanes))}
            for span, name in lanes:
                yield {
                    "ph": "X",
                    "pid": rank,
                    "tid": tracks[name],
                    "name": f"{span.stage} {span.task}",
                    "cat": span.stage,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"task": span.task, "version": self.version},
                }

    def to_json(self) -> str:
        """The trace as the JSON text of Chrome's trace format."""
        return json.dumps({"traceEvents": list(self.events()), "displayTimeUnit": "ms"})

    def save(self, path: str | Path) -> None:
        """Write the trace to a file that Perfetto and chrome://tracing open."""
        Path(path).write_text(self.to_json())


def _lanes(spans: Sequence[Span]) -> list[tuple[Span, str]]:
    """Give overlapping spans of a stage their own tracks: a track holds one span at a time."""
    ends: dict[str, list[float]] = {}
    placed: list[tuple[Span, str]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.task)):
        lanes = ends.setdefault(span.stage, [])
        lane = next((i for i, end in enumerate(lanes) if end <= span.start), len(lanes))
        if lane == len(lanes):
            lanes.append(span.end)
        lanes[lane] = span.end
        placed.append((span, span.stage if lane == 0 else f"{span.stage} +{lane}"))
    return placed


def _track_names(lanes: Sequence[tuple[Span, str]]) -> list[str]:
    """Tracks in pipeline order."""
    order = {stage: place for place, stage in enumerate((*STAGES, _CONTROL))}
    return sorted({name for _, name in lanes}, key=lambda name: (order.get(name.split(" +")[0], len(order)), name))
