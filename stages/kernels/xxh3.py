"""XXH3-128 of many leaves at once, equal to the CPU's, as Triton kernels.

How a long leaf is hashed, and what of it is parallel. XXH3 reads *stripes* of 64 bytes into 8 accumulators of 64 bits;
16 stripes make a *block* of 1024 bytes, after which the accumulators are scrambled. Inside a block everything is a sum::

    acc[i] += lo32(word[i] ^ key[s, i]) * hi32(word[i] ^ key[s, i]) + word[i ^ 1]          for stripe s of the block

so `block_sums` adds up every block of every leaf side by side, at the rate of memory. Only the scrambling is a chain::

    acc = (acc ^ acc >> 47 ^ key) * prime

and it reads 64 bytes for each 1024: `finish_leaves` runs it with a thread for each accumulator of each leaf, all leaves at
once. For leaves of 256 KiB that is 256 steps of about 30 cycles, some microseconds whatever the size of the bucket.
`short_leaves` are those of at most 240 bytes, which XXH3 hashes in another way (norms of tiny models, scales).

Leaf digests are summed modulo 2**128, as the plan wants, in four limbs of 32 bits, each in an int64 of its own: no order
of additions can change the result. Specification: https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
"""

from __future__ import annotations

from .language import constant, jit, tl
from .mixing import LOW, P32_1, P64_1, P64_2, SECRET, avalanche, fold, key, key_at, product, u64
from .rounding import pointer_to

LEAF_FIELDS = 11
"""int64 values for each long leaf: address, is it relative to ``base``, nbytes, seed, its first block among all blocks, its
first unit among all units, and where its content comes from if it is copied: address, is it relative to ``source``; and for
rows with gaps between them, which byte of all rows is the leaf's first, bytes of a row, bytes from row to row."""

LONGEST_SHORT = 240
"""Leaves of at most this many bytes are short."""

BLOCK = 1024
"""Bytes between two scramblings."""

