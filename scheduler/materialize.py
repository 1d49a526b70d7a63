"""Programs of single ranks, drawn from the columns of a plan when they are asked for."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from .boxes import Box, Index
from .columns import Ints
from .gathering import Gather
from .packing import Segments, Tasks, lay_out
from .patterns import Patterns
from .programs import (
    Copy,
    Landing,
    Leaves,
    Message,
    Quantization,
    ReceiverId,
    Region,
    Segment,
    SourceProgram,
    SourceTask,
    TargetProgram,
    TargetTask,
)
from .regions import expand, row_steps
from .relays import Relays
from .rows import DTYPES, SIZES, Places
from .sides import Sides

WIRE = -1
"""``Region.buffer`` of buckets and messages."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Everything that was planned, as columns."""

    sides: Sides
    names: tuple[str, ...]
    ndim: Ints
    shape: Ints
    held: Places
    wanted: Places
    patterns: Patterns
    tasks: Tasks
    segments: Segments
    gather: Gather
    landing_nbytes: Ints
    skipped: tuple[tuple[str, ...], ...]
    relaying: frozenset[int] = frozenset()
    """Targets whose ranks pass buckets on."""

    @cached_property
    def relays(self) -> Relays:
        """Who passes which bucket on to whom."""
        return Relays(self.sides, self.patterns.audiences, self.tasks, self.relaying)


def source_program(routes: Routes, rank: int, digest: str) -> SourceProgram:
    """What source rank ``rank`` does."""
    return _SourceDraft(routes, rank).program(digest)


def target_program(routes: Routes, receiver: int, digest: str, digest_kind: str) -> TargetProgram:
    """What the receiver at position ``receiver`` takes."""
    return _TargetDraft(routes, receiver).program(digest, digest_kind)


class _Draft:
    """What both kinds of programs need to say of segments."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self._numbers: dict[tuple[int, int], int] = {}

    def segments(self, rows: Ints) -> Iterator[Segment]:
        """Segments of the plan, by their rows. Items are numbered in order of first use."""
        routes, units, items = self.routes, self.routes.patterns.units, self.routes.patterns.items
        tensor, unit = routes.segments.tensor[rows], routes.segments.unit[rows]
        item = units.item[unit]
        keys = zip(*_lists(tensor, item, routes.ndim[tensor], items.dtype[item], routes.segments.offset[rows]), strict=True)
        boxes = zip(*_lists(items.start[item], items.shape[item], units.start[unit], units.shape[unit]), strict=True)
        leaves = zip(
            *_lists(units.nbytes[unit], units.first_leaf[unit], units.blocks[unit], units.block_nbytes[unit],
                    units.leaf_nbytes[unit]), strict=True,
        )  # fmt: skip
        for (t, i, n, code, offset), (a, b, c, d), (nbytes, *counts) in zip(keys, boxes, leaves, strict=True):
            name, dtype = routes.names[t], DTYPES[code]
            whole, box = Box(start=tuple(a[:n]), shape=tuple(b[:n])), Box(start=tuple(c[:n]), shape=tuple(d[:n]))
            first, blocks, block_nbytes, leaf_nbytes = counts
            yield Segment(
                item=self._numbers.setdefault((t, i), len(self._numbers)),
                name=name,
                box=box,
                dtype=dtype,
                offset=offset,
                nbytes=nbytes,
                leaves=Leaves(
                    item_uid=item_uid(name, dtype, whole),
                    first=first,
                    blocks=blocks,
                    block_nbytes=block_nbytes,
                    leaf_nbytes=leaf_nbytes,
                ),
            )


def _lists(*columns: Ints) -> list[list[Any]]:
    """Columns as lists: a number of numpy's costs ten times as much to take out one by one."""
    return [column.tolist() for column in columns]


def item_uid(name: str, dtype: str, box: Box) -> int:
    """Names an item in its digest: 64 bits of ``name|dtype|start|shape``, the indexes joined by commas."""
    start, shape = (",".join(map(str, index)) for index in (box.start, box.shape))
    return xxhash.xxh3_64_intdigest(f"{name}|{dtype}|{start}|{shape}".encode())


