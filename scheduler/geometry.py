"""The box algebra of a plan, done once for each pattern of tensors (see `syncline.scheduler.patterns`).

A model of 70,000 tensors has about a hundred patterns, so the algebra may be general; only what differs between tensors
of a pattern (name, memory, owner) is done for each tensor, on columns.

The source's boxes of a tensor are cut into *cells*, disjoint boxes each of which some set of ranks holds. A needed box is
covered if its intersections with the cells have its volume: that is the proof that every element is sent exactly once.
"""

from __future__ import annotations

import numpy as np

from .columns import Ints, ints, pad_axes
from .companions import SCALE_NBYTES, group_rows, scale_tables
from .cutting import cut_boxes
from .leaves import leaf_grid, split
from .naming import Canonical
from .options import PlanOptions
from .patterns import PACK_ALIGN, Fragments, Holds, Interner, Items, Patterns, Units, Wants, first_of, groups, stacked
from .problems import Problems, listed
from .quantizing import CODES_TYPE, Quantized, misfit
from .regions import Cells, Mask, Pairs, expand, join, partition, row_steps, subtract, volumes
from .rows import SIZES, Held, Rows
from .sides import Holder, Sides
from .views import contiguous

DIRECT_NBYTES = 64 * 1024
"""From this size on a contiguous fragment travels without being packed."""
_SIZES = np.array(SIZES)


def survey(
    sides: Sides, canonical: Canonical, held: Rows, wanted: Rows, *, options: PlanOptions, problems: Problems
) -> Patterns:
    """Do the box algebra of all patterns. Reports elements that no source rank holds."""
    surveyor = _Surveyor(sides, options, held.depth, landed=_landed(sides, wanted))
    pattern_of = np.full(len(canonical.names), -1)
    pattern = Interner[tuple[bytes, ...]]()
    gaps: list[str | None] = []
    lacking: dict[str, list[str]] = {}
    derived = frozenset(canonical.scales.values())
    for t in np.unique(wanted.tensor).tolist():
        if t in derived:
            continue
        quantized, facts = _quantized(canonical, wanted, t)
        key = (canonical.shape[t].tobytes(), held.key(t), wanted.key(t), *facts)
        p = pattern(key)
        if p == len(gaps):
            gap = surveyor.add(held.of(t), wanted.of(t), int(canonical.ndim[t]), quantized)
            gaps.append(gap)
            if quantized is not None:
                pattern((*key, b"scales"))
                gaps.append(gap)
        gap = gaps[p]
        if gap is None:
            pattern_of[t] = p
            if quantized is not None:
                pattern_of[canonical.scales[t]] = p + 1
        else:
            lacking.setdefault(gap, []).append(canonical.names[t])
    for gap, names in lacking.items():
        problems.add(f"{listed(names)}: {gap}")
    return surveyor.patterns(pattern_of)


def _quantized(canonical: Canonical, wanted: Rows, t: int) -> tuple[Quantized | None, tuple[bytes, ...]]:
    """How tensor ``t`` is quantized, and what of that tells patterns apart; nothing if it is not."""
    how = canonical.formats.get(t)
    if how is None:
        return None, ()
    scales = canonical.scales[t]
    shape = pad_axes(canonical.shape, wanted.depth, 1)[t]
    return Quantized.of(how, shape, wanted.of(scales)), (how.name.encode(), wanted.key(scales))


