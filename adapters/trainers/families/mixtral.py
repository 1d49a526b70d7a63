"""Mixtral: Llama's attention; experts under names of their own (w1: gate, w3: up, w2: down)."""

from __future__ import annotations

from ..megatron_tables import Family
from .parts import ENDS, GQA_NUMBERS, MOE_NUMBERS, NORMS, attention, experts, router

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    rows=(
        *ENDS,
        *NORMS,
        *attention(),
        *router("block_sparse_moe.gate.weight"),
        *experts(gate="w1", up="w3", down="w2", block="block_sparse_moe"),
    ),
    numbers={**GQA_NUMBERS, **MOE_NUMBERS},
)
