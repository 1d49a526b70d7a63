"""Tiny models of transformers, one of each family, with random weights that make logits far apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

COMMON: dict[str, Any] = {
    "vocab_size": 92,  # not a multiple of anything that Megatron pads to
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **MOE,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
}


def config_of(family: str, **changes: Any) -> Any:
    """The Hugging Face config of a tiny model of ``family``."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})


def build(family: str, *, seed: int, dtype: str = "float32", **changes: Any) -> Any:
    """A tiny model whose every tensor is random: biases, norms and router biases too, which start as constants."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation="sdpa")
    with torch.no_grad():
        for name, tensor in _state(model):
            if name.endswith("norm.weight") or "layernorm" in name:
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape))
            elif tensor.ndim == 1:
                tensor.copy_(0.2 * torch.randn(tensor.shape))
    return model.to(getattr(torch, dtype)).eval()


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    state = model.state_dict()
    return [(name, tensor) for name, tensor in state.items() if tensor.is_floating_point()]


def logits_of(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """All logits of a prompt: (tokens, vocabulary)."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits.clone()
