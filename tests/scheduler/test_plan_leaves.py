"""Leaves and parts: a part is contiguous, made of whole leaves, and as large as allowed."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, strategies as st

from syncline.scheduler.leaves import leaf_grid, split

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def leaf_spans(shape: tuple[int, ...], itemsize: int, leaf_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of all leaves in the row-major item, by the contract's words."""
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * itemsize > leaf_bytes:
        axis += 1
    step = math.prod(shape[axis + 1 :]) * itemsize
    per_leaf = max(1, leaf_bytes // step)
    spans, at = [], 0
    for _ in range(math.prod(shape[:axis])):
        for row in range(0, shape[axis] if shape else 1, per_leaf):
            size = min(per_leaf, (shape[axis] if shape else 1) - row) * step
            spans.append((at, at + size))
            at += size
    return spans


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(1, 2000))
def test_parts_are_runs_of_whole_leaves(shape, itemsize, leaf_bytes, limit) -> None:
    grid = leaf_grid(shape, itemsize, leaf_bytes)
    parts = split(grid, limit)
    spans = leaf_spans(shape, itemsize, leaf_bytes)
    index = np.arange(math.prod(shape)).reshape(shape)
    at = number = 0
    for part in parts:
        assert part.offset == at
        inside = index[tuple(slice(a, b) for a, b in zip(part.box.start, part.box.stop, strict=True))].ravel()
        assert np.array_equal(inside * itemsize, np.arange(at, at + part.nbytes, itemsize))
        assert part.first == number
        for _ in range(part.blocks):
            stop = at + part.block_nbytes
            while at < stop:
                size = min(grid.leaf_nbytes, stop - at)
                assert spans[number] == (at, at + size)
                at, number = at + size, number + 1
        largest = max(b - a for a, b in spans)
        assert part.nbytes <= max(limit, largest)
    assert number == len(spans)
    assert at == grid.nbytes


@given(SHAPES, st.integers(1, 300))
def test_what_fits_is_not_cut(shape, leaf_bytes) -> None:
    grid = leaf_grid(shape, 4, leaf_bytes)
    assert len(split(grid, grid.nbytes)) == 1


def test_parts_of_one_axis_are_about_equal() -> None:
    sizes = [part.nbytes for part in split(leaf_grid((1000, 256), 4, 4096), 300_000)]
    assert len(sizes) == 4
    assert max(sizes) <= 300_000
    assert max(sizes) - min(sizes) <= 4 * 4096
