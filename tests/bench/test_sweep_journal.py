"""A sweep's file: what is appended is read back, a sweep goes on where it was, and files of other machines are refused."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from syncline.bench.measure.bed import Setup
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.provenance import Provenance
from syncline.bench.measure.rows import Row, Skipped, parse
from syncline.bench.tuning.journal import Journal, Replay, alone, read, setup_of
from syncline.bench.tuning.records import Record, Request, Sample
from syncline.bench.tuning.search import Search
from syncline.bench.tuning.space import MIB, Configuration, Space

SETUP = Setup(source="fsdp", source_ranks=2, nbytes=8 * MIB)
HERE = Provenance.here()
DEFAULT = Configuration.default("gloo", "staged")


def answer(c: Configuration, pushes: int) -> Sample:
    """A machine that always takes the same time, by knobs."""
    each = 0.1 + 0.01 * c.workers + 1e-9 * c.bucket_bytes
    if c.max_tmp_bytes < 8 * MIB:
        return Sample(refused="PlanError: 1 problem found while planning", elapsed_s=0.05)
    return Sample(
        seconds=(2 * each, *[each] * (pushes - 1)), elapsed_s=each * pushes + 0.2, peak_tmp_bytes=c.max_tmp_bytes, tasks=3,
        landing_bytes=5, busy_s={"h2d": 0.0, "prepare": 0.05, "send": 0.06}, intact=True,
    )  # fmt: skip


def sweep(path, *, stop_after=None, budget=60.0):
    """What the command does, without a machine. Returns the search and how many measurements were made."""
    journal = Journal(path, SETUP, HERE)
    search = Search(Space.of(SETUP.nbytes), [DEFAULT], budget_s=budget, first_block=journal.next_block)
    replay, made = Replay(journal.records), 0
    while (request := search.next()) is not None:
        sample = replay.take(request)
        if sample is None:
            if made == stop_after:
                break
            made += 1
            sample = answer(request.configuration, request.pushes)
            journal.add(Record(request=request, sample=sample), control="caught", knobs=request.configuration.knobs())
        search.tell(sample)
    return search, made


def test_what_is_appended_is_read_back_and_is_a_row_like_others(tmp_path):
    search, made = sweep(tmp_path / "rows.jsonl")
    records, origin = read(tmp_path / "rows.jsonl")
    assert records == search.records and len(records) == made > 20
    assert origin is not None and setup_of(origin) == SETUP and origin.machine == HERE.machine
    rows = [parse(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {type(row) for row in rows} == {Row, Skipped}
    for row, record in zip(rows, records, strict=True):
        if isinstance(row, Skipped):
            assert row.skipped == record.sample.refused
            continue
        assert row.samples == record.sample.seconds and row.n == len(record.sample.warm)
        assert (row.control, row.integrity, row.machine, row.versions) == ("caught", True, HERE.machine, HERE.versions)
        assert (row.knobs["bucket_bytes"], row.commit) == (record.configuration.bucket_bytes, HERE.commit)
        assert row.setup == msgspec.to_builtins(SETUP)


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path):
    whole, made = sweep(tmp_path / "whole.jsonl")
    _, first = sweep(tmp_path / "rows.jsonl", stop_after=17)
    resumed, second = sweep(tmp_path / "rows.jsonl")
    assert (first, first + second) == (17, made)
    strip = [dataclasses.replace(record.request, block=0) for record in whole.records]
    assert [dataclasses.replace(record.request, block=0) for record in resumed.records] == strip
    again, third = sweep(tmp_path / "rows.jsonl")
    assert third == 0 and again.next() is None


def test_blocks_of_different_runs_have_different_numbers(tmp_path):
    sweep(tmp_path / "rows.jsonl", stop_after=17)
    sweep(tmp_path / "rows.jsonl")
    records, _ = read(tmp_path / "rows.jsonl")
    assert max(r.request.block for r in records[:17]) < min(r.request.block for r in records[17:])


def test_a_half_written_last_line_is_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    sweep(path, stop_after=12)
    whole = path.read_bytes()
    for cut in (1, 40, len(whole) - whole[:-1].rindex(b"\n") - 2):
        path.write_bytes(whole[:-cut])
        assert len(read(path)[0]) == 11
    _, made = sweep(path, stop_after=1)
    assert made == 1 and len(read(path)[0]) == 12
    assert [json.loads(text)["row"] for text in path.read_text().splitlines()]


def test_a_longer_budget_uses_what_there_is_and_measures_the_finals_anew(tmp_path):
    sweep(tmp_path / "rows.jsonl", budget=30)
    search, second = sweep(tmp_path / "rows.jsonl", budget=90)
    _, all_anew = sweep(tmp_path / "other.jsonl", budget=90)
    assert 0 < second < all_anew
    records, _ = read(tmp_path / "rows.jsonl")
    finals = [r for r in search.records if r.request.phase == "final"]
    assert finals == records[-len(finals) :]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"setup": dataclasses.replace(SETUP, nbytes=16 * MIB)}, "setup: nbytes 8388608, here 16777216"),
        ({"setup": dataclasses.replace(SETUP, source_ranks=1)}, "setup: source_ranks 2, here 1"),
        ({"machine": msgspec.structs.replace(HERE.machine, cores=64)}, "machine: cores"),
        ({"versions": {**HERE.versions, "torch": "1.0"}}, "versions: torch"),
    ],
)
def test_a_file_of_another_machine_or_setup_is_refused_and_left_alone(tmp_path, change, named):
    path = tmp_path / "rows.jsonl"
    sweep(path, stop_after=3)
    before = path.read_bytes()
    there = msgspec.structs.replace(HERE, **{k: v for k, v in change.items() if k != "setup"})
    with pytest.raises(BenchError, match=named):
        Journal(path, change.get("setup", SETUP), there)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"sweep": {"request": 1}}', '{"row": "memcpy", "seconds": {}}'])
def test_a_line_that_is_no_measurement_is_named(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    sweep(path, stop_after=2)
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(BenchError, match=r"rows\.jsonl:3: no measurement"):
        Journal(path, SETUP, HERE)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BenchError, match="none"):
        read(tmp_path / "none.jsonl")


def test_a_replay_answers_each_request_once():
    request = Request(configuration=DEFAULT, pushes=4, phase="map", block=0)
    final = dataclasses.replace(request, phase="final")
    replay = Replay([Record(request=r, sample=Sample(elapsed_s=n)) for n, r in enumerate((request, final, request, final))])
    elsewhere = dataclasses.replace(request, block=7)
    assert [replay.take(r).elapsed_s for r in (elsewhere, final, request)] == [0, 1, 2]
    assert replay.take(request) is None
    assert replay.take(final) is None  # something was measured anew since


def test_a_file_that_is_no_sweeps_is_left_as_it_is(tmp_path):
    path = tmp_path / "rows.jsonl"
    for text in (b"notes of mine\nand no line break at the end", b'{"row": "x"}\n', b"[1]\n"):
        path.write_bytes(text)
        with pytest.raises(BenchError, match="no measurement"):
            Journal(path, SETUP, HERE)
        assert path.read_bytes() == text


@pytest.mark.parametrize("seconds", [[0.0], [-1.0], [1e400], ["fast"], None])
def test_times_that_are_none_are_told_with_their_line(tmp_path, seconds):
    path = tmp_path / "rows.jsonl"
    sweep(path, stop_after=3)
    lines = path.read_text().splitlines()
    second = json.loads(lines[1])
    second["sweep"]["sample"]["seconds"] = seconds
    lines[1] = json.dumps(second).replace("Infinity", "1e400")
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BenchError, match=r"rows\.jsonl:2: no measurement"):
        read(path)


def test_lines_of_two_sweeps_in_one_file_are_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    sweep(path, stop_after=3)
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    last["setup"]["nbytes"] += 4
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    with pytest.raises(BenchError, match=r"rows\.jsonl:3 is of another sweep than the lines before \(setup: nbytes"):
        read(path)


def test_one_sweep_at_a_time_writes_to_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    with alone(path), pytest.raises(BenchError, match="another sweep writes"), alone(path):
        pass
    with alone(path):
        assert read(path) == ([], None)
