"""The trace of a push: what it says is what happened, on one time axis, in a form that viewers read."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from syncline.engine.errors import TraceError
from syncline.engine.report import busy_seconds
from syncline.engine.trace import STAGES, Trace, merged_json
from syncline.engine.trace_clock import ClockLog, Trip, estimate


async def traced(pair, **config):
    engine = await pair.start(**config)
    await engine.push(1)
    return await engine.push(2)


async def test_saved_and_loaded_it_is_the_same(pair, run_dir) -> None:
    report = await traced(pair, targets=2)
    path = run_dir / "trace.json"
    report.trace.save(path)
    found = Trace.load(path)
    assert (found.version, found.voting, found.knobs, found.origin) == (
        2, report.trace.voting, report.trace.knobs, report.trace.origin,
    )  # fmt: skip
    assert found.knobs["max_tmp_bytes"] == 64 * 1024
    assert list(found.targets) == list(report.trace.targets)
    for ours, theirs in zip(found.details, report.trace.details, strict=True):
        assert ours == replace(theirs, spans=list(theirs.spans))
    assert found.waits == report.trace.waits
    assert found.events() == report.trace.events()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"traceEvents": []}', '{"format": 2, "syncline": {}}', '{"format": 1, "syncline": 3}']
)
def test_what_is_no_trace_is_refused(run_dir, content: str) -> None:
    path = run_dir / "trace.json"
    path.write_text(content)
    with pytest.raises(TraceError, match="no trace that this version of syncline has written"):
        Trace.load(path)
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.load(run_dir / "none.json")


def check_format(events: list[dict]) -> None:
    """What Chrome's trace format asks for, and what we promise of it: nothing overlaps on a track, arrows begin and end inside
    of slices, in the order of time, and counters end at zero."""
    slices = defaultdict(list)
    arrows = defaultdict(dict)
    named = {(event["pid"], event.get("tid")) for event in events if event["ph"] == "M"}
    for event in events:
        assert event["ph"] in "MXCsf" and (event["ph"] == "M" or event["ts"] is not None)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in named
            slices[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    for track, spans in slices.items():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start, f"slices overlap on {track}"
    for ends in arrows.values():
        assert ends.keys() == {"s", "f"} and ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            assert any(start <= end["ts"] <= stop for start, stop in slices[end["pid"], end["tid"]])
    for name in ("temporary bytes", "tasks in flight"):
        values = [event for event in events if event["ph"] == "C" and event["name"] == name]
        assert values and [event["ts"] for event in values] == sorted(event["ts"] for event in values)
        assert all(value >= 0 for event in values for value in event["args"].values())
        assert set(values[-1]["args"].values()) == {0}


async def test_its_events_keep_the_format_and_agree_with_the_report(pair, run_dir) -> None:
    report = await traced(pair)
    events = json.loads(report.trace.to_json())["traceEvents"]
    check_format(events)
    for stage in STAGES:
        spans = [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events if event.get("cat") == stage]
        assert busy_seconds(spans) == pytest.approx(report.stages[stage].busy_s, abs=1e-6 * (1 + len(spans)))
        assert len(spans) == report.stages[stage].tasks
    tmp = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == "temporary bytes"]
    assert (
        0 < max(tmp) <= report.peak_tmp_bytes
    )  # bytes are reserved a little before work starts, and given back a little after
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert {
        "send 0",
        "prepare 3",
        "barrier 0",
        "enter",
        "start",
        "waits for votes",
        "landing",
        "vote and commit",
    } <= names.keys()
    # to the next stage, and to the barrier
    assert sum(event["ph"] == "s" for event in events) == report.stages["send"].tasks + report.stages["prepare"].tasks


def test_the_check_of_the_format_can_fail() -> None:
    title = {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "x"}}
    one = {"ph": "X", "pid": 0, "tid": 1, "name": "a", "ts": 0.0, "dur": 2.0}
    with pytest.raises(AssertionError, match="overlap"):
        check_format([title, one, {**one, "ts": 1.0}])
    arrow = {"ph": "s", "pid": 0, "tid": 1, "id": 1, "ts": 5.0}
    with pytest.raises(AssertionError):
        check_format([title, one, arrow, {**arrow, "ph": "f", "ts": 6.0}])


async def test_several_pushes_in_one_file(pair) -> None:
    engine = await pair.start()
    reports = [await engine.push(version) for version in (1, 2)]
    events = json.loads(merged_json([report.trace for report in reports]))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"push 1, source rank 0", "push 2, source rank 0"} <= names
    first = [event for event in events if event["ph"] == "X" and event["pid"] < 1_000_000]
    second = [event for event in events if event["ph"] == "X" and event["pid"] >= 1_000_000]
    assert max(event["ts"] for event in first if event["name"].startswith("send")) < min(event["ts"] for event in second)


async def test_the_landing_is_on_record(pair) -> None:
    """A receiver that is fed slowly says that it starved, and for how long."""
    report = await traced(pair)
    (target,) = report.trace.targets
    assert target.ready <= target.asked <= target.answered <= report.trace.seconds
    (landing,) = target.landings
    assert 0 <= landing.starved_s <= landing.seconds <= target.answered
    assert target.commit_s == report.targets[target.address].commit_s > 0


async def test_without_tracing_nothing_is_taken_down(pair) -> None:
    engine = await pair.start(trace=False)
    report = await engine.push(1)
    assert report.trace is None
    assert len(engine._session._wiring.local_ends) == 0


def test_columns_come_back_as_they_were() -> None:
    from syncline.engine.trace_log import MarkColumns, SpanColumns, SpanView, TaskColumns, TaskRow
    from syncline.scheduler.outcome import Moments, Spans

    spans = Spans()
    for stage, index, start, end in (("send", 3, 0.5, 1.25), ("barrier", 0, 1.0, 2.0), ("h2d", 70_000, 2.0, 2.0)):
        spans.add(stage, index, start, end)
    view = SpanView(SpanColumns.of(spans), 10.0)
    assert [(s.stage, s.task, s.start, s.end, s.name) for s in view] == [
        ("send", 3, 10.5, 11.25, "send 3"), ("barrier", 0, 11.0, 12.0, "barrier 0"), ("h2d", 70_000, 12.0, 12.0, "h2d 70000"),
    ]  # fmt: skip
    assert (len(view), view[-1], view[1:]) == (3, view[2], [view[1], view[2]])
    rows = [TaskRow(0, 0, 5, 2**40, ("h2d", "prepare", "send")), TaskRow(9, 1, 0, 7, ("prepare",))]
    assert list(TaskColumns.of(rows).rows()) == rows
    moments = Moments()
    moments.add(4, 1.5)
    moments.add(2, 0.25)
    assert MarkColumns.of(moments).moments(1.0) == {4: 2.5, 2: 1.25}


latencies = st.floats(1e-5, 0.2)


@settings(deadline=None, max_examples=200)
@given(
    offset=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(st.floats(0, 10), latencies, st.floats(0, 1), latencies), min_size=1, max_size=6),
    told=st.tuples(st.floats(10, 20), latencies),
)
def test_the_offset_between_clocks_is_within_its_error(offset, trips, told) -> None:
    """Messages take times that are unknown and unequal; the estimate says how far off it may be, and is right."""
    theirs, arrived, decided = [], {}, {}
    for number, (begins, out, decides, back) in enumerate(trips):
        step = f"1/{number}"
        theirs.append(Trip(step, begins - offset, begins + out + decides + back - offset))
        arrived[step], decided[step] = begins + out, begins + out + decides
    theirs.append(Trip("1/done", told[0] - offset, None))
    arrived["1/done"] = sum(told)
    found = estimate(theirs, arrived, decided)
    best = min((out + back) / 2 for _, out, _, back in trips)
    assert abs(found.seconds - offset) <= found.error_s + 1e-6
    assert found.error_s <= best + 1e-6


def test_a_rank_that_never_had_an_answer_is_of_unknown_offset() -> None:
    found = estimate([Trip("1/enter", 5.0)], {"1/enter": 7.5}, {})
    assert (found.seconds, found.error_s) == (2.5, float("inf"))
    assert estimate([], {}, {}).seconds == 0.0


def test_steps_that_are_past_are_forgotten() -> None:
    times = iter(range(100))
    clock = ClockLog(lambda: float(next(times)))
    for step in ("1/enter", "2/enter"):
        clock.left(step)
        clock.arrived(step, 1)
        clock.decided(step)
        clock.back(step)
    clock.forget(lambda step: step.startswith("1/"))
    assert clock.trips() == [Trip("2/enter", 4.0, 7.0)]
    assert clock.offset(1, [Trip("1/enter", 0.0, 1.0)]).error_s == float("inf")
    assert clock.offset(1, [Trip("2/enter", 4.0, 7.0)]) == estimate(
        [Trip("2/enter", 4.0, 7.0)], {"2/enter": 5.0}, {"2/enter": 6.0}
    )
