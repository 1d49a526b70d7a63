"""A trace as events of Chrome's trace format.

One process for each source rank with a track for each stage (more where work overlaps), one for what stages wait for, one for
the steps that all ranks take together, and counters; one process for each target. Arrows follow a task through the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from syncline.scheduler.outcome import SPAN_NAMES
from syncline.scheduler.waits import Wait

from .trace_log import Span, span_name
from .trace_peers import PeerWait, peer_waits

if TYPE_CHECKING:
    from .trace import RankTrace, TargetTrace, Trace

_TRACKS = ("control", "h2d", "prepare", "send", "barrier", "waits")
_TARGETS_FROM = 100_000
"""Process numbers of targets begin here."""

Event = dict[str, Any]


class Slice(NamedTuple):
    """An interval on a track, in seconds."""

    track: str
    name: str
    category: str
    start: float
    end: float
    details: dict[str, Any]


def wait_name(wait: Wait) -> str:
    """A wait in words: what for."""
    return {
        "watermark": "waits for watermark",
        "slot": f"waits for a {wait.stage} slot",
        "order": f"waits for plan order: {span_name(wait.stage, wait.on)} goes first",
        "barrier": f"waits for barrier {wait.on}",
        "loop": "waits for the event loop",
    }[wait.cause]


def events_of(trace: Trace) -> list[Event]:
    """All events of ``trace``; times in microseconds since the push began."""
    events: list[Event] = []
    peers = peer_waits(trace.details)
    arrows = count(1)
    places: dict[tuple[int, str, int], tuple[int, Span]] = {}
    for rank, details in enumerate(trace.details):
        slices = [*_steps(trace, details), *_work(details), *_waits(trace.waits[rank]), *_peer_waits(peers[rank])]
        lanes = _lanes(slices)
        tracks = _names(lane for _, lane in lanes)
        events += _titles(rank, rank, f"source rank {rank}", tracks)
        events += [_complete(rank, tracks[lane], each, trace.version) for each, lane in lanes]
        events += _counters(rank, details)
        spans = {(span.stage, span.task): span for span in details.spans}
        for each, lane in lanes:
            if each.category in SPAN_NAMES:
                key = each.category, each.details["task"]
                places[rank, *key] = tracks[lane], spans[key]
    events += _arrows(trace, places, arrows)
    for number, target in enumerate(trace.targets):
        events += _target(_TARGETS_FROM + number, target, trace.version)
    return events


def _steps(trace: Trace, details: RankTrace) -> Iterator[Slice]:
    for step in details.steps:
        yield Slice("control", step.name, "control", step.start, step.end, {})
    heard, voted = trace.voting
    if voted:
        yield Slice("control", "waits for the other ranks", "wait", details.done, max(details.done, heard), {})
        yield Slice("control", "waits for votes", "wait", max(details.done, heard), voted, {})


def _work(details: RankTrace) -> Iterator[Slice]:
    rows = {row.index: row for row in details.tasks}
    for span in details.spans:
        more: dict[str, Any] = {"task": span.task}
        if span.stage != "barrier" and span.task in rows:
            row = rows[span.task]
            more |= {"group": row.group, "bytes": row.nbytes, "tmp_bytes": row.tmp_bytes}
        yield Slice(span.stage, span.name, span.stage, span.start, span.end, more)


def _waits(waits: Iterable[Wait]) -> Iterator[Slice]:
    """Of the tasks that wait for one stage in line, the first one's."""
    for wait in waits:
        if wait.cause == "queue":
            continue
        what = {"task": wait.task, "stage": wait.stage, "cause": wait.cause}
        yield Slice("waits", wait_name(wait), "wait", wait.start, wait.end, what)


def _peer_waits(waits: Iterable[PeerWait]) -> Iterator[Slice]:
    for wait in waits:
        what = {"task": wait.task, "stage": wait.stage, "cause": "rank", "rank": wait.rank}
        name = f"waits for rank {wait.rank} in {span_name(wait.stage, wait.task)}"
        yield Slice("waits", name, "wait", wait.start, wait.end, what)


def _lanes(slices: Iterable[Slice]) -> list[tuple[Slice, str]]:
    """Give overlapping slices of a track lanes of their own: a lane holds one at a time."""
    ends: dict[str, list[float]] = {}
    placed: list[tuple[Slice, str]] = []
    for each in sorted(slices, key=lambda each: (each.start, each.end)):
        lanes = ends.setdefault(each.track, [])
        lane = next((i for i, end in enumerate(lanes) if end <= each.start), len(lanes))
        lanes[lane : lane + 1] = [each.end]
        placed.append((each, each.track if lane == 0 else f"{each.track} +{lane}"))
    return placed


