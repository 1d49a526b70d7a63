"""Why tasks waited: against what can be read off the spans themselves, on pushes of random tasks, times and limits."""

from __future__ import annotations

import heapq
from itertools import count, pairwise

from hypothesis import given, settings, strategies as st

from syncline.scheduler.events import (
    STAGES,
    BarrierDone,
    CollectVotes,
    PushStarted,
    StageDone,
    StartBarrier,
    StartStage,
    TaskSpec,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.outcome import Span
from syncline.scheduler.schedule import Schedule
from syncline.scheduler.waits import find_waits

LATE = 2.0**-20  # from an instruction to the start of its work: the event loop's


@st.composite
def pushes(draw):
    """Tasks, groups, limits, and how long each piece of work takes (whole numbers: sums are exact)."""
    groups = list(range(draw(st.integers(1, 2))))
    tasks = []
    for index in range(draw(st.integers(1, 10))):
        stages = draw(st.sampled_from([("h2d", "prepare", "send"), ("prepare", "send"), ("prepare",), ("h2d", "prepare")]))
        group = max(draw(st.sampled_from(groups)), tasks[-1].group if tasks else 0)
        targets = frozenset({0}) if "send" in stages else frozenset()
        tasks.append(TaskSpec(index=index, group=group, tmp_bytes=draw(st.integers(0, 4)), stages=stages, targets=targets))
    slots = {stage: draw(st.integers(1, 3)) for stage in STAGES}
    limits = Limits(max_tmp_bytes=draw(st.integers(4, 12)), **slots)
    names = [(stage, task.index) for task in tasks for stage in task.stages] + [("barrier", group) for group in groups]
    return tasks, groups, limits, {name: draw(st.integers(1, 9)) for name in names}


def run(tasks, groups, limits, costs) -> list[Span]:
    """The spans of the push, by the real machine in virtual time."""
    machine, heap, numbers, spans = PipelineMachine(limits), [], count(), []
    heapq.heappush(
        heap, (0.0, -1, PushStarted(now=0.0, push_id=1, schedule=Schedule.of(tasks, groups), targets=frozenset({0})))
    )
    voted = False
    while heap:
        now, _, event = heapq.heappop(heap)
        for order in machine.handle(event):
            voted |= isinstance(order, CollectVotes)
            if isinstance(order, StartStage | StartBarrier):
                name = ("barrier", order.group) if isinstance(order, StartBarrier) else (order.stage, order.task)
                end = now + LATE + costs[name]
                spans.append(Span(*name, now + LATE, end))
                over = (
                    BarrierDone(now=end, push_id=1, group=name[1])
                    if name[0] == "barrier"
                    else StageDone(now=end, push_id=1, task=name[1], stage=name[0])
                )
                heapq.heappush(heap, (end, next(numbers), over))
    assert voted
    return spans


@settings(deadline=None, max_examples=300)
@given(pushes())
def test_every_wait_is_what_the_spans_say(push) -> None:
    tasks, groups, limits, costs = push
    spans = run(tasks, groups, limits, costs)
    specs = {task.index: task for task in tasks}
    at = {(span.stage, span.index): span for span in spans}
    held = {i: (at[spec.stages[0], i].start, at[spec.stages[-1], i].end) for i, spec in specs.items()}

    def is_ready(index: int, stage: str, now: float) -> bool:
        """Its last stage is over; or nothing was admitted after ``now`` before it."""
        before = specs[index].stages[: specs[index].stages.index(stage)]
        if before:
            return at[before[-1], index].end <= now
        return index == min(i for i, (start, _) in held.items() if start > now)

    for wait in find_waits(tasks, groups, limits, spans, began=0.0):
        middle = (wait.start + wait.end) / 2
        spec = specs[wait.task]
        assert wait.end <= at[wait.stage, wait.task].start
        if wait.cause == "slot":
            flying = sum(span.start <= middle < span.end for span in spans if span.stage == wait.stage)
            assert flying == getattr(limits, wait.stage)
        elif wait.cause == "watermark":
            in_use = sum(specs[i].tmp_bytes for i, (start, end) in held.items() if start <= middle < end)
            assert in_use + spec.tmp_bytes > limits.max_tmp_bytes
            assert wait.stage == spec.stages[0]
        elif wait.cause == "order":
            assert wait.on < wait.task and at[wait.stage, wait.on].start >= wait.end
            assert not is_ready(wait.on, wait.stage, middle)
        elif wait.cause == "queue":
            first = min(i for (stage, i), span in at.items() if stage == wait.stage and span.start > middle)
            assert first <= wait.on < wait.task and at[wait.stage, wait.on].start >= wait.end
            assert is_ready(first, wait.stage, middle)
        elif wait.cause == "barrier":
            assert wait.on < spec.group and at["barrier", wait.on].end >= wait.end
        else:
            assert wait.end - wait.start <= 2 * LATE


@settings(deadline=None, max_examples=300)
@given(pushes())
def test_between_two_stages_every_moment_has_its_cause(push) -> None:
    tasks, groups, limits, costs = push
    spans = run(tasks, groups, limits, costs)
    at = {(span.stage, span.index): span for span in spans}
    waits = find_waits(tasks, groups, limits, spans, began=0.0)
    for task in tasks:
        for before, stage in pairwise(task.stages):
            own = sorted((w.start, w.end) for w in waits if (w.stage, w.task) == (stage, task.index))
            reach = at[before, task.index].end
            for start, end in own:
                assert start == reach, "a gap, or an overlap"
                reach = end
            assert reach == at[stage, task.index].start
    admissions = sorted((w.start, w.end) for w in waits if specs_first(tasks, w))
    assert all(end <= start for (_, end), (start, _) in pairwise(admissions)), "one at a time"


def specs_first(tasks, wait) -> bool:
    return next(task for task in tasks if task.index == wait.task).stages[0] == wait.stage


def test_by_hand() -> None:
    """Two slots, room for three tasks of one byte: the fourth waits for a slot first, then for room."""
    tasks = [TaskSpec(index=i, group=0, tmp_bytes=1, stages=("prepare", "send"), targets=frozenset({0})) for i in range(4)]
    spans = [
        Span("prepare", 0, 0.0, 2.0), Span("prepare", 1, 0.0, 2.0), Span("send", 0, 2.0, 6.0), Span("prepare", 2, 2.0, 3.0),
        Span("send", 1, 6.0, 7.0), Span("prepare", 3, 6.0, 7.0), Span("send", 2, 7.0, 8.0), Span("send", 3, 8.0, 9.0),
        Span("barrier", 0, 7.0, 7.0),
    ]  # fmt: skip
    limits = Limits(max_tmp_bytes=3, prepare=2, send=1)
    found = [tuple(wait) for wait in find_waits(tasks, [0], limits, spans, began=0.0)]
    assert ("prepare", 2, "slot", -1, 0.0, 2.0) in found
    assert ("prepare", 3, "watermark", -1, 2.0, 6.0) in found
    assert ("send", 1, "slot", -1, 2.0, 6.0) in found
    assert ("send", 2, "queue", 1, 3.0, 6.0) in found
    assert ("send", 2, "slot", -1, 6.0, 7.0) in found
    assert not [wait for wait in found if wait[2] == "loop"]
