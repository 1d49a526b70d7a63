"""The wire formats, bit for bit, in plain torch. Kernels are equal to this; it serves where they cannot run.

Rules:

- **Casts** between float32, bfloat16 and float16 go through float32 and round to nearest even, as IEEE 754 says;
  overflow gives infinity. A NaN becomes the one quiet NaN without sign of the wire type. Nothing is changed where the
  types agree: bits are copied.
- **absmax** of a group is the largest magnitude, compared as integers: a NaN counts as larger than infinity, so that
  neither is ever overlooked.
- **scale** = max(absmax, 1e-12) / 448, in float32 with IEEE division (448 is the largest finite e4m3). With ``pow2``:
  the least power of two that is not less, exponent in [-127, 127].
- **code** = e4m3(x / scale): IEEE division in float32, then to nearest even; beyond 448 it saturates, infinity too.
- A group of zeros gets the scale 1e-12 / 448 and codes 0: it dequantizes to zeros. Signs of zeros are kept.
- A group with a NaN or an infinity gets a NaN as its scale and NaN as every code (0x7F): such weights are useless, and
  saturating them silently would let an engine serve them.
- Blocks at the edges are shorter: the rest counts as zeros, which changes neither absmax nor the other codes.
"""

from __future__ import annotations

import torch

from syncline.scheduler.formats import Fp8Format

E4M3_MAX = 448.0
ABSMAX_FLOOR = 1e-12

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_NAN_CODE = 0x7F
_MAX_CODE = 0x7E
# e4m3 has 3 bits of mantissa where float32 has 23, and its exponents begin at -6, which float32 writes as 121.
_DROPPED = 20
_LEAST_NORMAL = 121 << 23
_REBIAS = 120 << 3

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types between which bits are defined here."""


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` (one of `FLOATS`) as ``dtype`` (one of them)."""
    if values.dtype == dtype:
        return values
    out = values.to(torch.float32).to(dtype)
    return torch.where(torch.isnan(out), torch.full((), float("nan"), dtype=dtype, device=out.device), out)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Float32 to e4m3 codes (uint8), by integer arithmetic alone. NaN gives 0x7F with the sign of the NaN."""
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    sign = (bits >> 24) & 0x80
    odd = (magnitude >> _DROPPED) & 1
    normal = ((magnitude + (1 << (_DROPPED - 1)) - 1 + odd) >> _DROPPED) - _REBIAS
    code = torch.where(magnitude >= _LEAST_NORMAL, normal, _subnormal(magnitude)).clamp(max=_MAX_CODE)
    code = torch.where(magnitude > _INFINITY, torch.full_like(code, _NAN_CODE), code)
    return (code | sign).to(torch.uint8)


def _subnormal(magnitude: torch.Tensor) -> torch.Tensor:
    """Multiples of 2**-9, to nearest even, of magnitudes below 2**-6."""
    exponent = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0).to(torch.int32) << 23)
    # the value is mantissa * 2**(exponent - 150), where subnormals of float32 count as exponent 1
    drop = (141 - exponent.clamp(min=1)).clamp(1, 26)
    odd = (mantissa >> drop) & 1
    return (mantissa + (torch.ones_like(drop) << (drop - 1)) - 1 + odd) >> drop


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """E4m3 codes (uint8) to float32, exactly."""
    code = codes.to(torch.int32)
    exponent, mantissa = (code >> 3) & 15, (code & 7).to(torch.float32)
    normal = ((exponent + 120) << 23).view(torch.float32) * (1 + mantissa / 8)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = torch.where((code & 127) == _NAN_CODE, torch.full_like(value, float("nan")), value)
    return torch.where(code >= 128, -value, value)


def absmax_bits(values: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each group of a matrix, as the bits of a float32.

    Args:
        values: (M, N) of one of `FLOATS`.
        group: rows and columns of a group.

    Returns:
        (ceil(M / rows), ceil(N / columns)) int32.
    """
    magnitude = values.to(torch.float32).contiguous().view(torch.int32) & _MAGNITUDE
    return _grouped(magnitude, group).amax(dim=(1, 3))


def _grouped(matrix: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """(M, N) as (groups down, rows, groups across, columns), padded with zeros."""
    down, across = (-(-size // step) for size, step in zip(matrix.shape, group, strict=True))
    padded = matrix.new_zeros((down * group[0], across * group[1]))
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.view(down, group[0], across, group[1])


def scale_of(absmax: torch.Tensor, *, pow2: bool) -> torch.Tensor:
    """Float32 scales from the bits of absmax (int32)."""
    floored = absmax.contiguous().view(torch.float32).clamp(min=ABSMAX_FLOOR)
    scale = floored / torch.full_like(floored, E4M3_MAX)
    if pow2:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, 254)
        # 2**-127 is a subnormal
        scale = torch.where(exponent > 0, exponent << 23, 1 << 22).to(torch.int32).view(torch.float32)
    return torch.where(absmax < _INFINITY, scale, torch.full_like(scale, float("nan")))


def quantize(values: torch.Tensor, how: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix.

    Args:
        values: (M, N) of one of `FLOATS`; any strides.
        how: the format.

    Returns:
        Codes, (M, N) float8_e4m3fn, and scales, float32 of `Fp8Format.scale_shape`.
    """
    shape = tuple(values.shape)
    group = how.group(shape)
    scale = scale_of(absmax_bits(values, group), pow2=how.pow2)
    codes = encode_with(values, spread(scale, shape, group))
    return codes.view(torch.float8_e4m3fn), scale.reshape(how.scale_shape(shape))


def encode_with(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of ``values`` with a float32 scale for each element."""
    codes = encode_e4m3(values.to(torch.float32) / scale)
    return torch.where(torch.isnan(scale), torch.full_like(codes, _NAN_CODE), codes)


def spread(scale: torch.Tensor, shape: tuple[int, ...], group: tuple[int, int]) -> torch.Tensor:
    """A scale for each element of a matrix, from one for each group: (groups down, groups across) to ``shape``."""
    rows = torch.arange(shape[0], device=scale.device) // group[0]
    columns = torch.arange(shape[1], device=scale.device) // group[1]
    return scale[rows[:, None], columns[None, :]]


def dequantize(codes: torch.Tensor, scale: torch.Tensor, how: Fp8Format) -> torch.Tensor:
    """What a reader computes with: (M, N) float32, each a code times its scale."""
    shape = tuple(codes.shape)
    group = how.group(shape)
    grid = scale.reshape(tuple(-(-size // step) for size, step in zip(shape, group, strict=True)))
    return decode_e4m3(codes.view(torch.uint8)) * spread(grid, shape, group)
