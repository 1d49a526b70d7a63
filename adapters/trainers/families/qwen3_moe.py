"""Qwen3-MoE: Qwen3's attention; routed experts."""

from __future__ import annotations

from ..megatron_tables import Family
from .parts import ENDS, GQA_NUMBERS, MOE_NUMBERS, NORMS, QK_NORMS, attention, experts, mlp, router

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    rows=(
        *ENDS,
        *NORMS,
        *attention(biases=("qkv", "proj")),
        *QK_NORMS,
        *mlp("mlp", "mlp"),  # some layers may be dense
        *router(),
        *experts(),
    ),
    numbers={**GQA_NUMBERS, **MOE_NUMBERS},
)
