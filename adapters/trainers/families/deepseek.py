"""DeepSeek-V2 and V3: multi-head latent attention (MLA), shared experts, a router with a bias for each expert (V3)."""

from __future__ import annotations

from ..megatron_tables import Family, Row, Same
from .parts import ENDS, HF_LAYER, LAYER, MOE_NUMBERS, NORMS, NUMBERS, experts, mlp, router

_HERE, _THERE = LAYER + "self_attention.", HF_LAYER + "self_attn."

MLA = (
    Row(_HERE + "linear_q_proj.weight", Same(_THERE + "q_proj.weight")),
    Row(_HERE + "linear_q_down_proj.weight", Same(_THERE + "q_a_proj.weight")),
    Row(_HERE + "linear_q_up_proj.weight", Same(_THERE + "q_b_proj.weight")),
    Row(_HERE + "linear_kv_down_proj.weight", Same(_THERE + "kv_a_proj_with_mqa.weight")),
    Row(_HERE + "linear_kv_up_proj.weight", Same(_THERE + "kv_b_proj.weight")),
    Row(_HERE + "linear_proj.weight", Same(_THERE + "o_proj.weight"), axis=1),
    # The norms are modules of their own or, with Transformer Engine, fused into the projections behind them.
    Row(_HERE + "q_layernorm.weight", Same(_THERE + "q_a_layernorm.weight")),
    Row(_HERE + "linear_q_up_proj.layer_norm_weight", Same(_THERE + "q_a_layernorm.weight")),
    Row(_HERE + "kv_layernorm.weight", Same(_THERE + "kv_a_layernorm.weight")),
    Row(_HERE + "linear_kv_up_proj.layer_norm_weight", Same(_THERE + "kv_a_layernorm.weight")),
)

_ROWS = (*ENDS, *NORMS, *MLA, *mlp("mlp", "mlp"), *experts(), *mlp("mlp.shared_experts", "mlp.shared_experts"))

_NUMBERS = {
    **NUMBERS,
    **MOE_NUMBERS,
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}

DEEPSEEK_V2 = Family(name="deepseek_v2", model_types=("deepseek_v2",), rows=(*_ROWS, *router()), numbers=_NUMBERS)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    rows=(*_ROWS, *router(bias="mlp.gate.e_score_correction_bias")),
    numbers=_NUMBERS,
)
