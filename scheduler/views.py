"""Strided views of local memory: how far they reach, whether they are contiguous, whether two of them meet.

A view is a row of ``offset``, ``shape``, ``strides`` in elements. All functions take columns of many views.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .columns import Ints
from .regions import Mask, clash, expand, row_steps

_ENUMERATED = 1 << 24
"""Elements up to which views of one buffer are compared one by one where they fit no common grid."""


class Views(NamedTuple):
    """Strided views; ``itemsize`` in bytes. All columns have one row a view."""

    buffer: Ints
    offset: Ints
    shape: Ints
    strides: Ints
    itemsize: Ints

    def rows(self, select: Ints) -> Views:
        return Views(*(column[select] for column in self))


def contiguous(shape: Ints, strides: Ints) -> Mask:
    """Whether the elements of each view lie one after another in row-major order."""
    return np.asarray(((shape == 1) | (strides == row_steps(shape))).all(axis=1) | (shape == 0).any(axis=1))


def spans(views: Views) -> tuple[Ints, Ints]:
    """First byte of each view in its buffer, and the byte after its last."""
    reach = ((views.shape - 1) * views.strides).sum(axis=1) + 1
    empty = (views.shape == 0).any(axis=1)
    return views.offset * views.itemsize, np.where(empty, views.offset, views.offset + reach) * views.itemsize


def folded(shape: Ints, strides: Ints) -> Mask:
    """Views that are not seen to have each element at a place of its own (an expanded view, for one)."""
    step = np.where(shape > 1, strides, 0)
    order = np.argsort(-step, axis=1, kind="stable")
    step = np.take_along_axis(step, order, axis=1)
    length = np.take_along_axis(np.where(shape > 1, shape, 1), order, axis=1)
    reach = (length - 1) * step
    inner = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] - reach
    return np.asarray(((length > 1) & (step < inner + 1)).any(axis=1))


class Meeting(NamedTuple):
    """Two views (rows) with a common byte; ``proved`` is False where planning could only not show that they have none."""

    a: int
    b: int
    proved: bool


def meetings(views: Views) -> list[Meeting]:
    """Pairs of views of one buffer that have a byte in common: at most one for each knot of views.

    Views with a shape of zero meet nothing. A view that meets itself is reported as a pair with itself.
    """
    low, high = spans(views)
    real = np.flatnonzero(high > low)
    found = [_self_meeting(views, int(i)) for i in real[folded(views.shape[real], views.strides[real])]]
    order = real[np.lexsort((high[real], low[real], views.buffer[real]))]
    knots = _knots(views.buffer[order], low[order], high[order])
    found += [_meeting(views.rows(order[knot]), order[knot]) for knot in knots]
    return [meeting for meeting in found if meeting is not None]


def _knots(buffer: Ints, low: Ints, high: Ints) -> list[Ints]:
    """Runs of rows (sorted by buffer, then low) whose spans chain into each other; runs of one are left out."""
    if not len(buffer):
        return []
    lift = (int(high.max()) + 1) * (np.unique(buffer, return_inverse=True)[1].reshape(-1))
    reach = np.maximum.accumulate(high + lift)
    starts = np.flatnonzero(np.concatenate([[True], (low + lift)[1:] >= reach[:-1]]))
    sizes = np.diff([*starts, len(buffer)])
    return [np.arange(s, s + n) for s, n in zip(starts[sizes > 1], sizes[sizes > 1], strict=True)]


def _self_meeting(views: Views, row: int) -> Meeting | None:
    elements = int(views.shape[row].prod())
    if elements > _ENUMERATED:
        return Meeting(row, row, proved=False)
    places = _places(views.rows(np.array([row])))[1]
    return Meeting(row, row, proved=True) if len(np.unique(places)) < elements else None


def _meeting(views: Views, names: Ints) -> Meeting | None:
    grid = _grid_boxes(views)
    if grid is not None:
        pair = clash(*grid)
        return None if pair is None else Meeting(int(names[pair[0]]), int(names[pair[1]]), proved=True)
    if int((views.shape.prod(axis=1) * views.itemsize).sum()) > _ENUMERATED:
        return Meeting(int(names[0]), int(names[1]), proved=False)
    view, place = _places(views)
    order = np.argsort(place, kind="stable")
    same = np.flatnonzero((np.diff(place[order]) == 0) & (np.diff(view[order]) != 0))
    if not len(same):
        return None
    return Meeting(int(names[view[order[same[0]]]]), int(names[view[order[same[0] + 1]]]), proved=True)


def _places(views: Views) -> tuple[Ints, Ints]:
    """The view and the place in its buffer of every byte of the views (of every element, for a single view)."""
    view, index = expand(views.shape.prod(axis=1))
    coordinates = index[:, None] // row_steps(views.shape)[view] % views.shape[view]
    place = views.offset[view] + (coordinates * views.strides[view]).sum(axis=1)
    if len(views.offset) == 1:
        return view, place
    byte_of, byte = expand(views.itemsize[view])
    return view[byte_of], (place * views.itemsize[view])[byte_of] + byte


def _grid_boxes(views: Views) -> tuple[Ints, Ints] | None:
    """The views as boxes of one grid over bytes, if there is one: strides that divide each other, and no carry.

    Row slices, column slices and interleaved slices of one matrix have such a grid: its axes are the distinct strides.
    """
    itemsize = views.itemsize[:, None]
    shape = np.hstack([views.shape, itemsize])
    steps = np.hstack([np.where(views.shape > 1, views.strides * itemsize, 0), np.ones_like(itemsize)])
    axes = np.unique(steps[shape > 1])
    if len(axes) and axes[0] == 0:
        return None
    axes = axes if len(axes) and axes[0] == 1 else np.concatenate([[1], axes])
    if (axes[1:] % axes[:-1]).any():
        return None
    offset = (views.offset * views.itemsize)[:, None]
    low = offset // axes
    low[:, :-1] %= axes[1:] // axes[:-1]
    size = np.ones_like(low)
    for column in range(shape.shape[1]):
        wide = np.flatnonzero(shape[:, column] > 1)
        place = np.searchsorted(axes, steps[wide, column])
        if (size[wide, place] > 1).any():
            return None
        size[wide, place] = shape[wide, column]
    if (low[:, :-1] + size[:, :-1] > axes[1:] // axes[:-1]).any():
        return None
    return low, low + size
