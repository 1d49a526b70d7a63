"""An asyncio event loop whose time is virtual: when nothing is left to run, it is the time of the next timer.

The scheduler's driver runs on it as it is. No sockets, no threads, no signals: whatever is waited for must be planned on the
loop itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

from syncline.scheduler.errors import SynclineError

_TOGETHER_S = 1e-9
"""Timers that are so close together, in seconds, fire in one turn."""


class StandsStill(SynclineError):
    """Nothing is left to happen, and something is still waited for."""


class _Skip:
    """Takes the place of a selector: instead of waiting for as long as it is told to, it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise StandsStill("nothing is left to happen, and something is still waited for: the simulated push stands still")
        if timeout > 0:
            self._loop.skip()
        return []

    def close(self) -> None:
        """Nothing is held."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Time begins at 0 and passes only between events."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = _Skip(self)
        self._clock_resolution = _TOGETHER_S

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def skip(self) -> None:
        """It is the time of the next timer now. (Not: later by what is to be waited; sums of floats drift.)"""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # the base class's heap
        self._now = max(self._now, timers[0].when())

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no files."""

    def _write_to_self(self) -> None:
        """Nobody has to be woken: there are no threads."""
