"""The negative control: a send stage that flips one bit of a bucket on its way out, after its digest was taken.

A check that cannot fail shows nothing. With digests, a push through this must end in `DigestMismatch`; without them every
element must be looked at, and one must be found wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch

from syncline.engine import wiring
from syncline.scheduler.programs import ReceiverId, SourceTask
from syncline.stages.completions import Completion
from syncline.stages.send import SendStage
from syncline.stages.transports.base import Sender


class Flipping:
    """A `Sender` that passes everything on to ``inner``, and flips the lowest bit in the middle of one bucket.

    Attributes:
        armed: the next bucket is the one.
    """

    def __init__(self, inner: Sender) -> None:
        self.armed = False
        self._inner = inner
        self._kept: list[torch.Tensor] = []  # a send reads it until it has ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(
        self,
        task: SourceTask,
        bucket: torch.Tensor,
        receivers: Collection[ReceiverId],
        lent: Mapping[int, torch.Tensor] | None = None,
    ) -> Mapping[ReceiverId, Completion | None]:
        """As the sender's, after one bit was flipped if that is to be."""
        if self.armed:
            self.armed = False
            lent = self._flip(bucket, dict(lent or {}))
        return self._inner.send(task, bucket, receivers, lent)

    def _flip(self, bucket: torch.Tensor, lent: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Where the trainer's own memory is sent, a copy of it takes its place: the source must stay as it is."""
        wrong = bucket
        if lent:
            offset = next(iter(lent))
            lent[offset] = wrong = lent[offset].clone()
            self._kept.append(wrong)
        wrong[wrong.numel() // 2 :][:1].bitwise_xor_(1)
        return lent


class CorruptingSend(SendStage):
    """Flips a bit in the first bucket that goes out in each push (over each transport)."""

    def __init__(self, *, routes: Mapping[ReceiverId, Sender], **how: Any) -> None:
        distinct = {id(sender): Flipping(sender) for sender in routes.values()}
        self._flipping = list(distinct.values())
        super().__init__(routes={r: cast(Sender, distinct[id(sender)]) for r, sender in routes.items()}, **how)

    def begin(self, push: int, receivers: Collection[ReceiverId]) -> None:
        """As the stage's."""
        super().begin(push, receivers)
        for sender in self._flipping:
            sender.armed = True


@contextlib.contextmanager
def corrupted() -> Iterator[None]:
    """Engines that connect in this process meanwhile send through `CorruptingSend`."""
    stage = wiring.SendStage  # type: ignore[attr-defined]  # not exported: there is no official way to send something wrong
    wiring.SendStage = CorruptingSend  # type: ignore[attr-defined]
    try:
        yield
    finally:
        wiring.SendStage = stage  # type: ignore[attr-defined]
