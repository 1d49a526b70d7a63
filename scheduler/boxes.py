"""Boxes: axis-aligned regions of a tensor, and the few things that every layer asks of them.

Coordinates count elements. A box of a 0-d tensor is ``((), ())`` and has one element; a box with a zero in its shape has
none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """An axis-aligned region: ``start[d] <= i[d] < start[d] + shape[d]``. A 0-d tensor is the box ``((), ())``."""

    start: Index
    shape: Index

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of ``shape``."""
        return cls(start=(0,) * len(shape), shape=tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def stop(self) -> Index:
        """First index beyond the box, on every axis."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where there is no common element."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        shape = tuple(min(a, b) - s for a, b, s in zip(self.stop, other.stop, start, strict=True))
        return Box(start=start, shape=shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box. An empty box is in every box."""
        if other.volume == 0:
            return True
        pairs = zip(self.start, other.start, self.stop, other.stop, strict=True)
        return all(a <= b and d <= c for a, b, c, d in pairs)

    def relative_to(self, origin: Index) -> Box:
        """The same region counted from ``origin``."""
        return Box(start=tuple(a - o for a, o in zip(self.start, origin, strict=True)), shape=self.shape)


def row_major(shape: Sequence[int]) -> Index:
    """Strides in elements of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def flat_offset(index: Sequence[int], shape: Sequence[int]) -> int:
    """Row-major position of ``index`` in a tensor of ``shape``, in elements."""
    return sum(i * s for i, s in zip(index, row_major(shape), strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range ``[start, stop)`` of a row-major tensor of ``shape`` into boxes, in order.

    This is how ZeRO-3 and FSDP1 hold tensors. A d-dimensional tensor gives at most ``2 * d - 1`` boxes. Each box is
    contiguous in the flat range. Raises `ValueError` for a range beyond the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"flat range [{start}, {stop}) is not within the {total} elements of shape {tuple(shape)}")
    return _flat_boxes(tuple(shape), start, stop)


def _flat_boxes(shape: Index, start: int, stop: int) -> Iterator[Box]:
    strides = row_major(shape)
    while start < stop:
        axis = next((d for d, s in enumerate(strides) if start % s == 0 and start + s <= stop), None)
        if axis is None:  # 0-d: one element, no axis
            yield Box(start=(), shape=())
            return
        index = tuple(start // s % n for s, n in zip(strides, shape, strict=True))
        steps = min((stop - start) // strides[axis], shape[axis] - index[axis])
        yield Box(start=index, shape=(1,) * axis + (steps,) + shape[axis + 1 :])
        start += steps * strides[axis]
