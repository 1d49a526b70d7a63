"""Where simulated work is done: what a rank's stages and receivers ask for, whatever the machine is made of."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from syncline.engine.messages import Landing
from syncline.scheduler.errors import SynclineError

from .legs import Leg, Then
from .load import Share

_MOST_JITTER = 2.0
_MOST_SLOW = 1000.0


class ScenarioError(SynclineError):
    """What is to be simulated makes no sense, or would take hours."""


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """What makes ranks unequal. The same seed gives the same push.

    Attributes:
        jitter: spread of the time of each piece of work (of its logarithm; 0.1 is about ten percent).
        stragglers: source ranks that are so many times slower in everything.

    Raises:
        ScenarioError: a number is not finite, or out of range.
    """

    jitter: float = 0.0
    stragglers: Mapping[int, float] = {}
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= _MOST_JITTER:  # NaN is not either
            raise ScenarioError(f"jitter is {self.jitter:g}; give a spread from 0 to {_MOST_JITTER:g}, such as 0.1")
        for rank, factor in self.stragglers.items():
            if rank < 0 or not 1 / _MOST_SLOW <= factor <= _MOST_SLOW:
                raise ScenarioError(
                    f"straggler {rank}:{factor:g}: give a rank from 0 on, and a factor from {1 / _MOST_SLOW:g} to "
                    f"{_MOST_SLOW:g}"
                )


class Slowness:
    """How much longer the next piece of work of a rank takes."""

    def __init__(self, disturbance: Disturbance) -> None:
        self._jitter = disturbance.jitter
        self._stragglers = dict(disturbance.stragglers)
        self._random = random.Random(disturbance.seed)  # noqa: S311 - nothing secret

    def of(self, rank: int) -> float:
        """A factor for one piece of work of source rank ``rank``; -1 is a receiver."""
        factor = self._stragglers.get(rank, 1.0)
        return factor * math.exp(self._random.gauss(0.0, self._jitter)) if self._jitter else factor


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What does not depend on the machine.

    Attributes:
        offloaded: the source's weights are in host memory.
    """

    landing: Landing = "staged"
    verify: bool = True
    workers: int = 2
    offloaded: bool = False
    disturbance: Disturbance = field(default_factory=Disturbance)


class World(Protocol):
    """Work is asked for with the leg that it comes ``after``; ``then`` is called with its own leg at its end.

    Attributes:
        polled: ends of stages are seen by the poller, not signalled.
        window: buckets that a receiver lets come at a time; None: any number.
        frees: when it lets the next one come: at the arrival of one, or when it has landed.
        acknowledged: a send has ended when the bucket has landed. ``instant``: it has ended at once.
        landers: buckets that a receiver works on side by side.
        ring: bytes for buckets in shared memory on a source rank; None where there is no ring.
    """

    polled: bool
    window: int | None
    frees: str
    acknowledged: bool
    instant: bool
    landers: int
    ring: int | None

    def h2d(self, rank: int, share: Share, after: Leg | None, then: Then) -> None: ...

    def pack(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        """What a contributor does before its messages leave."""
        ...

    def message(self, rank: int, owner: int, nbytes: int, *, task: int, after: Leg | None, then: Then) -> None: ...

    def early(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        """What an owner does while messages come."""
        ...

    def late(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        """What it does when they are there."""
        ...

    def deliver(self, rank: int, receiver: int, share: Share, after: Leg | None, then: Then) -> None:
        """Bytes of a bucket on their way to a receiver."""
        ...

    def land(self, receiver: int, task: int, after: Leg | None, then: Then) -> None:
        """What a receiver does with a bucket."""
        ...

    def commit(self, receiver: int, after: Leg | None, then: Then) -> None: ...

    def barrier_s(self) -> float: ...

    def control_s(self) -> tuple[float, float]:
        """Seconds before the first task and after the last vote."""
        ...

    def used(self) -> dict[str, float]:
        """For each kind of resource, seconds of service of the one that served longest."""
        ...
