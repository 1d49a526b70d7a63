"""The byte budget: temporary bytes of the tasks in flight on one device, against the watermark."""

from __future__ import annotations

from collections.abc import Hashable

from .errors import BudgetError


class ByteBudget:
    """Bytes are reserved before anything is allocated and released exactly once.

    It lives as long as the engine: bytes of work that a failed push left in flight count against the next one.

    Attributes:
        limit: the watermark, in bytes.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"the watermark is {limit} bytes; it must be at least 0")
        self.limit = limit
        self._held: dict[Hashable, int] = {}
        self._in_use = 0
        self._peak = 0

    @property
    def in_use(self) -> int:
        """Bytes that are reserved now."""
        return self._in_use

    @property
    def peak(self) -> int:
        """The most bytes that were reserved at once since the last `reset_peak`."""
        return self._peak

    @property
    def held(self) -> dict[Hashable, int]:
        """A copy of the reservations, by key."""
        return dict(self._held)

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more can be reserved now."""
        return self._in_use + nbytes <= self.limit

    def reserve(self, key: Hashable, nbytes: int) -> None:
        """Reserve ``nbytes`` under ``key``.

        Raises:
            BudgetError: ``key`` holds bytes already, ``nbytes`` is negative, or the watermark would be passed.
        """
        if key in self._held:
            raise BudgetError(f"{key} holds {self._held[key]} bytes already; they must be released before it reserves again")
        if nbytes < 0:
            raise BudgetError(f"{key} would reserve {nbytes} bytes; a reservation is at least 0")
        if not self.fits(nbytes):
            raise BudgetError(
                f"{key} would reserve {nbytes} bytes where {self._in_use} of {self.limit} are in use; wait for a release"
            )
        self._held[key] = nbytes
        self._in_use += nbytes
        self._peak = max(self._peak, self._in_use)

    def release(self, key: Hashable) -> int:
        """Give back what ``key`` holds and return how many bytes that was.

        Raises:
            BudgetError: ``key`` holds nothing: it was released already, or never reserved.
        """
        if key not in self._held:
            raise BudgetError(f"{key} holds no bytes: it was released already, or it never reserved any")
        nbytes = self._held.pop(key)
        self._in_use -= nbytes
        return nbytes

    def reset_peak(self) -> None:
        """Begin a new high-water mark at what is in use now."""
        self._peak = self._in_use
