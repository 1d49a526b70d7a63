"""Digest leaves, and how an oversize item is cut at their boundaries.

The leaves of an item depend on its shape, dtype and ``leaf_bytes`` alone. Leaf axis: the first axis such that one step
along it (all later axes whole) has at most ``leaf_bytes`` bytes. A *block* is that axis whole, for one index of the axes
before it; it is cut into leaves of as many steps as fit ``leaf_bytes``, the last one shorter. Leaves are contiguous in the
row-major item and are numbered through all blocks.

A *part* is a box of whole leaves that is contiguous in the row-major item: some leaves of one block, or whole blocks. So
any cut into parts has the same leaves, and the digest does not depend on it.

A quantized matrix is cut between *groups* of rows only: there leaves are whole groups of rows, or an even part of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .boxes import Box, Index, flat_offset, row_major


class LeafGrid(NamedTuple):
    """Leaves of an item of ``shape``: its leaf axis, bytes of a step, a leaf and a block, and leaves in a block.

    ``rows``: of a quantized matrix: its parts have a multiple of so many rows; 0 for others.
    """

    shape: Index
    itemsize: int
    axis: int
    step_nbytes: int
    leaf_steps: int
    block_nbytes: int
    rows: int = 0

    @property
    def leaf_nbytes(self) -> int:
        return self.leaf_steps * self.step_nbytes

    @property
    def block_leaves(self) -> int:
        return -(-self.block_nbytes // self.leaf_nbytes)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def part_rows(self) -> int:
        """Rows of the smallest part of a matrix."""
        return max(self.leaf_steps, self.rows) if self.axis == 0 else self.rows


class Part(NamedTuple):
    """A part of an item: its box within the item, bytes and place, and its leaves as in `programs.Leaves`."""

    box: Box
    offset: int
    nbytes: int
    first: int
    blocks: int
    block_nbytes: int


def leaf_grid(shape: Index, itemsize: int, leaf_bytes: int, *, rows: int = 0) -> LeafGrid:
    """The leaves of an item. ``shape`` has no zero in it; a step that is larger than ``leaf_bytes`` is a leaf of its own.

    ``rows``: of a group of a quantized matrix, which no part cuts in two; 0 for others.
    """
    steps = [n * itemsize for n in row_major(shape)]
    axis = next((d for d, step in enumerate(steps) if step <= leaf_bytes), max(len(shape) - 1, 0))
    step, length = (steps[axis], shape[axis]) if shape else (itemsize, 1)
    leaf_steps = min(max(1, leaf_bytes // step), length)
    if axis == 0 and 1 < rows < length:
        leaf_steps = leaf_steps // rows * rows or max(d for d in range(1, leaf_steps + 1) if rows % d == 0)
    return LeafGrid(shape, itemsize, axis, step, leaf_steps, length * step, rows)


def split(grid: LeafGrid, limit: int) -> list[Part]:
    """Cut an item into parts of at most ``limit`` bytes, or of one leaf where a leaf is larger; about equal, in order."""
    shape = grid.shape
    if grid.nbytes <= limit or not shape:
        return [_part(grid, Box.whole(shape))]
    steps = [n * grid.itemsize for n in row_major(shape)]
    axis = next((d for d in range(grid.axis) if steps[d] <= limit), grid.axis)
    unit = grid.leaf_steps if axis == grid.axis else 1
    if grid.rows:
        axis, unit = 0, grid.part_rows
    units = -(-shape[axis] // unit)
    pieces = -(-units // max(1, limit // (unit * steps[axis])))
    stride = unit * -(-units // pieces)
    boxes = []
    for lead in range(math.prod(shape[:axis])):
        index = tuple(lead // s % n for s, n in zip(row_major(shape[:axis]), shape[:axis], strict=True))
        for start in range(0, shape[axis], stride):
            length = min(stride, shape[axis] - start)
            tail = (0,) * (len(shape) - axis - 1)
            boxes.append(Box(start=(*index, start, *tail), shape=(1,) * axis + (length,) + shape[axis + 1 :]))
    return [_part(grid, box) for box in boxes]


def _part(grid: LeafGrid, box: Box) -> Part:
    offset = flat_offset(box.start, grid.shape) * grid.itemsize
    nbytes = box.volume * grid.itemsize
    block, within = divmod(offset, grid.block_nbytes)
    blocks = max(1, nbytes // grid.block_nbytes)
    first = block * grid.block_leaves + within // grid.leaf_nbytes
    return Part(box, offset, nbytes, first, blocks, nbytes // blocks)
