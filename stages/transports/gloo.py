"""Gloo between hosts, CPU memory to CPU memory. See `two_sided` for how it works."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.scheduler.programs import SourceProgram, TargetProgram

from ..communicator import Communicator, Rendezvous
from ..workers import Workers
from .base import LandingMode, OnLost
from .two_sided import TwoSidedSender
from .two_sided_receiver import TwoSidedHalf


class GlooNetwork:
    """Implements `syncline.stages.transports.two_sided.Network`. ``bind_host``: address that connections bind to."""

    kind = "gloo"
    device = torch.device("cpu")

    def __init__(self, bind_host: str) -> None:
        self._bind_host = bind_host

    async def meet(
        self, rendezvous: Rendezvous, *, name: str, label: str, rank: int, members: Sequence[str], timeout_s: float,
        one_way: bool,
    ) -> Communicator:  # fmt: skip
        return await Communicator.create(
            rendezvous, name=name, rank=rank, size=len(members), bind_host=self._bind_host, timeout_s=timeout_s, members=members
        )


class GlooSender(TwoSidedSender):
    """Implements `Sender`.

    Args:
        landing: landing mode.
        bind_host: address that rendezvous and connections bind to.
        on_lost: see `OnLost`.
        program: see `TwoSidedSender`.
    """

    def __init__(
        self, *, landing: LandingMode, bind_host: str, on_lost: OnLost, rendezvous_timeout_s: float = 60.0,
        program: SourceProgram | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            network=GlooNetwork(bind_host), landing=landing, bind_host=bind_host, on_lost=on_lost,
            rendezvous_timeout_s=rendezvous_timeout_s, program=program,
        )  # fmt: skip


class GlooHalf(TwoSidedHalf):
    """Implements `ReceivingHalf`.

    Args:
        program: what this receiver takes.
        landing: landing mode, the same as the source's.
        bind_host: address that connections bind to.
        workers: threads that allocate and touch memory.
    """

    def __init__(self, *, program: TargetProgram, landing: LandingMode, bind_host: str, workers: Workers) -> None:
        super().__init__(network=GlooNetwork(bind_host), program=program, landing=landing, workers=workers)
