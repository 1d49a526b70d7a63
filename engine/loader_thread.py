"""The one thread on which a loader is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from syncline.stages.completions import Signal
from syncline.stages.workers import Workers

from .control import traceback_text
from .errors import LoaderError, SynclineError
from .loader import Loader

P = ParamSpec("P")
T = TypeVar("T")


class LoaderThread:
    """Calls a loader on one thread of its own. What it raises becomes `LoaderError` with the traceback's text."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._worker = Workers(1, name="syncline-loader")
        self._last: Signal[Any] | None = None

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Signal[T]:
        """Call something that calls the loader, after the calls before it."""
        signal = self._last = self._worker.submit(lambda: guarded(function, *args, **kwargs))
        signal.subscribe(lambda: self._forget(signal))
        return signal

    def _forget(self, signal: Signal[Any]) -> None:
        """What a call has returned may hold memory, and is not this thread's."""
        if self._last is signal:
            self._last = None

    @property
    def idle(self) -> bool:
        """No call is running."""
        return self._last is None or self._last.done

    async def until_idle(self) -> None:
        """Wait for the calls under way."""
        while self._last is not None and not self._last.done:
            await ended(self._last)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread; blocks for at most ``timeout_s`` seconds. True if it has stopped."""
        return self._worker.close(timeout_s)


def guarded(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a loader; what it raises that is not an error of ours becomes `LoaderError`."""
    try:
        return function(*args, **kwargs)
    except SynclineError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise LoaderError(f"the loader raised in {name}: {error!r}\n{traceback_text(error)}") from error


async def ended(signal: Signal[Any]) -> None:
    """Wait for a signal's end, well or not."""
    done = asyncio.Event()
    signal.subscribe(done.set)
    await done.wait()
