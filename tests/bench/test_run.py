"""``syncline bench run``, as users start it, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.measure import floors
from syncline.bench.measure.bench import Bench
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.foreign import Package, run_ranks, version
from syncline.bench.measure.rows import Row, Skipped, parse
from syncline.bench.measure.run import RunArgs, bench_of, main
from syncline.bench.measure.suites import SUITES

SMALL = ("--tensors", "2", "--nbytes", str(4 * 2**20))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "syncline.bench.cli", "bench", "run", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False)

    return run


@pytest.mark.timeout(240)
def test_one_configuration(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    how = ["--source", "tp:2", "--target", "tp:2", "--transport", "gloo", "--landing", "streamed", "--bucket-bytes", "1MiB"]
    done = run(*how, *SMALL, "--repeat", "4", "--plot", "rows.png", "--out", "rows.jsonl")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows.jsonl").read_text() == done.stdout
    rows = [parse(text) for text in done.stdout.splitlines()]
    assert [row.row for row in rows] == [floors.MEMCPY, floors.MEMMOVE, floors.LOOPBACK, "gloo streamed tp:2 to tp:2"]
    row = rows[-1]
    assert isinstance(row, Row)
    assert row.integrity is True and row.control == "caught" and len(row.samples) == 4
    assert list(row.over_floor) == [floors.MEMCPY, floors.MEMMOVE, floors.LOOPBACK] and min(row.over_floor.values()) > 0
    assert row.knobs is not None and (row.knobs["bucket_bytes"], row.knobs["landing"]) == (2**20, "streamed")
    assert row.setup is not None and (row.setup["source"], row.setup["target_ranks"]) == ("tp", 2)
    assert row.figures["tasks"] >= 4
    assert "gloo streamed tp:2 to tp:2" in done.stderr and "caught" in done.stderr  # the table
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_suites_that_move_nothing(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("--suites", "driver", "--repeat", "2", "--no-floors", "--no-table")
    assert done.returncode == 0 and done.stderr == ""
    (row,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert row["kind"] == "work" and row["us_per_task"] > 0 and row["integrity"] is None


@pytest.mark.slow
async def test_planning_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tensors=1, nbytes=1, repeat=1)
    await SUITES["plan"](bench)
    (row,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert row["tasks"] > 1000 and row["peak_rss_bytes"] > 2**27 and row["n"] == 1


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"integrity": True, "control": "caught"}, 0),
        ({"integrity": False}, 1),
        ({"integrity": True, "control": "missed by digests (committed)"}, 1),
    ],
)
def test_exit_code_tells_of_what_arrived_wrong(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], code: int) -> None:
    async def fake(args: RunArgs, bench: Bench) -> None:
        bench.add("x", [1.0, 1.0], kind="push", **row)
        bench.note("y", "not installed")

    monkeypatch.setattr("syncline.bench.measure.run.measure", fake)
    assert main(RunArgs(table=False)) == code


def test_a_push_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fake(args: RunArgs, bench: Bench) -> None:
        bench.note("y", "PlanError", failed=True)

    monkeypatch.setattr("syncline.bench.measure.run.measure", fake)
    assert main(RunArgs(table=False)) == 1


def test_interpreters_are_checked() -> None:
    assert RunArgs(peer_python=("awex=/a", "vllm=/b")).interpreters() == {"awex": Path("/a"), "vllm": Path("/b")}
    for wrong in ("awex", "nobody=/a"):
        with pytest.raises(BenchError, match="--peer-python"):
            bench_of(RunArgs(peer_python=(wrong,)))
    with pytest.raises(BenchError, match="--repeat is 0, --nbytes is -1; it must be at least 1"):
        bench_of(RunArgs(repeat=0, nbytes=-1))


def test_what_makes_no_sense_is_said_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured, and without a table of nothing."""
    with pytest.raises(BenchError, match="--source ddp"):
        main(RunArgs(source="ddp", floors=False, suites=()))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


async def test_packages_that_are_not_there_are_named() -> None:
    found, reason = await version(Package(distribution="msgspec", imports="msgspec", module=""), sys.executable)
    assert found and not reason
    found, reason = await version(Package(distribution="nobody", imports="nobody_has_this", module=""), sys.executable)
    assert not found and "No module named 'nobody_has_this'" in reason
    found, reason = await version(Package(distribution="x", imports="x", module=""), "/no/such/python")
    assert not found and "No such file" in reason


async def test_a_rank_of_somebody_elses_that_fails_is_quoted() -> None:
    package = Package(distribution="nobody", imports="nobody", module="syncline.bench.measure.awex_peer")
    with pytest.raises(BenchError, match=r"nobody: a rank ended with exit code 1:[\s\S]*(awex|rank)"):
        await run_ranks(package, sys.executable, [{}])


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_peers_in_one_run(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Those that are not installed are skipped with the reason; the rest is measured beside our rows and the floors."""
    command = [sys.executable, "-m", "syncline.bench.cli", "bench", "run", "--peers", *SMALL, "--repeat", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    rows = [parse(text) for text in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    measured = {row.row: row for row in rows if isinstance(row, Row)}
    assert all(row.n >= 5 for row in measured.values())
    assert {row.kind for row in measured.values()} == {"floor", "push", "peer"}
    assert all(row.control == "caught" for row in measured.values() if row.kind == "push")
    assert all(row.integrity for row in measured.values() if row.kind != "floor" and "reload_weights" not in row.row)
    for row in rows:
        if isinstance(row, Skipped):
            assert "--peer-python" in row.skipped


def test_medians_of_few_are_refused() -> None:
    with pytest.raises(BenchError, match="--repeat 10"):
        bench_of(RunArgs(peers=True, repeat=5))
