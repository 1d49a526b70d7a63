"""bf16 weights go to targets that hold FP8: codes and scales arrive together, bit for bit, whatever is cut where.

What is expected is computed here, block by block in plain torch, apart from what the stages run.
"""

from __future__ import annotations

import pytest
import torch

from syncline.engine.errors import PlanError

FP8 = torch.float8_e4m3fn
FORMATS = {
    "block": ("fp8_e4m3:128x128", "_scale_inv"),
    "block-pow2": ("fp8_e4m3:128x128:pow2", "_scale_inv"),
    "small-block": ("fp8_e4m3:16x32", "_scale_inv"),
    "channel": ("fp8_e4m3:channel", "_scale"),
    "tensor": ("fp8_e4m3:tensor", "_scale"),
}


def quantized(weight, wire_format):
    """Codes and scales of a weight, one group after the other."""
    kind = wire_format.split(":")[1]
    rows, columns = weight.shape
    down, across = {"channel": (1, columns), "tensor": (rows, columns)}.get(kind) or map(int, kind.split("x"))
    scales = torch.empty(-(-rows // down), -(-columns // across))
    codes = torch.empty(rows, columns, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across)
            group = weight[place].float()
            scale = group.abs().max().clamp(min=1e-12) / torch.tensor(448.0)
            if wire_format.endswith("pow2"):
                scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            codes[place] = (group / scale).clamp(-448, 448).to(FP8)
            scales[i, j] = scale
    return codes, scales.reshape(-1) if kind == "tensor" else scales


def weights(shapes, *, seed=0, dtype=torch.bfloat16):
    """Weights over several orders of magnitude, with a block of zeros in each."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        spread = torch.exp2(torch.randint(-9, 3, (shape[0], 1), generator=generator).float())
        made[name] = (torch.randn(shape, generator=generator) * spread).to(dtype)
        made[name][:128, :128] = 0 if min(shape) > 128 else made[name][:128, :128]
    return made


def engine_side(whole, wire_format, suffix, kept=()):
    """What a target of this format holds when everything is right."""
    held = {}
    for name, tensor in whole.items():
        if name in kept or tensor.dim() != 2:
            held[name] = tensor
            continue
        held[name], held[name + suffix] = quantized(tensor, wire_format)
    return held


@pytest.fixture
def world(start_target, connect):
    return start_target, connect


SHAPES = {
    "a.q_proj.weight": (192, 256), "a.o_proj.weight": (256, 129), "b.up_proj.weight": (1, 300), "b.down_proj.weight": (300, 1),
    "c.gate_proj.weight": (127, 128), "c.small.weight": (3, 5),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
async def test_codes_and_scales_are_those_of_the_reference(world, kit, transport, landing, form):
    (start_target, connect), (wire_format, suffix) = world, FORMATS[form]
    whole = {**weights(SHAPES), "norm.weight": torch.arange(7, dtype=torch.bfloat16)}
    expected = engine_side(whole, wire_format, suffix)
    model = kit.Bag(kit.poisoned(expected))
    loader = kit.loader(model, movable=landing == "mapped")
    target = await start_target(loader)
    pusher = await connect(
        kit.row_shards(whole, 2), [target], transport=transport, landing=landing, wire_format=wire_format, bucket_bytes="64KiB"
    )
    for version in (1, 2):
        assert (await pusher.push_well(version)).ok
        assert kit.differing(model, expected) == []


async def test_formats_are_read_off_the_scales(start_target, connect, kit):
    """Each weight by its own scales; bf16, fp16 and float32 sources; what the target holds unquantized is only cast."""
    shapes = {"m.b.weight": (130, 140), "m.c.weight": (5, 140), "m.t.weight": (40, 40), "m.gate.weight": (64, 64)}
    whole = {name: weights({name: shape}, dtype=dtype)[name] for (name, shape), dtype in zip(
        shapes.items(), (torch.float16, torch.float32, torch.bfloat16, torch.float32), strict=True)}  # fmt: skip
    expected = {"m.gate.weight": whole["m.gate.weight"].bfloat16()}
    for name, form in (("m.b.weight", "block"), ("m.c.weight", "channel"), ("m.t.weight", "tensor")):
        expected |= engine_side({name: whole[name]}, *FORMATS[form])
    expected["m.c.weight_scale"] = expected["m.c.weight_scale"].reshape(-1)  # engines hold a scale a row without the 1, too
    expected["m.t.weight_scale"] = expected["m.t.weight_scale"].reshape(())
    model = kit.Bag(kit.poisoned(expected))
    pusher = await connect(kit.row_shards(whole, 3), [await start_target(model)])
    await pusher.push_well(1)
    assert kit.differing(model, expected) == []


async def test_every_bucket_size_gives_the_same_codes(start_target, connect, kit, transport, landing):
    """Codes and their scales stay together, however small buckets are: the same bytes, and the same digest."""
    whole = weights({"a.weight": (1400, 640), "b.weight": (96, 100)})
    expected = engine_side(whole, *FORMATS["block"])
    model = kit.Bag(kit.poisoned(expected))
    target = await start_target(kit.loader(model, movable=landing == "mapped"))
    digests, tasks = set(), []
    for version, size in enumerate((1, 255, 163840, 163841, 163939, 163940, 245760, 600_000, 900_000), start=1):
        for tensor in model.state_dict().values() if landing != "mapped" else ():
            kit.poison(tensor)
        pusher = await connect(kit.row_shards(whole, 2), [target], transport=transport, landing=landing, bucket_bytes=size)
        report = await pusher.push_well(version)
        assert kit.differing(model, expected) == [], size
        digests.add(report.digest)
        tasks.append(report.tasks)
        await pusher.close()
    assert len(digests) == 1
    assert tasks[0] == (2 if landing == "mapped" else 5)  # parts of 384 rows: as many groups as fit a leaf


async def test_what_is_not_finite_is_useless_by_its_scale(start_target, connect, kit):
    """A NaN or an infinity makes its group NaN, so that nobody serves it; its neighbours stay as they are."""
    whole = weights({"a.weight": (256, 256)})
    expected = engine_side(whole, *FORMATS["block"])
    whole["a.weight"][3, 4], whole["a.weight"][200, 130] = float("nan"), float("-inf")
    for rows, columns in ((slice(0, 128), slice(0, 128)), (slice(128, 256), slice(128, 256))):
        expected["a.weight"].view(torch.uint8)[rows, columns] = 0x7F
        expected["a.weight_scale_inv"][rows.start // 128, columns.start // 128] = float("nan")
    model = kit.Bag(kit.poisoned(expected))
    await (await connect(kit.row_shards(whole, 2), [await start_target(model)])).push_well(1)
    assert kit.differing(model, expected) == []


async def test_quantized_and_plain_targets_side_by_side(start_target, connect, kit):
    whole = weights({"a.weight": (256, 200), "b.weight": (40, 200)})
    expected = engine_side(whole, *FORMATS["block"])
    small, large = kit.Bag(kit.poisoned(expected)), kit.Bag(kit.poisoned(whole))
    pusher = await connect(kit.row_shards(whole, 2), [await start_target(small), await start_target(large)])
    await pusher.push_well(1)
    assert kit.differing(small, expected) == []
    assert kit.differing(large, whole) == []


def tp_rank(kit, expected, slices, rank):
    """A rank that holds rows of each tensor, ``slices[name][rank]``."""
    held = {name: tensor[slices[name][rank]].clone() for name, tensor in expected.items()}
    layout = {
        name: kit.named_box(
            name, tuple(expected[name].shape), start=kit.box_of(expected[name], slices[name][rank]).start,
            size=tuple(tensor.shape),
        )
        for name, tensor in held.items()
    }  # fmt: skip
    model = kit.Bag(kit.poisoned(held))
    return model, held, kit.loader(model, layout=layout)


def halves(tensor, axis, at):
    lead = (slice(None),) * axis
    return [(*lead, slice(0, at)), (*lead, slice(at, tensor.shape[axis]))]


@pytest.mark.parametrize("route", ["auto", "direct", "gather"])
@pytest.mark.parametrize("sources", [1, 2, 3])
async def test_tensor_parallel_targets_take_their_groups(start_target, connect, kit, route, sources):
    """Column and row shards that end where blocks do, from source shards that do or don't."""
    whole = weights({"col.weight": (512, 200), "row.weight": (200, 384)})
    expected = engine_side(whole, *FORMATS["block"])
    cuts = {"col.weight": (0, 256), "col.weight_scale_inv": (0, 2), "row.weight": (1, 256), "row.weight_scale_inv": (1, 2)}
    slices = {name: halves(expected[name], *cut) for name, cut in cuts.items()}
    ranks = [tp_rank(kit, expected, slices, rank) for rank in (0, 1)]
    target = await start_target(*(loader for _, _, loader in ranks))
    pusher = await connect(kit.row_shards(whole, sources), [target], route=route)
    report = await pusher.push_well(1)
    for model, held, _ in ranks:
        assert kit.differing(model, held) == []
    if sources == 3:
        assert "groups" in report.routing.why or route == "gather"  # 171 rows a rank: blocks lie in two shards


# what is refused


def mended(expected, **changes):
    return {name: tensor for name, tensor in {**expected, **changes}.items() if tensor is not None}


REFUSED = {
    "no scale": ({"a.weight_scale_inv": None}, {}, "a.weight is FP8 at the target, with no scale beside it"),
    "two scales": ({"a.weight_scale": torch.ones(256, 1)}, {}, "with two scales beside it"),
    "wrong grid": ({"a.weight_scale_inv": torch.ones(3, 2)}, {}, "a.weight_scale_inv of shape (2, 2) (fp8_e4m3:128x128)"),
    "wrong type": ({"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.bfloat16)}, {}, "scales travel as float32"),
    "other format": ({}, {"wire_format": "fp8_e4m3:channel"}, "a.weight_scale of shape (256, 1) (fp8_e4m3:channel)"),
    "only casts": ({}, {"wire_format": "cast"}, "would take a quantization rule"),
    "left out": ({}, {"modules_to_not_convert": ("lm_head", "a")}, "a.weight: a target holds it as FP8, and modules_to_not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_does_not_go_together_is_refused(start_target, engines, kit, case):
    changes, config, text = REFUSED[case]
    whole = weights({"a.weight": (256, 200)})
    model = kit.Bag(kit.poisoned(mended(engine_side(whole, *FORMATS["block"]), **changes)))
    with pytest.raises(PlanError) as caught:
        await engines(kit.row_shards(whole, 2), [await start_target(model)], **config).connect()
    assert text in str(caught.value)


async def test_a_slice_that_cuts_a_block_is_refused_by_name(start_target, engines, kit):
    """128-blocks, 192 rows a rank: one scale would serve two ranks."""
    whole = weights({"a.weight": (384, 128)})
    expected = engine_side(whole, *FORMATS["block"])
    slices = {
        "a.weight": halves(expected["a.weight"], 0, 192),
        "a.weight_scale_inv": halves(expected["a.weight_scale_inv"], 0, 2),
    }
    target = await start_target(*(tp_rank(kit, expected, slices, rank)[2] for rank in (0, 1)))
    with pytest.raises(PlanError, match=r"a\.weight: target 0 rank 0 takes the box \[0:192, 0:128\].*128 rows and 128 columns"):
        await engines(kit.row_shards(whole, 2), [target]).connect()


async def test_scales_of_other_rows_are_refused(start_target, engines, kit):
    """Both ranks are whole by themselves, and hold each other's scales."""
    whole = weights({"a.weight": (256, 128)})
    expected = engine_side(whole, *FORMATS["block"])
    scales = halves(expected["a.weight_scale_inv"], 0, 1)[::-1]
    slices = {"a.weight": halves(expected["a.weight"], 0, 128), "a.weight_scale_inv": scales}
    target = await start_target(*(tp_rank(kit, expected, slices, rank)[2] for rank in (0, 1)))
    with pytest.raises(PlanError, match=r"a\.weight: target 0 rank \d takes (codes|scales) of it without the (codes|scales)"):
        await engines(kit.row_shards(whole, 2), [target]).connect()


@pytest.mark.parametrize(("form", "limit"), [("block", 128 * 1024), ("tensor", 256 * 1024)])
async def test_a_group_beyond_the_watermark_is_refused_by_name(start_target, engines, kit, form, limit):
    whole = weights({"big.weight": (300, 1000)})
    model = kit.Bag(kit.poisoned(engine_side(whole, *FORMATS[form])))
    target = await start_target(model)
    config = {"max_tmp_bytes": limit, "bucket_bytes": 4096, "landing": "streamed", "transport": "gloo"}
    with pytest.raises(PlanError, match=rf"(?s)big\.weight.*temporary bytes.*max_tmp_bytes of {limit}.*quantization group"):
        await engines(kit.row_shards(whole, 2), [target], **config).connect()


async def test_the_source_may_not_have_scales_of_its_own(start_target, engines, kit):
    whole = weights({"a.weight": (256, 200)})
    expected = engine_side(whole, *FORMATS["block"])
    model = kit.Bag(kit.poisoned(expected))
    whole["a.weight_scale_inv"] = torch.ones(2, 2)
    with pytest.raises(PlanError, match=r"a\.weight_scale_inv is a tensor of the source's own"):
        await engines(kit.row_shards(whole, 2), [await start_target(model)]).connect()
