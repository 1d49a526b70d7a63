"""Float32 matrices as one of several ranks holds them: what all measurements push."""

from __future__ import annotations

import math

import torch
from torch import nn

from syncline.adapters.named_box import NamedBox, named_box

WIDTH = 1024
_ROW_BYTES = 4 * WIDTH
_PERIOD = 8192  # rows after which the content repeats: with it every value is a whole number that float32 holds exactly


def rows_for(tensors: int, nbytes: int, *sizes: int) -> int:
    """Rows of each of ``tensors`` matrices of nearly ``nbytes`` bytes in all; ``sizes`` ranks can share them evenly."""
    step = math.lcm(*sizes)
    return max(1, nbytes // (tensors * _ROW_BYTES * step)) * step


def nbytes_of(tensors: int, rows: int) -> int:
    """Bytes of ``tensors`` matrices of ``rows`` rows."""
    return tensors * rows * _ROW_BYTES


class Shards(nn.Module):
    """``tensors`` matrices of ``rows`` rows and 1024 columns, as rank ``rank`` of ``size`` holds them.

    Every other matrix is cut by rows, the others by columns.

    Element ``(i, j)`` of matrix ``n`` in version ``v`` is ``(i % 8192) * 1024 + j + 7 * v + n``: anyone can say what belongs
    where, and a version is made of the one before by adding 7.
    """

    def __init__(self, tensors: int, rows: int, *, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.boxes: dict[str, NamedBox] = {}
        self.version = 0
        for number in range(tensors):
            start, shape = [0, 0], [rows, WIDTH]
            axis = number % 2
            shape[axis] //= size
            start[axis] = rank * shape[axis]
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(shape)))
            self.boxes[f"w{number}"] = named_box(f"w{number}", (rows, WIDTH), start=start, size=shape)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(param.numel() * param.element_size() for param in self.parameters())

    @torch.no_grad()
    def stamp(self, version: int) -> None:
        """Fill with the content of a version. Before anything shards the parameters further; after that, `restamp`."""
        for number, (name, param) in enumerate(self.named_parameters()):
            param.copy_(self._content(name, number, version))
        self.version = version

    @torch.no_grad()
    def restamp(self, version: int) -> None:
        """Go from the version that was stamped to another one, in whatever form the parameters are by now."""
        for param in self.parameters():
            param.add_(7.0 * (version - self.version))
        self.version = version

    def slices(self, name: str) -> tuple[slice, ...]:
        """Where this rank's part of a matrix lies in the whole."""
        box = self.boxes[name]
        return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))

    def is_stamped(self, version: int) -> bool:
        """Whether every element is what `stamp` of ``version`` writes."""
        named = enumerate(self.named_parameters())
        return all(torch.equal(param.detach(), self._content(name, number, version)) for number, (name, param) in named)

    def _content(self, name: str, number: int, version: int) -> torch.Tensor:
        box = self.boxes[name]
        rows, columns = (torch.arange(at, at + size, dtype=torch.float32) for at, size in zip(box.start, box.size, strict=True))
        return (rows % _PERIOD)[:, None] * WIDTH + columns + (7 * version + number)
