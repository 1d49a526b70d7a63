"""Every bit pattern through the kernels' rounding, and quotients where a product with the reciprocal would go wrong."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from syncline.scheduler.formats import Fp8Format
from syncline.scheduler.programs import Leaves
from syncline.stages.kernels import reference
from syncline.stages.kernels.language import jit, tl
from syncline.stages.kernels.rounding import bits_of, largest_of, reduced
from syncline.stages.kernels.views import Part, Piece, Quantized, View

NO_LEAVES = Leaves(item_uid=0, first=0, blocks=1, block_nbytes=0, leaf_nbytes=4096)


def aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    room = torch.zeros(nbytes + 256, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


def run(kernels, part: Part, nbytes: int) -> torch.Tensor:
    bucket = aligned(nbytes, kernels.device)
    recipe = kernels.assemble.BucketKernels([part], kernels.device, backend="triton", verify=False)
    kernels.assemble.assemble(bucket, recipe)
    return bucket


def quantized(kernels, matrix: torch.Tensor, how: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales by kernels."""
    rows, columns = matrix.shape
    at = -(-rows * columns // 256) * 256
    part = Part(
        offset=0, shape=(rows, columns), dtype=torch.float8_e4m3fn, pieces=(Piece(view=View.of(matrix)),), leaves=NO_LEAVES,
        quantized=Quantized(how=how, scale_offset=at, scale_leaves=NO_LEAVES),
    )  # fmt: skip
    shape = how.scale_shape(matrix.shape)
    bucket = run(kernels, part, at + 4 * int(np.prod(shape)))
    return bucket[: rows * columns].view(rows, columns), bucket[at:].view(torch.float32).view(shape)


def check(kernels, matrix: torch.Tensor, how: Fp8Format) -> None:
    matrix = matrix.to(kernels.device)
    codes, scales = quantized(kernels, matrix, how)
    expected, expected_scales = reference.quantize(matrix, how)
    assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))
    assert torch.equal(codes, expected.view(torch.uint8))


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def float32_edges() -> torch.Tensor:
    """Around every power of two and every tie of the two narrow types, with both signs, NaNs and infinities."""
    bits = []
    for exponent in range(256):
        for mantissa in (
            0,
            1,
            0x7FFFFF,
            0x400000,
            0x8000,
            0x18000,
            0x7FFF,
            0x8001,
            0x1000,
            0x3000,
            0xFFF,
            0x1001,
            0x17FFF,
            0x7F8000,
        ):
            bits += [exponent << 23 | mantissa, (exponent << 23 | mantissa) | 1 << 31]
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


