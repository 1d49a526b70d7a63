"""Parameters that can be pointed at other memory, with everything in the module that shares theirs."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from syncline.engine.loader import Landed
from syncline.scheduler.layout import Box, Index

from ..dtensor import local_tensor
from ..holdings import Holdings
from ..modules import alias, members


class _Sharer(NamedTuple):
    """A tensor object of the module that lies in a movable buffer's memory: a tied parameter, or a view kept as attribute."""

    tensor: torch.Tensor
    size: torch.Size
    strides: Index
    offset: int
    """Elements from the buffer's first one."""


class Movable:
    """A buffer that one piece covers as one contiguous run, and the tensor objects to be moved with it."""

    def __init__(self, local: torch.Tensor, box: Box, sharers: list[_Sharer]) -> None:
        self._shape, self._dtype, self._device = local.shape, local.dtype, local.device
        self._box, self._sharers = box, sharers

    def accepts(self, part: Landed) -> bool:
        """Whether a landed part can take the buffer's place: all of it, in the same type, on the same device."""
        tensor = part.tensor
        return (
            part.box == self._box
            and tensor.dtype is self._dtype
            and tensor.device == self._device
            and tensor.is_contiguous()
            and tensor.numel() == math.prod(self._shape)
        )

    def point(self, tensor: torch.Tensor) -> None:
        """Make every sharer a view of ``tensor``."""
        base = tensor.detach().view(self._shape)
        first = int(base.storage_offset())
        for sharer in self._sharers:
            inference = sharer.tensor.is_inference()
            sharer.tensor.data = alias(base, sharer.size, sharer.strides, first + sharer.offset, inference=inference)


def movable_buffers(model: nn.Module, holdings: Holdings) -> dict[int, Movable]:
    """The buffers of ``holdings`` that can be moved, by index.

    A buffer can be moved when one piece is all of it in memory order, and when every other tensor of the module that shares
    its storage lies inside it, so that it can be moved along.
    """
    by_storage = _tensors_by_storage(model)
    pieces: dict[int, list[int]] = {}
    for index, piece in enumerate(holdings.pieces):
        pieces.setdefault(piece.buffer, []).append(index)
    storages = [local.untyped_storage().data_ptr() for local in holdings.locals]
    users = Counter(storages)
    found = {}
    for buffer, local in enumerate(holdings.locals):
        piece = holdings.pieces[pieces[buffer][0]]
        alone = len(pieces[buffer]) == 1 and users[storages[buffer]] == 1
        if not alone or piece.offset or not _is_run(piece.box.shape, piece.strides) or not local.is_contiguous():
            continue
        if math.prod(piece.box.shape) != local.numel():
            continue
        sharers = [_sharer(tensor, local) for tensor in by_storage.get(storages[buffer], ())]
        inside = [sharer for sharer in sharers if sharer is not None]
        if len(inside) == len(sharers):
            found[buffer] = Movable(local, piece.box, inside)
    return found


def _is_run(shape: Index, strides: Index) -> bool:
    """Whether elements in index order are consecutive in memory."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _sharer(tensor: torch.Tensor, local: torch.Tensor) -> _Sharer | None:
    """How a tensor lies in ``local``; None if it leaves it or reads its bytes as another type."""
    offset = int(tensor.storage_offset() - local.storage_offset())
    reach = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.dtype is not local.dtype or offset < 0 or reach >= local.numel():
        return None
    return _Sharer(tensor, tensor.shape, tensor.stride(), offset)


def _tensors_by_storage(model: nn.Module) -> dict[int, list[torch.Tensor]]:
    """Every tensor object that the module tree refers to (parameters, buffers, attributes), by its storage's address."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for module in model.modules():
        for group in (members(module).parameters, members(module).buffers, vars(module)):
            for tensor in group.values():
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    local = local_tensor(tensor)
                    if local.device.type != "meta":
                        found.setdefault(local.untyped_storage().data_ptr(), {})[id(local)] = local
    return {pointer: list(tensors.values()) for pointer, tensors in found.items()}
