"""For every test: hypothesis profiles, no leaked threads or child processes, no bare module names.

A test that leaves something behind on purpose says so: ``@pytest.mark.leaks_ok("why")``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# The folders at the root are subpackages of `syncline`; under their bare names they must never be imported, since
# trainers have modules of those names. (pytest itself makes an empty `tests` for importlib mode: that one has no file.)
BARE = ("adapters", "bench", "engine", "scheduler", "stages", "tests")

# Threads and processes of other people's that live as long as the process, by the start of their name or command.
LASTING_THREADS = ("MainThread", "TMonitor", "tqdm_monitor", "pytest_timeout", "raylet", "InductorSubproc")
LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch._inductor")
LEAK_PATIENCE_S = 3.0

# Nothing is judged by the time it takes, on a machine that may be busy.
UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("dev", UNTIMED)
hypothesis.settings.register_profile("ci", UNTIMED, derandomize=True, database=None, print_blob=True)
hypothesis.settings.register_profile("thorough", UNTIMED, max_examples=2000)


def pytest_configure(config: pytest.Config) -> None:
    """Short temporary paths; ``--hypothesis-profile`` wins, else CI repeats the same examples every time."""
    # A unix socket's path has at most 107 bytes: what a test makes in its tmp_path must fit, whatever TMPDIR is.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def bare_imports() -> list[str]:
    """Bare names that were imported from files during this run."""
    return [name for name in BARE if name in sys.modules and getattr(sys.modules[name], "__file__", None)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a folder of ours was imported under its bare name."""
    found = bare_imports()
    if found:
        files = ", ".join(f"{name} ({sys.modules[name].__file__})" for name in found)
        print(f"\nERROR: imported without the package name syncline: {files}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def threads() -> dict[int, str]:
    """Python threads of this process that are alive: identity to name."""
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident is not None and not thread.name.startswith(LASTING_THREADS)
    }


def children() -> dict[int, str]:
    """Child processes of this process, zombies included: pid to command line."""
    found: dict[int, str] = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread has just ended
            continue
        for pid in pids:
            command = _command(int(pid))
            if command is not None and not any(name in command for name in LASTING_CHILDREN):
                found[int(pid)] = command
    return found


def _command(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has just been collected
        return None
    return b" ".join(words).decode(errors="replace").strip() or "(zombie)"


def leaked(threads_before: dict[int, str], children_before: dict[int, str], patience_s: float = LEAK_PATIENCE_S) -> list[str]:
    """What is there now and was not before. What is about to end gets ``patience_s`` seconds for it."""
    give_up = time.monotonic() + patience_s
    while True:
        left = [f"thread {name!r}" for ident, name in threads().items() if ident not in threads_before]
        left += [f"process {pid}: {command}" for pid, command in children().items() if pid not in children_before]
        if not left or time.monotonic() > give_up:
            return left
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing outlives its test: no thread, no child process (those of wider fixtures were there before)."""
    threads_before, children_before = threads(), children()
    yield
    if request.node.get_closest_marker("leaks_ok"):
        return
    left = leaked(threads_before, children_before)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


class _CancelledAt:
    """Awaits a coroutine, and acts (or cancels the task that awaits) when it is to wait for the ``number``th time."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], number: int, act: Callable[[], object] | None) -> None:
        self._coroutine, self.left, self._act = coroutine, number, act

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._coroutine.__await__()
        with contextlib.suppress(StopIteration):
            waits = next(steps)
            while True:
                self.left -= 1
                if self.left == 0:
                    (self._act or asyncio.current_task().cancel)()
                try:
                    said = yield waits
                except BaseException as error:  # noqa: BLE001 - for the coroutine to see
                    waits = steps.throw(error)
                else:
                    waits = steps.send(said)


@pytest.fixture
def cancelled_at() -> Callable[..., Coroutine[Any, Any, bool]]:
    """``await cancelled_at(coroutine, number)``: in a task of its own, cancelled where it waits for the ``number``th time.

    Returns whether it came to that. With 1, 2, … until it did not, a test cancels it wherever it can be. Given ``act``, that is
    called there instead.
    """

    async def run(coroutine: Coroutine[Any, Any, object], number: int, act: Callable[[], object] | None = None) -> bool:
        async def one() -> bool:
            running = _CancelledAt(coroutine, number, act)
            with contextlib.suppress(asyncio.CancelledError):
                await running
            return running.left <= 0

        return await asyncio.create_task(one())

    return run


@pytest.fixture
def busy_threads() -> Callable[[], contextlib.AbstractAsyncContextManager[None]]:
    """``async with busy_threads():`` the threads of the loop, on which `asyncio.to_thread` runs, are others' until its end."""

    @contextlib.asynccontextmanager
    async def keep() -> AsyncIterator[None]:
        may_end, loop = threading.Event(), asyncio.get_running_loop()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            loop.set_default_executor(threads)
            waiting = loop.run_in_executor(None, may_end.wait)
            try:
                yield
            finally:
                may_end.set()
                await waiting

    return keep


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]
