"""`explain` on pushes made up in virtual time, where what took how long is known exactly."""

from __future__ import annotations

import heapq
import json
from dataclasses import fields, replace
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from syncline.bench import cli
from syncline.bench.tracing.explain import Explanation
from syncline.bench.tracing.findings import Finding
from syncline.bench.tracing.path import critical_path
from syncline.bench.tracing.playback import play
from syncline.bench.tracing.record import TraceArgs
from syncline.bench.tracing.work import Work
from syncline.engine import TransferConfig
from syncline.engine.errors import ConfigError
from syncline.engine.messages import LandingTime
from syncline.engine.trace import RankTrace, Span, Step, TargetTrace, TaskRow, Trace
from syncline.scheduler.events import (
    STAGES,
    BarrierDone,
    CollectVotes,
    PushStarted,
    StageDone,
    StartBarrier,
    StartStage,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.schedule import Schedule

READY_S, VOTES_S = 1.0, 2.0


def run(tasks: list[TaskRow], groups: list[int], limits: Limits, cost, *, piped: float = READY_S) -> RankTrace:
    """One rank's part, by the real machine. ``cost(stage, task)``: seconds."""
    machine, heap, numbers, spans, done = PipelineMachine(limits), [], count(), [], piped
    schedule = Schedule.of([task.spec() for task in tasks], groups)
    heapq.heappush(heap, (piped, -1, PushStarted(now=piped, push_id=1, schedule=schedule, targets=frozenset({0}))))
    while heap:
        now, _, event = heapq.heappop(heap)
        for order in machine.handle(event):
            if isinstance(order, CollectVotes):
                done = now
            if isinstance(order, StartStage | StartBarrier):
                stage, index = ("barrier", order.group) if isinstance(order, StartBarrier) else (order.stage, order.task)
                end = now + cost(stage, index)
                spans.append(Span(stage, index, now, end))
                over = (
                    BarrierDone(now=end, push_id=1, group=index)
                    if stage == "barrier"
                    else StageDone(now=end, push_id=1, task=index, stage=stage)
                )
                heapq.heappush(heap, (end, next(numbers), over))
    return RankTrace(spans=spans, tasks=tasks, groups=groups, steps=[Step("start", 0.0, piped)], piped=piped, done=done)


def push(*ranks: RankTrace, limits: Limits, targets=()) -> Trace:
    done = max(rank.done for rank in ranks)
    knobs = {"max_tmp_bytes": limits.max_tmp_bytes, **{f"{stage}_concurrency": getattr(limits, stage) for stage in STAGES}}
    return Trace(version=3, details=list(ranks), voting=(done, done + VOTES_S), knobs=knobs, targets=list(targets))


def rows(number: int, *, tmp: int = 1, stages=("prepare", "send")) -> list[TaskRow]:
    return [TaskRow(index, 0, tmp, 100, stages) for index in range(number)]


ROOM = Limits(max_tmp_bytes=1000)


@st.composite
def solo(draw) -> Trace:
    groups = list(range(draw(st.integers(1, 2))))
    tasks: list[TaskRow] = []
    for index in range(draw(st.integers(1, 12))):
        stages = draw(st.sampled_from([("h2d", "prepare", "send"), ("prepare", "send"), ("prepare",)]))
        group = max(draw(st.sampled_from(groups)), tasks[-1].group if tasks else 0)
        tasks.append(TaskRow(index, group, draw(st.integers(0, 4)), 100, stages))
    limits = Limits(max_tmp_bytes=draw(st.integers(4, 12)), **{stage: draw(st.integers(1, 3)) for stage in STAGES})
    costs = draw(st.lists(st.integers(1, 9), min_size=3 * len(tasks) + 2, max_size=3 * len(tasks) + 2))
    names = [(stage, task.index) for task in tasks for stage in STAGES] + [("barrier", group) for group in (0, 1)]
    table = dict(zip(names, costs, strict=True))
    return push(run(tasks, groups, limits, lambda *name: float(table[name])), limits=limits)


@settings(deadline=None, max_examples=150)
@given(solo())
def test_played_back_unchanged_a_push_takes_as_long_as_it_took(trace: Trace) -> None:
    assert play(Work.of(trace)) == trace.seconds


@settings(deadline=None, max_examples=150)
@given(solo())
def test_the_critical_path_fills_the_push_with_work_that_was_done_then(trace: Trace) -> None:
    path = critical_path(trace)
    assert path[0].start == 0.0 and path[-1].end == trace.seconds
    for one, two in pairwise(path):
        assert one.end == two.start
    spans = {(span.stage, span.task): span for span in trace.ranks[0]}
    for segment in path[1:-1]:
        span = spans[segment.what, segment.task]
        assert span.start <= segment.start < segment.end <= span.end
    assert [path[0].what, path[-1].what] == ["steps", "votes"]


@settings(deadline=None, max_examples=50)
@given(solo())
def test_anything_can_be_explained_in_words(trace: Trace) -> None:
    explanation = Explanation.of(trace)
    text = str(explanation)
    assert "critical path" in text
    assert sum(explanation.shares.values()) == pytest.approx(1.0)
    names = {field.name for field in fields(TransferConfig)}
    assert {knob for finding in explanation.findings for knob in finding.knobs} <= names


def test_a_finding_may_name_no_knob_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="max_temp_bytes"):
        Finding(cause="watermark", what="", gain_s=1.0, because="x", knobs={"max_temp_bytes": 1})


