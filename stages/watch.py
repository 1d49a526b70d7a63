"""Asking on the loop whether device work has ended, where no driver does: a pace that is quick at first, and backs off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from syncline.scheduler.poller import Pace

from .completions import Signal
from .errors import TransportError

_INTERVAL_S = 0.001

Poll = Callable[[], bool]


class Watch:
    """Asks for everything that is watched in turn, on the loop that runs when it is first used. Never blocks.

    Args:
        interval_s: longest pause between two questions, in seconds.
    """

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._pace = Pace(interval_s)
        self._watched: list[tuple[Poll, float, Signal[None]]] = []
        self._next: asyncio.Handle | None = None

    def until(self, poll: Poll) -> Signal[None]:
        """Ends when ``poll`` says True; fails with what it raises. Asked at once for the first time."""
        signal: Signal[None] = Signal()
        if not self._settle(poll, signal):
            loop = asyncio.get_running_loop()
            self._watched.append((poll, loop.time(), signal))
            self._pace.started(loop.time())
            if self._next is None:
                self._next = loop.call_soon(self._turn, loop)
        return signal

    def close(self) -> None:
        """Ask no more; what is watched fails."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        watched, self._watched = self._watched, []
        for _, _, signal in watched:
            signal.fail(TransportError("nobody asks for this work any more: its link was closed"))

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = None
        watched, self._watched = self._watched, []
        for entry in watched:
            poll, started, signal = entry
            if self._settle(poll, signal):
                self._pace.ended(loop.time(), loop.time() - started)
            else:
                self._watched.append(entry)
        if self._watched and self._next is None:
            pause = self._pace.pause(loop.time())
            self._next = loop.call_later(pause, self._turn, loop) if pause else loop.call_soon(self._turn, loop)

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
