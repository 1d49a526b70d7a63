"""What each manifest must satisfy on its own: proofs over single pieces and over local memory.

Whether source pieces together hold what targets need is proved in `syncline.scheduler.geometry`.
"""

from __future__ import annotations

import re

import numpy as np

from .columns import Ints, ints
from .dtypes import CASTABLE, ITEMSIZE
from .layout import Layout, PieceTable
from .naming import Canonical, families
from .problems import Problems, listed
from .quantizing import CODES_TYPE
from .regions import Mask
from .rows import DTYPES, Rows
from .sides import Holder, Sides
from .views import Views, meetings, spans

_PACKED = re.compile(r"x[248]\b|int[1-7]\b|float[46]|bits|^q")


def check_pieces(sides: Sides, canonical: Canonical, problems: Problems) -> Mask:
    """Report pieces that cannot be sent or received. Returns which canonical tensors are sound so far."""
    sound = np.ones(len(canonical.names), bool)
    for holders, indexes in ((sides.sources, canonical.source_index), (sides.receiving, canonical.target_index)):
        for holder, index in zip(holders, indexes, strict=True):
            bad = _bad_pieces(holder, index, problems)
            at = index[holder.layout.pieces.tensor[bad]]
            sound[at[at >= 0]] = False
    for holder, index in zip(sides.receiving, canonical.target_index, strict=True):
        beyond = int(index.max(initial=0)) + 1
        content = np.where(index >= 0, index, beyond + tied_place(holder.layout, holder.aliases))
        check_written_once(holder.layout, content, holder.where, problems)
    return sound


def _bad_pieces(holder: Holder, index: Ints, problems: Problems) -> Ints:
    """Rows of pieces in scope that are broken."""
    layout, pieces = holder.layout, holder.layout.pieces
    if not len(pieces):
        return ints([])
    planned = index[pieces.tensor] >= 0
    unknown = np.array([d not in ITEMSIZE for d in pieces.dtypes], bool)[pieces.dtype]
    for dtype in (d for d in pieces.dtypes if d not in ITEMSIZE):
        rows = np.flatnonzero(planned & (pieces.dtype == pieces.dtypes.index(dtype)))
        if len(rows):
            form = "in packed quantized form, for which there is no rule" if _PACKED.search(dtype) else "which cannot travel"
            problems.add(f"{holder.where} holds {_names(layout, rows)} as {dtype}, {form}; known types: {', '.join(DTYPES)}")
    meta = np.array([d.split(":")[0] == "meta" for d in layout.buffers.devices], bool)[layout.buffers.device[pieces.buffer]]
    ends = pieces.start + pieces.shape
    outside = (ends > layout.tensors.shape[pieces.tensor][:, : ends.shape[1]]).any(axis=1)
    beyond = ~unknown & (spans(views_of(layout))[1] > layout.buffers.nbytes[pieces.buffer])
    for mask, what in (
        (meta, "is on the meta device, where it has no content; materialize it first"),
        (outside, "has a piece whose box reaches beyond the tensor's shape"),
        (beyond, "has a piece that reaches beyond its buffer"),
    ):
        rows = np.flatnonzero(planned & mask)
        if len(rows):
            problems.add(f"{holder.where}: {_names(layout, rows)} {what} {_detail(layout, int(rows[0]))}")
    return np.flatnonzero(planned & (unknown | meta | outside | beyond))


def _names(layout: Layout, rows: Ints) -> str:
    return listed(layout.tensors.names[i] for i in np.unique(layout.pieces.tensor[rows]))


def _detail(layout: Layout, row: int) -> str:
    piece = layout.pieces[row]
    buffer = layout.buffers[piece.buffer]
    start, shape = piece.box.start, piece.box.shape
    return f"(box start {start} shape {shape}, offset {piece.offset}, buffer {buffer.name} of {buffer.nbytes} bytes)"


def views_of(layout: Layout) -> Views:
    """The local views of a layout's pieces. Types that cannot travel count as bytes."""
    pieces = layout.pieces
    sizes = ints([ITEMSIZE.get(d, 1) for d in pieces.dtypes])
    return Views(pieces.buffer, pieces.offset, pieces.shape, pieces.strides, sizes[pieces.dtype])


