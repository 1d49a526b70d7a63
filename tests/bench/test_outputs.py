"""Files that commands write are tried before any work, and what cannot be written is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.bench import cli
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.run import RunArgs, bench_of
from syncline.bench.outputs import OutputError, check_outputs

FORMS = ["--model", "qwen3-8b", "--source", "fsdp:2", "--target", "tp:2"]


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "run", "--out"],
        ["bench", "run", "--plot"],
        ["bench", "gpu", "--device", "cpu", "--out"],
        ["bench", "trace", "--out"],
        ["bench", "trace", "--merge", "none.json", "--out"],
        ["bench", "simulate", *FORMS, "--trace"],
        ["bench", "calibrate", "--out"],
    ],
)
def test_they_are_tried_first(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None of these takes a second: nothing is measured."""
    assert cli.main([*words, str(tmp_path / "none" / "file")]) == 1
    said = capsys.readouterr()
    assert "cannot be written" in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("words", [["bench", "sweep", "--budget", "20s"], ["demo"]])
def test_a_folder_that_cannot_be_made_is_told_too(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main([*words, "--out", str(tmp_path / "file")]) == 1
    said = capsys.readouterr()
    assert "cannot be made a folder" in said.err and said.err.count("\n") == 1


def test_trying_changes_nothing(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    check_outputs(there, new, None, Path("/dev/null"))
    assert there.read_text() == "kept" and not new.exists()
    with pytest.raises(OutputError, match="cannot be written"):
        check_outputs(tmp_path)


def test_other_errors_of_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["bench", "sweep", "--out", str(tmp_path / "file" / "folder")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], ["bench", "explain", "--help"]])
def test_a_reader_that_has_gone_is_no_error(words: list[str]) -> None:
    code = f"import sys; from syncline.bench.cli import main; sys.exit(main({words!r}))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, timeout=100, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_small_watermark_takes_a_bucket_that_fits() -> None:
    """16 MiB is less than the largest default bucket; a knob that was not set must not refuse it."""
    assert "bucket_bytes" not in bench_of(RunArgs(max_tmp_bytes="16MiB")).knobs
    with pytest.raises(BenchError, match="--repeat 10 or more"):
        bench_of(RunArgs(peers=True, repeat=9))
