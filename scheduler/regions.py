"""Box algebra on arrays: partition, join, subtraction.

Boxes are rows of two ``int64`` arrays ``lo`` and ``hi`` (rows, depth): ``lo <= index < hi`` on every axis. Everything
here is exact; nothing assumes grids or equal shards, but those are fast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .columns import Ints

Mask = npt.NDArray[np.bool_]


class Cells(NamedTuple):
    """Disjoint boxes that together are the union of some boxes, and which of those boxes each cell lies in.

    ``cell`` and ``box`` are parallel: box ``box[i]`` contains cell ``cell[i]``; sorted by cell, then box.
    """

    lo: Ints
    hi: Ints
    cell: Ints
    box: Ints


class Pairs(NamedTuple):
    """Intersections ``lo:hi`` of box ``a[i]`` of one set with box ``b[i]`` of another; sorted by ``a``, then ``b``."""

    a: Ints
    b: Ints
    lo: Ints
    hi: Ints


def volumes(lo: Ints, hi: Ints) -> Ints:
    """Elements of each box."""
    return np.asarray(np.prod(hi - lo, axis=1, dtype=np.int64))


def row_steps(shape: Ints) -> Ints:
    """Row-major strides in elements of each row of ``shape`` (rows, depth)."""
    steps = np.ones_like(shape)
    if shape.shape[1] > 1:
        steps[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return steps


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """For ``counts`` rows of children: the parent of each child, and the child's place in its parent."""
    parent = np.repeat(np.arange(len(counts)), counts)
    return parent, np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)


def partition(lo: Ints, hi: Ints) -> Cells:
    """Cut boxes (none of them empty) into disjoint cells. Equal boxes and grids come out uncut.

    Boxes that no axis-aligned cut separates are cut at each other's faces.
    """
    if not len(lo):
        return Cells(lo, hi, np.zeros(0, np.int64), np.zeros(0, np.int64))
    depth = lo.shape[1]
    distinct, inverse = np.unique(np.hstack([lo, hi]), axis=0, return_inverse=True)
    single, clusters = _separate(distinct[:, :depth], distinct[:, depth:])
    cell_lo, cell_hi = [distinct[single, :depth]], [distinct[single, depth:]]
    pairs = [(np.arange(len(single)), single)]
    count = len(single)
    for cluster in clusters:
        grid_lo, grid_hi, cell, box = _grid(distinct[cluster, :depth], distinct[cluster, depth:])
        cell_lo.append(grid_lo)
        cell_hi.append(grid_hi)
        pairs.append((cell + count, cluster[box]))
        count += len(grid_lo)
    cells = _sorted_cells(np.vstack(cell_lo), np.vstack(cell_hi), *map(np.concatenate, zip(*pairs, strict=True)))
    return _spread(cells, inverse.reshape(-1), len(distinct))


def _sorted_cells(lo: Ints, hi: Ints, cell: Ints, box: Ints) -> Cells:
    order = np.lexsort(lo.T[::-1]) if lo.shape[1] else np.arange(len(lo))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return Cells(lo[order], hi[order], place[cell], box)


def _spread(cells: Cells, distinct_of: Ints, count: int) -> Cells:
    """From distinct boxes back to all boxes that were given."""
    members = np.argsort(distinct_of, kind="stable")
    sizes = np.bincount(distinct_of, minlength=count)
    parent, place = expand(sizes[cells.box])
    box = members[(np.cumsum(sizes) - sizes)[cells.box][parent] + place]
    cell = cells.cell[parent]
    order = np.lexsort((box, cell))
    return Cells(cells.lo, cells.hi, cell[order], box[order])


def _separate(lo: Ints, hi: Ints) -> tuple[Ints, list[Ints]]:
    """Cut a set of distinct boxes recursively where a plane meets no box: lone boxes, and clusters that don't come apart."""
    lone: list[Ints] = []
    clusters: list[Ints] = []
    stack = [np.arange(len(lo))]
    while stack:
        group = stack.pop()
        parts = _cut(lo, hi, group) if len(group) > 1 else None
        if parts is None:
            (lone if len(group) == 1 else clusters).append(group)
            continue
        sizes = np.diff([*parts[1], len(group)])
        alone = np.repeat(sizes == 1, sizes)
        lone.append(parts[0][alone])
        stack += [part for part in np.split(parts[0], parts[1][1:]) if len(part) > 1]
    return np.concatenate([*lone, np.zeros(0, np.int64)]), clusters


def _cut(lo: Ints, hi: Ints, group: Ints) -> tuple[Ints, Ints] | None:
    """``group`` in order along the first axis that separates it, and where each part starts. None if no axis does."""
    for axis in range(lo.shape[1]):
        order = group[np.argsort(lo[group, axis], kind="stable")]
        reach = np.maximum.accumulate(hi[order, axis])
        starts = np.flatnonzero(lo[order[1:], axis] >= reach[:-1]) + 1
        if len(starts):
            return order, np.concatenate([[0], starts])
    return None


