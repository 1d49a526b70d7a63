"""What is handed on to SGLang: whole tensors, groups in one load, every tensor where its bytes are aligned."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.adapters.engines.sglang.buckets import Assembly, plan_buckets, together
from syncline.engine.errors import LoaderError
from syncline.engine.loader import Landed
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor

SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}


def manifest_of(tensors: dict[str, tuple[str, tuple[int, ...]]], optional: tuple[str, ...] = ()) -> Manifest:
    table = [Tensor(name=name, shape=shape, dtype=dtype) for name, (dtype, shape) in tensors.items()]
    pieces = [
        Piece(
            tensor=i,
            box=Box(start=(0,) * len(tensor.shape), shape=tensor.shape),
            buffer=i,
            offset=0,
            strides=tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))),
            dtype=tensor.dtype,
        )
        for i, tensor in enumerate(table)
    ]
    buffers = [Buffer(name=t.name, nbytes=math.prod(t.shape) * SIZES[t.dtype]) for t in table]
    return Manifest(
        rank=0, world_size=1, host="h", tensors=table, pieces=pieces, buffers=buffers, optional=optional, whole_tensors=True
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.bias", True),
        ("model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv", True),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight", False),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight", True),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "model.layers.0.mlp.experts.4.gate_proj.weight", False),
        ("model.embed_tokens.weight", "model.norm.weight", False),
        ("lm_head.weight", "model.norm.weight", False),
    ],
)
def test_what_is_loaded_together(one: str, other: str, same: bool) -> None:
    assert (together(one) == together(other)) is same


NAMES = [
    f"model.layers.{layer}.self_attn.{part}_proj.{kind}" for layer in range(3) for part in "qkv" for kind in ("weight", "b")
]


@st.composite
def models(draw: st.DrawFn) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = draw(st.lists(st.sampled_from([*NAMES, "model.norm.weight", "lm_head.weight"]), min_size=1, unique=True))
    shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
    return {name: (draw(st.sampled_from(sorted(SIZES))), draw(shapes)) for name in names}


@settings(deadline=None, max_examples=150)
@given(models(), st.integers(1, 400), st.randoms(use_true_random=False))
def test_every_byte_arrives_aligned_and_in_its_group(model, bucket_bytes: int, random) -> None:
    manifest = manifest_of(model)
    buckets = plan_buckets(manifest, bucket_bytes)
    assert sorted(slot.name for bucket in buckets for slot in bucket.slots) == sorted(model)
    where = {slot.name: number for number, bucket in enumerate(buckets) for slot in bucket.slots}
    for one in model:
        for other in model:
            assert together(one) != together(other) or where[one] == where[other]

    contents = [
        torch.randint(0, 100, tensor.shape, generator=torch.Generator().manual_seed(i)).to(getattr(torch, tensor.dtype))
        for i, tensor in enumerate(manifest.tensors)
    ]
    parts = []
    for piece, content in enumerate(contents):  # oversize tensors come in parts, along their first axis
        if content.ndim and content.shape[0] > 1:
            for start in range(content.shape[0]):
                box = Box(start=(start, *[0] * (content.ndim - 1)), shape=(1, *content.shape[1:]))
                parts.append(Landed(piece, box, content[start : start + 1]))
        else:
            parts.append(Landed(piece, manifest.pieces[piece].box, content))
    random.shuffle(parts)

    assembly, seen = Assembly(buckets), {}
    for part in parts:
        number = assembly.add(part)
        if number is None:
            continue
        bucket, data = assembly.take(number)
        at = 0
        for slot in bucket.slots:  # as SGLang takes it apart
            size = math.prod(slot.shape) * SIZES[slot.dtype]
            assert at % SIZES[slot.dtype] == 0
            seen[slot.name] = data[at : at + size].view(getattr(torch, slot.dtype)).reshape(slot.shape)
            at += size
        assert at == data.numel()
    assert assembly.rest() == []
    assert {name: value.tolist() for name, value in seen.items()} == {
        tensor.name: content.tolist() for tensor, content in zip(manifest.tensors, contents, strict=True)
    }


def test_an_optional_tensor_may_stay_away_and_no_other() -> None:
    names = ["model.layers.0.mlp.a.weight", "model.layers.0.mlp.b.weight"]
    manifest = manifest_of({names[0]: ("float32", (2,)), names[1]: ("int64", (3,))})
    buckets = plan_buckets(manifest, 1000)
    landed = Landed(0, Box(start=(0,), shape=(2,)), torch.tensor([1.0, 2.0]))

    assembly = Assembly(buckets)
    assert assembly.add(landed) is None
    with pytest.raises(LoaderError, match=r"b\.weight"):
        assembly.rest()

    assembly = Assembly(buckets, optional=[names[1]])
    assembly.add(landed)
    (number,) = assembly.rest()
    bucket, data = assembly.take(number)
    assert [slot.name for slot in bucket.slots] == names[:1]
    assert data.view(torch.float32).tolist() == [1.0, 2.0]


def test_another_type_than_was_announced_is_refused() -> None:
    manifest = manifest_of({"w": ("float32", (2,))})
    assembly = Assembly(plan_buckets(manifest, 1000))
    with pytest.raises(LoaderError, match="landed as"):
        assembly.add(Landed(0, Box(start=(0,), shape=(2,)), torch.zeros(2, dtype=torch.float64)))
