"""What a trainer has to offer: a `Source` for the weights of one of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from syncline.scheduler.layout import Manifest


@runtime_checkable
class Source(Protocol):
    """The weights of one rank of a source. The engine only reads them, between a push's start and its `source_free`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The trainer's group through which the ranks meet once, at `connect`. None for a single rank."""
        ...

    def manifest(self) -> Manifest:
        """What this rank holds now. Called at every push: cheap (about a microsecond a tensor) while nothing changed."""
        ...

    def buffers(self) -> Sequence[torch.Tensor]:
        """Local tensors in the order of the manifest's buffers."""
        ...
