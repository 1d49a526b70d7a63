"""What in a trace cannot have been: a file may have been edited, or cut, since a push wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from syncline.scheduler.errors import PlanError
from syncline.scheduler.outcome import SPAN_NAMES
from syncline.scheduler.schedule import Schedule

if TYPE_CHECKING:
    from .trace import RankTrace, TargetTrace, Trace
    from .trace_log import Span, TaskRow

LIMITS = ("max_tmp_bytes", "h2d_concurrency", "prepare_concurrency", "send_concurrency")
"""Knobs that a push cannot be played back without."""
_FARTHEST_S = 1e7
"""No push takes months. Times beyond it would not add up to the nanosecond any more."""
_ROUNDING_S = 1e-6
_CLOCKS = 1.01
"""So much faster may the clock of one machine run than that of another."""


def contradictions(trace: Trace) -> list[str]:
    """What of ``trace`` does not fit together, one line each; empty for what a push wrote.

    A trace without any is safe to explain: every piece of work is known with its task, ran in plan order and within the limits.
    """
    found = list(_whole(trace))
    for number, target in enumerate(trace.targets):
        found += [f"target {number} ({target.address}): {text}" for text in _target(target, trace.seconds)]
    for number, rank in enumerate(trace.details):
        found += [f"source rank {number}: {text}" for text in _rank(rank, trace)]
    return found + list(_owners(trace.details))


def _whole(trace: Trace) -> Iterator[str]:
    if not trace.details:
        yield "it tells of no source rank"
    for name in LIMITS:
        value = trace.knobs.get(name)
        if not isinstance(value, int) or value < 1:
            yield f"knob {name} is {'missing' if value is None else repr(value)}; it must be a whole number of at least 1"
    for name, value in trace.knobs.items():
        if name not in LIMITS and isinstance(value, int) and value < 0:
            yield f"knob {name} is {value}; it must be at least 0"
    if trace.version < 0:
        yield f"version is {trace.version}; it must be at least 0"
    yield from _in_order(("all ranks done", trace.voting[0]), ("all votes in", trace.voting[1]))
    if trace.details and not trace.seconds > 0:
        yield f"the whole push took {trace.seconds} s"


def _target(target: TargetTrace, push_s: float) -> Iterator[str]:
    """``push_s``: seconds of the whole push, by the source's clock."""
    yield from _in_order(("ready", target.ready), ("asked", target.asked), ("answered", target.answered))
    lengths = {"commit_s": target.commit_s, "pause_s": target.pause_s}
    for landing in target.landings:
        lengths |= {f"landing of rank {landing.rank}": landing.seconds, f"starved_s of rank {landing.rank}": landing.starved_s}
    for name, seconds in lengths.items():
        if not 0 <= seconds <= _FARTHEST_S:
            yield f"{name} is {seconds} s"
        elif seconds > _CLOCKS * push_s + _ROUNDING_S:
            yield f"{name} is {seconds} s, of a push that took {push_s} s"


def _rank(rank: RankTrace, trace: Trace) -> Iterator[str]:
    yield from _in_order(("began", rank.began), ("piped", rank.piped), ("done", rank.done))
    if rank.began < -_ROUNDING_S:
        yield f"it began {-rank.began} s before the push"
    for step in rank.steps:
        yield from _in_order((f"step {step.name} began", step.start), (f"step {step.name} ended", step.end))
    problems = list(_tasks(rank, trace.knobs))
    yield from problems
    if not problems:  # spans are held against tasks and groups
        yield from _spans(rank)
        if not trace.targets or not all(target.error for target in trace.targets):
            yield from _barriers(rank)


def _tasks(rank: RankTrace, knobs: Mapping[str, int | str]) -> Iterator[str]:
    """By the scheduler's own rules, and within the watermark."""
    try:
        largest = Schedule.of([row.spec() for row in rank.tasks], rank.groups).largest
    except PlanError as error:
        yield from error.problems
        return
    limit = knobs.get("max_tmp_bytes")
    if largest is not None and isinstance(limit, int) and largest.tmp_bytes > limit:
        yield f"task {largest.index} held {largest.tmp_bytes} temporary bytes, more than max_tmp_bytes ({limit})"
    for row in rank.tasks:
        if row.nbytes < 0:
            yield f"task {row.index} has {row.nbytes} bytes"


def _spans(rank: RankTrace) -> Iterator[str]:
    rows = {row.index: row for row in rank.tasks}
    spans: dict[tuple[str, int], Span] = {}
    for span in rank.spans:
        if not _is_known(span, rows, rank.groups):
            yield f"{span.name} is work of no task or mesh group of this rank"
        elif (span.stage, span.task) in spans:
            yield f"{span.name} is there twice"
        else:
            spans[span.stage, span.task] = span
            times = ("pipeline", rank.piped), (f"start of {span.name}", span.start), (f"end of {span.name}", span.end)
            yield from _in_order(*times, ("done", rank.done))
    for row in rank.tasks:
        yield from _stages(row, spans)
    for stage in SPAN_NAMES:
        order = rank.groups if stage == "barrier" else list(rows)
        starts = [(f"start of {stage} {index}", spans[stage, index].start) for index in order if (stage, index) in spans]
        yield from _in_order(*starts)
    for task, at in rank.local_ends.items():
        prepare = spans.get(("prepare", task))
        if prepare is not None:
            yield from _in_order((f"start of {prepare.name}", prepare.start), (f"this rank's part of {prepare.name}", at))


def _barriers(rank: RankTrace) -> Iterator[str]:
    """All of them, unless every target was lost: that ends a push at once."""
    found = {span.task for span in rank.spans if span.stage == "barrier"}
    for group in rank.groups:
        if group not in found:
            yield f"there is no barrier {group}, which every push goes through before a target can commit"


def _is_known(span: Span, rows: Mapping[int, TaskRow], groups: Iterable[int]) -> bool:
    return span.task in groups if span.stage == "barrier" else span.task in rows and span.stage in rows[span.task].stages


def _stages(row: TaskRow, spans: Mapping[tuple[str, int], Span]) -> Iterator[str]:
    """One after the other. The last ones may be missing: nobody was left to send it to."""
    ran = [spans.get((stage, row.index)) for stage in row.stages]
    for stage, one, two in zip(row.stages, ran, ran[1:], strict=False):
        if one is None and two is not None:
            yield f"there is {two.name}, and no {stage} {row.index}, which comes before it"
        if one is not None and two is not None:
            yield from _in_order((f"end of {one.name}", one.end), (f"start of {two.name}", two.start))


def _owners(details: Iterable[RankTrace]) -> Iterator[str]:
    owners: dict[int, int] = {}
    for rank, told in enumerate(details):
        for row in told.tasks:
            if "send" in row.stages and owners.setdefault(row.index, rank) != rank:
                yield f"task {row.index} is sent by source ranks {owners[row.index]} and {rank}; one rank sends a task"


def _in_order(*moments: tuple[str, float | None]) -> Iterator[str]:
    known = [(name, at) for name, at in moments if at is not None]
    for name, at in known:
        if not -_FARTHEST_S <= at <= _FARTHEST_S:
            yield f"{name} is at {at} s"
    for (name, at), (other, then) in pairwise(known):
        if at > then:
            yield f"{name} ({at:.6f} s) comes after {other} ({then:.6f} s)"
