"""Llama (2, 3) and what has its shape: Mistral."""

from __future__ import annotations

from ..megatron_tables import Family
from .parts import ENDS, GQA_NUMBERS, NORMS, attention, mlp

LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral"),
    rows=(*ENDS, *NORMS, *attention(biases=("qkv", "proj")), *mlp("mlp", "mlp", biases=True)),
    numbers=GQA_NUMBERS,
)
