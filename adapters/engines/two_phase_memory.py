"""Temporary memory for an update whose size only its source knows for sure.

gloo does not say how much has come. A broadcast of fewer bytes than announced ends well and leaves the rest of the memory
as it was; one of more bytes ends the whole process, if it does not fit what was posted for it. So every tensor is followed
by room for whatever may come: the tensors after it, and at the end an address range that takes no memory until something is
written. What lies there before tells afterwards whether exactly the announced bytes have come.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Sequence

import torch

from syncline.engine.errors import PushError

from .two_phase_messages import Announced

_ALIGN = 256
_MARK = 16
_TAIL = 4
_NORESERVE = 0x4000  # of Linux; `mmap.MAP_NORESERVE` from Python 3.13 on
_ROOMS = (2**36, 2**33, 2**30, 0)


class Arena:
    """Memory for all tensors of an update.

    Attributes:
        weights: name -> tensor, in the order of ``tensors``.
        rooms: for each of them, bytes from its start to the end of all that may be written.
    """

    def __init__(self, tensors: Sequence[Announced]) -> None:
        """Raises `MemoryError` if there is no address range of that size."""
        self._tensors = tensors
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-(tensor.nbytes + _MARK) // _ALIGN) * _ALIGN
        memory = _reserve(size)
        self._mark = torch.frombuffer(bytearray(secrets.token_bytes(_MARK)), dtype=torch.uint8)
        self.rooms = [memory[start:] for start in starts]
        self.weights: dict[str, torch.Tensor] = {}
        for tensor, room in zip(tensors, self.rooms, strict=True):
            self.weights[tensor.name] = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._put_marks(tensor, room)

    def check(self, index: int) -> None:
        """Raises `PushError` unless exactly the announced bytes of a tensor have come.

        What is not seen: up to three bytes too few of integers of less than four bytes, and, once in 2**32, content that
        happens to be what lay there before (of integers only).
        """
        tensor, room = self._tensors[index], self.rooms[index]
        if not torch.equal(room[tensor.nbytes : tensor.nbytes + _MARK], self._mark):
            raise PushError(f"{tensor}: more bytes came than the {tensor.nbytes} that were announced")
        mark = self._tail_mark(tensor)
        if len(mark) and torch.equal(room[tensor.nbytes - len(mark) : tensor.nbytes], mark):
            raise PushError(f"{tensor}: fewer bytes came than the {tensor.nbytes} that were announced")

    def _put_marks(self, tensor: Announced, room: torch.Tensor) -> None:
        mark = self._tail_mark(tensor)
        room[tensor.nbytes - len(mark) : tensor.nbytes] = mark
        room[tensor.nbytes : tensor.nbytes + _MARK] = self._mark

    def _tail_mark(self, tensor: Announced) -> torch.Tensor:
        """What the last bytes of a tensor are before it comes: nothing that content is. Empty if any content may be there."""
        if tensor.nbytes and (tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
            return torch.full((tensor.dtype.itemsize,), 0xFF, dtype=torch.uint8)  # a NaN that no arithmetic makes; no bool
        return self._mark[: _TAIL if tensor.nbytes >= _TAIL else 0]


def _reserve(size: int) -> torch.Tensor:
    """``size`` bytes and as large an address range behind them as can be had. Memory is taken as it is written."""
    for room in _ROOMS:
        try:
            memory = mmap.mmap(-1, max(1, size + room), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError):
            continue
        return torch.frombuffer(memory, dtype=torch.uint8)
    raise MemoryError(f"there is no room for {size} bytes")
