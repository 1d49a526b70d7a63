"""Rows of revisions: each in a worktree of its own, measured in turn, so that what changes with the hour changes all alike."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import BenchError
from .rows import Row, Skipped, read

FOLDERS = ("scheduler", "stages", "engine", "adapters", "bench")
_RUN_S = 3600.0
# Prints where syncline comes from: an installed one must not be measured in a revision's place.
_ASK = "import syncline.bench, syncline.engine; print(syncline.bench.__path__[0]); print(syncline.engine.__path__[0])"


def measure_revisions(
    repository: Path, revisions: Sequence[str], order: Sequence[int], arguments: Sequence[str]
) -> list[list[Row | Skipped]]:
    """``syncline bench run`` with ``arguments`` in each revision, in ``order`` (indexes of ``revisions``). Rows by revision.

    Raises:
        BenchError: no such revision; a run failed.
    """
    found: list[list[Row | Skipped]] = [[] for _ in revisions]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-compare-")))
        trees = [
            stack.enter_context(_worktree(repository, revision, folder / str(number)))
            for number, revision in enumerate(revisions)
        ]
        for turn, index in enumerate(order):
            print(f"run {turn + 1} of {len(order)}: {revisions[index]}", file=sys.stderr)
            out = folder / f"{turn}.jsonl"
            _run(trees[index], [*arguments, "--out", str(out)])
            found[index] += read(out)
    return found


@contextlib.contextmanager
def _worktree(repository: Path, revision: str, folder: Path) -> Iterator[Path]:
    """A checkout of ``revision``; yields the folder to import ``syncline`` from."""
    checkout = folder / "checkout"
    folder.mkdir()
    named = f"{repository.resolve()}: no revision {revision!r}"
    _git(repository, "rev-parse", "--verify", f"{revision}^{{commit}}", failing=named)
    _git(repository, "worktree", "add", "--detach", "--quiet", str(checkout), revision)
    try:
        package = folder / "tree" / "syncline"
        package.mkdir(parents=True)
        for name in FOLDERS:
            (package / name).symlink_to(checkout / name, target_is_directory=True)
        _check(package)
        yield package.parent
    finally:
        _git(repository, "worktree", "remove", "--force", str(checkout))


def _check(package: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], env=_environment(package.parent), capture_output=True, text=True, check=False, timeout=60,
        cwd=package.parent,
    )  # fmt: skip
    if asked.stdout.split() != [str(package / "bench"), str(package / "engine")]:
        raise BenchError(
            f"the revision in {package} cannot be imported instead of the installed syncline:\n{asked.stderr[-1000:]}"
        )


def _run(tree: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "syncline.bench.cli", "bench", "run", *arguments]
    done = subprocess.run(
        command, env=_environment(tree), cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        timeout=_RUN_S,
    )  # fmt: skip
    if done.returncode not in {0, 1}:  # 1: a row is not intact, which the comparison will say
        raise BenchError(f"syncline bench run in {tree} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")


def _environment(tree: Path) -> dict[str, str]:
    """Python finds ``syncline`` in ``tree`` before an installed one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))}


def _git(repository: Path, *arguments: str, failing: str | None = None) -> None:
    """``failing``: what it means if git says no; by default the command."""
    command = ["git", "-C", str(repository), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise BenchError(f"{failing or ' '.join(command)}: {done.stderr.strip()}")
