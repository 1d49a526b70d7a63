"""What an engine's checkpoint loader wants is what `save_pretrained` writes: names, shapes, ties."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from syncline.adapters.engines.checkpoint_manifest import checkpoint_tensors
from syncline.adapters.trainers import ModuleSource
from syncline.scheduler.errors import PlanError
from syncline.scheduler.options import PlanOptions
from syncline.scheduler.plan import build_plan

OPTIONS = PlanOptions(bucket_bytes=2**20, max_tmp_bytes=2**22)

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "deepseek_v3": {**EXPERTS, **LATENT},
}


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def config_of(family: str, **options):
    return CONFIG_MAPPING[family.removesuffix("-tied")](**{**TINY, **FAMILIES[family], **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_save_pretrained_writes(tmp_path, family) -> None:
    config = config_of(family)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping

    for what in (config, tmp_path, str(tmp_path)):
        found = checkpoint_tensors(what, dtype=torch.bfloat16)
        assert {t.name: t.shape for t in found.tensors} == written
        assert len(found.names) == len(set(found.names))
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
        assert found.aliases == tied


def test_types_are_the_engines_but_for_what_stays_in_float32() -> None:
    found = checkpoint_tensors(config_of("deepseek_v3"), dtype="bfloat16")
    kinds = {t.name: t.dtype for t in found.tensors}
    router = {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"}
    assert {name for name, kind in kinds.items() if kind != "bfloat16"} == router
    assert {kinds[name] for name in router} == {"float32"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_of_the_same_model_covers_it(family) -> None:
    config = config_of(family)
    source = ModuleSource(AutoModelForCausalLM.from_config(config)).manifest()
    target = checkpoint_tensors(config, dtype="float32").manifest(rank=0, world_size=1, host="h")
    plan = build_plan([source], [[target]], OPTIONS)
    program = plan.target_program(0, 0)
    sent = sum(landing.segment.nbytes for task in program.tasks for landing in task.landings)
    assert sent == checkpoint_tensors(config, dtype="float32").nbytes


def test_what_a_source_lacks_is_named_before_a_byte_moves() -> None:
    config = config_of("llama")
    model = AutoModelForCausalLM.from_config(config)
    half = {name: tensor for name, tensor in model.state_dict().items() if "k_proj" not in name and "v_proj" not in name}
    source = ModuleSource(half).manifest()
    target = checkpoint_tensors(config, dtype="float32").manifest(rank=0, world_size=1, host="h")
    with pytest.raises(PlanError) as caught:
        build_plan([source], [[target]], OPTIONS)
    assert "k_proj" in str(caught.value) and "v_proj" in str(caught.value)


def test_block_fp8_demands_every_scale() -> None:
    kept = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 16], "modules_to_not_convert": kept}
    found = {
        t.name: t
        for t in checkpoint_tensors(config_of("qwen3_moe", quantization_config=quantization), dtype="bfloat16").tensors
    }
    quantized = {name for name, t in found.items() if t.dtype == "float8_e4m3fn"}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert quantized == {name for name in found if name.endswith(tuple(f"{part}.weight" for part in linear))}
    assert {name for name in found if name.endswith("_scale_inv")} == {f"{name}_scale_inv" for name in quantized}
    scale = found["model.layers.0.mlp.experts.2.gate_proj.weight_scale_inv"]  # of a weight of 12 x 16
    assert (scale.shape, scale.dtype) == ((2, 1), "float32")
    assert found["lm_head.weight"].dtype == found["model.layers.0.mlp.gate.weight"].dtype == "bfloat16"


@pytest.mark.parametrize("quantization", [{"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}])
def test_other_quantizations_are_refused_by_name(quantization) -> None:
    with pytest.raises(PlanError, match=quantization["quant_method"]):
        checkpoint_tensors(config_of("llama", quantization_config=quantization), dtype="bfloat16")


def test_an_unknown_architecture_is_refused_by_name() -> None:
    class Strange:
        architectures = ("StrangeForCausalLM",)

    with pytest.raises(PlanError, match="StrangeForCausalLM"):
        checkpoint_tensors(Strange(), dtype="bfloat16")
