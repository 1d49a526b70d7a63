"""Messages of `prepare`: who contributes what to which bucket, and what that costs each rank in temporary bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .columns import Ints
from .options import PlanOptions
from .packing import Segments, Tasks
from .patterns import PACK_ALIGN, Patterns
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
    """Who contributes what, in which messages, and what that costs whom."""

    contributions: Contributions
    messages: Messages
    shares: Shares


def gather(
    tasks: Tasks, segments: Segments, patterns: Patterns, *, contributor: Ints, sides: Sides, options: PlanOptions
) -> Gather:
    """Decide who sends what to the owners of buckets.

    An owner has in temporary memory the bucket and the packed messages that come in, a contributor those that go out, and
    both what they copy out of files. An owner has a share even if it holds nothing.

    Args:
        contributor: (holder sets, owners): who contributes a fragment; see `syncline.scheduler.balance.contributors`.
    """
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
    rows = rows._replace(message=message, offset=offset)
    count = np.bincount(message[away], minlength=len(first))
    messages = Messages(task[first], rows.rank[first], (offset + nbytes)[first + count - 1], direct[first], first, count)
    owning = np.arange(len(tasks.owner)) * sides.world + tasks.owner
    bucket = np.where(options.in_landing, 0, tasks.nbytes)
    copied = patterns.holds.file_nbytes[rows.hold]
    sending = messages.task * sides.world + messages.rank
    packed = np.where(messages.direct, 0, messages.nbytes)
    keys, file_bytes = _totals((share, copied), (owning, 0 * bucket))
    keys, tmp_bytes = _totals((share, copied), (owning, bucket), (owning[messages.task], packed), (sending, packed))
    return Gather(rows, messages, Shares(keys // sides.world, keys % sides.world, tmp_bytes, file_bytes))


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


def _totals(*costs: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """All distinct keys of (key, cost) columns in order, and the sum of the costs of each."""
    keys = np.sort(np.concatenate([key for key, _ in costs]), kind="stable")
    keys = keys[np.diff(keys, prepend=-1) > 0]
    total = np.zeros(len(keys), np.int64)
    for key, cost in costs:
        total += np.bincount(np.searchsorted(keys, key), cost, len(keys)).astype(np.int64)
    return keys, total


def check_watermark(shares: Shares, segments: Segments, names: Sequence[str], options: PlanOptions, problems: Problems) -> None:
    """Report tasks that need more temporary bytes on some rank than the watermark allows."""
    worst: dict[str, tuple[int, int]] = {}
    for i in np.flatnonzero(shares.tmp_bytes > options.max_tmp_bytes).tolist():
        first, stop = np.searchsorted(segments.task, [shares.task[i], shares.task[i] + 1])
        named = listed(names[t] for t in np.unique(segments.tensor[first:stop]))
        worst[named] = max(worst.get(named, (0, 0)), (int(shares.tmp_bytes[i]), int(shares.rank[i])))
    for named, (need, rank) in worst.items():
        problems.add(
            f"{named}: the smallest part takes {need} temporary bytes on source rank {rank}, above the watermark max_tmp_bytes "
            f"of {options.max_tmp_bytes}: raise max_tmp_bytes (nothing is split below leaf_bytes, {options.leaf_bytes}, nor "
            "inside a quantization group)"
        )
