"""Wire formats against independent oracles: exact fractions, numpy, torch's own conversions, transformers' own rule."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.scheduler import formats
from syncline.scheduler.formats import Fp8Format, QuantRules, format_of_target, parse_format
from syncline.stages.kernels import plain, reference

ALL = [
    Fp8Format(grouping=grouping, pow2=pow2, block=block)
    for grouping, block in (("block", (128, 128)), ("block", (16, 32)), ("channel", (128, 128)), ("tensor", (128, 128)))
    for pow2 in (False, True)
]


def e4m3_value(code: int) -> Fraction:
    """By the definition of the format: bias 7, 3 bits of mantissa, no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


VALUES = [e4m3_value(code) for code in range(127)]


def nearest_code(value: Fraction) -> int:
    """To nearest, ties to the even code, saturating. The oracle: a search among all values, no bit is shifted."""
    size = abs(value)
    right = min(bisect_left(VALUES, size), 126)
    left = max(right - 1, 0)
    below, above = size - VALUES[left], VALUES[right] - size
    return left if abs(below) < abs(above) or (abs(below) == abs(above) and left % 2 == 0) else right


def edges() -> torch.Tensor:
    """Every value of e4m3, every midpoint, and the float32 numbers next to each."""
    points = [float(v) for v in VALUES] + [float((a + b) / 2) for a, b in pairwise(VALUES)]
    points += [449.0, 463.99997, 464.0, 464.00003, 480.0, 1e30, 2.0**-149, 2.0**-126, 2.0**-10 * (1 + 2.0**-23)]
    at = np.array(points, dtype=np.float32)
    every = np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(0))])
    return torch.from_numpy(np.concatenate([every, -every]))


def all_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_codes_are_the_nearest_by_exact_fractions() -> None:
    values = edges()
    codes = reference.encode_e4m3(values)
    for value, code in zip(values.tolist(), codes.tolist(), strict=True):
        assert code & 127 == nearest_code(Fraction(value)), value
        assert code >> 7 == int(np.signbit(value)), value


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_codes_of_any_float32(bits: int) -> None:
    value = torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32).view(torch.float32)
    (code,) = reference.encode_e4m3(value).tolist()
    if torch.isnan(value):
        assert code & 127 == 127
    elif torch.isinf(value):
        assert code & 127 == 126
    else:
        assert code & 127 == nearest_code(Fraction(value.item()))


def test_torch_agrees_up_to_464() -> None:
    values = torch.cat([edges(), all_bf16().to(torch.float32)])
    ours, theirs = reference.encode_e4m3(values), values.to(torch.float8_e4m3fn).view(torch.uint8)
    same = (values.abs() <= 464) | values.isnan()
    assert torch.equal(ours[same], theirs[same])
    assert torch.all(ours[~same] & 127 == 126)
    assert torch.all(theirs[~same] & 127 >= 126), "beyond, torch saturates or makes a NaN, by its version and its vector unit"


def test_decoding_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    ours, theirs = reference.decode_e4m3(codes), codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(ours.nan_to_num(nan=12345.0), theirs.nan_to_num(nan=12345.0))
    assert ours.view(torch.int32)[128] == -(2**31), "the sign of zero is kept"
    finite = codes[(codes & 127) != 127]
    assert torch.equal(reference.encode_e4m3(reference.decode_e4m3(finite)), finite)


@pytest.mark.parametrize(("dtype", "nan"), [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)])
def test_casts_round_to_nearest_even(dtype: torch.dtype, nan: int) -> None:
    rng = np.random.default_rng(1)
    bits = np.concatenate([rng.integers(0, 2**32, 20000, dtype=np.uint32), np.arange(0, 2**32, 2**15 - 1, dtype=np.uint32)])
    values = torch.from_numpy(bits.view(np.float32).copy())
    got = reference.cast(values, dtype).view(torch.int16).numpy().view(np.uint16)
    with np.errstate(over="ignore"):
        expected = values.numpy().astype(np.float16).view(np.uint16)
    if dtype == torch.bfloat16:
        wide = bits.astype(np.uint64)
        expected = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    expected[np.isnan(values.numpy())] = nan
    assert np.array_equal(got, expected)


