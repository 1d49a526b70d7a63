"""What people write first: gather each tensor whole, and broadcast it from rank 0. Run in the same processes as the pushes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .shards import Shards

if TYPE_CHECKING:
    from .peer import Command

_TIMEOUT = timedelta(seconds=120)


def _join(command: Command) -> dist.ProcessGroupGloo:
    """A gloo group of rank 0 of the source and the receivers, as a naive implementation makes it."""
    store = dist.FileStore(command.store, command.size)  # type: ignore[attr-defined]  # public, but not listed as such
    return dist.ProcessGroupGloo(store, command.place, command.size, _TIMEOUT)


def _broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    group.broadcast([tensor], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]  # missing in torch's stubs


@torch.no_grad()
def receive_naively(model: Shards, command: Command) -> None:
    """Take whole tensors, and copy this rank's part of each."""
    group = _join(command)
    received = torch.empty(next(iter(model.boxes.values())).shape)
    for _ in range(command.repeat):
        for name, tensor in model.named_parameters():
            _broadcast(group, received)
            tensor.copy_(received[model.slices(name)])


def send_naively(kind: str, model: Shards, command: Command) -> Callable[[], None]:
    """A function that pushes once. All source ranks call it; the one whose ``command.place`` is 0 broadcasts."""
    group = _join(command) if command.place == 0 else None  # ranks beyond ``command.size`` only gather

    def push() -> None:
        for number, tensor in enumerate(model.parameters()):
            whole = _whole(kind, tensor.detach(), number)
            if group is not None:
                _broadcast(group, whole)

    return push


def _whole(kind: str, tensor: torch.Tensor, number: int) -> torch.Tensor:
    if kind == "fsdp":
        whole: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # a DTensor
        return whole
    if kind == "module":
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim=number % 2)
