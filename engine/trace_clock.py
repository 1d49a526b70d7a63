"""One time axis for ranks whose clocks have nothing to do with each other.

Every step that ranks decide together is a round trip: a rank's contribution leaves and the decision comes back on its own
clock, and in between the one arrives and the other leaves on rank 0's. A message takes no negative time, so every trip bounds
the offset between the two clocks from both sides; what all trips of a push leave open is halved. No wall clock is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec


class Trip(msgspec.Struct, frozen=True, array_like=True):
    """A step as one rank saw it: when its contribution left and when the decision was back, in seconds on its clock.

    ``back`` is None while the decision is awaited.
    """

    step: str
    left: float
    back: float | None = None


class Offset(msgspec.Struct, frozen=True, array_like=True):
    """What to add to a rank's clock to get rank 0's, and how far off that may be; both in seconds."""

    seconds: float = 0.0
    error_s: float = 0.0


class ClockLog:
    """When steps left and came back (on any rank), arrived and were decided (on rank 0). ``clock`` as the spans' own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left: dict[str, float] = {}
        self._back: dict[str, float] = {}
        self._arrived: dict[str, dict[int, float]] = {}
        self._decided: dict[str, float] = {}

    def left(self, step: str) -> None:
        """This rank is about to send its contribution."""
        self._left[step] = self._clock()

    def back(self, step: str) -> None:
        """The decision has come."""
        self._back[step] = self._clock()

    def arrived(self, step: str, rank: int) -> None:
        """Rank 0 has a rank's contribution."""
        self._arrived.setdefault(step, {})[rank] = self._clock()

    def decided(self, step: str) -> None:
        """Rank 0 is about to send the decision."""
        self._decided[step] = self._clock()

    def forget(self, past: Callable[[str], bool]) -> None:
        """Drop what was taken down of steps that are past."""
        for table in (self._left, self._back, self._decided):
            for step in [step for step in table if past(step)]:
                del table[step]
        for step in [step for step in self._arrived if past(step)]:
            del self._arrived[step]

    def trips(self) -> list[Trip]:
        """This rank's side, to be told to rank 0."""
        return [Trip(step, left, self._back.get(step)) for step, left in self._left.items()]

    def offset(self, rank: int, trips: Iterable[Trip]) -> Offset:
        """Rank 0: how to read the clock of ``rank``, from what it says of its trips."""
        arrived = {step: ranks[rank] for step, ranks in self._arrived.items() if rank in ranks}
        return estimate(trips, arrived, self._decided)


def estimate(trips: Iterable[Trip], arrived: Mapping[str, float], decided: Mapping[str, float]) -> Offset:
    """The offset that fits all trips: between what left the rank before it arrived, and what was decided before it was back.

    Args:
        trips: on the rank's clock.
        arrived, decided: step -> seconds on rank 0's clock.
    """
    trips = list(trips)
    most = [arrived[trip.step] - trip.left for trip in trips if trip.step in arrived]
    least = [decided[trip.step] - trip.back for trip in trips if trip.back is not None and trip.step in decided]
    if not most or not least:
        return Offset(min(most, default=max(least, default=0.0)), float("inf"))
    low, high = max(least), min(most)
    return Offset((low + high) / 2, abs(high - low) / 2)
