"""Items, units and wants of the scales of a quantized weight: made from those of the weight, one for one.

So every part of a weight has its own scales, which lie behind it in the same bucket, whatever the size of buckets.
"""

from __future__ import annotations

import numpy as np

from .columns import Ints, ints
from .formats import SCALES
from .leaves import leaf_grid
from .patterns import Items, Units, Wants
from .quantizing import Quantized
from .regions import volumes
from .rows import DTYPES, SIZES, Held

SCALES_TYPE = DTYPES.index(SCALES)
SCALE_NBYTES = SIZES[SCALES_TYPE]


def group_rows(quantized: Quantized | None) -> int:
    """Rows of a group; 0 where nothing is quantized."""
    return 0 if quantized is None else int(quantized.group[0])


def scale_tables(
    items: Items, wants: Wants, units: Units, *, wanted: Held, quantized: Quantized, leaf_bytes: int
) -> tuple[Items, Wants, Units]:
    """The scales of a quantized pattern's items, to the same receivers, and of its units, in the same order.

    Args:
        wanted: what target layouts want of the weight; ``wants`` counts its rows.
    """
    codes = np.flatnonzero(items.format > 0)
    lo, hi = quantized.scales_of(items.start[codes], items.start[codes] + items.shape[codes])
    nbytes = volumes(lo, hi) * SCALE_NBYTES
    kind = np.full(len(codes), SCALES_TYPE)
    made = Items(lo, hi - lo, kind, nbytes, items.audience[codes], items.held[codes], items.why[codes], 0 * kind, kind)
    place = np.full(len(items.nbytes), -1)
    place[codes] = np.arange(len(codes))
    shape = items.shape[units.item].tolist()
    rows = ints([leaf_grid(tuple(s[:2]), 1, leaf_bytes, rows=group_rows(quantized)).part_rows for s in shape])
    return made, _scale_wants(wants, place, wanted, quantized), _scale_units(units, place, made, rows, quantized)


def _scale_wants(wants: Wants, place: Ints, wanted: Held, quantized: Quantized) -> Wants:
    """Where target layouts want the scales of what they want as codes. ``place``: of each item, that of its scales, or -1."""
    theirs = quantized.wanted
    lo, hi = quantized.scales_of(wanted.lo, wanted.hi)
    mine = np.flatnonzero(place[wants.item] >= 0)
    found = []
    columns = (column[mine].tolist() for column in (place[wants.item], wants.layout, wants.row))
    for item, layout, row in zip(*columns, strict=True):
        same = (theirs.layout == layout) & (theirs.lo == lo[row]).all(axis=1) & (theirs.hi == hi[row]).all(axis=1)
        found += [(item, layout, there) for there in np.flatnonzero(same).tolist()]
    return Wants(*np.unique(ints(np.array(found)), axis=0).T)


def _scale_units(units: Units, place: Ints, scales: Items, rows: Ints, quantized: Quantized) -> Units:
    """Scales of each quantized unit. Their leaves are those of the smallest parts of the weight, so that no cut matters.

    ``rows``: of the smallest part of each unit's item.
    """
    mine = np.flatnonzero(place[units.item] >= 0)
    item, start, shape = place[units.item[mine]], units.start[mine], units.shape[mine]
    lo, hi = quantized.scales_of(start, start + shape)
    row_nbytes = scales.shape[item][:, 1:].prod(axis=1) * SCALE_NBYTES
    offset, nbytes = (lo - scales.start[item])[:, 0] * row_nbytes, volumes(lo, hi) * SCALE_NBYTES
    leaf_nbytes = -(-rows[mine] // quantized.group[0]) * row_nbytes
    one = np.ones_like(item)
    return Units(item, lo, hi - lo, nbytes, offset, offset // leaf_nbytes, one, nbytes, leaf_nbytes, units.parts[mine], 0 * one)