def check_written_once(layout: Layout, content: Ints, where: str, problems: Problems) -> None:
    """Every byte of every target buffer belongs to exactly one piece, or is declared padding.

    Args:
        content: for each tensor of the layout a number, the same for tensors that are tied. Pieces that say of the same
            memory that it is the same box of the same content count once.
    """
    pieces, buffers = layout.pieces, layout.buffers
    views = views_of(layout)
    rows = _distinct(pieces, content)
    sizes = views.shape.prod(axis=1) * views.itemsize
    written = np.bincount(pieces.buffer[rows], sizes[rows], len(buffers)).astype(np.int64)
    unequal = written + buffers.padding != buffers.nbytes
    for meeting in meetings(views.rows(rows)):
        first, second = int(rows[meeting.a]), int(rows[meeting.b])
        names = " and ".join(dict.fromkeys(layout.tensors.names[pieces.tensor[i]] for i in (first, second)))
        buffer = buffers.names[pieces.buffer[first]]
        how = "overlap: elements would be written twice" if meeting.proved else "interleave so that planning cannot part them"
        problems.add(f"{where}: the pieces of {names} in buffer {buffer} {how} {_detail(layout, second)}")
        unequal[pieces.buffer[first]] = False
    for i in np.flatnonzero(unequal).tolist():
        buffer = buffers[i]
        problems.add(
            f"{where}: pieces write {written[i]} bytes of buffer {buffer.name}, which has {buffer.nbytes} and declares "
            f"{buffer.padding} as padding: the rest would stay unwritten; describe all of it, or declare its padding"
        )


def _distinct(pieces: PieceTable, content: Ints) -> Ints:
    """Rows of pieces, each memory of each content once."""
    columns = [content[pieces.tensor], pieces.buffer, pieces.offset, pieces.dtype]
    columns += [*pieces.start.T, *pieces.shape.T, *pieces.strides.T]
    order = np.lexsort(columns)
    same = np.ones(len(order), bool)
    same[:1] = False
    for column in columns:
        same[1:] &= column[order[1:]] == column[order[:-1]]
    return np.sort(order[~same])


def tied_place(layout: Layout, aliases: frozenset[tuple[str, str]]) -> Ints:
    """For each tensor of a layout the first one that aliases tie it to, or itself."""
    place = {name: i for i, name in enumerate(layout.tensors.names)} if aliases else {}
    tied = np.arange(len(layout.tensors))
    for names in families(aliases):
        members = [place[name] for name in names if name in place]
        tied[members] = min(members, default=0)
    return tied


def check_dtypes(sides: Sides, canonical: Canonical, held: Rows, wanted: Rows, problems: Problems) -> Mask:
    """Report tensors that no rule takes from the source's type to a target's. Returns the tensors that are sound."""
    names = canonical.names
    low, high = np.full(len(names), len(DTYPES)), np.full(len(names), -1)
    np.minimum.at(low, held.tensor, held.dtype)
    np.maximum.at(high, held.tensor, held.dtype)
    mixed = low < high
    for i in np.flatnonzero(mixed).tolist():
        problems.add(f"{names[i]}: source ranks hold it as {DTYPES[low[i]]} and {DTYPES[high[i]]}; use one type")
    tensor, dtype, layout = wanted.tensor, wanted.dtype, wanted.layout
    castable = np.array([d in CASTABLE for d in DTYPES])
    source = np.maximum(high, 0)[tensor]
    quantized = np.zeros(len(names), bool)
    quantized[list(canonical.formats)] = True
    fine = (source == dtype) | (castable[source] & castable[dtype]) | (high[tensor] < 0)
    fine |= quantized[tensor] & (dtype == CODES_TYPE)
    odd = np.flatnonzero(~fine & ~mixed[tensor])
    reasons: dict[tuple[int, int, str], set[int]] = {}
    for t, a, b, where in zip(
        tensor[odd].tolist(), source[odd].tolist(), dtype[odd].tolist(), layout[odd].tolist(), strict=True
    ):
        reasons.setdefault((a, b, sides.receiving[where].side), set()).add(t)
    for (a, b, side), tensors in reasons.items():
        needs = "a quantization rule" if "float8" in DTYPES[a] + DTYPES[b] else "a rule"
        problems.add(
            f"{listed(names[i] for i in sorted(tensors))}: the source has {DTYPES[a]}, {side} expects {DTYPES[b]}, which would "
            f"take {needs}; only {', '.join(sorted(CASTABLE))} are cast into each other"
        )
    sound = ~mixed
    sound[tensor[odd]] = False
    return sound
