"""Where what targets need is cut at the boundaries of the source's shards, and why it is not.

A needed box that one rank holds is never cut. One that is spread over ranks is either gathered by an owner, or cut into
*parts* that lie in the shards of different ranks, each sent by a rank that holds it. Cutting saves the gather, and costs a
segment for each part. What is decided for a box depends on nothing but this box and the source's shards, so that its
digest stays the same whatever other targets there are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from .columns import Ints
from .options import PlanOptions
from .quantizing import Quantized
from .regions import Mask, Pairs

Why = Literal["balance", "route", "mapped", "whole", "small", "groups"]
WHY: tuple[Why, ...] = get_args(Why)
"""Why something is put together from pieces of several ranks, although targets could take it from each:

- ``balance``: its holder would send too much, so another rank assembles and sends it;
- ``route``: the option says so;
- ``mapped``: parameters are pointed at it, so it must lie in one piece in one rank's memory;
- ``whole``: the target transforms it, and takes nothing but whole boxes;
- ``small``: its parts are smaller than a part is worth;
- ``groups``: it is quantized, and a group of its elements is spread over shards.
"""

SMALL = WHY.index("small")


class Cut(NamedTuple):
    """What is sent of the wanted boxes: parallel columns. ``row`` is the wanted box; ``why`` is an index into `WHY`."""

    row: Ints
    lo: Ints
    hi: Ints
    held: Mask
    why: Ints


def cut_boxes(
    lo: Ints, hi: Ints, nbytes: Ints, *, uncut: Mask, met: Pairs, cell_set: Ints, options: PlanOptions,
    quantized: Quantized | None = None, codes: Mask | None = None,
) -> Cut:  # fmt: skip
    """Decide which of the wanted boxes ``lo:hi`` are cut, and cut them.

    Args:
        nbytes: bytes of each box in its wire type.
        uncut: boxes that must not be cut.
        met: their intersections with the cells of the source.
        cell_set: for each cell the set of ranks that hold it.
        quantized: of a weight that travels so; then ``codes`` tells which boxes are wanted as codes.
    """
    parts = merged(met, cell_set)
    count = np.bincount(parts.a, minlength=len(lo))
    why = np.full(len(lo), SMALL)
    crossed = np.zeros(len(lo), bool)
    if quantized is not None and codes is not None:
        crossed[parts.a[quantized.cuts(parts.lo, parts.hi, hi[parts.a])]] = True
        crossed &= codes
    why[crossed] = WHY.index("groups")
    why[uncut] = WHY.index("whole")
    if options.landing == "mapped":
        why[:] = WHY.index("mapped")
    elif options.route == "gather":
        why[:] = WHY.index("route")
    why[count == 1] = WHY.index("balance")
    may = ~(uncut | crossed) & (options.landing != "mapped") & (options.route != "gather")
    worth = nbytes >= count * options.leaf_bytes if options.route == "auto" else np.ones(len(lo), bool)
    cut = may & worth & (count > 1)
    whole, pieces = np.flatnonzero(~cut), np.flatnonzero(cut[parts.a])
    row = np.concatenate([whole, parts.a[pieces]])
    why[cut] = WHY.index("balance")
    low, high = np.vstack([lo[whole], parts.lo[pieces]]), np.vstack([hi[whole], parts.hi[pieces]])
    return Cut(row, low, high, may[row] & (options.route == "direct"), why[row])


def merged(met: Pairs, cell_set: Ints) -> Pairs:
    """The intersections, with those that lie side by side in the same shards joined. ``b`` is the set of ranks then.

    A rank may hold neighbouring boxes in separate pieces (groups of query heads, say). One pass along each axis joins every
    row of a grid, which is how shards lie.
    """
    a, b, lo, hi = met.a, cell_set[met.b], met.lo, met.hi
    for axis in range(lo.shape[1]):
        others = [column for d in range(lo.shape[1]) if d != axis for column in (lo[:, d], hi[:, d])]
        order = np.lexsort((lo[:, axis], *others, b, a))
        same = np.ones(len(order), bool)[1:]
        for column in (a, b, *others):
            same &= column[order[1:]] == column[order[:-1]]
        same &= lo[order[1:], axis] == hi[order[:-1], axis]
        head = np.flatnonzero(np.concatenate([[True], ~same])[: len(order)])
        last = order[np.append(head[1:], len(order))[: len(head)] - 1]
        first = order[head]
        high = hi[first].copy()
        high[:, axis] = hi[last, axis]
        a, b, lo, hi = a[first], b[first], lo[first], high
    order = np.lexsort((*lo.T[::-1], a))
    return Pairs(a[order], b[order], lo[order], hi[order])
