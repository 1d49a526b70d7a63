"""Worker threads that copy, cast and digest. They live as long as the engine and never touch the event loop's time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from syncline.scheduler.errors import SynclineError

from .completions import Signal
from .errors import TransportError

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], "Signal[Any]"]


class ClosedWorkers(SynclineError):
    """Work was given to worker threads that have been stopped."""


class Workers:
    """``count`` daemon threads that run jobs first come, first served.

    Each thread runs torch operations single-threaded: parallelism comes from jobs side by side, and a team of intra-op
    threads for every worker would fight with the trainer's.
    """

    def __init__(self, count: int, *, name: str = "syncline-worker") -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        ready = threading.Barrier(count + 1)
        before = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._run, args=(ready,), name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait()
        # set_num_threads acts on the calling thread and on threads that are yet to use torch: undo the second part
        torch.set_num_threads(before)

    @property
    def count(self) -> int:
        return len(self._threads)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Signal[T]:
        """Run ``function`` on a worker. The signal ends on the calling loop with its result or its error."""
        signal: Signal[T] = Signal()
        if self._closed:
            signal.fail(ClosedWorkers("the worker threads are stopped: their engine or receiver was closed"))
        else:
            self._jobs.put((function, args, kwargs, signal))
        return signal

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let queued jobs end and stop the threads; blocks for at most ``timeout_s`` seconds. True if all have stopped."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, ready: threading.Barrier) -> None:
        torch.get_num_threads()  # makes this thread take over the global number now, and not after the next line
        torch.set_num_threads(1)
        ready.wait()
        while (job := self._jobs.get()) is not None:
            _execute(job)
            del job  # an idle worker must not keep the last job's tensors alive


def _execute(job: _Job) -> None:
    function, args, kwargs, signal = job
    try:
        with torch.no_grad():
            result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
        signal.fail_threadsafe(error)
    else:
        signal.set_threadsafe(result)


def call_in_thread(function: Callable[[], T], *, name: str) -> Signal[T]:
    """Run one blocking call on a daemon thread of its own.

    For calls that may block for as long as their own timeout (rendezvous, connecting): a worker would be lost for others
    meanwhile, and an executor's thread would hold up the interpreter's exit.
    """
    signal: Signal[T] = Signal(asyncio.get_running_loop())

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            signal.fail_threadsafe(error)
        else:
            signal.set_threadsafe(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return signal


class Errand(Generic[T]):
    """`call_in_thread` for what has to be undone if whoever wanted it goes away: on a thread, however late, and also when the
    loop has ended by then.

    Args:
        function: the blocking call.
        undo: lets go of its result.
        name: of the threads.

    Attributes:
        result: the call's.
    """

    def __init__(self, function: Callable[[], T], undo: Callable[[T], object], *, name: str) -> None:
        self._function, self._undo, self._name = function, undo, name
        self._lock = threading.Lock()
        self._there: list[T] = []
        self._unwanted = False
        self.result: Signal[T] = call_in_thread(self._run, name=name)

    def give_up(self) -> Signal[Any]:
        """Nobody wants the result any more. Ends when it has been undone, or will never come."""
        with self._lock:
            self._unwanted = True
        if not self._there:
            return self.result
        return call_in_thread(lambda: self._undo(self._there.pop()), name=self._name)

    def _run(self) -> T:
        result = self._function()
        with self._lock:
            if not self._unwanted:
                self._there.append(result)
                return result
        self._undo(result)
        raise TransportError("given up before it was done")
