"""The row: written and read back, its figures, its provenance, its table and its picture."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest

from syncline.bench.measure import provenance
from syncline.bench.measure.bench import Bench
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.plot import plot_rows
from syncline.bench.measure.provenance import Provenance
from syncline.bench.measure.pushes import Push, Pushes
from syncline.bench.measure.rows import Row, Skipped, line, parse, read, whole_config
from syncline.bench.measure.table import print_table
from syncline.engine import TransferConfig

SECONDS = [0.4, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.12, 0.1, 0.1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A bench with a floor of 1e9 bytes a second."""
    bench = Bench(tensors=2, nbytes=10**8, repeat=10, out=tmp_path / "rows.jsonl")
    bench._floor("memcpy, 1 thread", [0.3, 0.1, 0.1, 0.1])
    return bench


def push(seconds: float, **more: object) -> Push:
    how = {"ok": True, "bytes": 5, "tasks": 2, "peak_tmp_bytes": 7, "landing_bytes": 9, "gather_messages": 0, **more}
    return Push(seconds=seconds, source_free_s=0.01, commit_s=0.02, pause_s=0.03, busy_s={"send": 0.5}, **how)  # type: ignore[arg-type]


def test_figures_of_a_row(bench: Bench) -> None:
    row = bench.add("x", SECONDS, kind="peer", nbytes=2 * 10**8, integrity=True, something=3)
    assert row.phases is not None
    assert (row.n, row.first_s, row.phases.ramp, row.phases.ramp_s, row.phases.warm_from) == (8, 0.4, 1, 0.2, 2)
    assert row.seconds.median == pytest.approx(0.1) and row.seconds.max == 0.12
    assert row.first_to_median == pytest.approx(4.0)
    assert row.gb_s == pytest.approx(2.0)
    assert row.span_gb_s == pytest.approx(8 * 0.2 / 0.82)
    assert row.over_floor == {"memcpy, 1 thread": pytest.approx(0.5)}  # twice the bytes in the floor's time
    assert row.ratio_to_memcpy == pytest.approx(2.0)
    assert row.warm == tuple(SECONDS[2:])
    assert row.figures == {"something": 3}


def test_a_line_is_flat_json_and_comes_back(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    row = bench.add("x", SECONDS, kind="push", nbytes=10**8, control="caught", knobs=whole_config({}), something=3)
    fields = json.loads(line(row))
    assert fields["something"] == 3 and "figures" not in fields
    assert fields["samples"] == SECONDS
    for key in ("row", "n", "seconds", "first_s", "first_to_median", "bytes", "gb_s", "ratio_to_memcpy", "integrity", "knobs"):
        assert key in fields
    for key in ("min", "median", "p90", "p99", "max"):
        assert fields["seconds"][key] > 0
    assert parse(line(row)) == row
    assert capsys.readouterr().out.splitlines()[-1] == line(row)
    assert bench._out is not None
    assert read(bench._out) == bench.rows


def test_lines_of_earlier_versions_are_read() -> None:
    old = (
        '{"row": "x", "n": 3, "seconds": {"min": 1.0, "median": 2.0, "max": 3.0}, "machine": {"cpu": "c", "cores": 2}, "us": 4}'
    )
    row = parse(old)
    assert isinstance(row, Row)
    assert (row.seconds.p99, row.machine.cores, row.warm, row.figures) == (3.0, 2, (), {"us": 4})


def test_what_is_no_row_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text(line(Skipped(row="x", skipped="why")) + "\n\n{nonsense\n")
    with pytest.raises(BenchError, match="rows:3: no row"):
        read(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples": [0.1, -0.2, 0.1]}, "-0.2 is among the seconds"),
        ({"samples": [0.1, 0.0, 0.1]}, "0.0 is among the seconds"),
        ({"seconds": {"min": 0.1, "median": -1.0, "max": 0.2}}, "-1.0 is among the seconds"),
        ({"seconds": {"min": 0.1, "median": 0, "max": 0.2}}, "0.0 is among the seconds"),
        ({"seconds": "fast"}, "seconds"),
        ({"seconds": [1.0]}, "seconds"),
        ({"seconds": None}, "seconds"),
        ({"phases": {"cold_s": 0.1, "ramp": 0, "ramp_s": None, "warm_from": -2, "settled": True}}, "warm_from of 'x' is -2"),
        ({"phases": {"cold_s": 0.1, "ramp": 0, "ramp_s": None, "warm_from": 4, "settled": True}}, "warm_from of 'x' is 4"),
        ({"samples": "many"}, "samples"),
        ({"machine": 3}, "machine"),
    ],
)
def test_rows_that_say_what_cannot_be_are_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    seconds = {"min": 0.1, "median": 0.1, "max": 0.2}
    fields = {"row": "x", "seconds": seconds, "samples": [0.1, 0.1, 0.2], **changes}
    file = tmp_path / "rows"
    file.write_text(json.dumps(fields))
    with pytest.raises(BenchError, match=f"rows:1: no row of syncline bench run: .*{re.escape(said)}"):
        read(file)


