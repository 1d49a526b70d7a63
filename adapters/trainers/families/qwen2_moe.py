"""Qwen2-MoE: Qwen2's attention; routed experts and one shared expert with a gate of its own."""

from __future__ import annotations

from ..megatron_tables import Family, Row, Same
from .parts import ENDS, GQA_NUMBERS, HF_LAYER, LAYER, MOE_NUMBERS, NORMS, attention, experts, mlp, router

QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    rows=(
        *ENDS,
        *NORMS,
        *attention(biases=("qkv",)),
        *mlp("mlp", "mlp"),  # some layers may be dense
        *router(),
        *experts(),
        *mlp("mlp.shared_experts", "mlp.shared_expert"),
        Row(LAYER + "mlp.shared_experts.gate_weight", Same(HF_LAYER + "mlp.shared_expert_gate.weight")),
    ),
    numbers={
        **GQA_NUMBERS,
        **MOE_NUMBERS,
        "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    },
)
