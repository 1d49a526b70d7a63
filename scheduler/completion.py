"""What the driver needs to know of the work that it starts: protocols that stages implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Completion(Protocol):
    """Says, without blocking, whether started work is done. Called on the loop only."""

    def poll(self) -> bool:
        """True when the work is done, False while it runs. Raises the error that it ended with."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> bool:
        """Arrange for ``callback`` to be called on the loop when the work ends, and return True.

        If it has ended already, call it soon or at once. False says that the completion must be polled.
        """
        ...


class Stage(Protocol):
    """One of the stages: starts its part of a task."""

    def start(self, task: int) -> Completion | None:
        """Start the stage of ``task`` and return at once. None: it is done already. Must not block.

        If it raises, nothing of it may be in flight.
        """
        ...
