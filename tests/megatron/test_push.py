"""Weights of a transformers model, laid into a real Megatron model, pushed into an engine of transformers.

In each layout Megatron's own forward pass gives the logits of the original first: the weights are where Megatron wants them.
"""

from __future__ import annotations

import pytest

DENSE = ["llama", "qwen2", "qwen3"]
SPARSE = ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"]
CLOSE = 2e-5

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 with 2 virtual stages": (2, {"pp": 2, "vpp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "dp2 tp2": (4, {"tp": 2}),
}
EXPERT_LAYOUTS = {
    "ep2": (2, {"ep": 2}),
    "ep2 tp2": (4, {"ep": 2, "tp": 2, "etp": 1}),
    "ep2 etp2 tp2": (4, {"ep": 2, "tp": 2, "etp": 2}),
    "ep2 pp2": (4, {"ep": 2, "pp": 2}),
}


def show(world, **connect):
    assert world.megatron_logits() < CLOSE
    world.connect(world.serve(), **connect)
    report = world.push()
    world.pushed_exactly()
    return report


@pytest.mark.parametrize("family", DENSE)
def test_every_dense_family(world, family):
    world.job(2, {"tp": 2}, family=family, seed=1)
    show(world)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "tp2"])
def test_every_layout(world, layout):
    ranks, parallel = LAYOUTS[layout]
    world.job(ranks, parallel, family="qwen2", seed=2)
    show(world)


@pytest.mark.parametrize("family", SPARSE)
def test_every_family_with_experts(world, family):
    world.job(2, {"ep": 2}, family=family, seed=3)
    show(world)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", [layout for layout in EXPERT_LAYOUTS if layout != "ep2"])
def test_every_layout_of_experts(world, layout, family):
    ranks, parallel = EXPERT_LAYOUTS[layout]
    world.job(ranks, parallel, family=family, seed=4)
    show(world)


def test_tied_embeddings_and_a_padded_vocabulary(world):
    """92 rows are padded to 96; the output layer is the embeddings."""
    world.job(2, {"tp": 2}, family="llama", seed=5, hf={"tie_word_embeddings": True})
    report = show(world)
    assert names(report).count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names(report)


def test_tied_embeddings_over_pipeline_stages(world):
    """The last stage has a copy; the word embeddings travel once, and either stage may send them."""
    world.job(4, {"tp": 2, "pp": 2}, family="llama", seed=6, hf={"tie_word_embeddings": True})
    report = show(world)
    assert names(report).count("model.embed_tokens.weight") == 1
    for manifest in world.all("manifest"):
        assert manifest["elements"]["model.embed_tokens.weight"] in (48 * 64, (92 - 48) * 64)
        assert manifest["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_tied_source_fills_an_untied_target(world):
    world.job(2, {"pp": 2}, family="llama", seed=6, hf={"tie_word_embeddings": True})
    world.connect(world.serve(hf={"tie_word_embeddings": False}))
    world.push()
    found = world.compare(hf={"tie_word_embeddings": False}, seed=6)
    assert found["differ"] == ["lm_head.weight"]  # that of a model of its own; here it has become the embeddings
    assert world.engine.call("equal", first="lm_head.weight", second="model.embed_tokens.weight")


def test_a_rank_that_holds_padding_only(world):
    """33 tokens padded to 64: ranks 2 and 3 of 4 have no row of the checkpoint, rank 2 has one."""
    world.job(4, {"tp": 4}, family="qwen3", seed=7, hf={"vocab_size": 33})
    show(world)
    rows = [manifest["elements"].get("model.embed_tokens.weight", 0) // 64 for manifest in world.all("manifest")]
    assert rows == [16, 16, 1, 0]


def test_fewer_kv_groups_than_ranks(world):
    """Two KV groups over four ranks: a group's rows are cut in the middle of its queries."""
    world.job(4, {"tp": 4}, family="qwen2", seed=8, hf={"num_key_value_heads": 2})
    show(world)


def test_weights_that_megatron_did_not_mark(world):
    """With perform_initialization=False parameters lack the attributes of tensor parallelism."""
    world.job(2, {"tp": 2}, family="qwen2", seed=8, megatron={"perform_initialization": False})
    show(world)


def test_grouped_experts(world):
    """Transformer Engine's names and marks, on a stand-in for its modules."""
    world.job(4, {"ep": 2, "tp": 2, "etp": 2}, family="qwen3_moe", seed=9, reshape="grouped")
    world.connect(world.serve())
    world.push()
    world.pushed_exactly()


def test_bfloat16_in_megatrons_wrappers(world):
    """Float16Module and DistributedDataParallel with a distributed optimizer, which moves parameters into its buffers."""
    world.job(2, {}, family="qwen2_moe", seed=10, dtype="bfloat16", megatron={"bf16": True}, wrap="wrapped")
    world.connect(world.serve())
    world.push()
    world.pushed_exactly()


def test_biases_everywhere(world):
    """Column-parallel ones are sharded like their weights, row-parallel ones whole on every rank."""
    biases = {"attention_bias": True, "mlp_bias": True}
    world.job(2, {"tp": 2}, family="llama", seed=18, hf=biases, megatron={"add_bias_linear": True})
    show(world)


def test_uneven_pipeline_stages(world):
    """One layer on the first stage, three on the second."""
    world.job(2, {"pp": 2}, family="qwen2", seed=17, megatron={"num_layers_in_first_pipeline_stage": 1})
    show(world)


def test_the_engine_gets_its_own_type(world):
    """float32 is trained, bfloat16 served: the source casts."""
    world.job(2, {"tp": 2}, family="qwen2", seed=16)
    world.connect(world.serve(dtype="bfloat16"))
    world.push()
    world.pushed_exactly(dtype="bfloat16")


def test_sequence_parallel(world):
    """Activations are cut; weights lie as they did, and norms are whole on every rank."""
    world.job(2, {"tp": 2}, family="qwen3", seed=11, megatron={"sequence_parallel": True})
    show(world)


def test_a_step_of_training_and_another_push(world):
    """The same memory with other content: the same manifest, and what is pushed is new."""
    world.job(2, {"pp": 2, "vpp": 2}, family="llama", seed=12)
    show(world)
    assert all(manifest["same"] for manifest in world.all("manifest"))
    world.all("step", family="llama", seed=13)
    world.push()
    world.pushed_exactly(seed=13)
    world.push()  # equal weights under a new version
    world.pushed_exactly(seed=13)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("landing", ["staged", "streamed"])
def test_transports_and_landing_modes(world, transport, landing):
    world.job(4, {"tp": 2, "ep": 2, "etp": 1}, family="deepseek_v3", seed=14)
    show(world, transport=transport, landing=landing)


def test_replicas_share_the_load(world):
    """Two data-parallel replicas of two shards each: all four ranks send, evenly."""
    world.job(4, {"tp": 2}, family="qwen2", seed=15, hf={"intermediate_size": 512})
    report = show(world, bucket_bytes="64KiB")
    assert max(report["sent"]) <= 1.2 * sum(report["sent"]) / 4, report["sent"]
    assert {task["owner"] for task in report["tasks"]} == {0, 1, 2, 3}
    mine = world.all("manifest")
    assert mine[0]["elements"] == mine[2]["elements"] and mine[1]["elements"] == mine[3]["elements"]


def names(report):
    return [name for task in report["tasks"] for name in task["names"]]
