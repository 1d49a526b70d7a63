"""Rounding to the wire types, as bit patterns, for kernels to call.

Nothing here relies on a cast to bfloat16 or float8: Triton's interpreter and its compiler do not agree on those. The
operations used are integer ones, and IEEE additions, divisions and fused multiplications; they give the same bits
everywhere. The GPU's own conversion to e4m3 is used where Triton makes it one instruction, which was checked to agree.

To nearest even at ``n`` bits less of mantissa: add half of the last place that stays, less one, plus that place's own bit,
then drop the rest. Subnormals of the narrow type are instead rounded by one IEEE addition: a number whose last place is
the subnormals' step is added, so that the sum's mantissa counts steps, to nearest even.
"""

from __future__ import annotations

from .language import INTERPRETED, constant, jit, tl

FLOAT32 = constant(0)
BFLOAT16 = constant(1)
FLOAT16 = constant(2)

MAGNITUDE = constant(0x7FFFFFFF)
INFINITY = constant(0x7F800000)
NAN = constant(0x7FC00000)

_INTERPRETED = constant(INTERPRETED)


@jit
def bits_of(value: tl.tensor) -> tl.tensor:
    """The bits of a float32."""
    return value.to(tl.int32, bitcast=True)


@jit
def float_of(bits: tl.tensor) -> tl.tensor:
    """The float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)


@jit
def pointer_to(address: tl.tensor, TYPE: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """``address`` as a pointer. ``VECTOR`` tells the compiler that it is aligned to 16 bytes, which it cannot see through
    the conversion; without that it reads element by element.
    """
    pointer = address.to(tl.pointer_type(TYPE))
    if VECTOR:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def load_float32(address: tl.tensor, offset: tl.tensor, mask: tl.tensor, TYPE: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """Elements of one of the three types as float32, exactly; 0 where masked."""
    if TYPE == FLOAT32:
        return tl.load(pointer_to(address, tl.float32, VECTOR) + offset, mask=mask, other=0.0)
    elif TYPE == BFLOAT16:
        half = tl.load(pointer_to(address, tl.int16, VECTOR) + offset, mask=mask, other=0)
        return float_of(half.to(tl.int32) << 16)
    else:
        return tl.load(pointer_to(address, tl.float16, VECTOR) + offset, mask=mask, other=0.0).to(tl.float32)


@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def reduced(tile: tl.tensor) -> tl.tensor:
    """`largest_of`, by one instruction for each pair of elements."""
    return bits_of(tl.reduce(tl.reduce(tl.abs(tile), 1, _larger), 0, _larger)) & MAGNITUDE


@jit
def largest_of(tile: tl.tensor) -> tl.tensor:
    """The largest magnitude in a tile, as bits; those of a NaN if there is one.

    The interpreter takes a second for `reduced` of a tile; magnitudes are in the order of their bits, NaNs above all.
    """
    if _INTERPRETED:
        return tl.max(tl.max(bits_of(tile) & MAGNITUDE, axis=1), axis=0)
    else:
        return reduced(tile)


@jit
def store_rounded(
    value: tl.tensor, address: tl.tensor, offset: tl.tensor, mask: tl.tensor, TYPE: tl.constexpr, VECTOR: tl.constexpr
) -> None:
    """Float32 values to one of the three types."""
    bits = bits_of(value)
    magnitude = bits & MAGNITUDE
    nan = magnitude > INFINITY
    if TYPE == FLOAT32:
        out = tl.where(nan, NAN, bits)
        tl.store(pointer_to(address, tl.int32, VECTOR) + offset, out, mask=mask)
    elif TYPE == BFLOAT16:
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        out = tl.where(nan, 0x7FC0, rounded | ((bits >> 16) & 0x8000))
        tl.store(pointer_to(address, tl.int16, VECTOR) + offset, out.to(tl.int16), mask=mask)
    else:
        normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
        tiny = bits_of(float_of(tl.minimum(magnitude, 113 << 23)) + 0.5) - 0x3F000000
        rounded = tl.minimum(tl.where(magnitude >= (113 << 23), normal, tiny), 0x7C00)
        out = tl.where(nan, 0x7E00, rounded | ((bits >> 16) & 0x8000))
        tl.store(pointer_to(address, tl.int16, VECTOR) + offset, out.to(tl.int16), mask=mask)


@jit
def encode_e4m3(value: tl.tensor) -> tl.tensor:
    """Float32 values of at most 448 in magnitude to e4m3 codes (int32), for GPUs that have no conversion of their own.

    ``2**(e + 20)`` has as its last place the step between e4m3 numbers of exponent ``e``: added to a magnitude of that
    exponent, the sum's mantissa counts steps, rounded to nearest even by the addition. Below ``2**-6`` the step stays that
    of ``e = -6``, so that subnormals are no special case.
    """
    bits = bits_of(value)
    magnitude = bits & MAGNITUDE
    exponent = tl.maximum(magnitude & INFINITY, 121 << 23)
    anchor = exponent + (20 << 23)
    steps = bits_of(float_of(magnitude) + float_of(anchor)) - anchor
    return (steps + (exponent >> 20) - (121 << 3)) | ((bits >> 24) & 0x80)


@jit
def _exact(value: tl.tensor) -> tl.tensor:
    """As float64; what is not finite as zero, for nothing is made of it, and numpy would warn of it."""
    return tl.where(tl.abs(value) < float("inf"), value, 0.0).to(tl.float64)


@jit
def fused(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """``a * b + c``, rounded once (float32).

    The interpreter's own rounds twice. There the sum is rounded to odd in float64, of which the last rounding, to 24 bits,
    makes what it would make of the exact one (Boldo and Melquiond, 2008); the product is exact in float64.
    """
    if _INTERPRETED:
        product, term = _exact(a) * _exact(b), _exact(c)
        total = product + term
        part = total - product
        lost = (product - (total - part)) + (term - part)
        bits = total.to(tl.int64, bitcast=True)
        odd = tl.where((lost > 0) == (total > 0), bits + 1, bits - 1)
        bits = tl.where((lost != 0) & (bits % 2 == 0), odd, bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@jit
def quotient(minus: tl.tensor, scale: tl.tensor, reciprocal: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """``-minus / scale`` as IEEE 754 rounds it, without a division for each element.

    The product with the reciprocal is within 2 last places of the quotient. The residual of a quotient that is off by less
    than a last place is exact (`fused`), so the first step leaves an error of little more than half a last place. From
    there the second leaves the correctly rounded quotient: Markstein's theorem (IBM J. Res. Dev. 34, 1990), which asks
    for a correctly rounded reciprocal, for a quotient off by less than one last place, and that nothing overflows or
    underflows:

    - magnitudes are at most 448 scales, and scales are from 2**-49 to 2**120, as are their reciprocals;
    - the last place of a residual is that of the quotient times that of the scale. Quotients from 2**-11 on leave 2**-106
      or more, which float32 holds. Smaller ones have code 0 and stay smaller: an inexact residual, at most 2**-150 off,
      changes them by at most 2**-101.

    The signs are such that a negative zero stays one, and that nothing has to be negated: the compiler would keep both.

    Args:
        minus: the negative of what is divided (float32), of any shape.
        scale: float32, as `scale_of` gives them.
        reciprocal: -1 / scale, correctly rounded.
        STEPS: 2; 0 if scales are powers of two, whose products with a reciprocal are exact.
    """
    result = minus * reciprocal
    for _ in tl.static_range(STEPS):
        result = fused(fused(result, scale, minus), reciprocal, result)
    return result


@jit
def codes_of(minus: tl.tensor, scale: tl.tensor, STEPS: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """e4m3 codes (uint8) of ``-minus / scale``; see `quotient`.

    ``HARDWARE``: round with the GPU's own conversion, which has the same results on finite values where it is made in one
    step (`launches.rounds_once`).
    """
    result = quotient(minus, scale, tl.div_rn(scale * 0.0 - 1.0, scale), STEPS)
    if HARDWARE:
        return result.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode_e4m3(result).to(tl.uint8)


@jit
def stored_scale(scale: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """What is stored as the scale of a group with this largest magnitude."""
    return tl.where(largest < INFINITY, scale, float_of(largest * 0 + NAN))


@jit
def scale_of(absmax: tl.tensor, POW2: tl.constexpr) -> tl.tensor:
    """Float32 scales from the bits of absmax (int32). Groups that are not finite get one as if they were zeros."""
    finite = tl.where(absmax < INFINITY, absmax, 0)
    floored = tl.maximum(float_of(finite), 1e-12)
    scale = tl.div_rn(floored, floored * 0.0 + 448.0)
    if POW2:
        bits = bits_of(scale)
        # above the floor scales are normal numbers far from the limits of the exponent
        scale = float_of(((bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)) << 23)
    return scale
