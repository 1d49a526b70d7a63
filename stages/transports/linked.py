"""What two-sided transports are made of: communicators, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..communicator import Rendezvous
from ..completions import Signal


class Linked(Protocol):
    """A communicator as these transports use it; `syncline.stages.communicator.Communicator` is one."""

    @property
    def usable(self) -> bool:
        """False after the first error, or `abort`."""
        ...

    def set_deadline(self, timeout_s: float) -> None:
        """Operations started from now on fail ``timeout_s`` seconds from now."""
        ...

    def send_all(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        """Send several messages in order."""
        ...

    def recv_all(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        """Receive several messages in order."""
        ...

    def abort(self) -> Signal[None]:
        """Start closing; ends when nothing is under way any more."""
        ...

    async def close(self, timeout_s: float = 5.0) -> None:
        """`abort`, for a bounded time."""
        ...


class Network(Protocol):
    """What communicators are made of.

    Attributes:
        kind: the transport's name.
        device: where the memory lies that they move.
    """

    kind: str
    device: torch.device

    async def meet(
        self, rendezvous: Rendezvous, *, name: str, label: str, rank: int, members: Sequence[str], timeout_s: float,
        one_way: bool,
    ) -> Linked:  # fmt: skip
        """Meet the other members.

        Args:
            name: what they meet under.
            label: what it is for, on this rank.
            rank: place among the members.
            members: what they are called, for errors.
            one_way: rank 0 sends to the others, and nothing else is ever sent.
        """
        ...