def test_two_stages_one_after_the_other_for_want_of_room() -> None:
    """Eight tasks of two seconds in each of two stages, room for one at a time: 32 s, and with room for all 18 s."""
    limits = Limits(max_tmp_bytes=1, prepare=1, send=1)
    trace = push(run(rows(8), [0], limits, lambda stage, _: 0.0 if stage == "barrier" else 2.0), limits=limits)
    assert trace.seconds == READY_S + 32 + VOTES_S
    cause = Explanation.of(trace).cause
    assert cause is not None
    assert (cause.cause, cause.gain_s, cause.knobs["max_tmp_bytes"]) == ("watermark", 14.0, 2)


def test_a_stage_with_one_slot() -> None:
    """Sixteen tasks wait for the one slot of send: two slots halve the time, and so would a send that is twice as fast."""
    limits = Limits(max_tmp_bytes=1000, send=1)
    trace = push(run(rows(16), [0], limits, lambda stage, _: {"prepare": 0.5, "send": 4.0}.get(stage, 0.0)), limits=limits)
    found = [(finding.cause, finding.what) for finding in Explanation.of(trace).findings]
    assert found[:2] == [("stage", "send"), ("concurrency", "send")]
    assert Explanation.of(trace).findings[1].knobs == {"send_concurrency": 2}
    assert Explanation.of(trace).shares["send"] == pytest.approx(64 / trace.seconds)


def test_a_rank_that_is_slow_alone() -> None:
    fast = run(rows(8), [0], ROOM, lambda stage, _: 1.0 if stage != "barrier" else 0.0)
    tasks = [replace_index(task, task.index + 8) for task in rows(8)]
    slow = run(tasks, [0], ROOM, lambda stage, _: {"send": 5.0, "prepare": 1.0}.get(stage, 0.0))
    explanation = Explanation.of(push(fast, slow, limits=ROOM))
    cause = explanation.cause
    assert cause is not None and (cause.cause, cause.what, cause.knobs) == ("rank", "1", {})
    assert "send 5.0 times" in cause.because
    assert {segment.rank for segment in explanation.path if segment.what == "send"} == {1}


def replace_index(task: TaskRow, index: int) -> TaskRow:
    return TaskRow(index, task.group, task.tmp_bytes, task.nbytes, task.stages)


