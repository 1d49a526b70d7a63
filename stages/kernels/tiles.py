"""Kernels that write wire buckets: copy, cast and quantize strided matrices, a tile for each program.

All work on a table of *pieces*. A piece is a matrix that lies somewhere with any strides, and goes somewhere with any
strides; several pieces from different places may make up one tensor. A program finds its piece through ``piece_of`` and
its tile from the piece's first one. Tiles begin at multiples of their size *in the whole tensor*, not in the piece, so
that a tile never straddles two groups of a quantized tensor.

Where a piece holds a whole block, its tile is quantized in one pass. Where a group is spread over tiles or pieces (blocks
cut by shards, whole rows, whole tensors), `absmax_tiles` runs before: it leaves the largest magnitude of each group, by
atomic maxima of integers, in which order does not matter.
"""

from __future__ import annotations

from .language import constant, jit, tl
from .rounding import (
    INFINITY,
    MAGNITUDE,
    bits_of,
    codes_of,
    float_of,
    largest_of,
    load_float32,
    pointer_to,
    scale_of,
    store_rounded,
    stored_scale,
)

PIECE_FIELDS = 18
"""int64 values for each piece: where it is read (address, is it relative to ``source``, strides of rows and columns in
elements), where it is written (the same, to ``dest``), rows, columns, its first tile among all tiles, how many tiles lie
side by side, its first row and column in the tensor, the tensor's first group, how many groups lie side by side, and where
the scales are written (address, is it relative to ``dest``)."""

_FIELDS = constant(PIECE_FIELDS)
_SIGN = constant(-(2**31))


