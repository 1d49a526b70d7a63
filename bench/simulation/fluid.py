"""Cores and a memory bus that everything on a host shares at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .legs import Leg, Then

_DONE_S = 1e-12
_OVER_S = 2e-9
"""What is left of a job that is over: the clock may fire a nanosecond early."""


class Demand(NamedTuple):
    """What work takes of a host while it runs at full speed: cores, and a share of the memory bus (1: all of it)."""

    cores: float = 1.0
    bus: float = 0.0


class _Job:
    __slots__ = ("demand", "left_s", "leg", "speed", "then")

    def __init__(self, left_s: float, demand: Demand, leg: Leg, then: Then) -> None:
        self.left_s = left_s
        self.demand = demand
        self.leg = leg
        self.then = then
        self.speed = 0.0


class Fluid:
    """One host. Work that runs side by side slows down evenly as soon as it asks for more than there is (max-min fair).

    Attributes:
        busy: core seconds and bus seconds that were used so far.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cores: float) -> None:
        self._loop = loop
        self._capacity = Demand(cores, 1.0)
        self._jobs: list[_Job] = []
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.busy = [0.0, 0.0]

    def run(self, seconds: float, demand: Demand, leg: Leg, then: Then) -> None:
        """Work that takes ``seconds`` alone. ``then`` is called with its leg at its end."""
        self._pass_time()
        self._jobs.append(_Job(max(seconds, _DONE_S), demand, leg, then))
        self._share()

    def _pass_time(self) -> None:
        now = self._loop.time()
        passed, self._at = now - self._at, now
        for job in self._jobs:
            done = passed * job.speed
            job.left_s -= done
            for kind, share in enumerate(job.demand):
                self.busy[kind] += done * share

    def _share(self) -> None:
        for job, speed in zip(self._jobs, speeds([job.demand for job in self._jobs], self._capacity), strict=True):
            job.speed = speed
        if self._timer is not None:
            self._timer.cancel()
        left = min((job.left_s / job.speed for job in self._jobs), default=None)
        self._timer = None if left is None else self._loop.call_later(max(left, 0.0), self._end)

    def _end(self) -> None:
        self._timer = None
        self._pass_time()
        now = self._loop.time()
        over = [job for job in self._jobs if job.left_s <= _OVER_S]
        self._jobs = [job for job in self._jobs if job.left_s > _OVER_S]
        self._share()
        for job in over:
            job.leg.end = now
            job.then(job.leg)


def speeds(demands: Sequence[Demand], capacity: Demand) -> list[float]:
    """Speed of each job, at most 1: all rise together, and those stay behind whose resource is used up."""
    found = [1.0] * len(demands)
    rising = set(range(len(demands)))
    left = list(capacity)
    while rising:
        asked = [sum(demands[i][kind] for i in rising) for kind in range(len(left))]
        limits = [room / ask if ask > 0 else 1.0 for room, ask in zip(left, asked, strict=True)]
        level = min(1.0, *limits)
        if level >= 1.0:
            break
        tight = limits.index(min(limits))
        for i in [i for i in rising if demands[i][tight] > 0]:
            found[i] = level
            rising.discard(i)
            left = [room - level * share for room, share in zip(left, demands[i], strict=True)]
    return found


class Pool:
    """Threads of one process: work queues for them, first come, first served, and then shares the host."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: Fluid, threads: int, where: str) -> None:
        self._loop = loop
        self._host = host
        self._idle = threads
        self._where = where
        self._queue: deque[tuple[float, Demand, Leg, Then]] = deque()

    def run(self, seconds: float, demand: Demand, what: str, *, task: int, after: Leg | None, then: Then) -> None:
        """As `Fluid.run`, once a thread is free."""
        leg = Leg(what, self._where, task, start=self._loop.time(), end=0.0, after=after)
        if self._idle:
            self._idle -= 1
            self._begin(seconds, demand, leg, then)
        else:
            self._queue.append((seconds, demand, leg, then))

    def _begin(self, seconds: float, demand: Demand, leg: Leg, then: Then) -> None:
        def end(ended: Leg) -> None:
            if self._queue:
                following = self._queue.popleft()
                queued = following[2]
                queued.start, queued.after, queued.why = self._loop.time(), ended, f"behind task {ended.task}"
                self._begin(*following)
            else:
                self._idle += 1
            then(ended)

        self._host.run(seconds, demand, leg, end)
