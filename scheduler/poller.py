"""The one poller of all completions that have to be asked. It knows the loop only as something that calls back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from .completion import Completion
    from .outcome import PushLog, SpanName

SPIN_S = 200e-6
"""How long the poller asks at every turn of the loop after something happened. Short: a thread that spins in Python makes
the threads that copy and hash wait for the interpreter."""

SLICE_S = 500e-6
"""How long one call on the loop may go on before it lets others have a turn, in seconds."""


class Pace:
    """How long to wait before asking again: not at all while work finishes quickly, longer and longer when it does not."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._quick = True
        self._spin_until = 0.0
        self._pause_s = interval_s / 8

    def started(self, now: float) -> None:
        """Work was started at ``now``: if the last work was quick, this may be too."""
        self._pause_s = self._interval_s / 8
        if self._quick:
            self._spin_until = now + SPIN_S

    def ended(self, now: float, took_s: float) -> None:
        """Work ended that was started ``took_s`` seconds ago."""
        self._quick = took_s <= SPIN_S
        self.started(now)

    def pause(self, now: float) -> float:
        """Seconds until the next question; 0 is the next turn of the loop."""
        if now < self._spin_until:
            return 0.0
        pause = self._pause_s
        self._pause_s = min(pause * 2, self._interval_s)
        return pause


class Flight:
    """Work in flight: a stage of a task, or the barrier of a group (then ``index`` is the group).

    ``close`` ends its range in a profiler.
    """

    __slots__ = ("close", "completion", "ended", "index", "log", "push_id", "stage", "started")

    def __init__(
        self, *, push_id: int, stage: SpanName, index: int, completion: Completion, started: float, log: PushLog,
        close: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.push_id = push_id
        self.stage = stage
        self.index = index
        self.completion = completion
        self.started = started
        self.log = log
        self.close = close
        self.ended = False


class Poller:
    """Asks for all watched work in turn, until ``settle`` says that it is over. Costs nothing while it watches none."""

    def __init__(self, *, settle: Callable[[Flight], bool], interval_s: float, clock: Callable[[], float]) -> None:
        self._settle = settle
        self._clock = clock
        self._pace = Pace(interval_s)
        self._watched: deque[Flight] = deque()
        self._next: asyncio.Handle | None = None
        self._resting = False

    def watch(self, flight: Flight, loop: asyncio.AbstractEventLoop) -> None:
        """Ask for ``flight`` from the next turn of ``loop`` on."""
        self._watched.append(flight)
        self._pace.started(self._clock())
        if self._resting:
            self.stop()
        if self._next is None:
            self._next = loop.call_soon(self._turn, loop)

    def stop(self) -> None:
        """Ask no more. What is watched stays so, and is asked for again after the next `watch`."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._resting = False

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = None
        self._resting = False
        now = begun = self._clock()
        for _ in range(len(self._watched)):
            flight = self._watched.popleft()
            if self._settle(flight):
                now = self._clock()
                self._pace.ended(now, now - flight.started)
            else:
                self._watched.append(flight)
                now = self._clock()
            if now - begun > SLICE_S:
                break
        # What was settled may have led to a `watch` already.
        if self._watched and self._next is None:
            self._rest(loop, self._pace.pause(now))

    def _rest(self, loop: asyncio.AbstractEventLoop, pause: float) -> None:
        self._resting = pause > 0
        self._next = loop.call_later(pause, self._turn, loop) if self._resting else loop.call_soon(self._turn, loop)
