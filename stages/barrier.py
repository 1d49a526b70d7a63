"""Stage ``barrier``: all source ranks have finished the `prepare` of a mesh group. On gloo, off the data network."""

from __future__ import annotations

from .communicator import Communicator
from .completions import Completion


class GroupBarrier:
    """Called by the driver with a mesh group. Barriers pair up by order: every rank enters them in the plan's order.

    Attributes:
        communicator: among the source ranks; None for a single one. Replaced by the engine after an error.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self.communicator = communicator

    def __call__(self, group: int) -> Completion | None:
        """Enter the barrier of ``group`` (polled); None: done, there is only one rank."""
        return None if self.communicator is None else self.communicator.barrier()