def test_a_rank_that_others_wait_for_inside_their_work() -> None:
    """Rank 0 owns, rank 1 contributes: both work until the slower one is through, which one is seen from its own part."""

    def rank(own: float, tasks: list[TaskRow]) -> RankTrace:
        spans = [Span("prepare", task.index, READY_S + 4 * task.index, READY_S + 4 * task.index + 4) for task in tasks]
        spans += [
            Span("send", t.index, READY_S + 4 * t.index + 4, READY_S + 4 * t.index + 5) for t in tasks if "send" in t.stages
        ]
        done = max(span.end for span in spans)
        spans.append(Span("barrier", 0, done, done))
        ends = {task.index: READY_S + 4 * task.index + own for task in tasks}
        return RankTrace(spans=spans, tasks=tasks, groups=[0], local_ends=ends, piped=READY_S, done=done)

    owner, contributor = rank(0.5, rows(6)), rank(3.9, rows(6, stages=("prepare",)))
    explanation = Explanation.of(push(owner, contributor, limits=replace(ROOM, prepare=1, send=1)))
    assert explanation.waits["rank 1"] == pytest.approx(6 * 3.4)
    on = [segment.rank for segment in explanation.path if segment.what == "prepare" and segment.seconds > 1]
    assert on == [1] * 6


def test_a_target_that_votes_late() -> None:
    rank = run(rows(2), [0], ROOM, lambda *_: 0.1)
    asked = rank.done
    targets = [
        TargetTrace(address=f"unix:{n}", ready=1.0, asked=asked, answered=asked + took)
        for n, took in enumerate((0.1, 0.1, 2.0))
    ]
    cause = Explanation.of(push(rank, limits=ROOM, targets=targets)).cause
    assert cause is not None and (cause.cause, cause.what) == ("target", "unix:2")
    assert cause.gain_s == pytest.approx(1.9)


@pytest.mark.parametrize(("starved", "blamed"), [(0.1, True), (15.0, False)])
def test_a_target_that_takes_longer_than_what_is_sent_to_it(starved: float, blamed: bool) -> None:
    rank = run(rows(8), [0], ROOM, lambda stage, _: 4.0 if stage == "send" else 0.1)
    target = TargetTrace(
        address="unix:slow", ready=1.0, asked=rank.done, answered=rank.done, landings=[LandingTime(0, 16.0, starved)]
    )
    text = str(Explanation.of(push(rank, limits=ROOM, targets=[target])))
    assert ("it waits for unix:slow, which had always something to work on" in text) == blamed


def test_many_small_tasks() -> None:
    """A loop that needs longer to start work than the work takes: larger buckets."""
    spans, now = [], READY_S
    for index in range(20):
        spans.append(Span("send", index, now + 0.5, now + 0.6))
        now += 0.6
    rank = RankTrace(
        spans=[*spans, Span("barrier", 0, now, now)], tasks=rows(20, stages=("send",)), groups=[0], piped=READY_S, done=now
    )
    cause = Explanation.of(push(rank, limits=replace(ROOM, send=1))).cause
    assert cause is not None and cause.cause == "overhead" and "bucket_bytes" in cause.knobs


def test_nothing_stands_out_where_nothing_takes_time() -> None:
    rank = run(rows(1), [0], ROOM, lambda *_: 0.001, piped=0.01)
    assert "nothing stands out" in str(Explanation.of(push(rank, limits=ROOM)))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, merged = tmp_path / "trace.json", tmp_path / "merged.json"
    trace = push(run(rows(4), [0], ROOM, lambda *_: 1.0), limits=ROOM)
    trace.save(path)
    assert cli.main(["bench", "explain", str(path)]) == 0
    assert capsys.readouterr().out == f"{Explanation.of(trace)}\n"
    assert cli.main(["bench", "explain", str(merged)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["bench", "trace", "--merge", str(path), str(path), "--out", str(merged)]) == 0
    processes = {e["args"]["name"] for e in json.loads(merged.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert processes == {"push 3, source rank 0"}


def test_wrong_arguments_of_the_recording_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks is 0.*\n.*pushes is -1"):
        TraceArgs(ranks=0, pushes=-1)


async def test_a_recording(tmp_path: Path) -> None:
    from syncline.bench.tracing.record import record

    args = TraceArgs(out=tmp_path / "trace.json", mebibytes=8, pushes=2, max_tmp_bytes="8MiB", transport="gloo")
    await record(args)
    trace = Trace.load(args.out)
    assert (trace.version, len(trace.details), len(trace.targets)) == (2, 2, 1)
    assert trace.knobs["max_tmp_bytes"] == 8 * 2**20
    assert {span.stage for spans in trace.ranks for span in spans} == {"prepare", "send", "barrier"}
