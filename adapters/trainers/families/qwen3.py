"""Qwen3: norms on queries and keys, no biases."""

from __future__ import annotations

from ..megatron_tables import Family
from .parts import ENDS, GQA_NUMBERS, NORMS, QK_NORMS, attention, mlp

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    rows=(*ENDS, *NORMS, *attention(biases=("qkv", "proj")), *QK_NORMS, *mlp("mlp", "mlp")),
    numbers=GQA_NUMBERS,
)
