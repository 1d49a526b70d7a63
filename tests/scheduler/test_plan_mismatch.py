"""A trainer and an engine of different models: everything that differs is said at once, before a byte moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.bench.layouts import Model
from syncline.bench.models import Architecture
from syncline.bench.splits import Engine, Megatron
from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Manifest
from syncline.scheduler.plan import PlanOptions, build_plan

DENSE = Architecture(layers=4, hidden=64, heads=8, kv_heads=2, head_dim=8, intermediate=128, vocab=500)
SPARSE = replace(DENSE, experts=8, expert_intermediate=32)


def problems(source: list[Manifest], target: list[Manifest], route: str = "auto") -> str:
    with pytest.raises(PlanError) as caught:
        build_plan(source, [target], PlanOptions(bucket_bytes=1 << 18, max_tmp_bytes=1 << 22, route=route))
    return str(caught.value)


def split(shape: Architecture, **sizes: int) -> list[Manifest]:
    return Megatron(**({"tp": 2, "pp": 2} | sizes)).manifests(Model.of(shape), 8)


def engine(shape: Architecture, **sizes: int) -> list[Manifest]:
    return Engine(**({"tp": 2} | sizes)).manifests(Model.of(shape), "e", 8)


def without(manifest: Manifest, part: str) -> Manifest:
    """A rank that has lost some of its tensors."""
    kept = [i for i, tensor in enumerate(manifest.tensors) if part not in tensor.name]
    place = {old: new for new, old in enumerate(kept)}
    pieces = [
        type(p)(tensor=place[p.tensor], box=p.box, buffer=p.buffer, offset=p.offset, strides=p.strides, dtype=p.dtype)
        for p in manifest.pieces
        if p.tensor in place
    ]
    return Manifest(
        rank=manifest.rank, world_size=manifest.world_size, host=manifest.host, buffers=manifest.buffers, pieces=pieces,
        tensors=[manifest.tensors[i] for i in kept],
    )  # fmt: skip


def test_a_pipeline_stage_that_lacks_a_layer() -> None:
    told = problems([without(m, "layers.2.") for m in split(DENSE)], engine(DENSE))
    for name in ("q_proj.weight", "o_proj.weight", "gate_proj.weight", "input_layernorm.weight"):
        assert "model.layers.2." in told and name in told
    assert "missing in the source" in told
    assert "layers.1." not in told


def test_one_tensor_parallel_rank_that_lacks_its_shard() -> None:
    sources = split(DENSE)
    sources[1] = without(sources[1], "layers.0.self_attn.o_proj")
    told = problems(sources, engine(DENSE))
    assert "model.layers.0.self_attn.o_proj.weight: no source rank holds" in told
    assert told.startswith("1 problem")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (replace(DENSE, vocab=512), ["model.embed_tokens.weight", "lm_head.weight"]),
        (replace(DENSE, heads=16), ["layers.0.self_attn.q_proj.weight", "layers.3.self_attn.o_proj.weight"]),
        (replace(DENSE, kv_heads=4), ["layers.0.self_attn.k_proj.weight", "layers.3.self_attn.v_proj.weight"]),
        (replace(DENSE, hidden=128), ["model.norm.weight", "layers.1.mlp.up_proj.weight"]),
    ],
    ids=["vocabulary", "heads", "kv heads", "hidden size"],
)
def test_other_shapes_are_told_with_both_sides(source, names) -> None:
    told = problems(split(source), engine(DENSE))
    for name in names:
        assert name in told
    assert "the source has shape" in told and "expects" in told


def test_another_number_of_experts() -> None:
    fewer = replace(SPARSE, experts=6)
    told = problems(split(fewer, ep=1), engine(SPARSE))
    for expert in (6, 7):
        assert f"experts.{expert}." in told or "experts.{6-7}." in told
    assert "mlp.gate.weight: the source has shape (6, 64)" in told
    more = problems(split(replace(SPARSE, experts=16)), engine(SPARSE))
    assert "no target wants what the source has under" in more


def test_types_that_no_rule_covers() -> None:
    told = problems(split(replace(DENSE, dtype="int32")), engine(DENSE))
    assert "model.embed_tokens.weight" in told and "int32" in told and "bfloat16" in told


def test_everything_at_once() -> None:
    sources = [without(m, "layers.1.mlp.down_proj") for m in split(replace(DENSE, vocab=512, kv_heads=4))]
    told = problems(sources, engine(DENSE), route="direct")
    for part in ("embed_tokens", "lm_head", "k_proj", "v_proj", "model.layers.1.mlp.down_proj.weight"):
        assert part in told