class _SourceDraft(_Draft):
    """Tasks of one source rank. All columns here are cut to the contributions that it sends, keeps or receives."""

    def __init__(self, routes: Routes, rank: int) -> None:
        super().__init__(routes)
        self._rank = rank
        tasks, rows = routes.tasks, routes.gather.contributions
        task = routes.segments.task[rows.segment]
        owned = tasks.owner == rank
        pick = np.flatnonzero(owned[task] | (rows.rank == rank))
        self._task = task[pick]
        self._segment_row = rows.segment[pick]
        self._hold, self._sender = rows.hold[pick], rows.rank[pick]
        self._message, self._offset = rows.message[pick], rows.offset[pick]
        shares = routes.gather.shares
        part = np.flatnonzero(shares.rank == rank)
        self._mine = shares.task[part]
        self._tmp_bytes, self._file_bytes = shares.tmp_bytes[part].tolist(), shares.file_bytes[part].tolist()
        self._wire_views()
        self._local_views()

    def _wire_views(self) -> None:
        """Where each contribution lies in bucket and message, in elements of the wire type."""
        segments, patterns = self.routes.segments, self.routes.patterns
        unit = segments.unit[self._segment_row]
        fragment = patterns.holds.fragment[self._hold]
        self._dtype = patterns.items.dtype[patterns.units.item[unit]]
        self._moved = patterns.items.moved[patterns.units.item[unit]]
        size = np.array(SIZES)[self._dtype]
        start, self._shape = patterns.fragments.start[fragment], patterns.fragments.shape[fragment]
        self._bucket_strides = row_steps(patterns.units.shape[unit])
        within = ((start - patterns.units.start[unit]) * self._bucket_strides).sum(axis=1)
        self._bucket_offset = segments.offset[self._segment_row] // size + within
        self._message_offset = self._offset // np.array(SIZES)[self._moved]
        self._message_strides = row_steps(self._shape)
        self._start, self._nbytes = start, patterns.fragments.nbytes[fragment]
        self._ndim = self.routes.ndim[segments.tensor[self._segment_row]].tolist()

    def _local_views(self) -> None:
        """Where this rank's own contributions lie in its buffers."""
        routes = self.routes
        own = np.flatnonzero(self._sender == self._rank)
        tensor = routes.segments.tensor[self._segment_row[own]]
        row = routes.held.first[tensor] + routes.patterns.holds.row[self._hold[own]]
        layout = routes.sides.sources[routes.sides.layout_of_rank[self._rank]].layout
        pieces, piece = layout.pieces, routes.held.piece[row]
        depth = pieces.start.shape[1]
        offset = pieces.offset[piece] + ((self._start[own, :depth] - pieces.start[piece]) * pieces.strides[piece]).sum(axis=1)
        self._local: dict[int, Region] = {}
        views = zip(own.tolist(), pieces.buffer[piece].tolist(), offset.tolist(), pieces.strides[piece].tolist(),
                    pieces.dtype[piece].tolist(), strict=True)  # fmt: skip
        for i, buffer, at, strides, dtype in views:
            n = self._ndim[i]
            self._local[i] = Region(buffer, at, self._shape_of(i), tuple(strides[:n]), pieces.dtypes[dtype])

    def _shape_of(self, i: int) -> Index:
        return tuple(self._shape[i, : self._ndim[i]].tolist())

    def _wire(self, i: int, offset: Ints, strides: Ints, dtype: Ints) -> Region:
        return Region(WIRE, int(offset[i]), self._shape_of(i), tuple(strides[i, : self._ndim[i]].tolist()), DTYPES[dtype[i]])

    def _bucket(self, i: int) -> Region:
        return self._wire(i, self._bucket_offset, self._bucket_strides, self._dtype)

    def _packed(self, i: int) -> Region:
        return self._wire(i, self._message_offset, self._message_strides, self._moved)

    def program(self, digest: str) -> SourceProgram:
        routes = self.routes
        first = np.searchsorted(self._task, self._mine).tolist()
        stop = np.searchsorted(self._task, self._mine, side="right").tolist()
        owned = self._mine[routes.tasks.owner[self._mine] == self._rank]
        rows, _ = _segment_rows(routes.tasks, owned)
        segments = self.segments(rows)
        self._relayed = self._passed_on(owned)
        tasks = (self._make(place, range(a, b), segments) for place, (a, b) in enumerate(zip(first, stop, strict=True)))
        return SourceProgram(
            plan_digest=digest,
            rank=self._rank,
            world_size=routes.sides.world,
            tasks=tuple(tasks),
            landing_nbytes=int(routes.landing_nbytes[self._rank]),
            groups=tuple(np.unique(routes.tasks.group).tolist()),
            total_tasks=len(routes.tasks.owner),
        )

    def _passed_on(self, owned: Ints) -> dict[int, tuple[ReceiverId, ...]]:
        """By task, the receivers that get it from another one."""
        if not self.routes.relaying:
            return {}
        hops, found = self.routes.relays.hops(owned), defaultdict[int, list[ReceiverId]](list)
        for task, receiver in zip(*(column[hops.via >= 0].tolist() for column in (hops.task, hops.receiver)), strict=True):
            found[task].append(self.routes.sides.receivers[receiver])
        return {task: tuple(receivers) for task, receivers in found.items()}

    def _make(self, place: int, rows: range, segments: Iterator[Segment]) -> SourceTask:
        tasks, index = self.routes.tasks, int(self._mine[place])
        task = SourceTask(
            index=index,
            group=int(tasks.group[index]),
            owner=int(tasks.owner[index]),
            nbytes=int(tasks.nbytes[index]),
            tmp_bytes=self._tmp_bytes[place],
            landing_offset=int(tasks.shared_offset[index]),
            file_bytes=self._file_bytes[place],
        )
        if task.owner != self._rank:
            return replace(task, sends=tuple(self._messages(rows, receiving=False)))
        audience = self.routes.patterns.audiences[tasks.audience[index]]
        count = int(tasks.first[index + 1] - tasks.first[index])
        return replace(
            task,
            receivers=tuple(self.routes.sides.receivers[i] for i in audience),
            relayed=self._relayed.get(index, ()),
            segments=tuple(itertools.islice(segments, count)),
            local=tuple(Copy(self._local[i], self._bucket(i)) for i in rows if self._message[i] < 0),
            receives=tuple(self._messages(rows, receiving=True)),
            quantized=self._quantized(index),
        )

    def _quantized(self, task: int) -> tuple[Quantization, ...]:
        """Quantized segments of a task; the scales of each are the segment behind it."""
        routes, patterns = self.routes, self.routes.patterns
        units = routes.segments.unit[routes.tasks.first[task] : routes.tasks.first[task + 1]]
        formats = patterns.items.format[patterns.units.item[units]]
        return tuple(Quantization(k, k + 1, patterns.formats[formats[k]]) for k in np.flatnonzero(formats).tolist())

    def _messages(self, rows: range, *, receiving: bool) -> Iterator[Message]:
        messages = self.routes.gather.messages
        away = (i for i in rows if self._message[i] >= 0)
        for tag, members in itertools.groupby(away, key=self._message.__getitem__):
            if receiving:
                copies = tuple(Copy(self._packed(i), self._bucket(i)) for i in members)
            else:
                copies = tuple(Copy(self._local[i], self._packed(i)) for i in members)
            task = messages.task[tag]
            peer = messages.rank[tag] if receiving else self.routes.tasks.owner[task]
            yield Message(
                peer=int(peer), tag=int(tag), nbytes=int(messages.nbytes[tag]), copies=copies, direct=bool(messages.direct[tag])
            )


