"""Asking on the loop whether device work has ended, where no driver does: a pace that is quick at first, and backs off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from syncline.scheduler.poller import Pace

from .completions import Signal
from .errors import TransportError

_INTERVAL_S = 0.001

Poll = Callable[[], bool]


class _Watched(NamedTuple):
    poll: Poll
    started: float
    signal: Signal[None]
    used: object


class Watch:
    """Asks for everything that is watched in turn, on the loop that runs when it is first used. Never blocks.

    Args:
        interval_s: longest pause between two questions, in seconds.
    """

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._pace = Pace(interval_s)
        self._watched: list[_Watched] = []
        self._next: asyncio.Handle | None = None
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
            loop = asyncio.get_running_loop()
            self._watched.append(_Watched(poll, loop.time(), signal, used))
            self._pace.started(loop.time())
            if self._next is None:
                self._next = loop.call_soon(self._turn, loop)
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
        if not self._watched and self._next is not None:
            self._next.cancel()
            self._next = None
        ended: Signal[None] = Signal()
        self._ended.append(ended)
        self._tell()
        return ended

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = None
        watched, self._watched = self._watched, []
        for one in watched:
            if self._settle(one.poll, one.signal):
                self._pace.ended(loop.time(), loop.time() - one.started)
            elif self._closed and one.used is None:  # closed by what followed from another one's end
                one.signal.fail(_closed())
            else:
                self._watched.append(one)
        self._tell()
        if self._watched and self._next is None:
            pause = self._pace.pause(loop.time())
            self._next = loop.call_later(pause, self._turn, loop) if pause else loop.call_soon(self._turn, loop)

    def _tell(self) -> None:
        if not self._watched:
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
