"""Configs of models that cannot be right are refused, not taken for another model."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.bench.models import ModelError, from_config, parameters

_DENSE: dict[str, Any] = {
    "model_type": "llama", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias"])
@pytest.mark.parametrize("value", ["false", "", 0, 1, [], {}])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{name} is {value!r}; it must be true or false".replace("[", r"\[")):
        from_config(_DENSE | {name: value})


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("float16", "float16"), ("torch.float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "bfloat16"),
        (None, "bfloat16"), ("", "bfloat16"),
    ],
)  # fmt: skip
def test_dtype_as_the_config_says(name: str, value: object, dtype: str) -> None:
    assert from_config(_DENSE | {name: value}).dtype == dtype


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float23", "fp16", 16, ["float16"]])
def test_a_dtype_that_is_none_is_named(name: str, value: object) -> None:
    with pytest.raises(ModelError) as raised:
        from_config(_DENSE | {name: value})
    assert f"{name} is {value!r}; known are" in str(raised.value)


@pytest.mark.parametrize(("value", "heads"), [(True, 0), (False, 1), (None, 1)])
def test_a_tied_model_has_no_head_of_its_own(value: bool | None, heads: int) -> None:
    model = from_config(_DENSE | {"tie_word_embeddings": value})
    assert sum(each.name == "lm_head.weight" for each in parameters(model)) == heads


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "qwen3_moe"}, {"model_type": "mixtral"}, {"moe_intermediate_size": 8}, {"num_experts_per_tok": 2},
        {"n_shared_experts": 1},
    ],
)  # fmt: skip
def test_a_mixture_of_experts_says_how_many(more: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="says how many there are"):
        from_config(_DENSE | more)
    assert from_config(_DENSE | more | {"num_experts": 4}).experts == 4


@pytest.mark.parametrize("count", [0, None])
def test_no_experts_is_a_dense_model(count: int | None) -> None:
    assert from_config(_DENSE | {"n_routed_experts": count, "moe_intermediate_size": 8}).experts == 0
