"""Asking on the loop whether device work has ended, at a pace that follows how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from .completions import Signal
from .errors import TransportError
from .ticks import Ticks

SHORTEST_S = 30e-6
LONGEST_S = 0.001
"""Seconds between two questions. Each takes a few microseconds, and the interpreter, which threads that launch need too."""

_SHARE = 8
"""An end is noticed late by at most this part of the time since something last began or ended."""

Poll = Callable[[], bool]


def pause_after(quiet_s: float, longest_s: float = LONGEST_S) -> float:
    """Seconds until the next question, when nothing has begun or ended for ``quiet_s`` seconds."""
    return min(max(quiet_s / _SHARE, SHORTEST_S), longest_s)


class _Watched(NamedTuple):
    poll: Poll
    signal: Signal[None]
    used: object


class Watch:
    """Asks for everything that is watched in turn, on the loop that runs when it is first used. Never blocks.

    Args:
        interval_s: longest pause between two questions, in seconds.
    """

    def __init__(self, interval_s: float = LONGEST_S) -> None:
        self._interval_s = interval_s
        self._watched: list[_Watched] = []
        self._ticks: Ticks | None = None
        self._changed = 0.0
        self._closed = False
        self._ended: list[Signal[None]] = []

    def until(self, poll: Poll, used: object = None) -> Signal[None]:
        """Ends when ``poll`` says True; fails with what it raises. Asked at once for the first time.

        ``used`` is kept alive until then: memory that a device works on. What uses memory is asked for to its end, also after
        `close`.
        """
        signal: Signal[None] = Signal()
        if not self._settle(poll, signal):
            if self._closed and used is None:
                signal.fail(_closed())
                return signal
            self._watched.append(_Watched(poll, signal, used))
            self._rest(changed=True)
        return signal

    def close(self) -> Signal[None]:
        """Ask no more, but for what uses memory: the rest fails. The signal ends when nothing uses memory any more."""
        self._closed = True
        watched, self._watched = self._watched, []
        for one in watched:
            if one.used is None:
                one.signal.fail(_closed())
            else:
                self._watched.append(one)
        ended: Signal[None] = Signal()
        self._ended.append(ended)
        self._tell()
        return ended

    def _turn(self) -> None:
        watched, self._watched = self._watched, []
        for one in watched:
            if not self._settle(one.poll, one.signal):
                if self._closed and one.used is None:  # closed by what followed from another one's end
                    one.signal.fail(_closed())
                else:
                    self._watched.append(one)
        self._tell()
        if self._watched:
            self._rest(changed=len(self._watched) != len(watched))

    def _rest(self, *, changed: bool) -> None:
        """Ask again after a pause. ``changed``: something has begun or ended."""
        if self._ticks is None:
            self._ticks = Ticks(asyncio.get_running_loop())
        now = time.monotonic()
        if changed:
            self._changed = now
        self._ticks.after(pause_after(now - self._changed, self._interval_s), self._turn)

    def _tell(self) -> None:
        if not self._watched:
            if self._ticks is not None:
                self._ticks.stop()
            ended, self._ended = self._ended, []
            for signal in ended:
                signal.set()

    @staticmethod
    def _settle(poll: Poll, signal: Signal[None]) -> bool:
        try:
            if not poll():
                return False
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            signal.fail(error)
        else:
            signal.set()
        return True


def _closed() -> TransportError:
    return TransportError("nobody asks for this work any more: its link was closed")
