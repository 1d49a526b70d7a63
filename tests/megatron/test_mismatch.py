"""What does not fit is one error that tells all of it, before a byte moves."""

from __future__ import annotations

TP2, PP2, EP2 = (2, {"tp": 2}), (2, {"pp": 2}), (2, {"ep": 2})


def test_a_layer_is_missing(world, refused):
    world.job(*PP2, family="llama", seed=1, reshape="without_a_layer")
    message = refused()
    assert "missing in the source" in message
    for name in ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        assert f"model.layers.3.{name}.weight" in message
    assert "model.layers.2." not in message


def test_another_vocabulary(world, refused):
    world.job(*TP2, family="llama", seed=1)
    message = refused(engine={"hf": {"vocab_size": 90}})
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert f"{name}: the source has shape (92, 64)" in message
    assert message.count("(90, 64)") == 2


def test_a_vocabulary_beyond_the_models_rows(world, refused):
    world.job(*TP2, family="llama", seed=1)
    message = refused(source={"vocab_size": 97})
    assert message.count("it has 96 rows (padding included) for a vocabulary of 97") == 2


def test_another_number_of_heads_of_the_same_shapes(world, refused):
    """16 heads of 4 and 8 KV heads make the same shapes as 8 heads of 8 and 4: only the configs tell."""
    world.job(*TP2, family="llama", seed=1)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
    message = refused(engine={"hf": heads}, source={"told": heads})
    for mine, theirs in (("num_attention_heads is 8", 16), ("num_query_groups is 4", 8), ("kv_channels is 8", 4)):
        assert any(mine in line and line.endswith(f"is {theirs}") for line in message.splitlines()), message


def test_a_rotation_of_neighbours(world, refused):
    """Names, shapes and numbers are those of the checkpoint; only the order of rows of q and k is another."""
    world.job(*TP2, family="llama", seed=1, megatron={"rotary_interleaved": True})
    assert "Megatron's rotary_interleaved=True rotates neighbouring elements" in refused()


def test_a_type_that_no_rule_covers(world, refused):
    world.job(*TP2, family="llama", seed=1, reshape="with_float8")
    message = refused()
    assert "model.layers.0.self_attn.o_proj.weight" in message and "model.layers.3.self_attn.o_proj.weight" in message
    assert "float8_e4m3fn" in message and "quantization rule" in message


def test_another_number_of_experts(world, refused):
    world.job(*EP2, family="qwen3_moe", seed=1)
    message = refused(engine={"hf": {"num_experts": 6}})
    assert "missing in the source" in message
    for expert in (4, 5):
        assert f"model.layers.0.mlp.experts.{expert}.gate_proj.weight" in message
    assert "model.layers.0.mlp.gate.weight: the source has shape (4, 64)" in message
    told = refused(engine={"hf": {"num_experts": 6}}, source={"told": {"num_experts": 6}})
    assert "Megatron's num_moe_experts is 4, the Hugging Face config's num_experts is 6" in told


def test_unmapped_parameters_and_everything_else_at_once(world, refused):
    world.job(*TP2, family="llama", seed=1, reshape="with_something_else")
    message = refused(source={"told": {"num_hidden_layers": 5}, "vocab_size": 97})
    assert "family llama has no row for decoder.layers.0.calibration, decoder.layers.0.mlp.novelty" in message
    assert "Row(" in message  # what to add, and where
    assert "num_layers is 4, the Hugging Face config's num_hidden_layers is 5" in message
    assert message.count("for a vocabulary of 97") == 2


def test_the_wrong_family(world, refused):
    """Norms of queries and keys are nothing that Llama's table knows."""
    world.job(*TP2, family="qwen3", seed=1)
    message = refused(source={"family": "llama"})
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in message
    assert "decoder.layers.3.self_attention.k_layernorm.weight" in message


def test_a_table_of_the_users_own(world):
    """Llama's table and two rows more: now the model travels, and the engine may lack what it does not know."""
    world.job(*TP2, family="llama", seed=1, reshape="with_something_else")
    world.connect(world.serve(), source={"family": "own", "optional": ["*.novelty", "*.calibration"]})
    world.push()
    world.pushed_exactly()
    assert "model.layers.0.mlp.novelty" in world.all("manifest")[0]["elements"]


def test_what_no_engine_wants_is_left_out(world):
    world.job(*TP2, family="llama", seed=1, reshape="with_something_else")
    world.connect(world.serve(), source={"leave_out": ["*.novelty", "*.calibration"]})
    world.push()
    world.pushed_exactly()
    assert all("novelty" not in name for manifest in world.all("manifest") for name in manifest["elements"])
