"""Traces in Perfetto's own trace processor: queries there give what our report says."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from syncline.bench.tracing.explain import Explanation
from syncline.engine.report import busy_seconds
from syncline.engine.trace import STAGES, Trace

SLICES = """
select process.name as process, slice.category as category, slice.name as name, slice.ts as ts, slice.dur as dur
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""


def busy_in_perfetto(rows: list[dict], ranks: int) -> dict[str, float]:
    """Stage -> seconds in which at least one task was in it, on the rank where that took longest, out of query results."""
    spans = defaultdict(list)
    for row in rows:
        spans[row["process"], row["category"]].append((row["ts"] * 1e-9, (row["ts"] + row["dur"]) * 1e-9))
    return {stage: max(busy_seconds(spans[f"source rank {rank}", stage]) for rank in range(ranks)) for stage in STAGES}


def check_in_perfetto(trace_processor, path: Path, busy_s: dict[str, float], peak_tmp_bytes: int) -> None:
    trace = Trace.load(path)
    trace_processor.load(path)
    rows = trace_processor.rows(SLICES)
    found = busy_in_perfetto(rows, len(trace.details))
    for stage in STAGES:
        number = sum(row["category"] == stage for row in rows)
        assert number == sum(span.stage == stage for spans in trace.ranks for span in spans)
        # our times are kept to the nanosecond, at both ends of every slice
        assert found[stage] == pytest.approx(busy_s[stage], abs=2e-9 * (2 + number))
    errors = trace_processor.rows("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert not errors
    (arrows,) = trace_processor.rows("select count(*) as n from flow")
    assert arrows["n"] == sum(event["ph"] == "s" for event in trace.events()) > 0
    sends = trace_processor.rows(
        "select a.name as a, b.name as b from flow join slice a on slice_out = a.id join slice b on slice_in = b.id "
        "where b.category = 'send'"
    )
    assert {(row["a"], row["b"]) for row in sends} == {
        (f"prepare {span.task}", f"send {span.task}") for spans in trace.ranks for span in spans if span.stage == "send"
    }
    counters = trace_processor.rows(
        "select name, max(value) as most, min(value) as least from counter join counter_track on track_id = counter_track.id "
        "group by name"
    )
    peak = {row["name"]: row["most"] for row in counters}
    assert peak["temporary bytes bytes"] <= peak_tmp_bytes
    assert all(row["least"] == 0 for row in counters)
    assert peak["tasks in flight send"] >= 1


async def test_a_push_of_two_ranks(tracing, trace_processor) -> None:
    traced = await tracing.push(ranks=2, targets=2, route="gather", max_tmp_bytes="64KiB")
    check_in_perfetto(trace_processor, traced.path, traced.report["busy_s"], traced.report["peak_tmp_bytes"])
    waits = {row["name"] for row in trace_processor.rows(SLICES) if row["category"] == "wait"}
    assert "waits for votes" in waits
    assert waits & {"waits for a prepare slot", "waits for a send slot", "waits for watermark"}
    processes = {row["name"] for row in trace_processor.rows("select name from process where name is not null")}
    assert processes == {"source rank 0", "source rank 1", *(f"target {t.address}" for t in traced.trace.targets)}


@pytest.mark.slow
@pytest.mark.timeout(170)
async def test_the_demo(trace_processor, tmp_path: Path) -> None:
    """What `syncline demo` leaves behind: its trace, and the report of the push that it is of."""
    command = [sys.executable, "-m", "syncline.bench.cli", "demo", "--steps", "3", "--new-tokens", "8", "--out", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-4000:]
    path = tmp_path / "trace.json"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    version = Trace.load(path).version
    (push,) = [event for event in events if event["event"] == "push" and event["version"] == version]
    check_in_perfetto(trace_processor, path, push["stages"], push["peak_tmp_bytes"])
    assert f"push of version {version}" in str(Explanation.of(Trace.load(path)))