def _names(lanes: Iterable[str]) -> dict[str, int]:
    """Tracks in pipeline order -> their numbers."""

    def key(lane: str) -> tuple[int, int]:
        name, _, number = lane.partition(" +")
        return _TRACKS.index(name) if name in _TRACKS else len(_TRACKS), int(number or 0)

    return {lane: number for number, lane in enumerate(sorted(set(lanes), key=key), start=1)}


def _titles(pid: int, place: int, name: str, tracks: dict[str, int]) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}
    for track, number in tracks.items():
        yield {"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": pid, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _complete(pid: int, tid: int, each: Slice, version: int) -> Event:
    start, end = _us(each.start), _us(each.end)
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": each.name, "cat": each.category, "ts": start, "dur": round(end - start, 3),
        "args": {**each.details, "version": version},
    }  # fmt: skip


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond that trace processors keep: what touches must not overlap by a rounding error."""
    return round(seconds * 1e6, 3)


def _counters(pid: int, details: RankTrace) -> Iterator[Event]:
    """Temporary bytes of tasks in flight, and how many tasks are in each stage."""
    tmp = {row.index: row.tmp_bytes for row in details.tasks}
    held: dict[int, list[float]] = {}
    changes: list[tuple[float, int, str]] = []
    for span in details.spans:
        if span.stage == "barrier":
            continue
        changes += [(span.start, 1, span.stage), (span.end, -1, span.stage)]
        held.setdefault(span.task, []).extend((span.start, span.end))
    flying = dict.fromkeys(("h2d", "prepare", "send"), 0)
    for now, change, stage in sorted(changes):
        flying[stage] += change
        yield _counter(pid, "tasks in flight", now, dict(flying))
    reserved = 0
    for now, nbytes in sorted((at(times), sign * tmp.get(task, 0)) for task, times in held.items() for at, sign in _ENDS):
        reserved += nbytes
        yield _counter(pid, "temporary bytes", now, {"bytes": reserved})


_ENDS = ((min, 1), (max, -1))


def _counter(pid: int, name: str, now: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "pid": pid, "name": name, "ts": _us(now), "args": values}


def _arrows(trace: Trace, places: dict[tuple[int, str, int], tuple[int, Span]], numbers: Iterator[int]) -> Iterator[Event]:
    """From each stage of a task to the next, from contributors to the owner, and from the last prepare to the barrier."""
    owners = {row.index: rank for rank, details in enumerate(trace.details) for row in details.tasks if "send" in row.stages}
    for rank, details in enumerate(trace.details):
        for row in details.tasks:
            here: list[tuple[int, str, int]] = [(rank, stage, row.index) for stage in row.stages]
            pairs = list(pairwise(each for each in here if each in places))
            prepare, barrier = (rank, "prepare", row.index), (rank, "barrier", row.group)
            if prepare in places and barrier in places:
                pairs.append((prepare, barrier))
            owner = (owners.get(row.index, rank), "prepare", row.index)
            if owner[0] != rank and prepare in places and owner in places:
                pairs.append((prepare, owner))
            for start, end in pairs:
                yield from _arrow(next(numbers), (start[0], *places[start]), (end[0], *places[end]))


def _arrow(number: int, start: tuple[int, int, Span], end: tuple[int, int, Span]) -> Iterator[Event]:
    """From the beginning of one piece of work to the beginning of another, or to the end of one that began before it."""
    (pid, tid, first), (other_pid, other_tid, then) = start, end
    leaves = _us(first.start)
    arrives = _us(then.start) if then.start >= first.start else _us(then.end)
    same = {"name": "task", "cat": "task", "id": number}
    if arrives >= leaves:
        yield {"ph": "s", "pid": pid, "tid": tid, "ts": leaves, **same}
        yield {"ph": "f", "bp": "e", "pid": other_pid, "tid": other_tid, "ts": arrives, **same}


def _target(pid: int, target: TargetTrace, version: int) -> Iterator[Event]:
    """What is known of a target, to within a round trip of a control call."""
    slices: list[Slice] = []
    if target.ready is not None:
        for landing in target.landings:
            more = {"starved_s": landing.starved_s}
            slices.append(
                Slice(f"rank {landing.rank}", "landing", "landing", target.ready, target.ready + landing.seconds, more)
            )
    if target.asked is not None and target.answered is not None:
        slices.append(Slice("votes", "vote and commit", "vote", target.asked, target.answered, {}))
        paused = max(target.asked, target.answered - target.pause_s)
        if target.pause_s:
            slices.append(Slice("pause", "forward passes stand still", "pause", paused, target.answered, {}))
        if target.commit_s:
            commit = max(paused, target.answered - (target.pause_s + target.commit_s) / 2)
            slices.append(Slice("commit", "commit", "commit", commit, commit + target.commit_s, {}))
    lanes = _lanes(slices)
    tracks = _names(lane for _, lane in lanes)
    yield from _titles(pid, pid, f"target {target.address}", tracks)
    yield from (_complete(pid, tracks[lane], each, version) for each, lane in lanes)