class _Surveyor:
    """Collects the tables, pattern by pattern."""

    def __init__(self, sides: Sides, options: PlanOptions, depth: int, *, landed: int) -> None:
        self._sources, self._receiving, self._world = sides.sources, sides.receiving, sides.world
        self._options, self._depth = options, depth
        # Where parts may have owners of their own, none is larger than a quarter of what a rank has to send: else one
        # large tensor keeps one rank busy when all others are done.
        shared_out = self._world > 1 and options.landing != "mapped"
        self._fair = max(1, landed // (4 * self._world)) if shared_out else max(1, landed)
        self._items: list[Items] = []
        self._units: list[Units] = []
        self._fragments: list[Fragments] = []
        self._holds: list[Holds] = []
        self._wants: list[Wants] = []
        self._unit_first = [0]
        self._item_count = self._fragment_count = 0
        self._audience = Interner[tuple[int, ...]]()
        self._holder_set = Interner[tuple[int, ...]]()
        self._format = Interner[str]()
        self._format("")

    def add(self, held: Held, wanted: Held, ndim: int, quantized: Quantized | None) -> str | None:
        """One more pattern, and another one of its scales if it is quantized.

        Returns in words what of it no source rank holds, or why its scales don't fit; then nothing of it is added.
        """
        cells = partition(held.lo, held.hi)
        met = join(wanted.lo, wanted.hi, cells.lo, cells.hi)
        gap = self._gap(wanted, cells, met, ndim)
        if gap is None and quantized is not None:
            gap = misfit(wanted, quantized, lambda layout: self._receiving[layout].where)
        if gap is None:
            self._append(held, wanted, cells, met, ndim=ndim, quantized=quantized)
        else:
            self._unit_first += [self._unit_first[-1]] * (1 if quantized is None else 2)
        return gap

    def patterns(self, pattern_of: Ints) -> Patterns:
        depth = self._depth
        return Patterns(
            pattern_of=pattern_of,
            unit_first=ints(self._unit_first),
            items=stacked(Items, self._items, depth),
            units=stacked(Units, self._units, depth),
            fragments=stacked(Fragments, self._fragments, depth),
            holds=stacked(Holds, self._holds, depth),
            wants=stacked(Wants, self._wants, depth),
            audiences=tuple(_ranks(self._receiving, key) for key in self._audience.keys),
            holder_sets=tuple(_ranks(self._sources, key) for key in self._holder_set.keys),
            formats=tuple(self._format.keys),
        )

    def _gap(self, wanted: Held, cells: Cells, met: Pairs, ndim: int) -> str | None:
        have = np.bincount(met.a, volumes(met.lo, met.hi), len(wanted.lo)).astype(np.int64)
        short = np.flatnonzero(have != volumes(wanted.lo, wanted.hi))[:1]
        if not len(short):
            return None
        where = self._receiving[wanted.layout[short[0]]].where
        hole = subtract(wanted.lo[short], wanted.hi[short], cells.lo, cells.hi) if len(cells.lo) else None
        if hole is None:
            return f"no source rank holds any element of it; {where} expects it"
        start, shape = tuple(hole[0][:ndim].tolist()), tuple((hole[1] - hole[0])[:ndim].tolist())
        return f"no source rank holds the box start {start} shape {shape}, which {where} expects"

    def _append(self, held: Held, wanted: Held, cells: Cells, met: Pairs, *, ndim: int, quantized: Quantized | None) -> None:
        """Tables of one pattern, numbered through all patterns."""
        cell_layouts = groups(cells.cell, held.layout[cells.box], len(cells.lo))
        cell_set = ints([self._holder_set(key) for key in cell_layouts])
        everywhere = np.array([sum(len(self._sources[i].ranks) for i in key) == self._world for key in cell_layouts])
        items, wants = self._make_items(wanted, met, cell_set, quantized)
        if quantized is not None:
            codes = items.dtype == CODES_TYPE
            items = items._replace(
                format=np.where(codes, self._format(quantized.format.name), 0),
                moved=np.where(codes, held.dtype[0], items.dtype),
            )
        units = self._make_units(items, held, 0 if everywhere.all() else len(cells.lo), ndim, quantized)
        fragments, cell = _make_fragments(items, units, cells, cell_set)
        holds = _make_holds(held, cells, fragments, cell=cell, units=units, wire=items.dtype[units.item[fragments.unit]])
        gathered = ~everywhere[cell] & ~items.held[units.item[fragments.unit]]
        units = units._replace(staging=_staging(fragments, holds, gathered, len(units.item)))
        self._add(items, wants, units, fragments, holds)
        if quantized is not None:
            none = stacked(Fragments, [], self._depth), stacked(Holds, [], self._depth)
            leaf_bytes = self._options.leaf_bytes
            self._add(*scale_tables(items, wants, units, wanted=wanted, quantized=quantized, leaf_bytes=leaf_bytes), *none)

    def _add(self, items: Items, wants: Wants, units: Units, fragments: Fragments, holds: Holds) -> None:
        self._items.append(items)
        self._wants.append(wants._replace(item=wants.item + self._item_count))
        self._units.append(units._replace(item=units.item + self._item_count))
        self._fragments.append(fragments._replace(unit=fragments.unit + self._unit_first[-1]))
        self._holds.append(holds._replace(fragment=holds.fragment + self._fragment_count))
        self._item_count += len(items.nbytes)
        self._fragment_count += len(fragments.nbytes)
        self._unit_first.append(self._unit_first[-1] + len(units.item))

    def _make_items(self, wanted: Held, met: Pairs, cell_set: Ints, quantized: Quantized | None) -> tuple[Items, Wants]:
        """Distinct (box, wire type) of what target layouts want: whole, or cut at the source's shards."""
        nbytes = volumes(wanted.lo, wanted.hi) * _SIZES[wanted.dtype]
        cut = cut_boxes(
            wanted.lo, wanted.hi, nbytes, uncut=wanted.mark, met=met, cell_set=cell_set, options=self._options,
            quantized=quantized, codes=wanted.dtype == CODES_TYPE,
        )  # fmt: skip
        row, size = cut.row, cut.hi - cut.lo
        keys = np.hstack([cut.lo, size, wanted.dtype[row][:, None], cut.held[:, None]])
        distinct, first, item = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        item = item.reshape(-1)
        order = np.lexsort((row, wanted.layout[row], item))
        wants = Wants(item[order], wanted.layout[row[order]], row[order])
        shape, dtype = distinct[:, self._depth : -2], distinct[:, -2]
        nbytes = np.prod(shape, axis=1, dtype=np.int64) * _SIZES[dtype]
        audience = ints([self._audience(key) for key in groups(wants.item, wants.layout, len(distinct))])
        start, local, why = distinct[:, : self._depth], distinct[:, -1].astype(bool), cut.why[first]
        return Items(start, shape, dtype, nbytes, audience, local, why, np.zeros_like(dtype), dtype), wants

    def _make_units(self, items: Items, held: Held, gathered: int, ndim: int, quantized: Quantized | None) -> Units:
        """Items, or their parts where an item is larger than a bucket may be."""
        numbers: list[tuple[int, ...]] = []
        boxes: list[tuple[int, ...]] = []
        pads = (0,) * (self._depth - ndim), (1,) * (self._depth - ndim)
        rows = zip(items.shape.tolist(), items.dtype.tolist(), items.audience.tolist(), items.held.tolist(),
                   items.format.tolist(), strict=True)  # fmt: skip
        for i, (shape, dtype, audience, local, format_) in enumerate(rows):
            how = quantized if format_ else None
            grid = leaf_grid(tuple(shape[:ndim]), SIZES[dtype], self._options.leaf_bytes, rows=group_rows(how))
            limit = self._limit(held, SIZES[dtype], grid.nbytes, 0 if local else gathered, how)
            receivers = sum(len(self._receiving[layout].ranks) for layout in self._audience.keys[audience])
            whole = how is not None and self._options.landing == "mapped"  # with its scales beside it, it must be one segment
            parts = split(grid, grid.nbytes if whole else min(limit, self._fair // receivers))
            for p in parts:
                numbers.append((i, p.nbytes, p.offset, p.first, p.blocks, p.block_nbytes, grid.leaf_nbytes, len(parts), 0))
                boxes.append((*p.box.start, *pads[0], *p.box.shape, *pads[1]))
        item, nbytes, *rest = ints(np.array(numbers)).T
        box = ints(np.array(boxes)).reshape(len(boxes), 2 * self._depth)
        return Units(item, items.start[item] + box[:, : self._depth], box[:, self._depth :], nbytes, *rest)

    def _limit(self, held: Held, itemsize: int, nbytes: int, gathered: int, quantized: Quantized | None) -> int:
        """Bytes of a part so that as many tasks as asked for fit the watermark.

        Each byte may cost a rank one in the bucket, one in packed messages, and what a mapped file's copy takes. Of what is
        quantized, scales lie in the bucket too, and messages bring the source's own type.
        """
        options = self._options
        copied = int(_SIZES[held.dtype[held.mark]].max(initial=0))
        moved = 1 if quantized is None else int(_SIZES[held.dtype[0]]) / itemsize
        cost = (not options.in_landing) * _with_scales(quantized) + (gathered > 0) * moved + copied / itemsize
        if cost == 0:
            return options.bucket_bytes
        room = options.max_tmp_bytes // options.min_tasks_in_flight
        padding = PACK_ALIGN * (1 + int(gathered * min(1.0, room / cost / nbytes)))
        return min(options.bucket_bytes, int(min(room, options.max_tmp_bytes - padding) / cost))


def _with_scales(quantized: Quantized | None) -> float:
    """Bytes in the bucket of each byte of codes."""
    return 1.0 if quantized is None else 1 + SCALE_NBYTES / int(quantized.group[:2].prod())


def _landed(sides: Sides, wanted: Rows) -> int:
    """Bytes that all receivers together get."""
    receivers = np.array([len(holder.ranks) for holder in sides.receiving], np.int64)
    return int((wanted.volume * _SIZES[wanted.dtype] * receivers[wanted.layout]).sum())


def _ranks(holders: tuple[Holder, ...], layouts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(rank for i in layouts for rank in holders[i].ranks))


def _make_fragments(items: Items, units: Units, cells: Cells, cell_set: Ints) -> tuple[Fragments, Ints]:
    """Fragments of the units, and the cell of each."""
    met = join(units.start, units.start + units.shape, cells.lo, cells.hi)
    nbytes = volumes(met.lo, met.hi) * _SIZES[items.moved[units.item[met.a]]]
    return Fragments(met.a, met.lo, met.hi - met.lo, nbytes, cell_set[met.b]), met.b


def _make_holds(held: Held, cells: Cells, fragments: Fragments, *, cell: Ints, units: Units, wire: Ints) -> Holds:
    """Layouts that hold each fragment's cell; ``wire`` is the wire type of each fragment."""
    first = first_of(cells.cell, len(cells.lo))
    fragment, place = expand((first[1:] - first[:-1])[cell])
    row = cells.box[first[cell[fragment]] + place]
    once = np.ones(len(row), bool)  # rows are sorted by layout; of several pieces of one layout the first serves
    once[1:] = (held.layout[row[1:]] != held.layout[row[:-1]]) | (fragment[1:] != fragment[:-1])
    fragment, row = fragment[once], row[once]
    shape, unit = fragments.shape[fragment], fragments.unit[fragment]
    direct = contiguous(shape, held.strides[row]) & contiguous(shape, row_steps(units.shape[unit]))
    direct &= (held.dtype[row] == wire[fragment]) & (fragments.nbytes[fragment] >= DIRECT_NBYTES)
    direct &= ~held.mark[row]
    copied = np.prod(shape, axis=1, dtype=np.int64) * _SIZES[held.dtype[row]] * held.mark[row]
    return Holds(fragment, held.layout[row], row, direct, copied)


def _staging(fragments: Fragments, holds: Holds, gathered: Mask, units: int) -> Ints:
    """What each unit may cost a rank beyond its place in the bucket: packed messages, and copies out of mapped files."""
    count = len(fragments.unit)
    packed = gathered & (np.bincount(holds.fragment, ~holds.direct, count) > 0)
    copied = np.zeros(count, np.int64)
    np.maximum.at(copied, holds.fragment, holds.file_nbytes)
    cost = np.where(packed, fragments.nbytes + PACK_ALIGN, 0) + copied
    return np.bincount(fragments.unit, cost, units).astype(np.int64)
