"""Messages of `prepare`: who contributes what to which bucket, and what that costs each rank in temporary bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .columns import Ints
from .geometry import PACK_ALIGN
from .options import PlanOptions
from .packing import Segments, Tasks
from .patterns import Patterns
from .problems import Problems, listed
from .regions import Mask, expand
from .sides import Sides


class Contributions(NamedTuple):
    """Fragments of segments, by task, contributor and message; parallel columns.

    ``message`` is -1 for what the owner has itself; ``offset`` is bytes within the message.
    """

    segment: Ints
    hold: Ints
    rank: Ints
    message: Ints
    offset: Ints


class Messages(NamedTuple):
    """Messages in plan order. Message ``i`` carries the contributions ``first[i]:first[i] + rows[i]``; its tag is ``i``."""

    task: Ints
    rank: Ints
    nbytes: Ints
    direct: Mask
    first: Ints
    rows: Ints


class Shares(NamedTuple):
    """Ranks that take part in tasks, by task and rank: temporary bytes, and bytes copied out of mapped files."""

    task: Ints
    rank: Ints
    tmp_bytes: Ints
    file_bytes: Ints


class Gather(NamedTuple):
    contributions: Contributions
    messages: Messages
    shares: Shares


def gather(
    tasks: Tasks, segments: Segments, patterns: Patterns, contributor: Ints, sides: Sides, options: PlanOptions
) -> Gather:
    """Decide who sends what to the owners of buckets."""
    rows = _contributions(tasks, segments, patterns, contributor, sides)
    task = segments.task[rows.segment]
    away = rows.message >= 0
    direct = patterns.holds.direct[rows.hold] & away
    nbytes = patterns.fragments.nbytes[patterns.holds.fragment[rows.hold]]
    share = task * sides.world + rows.rank
    new = away & (direct | np.concatenate([[True], (np.diff(share) != 0) | np.diff(direct)])[: len(task)])
    message = np.where(away, np.cumsum(new) - 1, -1)
    first = np.flatnonzero(new)
    offset = _places(nbytes, message, first)
    messages = _messages(task, rows.rank, message, first, offset + nbytes, direct)
    rows = rows._replace(message=message, offset=offset)
    return Gather(rows, messages, _shares(share, patterns.holds.file_nbytes[rows.hold], messages, tasks, sides.world, options))


def _contributions(tasks: Tasks, segments: Segments, patterns: Patterns, contributor: Ints, sides: Sides) -> Contributions:
    """All fragments of all segments with their contributors, in order. ``message`` only tells local (-1) from away (0)."""
    fragments = patterns.fragment_first
    counts = fragments[segments.unit + 1] - fragments[segments.unit]
    segment, fragment = expand(counts)
    fragment += fragments[segments.unit][segment]
    owner = tasks.owner[segments.task][segment]
    rank = contributor[patterns.fragments.holders[fragment], owner]
    width = len(sides.sources)
    key = patterns.holds.fragment * width + patterns.holds.layout
    hold = np.searchsorted(key, fragment * width + sides.layout_of_rank[rank])
    packed = ~patterns.holds.direct[hold]
    order = np.argsort((segments.task[segment] * sides.world + rank) * 2 + packed, kind="stable")
    message = np.where(rank == owner, -1, 0)[order]
    return Contributions(segment[order], hold[order], rank[order], message, np.zeros_like(message))


def _places(nbytes: Ints, message: Ints, first: Ints) -> Ints:
    """Offset of each contribution in its message; contributions lie one after the other, aligned."""
    room = -(-nbytes // PACK_ALIGN) * PACK_ALIGN
    before = np.cumsum(room) - room
    return np.where(message < 0, 0, before - before[first][message]) if len(first) else np.zeros_like(nbytes)


def _messages(task: Ints, rank: Ints, message: Ints, first: Ints, end: Ints, direct: Mask) -> Messages:
    rows = np.bincount(message[message >= 0], minlength=len(first))
    return Messages(task[first], rank[first], end[first + rows - 1], direct[first], first, rows)


def _shares(share: Ints, copied: Ints, messages: Messages, tasks: Tasks, world: int, options: PlanOptions) -> Shares:
    """Temporary bytes: an owner has the bucket and the packed messages that come in, a contributor those that go out, and
    both what they copy out of files. An owner has a share even if it holds nothing."""
    owning = np.arange(len(tasks.owner)) * world + tasks.owner
    keys = np.unique(np.concatenate([share, owning]))
    packed = np.where(messages.direct, 0, messages.nbytes)
    bucket = 0 * tasks.nbytes if options.in_landing else tasks.nbytes
    file_bytes = np.bincount(np.searchsorted(keys, share), copied, len(keys)).astype(np.int64)
    costs = (owning, bucket), (owning[messages.task], packed), (messages.task * world + messages.rank, packed)
    tmp = file_bytes + sum(np.bincount(np.searchsorted(keys, key), cost, len(keys)).astype(np.int64) for key, cost in costs)
    return Shares(keys // world, keys % world, tmp, file_bytes)


def check_watermark(shares: Shares, segments: Segments, names: Sequence[str], options: PlanOptions, problems: Problems) -> None:
    """Report tasks that need more temporary bytes on some rank than the watermark allows."""
    for i in np.flatnonzero(shares.tmp_bytes > options.max_tmp_bytes).tolist():
        inside = segments.tensor[
            np.searchsorted(segments.task, shares.task[i]) : np.searchsorted(segments.task, shares.task[i] + 1)
        ]
        named = listed(names[t] for t in np.unique(inside))
        problems.add(
            f"{named}: the smallest part takes {shares.tmp_bytes[i]} temporary bytes on source rank {shares.rank[i]}, above "
            f"the watermark max_tmp_bytes of {options.max_tmp_bytes}: raise max_tmp_bytes, or lower leaf_bytes "
            f"({options.leaf_bytes}), below which nothing is split"
        )