def _grid(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cells of overlapping boxes: the grid of all their faces, without the cells that lie in no box."""
    cuts = [np.unique(np.concatenate([lo[:, d], hi[:, d]])) for d in range(lo.shape[1])]
    sizes = np.array([[np.searchsorted(c, h) - np.searchsorted(c, b) for c, b, h in zip(cuts, *row, strict=True)]
                      for row in zip(lo, hi, strict=True)])  # fmt: skip
    firsts = np.stack([np.searchsorted(c, lo[:, d]) for d, c in enumerate(cuts)], axis=1)
    box, place = expand(np.prod(sizes, axis=1))
    index = firsts[box] + place[:, None] // row_steps(sizes)[box] % sizes[box]
    cells, cell = np.unique(index, axis=0, return_inverse=True)
    low = np.stack([c[cells[:, d]] for d, c in enumerate(cuts)], axis=1)
    high = np.stack([c[cells[:, d] + 1] for d, c in enumerate(cuts)], axis=1)
    return low, high, cell.reshape(-1), box


def join(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> Pairs:
    """All pairs of a box of ``a`` and a box of ``b`` that have a common element."""
    a, b = _candidates(a_lo, a_hi, b_lo, b_hi)
    lo, hi = np.maximum(a_lo[a], b_lo[b]), np.minimum(a_hi[a], b_hi[b])
    real = (lo < hi).all(axis=1)
    a, b, lo, hi = a[real], b[real], lo[real], hi[real]
    order = np.lexsort((b, a))
    return Pairs(a[order], b[order], lo[order], hi[order])


def _candidates(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> tuple[Ints, Ints]:
    """Pairs that meet on the one axis on which the fewest do."""
    best: tuple[int, Ints, Ints, Ints] | None = None
    for axis in range(a_lo.shape[1]):
        order = np.argsort(b_lo[:, axis], kind="stable")
        reach = np.maximum.accumulate(b_hi[order, axis]) if len(order) else order
        first = np.searchsorted(reach, a_lo[:, axis], side="right")
        counts = np.maximum(np.searchsorted(b_lo[order, axis], a_hi[:, axis], side="left") - first, 0)
        if best is None or int(counts.sum()) < best[0]:
            best = int(counts.sum()), order, first, counts
    if best is None:  # 0-d: every box is the one element
        return np.repeat(np.arange(len(a_lo)), len(b_lo)), np.tile(np.arange(len(b_lo)), len(a_lo))
    _, order, first, counts = best
    a, place = expand(counts)
    return a, order[first[a] + place]


def clash(lo: Ints, hi: Ints) -> tuple[int, int] | None:
    """Two of the boxes that have a common element, or None if all are disjoint. Empty boxes meet nothing."""
    real = np.flatnonzero((lo < hi).all(axis=1))
    _, clusters = _separate(lo[real], hi[real])
    for cluster in clusters:
        rows = real[cluster]
        pairs = join(lo[rows], hi[rows], lo[rows], hi[rows])
        other = np.flatnonzero(pairs.a != pairs.b)
        if len(other):
            return int(rows[pairs.a[other[0]]]), int(rows[pairs.b[other[0]]])
    return None


def subtract(lo: Ints, hi: Ints, cells_lo: Ints, cells_hi: Ints) -> tuple[Ints, Ints] | None:
    """One box of what is left of the box ``lo:hi`` (one row) when disjoint cells are taken out, or None if nothing is."""
    faces_lo, faces_hi = np.vstack([cells_lo, lo]), np.vstack([cells_hi, hi])
    pairs = join(lo, hi, faces_lo, faces_hi)
    cuts = [np.unique(np.concatenate([pairs.lo[:, d], pairs.hi[:, d]])) for d in range(lo.shape[1])]
    held = pairs.b < len(cells_lo)
    return _first_gap(cuts, pairs.lo[held], pairs.hi[held])


def _first_gap(cuts: list[Ints], lo: Ints, hi: Ints) -> tuple[Ints, Ints] | None:
    """The first slab between cuts whose elements the (disjoint) boxes do not all hold, narrowed axis by axis."""
    gap_lo, gap_hi = [int(c[0]) for c in cuts], [int(c[-1]) for c in cuts]
    for axis, edges in enumerate(cuts):
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            inside = (lo[:, axis] <= a) & (hi[:, axis] >= b)
            gap_lo[axis], gap_hi[axis] = a, b
            sizes = np.minimum(hi[inside], gap_hi) - np.maximum(lo[inside], gap_lo)
            whole = np.prod(np.subtract(gap_hi, gap_lo), dtype=np.int64)
            if np.prod(np.maximum(sizes, 0), axis=1, dtype=np.int64).sum() < whole:
                break
        else:
            return None
    return np.array(gap_lo, np.int64), np.array(gap_hi, np.int64)
