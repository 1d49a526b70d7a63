"""megatron-bridge's mappings as a table: objects of the same shape, since the package itself needs a GPU's libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from syncline.adapters.trainers.families import QWEN3_MOE
from syncline.adapters.trainers.megatron_bridge import Refused, family_from_bridge
from syncline.adapters.trainers.megatron_tables import Dims

DIMS = Dims(heads=4, groups=2, head_dim=2, vocabulary=12)
LAYER, HF = "decoder.layers.*.", "model.layers.*."


class Mapping:
    def __init__(self, megatron_param: str, hf_param: str | dict[str, str], **more: Any) -> None:
        self.megatron_param, self.hf_param = megatron_param, hf_param
        vars(self).update(more)


class AutoMapping(Mapping):
    permute_dims = None


class QKVMapping(Mapping):
    pass


class GatedMLPMapping(Mapping):
    pass


class RowParallelMapping(Mapping):
    pass


class MambaInProjMapping(Mapping):
    pass


def qkv(end: str) -> QKVMapping:
    return QKVMapping(f"{LAYER}self_attention.linear_qkv.{end}", {p: f"{HF}self_attn.{p}_proj.{end}" for p in "qkv"})


MAPPINGS = [
    AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    AutoMapping("output_layer.weight", "lm_head.weight"),
    AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
    AutoMapping(f"{LAYER}input_layernorm.weight", f"{HF}input_layernorm.weight"),
    AutoMapping(f"{LAYER}self_attention.linear_proj.weight", f"{HF}self_attn.o_proj.weight"),
    qkv("weight"),
    AutoMapping(f"{LAYER}mlp.router.weight", f"{HF}mlp.gate.weight"),
    GatedMLPMapping(
        f"{LAYER}mlp.experts.linear_fc1.weight*", {p: f"{HF}mlp.experts.*.{p}_proj.weight" for p in ("gate", "up")}
    ),
    AutoMapping(f"{LAYER}mlp.experts.linear_fc2.weight*", f"{HF}mlp.experts.*.down_proj.weight"),
    AutoMapping(f"{LAYER}mlp.experts.local_experts.*.linear_fc2.weight", f"{HF}mlp.experts.*.down_proj.weight"),
]


class Registry:
    def __init__(self, mappings: list[Mapping]) -> None:
        self.mappings = mappings

    def __iter__(self) -> Iterator[Mapping]:
        return iter(self.mappings)


class Bridge:
    """A model bridge, or what ``AutoBridge`` keeps one in."""

    def mapping_registry(self) -> Registry:
        return Registry(MAPPINGS)


class Auto:
    _model_bridge = Bridge()


@pytest.mark.parametrize("bridge", [Auto(), Bridge(), Registry(MAPPINGS)], ids=["auto", "model", "registry"])
def test_the_table_is_the_one_that_we_have(bridge):
    found = family_from_bridge(bridge)
    ours = {row.pattern: row for row in QWEN3_MOE.rows}
    assert len(found.rows) == len(MAPPINGS)
    for row in found.rows:
        assert row.rule.segments(16, DIMS) == ours[row.pattern].rule.segments(16, DIMS)
        assert (row.rule.stride, row.axis or 0, row.expert) == (
            ours[row.pattern].rule.stride,
            ours[row.pattern].axis or 0,
            ours[row.pattern].expert,
        )
    assert (found.embedding, found.head) == (QWEN3_MOE.embedding, QWEN3_MOE.head)


@pytest.mark.parametrize(
    "mapping",
    [
        MambaInProjMapping("decoder.layers.*.mixer.in_proj.weight", "backbone.layers.*.mixer.in_proj.weight"),
        AutoMapping(f"{LAYER}mlp.experts.linear_fc2.weight*", f"{HF}mlp.experts.down_proj"),
        AutoMapping(f"{LAYER}mlp.linear_fc2.weight", f"{HF}mlp.down_proj.weight", permute_dims=(1, 0)),
        QKVMapping(f"{LAYER}self_attention.linear_qkv.weight", {p: f"{HF}{p}" for p in ("q", "k", "v", "g")}),
    ],
    ids=["mamba", "packed experts", "transposed", "gate beside the queries"],
)
def test_what_is_more_than_boxes_is_refused_by_name(mapping):
    (row,) = family_from_bridge([mapping]).rows
    assert isinstance(row.rule, Refused)
    with pytest.raises(ValueError, match=type(mapping).__name__):
        row.rule.segments(8, DIMS)


def test_a_row_parallel_mapping_is_sharded_by_columns():
    (row,) = family_from_bridge([RowParallelMapping(f"{LAYER}mlp.strange.weight", f"{HF}mlp.strange.weight")]).rows
    assert row.axis == 1
