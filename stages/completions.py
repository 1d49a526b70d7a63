"""Completions: something that says, without blocking, whether started work is done.

Two kinds. *Polled* ones answer `poll()` (CUDA events, collectives: gloo's and NCCL's ``Work.is_completed``). *Signalled*
ones call back into the loop when they end (threads, sockets). The driver's one poller asks the first kind; the second
kind costs nothing until it fires.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar, cast

from syncline.scheduler.completion import Completion

from .errors import TransportError

__all__ = ["Completion", "Signal", "TaskScope", "WorkCompletion", "all_of"]

T = TypeVar("T")


class Signal(Generic[T]):
    """A signalled completion with a result of type ``T``. Belongs to one event loop; may be awaited any number of times.

    Unlike `asyncio.Future` it cannot be cancelled by a waiter (started work goes on), and an error that nobody asks for
    is not reported: the driver drops completions of abandoned tasks.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_loop", "_result")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._callbacks: list[Callable[[], None]] = []
        self._done = False
        self._error: BaseException | None = None
        self._result: T | None = None

    @property
    def done(self) -> bool:
        """True when it has ended, well or not."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """What it ended with, if it failed."""
        return self._error

    @property
    def result(self) -> T:
        """The result of a completion that is done; raises its error."""
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def poll(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._done

    def subscribe(self, callback: Callable[[], None]) -> bool:
        if self._done:
            self._loop.call_soon(callback)
        else:
            self._callbacks.append(callback)
        return True

    def set(self, result: T | None = None) -> None:
        """End well (on the loop). Ignored when it has ended already."""
        self._finish(result, None)

    def fail(self, error: BaseException) -> None:
        """End with ``error`` (on the loop). Ignored when it has ended already."""
        self._finish(None, error)

    def set_threadsafe(self, result: T | None = None) -> None:
        """`set`, from any thread. Does nothing when the loop is closed: nobody waits any more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish, result, None)

    def fail_threadsafe(self, error: BaseException) -> None:
        """`fail`, from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish, None, error)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if self._done:
            return
        self._done, self._result, self._error = True, result, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            future: asyncio.Future[None] = self._loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            self._callbacks.append(wake)
            yield from future
        return self.result


def all_of(signals: Sequence[Signal[Any]]) -> Signal[None]:
    """Ends when all have ended: with the first error that one of them (in order) ended with, or well."""
    whole: Signal[None] = Signal()
    left = len(signals)

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            error = next((signal.error for signal in signals if signal.error is not None), None)
            whole._finish(None, error)  # noqa: SLF001 - its own kind

    for signal in signals:
        signal.subscribe(one)
    if not signals:
        whole.set()
    return whole


def gloo_text(error: BaseException) -> str:
    """What gloo says, without the place in its source and without advice to its own users."""
    text = str(error) or type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", text.splitlines()[0]).split(". This is typically", 1)[0].rstrip(".")


class WorkCompletion:
    """A polled completion of a `torch.distributed.Work` of a *collective* (gloo's point-to-point work cannot be polled).

    Keeps ``work`` alive: gloo gives up a work whose last reference is dropped.
    """

    __slots__ = ("_what", "_work")

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self._what = what

    def poll(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()  # returns or raises at once
        except RuntimeError as error:
            raise TransportError(f"{self._what} failed: {gloo_text(error)}") from None
        return True

    def subscribe(self, callback: Callable[[], None]) -> bool:
        return False


class TaskScope:
    """Coroutines that outlive a push because what they started cannot be cancelled. Lives as long as its owner.

    Each `start` returns the signal of the coroutine's end. `join` waits for all of them, for a bounded time.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Signal[T]:
        """Run ``coroutine`` as a task of this scope."""
        signal: Signal[T] = Signal()
        task = asyncio.get_running_loop().create_task(_settle(coroutine, signal))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return signal

    @property
    def running(self) -> int:
        """Coroutines that have not ended."""
        return len(self._tasks)

    async def join(self, timeout_s: float) -> bool:
        """Wait for all, at most ``timeout_s`` seconds, then cancel what is left. True if none had to be cancelled.

        What is cancelled gets as long again: it may wait for whoever waits here.
        """
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=timeout_s)
        return not late


async def _settle(coroutine: Coroutine[Any, Any, T], signal: Signal[T]) -> None:
    try:
        result = await coroutine
    except asyncio.CancelledError:
        signal.fail(TransportError("given up: its owner was closed before it ended"))
        raise
    except BaseException as error:
        signal.fail(error)
        if not isinstance(error, Exception):
            raise
    else:
        signal.set(result)
