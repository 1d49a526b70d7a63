"""Layout bugs seeded in the adapter. Every shape fits; the push itself says that all is well; the comparison finds them."""

from __future__ import annotations

import re

import pytest

TP2, EP2 = (2, {"tp": 2}), (2, {"ep": 2})

# bug, job, family, and the checkpoint tensors that come out wrong (of layer 1)
WRONG = [
    ("contiguous qkv", TP2, "qwen2", r"self_attn\.[qkv]_proj\.(weight|bias)"),
    ("rank order reversed", TP2, "llama", r"(self_attn\.o_proj|mlp\.down_proj)\.weight"),
    ("gate and up swapped", TP2, "llama", r"mlp\.(gate|up)_proj\.weight"),
    ("gate and up cut as one", TP2, "llama", r"mlp\.(gate|up)_proj\.weight"),
    ("experts permuted", EP2, "qwen3_moe", r"mlp\.experts\.(gate_up|down)_proj"),
    ("gate and up swapped", EP2, "deepseek_v3", r"mlp\.(experts\.gate_up_proj|shared_experts\.(gate|up)_proj\.weight)"),
]


@pytest.mark.parametrize(("bug", "job", "family", "tensors"), WRONG, ids=[f"{bug}-{family}" for bug, _, family, _ in WRONG])
def test_a_wrong_layout_is_seen_in_tensors_and_logits(world, *, bug, job, family, tensors):
    world.job(*job, family=family, seed=1)
    world.connect(world.serve(), source={"broken": bug})
    world.push()
    found = world.compare()
    assert found["logits"] > 1e-2
    of_a_layer = {name.removeprefix("model.layers.1.") for name in found["differ"] if name.startswith("model.layers.1.")}
    assert of_a_layer == {name for name in of_a_layer if re.fullmatch(tensors, name)} != set()
    assert all(".layers." in name for name in found["differ"])


REFUSED = [
    ("padding kept", TP2, "llama", ["model.embed_tokens.weight", "(96, 64)", "(92, 64)", "lm_head.weight"]),
    ("layers numbered by chunk", (2, {"pp": 2}), "llama", ["model.layers.2.", "model.layers.3."]),
]


@pytest.mark.parametrize(("bug", "job", "family", "words"), REFUSED, ids=[bug for bug, *_ in REFUSED])
def test_a_wrong_layout_is_refused(world, refused, *, bug, job, family, words):
    world.job(*job, family=family, seed=1)
    message = refused(source={"broken": bug})
    assert all(word in message for word in words), message


def test_without_a_bug_the_same_comparison_finds_nothing(world):
    world.job(*TP2, family="qwen2", seed=1)
    world.connect(world.serve())
    world.push()
    world.pushed_exactly()