@pytest.mark.parametrize("to", reference.FLOATS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_casts_of_every_pattern(kernels, source: str, to: torch.dtype) -> None:
    values = float32_edges() if source == "float32" else all_halves(getattr(torch, source))
    values = values.to(kernels.device)
    row = values.view(1, -1)
    nbytes = values.numel() * to.itemsize
    part = Part(offset=0, shape=tuple(row.shape), dtype=to, pieces=(Piece(view=View.of(row)),), leaves=NO_LEAVES)
    got = run(kernels, part, nbytes)
    expected = values if values.dtype == to else reference.cast(values, to)
    assert torch.equal(got, expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_every_pattern(kernels, dtype: torch.dtype) -> None:
    """Where the largest magnitude is 448 the scale is 1, and codes are those of the values themselves."""
    values = all_halves(dtype)
    values = torch.where(values.abs() <= 448, values, torch.full_like(values, 448)).reshape(-1, 128)
    check(kernels, values, Fp8Format(grouping="tensor"))
    assert reference.quantize(values, Fp8Format(grouping="tensor"))[1].item() == 1


@pytest.mark.parametrize("grouping", ["block", "channel", "tensor"])
@pytest.mark.parametrize("absmax", [448.0, 1.0, 0.37182, 3.0e38, 2.3e-13, 5.1e-38])
def test_quotients_at_ties(kernels, grouping: str, absmax: float) -> None:
    """Multiples of the scale that lie at ties, and their neighbours: where a product with the reciprocal would go wrong."""
    scale = reference.scale_of(torch.tensor([absmax]).view(torch.int32), pow2=False)
    codes = reference.decode_e4m3(torch.arange(127, dtype=torch.int32).to(torch.uint8))
    ties = ((codes[1:].double() + codes[:-1].double()) / 2 * scale.double()).to(torch.float32)
    bits = ties.view(torch.int32)
    near = torch.cat([(bits + step).clamp(min=0) for step in range(-4, 5)]).view(torch.float32)
    row = torch.cat([near, -near, torch.tensor([absmax])])
    row = row[row.abs() <= absmax]
    room = torch.zeros(-(-row.numel() // 64) * 64)
    room[: row.numel()] = row
    matrix = room.view(-1, 64)
    if grouping == "channel":
        matrix = torch.cat([matrix, torch.full((matrix.shape[0], 1), absmax)], dim=1)
    block = (64, 64) if grouping == "block" else (128, 128)
    check(kernels, matrix, Fp8Format(grouping=grouping, block=block))


def test_products_alone_would_be_wrong() -> None:
    """The ties of the test above are the hard case: without dividing again, some codes would differ."""
    scales = (torch.rand(500, generator=torch.Generator().manual_seed(0)) + 0.1) / 448
    codes = reference.decode_e4m3(torch.arange(127, dtype=torch.int32).to(torch.uint8))
    ties = ((codes[1:].double() + codes[:-1].double()) / 2 * scales[:, None].double()).to(torch.float32)
    near = torch.cat([ties.view(torch.int32) + step for step in range(-4, 5)], dim=1).view(torch.float32)
    product, quotient = near * (1 / scales[:, None]), near / scales[:, None]
    assert not torch.equal(reference.encode_e4m3(product), reference.encode_e4m3(quotient))


def nearest(value: Fraction) -> np.float32:
    """A fraction as float32, by exact comparison with the halves between neighbours; to even at a tie."""
    near = np.float32(float(value))
    around = sorted({np.nextafter(near, np.float32(side * np.inf)) for side in (-1, 1)} | {near})
    return min(around, key=lambda one: (abs(Fraction(float(one)) - value), int(one.view(np.int32)) & 1))


def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


@given(st.integers(1, 2**24 - 1), st.integers(2**23, 2**24 - 1), st.integers(-30, 30))
def test_two_steps_from_the_product_are_ieee_division(numerator: int, divisor: int, exponent: int) -> None:
    """What `quotient` relies on, for single numbers, with exact fractions."""
    x, s = np.float32(numerator), np.float32(np.ldexp(np.float32(divisor), exponent))
    reciprocal = np.float32(1) / s
    result = x * reciprocal
    for _ in range(2):
        rest = fused(result, s, -x)
        result = fused(rest, -reciprocal, result) if rest else result
    assert result == nearest(Fraction(float(x)) / Fraction(float(s))) == x / s


@pytest.mark.parametrize("grouping", ["block", "channel"])
@pytest.mark.parametrize("dtype", reference.FLOATS)
def test_quotients_of_every_size(kernels, grouping: str, dtype: torch.dtype) -> None:
    """Groups of every size, and in each magnitudes down to nothing: zeros of both signs, and what is subnormal."""
    generator = torch.Generator().manual_seed(3)
    limits = torch.finfo(dtype)
    sizes = torch.logspace(math.log2(limits.tiny) - 9, math.log2(limits.max) - 0.01, 64, base=2.0, dtype=torch.float64)
    falls = torch.logspace(0, -45, 64, base=2.0, dtype=torch.float64)
    matrix = sizes[:, None] * falls * (torch.rand(64, 64, generator=generator, dtype=torch.float64) + 1) / 2
    matrix *= torch.where(torch.rand(64, 64, generator=generator) < 0.5, -1.0, 1.0)
    matrix[::5, 3], matrix[::5, 4] = 0.0, -0.0
    for rows in (matrix, matrix.flip(0)):
        check(kernels, rows.to(dtype), Fp8Format(grouping=grouping, block=(16, 16)))


@pytest.mark.parametrize("seed", range(3))
def test_random_blocks(kernels, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(128, 256, generator=generator).to(reference.FLOATS[seed])
    check(kernels, matrix, Fp8Format(grouping="block", pow2=seed == 2))


@jit
def _three_ways(tile: tl.tensor, out: tl.tensor) -> None:
    value = tl.load(tile + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :])
    tl.store(out, reduced(value))
    tl.store(out + 1, largest_of(value))
    tl.store(out + 2, tl.max(tl.max(bits_of(value) & 0x7FFFFFFF, axis=1), axis=0))


@pytest.mark.parametrize("poison", [0.0, -0.0, float("nan"), float("inf"), -3e38])
def test_the_largest_of_a_tile_is_the_same_by_instructions_and_by_bits(kernels, poison: float) -> None:
    """The interpreter takes the one, a GPU the other."""
    tile = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).to(kernels.device)
    tile[7, 3] = poison
    out = torch.zeros(3, dtype=torch.int32, device=kernels.device)
    _three_ways[(1,)](tile, out)
    expected = tile.abs().max().view(torch.int32).item()
    assert out.tolist() == [expected] * 3 or (math.isnan(poison) and out.min().item() > 0x7F800000)
