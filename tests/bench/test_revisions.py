"""``syncline bench compare --revisions``: two commits of a clone, measured in turn, each with its own code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.bench import cli
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.revisions import measure_revisions
from syncline.bench.measure.rows import Row

# A push of the changed revision holds everything up for 400 ms: more than what other work on the machine does to one.
SLOWER = "\n\nimport time as _time\n_push = TransferEngine.push\nasync def _late(self, version, **how):\n"
SLOWER += "    _time.sleep(0.4)\n    return await _push(self, version, **how)\nTransferEngine.push = _late\n"


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.invalid"]
        command = ["git", "-C", str(tmp_path / "clone"), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return git


@pytest.fixture
def clone(tmp_path: Path, repository: Path, git: Callable[..., str]) -> Path:
    """A repository of what is here now (committed or not), and of a slower revision after it."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("scheduler", "stages", "engine", "adapters", "bench"):
        for file in (repository / name).rglob("*.py"):
            copy = clone / file.relative_to(repository)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    transfer = clone / "engine" / "transfer.py"
    transfer.write_text(transfer.read_text() + SLOWER)
    git("commit", "--quiet", "--all", "--message", "two")
    return clone


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_slower_revision_is_found(clone: Path, git: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    run = "--transport shm --landing staged --tensors 2 --nbytes 2097152 --repeat 8 --no-floors --no-control --no-table"
    command = ["bench", "compare", "--revisions", "main~1", "main", "--repository", str(clone), f"--run={run}"]
    assert cli.main([*command, "--fail-on-regression"]) == 1
    said = capsys.readouterr()
    (found,) = [json.loads(text) for text in said.out.splitlines()]
    assert found["verdict"] == "slower" and found["b_median"] - found["a_median"] > 0.3
    assert found["n_a"] >= 8 and found["n_b"] >= 8  # of two runs each
    assert [text for text in said.err.splitlines() if text.startswith("run ")] == [
        "run 1 of 4: main~1", "run 2 of 4: main", "run 3 of 4: main", "run 4 of 4: main~1",
    ]  # fmt: skip
    assert git("worktree", "list").count("\n") == 0  # none is left


def test_rows_carry_the_revision_that_they_are_of(clone: Path, git: Callable[..., str]) -> None:
    run = ["--suites", "driver", "--repeat", "2", "--no-floors", "--no-table"]
    old, new = measure_revisions(clone, ["main~1", "main"], [0, 1], run)
    for rows, revision in ((old, "main~1"), (new, "main")):
        (row,) = rows
        assert isinstance(row, Row)
        assert (row.commit, row.dirty) == (git("rev-parse", revision), False)


def test_a_revision_that_there_is_not(clone: Path, git: Callable[..., str]) -> None:
    with pytest.raises(BenchError, match=f"^{clone}: no revision 'no-such-revision': "):
        measure_revisions(clone, ["no-such-revision"], [0], [])
    assert git("worktree", "list").count("\n") == 0


def test_a_revision_that_cannot_be_imported(clone: Path, git: Callable[..., str]) -> None:
    (clone / "engine" / "__init__.py").write_text("raise ImportError('this one is broken')\n")
    git("commit", "--quiet", "--all", "--message", "three")
    with pytest.raises(BenchError, match="this one is broken"):
        measure_revisions(clone, ["main"], [0], [])
    assert git("worktree", "list").count("\n") == 0