def test_bits_are_kept_where_nothing_is_cast() -> None:
    values = torch.tensor([0x7FA0, -1, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert reference.cast(values, torch.bfloat16) is values


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
@given(rows=st.integers(1, 40), columns=st.integers(1, 70), seed=st.integers(0, 2**20), spread=st.integers(0, 30))
@settings(max_examples=15)
def test_quantizing_by_definition(how: Fp8Format, rows: int, columns: int, seed: int, spread: int) -> None:
    """Group by group, in exact arithmetic: rounding to float32 and to e4m3 are the only inexact steps, and are searched for."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-spread, spread + 1, (rows, columns), generator=generator)
    )
    codes, scales = reference.quantize(values, how)
    assert codes.shape == values.shape
    assert scales.shape == how.scale_shape(values.shape)
    down, across = how.group(values.shape)
    grid = scales.reshape(-(-rows // down), -(-columns // across))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            group = values[i * down : (i + 1) * down, j * across : (j + 1) * across]
            scale = expected_scale(group, pow2=how.pow2)
            assert Fraction(grid[i, j].item()) == scale
            got = codes.view(torch.uint8)[i * down : (i + 1) * down, j * across : (j + 1) * across].reshape(-1)
            for k in range(0, got.numel(), max(1, got.numel() // 16)):
                quotient = nearest_float32(Fraction(group.reshape(-1)[k].item()) / scale)
                assert got[k].item() & 127 == nearest_code(quotient)


def nearest_float32(value: Fraction) -> Fraction:
    """Of a number that is not too small: the mantissa's integer, by Python's own rounding of fractions (ties to even)."""
    if value == 0:
        return value
    size, exponent = abs(value), -149
    while size / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    return Fraction(round(value / Fraction(2) ** exponent)) * Fraction(2) ** exponent


def expected_scale(group: torch.Tensor, *, pow2: bool) -> Fraction:
    largest = max(Fraction(group.abs().max().item()), Fraction(float(np.float32(1e-12))))
    scale = nearest_float32(largest / 448)
    if not pow2:
        return scale
    power = Fraction(1, 2**127)
    while power < scale:
        power *= 2
    return power


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
def test_zeros_give_no_nan(how: Fp8Format) -> None:
    values = torch.zeros(200, 130, dtype=torch.bfloat16)
    values[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    codes, scales = reference.quantize(values, how)
    assert torch.equal(codes.view(torch.uint8)[0, :3], torch.tensor([128, 0, 128], dtype=torch.uint8))
    assert torch.all((scales > 0) & scales.isfinite())
    assert torch.all(reference.dequantize(codes, scales, how) == 0)
    if not how.pow2:
        assert torch.all(scales == torch.tensor(1e-12) / 448)


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_is_nan_as_a_whole_and_no_other(how: Fp8Format, poison: float) -> None:
    clean = torch.randn(150, 300, generator=torch.Generator().manual_seed(2))
    values = clean.clone()
    values[140, 290] = poison
    codes, scales = reference.quantize(values, how)
    down, across = how.group(values.shape)
    hit = torch.zeros(150, 300, dtype=torch.bool)
    hit[140 // down * down : 140 // down * down + down, 290 // across * across : 290 // across * across + across] = True
    assert torch.all(codes.view(torch.uint8)[hit] == 0x7F)
    assert torch.all(reference.dequantize(codes, scales, how).isnan() == hit)
    assert torch.equal(codes.view(torch.uint8)[~hit], reference.quantize(clean, how)[0].view(torch.uint8)[~hit])
    assert scales.isnan().sum() == 1


@given(rows=st.sampled_from([1, 15, 16, 17, 127, 128, 129, 192]), columns=st.sampled_from([1, 31, 32, 33, 128, 192]))
@settings(max_examples=20)
def test_edges_are_padded_with_zeros_and_cropped(rows: int, columns: int) -> None:
    how = Fp8Format(grouping="block", block=(16, 32))
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    padded = torch.zeros(-(-rows // 16) * 16, -(-columns // 32) * 32)
    padded[:rows, :columns] = values
    codes, scales = reference.quantize(values, how)
    padded_codes, padded_scales = reference.quantize(padded, how)
    assert torch.equal(codes.view(torch.uint8), padded_codes.view(torch.uint8)[:rows, :columns])
    assert torch.equal(scales, padded_scales)


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from(reference.FLOATS), rows=st.sampled_from([1, 127, 129]))
@settings(max_examples=10)
def test_plain_torch_is_the_reference(how: Fp8Format, seed: int, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 140, generator=generator) * torch.exp2(torch.randint(-12, 12, (rows, 140), generator=generator))
    values = values.to(dtype).t().contiguous().t()
    for got, expected in zip(plain.quantize(values, how), reference.quantize(values, how), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("pow2", [False, True])
def test_plain_torch_is_the_reference_on_every_bf16(pow2: bool) -> None:
    values = all_bf16().reshape(256, 256)
    finite = torch.where(values.abs() < 1e4, values, torch.zeros_like(values))
    for matrix in (values, finite, finite.t()):
        for how in (Fp8Format(grouping="block", block=(16, 16), pow2=pow2), Fp8Format(grouping="tensor", pow2=pow2)):
            for got, expected in zip(plain.quantize(matrix, how), reference.quantize(matrix, how), strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_error_of_a_round_trip_is_half_a_step() -> None:
    how = Fp8Format(grouping="block")
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(3))
    codes, scales = reference.quantize(values, how)
    back = reference.dequantize(codes, scales, how)
    each = reference.spread(scales, (300, 200), (128, 128))
    # half of the last place of the code's value, which is at most a 16th of it, or half a subnormal step
    assert torch.all((back - values).abs() <= (back.abs() / 16).maximum(each * 2.0**-10) * 1.0001)


# names, shapes, rules


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
def test_names_are_read_back(how: Fp8Format) -> None:
    assert parse_format(how.name) == how
    with pytest.raises(ValueError, match="no wire format"):
        parse_format(how.name + "x")


@pytest.mark.parametrize(
    ("name", "shape", "scale", "scale_shape"),
    [
        ("fp8_e4m3:128x128", (192, 300), "m.q_proj.weight_scale_inv", (2, 3)),
        ("fp8_e4m3:128x128:pow2", (1, 1), "m.q_proj.weight_scale_inv", (1, 1)),
        ("fp8_e4m3:channel", (192, 300), "m.q_proj.weight_scale", (192, 1)),
        ("fp8_e4m3:tensor", (192, 300), "m.q_proj.weight_scale", (1,)),
    ],
)
def test_scales_have_the_names_and_shapes_of_checkpoints(name, shape, scale, scale_shape) -> None:
    how = parse_format(name)
    assert how.scale_name("m.q_proj.weight") == scale
    assert how.scale_shape(shape) == scale_shape
    assert format_of_target("m.q_proj.weight", shape, {scale: (scale_shape, "float32")}).grouping == how.grouping


def test_a_target_may_drop_axes_of_one_element() -> None:
    assert format_of_target("w", (7, 9), {"w_scale": ((), "float32")}).grouping == "tensor"
    assert format_of_target("w", (7, 9), {"w_scale": ((7,), "float32")}).grouping == "channel"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "no scale"),
        ({"other_scale": ((1,), "float32")}, "no scale"),
        ({"w_scale": ((1,), "float32"), "w_scale_inv": ((2, 3), "float32")}, "two scales"),
        ({"w_scale_inv": ((3, 2), "float32")}, "shape"),
        ({"w_scale": ((2, 3), "float32")}, "shape"),
        ({"w_scale_inv": ((2, 3), "bfloat16")}, "bfloat16"),
    ],
)
def test_an_fp8_weight_without_its_scale_is_refused(scales, message) -> None:
    with pytest.raises(ValueError, match=message):
        format_of_target("w", (192, 300), scales)


LLAMA = {
    "model.embed_tokens.weight": (1000, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_norm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.mlp.gate.weight": (8, 64),
    "model.layers.0.mlp.gate_proj.weight": (128, 64),
    "model.layers.0.mlp.experts.3.down_proj.weight": (64, 128),
    "model.layers.0.mlp.shared_expert_gate.weight": (1, 64),
    "model.layers.10.self_attn.q_proj.weight": (64, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (1000, 64),
}


LAYER_0 = ["0.self_attn.q_proj", "0.self_attn.o_proj", "0.mlp.gate_proj", "0.mlp.experts.3.down_proj"]


@pytest.mark.parametrize(
    ("keep", "quantized"),
    [
        ((), [*LAYER_0, "10.self_attn.q_proj"]),
        (("model.layers.0",), ["10.self_attn.q_proj"]),
        (("model.layers.1",), [*LAYER_0, "10.self_attn.q_proj"]),
        (("o_proj", r"model.layers.\d+.mlp"), ["0.self_attn.q_proj", "10.self_attn.q_proj"]),
    ],
)
def test_who_is_quantized(keep, quantized) -> None:
    rules = QuantRules.from_config(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": list(keep), "fmt": "e4m3"}
    )
    travels = rules.wire(LLAMA)
    expected = [f"model.layers.{name}.weight{end}" for name in quantized for end in ("", "_scale_inv")]
    assert list(travels) == expected
    assert all(dtype == (formats.SCALES if name.endswith("_inv") else formats.CODES) for name, (_, dtype) in travels.items())


def test_a_list_of_modules_to_convert() -> None:
    rules = QuantRules(
        format=Fp8Format(grouping="tensor"), only=("lm_head", "q_proj"), modules_to_not_convert=("model.layers.10",)
    )
    assert [name for name, shape in LLAMA.items() if rules.quantizes(name, shape)] == [
        "model.layers.0.self_attn.q_proj.weight", "lm_head.weight",
    ]  # fmt: skip


PATTERNS = ["layer.1", "layer.*", "mlp.gate", "fc1", "a.b|c", "lm_head", "model.layers.1.", "q_proj"]
MODULES = [
    "layer.1.attn", "layer.11.attn", "mlp.gate_proj", "mlp.gate", "x.fc1", "c.d", "cd", "lm_head", "model.layers.1.q_proj",
]  # fmt: skip


@given(pattern=st.sampled_from(PATTERNS), module=st.sampled_from(MODULES))
def test_patterns_mean_what_they_mean_to_transformers(pattern: str, module: str) -> None:
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils")
    rules = QuantRules(format=Fp8Format(grouping="tensor"), only=(), modules_to_not_convert=(pattern,))
    assert formats.names_module(pattern, module) is not utils.should_convert_module(module, [pattern])
    assert not rules.quantizes(f"{module}.weight", (2, 2))


def test_names_of_scales_must_be_free() -> None:
    rules = QuantRules(format=Fp8Format(grouping="tensor"))
    with pytest.raises(ValueError, match=r"a\.q_proj\.weight_scale"):
        rules.wire({"a.q_proj.weight": (2, 2), "a.q_proj.weight_scale": (1,)})


def test_a_config_that_is_not_built_names_all_problems() -> None:
    with pytest.raises(ValueError, match=r"quant_method.*fmt.*scale_fmt.*weight_block_size"):
        QuantRules.from_config({"quant_method": "awq", "fmt": "e5m2", "scale_fmt": "int", "weight_block_size": [128]})
    assert QuantRules.from_config({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}).format.pow2
