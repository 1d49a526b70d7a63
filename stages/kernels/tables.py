"""Tables that kernels work through, built once from the plan: pieces for `tiles`, leaves for `xxh3`.

Pieces that can share a launch are put into one table. Everything that decides about a launch (types, alignment, kind of
group) is known here, so running needs no more than addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from syncline.scheduler.formats import Fp8Format
from syncline.scheduler.programs import Leaves
from syncline.stages.digest import leaf_bounds

from .reference import FLOATS
from .strips import HASHED_ROWS
from .views import Part, Piece, View
from .xxh3 import BLOCK, LONGEST_SHORT

FLAT = (1, 4096)
"""Rows and columns of a tile of a row: copies that are contiguous on both sides."""

SHEET = (32, 128)
"""Rows and columns of a tile of any other matrix, quantized blocks excepted: their tile is the block."""

UNIT = 32
"""Blocks of a leaf for each program that adds them up."""

FEWEST_STRIPS = 512
"""Strips of a bucket (64 MiB of codes, in rows of blocks of 128) below which quantizing and hashing are two launches: fewer
do not fill a GPU that has two a multiprocessor, and codes that fit the cache are still there when the second launch reads them.
"""


class CopyKind(NamedTuple):
    """Copies that share a launch. ``nbytes`` is the size of an element whose bits are moved, 0 for a cast."""

    source: int
    to: int
    nbytes: int
    tile: tuple[int, int]
    vector: bool


class QuantizeKind(NamedTuple):
    """Quantized pieces that share a launch. ``group`` in rows and columns, 0 for all; ``whole``: see `tiles`."""

    source: int
    tile: tuple[int, int]
    vector: bool
    group: tuple[int, int]
    whole: bool
    pow2: bool


class StripKind(NamedTuple):
    """Matrices that are quantized and hashed by one launch. ``block`` in rows and columns."""

    source: int
    block: tuple[int, int]
    pow2: bool


class LeafKind(NamedTuple):
    """Long leaves that share a launch. ``strided``: copied out of rows with gaps between them."""

    copied: bool
    aligned: bool
    strided: bool


@dataclass(slots=True)
class Pieces:
    """Rows for `tiles.PIECE_FIELDS`, and the piece of each tile."""

    rows: list[list[int]] = field(default_factory=list)
    tiles: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, read: View, write: View, tile: tuple[int, int], place: tuple[int, int], groups: tuple[int, int, int, int]
    ) -> None:
        """``place``: first row and column in the tensor. ``groups``: first, how many across, address of scales, relative."""
        (rows, columns), (row, column) = read.shape, place
        down = (row + rows - 1) // tile[0] - row // tile[0] + 1
        across = (column + columns - 1) // tile[1] - column // tile[1] + 1
        first = self.tiles[-1][1] if self.tiles else 0
        sides = [*_side(read), *_side(write)]
        first_group, groups_across, scales, relative = groups
        self.rows.append([*sides, rows, columns, first, across, row, column, first_group, groups_across, scales, relative])
        self.tiles.append((down * across, first + down * across))

    def piece_of(self) -> torch.Tensor:
        """The piece of each tile (int32)."""
        counts = torch.tensor([count for count, _ in self.tiles])
        return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)


@dataclass(slots=True)
class Strips:
    """Rows for `strips.STRIP_FIELDS`, and how many strips each matrix has."""

    rows: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, fields: Sequence[int], leaves: Sequence[int], count: int) -> None:
        """A matrix of ``count`` strips: the fields before and after the number of its first one."""
        self.rows.append([*fields, self.count, *leaves])
        self.counts.append(count)
        self.count += count

    def matrix_of(self) -> torch.Tensor:
        """The matrix of each strip (int32)."""
        return torch.repeat_interleave(torch.arange(len(self.counts), dtype=torch.int32), torch.tensor(self.counts))


def _side(view: View) -> list[int]:
    address, relative = view.place
    return [address, int(relative), view.strides[0] if view.shape[0] > 1 else 0, view.strides[1]]


def _lines_up(view: View, column: int) -> bool:
    """Rows are contiguous and begin at multiples of 16 elements."""
    rows, columns = view.shape
    steps = view.strides[1] == 1 and (rows == 1 or view.strides[0] % 16 == 0)
    return steps and columns % 16 == 0 and column % 16 == 0 and view.place[0] % 16 == 0


class Tables:
    """All tables of one bucket (or of one landing), by kind of launch."""

    def __init__(self) -> None:
        self.copies: defaultdict[CopyKind, Pieces] = defaultdict(Pieces)
        self.returns: defaultdict[CopyKind, Pieces] = defaultdict(Pieces)
        self.quantize: defaultdict[QuantizeKind, Pieces] = defaultdict(Pieces)
        self.strips: defaultdict[StripKind, Strips] = defaultdict(Strips)
        self.groups = 0
        self.long: list[list[int]] = []
        self.short: list[list[int]] = []
        self.units: defaultdict[LeafKind, list[int]] = defaultdict(list)
        self.blocks = 0

    def add_copy(self, read: View, write: View) -> None:
        """Copy or cast a matrix. Raises `ValueError` for a cast that kernels don't do."""
        _add_copy(self.copies, read, write)

    def add_return(self, read: View, write: View) -> None:
        """The same, when all other copies are done: to hash without gaps what has landed with gaps."""
        _add_copy(self.returns, read, write)

    def add_quantized(self, part: Part) -> None:
        """Quantize the pieces of a part. Raises `ValueError` for a format or a type that kernels don't do."""
        quantized = part.quantized
        if quantized is None:
            raise ValueError("this part is not quantized")
        how = quantized.how
        check_format(how)
        grouping = {"block": how.block, "channel": (1, 0), "tensor": (0, 0)}[how.grouping]
        across = -(-part.shape[1] // how.group(part.shape)[1])
        tile = how.block if how.grouping == "block" else SHEET
        spread = False
        for piece in part.pieces:
            for cut, whole in _cuts(piece, part.shape, how):
                spread = spread or not whole
                place = (cut.row, cut.column)
                write = part.place(cut)
                vector = _lines_up(cut.view, cut.column) and _lines_up(write, cut.column)
                kind = QuantizeKind(_type(cut.view.dtype), tile, vector, grouping, whole, how.pow2)
                groups = (self.groups, across, quantized.scale_offset, 1)
                self.quantize[kind].add(cut.view, write, tile, place, groups)
        if spread:
            self.groups += -(-part.shape[0] // how.group(part.shape)[0]) * across

    def add_strips(self, part: Part) -> None:
        """Quantize a part and hash its codes in one pass: a part that `strips_of` counts strips of."""
        if part.quantized is None:
            raise ValueError("this part is not quantized")
        how, (rows, columns), view = part.quantized.how, part.shape, part.pieces[0].view
        check_format(how)
        address, relative = view.place
        self.strips[StripKind(_type(view.dtype), how.block, how.pow2)].add(
            [
                address,
                int(relative),
                view.strides[0] if rows > 1 else 0,
                part.offset,
                part.quantized.scale_offset,
                rows,
                columns,
            ],
            [len(self.long), min(part.leaves.leaf_nbytes // columns, rows), self.blocks],
            strips_of(part),
        )
        for start, stop, seed in leaf_bounds(part.leaves):
            self.long.append([part.offset + start, 1, stop - start, _signed(seed), self.blocks, 0, 0, 0, 0, 0, 0])
            self.blocks += (stop - start) // BLOCK

    def add_leaves(self, content: View, leaves: Leaves, copied_from: View | None = None) -> None:
        """Hash the bytes of a contiguous matrix, after copying them there from where `can_copy_by_leaves` says so."""
        address, relative = content.place
        source, from_given = (0, False) if copied_from is None else copied_from.place
        strided = copied_from is not None and not copied_from.contiguous
        width, step = (0, 0)
        if copied_from is not None and strided:
            width, step = (count * copied_from.itemsize for count in (copied_from.shape[1], copied_from.strides[0]))
        for start, stop, seed in leaf_bounds(leaves):
            at = [address + start, int(relative), stop - start, _signed(seed)]
            if stop - start <= LONGEST_SHORT:
                self.short.append(at)
                if copied_from is not None:
                    self.add_copy(copied_from.cut(start, stop), content.cut(start, stop))
                continue
            first_byte = source if strided else source + start
            aligned = (address + start) % 16 == 0 and first_byte % 16 == 0
            units = self.units[LeafKind(copied_from is not None, aligned, strided)]
            blocks = -(-((stop - start - 1) // 64) // (BLOCK // 64))
            self.long.append([*at, self.blocks, len(units), first_byte, int(from_given), start if strided else 0, width, step])
            units.extend([len(self.long) - 1] * -(-blocks // UNIT))
            self.blocks += blocks


def _add_copy(copies: defaultdict[CopyKind, Pieces], read: View, write: View) -> None:
    if read.empty:
        return
    source, to, nbytes = _conversion(read.dtype, write.dtype)
    if not (read.contiguous and write.contiguous):
        vector = _lines_up(read, 0) and _lines_up(write, 0)
        copies[CopyKind(source, to, nbytes, SHEET, vector)].add(read, write, SHEET, (0, 0), (0, 0, 0, 0))
        return
    read, write = read.flat(), write.flat()
    count = read.shape[1]
    even = count // 16 * 16 if read.place[0] % 16 == 0 and write.place[0] % 16 == 0 else 0
    for start, stop, vector in ((0, even, True), (even, count, False)):
        if start < stop:
            one, some = slice(0, 1), slice(start, stop)
            pieces = copies[CopyKind(source, to, nbytes, FLAT, vector)]
            pieces.add(read.part(one, some), write.part(one, some), FLAT, (0, 0), (0, 0, 0, 0))


def can_copy_by_leaves(read: View, write: View, leaves: Leaves) -> bool:
    """Whether a copy and its digest can be done in one pass: bits as they are, to one place, leaves at multiples of 16 bytes;
    from one place, or from rows that are multiples of 16 bytes apart and long (then no leaf may be short).
    """
    if read.dtype != write.dtype or not write.contiguous or write.place[0] % 16:
        return False
    # a leaf begins at multiples of the block's size, and of the leaf's where a block has several
    several = leaves.block_nbytes > leaves.leaf_nbytes
    if not ((leaves.blocks == 1 or leaves.block_nbytes % 16 == 0) and (not several or leaves.leaf_nbytes % 16 == 0)):
        return False
    if read.contiguous:
        return True
    width, step = read.shape[1] * read.itemsize, read.strides[0] * read.itemsize
    rows = read.strides[1] == 1 and width % 16 == 0 and step % 16 == 0 and step > 0 and width < 2**31 - 2**16
    return rows and read.place[0] % 16 == 0 and all(stop - start > LONGEST_SHORT for start, stop, _ in leaf_bounds(leaves))


def strips_of(part: Part) -> int:
    """How many strips a part has that can be quantized and hashed in one pass: blocks, of one matrix in rows that line up, so
    wide that hash blocks do not cross rows, and with leaves of whole rows. 0 for any other.
    """
    quantized, (rows, columns), leaves = part.quantized, part.shape, part.leaves
    if quantized is None or quantized.how.grouping != "block" or len(part.pieces) != 1:
        return 0
    view, (block_rows, block_columns) = part.pieces[0].view, quantized.how.block
    whole = leaves.blocks == 1 and leaves.leaf_nbytes % columns == 0 and view.shape == part.shape
    fits = columns % BLOCK == 0 and BLOCK % block_columns == 0 and block_rows % HASHED_ROWS == 0
    if not (whole and fits and part.offset % 16 == 0 and _lines_up(view, 0)):
        return 0
    return -(-rows // block_rows) * (columns // BLOCK)


def _signed(seed: int) -> int:
    """A word of 64 bits as an int64."""
    return seed - 2**64 if seed >= 2**63 else seed


def check_format(how: Fp8Format) -> None:
    """`ValueError` for blocks that no tile can be: sides are powers of two, 16 to 256, of at most 16,384 elements."""
    rows, columns = how.block
    sides = all(16 <= side <= 256 and side & (side - 1) == 0 for side in (rows, columns))
    if how.grouping == "block" and not (sides and rows * columns <= 128 * 128):
        raise ValueError(
            f"{how.name}: kernels quantize blocks whose sides are powers of two from 16 to 256, 16,384 elements at most"
        )


def _type(dtype: torch.dtype) -> int:
    """As `rounding` numbers them."""
    if dtype not in FLOATS:
        raise ValueError(f"{dtype} is neither cast nor quantized by kernels; float32, bfloat16 and float16 are")
    return FLOATS.index(dtype)


def _conversion(source: torch.dtype, to: torch.dtype) -> tuple[int, int, int]:
    if source != to:
        return _type(source), _type(to), 0
    if source.itemsize not in {1, 2, 4, 8}:
        raise ValueError(f"{source} has elements of {source.itemsize} bytes; kernels copy those of 1, 2, 4 and 8")
    return 0, 0, source.itemsize


def _cuts(piece: Piece, shape: tuple[int, int], how: Fp8Format) -> Iterator[tuple[Piece, bool]]:
    """Where groups are blocks: the middle of a piece, which consists of whole groups, and the strips around it."""
    if piece.view.empty:
        return
    if how.grouping != "block":
        yield piece, False
        return
    rows = _thirds(piece.row, piece.row + piece.view.shape[0], shape[0], how.block[0])
    columns = _thirds(piece.column, piece.column + piece.view.shape[1], shape[1], how.block[1])
    for top, bottom, whole_rows in rows:
        for left, right, whole_columns in columns:
            view = piece.view.part(slice(top - piece.row, bottom - piece.row), slice(left - piece.column, right - piece.column))
            yield Piece(view=view, row=top, column=left), whole_rows and whole_columns


def _thirds(start: int, stop: int, end: int, step: int) -> Sequence[tuple[int, int, bool]]:
    """A range as what lies before, in, and behind the whole groups in it; those at the tensor's end may be shorter."""
    first = -(-start // step) * step
    last = stop if stop == end else stop // step * step
    if first >= last:
        return [(start, stop, False)]
    thirds = [(start, first, False), (first, last, True), (last, stop, False)]
    return [third for third in thirds if third[0] < third[1]]
