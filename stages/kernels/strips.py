"""Quantize blocks and hash their codes in one kernel, for wide matrices: codes are hashed while they are in the cache.

A program has a *strip*: the rows of one row of blocks, and as many columns as a hash block has bytes. So all of a hash block
is written by the one program that adds it up, and no program waits for another. It quantizes the strip block by block, as
`tiles.quantize_tiles` does, and then reads the codes back from where it has written them, as `xxh3.block_sums` does.
"""

from __future__ import annotations

from .language import constant, jit, tl
from .mixing import u64
from .rounding import INFINITY, bits_of, codes_of, float_of, largest_of, load_float32, pointer_to, scale_of, stored_scale
from .xxh3 import BLOCK, LEAF_FIELDS, sum_block

STRIP_FIELDS = 11
"""int64 values for each matrix: where it is read (address, is it relative to ``source``, elements from row to row), where its
codes and its scales are written (relative to ``dest``), its rows and columns, its first strip among all strips, its first leaf,
rows of a leaf, and its first hash block."""

HASHED_ROWS = 64
"""Rows of a strip whose hash blocks are added up at once."""

_FIELDS = constant(STRIP_FIELDS)
_LEAF_FIELDS = constant(LEAF_FIELDS)
_WIDTH = constant(BLOCK)
_HASHED = constant(HASHED_ROWS)
_SIGN = constant(-(2**31))


@jit
def quantize_strips(
    source: tl.int64, dest: tl.int64, strips: tl.tensor, strip_of: tl.tensor, leaves: tl.tensor, secret: tl.tensor,
    sums: tl.tensor,
    FROM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    POW2: tl.constexpr, STEPS: tl.constexpr, HARDWARE: tl.constexpr,
) -> None:  # fmt: skip
    """Write codes and scales of a strip, and the sums of its hash blocks.

    Rows of what is read begin at multiples of 16 elements, matrices are multiples of a hash block wide, and leaves are whole
    rows.

    Args:
        source: address that relative sources lie at.
        dest: address that codes and scales lie at.
        strips: see `STRIP_FIELDS`.
        strip_of: matrix of each program (int32).
        leaves: see `xxh3.LEAF_FIELDS`; for the seeds.
        secret, sums: as for `xxh3.block_sums`.
        ROWS, COLUMNS: of a block; ``COLUMNS`` divides a hash block.
        STEPS, HARDWARE: as for `tiles.quantize_tiles`.
    """
    strip = strips + tl.load(strip_of + tl.program_id(0)).to(tl.int64) * _FIELDS
    height = tl.load(strip + 5)
    # told where it is made: see `tiles`
    width = tl.multiple_of(tl.load(strip + 6), 1024)
    local = (tl.program_id(0) - tl.load(strip + 7)).to(tl.int32)
    across = (width // _WIDTH).to(tl.int32)
    top, left = (local // across).to(tl.int64) * ROWS, (local % across) * _WIDTH
    codes = tl.load(strip + 3) + dest
    _quantize_strip(
        tl.load(strip) + tl.load(strip + 1) * source, tl.multiple_of(tl.load(strip + 2), 16), codes, tl.load(strip + 4) + dest,
        top, left, height, width, FROM, ROWS, COLUMNS, POW2, STEPS, HARDWARE,
    )  # fmt: skip
    tl.debug_barrier()
    first = leaves + tl.load(strip + 8) * _LEAF_FIELDS
    for at in tl.range(0, ROWS, _HASHED):
        _sum_rows(codes, top + at, left, height, width, first, tl.load(strip + 9), tl.load(strip + 10), secret, sums)


@jit
def _quantize_strip(
    read: tl.tensor, down: tl.tensor, codes: tl.tensor, scales: tl.tensor, top: tl.tensor, left: tl.tensor,
    height: tl.tensor, width: tl.tensor,
    FROM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    POW2: tl.constexpr, STEPS: tl.constexpr, HARDWARE: tl.constexpr,
) -> None:  # fmt: skip
    """All blocks of a strip, one after the other: each is read once, and kept in registers until it is written."""
    rows = top + tl.arange(0, ROWS)
    mask = (rows < height)[:, None] & (tl.arange(0, COLUMNS) < COLUMNS)[None, :]
    group = top // ROWS * (width // COLUMNS) + left // COLUMNS
    scale_at = scales.to(tl.pointer_type(tl.float32)) + group
    for block in tl.range(0, _WIDTH // COLUMNS):
        columns = left + block * COLUMNS + tl.arange(0, COLUMNS)
        value = load_float32(read, (rows * down)[:, None] + columns[None, :], mask, FROM, True)
        # all that is made of it is made of its negative: see `quotient`
        minus = float_of(bits_of(value) ^ _SIGN)
        largest = largest_of(minus)
        scale = scale_of(largest, POW2)
        tl.store(scale_at + block, stored_scale(scale, largest))
        code = codes_of(minus, scale, STEPS, HARDWARE)
        to = pointer_to(codes, tl.uint8, True) + (rows * width)[:, None] + columns[None, :]
        tl.store(to, code, mask=mask)
        if largest >= INFINITY:
            # a group that is not finite: rare, so that others do not pay for it
            tl.debug_barrier()
            tl.store(to, tl.full([ROWS, COLUMNS], 0x7F, tl.uint8), mask=mask)


@jit
def _sum_rows(
    codes: tl.tensor, top: tl.tensor, left: tl.tensor, height: tl.tensor, width: tl.tensor, leaf: tl.tensor,
    leaf_rows: tl.tensor, block: tl.tensor, secret: tl.tensor, sums: tl.tensor,
) -> None:  # fmt: skip
    """Sums of the hash blocks of some rows."""
    flat = tl.arange(0, _HASHED * 4)
    row, pair = top + flat // 4, flat % 4
    inside = row < height
    # of 32 bits: a division of 64 takes a hundred instructions, in every thread
    short, each = row.to(tl.int32), leaf_rows.to(tl.int32)
    # the last stripe of a leaf is left to `finish_leaves`
    ends = ((short + 1) % each == 0) | (row + 1 == height)
    stripes = tl.where(inside, tl.where(ends & (left + _WIDTH == width), 15, 16), 0)
    seed = u64(tl.load(leaf + (short // each).to(tl.int64) * _LEAF_FIELDS + 3, mask=inside, other=0))
    words, to = row * (width // 8) + left // 8, block + row * (width // _WIDTH) + left // _WIDTH
    sum_block(codes, words, pair, stripes.to(tl.int64), seed, secret, sums + to * 8, True)
