"""Wake-ups finer than an event loop's timers, which count whole milliseconds: work on a device is often over in less."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

_MONOTONIC = 1  # CLOCK_MONOTONIC
_LEAST_S = 1e-6  # a time of zero would disarm the timer


class _Spec(ctypes.Structure):
    """``struct itimerspec``: interval and first expiry, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


@functools.cache
def _timerfd_calls() -> Any:
    """The C library, if it has Linux's timers that are file descriptors."""
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "timerfd_create") and hasattr(library, "timerfd_settime") else None


class Ticks:
    """One wake-up at a time on one loop. Where the system has no timer that a loop can watch, it comes to the millisecond.

    Args:
        loop: whose callbacks the wake-ups are.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._library = _timerfd_calls()
        self._descriptor = -1
        if self._library is not None:
            self._descriptor = self._library.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor >= 0:
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._callback: Callable[[], None] | None = None
        self._handle: asyncio.Handle | None = None
        self._listening = False

    def after(self, pause_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop in ``pause_s`` seconds; what was asked for before is forgotten."""
        if self._descriptor < 0:
            self.stop()
            self._handle = self._loop.call_later(pause_s, callback)
            return
        self._callback = callback
        if not self._listening:
            self._loop.add_reader(self._descriptor, self._expired)
            self._listening = True
        whole, part = divmod(max(pause_s, _LEAST_S), 1.0)
        spec = _Spec(0, 0, int(whole), int(part * 1e9))
        self._library.timerfd_settime(self._descriptor, 0, ctypes.byref(spec), None)

    def stop(self) -> None:
        """Nothing is called any more, and the loop holds nothing of this, until the next `after`."""
        self._callback = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._listening:
            self._listening = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew since
            os.read(self._descriptor, 8)
            callback, self._callback = self._callback, None
            if callback is not None:
                callback()
