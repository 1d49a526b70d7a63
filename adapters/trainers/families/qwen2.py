"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from ..megatron_tables import Family
from .parts import ENDS, GQA_NUMBERS, NORMS, attention, mlp

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    rows=(*ENDS, *NORMS, *attention(biases=("qkv",)), *mlp("mlp", "mlp")),
    numbers=GQA_NUMBERS,
)