_FIELDS = constant(LEAF_FIELDS)
_INIT = constant(len(SECRET) // 8)


@jit
def _words(address: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Words of 8 bytes, ``index`` words after ``address``, which need not be aligned."""
    shift = u64(address & 7) * 8
    pointer = (address & -8).to(tl.pointer_type(tl.int64))
    low = u64(tl.load(pointer + index, mask=mask, other=0))
    high = u64(tl.load(pointer + index + 1, mask=mask & (index * 0 + (address & 7) != 0), other=0))
    return (low >> shift) | ((high << 1) << (63 - shift))


@jit
def _aligned_words(address: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Words of 8 bytes, ``index`` words after ``address``, which is aligned to 16 bytes."""
    return u64(tl.load(pointer_to(address, tl.int64, True) + index, mask=mask, other=0))


@jit
def _gathered(leaf: tl.tensor, start: tl.tensor, pair: tl.tensor) -> tl.tensor:
    """Where pairs of words of a leaf whose rows have gaps between them lie, in pairs from where the first row begins.

    Rows are multiples of 16 bytes. ``start``: where the unit begins, in bytes. ``pair``: pairs from there on (int32).
    """
    width = tl.load(leaf + 9)
    at = tl.load(leaf + 8) + start
    # only the unit's place takes divisions of 64 bits
    column = (at % width).to(tl.int32) + pair * 16
    narrow = width.to(tl.int32)
    down = column // narrow
    return ((at // width + down) * tl.load(leaf + 10) + (column - down * narrow)) // 16


@jit
def _copy_unit(
    address: tl.tensor, came_from: tl.tensor, leaf: tl.tensor, start: tl.tensor, stripes: tl.tensor,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the whole stripes of a unit. All is read before anything is written: so it is all on its way at once."""
    pair = tl.arange(0, UNIT * 64)
    half = tl.arange(0, 2)
    local = (pair * 2)[:, None] + half[None, :]
    index = start * 128 + local
    mask = index < stripes * 8
    if STRIDED:
        from_ = _gathered(leaf, start * 1024, pair) * 2
        words = _aligned_words(came_from, from_[:, None] + half[None, :], mask)
    elif ALIGNED:
        words = _aligned_words(came_from, index, mask)
    else:
        words = _words(came_from, index, mask)
    tl.store(pointer_to(address, tl.int64, True) + index, words.to(tl.int64, bitcast=True), mask=mask)


@jit
def _stripe(address: tl.tensor, index: tl.tensor, left: tl.tensor, stripe: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    mask = (stripe < left)[:, None] & (tl.arange(0, 2) < 2)[None, :]
    if FAST:
        return _aligned_words(address, index + stripe * 8, mask)
    else:
        return _words(address, index + stripe * 8, mask)


@jit
def _eight_stripes(address: tl.tensor, index: tl.tensor, left: tl.tensor, first: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """A thread's words of eight stripes: in one place, for what stands between loads in a program stands between them."""
    return (
        _stripe(address, index, left, first, FAST), _stripe(address, index, left, first + 1, FAST),
        _stripe(address, index, left, first + 2, FAST), _stripe(address, index, left, first + 3, FAST),
        _stripe(address, index, left, first + 4, FAST), _stripe(address, index, left, first + 5, FAST),
        _stripe(address, index, left, first + 6, FAST), _stripe(address, index, left, first + 7, FAST),
    )  # fmt: skip


@jit
def _add_two(
    even: tl.tensor, odd: tl.tensor, word: tl.tensor, seed: tl.tensor, left: tl.tensor, one: tl.tensor, other: tl.tensor
) -> tl.tensor:
    """Add two stripes, the first at an even place. The key moves on by a word from stripe to stripe.

    ``word``: where the first one's key begins in the secret, whose words at even places are added to the seed, the others to
    its negative.
    """
    k0, k1, k2 = u64(tl.load(word)) + seed, u64(tl.load(word + 1)) - seed, u64(tl.load(word + 2)) + seed
    a, b = tl.split(one)
    c, d = tl.split(other)
    even += tl.where(left > 0, product(a ^ k0) + b, 0) + tl.where(left > 1, product(c ^ k1) + d, 0)
    odd += tl.where(left > 0, product(b ^ k1) + a, 0) + tl.where(left > 1, product(d ^ k2) + c, 0)
    return even, odd


@jit
def _add_eight(
    even: tl.tensor, odd: tl.tensor, word: tl.tensor, seed: tl.tensor, left: tl.tensor,
    w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, w4: tl.tensor, w5: tl.tensor, w6: tl.tensor, w7: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Add eight stripes: see `_add_two`."""
    even, odd = _add_two(even, odd, word, seed, left, w0, w1)
    even, odd = _add_two(even, odd, word + 2, seed, left - 2, w2, w3)
    even, odd = _add_two(even, odd, word + 4, seed, left - 4, w4, w5)
    even, odd = _add_two(even, odd, word + 6, seed, left - 6, w6, w7)
    return even, odd


@jit
def sum_block(
    address: tl.tensor, word: tl.tensor, pair: tl.tensor, stripes: tl.tensor, seed: tl.tensor, secret: tl.tensor,
    sums: tl.tensor, FAST: tl.constexpr,
) -> None:  # fmt: skip
    """Add up two accumulators of a block in each thread, side by side as the 16 bytes of a stripe that they take.

    Threads have nothing to tell each other, and all that one reads is on its way at once.

    Args:
        address: address that words are counted from.
        word: first word of the block.
        pair: which two accumulators (0 to 3).
        stripes: whole stripes from the beginning of the block on; none: nothing is stored.
        sums: where the block's 8 sums go.
        FAST: what is read is aligned to 16 bytes.
    """
    half = tl.arange(0, 2)
    index = (word + pair * 2)[:, None] + half[None, :]
    w0, w1, w2, w3, w4, w5, w6, w7 = _eight_stripes(address, index, stripes, 0, FAST)
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight_stripes(address, index, stripes, 8, FAST)
    even, odd = u64(stripes * 0), u64(stripes * 0)
    even, odd = _add_eight(even, odd, secret + pair * 2, seed, stripes, w0, w1, w2, w3, w4, w5, w6, w7)
    even, odd = _add_eight(even, odd, secret + pair * 2 + 8, seed, stripes - 8, x0, x1, x2, x3, x4, x5, x6, x7)
    both = tl.join(even, odd).to(tl.int64, bitcast=True)
    tl.store((sums + pair * 2)[:, None] + half[None, :], both, mask=(stripes > 0)[:, None] & (half < 2)[None, :])


@jit
def block_sums(
    base: tl.int64, source: tl.int64, leaves: tl.tensor, unit_leaf: tl.tensor, secret: tl.tensor, sums: tl.tensor,
    UNIT: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the blocks of long leaves, a unit of ``UNIT`` blocks of one leaf for each program: see `sum_block`.

    With ``COPY`` the unit is first copied from the leaf's source to its place, which must be aligned to 16 bytes; what is
    hashed is the copy, read back.

    Args:
        base: address that relative leaves lie at.
        source: address that relative sources lie at.
        leaves: see `LEAF_FIELDS`.
        unit_leaf: leaf of each unit (int32).
        secret: 24 words of the default secret, then the 8 first accumulators (int64).
        sums: 8 words (int64) for each block.
        ALIGNED: what is read is aligned to 16 bytes.
        STRIDED: copied out of rows with gaps between them.
    """
    unit = tl.program_id(0)
    leaf = leaves + tl.load(unit_leaf + unit).to(tl.int64) * _FIELDS
    address = tl.load(leaf) + tl.load(leaf + 1) * base
    nbytes = tl.load(leaf + 2)
    seed = u64(tl.load(leaf + 3))
    first = tl.load(leaf + 4)
    start = (unit - tl.load(leaf + 5)) * UNIT
    # the last 1 to 64 bytes are left to `finish_leaves`
    stripes = (nbytes - 1) // 64
    if COPY:
        came_from = tl.load(leaf + 6) + tl.load(leaf + 7) * source
        if start + UNIT >= (stripes + 15) // 16:
            _copy_tail(leaf, address, came_from, stripes * 64, nbytes, STRIDED)
        _copy_unit(address, came_from, leaf, start, stripes, UNIT, ALIGNED, STRIDED)
        tl.debug_barrier()
    flat = tl.arange(0, UNIT * 4)
    block, pair = start + flat // 4, flat % 4
    sum_block(address, block * 128, pair, stripes - block * 16, seed, secret, sums + (first + block) * 8, COPY or ALIGNED)


@jit
def _copy_tail(
    leaf: tl.tensor, address: tl.tensor, source: tl.tensor, start: tl.tensor, nbytes: tl.tensor, STRIDED: tl.constexpr
) -> None:
    byte = tl.arange(0, 64)
    offset = start + byte
    from_ = offset
    if STRIDED:
        from_ = _gathered(leaf, start, byte // 16) * 16 + byte % 16
    value = tl.load(source.to(tl.pointer_type(tl.uint8)) + from_, mask=offset < nbytes, other=0)
    tl.store(address.to(tl.pointer_type(tl.uint8)) + offset, value, mask=offset < nbytes)


@jit
def _merge(acc: tl.tensor, keys: tl.tensor, start: tl.tensor, LEAVES: tl.constexpr) -> tl.tensor:
    a, b = tl.split(tl.reshape(acc ^ keys, [LEAVES, 4, 2]))
    return avalanche(start + tl.sum(fold(a, b), axis=1))


@jit
def add_up(total: tl.tensor, low: tl.tensor, high: tl.tensor, live: tl.tensor) -> None:
    """Add leaf digests to the sum, by limbs of 32 bits."""
    low, high = tl.where(live, low, 0), tl.where(live, high, 0)
    tl.atomic_add(total, tl.sum(low & LOW, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_add(total + 1, tl.sum(low >> 32, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_add(total + 2, tl.sum(high & LOW, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_add(total + 3, tl.sum(high >> 32, axis=0).to(tl.int64, bitcast=True))


@jit
def _sum(at: tl.tensor, block: tl.tensor, full: tl.tensor) -> tl.tensor:
    return u64(tl.load(at + block * 8, mask=(block < full) & (tl.arange(0, 8)[None, :] < 8), other=0))


@jit
def _eight(at: tl.tensor, block: tl.tensor, full: tl.tensor) -> tl.tensor:
    """Sums of eight blocks of each leaf."""
    return (
        _sum(at, block, full), _sum(at, block + 1, full), _sum(at, block + 2, full), _sum(at, block + 3, full),
        _sum(at, block + 4, full), _sum(at, block + 5, full), _sum(at, block + 6, full), _sum(at, block + 7, full),
    )  # fmt: skip


@jit
def _step(acc: tl.tensor, block: tl.tensor, full: tl.tensor, scramble: tl.tensor, one: tl.tensor) -> tl.tensor:
    mixed = acc + one
    return tl.where(block < full, (mixed ^ (mixed >> 47) ^ scramble) * P32_1, acc)


@jit
def _chained(
    acc: tl.tensor, block: tl.tensor, full: tl.tensor, scramble: tl.tensor,
    s0: tl.tensor, s1: tl.tensor, s2: tl.tensor, s3: tl.tensor, s4: tl.tensor, s5: tl.tensor, s6: tl.tensor, s7: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Eight blocks more."""
    acc = _step(_step(acc, block, full, scramble, s0), block + 1, full, scramble, s1)
    acc = _step(_step(acc, block + 2, full, scramble, s2), block + 3, full, scramble, s3)
    acc = _step(_step(acc, block + 4, full, scramble, s4), block + 5, full, scramble, s5)
    return _step(_step(acc, block + 6, full, scramble, s6), block + 7, full, scramble, s7)


@jit
def finish_leaves(
    base: tl.int64, leaves: tl.tensor, secret: tl.tensor, sums: tl.tensor, total: tl.tensor, LEAVES: tl.constexpr
) -> None:
    """Chain the blocks of long leaves, ``LEAVES`` leaves for each program, and add their digests to ``total`` (4 int64).

    The table ends with leaves of 0 bytes where the number of leaves is no multiple of ``LEAVES``.
    """
    row = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    leaf = leaves + row.to(tl.int64) * _FIELDS
    address = tl.load(leaf) + tl.load(leaf + 1) * base
    nbytes = tl.load(leaf + 2)
    live = nbytes > 0
    nbytes = tl.maximum(nbytes, 1)
    seed = u64(tl.load(leaf + 3))[:, None]
    first = tl.load(leaf + 4)[:, None]
    lane = tl.arange(0, 8)[None, :]
    stripes, full = ((nbytes - 1) // 64)[:, None], ((nbytes - 1) // 1024)[:, None]
    acc = u64(tl.load(secret + _INIT + lane + row[:, None] * 0))
    scramble = key(secret, 16 + lane, seed)
    # sums of the next blocks are on their way while these are chained: to wait for each would take ten times as long
    at = sums + first * 8 + lane
    s0, s1, s2, s3, s4, s5, s6, s7 = _eight(at, 0, full)
    t0, t1, t2, t3, t4, t5, t6, t7 = _eight(at, 8, full)
    for block in tl.range(0, tl.max((nbytes - 1) // 1024, axis=0), 16):
        u0, u1, u2, u3, u4, u5, u6, u7 = _eight(at, block + 16, full)
        acc = _chained(acc, block, full, scramble, s0, s1, s2, s3, s4, s5, s6, s7)
        s0, s1, s2, s3, s4, s5, s6, s7 = u0, u1, u2, u3, u4, u5, u6, u7
        u0, u1, u2, u3, u4, u5, u6, u7 = _eight(at, block + 24, full)
        acc = _chained(acc, block + 8, full, scramble, t0, t1, t2, t3, t4, t5, t6, t7)
        t0, t1, t2, t3, t4, t5, t6, t7 = u0, u1, u2, u3, u4, u5, u6, u7
    rest = (stripes > full * 16) & (lane < 8)
    acc += u64(tl.load(sums + (first + full) * 8 + lane, mask=rest, other=0))
    ends = (address + nbytes - 64)[:, None]
    present = live[:, None] & (lane < 8)
    word, neighbour = _words(ends, lane, present), _words(ends, lane ^ 1, present)
    acc += product(word ^ key_at(secret, 15 + lane, seed, 1)) + neighbour
    length = u64(nbytes)
    low = _merge(acc, key_at(secret, 1 + lane, seed, 3), length * P64_1, LEAVES)
    high = _merge(acc, key_at(secret, 14 + lane, seed, 5), (length * P64_2) ^ 0xFFFFFFFFFFFFFFFF, LEAVES)
    add_up(total, low, high, live)
