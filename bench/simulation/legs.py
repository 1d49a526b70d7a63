"""What takes time in a simulated push, and for what it waited: `Leg`, and the lines that serve one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Then = Callable[["Leg"], None]

_SAME_S = 1e-9
"""Moments that are so close together are one."""


class Leg:
    """One piece of time: ``what`` was done ``where``, for ``task`` (-1: for none), from ``start`` to ``end`` in seconds.

    ``after`` is what it waited for last: the leg that gave rise to it, or the one before it in the same line. Followed back
    from the end of a push, legs are its critical path.
    """

    __slots__ = ("after", "end", "start", "task", "what", "where", "why")

    def __init__(self, what: str, where: str, task: int, *, start: float, end: float, after: Leg | None, why: str = "") -> None:
        self.what = what
        self.where = where
        self.task = task
        self.start = start
        self.end = end
        self.after = after
        self.why = why

    def __repr__(self) -> str:
        return f"Leg({self.what} of {self.task} at {self.where}, {self.start:.6f} to {self.end:.6f})"


class Line:
    """Serves one after the other, first come, first served: a link in one direction, a copy engine, a stream.

    Attributes:
        kind: what it is; ``where`` names it.
        rate: bytes a second.
        busy_s: seconds of service so far.
    """

    __slots__ = ("busy_s", "free_at", "kind", "last", "loop", "rate", "where")

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: str, where: str, rate: float) -> None:
        self.loop = loop
        self.kind = kind
        self.where = where
        self.rate = rate
        self.free_at = 0.0
        self.busy_s = 0.0
        self.last: Leg | None = None

    def serve(self, seconds: float, task: int, after: Leg | None) -> Leg:
        """Take up ``seconds`` of service, behind what came before."""
        now, why = self.loop.time(), ""
        if self.free_at > now:
            now, after, why = self.free_at, self.last, f"behind task {self.last.task}" if self.last else ""
        leg = Leg(self.kind, self.where, task, start=now, end=now + seconds, after=after, why=why)
        self.free_at, self.last = leg.end, leg
        self.busy_s += seconds
        return leg

    def run(self, seconds: float, task: int, after: Leg | None, then: Then) -> None:
        """The same, and call ``then`` at its end."""
        leg = self.serve(seconds, task, after)
        self.loop.call_at(leg.end, then, leg)


def carry(
    out: Line, into: Line, nbytes: float, *, latency_s: float, slow: float, task: int, after: Leg | None, then: Then
) -> None:
    """Move ``nbytes`` over a sender's link and a receiver's at once, and call ``then`` when the last byte is there. The time
    on the way, ``latency_s``, is a leg of its own.

    Bytes arrive while the rest is still being sent. Each link is taken up for as long as its own rate asks for; a receiver's
    link serves in the order in which first bytes reach it, whoever sends, and what it cannot take yet waits in the network.
    """
    first = out.serve(slow * nbytes / out.rate, task, after)
    loop = out.loop

    def arrive() -> None:
        way = Leg("latency", out.where, task, start=first.start, end=first.start + latency_s, after=first.after, why=first.why)
        second = into.serve(nbytes / into.rate, task, way)
        if second.end <= first.end + latency_s + _SAME_S:
            second = Leg("latency", out.where, task, start=first.end, end=first.end + latency_s, after=first)
        loop.call_at(second.end, then, second)

    if first.start + latency_s <= loop.time():
        arrive()
    else:
        loop.call_at(first.start + latency_s, arrive)
