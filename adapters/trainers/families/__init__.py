"""Families of models that Megatron trains, one small table each: how their parameters map to checkpoint tensors."""

from __future__ import annotations

from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .llama import LLAMA
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3)

__all__ = [
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "FAMILIES",
    "LLAMA",
    "MIXTRAL",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
]
