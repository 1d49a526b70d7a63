"""Float32 matrices as one of several tensor-parallel ranks holds them: what the measurements of direct routes push."""

from __future__ import annotations

import torch
from torch import nn

from syncline.adapters.named_box import NamedBox, named_box

_WIDTH = 1024


class Shards(nn.Module):
    """``tensors`` matrices of ``nbytes`` bytes in all over all ranks, sharded by rows and by columns in turn.

    Element ``(i, j)`` of matrix ``n`` in version ``v`` is ``i * 1024 + j + 7 * v + n``: anyone can say what belongs where.
    """

    def __init__(self, tensors: int, nbytes: int, *, rank: int, size: int) -> None:
        super().__init__()
        rows = nbytes // 4 // tensors // _WIDTH // size * size
        self.boxes: dict[str, NamedBox] = {}
        for number in range(tensors):
            start, shape = [0, 0], [rows, _WIDTH]
            axis = number % 2
            shape[axis] //= size
            start[axis] = rank * shape[axis]
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(shape)))
            self.boxes[f"w{number}"] = named_box(f"w{number}", (rows, _WIDTH), start=start, size=shape)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(param.numel() * param.element_size() for param in self.parameters())

    @torch.no_grad()
    def stamp(self, version: int) -> None:
        """Fill with the content of a version."""
        for number, (name, param) in enumerate(self.named_parameters()):
            param.copy_(self._content(name, number, version))

    @torch.no_grad()
    def clear(self) -> None:
        """Fill with what no version has."""
        for param in self.parameters():
            param.fill_(-1)

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
        return rows[:, None] * _WIDTH + columns + (7 * version + number)