class _TargetDraft(_Draft):
    """Tasks of one receiver."""

    def __init__(self, routes: Routes, receiver: int) -> None:
        super().__init__(routes)
        self._receiver = receiver
        self._holder = int(routes.sides.layout_of_receiver[receiver])
        self._layout = routes.sides.receiving[self._holder].layout
        hears = np.array([receiver in receivers for receivers in routes.patterns.audiences], bool)
        tasks = routes.tasks
        self._tasks = np.flatnonzero(hears[tasks.audience]) if len(hears) else tasks.owner
        wants = routes.patterns.wants
        self._want_key = wants.item * len(routes.sides.receiving) + wants.layout

    def program(self, digest: str, digest_kind: str) -> TargetProgram:
        routes, tasks = self.routes, self.routes.tasks
        offsets, total = self._lay_out()
        owners = np.unique(tasks.owner[self._tasks])
        landings = self._landings(offsets)
        counts = (tasks.first[self._tasks + 1] - tasks.first[self._tasks]).tolist()
        facts = zip(*_lists(self._tasks, tasks.owner[self._tasks], tasks.nbytes[self._tasks], offsets,
                            tasks.shared_offset[self._tasks]), counts, strict=True)  # fmt: skip
        via, onward = self._relays()
        made = tuple(
            TargetTask(
                index=index,
                owner=owner,
                nbytes=nbytes,
                landing_offset=at,
                shared_offset=shared,
                landings=tuple(itertools.islice(landings, count)),
                via=via.get(index),
                onward=tuple(onward.get(index, ())),
            )
            for index, owner, nbytes, at, shared, count in facts
        )
        return TargetProgram(
            plan_digest=digest,
            receiver=routes.sides.receivers[self._receiver],
            tasks=made,
            landing_nbytes=total,
            owners=tuple(owners.tolist()),
            shared_nbytes=tuple(routes.landing_nbytes[owners].tolist()),
            bucket_nbytes=int(tasks.nbytes[self._tasks].max(initial=0)),
            digest_kind=digest_kind,
            skipped=routes.skipped[self._holder],
        )

    def _relays(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """By task, the rank that passes it on to this receiver, and the ranks that this receiver passes it on to."""
        via: dict[int, int] = {}
        onward: defaultdict[int, list[int]] = defaultdict(list)
        if self.routes.relaying:
            hops, receivers = self.routes.relays.hops(self._tasks), self.routes.sides.receivers
            mine = (hops.receiver == self._receiver) & (hops.via >= 0)
            for task, sender in zip(hops.task[mine].tolist(), hops.via[mine].tolist(), strict=True):
                via[task] = receivers[sender].rank
            given = hops.via == self._receiver
            for task, taker in zip(hops.task[given].tolist(), hops.receiver[given].tolist(), strict=True):
                onward[task].append(receivers[taker].rank)
        return via, onward

    def _lay_out(self) -> tuple[Ints, int]:
        """This receiver's own landing space: all parts of an item from wherever they come, side by side."""
        tasks, units = self.routes.tasks, self.routes.patterns.units
        chain = tasks.chain[self._tasks]
        unit = self.routes.segments.unit[tasks.first[self._tasks]]
        item_nbytes = self.routes.patterns.items.nbytes[units.item[unit]]
        whole = np.where(chain < 0, tasks.nbytes[self._tasks], item_nbytes)
        return lay_out(chain, np.where(chain < 0, 0, units.offset[unit]), whole)

    def _landings(self, offsets: Ints) -> Iterator[Landing]:
        """Of all segments of its tasks, in order. ``offsets``: of the tasks, in this receiver's landing space."""
        routes, tasks = self.routes, self.routes.tasks
        rows, place = _segment_rows(tasks, self._tasks)
        key = routes.patterns.units.item[routes.segments.unit[rows]] * len(routes.sides.receiving) + self._holder
        first, stop = np.searchsorted(self._want_key, key), np.searchsorted(self._want_key, key, side="right")
        dests = self._dests(rows, first, stop)
        at = routes.segments.offset[rows]
        spaces = _lists(offsets[place] + at, tasks.shared_offset[self._tasks][place] + at, stop - first)
        for segment, private, shared, count in zip(self.segments(rows), *spaces, strict=True):
            mine = list(itertools.islice(dests, count))
            yield Landing(
                segment=segment,
                dests=tuple(region._replace(shape=segment.box.shape) for _, region in mine),
                pieces=tuple(piece for piece, _ in mine),
                landing_offset=private,
                shared_offset=shared,
            )

    def _dests(self, rows: Ints, first: Ints, stop: Ints) -> Iterator[tuple[int, Region]]:
        """Pieces that the segments land in, and where (the shape is the segment's)."""
        routes, pieces, units = self.routes, self._layout.pieces, self.routes.patterns.units
        row, nth = expand(stop - first)
        want = routes.patterns.wants.row[first[row] + nth]
        piece = routes.wanted.piece[routes.wanted.first[routes.segments.tensor[rows]][row] + want]
        strides, depth = pieces.strides[piece], pieces.start.shape[1]
        inside = units.start[routes.segments.unit[rows]][row][:, :depth] - pieces.start[piece]
        offset = pieces.offset[piece] + (inside * strides).sum(axis=1)
        facts = _lists(piece, pieces.buffer[piece], offset, strides, pieces.ndim[piece], pieces.dtype[piece])
        for index, buffer, at, steps, ndim, code in zip(*facts, strict=True):
            yield index, Region(buffer, at, (), tuple(steps[:ndim]), pieces.dtypes[code])


def _segment_rows(tasks: Tasks, which: Ints) -> tuple[Ints, Ints]:
    """Rows of the segments of some tasks, and the place of each one's task among them."""
    place, nth = expand(tasks.first[which + 1] - tasks.first[which])
    return tasks.first[which][place] + nth, place
