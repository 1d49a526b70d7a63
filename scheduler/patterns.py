"""The tables that the box algebra of `syncline.scheduler.geometry` makes: what a plan is, before anyone owns anything.

A *pattern* is a set of tensors of which all the same facts hold: shape, which layouts hold which boxes in which type and
strides, which target layouts want which boxes. For each pattern there are

- *items*: distinct (needed box, wire type), each with its audience;
- *units*: items, or parts of oversize items: what lies in a bucket as one segment;
- *fragments*: the part of a unit that one source rank contributes;
- *holds*: for each fragment, the layouts that have it, and in which of their pieces;
- *wants*: for each item, the target layouts that take it, and into which of their pieces.

Tables are numbered through all patterns. Boxes are start and shape in the canonical tensor, (rows, depth).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .columns import Ints
from .regions import Mask

PACK_ALIGN = 16
"""Alignment in bytes of fragments within a packed message; at least the largest element."""

Key = TypeVar("Key", bound=Hashable)


class Items(NamedTuple):
    """``audience`` is an index into `Patterns.audiences`; ``held`` tells items that only a rank that holds them may own.

    ``why`` is an index into `syncline.scheduler.cutting.WHY`: why the item is put together from several ranks' pieces, if it
    is. ``format`` is an index into `Patterns.formats`, 0 where the item is no more than cast; ``moved`` is the element type in
    which source ranks send each other parts of it: the wire's, or their own of what is quantized.
    """

    start: Ints
    shape: Ints
    dtype: Ints
    nbytes: Ints
    audience: Ints
    held: Mask
    why: Ints
    format: Ints
    moved: Ints


class Units(NamedTuple):
    """``offset`` is bytes within the item, ``parts`` the units of the item; leaves as in `programs.Leaves`.

    ``staging`` is what the unit may cost some rank in temporary bytes beyond its place in the bucket.
    """

    item: Ints
    start: Ints
    shape: Ints
    nbytes: Ints
    offset: Ints
    first_leaf: Ints
    blocks: Ints
    block_nbytes: Ints
    leaf_nbytes: Ints
    parts: Ints
    staging: Ints


class Fragments(NamedTuple):
    """``nbytes`` in the type in which it moves; ``holders`` is an index into `Patterns.holder_sets`. Sorted by unit."""

    unit: Ints
    start: Ints
    shape: Ints
    nbytes: Ints
    holders: Ints


class Holds(NamedTuple):
    """Sorted by fragment, then layout. ``row`` counts the source rows of the tensor; ``direct`` needs no packing."""

    fragment: Ints
    layout: Ints
    row: Ints
    direct: Mask
    file_nbytes: Ints


class Wants(NamedTuple):
    """Sorted by item, then target layout. ``row`` counts the target rows of the tensor."""

    item: Ints
    layout: Ints
    row: Ints


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """All patterns of a plan.

    Attributes:
        pattern_of: pattern of each canonical tensor, or -1 if nothing of it is sent.
        unit_first: units ``unit_first[p]:unit_first[p + 1]`` are of pattern ``p``; the other ``…_first`` likewise.
        audiences: positions of receivers, by audience.
        holder_sets: source ranks, by set.
        formats: names of wire formats; the first stands for none. The scales of a quantized item's units are the units of
            the pattern after its own, in the same order.
    """

    pattern_of: Ints
    unit_first: Ints
    items: Items
    units: Units
    fragments: Fragments
    holds: Holds
    wants: Wants
    audiences: tuple[tuple[int, ...], ...]
    holder_sets: tuple[tuple[int, ...], ...]
    formats: tuple[str, ...] = ("",)

    @property
    def quantized(self) -> Mask:
        """Which units are quantized."""
        return np.asarray(self.items.format[self.units.item] > 0)

    @property
    def fragment_first(self) -> Ints:
        """Range of fragments of each unit."""
        return first_of(self.fragments.unit, len(self.units.item))


class Interner(Generic[Key]):
    """Numbers for keys, in order of first use."""

    def __init__(self) -> None:
        self._number: dict[Key, int] = {}
        self.keys: list[Key] = []

    def __call__(self, key: Key) -> int:
        number = self._number.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number


def first_of(parent: Ints, parents: int) -> Ints:
    """Where the children of each parent begin in a column sorted by parent; one more entry than parents."""
    return np.searchsorted(parent, np.arange(parents + 1))


def groups(parent: Ints, values: Ints, parents: int) -> list[tuple[int, ...]]:
    """The distinct values of each parent's children, in order. ``parent`` is sorted."""
    first = first_of(parent, parents).tolist()
    rows = values.tolist()
    return [tuple(dict.fromkeys(rows[a:b])) for a, b in itertools.pairwise(first)]


_MASKS = frozenset({"held", "direct"})
AnyTable = TypeVar("AnyTable", Items, Units, Fragments, Holds, Wants)


def stacked(kind: type[AnyTable], tables: Sequence[AnyTable], depth: int) -> AnyTable:
    """Tables one below the other."""
    if tables:
        return kind(*(np.concatenate(column) for column in zip(*tables, strict=True)))
    none: dict[str, Any] = {"start": np.zeros((0, depth), np.int64), "shape": np.zeros((0, depth), np.int64)}
    return kind(**{name: none.get(name, np.zeros(0, bool if name in _MASKS else np.int64)) for name in kind._fields})
