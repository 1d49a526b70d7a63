"""The guards of the project are able to fail: each is shown a fault of its kind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, repository: Path, folders: Sequence[str]) -> Path:
    """A copy of the package, laid out as installed, that a test may spoil."""
    for folder in folders:
        shutil.copytree(repository / folder, tmp_path / "syncline" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    return tmp_path


IMPORT_FAULTS = {
    "scheduler/spoilt.py": ("from syncline.stages import errors", "imports go one way"),
    "stages/spoilt.py": ("from syncline.engine import errors", "imports go one way"),
    "engine/spoilt.py": ("def f():\n    import syncline.adapters", "imports go one way"),
    "adapters/spoilt.py": ("from syncline.bench import cli", "imports go one way"),
    "scheduler/spoilt1.py": ("import torch", "scheduler imports neither torch nor any framework"),
    "scheduler/spoilt2.py": ("import asyncio", "scheduler is pure but for its driver"),
    "scheduler/spoilt3.py": ("from time import monotonic", "scheduler is pure but for its driver"),
    "scheduler/spoilt4.py": ("from . import driver", "nothing in scheduler imports the driver"),
    "stages/spoilt1.py": ("import rich", "optional frameworks are imported in their own adapter only"),
    "adapters/trainers/spoilt.py": ("import transformers", "optional frameworks are imported in their own adapter only"),
}


def test_import_contracts_find_each_fault(tree: Path) -> None:
    """One run over all faults: each contract is broken, by every module that was spoilt against it, and by nothing else."""
    lint = (BIN / "lint-imports", "--no-logo", "--no-cache")
    clean = run(*lint, cwd=tree, PYTHONPATH=str(tree))
    assert clean.returncode == 0, clean.stdout
    for path, (text, _) in IMPORT_FAULTS.items():
        (tree / "syncline" / path).write_text(text + "\n")
    found = run(*lint, cwd=tree, PYTHONPATH=str(tree)).stdout
    assert f"{len({contract for _, contract in IMPORT_FAULTS.values()})} broken" in found
    for path, (_, contract) in IMPORT_FAULTS.items():
        module = "syncline." + path.removesuffix(".py").replace("/", ".")
        section = found[found.index("Broken contracts") :].partition(contract)[2]
        assert f"{module} -> " in section, f"{path} was not found:\n{found}"


LINT_FAULTS = {
    "import pickle": "TID251",
    "import cloudpickle": "TID251",
    "import dill": "TID251",
    "import torch\ntorch.load('x')": "TID251",
    "import torch\ntorch.distributed.broadcast_object_list([])": "TID251",
    "import torch.distributed as dist\ndist.all_gather_object([], 1)": "TID251",
    "from torch import distributed\ndistributed.send_object_list([])": "TID251",
    "import time\ntime.sleep(1)": "TID251",
    "from time import sleep": "TID251",
    "print(1)": "T201",
    "def f(x):\n    return x": "ANN001",
    "try:\n    f()\nexcept Exception:\n    pass": "BLE001",
    "class Public:\n    pass": "D101",
    "eval('1')": "S307",
}


@pytest.mark.parametrize("text", LINT_FAULTS)
def test_lint_finds_each_fault(tmp_path: Path, repository: Path, text: str) -> None:
    shutil.copy(repository / "pyproject.toml", tmp_path)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "spoilt.py").write_text(f'"""A module."""\n\n{text}\n')
    found = run(BIN / "ruff", "check", "--no-cache", "--output-format=concise", "engine", cwd=tmp_path)
    assert f" {LINT_FAULTS[text]} " in found.stdout


def test_every_ruff_rule_that_is_ignored_has_a_reason(repository: Path) -> None:
    lines = (repository / "pyproject.toml").read_text().splitlines()
    start = lines.index("ignore = [")
    ignored = [line for line in lines[start + 1 : lines.index("[tool.ruff.lint.mccabe]")] if re.match(r'  "[A-Z]+\d*"', line)]
    assert ignored
    assert [line for line in ignored if "#" not in line] == []


LEAKS = """
import subprocess, threading
import pytest

def test_thread():
    threading.Thread(target=threading.Event().wait, daemon=True, name="forgotten").start()

def test_process():
    global child
    child = subprocess.Popen(["sleep", "30"])

@pytest.mark.leaks_ok("shows the way out")
def test_allowed():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_clean():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

def test_end():
    child.kill()
    child.wait()
"""


@pytest.fixture
def suite(tmp_path: Path, repository: Path) -> Path:
    """A test suite of its own with our configuration and our conftest."""
    (tmp_path / "tests").mkdir()
    shutil.copy(repository / "pyproject.toml", tmp_path)
    shutil.copy(repository / "tests" / "conftest.py", tmp_path / "tests")
    return tmp_path


def test_leak_guard_finds_threads_and_processes(suite: Path) -> None:
    conftest = suite / "tests" / "conftest.py"
    text = conftest.read_text()
    assert "LEAK_PATIENCE_S = 3.0" in text
    conftest.write_text(text.replace("LEAK_PATIENCE_S = 3.0", "LEAK_PATIENCE_S = 0.2"))
    (suite / "tests" / "test_it.py").write_text(LEAKS)
    found = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=suite)
    assert "thread 'forgotten'" in found.stdout
    assert ": sleep 30" in found.stdout
    assert "5 passed, 2 errors" in found.stdout


@pytest.mark.parametrize("name", ["engine", "scheduler", "tests"])
def test_bare_name_guard_fails_the_run(suite: Path, name: str) -> None:
    """``python -m pytest`` puts the current folder on the path, which is how it happens."""
    (suite / name).mkdir(exist_ok=True)
    (suite / name / "__init__.py").touch()
    (suite / "tests" / "test_it.py").write_text(
        f"def test_it():\n    import importlib\n    importlib.import_module('{name}')\n"
    )
    found = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=suite)
    assert found.returncode == 1, found.stdout
    assert f"imported without the package name syncline: {name} (" in found.stderr


def test_bare_name_guard_lets_clean_runs_pass(suite: Path) -> None:
    (suite / "tests" / "test_it.py").write_text("def test_it():\n    import syncline.scheduler\n")
    found = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=suite)
    assert found.returncode == 0, found.stdout + found.stderr


def test_warnings_are_errors(suite: Path) -> None:
    (suite / "tests" / "test_it.py").write_text("def test_it():\n    import warnings\n    warnings.warn('no', stacklevel=1)\n")
    assert "1 failed" in run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=suite).stdout


def test_a_hanging_test_is_failed_and_the_rest_goes_on(suite: Path) -> None:
    (suite / "tests" / "test_it.py").write_text(
        "import asyncio\nasync def test_hang():\n    await asyncio.Event().wait()\ndef test_next():\n    pass\n"
    )
    found = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=1", cwd=suite)
    assert "Timeout (>1.0s)" in found.stdout
    assert "1 failed, 1 passed" in found.stdout
