"""Rows that many families share: what is around the layers, attention, and feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ..megatron_tables import QKV, Gated, Row, Same, Vocabulary

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
}
"""What every family's two configs agree in."""

GQA_NUMBERS = {**NUMBERS, "num_query_groups": ("num_key_value_heads", "num_attention_heads"), "kv_channels": ("head_dim",)}
"""The same, with attention by KV groups."""

MOE_NUMBERS = {
    "num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe_router_topk": ("num_experts_per_tok",),
}
"""Of experts."""

ENDS = (
    Row("embedding.word_embeddings.weight", Vocabulary("model.embed_tokens.weight")),
    Row("decoder.final_layernorm.weight", Same("model.norm.weight")),
    Row("output_layer.weight", Vocabulary("lm_head.weight")),
)
"""Embeddings, last norm, output layer."""

# With Transformer Engine the norm is fused into the linear layer behind it and has its name.
NORMS = (
    Row(LAYER + "input_layernorm.weight", Same(HF_LAYER + "input_layernorm.weight")),
    Row(LAYER + "self_attention.linear_qkv.layer_norm_weight", Same(HF_LAYER + "input_layernorm.weight")),
    Row(LAYER + "pre_mlp_layernorm.weight", Same(HF_LAYER + "post_attention_layernorm.weight")),
    Row(LAYER + "mlp.linear_fc1.layer_norm_weight", Same(HF_LAYER + "post_attention_layernorm.weight")),
)
"""The two norms of a layer."""

_ATTENTION = HF_LAYER + "self_attn."


def attention(*, biases: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Attention by KV groups; ``biases``: of ``qkv``, ``proj``."""
    rows = [
        Row(LAYER + "self_attention.linear_qkv.weight", _qkv("weight")),
        Row(LAYER + "self_attention.linear_proj.weight", Same(_ATTENTION + "o_proj.weight"), axis=1),
    ]
    if "qkv" in biases:
        rows.append(Row(LAYER + "self_attention.linear_qkv.bias", _qkv("bias")))
    if "proj" in biases:
        rows.append(Row(LAYER + "self_attention.linear_proj.bias", Same(_ATTENTION + "o_proj.bias")))
    return tuple(rows)


def _qkv(end: str) -> QKV:
    return QKV(f"{_ATTENTION}q_proj.{end}", f"{_ATTENTION}k_proj.{end}", f"{_ATTENTION}v_proj.{end}")


QK_NORMS = tuple(
    Row(f"{LAYER}self_attention.{part}_layernorm.weight", Same(f"{_ATTENTION}{part}_norm.weight")) for part in "qk"
)
"""Norms of queries and keys."""


def mlp(here: str, there: str, *, biases: bool = False) -> tuple[Row, ...]:
    """A gated feed-forward block called ``here`` in Megatron's layer and ``there`` in the checkpoint's."""
    here, there = LAYER + here, HF_LAYER + there
    rows = []
    for end in ("weight", "bias") if biases else ("weight",):
        rows += [
            Row(f"{here}.linear_fc1.{end}", Gated(f"{there}.gate_proj.{end}", f"{there}.up_proj.{end}")),
            # A bias of fc2 is whole on every rank; its parameter says so.
            Row(f"{here}.linear_fc2.{end}", Same(f"{there}.down_proj.{end}"), axis=1 if end == "weight" else None),
        ]
    return tuple(rows)


def experts(*, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", block: str = "mlp") -> tuple[Row, ...]:
    """Routed experts, one module each (``local_experts``) or grouped (``weight0``, ``weight1`` … of one module)."""
    to = f"{HF_LAYER}{block}.experts.{{expert}}."
    fc1, fc2 = Gated(f"{to}{gate}.weight", f"{to}{up}.weight"), Same(f"{to}{down}.weight")
    here = LAYER + "mlp.experts."
    # The axis of fc2 is always 1: Transformer Engine's grouped layer says 0.
    return (
        Row(here + "local_experts.{expert}.linear_fc1.weight", fc1, axis=0),
        Row(here + "local_experts.{expert}.linear_fc2.weight", fc2, axis=1),
        Row(here + "linear_fc1.weight{expert}", fc1, axis=0),
        Row(here + "linear_fc2.weight{expert}", fc2, axis=1),
    )


def router(to: str = "mlp.gate.weight", bias: str | None = None) -> tuple[Row, ...]:
    """The router's weight, and the buffer with a bias for each expert."""
    rows = [Row(LAYER + "mlp.router.weight", Same(HF_LAYER + to))]
    if bias is not None:
        rows.append(Row(LAYER + "mlp.router.expert_bias", Same(HF_LAYER + bias)))
    return tuple(rows)
