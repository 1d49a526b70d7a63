"""Programs of single ranks, drawn from the columns of a plan when they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    Region,
    Segment,
    SourceProgram,
    SourceTask,
    TargetProgram,
    TargetTask,
)
from .regions import row_steps
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
    held: Places
    wanted: Places
    patterns: Patterns
    tasks: Tasks
    segments: Segments
    gather: Gather
    landing_nbytes: Ints
    skipped: tuple[tuple[str, ...], ...]


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
        self._names: dict[tuple[int, int], int] = {}
        self._segments: dict[int, Segment] = {}

    def segment(self, row: int) -> Segment:
        """Segment ``row`` of the plan."""
        known = self._segments.get(row)
        return known if known is not None else self._segments.setdefault(row, self._segment(row))

    def _segment(self, row: int) -> Segment:
        routes, patterns = self.routes, self.routes.patterns
        t, u = int(routes.segments.tensor[row]), int(routes.segments.unit[row])
        item, n, name = int(patterns.units.item[u]), int(routes.ndim[t]), routes.names[t]
        dtype = DTYPES[patterns.items.dtype[item]]
        whole = _box(patterns.items.start[item], patterns.items.shape[item], n)
        units = patterns.units
        leaves = Leaves(
            item_uid=item_uid(name, dtype, whole),
            first=int(units.first_leaf[u]),
            blocks=int(units.blocks[u]),
            block_nbytes=int(units.block_nbytes[u]),
            leaf_nbytes=int(units.leaf_nbytes[u]),
        )
        return Segment(
            item=self._names.setdefault((t, item), len(self._names)),
            name=name,
            box=_box(units.start[u], units.shape[u], n),
            dtype=dtype,
            offset=int(routes.segments.offset[row]),
            nbytes=int(units.nbytes[u]),
            leaves=leaves,
        )


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
        size = np.array(SIZES)[self._dtype]
        start, self._shape = patterns.fragments.start[fragment], patterns.fragments.shape[fragment]
        self._bucket_strides = row_steps(patterns.units.shape[unit])
        within = ((start - patterns.units.start[unit]) * self._bucket_strides).sum(axis=1)
        self._bucket_offset = segments.offset[self._segment_row] // size + within
        self._message_offset, self._message_strides = self._offset // size, row_steps(self._shape)
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

    def _wire(self, i: int, offset: Ints, strides: Ints) -> Region:
        return Region(
            WIRE, int(offset[i]), self._shape_of(i), tuple(strides[i, : self._ndim[i]].tolist()), DTYPES[self._dtype[i]]
        )

    def _bucket(self, i: int) -> Region:
        return self._wire(i, self._bucket_offset, self._bucket_strides)

    def _packed(self, i: int) -> Region:
        return self._wire(i, self._message_offset, self._message_strides)

    def program(self, digest: str) -> SourceProgram:
        routes = self.routes
        first = np.searchsorted(self._task, self._mine).tolist()
        stop = np.searchsorted(self._task, self._mine, side="right").tolist()
        tasks = (self._make(place, range(a, b)) for place, (a, b) in enumerate(zip(first, stop, strict=True)))
        return SourceProgram(
            plan_digest=digest,
            rank=self._rank,
            world_size=routes.sides.world,
            tasks=tuple(tasks),
            landing_nbytes=int(routes.landing_nbytes[self._rank]),
            groups=tuple(np.unique(routes.tasks.group).tolist()),
            total_tasks=len(routes.tasks.owner),
        )

    def _make(self, place: int, rows: range) -> SourceTask:
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
        segments = range(int(tasks.first[index]), int(tasks.first[index + 1]))
        return replace(
            task,
            receivers=tuple(self.routes.sides.receivers[i] for i in audience),
            segments=tuple(map(self.segment, segments)),
            local=tuple(Copy(self._local[i], self._bucket(i)) for i in rows if self._message[i] < 0),
            receives=tuple(self._messages(rows, receiving=True)),
        )

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
        made = (self._make(t, at) for t, at in zip(self._tasks.tolist(), offsets.tolist(), strict=True))
        return TargetProgram(
            plan_digest=digest,
            receiver=routes.sides.receivers[self._receiver],
            tasks=tuple(made),
            landing_nbytes=total,
            owners=tuple(owners.tolist()),
            shared_nbytes=tuple(routes.landing_nbytes[owners].tolist()),
            bucket_nbytes=int(tasks.nbytes[self._tasks].max(initial=0)),
            digest_kind=digest_kind,
            skipped=routes.skipped[self._holder],
        )

    def _lay_out(self) -> tuple[Ints, int]:
        """This receiver's own landing space: all parts of an item from wherever they come, side by side."""
        tasks, units = self.routes.tasks, self.routes.patterns.units
        chain = tasks.chain[self._tasks]
        unit = self.routes.segments.unit[tasks.first[self._tasks]]
        item_nbytes = self.routes.patterns.items.nbytes[units.item[unit]]
        whole = np.where(chain < 0, tasks.nbytes[self._tasks], item_nbytes)
        return lay_out(chain, np.where(chain < 0, 0, units.offset[unit]), whole)

    def _make(self, index: int, landing_offset: int) -> TargetTask:
        tasks = self.routes.tasks
        shared = int(tasks.shared_offset[index])
        rows = range(int(tasks.first[index]), int(tasks.first[index + 1]))
        return TargetTask(
            index=index,
            owner=int(tasks.owner[index]),
            nbytes=int(tasks.nbytes[index]),
            landing_offset=landing_offset,
            shared_offset=shared,
            landings=tuple(self._landing(row, landing_offset, shared) for row in rows),
        )

    def _landing(self, row: int, landing_offset: int, shared_offset: int) -> Landing:
        routes, segment = self.routes, self.segment(row)
        item = routes.patterns.units.item[routes.segments.unit[row]]
        key = item * len(routes.sides.receiving) + self._holder
        first, stop = np.searchsorted(self._want_key, key), np.searchsorted(self._want_key, key, side="right")
        rows = routes.wanted.first[routes.segments.tensor[row]] + routes.patterns.wants.row[first:stop]
        pieces = tuple(routes.wanted.piece[rows].tolist())
        return Landing(
            segment=segment,
            dests=tuple(self._dest(piece, segment.box) for piece in pieces),
            pieces=pieces,
            landing_offset=landing_offset + segment.offset,
            shared_offset=shared_offset + segment.offset,
        )

    def _dest(self, index: int, box: Box) -> Region:
        piece = self._layout.pieces[index]
        place = box.relative_to(piece.box.start).start
        offset = piece.offset + sum(i * s for i, s in zip(place, piece.strides, strict=True))
        return Region(piece.buffer, offset, box.shape, piece.strides, piece.dtype)


def _box(start: Ints, shape: Ints, ndim: int) -> Box:
    return Box(start=tuple(start[:ndim].tolist()), shape=tuple(shape[:ndim].tolist()))
