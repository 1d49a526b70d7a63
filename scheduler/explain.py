"""One tensor of a plan: who holds it, who needs what of it, and how each part travels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .boxes import Box
from .columns import Ints
from .cutting import WHY, Why
from .materialize import Routes
from .programs import ReceiverId
from .rows import DTYPES


@dataclass(frozen=True, kw_only=True)
class Share:
    """A box that one source rank contributes to a part; ``message`` is its tag, or -1 if the rank is the owner itself."""

    rank: int
    box: Box
    message: int


@dataclass(frozen=True, kw_only=True)
class PartRoute:
    """A part of the tensor in a task: the box that ``owner`` sends to ``receivers``, and where it has it from.

    ``why`` says why it is gathered; None if the owner holds all of it.
    """

    task: int
    owner: int
    box: Box
    dtype: str
    nbytes: int
    receivers: tuple[ReceiverId, ...]
    shares: tuple[Share, ...]
    why: Why | None


@dataclass(frozen=True, kw_only=True)
class Held:
    """A box and the ranks that hold it, or (``receivers``) that keep it."""

    box: Box
    ranks: tuple[int, ...] = ()
    receivers: tuple[ReceiverId, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that a plan says about one tensor."""

    name: str
    shape: tuple[int, ...]
    held: tuple[Held, ...]
    wanted: tuple[Held, ...]
    parts: tuple[PartRoute, ...]


def explain(routes: Routes, name: str) -> Explanation:
    """What the plan does with tensor ``name``. Raises `KeyError` for a name that it does not move."""
    tensor = routes.names.index(name) if name in routes.names else -1
    rows = np.flatnonzero(routes.segments.tensor == tensor)
    if not len(rows):
        raise KeyError(name)
    return Explanation(
        name=name,
        shape=tuple(routes.shape[tensor, : routes.ndim[tensor]].tolist()),
        held=_held(routes, tensor),
        wanted=_wanted(routes, tensor),
        parts=tuple(_part(routes, row) for row in rows.tolist()),
    )


def _held(routes: Routes, tensor: int) -> tuple[Held, ...]:
    sides, places = routes.sides, routes.held
    found: dict[Box, list[int]] = {}
    pieces = places.piece[places.first[tensor] : places.first[tensor + 1]].tolist()
    layouts = places.layout[places.first[tensor] : places.first[tensor + 1]].tolist()
    for layout, piece in zip(layouts, pieces, strict=True):
        found.setdefault(sides.sources[layout].layout.pieces.box(piece), []).extend(sides.sources[layout].ranks)
    return tuple(Held(box=box, ranks=tuple(sorted(set(ranks)))) for box, ranks in _in_order(found))


def _wanted(routes: Routes, tensor: int) -> tuple[Held, ...]:
    sides, places = routes.sides, routes.wanted
    found: dict[Box, list[int]] = {}
    span = slice(places.first[tensor], places.first[tensor + 1])
    for layout, piece in zip(places.layout[span].tolist(), places.piece[span].tolist(), strict=True):
        found.setdefault(sides.receiving[layout].layout.pieces.box(piece), []).extend(sides.receiving[layout].ranks)
    return tuple(
        Held(box=box, receivers=tuple(sides.receivers[r] for r in sorted(set(ranks)))) for box, ranks in _in_order(found)
    )


def _in_order(found: dict[Box, list[int]]) -> list[tuple[Box, list[int]]]:
    return sorted(found.items(), key=lambda row: (row[0].start, row[0].shape))


def _part(routes: Routes, row: int) -> PartRoute:
    segments, patterns, gather = routes.segments, routes.patterns, routes.gather.contributions
    unit, task = int(segments.unit[row]), int(segments.task[row])
    item, n = int(patterns.units.item[unit]), int(routes.ndim[segments.tensor[row]])
    shares = []
    for i in np.flatnonzero(gather.segment == row).tolist():
        f = patterns.holds.fragment[gather.hold[i]]
        box = _box(patterns.fragments.start[f], patterns.fragments.shape[f], n)
        shares.append(Share(rank=int(gather.rank[i]), box=box, message=int(gather.message[i])))
    return PartRoute(
        task=task,
        owner=int(routes.tasks.owner[task]),
        box=_box(patterns.units.start[unit], patterns.units.shape[unit], n),
        dtype=DTYPES[patterns.items.dtype[item]],
        nbytes=int(patterns.units.nbytes[unit]),
        receivers=tuple(routes.sides.receivers[r] for r in patterns.audiences[routes.tasks.audience[task]]),
        shares=tuple(shares),
        why=WHY[patterns.items.why[item]] if any(share.message >= 0 for share in shares) else None,
    )


def _box(start: Ints, shape: Ints, ndim: int) -> Box:
    return Box(start=tuple(start[:ndim].tolist()), shape=tuple(shape[:ndim].tolist()))