@jit
def _tile(pieces: tl.tensor, piece_of: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """The piece of this program, and its tile's first row and column, counted in the piece; negative ones are outside."""
    piece = pieces + tl.load(piece_of + tl.program_id(0)).to(tl.int64) * _FIELDS
    # of 32 bits: a division of 64 takes a hundred instructions, in every thread
    local = (tl.program_id(0) - tl.load(piece + 10)).to(tl.int32)
    across = tl.load(piece + 11).to(tl.int32)
    first_row, first_column = tl.load(piece + 12), tl.load(piece + 13)
    top = (first_row // ROWS + local // across) * ROWS - first_row
    left = (first_column // COLUMNS + local % across) * COLUMNS - first_column
    if VECTOR:
        left = tl.multiple_of(left, 16)
    return piece, top, left


@jit
def _extent(piece: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """Rows and columns of a piece.

    What the compiler is told of alignment is told where a value is made: told of a function's argument it is forgotten
    when the function is inlined.
    """
    height, width = tl.load(piece + 8), tl.load(piece + 9)
    if VECTOR:
        width = tl.multiple_of(width, 16)
    return height, width


@jit
def _side(piece: tl.tensor, at: tl.constexpr, base: tl.int64, VECTOR: tl.constexpr) -> tl.tensor:
    """Address and strides of a side of a piece."""
    down = tl.load(piece + at + 2)
    if VECTOR:
        down = tl.multiple_of(down, 16)
    return tl.load(piece + at) + tl.load(piece + at + 1) * base, down, tl.load(piece + at + 3)


@jit
def _inside(rows: tl.tensor, columns: tl.tensor, height: tl.tensor, width: tl.tensor) -> tl.tensor:
    return ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))[None, :]


@jit
def _offsets(rows: tl.tensor, columns: tl.tensor, down: tl.tensor, across: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """``VECTOR``: rows are contiguous and begin at multiples of 16 elements."""
    if VECTOR:
        return (rows * down)[:, None] + columns[None, :]
    else:
        return (rows * down)[:, None] + (columns * across)[None, :]


@jit
def _move(
    read: tl.tensor, read_at: tl.tensor, write: tl.tensor, write_at: tl.tensor, mask: tl.tensor,
    TYPE: tl.constexpr, VECTOR: tl.constexpr,
) -> None:  # fmt: skip
    value = tl.load(pointer_to(read, TYPE, VECTOR) + read_at, mask=mask, other=0)
    tl.store(pointer_to(write, TYPE, VECTOR) + write_at, value, mask=mask)


@jit
def copy_tiles(
    source: tl.int64, dest: tl.int64, pieces: tl.tensor, piece_of: tl.tensor,
    FROM: tl.constexpr, TO: tl.constexpr, NBYTES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
) -> None:  # fmt: skip
    """Copy pieces, bits as they are (``NBYTES`` is the size of an element), or casting (0) between two types of `rounding`.

    Args:
        source: address that relative sources lie at.
        dest: address that relative destinations lie at.
        pieces: see `PIECE_FIELDS`.
        piece_of: piece of each program (int32).
    """
    piece, top, left = _tile(pieces, piece_of, ROWS, COLUMNS, VECTOR)
    rows, columns = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    height, width = _extent(piece, VECTOR)
    mask = _inside(rows, columns, height, width)
    read, read_down, read_across = _side(piece, 0, source, VECTOR)
    write, write_down, write_across = _side(piece, 4, dest, VECTOR)
    read_at = _offsets(rows, columns, read_down, read_across, VECTOR)
    write_at = _offsets(rows, columns, write_down, write_across, VECTOR)
    if NBYTES == 0:
        store_rounded(load_float32(read, read_at, mask, FROM, VECTOR), write, write_at, mask, TO, VECTOR)
    elif NBYTES == 1:
        _move(read, read_at, write, write_at, mask, tl.int8, VECTOR)
    elif NBYTES == 2:
        _move(read, read_at, write, write_at, mask, tl.int16, VECTOR)
    elif NBYTES == 4:
        _move(read, read_at, write, write_at, mask, tl.int32, VECTOR)
    else:
        _move(read, read_at, write, write_at, mask, tl.int64, VECTOR)


@jit
def _group_of_rows(
    rows: tl.tensor, row: tl.tensor, column: tl.tensor, across: tl.tensor,
    GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The group of each row of a tile, within the tensor. ``row`` and ``column``: where in it the piece and the tile begin."""
    down = rows * 0
    if GROUP_ROWS > 0:
        down = (row + tl.maximum(rows, 0)) // GROUP_ROWS
    group = down * across
    if GROUP_COLUMNS > 0:
        group += column // GROUP_COLUMNS
    return group


@jit
def absmax_tiles(
    source: tl.int64, pieces: tl.tensor, piece_of: tl.tensor, absmax: tl.tensor,
    FROM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Raise ``absmax`` (int32, zeros at first) of each group to the largest magnitude of its elements, as bits."""
    piece, top, left = _tile(pieces, piece_of, ROWS, COLUMNS, VECTOR)
    rows, columns = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    height, width = _extent(piece, VECTOR)
    mask = _inside(rows, columns, height, width)
    read, down, across = _side(piece, 0, source, VECTOR)
    value = load_float32(read, _offsets(rows, columns, down, across, VECTOR), mask, FROM, VECTOR)
    magnitude = bits_of(value) & MAGNITUDE
    column = tl.load(piece + 13) + tl.maximum(left, 0)
    group = _group_of_rows(rows, tl.load(piece + 12), column, tl.load(piece + 15), GROUP_ROWS, GROUP_COLUMNS)
    group += tl.load(piece + 14)
    inside = (rows >= 0) & (rows < height)
    if GROUP_ROWS == 1:
        tl.atomic_max(absmax + group, tl.max(magnitude, axis=1), mask=inside)
    else:
        # one group for the whole tile; rows outside the piece may name another one
        only = tl.max(tl.where(inside, group, 0), axis=0)
        tl.atomic_max(absmax + only, tl.max(tl.max(magnitude, axis=1), axis=0))


@jit
def quantize_tiles(
    source: tl.int64, dest: tl.int64, pieces: tl.tensor, piece_of: tl.tensor, absmax: tl.tensor,
    FROM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, POW2: tl.constexpr, STEPS: tl.constexpr, HARDWARE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the codes of IEEE quotients, and the scales of groups whose first element is in the tile.

    A tile is read once, and kept in registers from the search for the largest magnitude to the codes: it takes a warp for each
    2048 elements.

    Args:
        source: address that relative sources lie at.
        dest: address that relative destinations lie at.
        pieces: see `PIECE_FIELDS`.
        piece_of: piece of each program (int32).
        absmax: of each group (int32), as `absmax_tiles` left it; not read if ``WHOLE``.
        WHOLE: every tile holds all of its group.
        STEPS: see `quotient`.
        HARDWARE: round with the GPU's own conversion, which has the same results on finite values.
    """
    piece, top, left = _tile(pieces, piece_of, ROWS, COLUMNS, VECTOR)
    # read once: the compiler must take it that stores change the table
    height, width = _extent(piece, VECTOR)
    row, column = tl.load(piece + 12), tl.load(piece + 13) + tl.maximum(left, 0)
    first, groups_across = tl.load(piece + 14), tl.load(piece + 15)
    scales = (tl.load(piece + 16) + tl.load(piece + 17) * dest).to(tl.pointer_type(tl.float32))
    read, read_down, read_across = _side(piece, 0, source, VECTOR)
    write, write_down, write_across = _side(piece, 4, dest, VECTOR)
    rows, columns = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    mask = _inside(rows, columns, height, width)
    value = load_float32(read, _offsets(rows, columns, read_down, read_across, VECTOR), mask, FROM, VECTOR)
    # all that is made of it is made of its negative: see `quotient`
    minus = float_of(bits_of(value) ^ _SIGN)
    if WHOLE:
        largest = largest_of(minus)
        group = (row + tl.maximum(top, 0)) // GROUP_ROWS * groups_across + column // GROUP_COLUMNS
        scale = scale_of(largest, POW2)
        tl.store(scales + group, stored_scale(scale, largest))
        odd = largest
    else:
        present = (rows >= 0) & (rows < height)
        group = _group_of_rows(rows, row, column, groups_across, GROUP_ROWS, GROUP_COLUMNS)
        largest = tl.load(absmax + first + group, mask=present, other=0)
        scale = scale_of(largest, POW2)
        # how far the tile is from where its groups begin
        off_above, off_left = row + rows, column
        if GROUP_ROWS > 0:
            off_above = off_above % GROUP_ROWS
        if GROUP_COLUMNS > 0:
            off_left = off_left % GROUP_COLUMNS
        tl.store(scales + group, stored_scale(scale, largest), mask=present & (off_above + off_left == 0))
        odd = tl.max(largest, axis=0)
        largest, scale = largest[:, None], scale[:, None]
    code = codes_of(minus, scale, STEPS, HARDWARE)
    codes = pointer_to(write, tl.uint8, VECTOR) + _offsets(rows, columns, write_down, write_across, VECTOR)
    tl.store(codes, code, mask=mask)
    if odd >= INFINITY:
        # a group that is not finite: rare, so that others do not pay for it
        tl.debug_barrier()
        tl.store(codes, tl.full([ROWS, COLUMNS], 0x7F, tl.uint8), mask=mask & (largest >= INFINITY))
