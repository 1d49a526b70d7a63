"""Buckets and their order: which units share a bucket, when it is sent, and where it lies in landing space."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from .columns import Ints
from .cutting import SMALL
from .options import PlanOptions
from .patterns import Patterns
from .programs import ALIGN
from .regions import Mask


class Placed(NamedTuple):
    """Units of tensors, in the source's order of tensors; parallel columns."""

    tensor: Ints
    unit: Ints
    owner: Ints
    group: Ints
    chain: Ints
    """The same for all parts of one item of one tensor; -1 for units that are whole items, and for what is quantized."""
    glued: Mask
    """Lies in the bucket of the unit before it: scales, behind their codes."""


class Tasks(NamedTuple):
    """Tasks in plan order. Task ``i`` has the segments ``first[i]:first[i + 1]`` of `Segments`."""

    group: Ints
    owner: Ints
    audience: Ints
    nbytes: Ints
    first: Ints
    chain: Ints
    shared_offset: Ints


class Segments(NamedTuple):
    """Segments in plan order: what lies where in which bucket."""

    task: Ints
    tensor: Ints
    unit: Ints
    offset: Ints


def pack(placed: Placed, patterns: Patterns, options: PlanOptions, world: int) -> tuple[Tasks, Segments, Ints]:
    """Fill buckets and order them.

    A bucket holds units of one mesh group, owner and audience; ``auto`` puts small things that are gathered into buckets of
    their own, so that the others wait for nobody's messages. Groups follow each other; within a group the owners take
    turns, so that all of them send from the start. An owner's buckets follow the source's order of tensors. Scales lie right
    behind their codes.

    Returns:
        Tasks, segments, and the bytes of each owner's landing space.
    """
    audience = patterns.items.audience[patterns.units.item[placed.unit]]
    apart = (patterns.items.why[patterns.units.item[placed.unit]] == SMALL) & (options.route == "auto")
    order = np.lexsort((np.arange(len(audience)), apart, audience, placed.owner, placed.group))
    run = np.stack([placed.group[order], placed.owner[order], audience[order], apart[order]], axis=1)
    fresh = np.concatenate([[True], (run[1:] != run[:-1]).any(axis=1)])[: len(order)]
    bucket, offset = _fill(placed, order, fresh, patterns, options)
    opener = np.flatnonzero(np.diff(bucket, prepend=-1))  # first segment of each bucket
    plan_order = _take_turns(placed.group[order[opener]], placed.owner[order[opener]], order[opener])
    turn = np.empty_like(plan_order)
    turn[plan_order] = np.arange(len(plan_order))
    by_turn = np.argsort(turn[bucket], kind="stable")
    task, place = turn[bucket][by_turn], order[by_turn]
    segments = Segments(task, placed.tensor[place], placed.unit[place], offset[by_turn])
    first = np.searchsorted(task, np.arange(len(opener) + 1))
    head, last = place[first[:-1]], first[1:] - 1
    nbytes = segments.offset[last] + patterns.units.nbytes[segments.unit[last]]
    chain, owner = placed.chain[head], placed.owner[head]
    shared, totals = _shared_landing(nbytes, chain, owner, world)
    return Tasks(placed.group[head], owner, audience[head], nbytes, first, chain, shared), segments, totals


