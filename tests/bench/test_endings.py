"""A command that is told to end, or is killed, leaves no process and, where it can still run, no folder."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncline.bench import cli
from syncline.bench.endings import tied, unwinding

_PATIENCE_S = 90.0
_SAYS = "import sys, time; print('up', flush=True); time.sleep(600)"

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")


def _until(
    true: Callable[[], object], what: str, process: subprocess.Popen[str] | None = None, said: Path | None = None
) -> None:
    """Look until it holds. Fails at the deadline, or when ``process`` has ended, with what it has ``said``."""
    deadline = time.monotonic() + _PATIENCE_S
    while not true():
        assert process is None or process.poll() is None, f"ended before {what}:\n{said.read_text() if said else ''}"
        assert time.monotonic() < deadline, f"no {what} in {_PATIENCE_S:g} s"
        select.select([], [], [], 0.05)


def _marked(mark: str) -> list[int]:
    """Processes that have ``mark`` in their environment, as all have that one with it has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it ended, or is not ours
                continue
    return found


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Put it into the environment of what a test starts."""
    text = f"SYNCLINE_TEST_ENDINGS={tmp_path}"
    yield text
    for pid in _marked(text):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)


_STAGES = {"starting servers": ("server-0-1.log",), "starting trainers": ("trainer-0.log", "trainer-1.log")}


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("stage", sorted(_STAGES))
def test_demo_leaves_nothing(stage: str, number: signal.Signals, tmp_path: Path, mark: str) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "tmp"
    folder.mkdir()
    name, _, value = mark.partition("=")
    command = [sys.executable, "-m", "syncline.bench.cli", "demo", "--out", str(tmp_path / "out")]
    with (tmp_path / "said").open("w") as said:
        demo = subprocess.Popen(
            command, stdout=said, stderr=said, text=True, env={**os.environ, "TMPDIR": str(folder), name: value}
        )
    try:
        for log in _STAGES[stage]:

            def there(log: str = log) -> bool:
                return any(folder.glob(f"syncline-demo-*/{log}")) and len(_marked(mark)) > 1

            _until(there, f"{log} of the demo", demo, tmp_path / "said")
        demo.send_signal(number)
        demo.wait(_PATIENCE_S)
        _until(lambda: not _marked(mark), "end of all processes")
        if number is signal.SIGKILL:
            return
        assert demo.returncode == 128 + number, (tmp_path / "said").read_text()
        assert not list(folder.glob("syncline-demo-*"))
        assert (tmp_path / "said").read_text().endswith("syncline demo: stopped\n")
    finally:
        demo.kill()
        demo.wait()


@linux
def test_a_tied_process_goes_with_the_one_that_started_it() -> None:
    script = "import subprocess, sys\nfrom syncline.bench.endings import tied\n"
    script += f"subprocess.run(tied([sys.executable, '-c', {_SAYS!r}]))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == ""  # the last that holds the pipe has ended


def test_a_tied_process_is_the_command_itself() -> None:
    script = "import os, sys; print(os.getpid(), sys.argv[1:], os.environ['WORD'])"
    command = tied([sys.executable, "-c", script, "--a", "b c"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "WORD": "w"}) as process:
        assert process.communicate()[0] == f"{process.pid} ['--a', 'b c'] w\n"
    assert process.returncode == 0


@linux
def test_a_tied_command_that_is_not_there_says_so() -> None:
    done = subprocess.run(tied(["/nowhere/python"]), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "/nowhere/python: No such file or directory\n")


@pytest.fixture
def unhandled() -> Iterator[None]:
    """Nobody handles signals, as where a command starts; what ran in this process before may have."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_only_the_first_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with unwinding() as told:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert told.number == number
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwinding() as told:
            signal.raise_signal(signal.SIGHUP)
            assert told.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("unhandled")
def test_a_command_says_which_signal_ended_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "run", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert cli.main(["status"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "syncline status: stopped\n"
