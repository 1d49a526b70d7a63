"""The tests of this folder in Triton's interpreter, which a process has or has not from its first import of Triton on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("test_*.py") if path.name not in {Path(__file__).name, "test_compile.py"})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this environment has no Triton")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(request: pytest.FixtureRequest, file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(request.config.inipath)]
    done = subprocess.run(
        [*command, str(FOLDER / file)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=request.config.rootpath, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