@pytest.mark.parametrize("data", [b"\x80\x93\xff", b"\x89PNG\r\n\x1a\n", b"[]", b"3", b"{}", b'{"row": "\xff"}'])
def test_files_of_other_kinds_are_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(data)
    with pytest.raises(BenchError, match="rows:1: no row of syncline bench run"):
        read(file)


def test_pushes_become_a_row(bench: Bench) -> None:
    pushes = Pushes(reports=(push(0.9), push(0.2), push(0.2, peak_tmp_bytes=8)), connect_s=1.5, intact=True)
    row = bench.push_result("x", pushes, nbytes=10**8, config={"landing": "streamed"}, against={"naive": 0.4}, integrity=True)
    assert isinstance(row, Row)
    assert row.knobs is not None and row.knobs["landing"] == "streamed" and "secret" not in row.knobs
    assert set(row.knobs) == set(TransferConfig.__dataclass_fields__) - {"secret"}
    assert row.knobs["bucket_bytes"] == 32 * 2**20  # the default, resolved
    assert row.figures["peak_tmp_bytes"] == 8 and row.figures["connect_s"] == 1.5
    assert row.figures["pause_s"] == 0.03 and row.figures["busy_s"] == {"send": 0.5}
    assert row.figures["ratio_to_naive"] == pytest.approx(0.5)
    assert row.digests is True


def test_pushes_that_failed_are_said_to_have(bench: Bench) -> None:
    found = bench.push_result("x", Pushes(error="PlanError: no"), nbytes=1, config={})
    assert found == bench.rows[-1]
    assert isinstance(found, Skipped) and found.failed and found.skipped == "PlanError: no"


def test_provenance_is_that_of_the_checkout(repository: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True).stdout.strip()

    if not (repository / ".git").exists():
        pytest.skip("not a checkout")
    here = Provenance.here()
    assert here.commit == git("rev-parse", "HEAD")
    assert here.dirty is bool(git("status", "--porcelain", "--untracked-files=no"))
    assert here.machine.cores == len(os.sched_getaffinity(0)) and here.machine.memory_bytes > 2**28
    assert here.versions["torch"]


def test_there_is_no_commit_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setattr(provenance, "_CHECKOUT", tmp_path)
    assert provenance._revision() == (None, None)
    monkeypatch.setattr(provenance, "_CHECKOUT", repository / "bench")  # installed into an environment inside some checkout
    assert provenance._revision() == (None, None)


def test_table_shows_every_row_and_why_others_are_missing(bench: Bench) -> None:
    bench.add("ours", SECONDS, kind="push", nbytes=10**8, integrity=True, control="caught")
    bench.add("wrong", SECONDS, kind="push", nbytes=10**8, integrity=False)
    bench.add("restless", [1.0] * 7 + [5.0] * 5, kind="work")
    bench.note("theirs", "it is [not] there")
    out = io.StringIO()
    print_table(bench.rows, out)
    lines = {text.split("│")[1].strip(): text.split("│") for text in out.getvalue().splitlines() if text.startswith("│")}
    assert [cell.strip() for cell in lines["ours"][2:-1]] == [
        "8", "400.0", "100.0", "106.0", "120.0", "1.00", "1.00", "yes", "caught",
    ]  # fmt: skip
    assert lines["wrong"][-3].strip() == "NO"
    assert lines["restless"][2].strip() == "6*" and "not steady" in out.getvalue()
    assert "skipped theirs: it is [not] there" in out.getvalue()


def test_picture(bench: Bench, tmp_path: Path) -> None:
    for kind in ("push", "peer"):
        bench.add(f"a {kind}", SECONDS, kind=kind, nbytes=10**8)
    bench.add("no bytes", SECONDS, kind="work")
    assert plot_rows(bench.rows, tmp_path / "few.png")
    for number in range(20):
        bench.add(f"row {number}", SECONDS, kind="push", nbytes=10**8)
    assert plot_rows(bench.rows, tmp_path / "many.png")
    sizes = [struct.unpack(">II", (tmp_path / name).read_bytes()[16:24]) for name in ("few.png", "many.png")]
    assert sizes[0][0] == sizes[1][0] > 800 and sizes[1][1] > 2 * sizes[0][1]  # higher with more bars
    assert not plot_rows([bench.note("x", "y")], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
