"""XXH3-128 of leaves of 1 to 240 bytes: XXH3 hashes these in one of five ways, by their length, without a chain of blocks.

A vector of leaves for each program; every way is computed with the others masked out. Such leaves are few and small
(scales of a whole tensor, biases of tiny models), so what counts is that they need no launch of their own and no trip to
the host.
"""

from __future__ import annotations

from .language import constant, jit, tl
from .mixing import LOW, MX2, P32_2, P64_1, P64_2, P64_4, SECRET, avalanche, avalanche_64, fold, high, u64
from .xxh3 import add_up

SHORT_FIELDS = 4
"""int64 values for each short leaf: address, is it relative to ``base``, nbytes, seed."""

SECRET_AT = tuple(int.from_bytes(SECRET[i : i + 8], "little") for i in range(len(SECRET) - 7))
"""Words of the secret from each of its bytes on."""

_FIELDS = constant(SHORT_FIELDS)


@jit
def _read(data: tl.tensor, offset: tl.tensor, mask: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """``COUNT`` bytes, little endian, from any address on. No word is touched that has none of them."""
    at = data + offset
    shift = u64(at & 7) * 8
    pointer = (at & -8).to(tl.pointer_type(tl.int64))
    first = u64(tl.load(pointer, mask=mask, other=0))
    more = u64(tl.load(pointer + 1, mask=mask & (shift + 8 * COUNT > 64), other=0))
    value = (first >> shift) | ((more << 1) << (63 - shift))
    if COUNT < 8:
        value = value & ((1 << (8 * COUNT)) - 1)
    return value


@jit
def _secret(secret: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Eight bytes of the secret: the same for all leaves."""
    return u64(tl.load(secret + offset))


@jit
def _swap32(value: tl.tensor) -> tl.tensor:
    return ((value & 0xFF) << 24) | ((value & 0xFF00) << 8) | ((value >> 8) & 0xFF00) | ((value >> 24) & 0xFF)


@jit
def _swap64(value: tl.tensor) -> tl.tensor:
    return (_swap32(value & LOW) << 32) | _swap32(value >> 32)


@jit
def _upto_3(data: tl.tensor, secret: tl.tensor, length: tl.tensor, seed: tl.tensor, mask: tl.tensor) -> tl.tensor:
    first = _read(data, 0, mask, 1)
    middle = _read(data, length >> 1, mask, 1)
    last = _read(data, length - 1, mask, 1)
    low = (first << 16) | (middle << 24) | last | (u64(length) << 8)
    swapped = _swap32(low)
    turned = ((swapped << 13) | (swapped >> 19)) & LOW
    flip_low = ((_secret(secret, 0) ^ _secret(secret, 4)) & LOW) + seed
    flip_high = ((_secret(secret, 8) ^ _secret(secret, 12)) & LOW) - seed
    return avalanche_64(low ^ flip_low), avalanche_64(turned ^ flip_high)


@jit
def _upto_8(data: tl.tensor, secret: tl.tensor, length: tl.tensor, seed: tl.tensor, mask: tl.tensor) -> tl.tensor:
    mixed = seed ^ (_swap32(seed & LOW) << 32)
    both = _read(data, 0, mask, 4) + (_read(data, length - 4, mask, 4) << 32)
    keyed = both ^ ((_secret(secret, 16) ^ _secret(secret, 24)) + mixed)
    factor = u64(length << 2) + P64_1
    low, upper = keyed * factor, high(keyed, factor)
    upper += low << 1
    low = low ^ (upper >> 3)
    low = (low ^ (low >> 35)) * MX2
    return low ^ (low >> 28), avalanche(upper)


@jit
def _upto_16(data: tl.tensor, secret: tl.tensor, length: tl.tensor, seed: tl.tensor, mask: tl.tensor) -> tl.tensor:
    flip_low = (_secret(secret, 32) ^ _secret(secret, 40)) - seed
    flip_high = (_secret(secret, 48) ^ _secret(secret, 56)) + seed
    first, last = _read(data, 0, mask, 8), _read(data, length - 8, mask, 8)
    keyed = first ^ last ^ flip_low
    low, upper = keyed * P64_1, high(keyed, keyed * 0 + P64_1)
    low += u64(length - 1) << 54
    last = last ^ flip_high
    upper += last + (last & LOW) * (P32_2 - 1)
    low = low ^ _swap64(upper)
    result, carried = low * P64_2, high(low, low * 0 + P64_2)
    return avalanche(result), avalanche(carried + upper * P64_2)


@jit
def _mix_16(
    data: tl.tensor, secret: tl.tensor, offset: tl.tensor, at: tl.tensor, seed: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    a = _read(data, offset, mask, 8) ^ (_secret(secret, at) + seed)
    b = _read(data, offset + 8, mask, 8) ^ (_secret(secret, at + 8) - seed)
    return fold(a, b)


@jit
def _mix_32(
    low: tl.tensor,
    upper: tl.tensor,
    data: tl.tensor,
    one: tl.tensor,
    two: tl.tensor,
    secret: tl.tensor,
    at: tl.tensor,
    seed: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Mix in 32 bytes, at ``one`` and ``two``, where ``mask`` says so."""
    new_low = low + _mix_16(data, secret, one, at, seed, mask)
    new_low = new_low ^ (_read(data, two, mask, 8) + _read(data, two + 8, mask, 8))
    new_upper = upper + _mix_16(data, secret, two, at + 16, seed, mask)
    new_upper = new_upper ^ (_read(data, one, mask, 8) + _read(data, one + 8, mask, 8))
    return tl.where(mask, new_low, low), tl.where(mask, new_upper, upper)


@jit
def _end(low: tl.tensor, upper: tl.tensor, length: tl.tensor, seed: tl.tensor) -> tl.tensor:
    mixed = low * P64_1 + upper * P64_4 + (u64(length) - seed) * P64_2
    return avalanche(low + upper), 0 - avalanche(mixed)


@jit
def _upto_128(data: tl.tensor, secret: tl.tensor, length: tl.tensor, seed: tl.tensor, mask: tl.tensor) -> tl.tensor:
    low = u64(length) * P64_1
    upper = low * 0
    for step in range(4):
        i = 3 - step
        low, upper = _mix_32(low, upper, data, 16 * i, length - 16 * i - 16, secret, 32 * i, seed, mask & (length > 32 * i))
    return _end(low, upper, length, seed)


@jit
def _upto_240(data: tl.tensor, secret: tl.tensor, length: tl.tensor, seed: tl.tensor, mask: tl.tensor) -> tl.tensor:
    low = u64(length) * P64_1
    upper = low * 0
    for i in range(4):
        low, upper = _mix_32(low, upper, data, 32 * i, 32 * i + 16, secret, 32 * i, seed, mask)
    low, upper = avalanche(low), avalanche(upper)
    for i in range(4, 7):
        low, upper = _mix_32(low, upper, data, 32 * i, 32 * i + 16, secret, 32 * i - 125, seed, mask & (length >= 32 * i + 32))
    low, upper = _mix_32(low, upper, data, length - 16, length - 32, secret, 103, 0 - seed, mask)
    return _end(low, upper, length, seed)


@jit
def short_leaves(base: tl.int64, leaves: tl.tensor, secret: tl.tensor, total: tl.tensor, LEAVES: tl.constexpr) -> None:
    """Add the digests of short leaves to ``total`` (4 int64).

    Args:
        base: address that relative leaves lie at.
        leaves: see `SHORT_FIELDS`; a multiple of ``LEAVES``, the last ones of 0 bytes.
        secret: the default secret as words (int64), one from each byte on (`SECRET_AT`).
        total: limbs of the sum.
    """
    row = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    leaf = leaves + row.to(tl.int64) * _FIELDS
    address = tl.load(leaf) + tl.load(leaf + 1) * base
    length = tl.load(leaf + 2)
    live = length > 0
    seed = u64(tl.load(leaf + 3))
    low, upper = _upto_3(address, secret, length, seed, live & (length <= 3))
    low_8, upper_8 = _upto_8(address, secret, length, seed, live & (length > 3) & (length <= 8))
    low_16, upper_16 = _upto_16(address, secret, length, seed, live & (length > 8) & (length <= 16))
    low_128, upper_128 = _upto_128(address, secret, length, seed, live & (length > 16) & (length <= 128))
    low_240, upper_240 = _upto_240(address, secret, length, seed, live & (length > 128))
    low, upper = tl.where(length > 3, low_8, low), tl.where(length > 3, upper_8, upper)
    low, upper = tl.where(length > 8, low_16, low), tl.where(length > 8, upper_16, upper)
    low, upper = tl.where(length > 16, low_128, low), tl.where(length > 16, upper_128, upper)
    low, upper = tl.where(length > 128, low_240, low), tl.where(length > 128, upper_240, upper)
    add_up(total, low, upper, live)