def _fill(placed: Placed, order: Ints, fresh: Mask, patterns: Patterns, options: PlanOptions) -> tuple[Ints, Ints]:
    """Bucket and offset of every unit in ``order``.

    Parts of a split item have a bucket each, so that they can lie without a gap in landing space.
    """
    units = patterns.units
    unit = placed.unit[order]
    nbytes, part = units.nbytes[unit], placed.chain[order] >= 0
    weight = 0 if options.in_landing else 1
    fresh = fresh | part
    fresh[1:] |= part[:-1]
    # Running sums: a unit's end, and what is staged up to it, are known for any bucket that begins somewhere before it.
    at = np.cumsum(-(-nbytes // ALIGN) * ALIGN) - -(-nbytes // ALIGN) * ALIGN
    staged = np.cumsum(units.staging[unit])
    ends, needs = at + nbytes, weight * (at + nbytes) + staged
    whole = np.flatnonzero(~placed.glued[order])  # what a bucket may begin with
    last = np.append(whole[1:], len(order))[: len(whole)] - 1
    ends, needs, at_whole, fresh = ends[last], needs[last], at[whole], fresh[whole]
    before = (staged - units.staging[unit])[whole]
    room = options.max_tmp_bytes // options.min_tasks_in_flight
    starts: list[int] = []
    for head, stop in itertools.pairwise([*np.flatnonzero(fresh).tolist(), len(whole)]):
        first = head
        while first < stop:
            starts.append(first)
            if stop - first == 1:
                break
            spent = weight * at_whole[first] + before[first]
            full = np.searchsorted(ends[first:stop], at_whole[first] + options.bucket_bytes, side="right")
            tight = np.searchsorted(needs[first:stop], spent + room, side="right")
            first += max(1, min(int(full), int(tight)))
    opening = whole[starts] if starts else whole
    bucket = np.zeros(len(order), np.int64)
    bucket[opening[1:]] = 1
    bucket = np.cumsum(bucket)
    return bucket, at - at[opening][bucket]


def _take_turns(group: Ints, owner: Ints, opener: Ints) -> Ints:
    """Plan order of buckets: by group, then each owner's first bucket, each owner's second, and so on."""
    order = np.lexsort((opener, owner, group))
    same = np.ones(len(order), bool)
    same[:1] = False
    same[1:] = (owner[order[1:]] == owner[order[:-1]]) & (group[order[1:]] == group[order[:-1]])
    starts = np.flatnonzero(~same)
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    return np.lexsort((owner, turn, group))


def _shared_landing(nbytes: Ints, chain: Ints, owner: Ints, world: int) -> tuple[Ints, Ints]:
    offsets, totals = np.zeros_like(nbytes), np.zeros(world, np.int64)
    by_owner = np.argsort(owner, kind="stable")
    for rank, rows in enumerate(np.split(by_owner, np.searchsorted(owner[by_owner], np.arange(1, world)))):
        if len(rows):
            part_at, whole = _runs(nbytes[rows], chain[rows])
            offsets[rows], totals[rank] = lay_out(chain[rows], part_at, whole)
    return offsets, totals


def _runs(nbytes: Ints, chain: Ints) -> tuple[Ints, Ints]:
    """For each bucket its place in its chain, and the bytes of the whole chain."""
    order = np.argsort(chain, kind="stable")
    ends = np.cumsum(nbytes[order])
    alone = chain[order] < 0
    head = np.flatnonzero(alone | np.concatenate([[True], np.diff(chain[order]) != 0])[: len(order)])
    sizes = np.diff([*head, len(order)])
    begins = np.repeat(ends[head] - nbytes[order[head]], sizes)
    part_at, whole = np.empty_like(nbytes), np.empty_like(nbytes)
    part_at[order] = ends - nbytes[order] - begins
    whole[order] = np.repeat(np.add.reduceat(nbytes[order], head), sizes)
    return part_at, whole


def lay_out(chain: Ints, part_at: Ints, whole: Ints) -> tuple[Ints, int]:
    """Places in landing space, bucket after bucket; the parts of a split item where the first of them begins.

    Args:
        chain: the same number for buckets that are parts of one item, -1 for others.
        part_at: bytes from the beginning of the chain.
        whole: bytes of the whole chain; of the bucket where there is none.

    Returns:
        Offset of each bucket, and bytes of the whole space.
    """
    count = len(chain)
    _, first, inverse = np.unique(np.where(chain < 0, -1 - np.arange(count), chain), return_index=True, return_inverse=True)
    opening = np.zeros(count, bool)
    opening[first] = True
    reserved = np.where(opening, -(-whole // ALIGN) * ALIGN, 0)
    begin = np.cumsum(reserved) - reserved
    return begin[first[inverse.reshape(-1)]] + part_at, int(reserved.sum())
