"""``LLM`` and ``AsyncLLM`` objects as targets, in the process that owns them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(kind: str, folder: Path, environment: dict[str, str]) -> dict:
    """What `offline_rank.py` saw. Its whole process group is ended."""
    script = str(Path(__file__).with_name("offline_rank.py"))
    process = subprocess.Popen(
        [sys.executable, script, kind, str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, cwd=folder, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))  # vLLM's processes print, too


def test_llm(tiny, environment) -> None:
    saw = run("llm", tiny("qwen2").folder, environment)
    assert "fenced" in saw["before"]
    assert saw["same"] == [True, True, True]
    assert saw["version"] == ["1", "2", "3"]
    assert saw["after"] is True
    assert saw["still"] is True
    assert "digest" in saw["same_version"]  # other content under the version that the engine before has pushed
    assert saw["next"] == [True, True, "4"]


def test_async_llm(tiny, environment) -> None:
    saw = run("async", tiny("qwen2").folder, environment)
    assert saw["paused"] is True
    assert saw["same"] == [True, True]
    assert (saw["running"], saw["kept"]) == (True, 200)
    first, second = saw["spans"]
    assert (first["version"], second["version"]) == ("1", "2")
    assert 0 < first["end"] == second["start"] < second["end"] == 200
