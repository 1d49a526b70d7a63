"""Shapes of language models, without the models: for plans at scale, for simulation, and for ``syncline plan``.

An `Architecture` is read from a ``config.json`` of the Hugging Face kind, or is one of `named`. `parameters` lists what its
checkpoint holds, and how each tensor is split wherever models are split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.errors import SynclineError

Role = Literal["embed", "head", "whole", "q", "k", "v", "rows", "columns", "gate", "up", "down"]
"""How tensor parallelism takes a parameter: vocabulary rows, not at all, by heads, by rows or columns, as part of an MLP."""


class ModelError(SynclineError):
    """A model's shapes are not known: no such name, no such file, or a config of a kind that is not understood."""


class Parameter(NamedTuple):
    """A parameter of a model. ``layer`` and ``expert`` are -1 outside layers and routed experts.

    ``dtype`` is its element type where that is not the model's.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int = -1
    expert: int = -1
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek)."""

    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of a decoder. Without ``latent`` its attention has ``kv_heads`` groups of heads.

    ``experts`` 0 is a dense model; else the first ``dense_layers`` layers have an MLP of ``intermediate`` and the others
    routed experts of ``expert_intermediate``, and a shared one of ``shared_intermediate`` where that is not 0.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int = 1
    head_dim: int = 128
    latent: Latent | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    experts: int = 0
    dense_layers: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_name: str = "shared_experts"
    router_bias: bool = False
    block: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    dtype: str = "bfloat16"


def kimi_k2() -> Architecture:
    """Kimi-K2: 1,026 billion parameters in 384 experts a layer."""
    return Architecture(
        layers=61, hidden=7168, heads=64, intermediate=18432, vocab=163840, latent=Latent(), experts=384, dense_layers=1,
        expert_intermediate=2048, shared_intermediate=2048, router_bias=True,
    )  # fmt: skip


def named() -> dict[str, Architecture]:
    """Models that are known by name."""
    qwen3 = Architecture(
        layers=36, hidden=4096, heads=32, kv_heads=8, intermediate=12288, vocab=151936, qk_norm=True
    )  # fmt: skip
    return {
        "kimi-k2": kimi_k2(),
        "deepseek-v3": replace(kimi_k2(), heads=128, vocab=129280, experts=256, dense_layers=3),
        "qwen2.5-0.5b": Architecture(
            layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, intermediate=4864, vocab=151936, qkv_bias=True, tied=True
        ),
        "qwen3-8b": qwen3,
        "qwen3-30b-a3b": replace(
            qwen3, layers=48, hidden=2048, kv_heads=4, intermediate=6144, experts=128, expert_intermediate=768
        ),
        "qwen3-235b-a22b": replace(
            qwen3, layers=94, heads=64, kv_heads=4, intermediate=12288, experts=128, expert_intermediate=1536
        ),
        "glm-4.5-air": replace(
            qwen3, layers=46, heads=96, intermediate=10944, vocab=151552, qkv_bias=True, qk_norm=False, experts=128,
            dense_layers=1, expert_intermediate=1408, shared_intermediate=1408, router_bias=True,
        ),
        "llama3-8b": replace(qwen3, layers=32, intermediate=14336, vocab=128256, qk_norm=False),
        "llama3-70b": replace(
            qwen3, layers=80, hidden=8192, heads=64, intermediate=28672, vocab=128256, qk_norm=False
        ),
        "mixtral-8x7b": Architecture(
            layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=32000, experts=8, expert_intermediate=14336,
            block="block_sparse_moe", expert_names=("w1", "w3", "w2"),
        ),
    }  # fmt: skip


_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_key_value_heads",
    "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
"""What is above 0 in a config. The first five are in every one."""
_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank",
)  # fmt: skip
"""What may be 0."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "shared_expert_intermediate_size")
"""What only a mixture of experts has."""
_LARGEST = {"num_hidden_layers": 2**12, "num_experts": 2**13, "num_local_experts": 2**13, "n_routed_experts": 2**13}
"""Beyond these a plan never ends."""


def find(model: str) -> Architecture:
    """A model by name, or by a ``config.json`` or the folder that it is in. Raises `ModelError`."""
    known = named()
    if model in known:
        return known[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"model {model!r}: no such name, and no config.json there; known are {', '.join(known)}")
    try:
        return from_config(json.loads(file.read_text(encoding="utf-8")))
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    except KeyError as error:
        raise ModelError(f"{file} has no {error.args[0]!r}: not the config of a decoder that is understood here") from error


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Shapes from a config of the Hugging Face kind (Llama, Qwen2, Qwen3, Mixtral, their MoE kin, DeepSeek-V2/V3, Kimi-K2).

    Raises:
        KeyError: it lacks a size that such a model has.
        ModelError: it is no mapping, a size in it is none, a flag is neither true nor false, its dtype is unknown, or it is of
            a mixture of experts and does not say how many.
    """
    _sizes_are_sizes(config)
    kind, heads, hidden = str(config.get("model_type") or ""), config["num_attention_heads"], config["hidden_size"]
    experts = _expert_count(config, kind)
    shape = Architecture(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        latent=_latent(config) if config.get("kv_lora_rank") else None,
        qkv_bias=_flag(config, "attention_bias", default=kind.startswith("qwen2")),
        qk_norm=kind.startswith("qwen3"),
        tied=_flag(config, "tie_word_embeddings", default=False),
        dtype=_dtype(config),
    )
    return _with_experts(shape, config, kind, experts) if experts else shape


def _sizes_are_sizes(config: Any) -> None:
    """Raise `ModelError` for sizes that are no whole numbers in range; those that are not there are not looked for."""
    if not isinstance(config, Mapping):
        raise ModelError(f"the config of a model is a mapping of names to values, not a {type(config).__name__}")
    needed = set(_SIZES[:5])
    found = {n: config[n] for n in (*_SIZES, *_COUNTS) if n in config and (n in needed or config[n] is not None)}
    wrong = [
        f"{name} is {value!r}"
        for name, value in found.items()
        if type(value) is not int or not (name in _SIZES) <= value <= _LARGEST.get(name, 2**31)
    ]
    if wrong:
        raise ModelError(f"{', '.join(wrong)}: not the size of a model (a whole number above 0, within reason)")


def _dtype(config: Mapping[str, Any]) -> str:
    """Of the weights: bfloat16 where the config does not say, or leaves it to the checkpoint (``auto``)."""
    name = next((name for name in ("dtype", "torch_dtype") if config.get(name)), None)
    if name is None or config[name] == "auto":
        return "bfloat16"
    dtype = str(config[name]).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise ModelError(f"{name} is {config[name]!r}; known are {', '.join(ITEMSIZE)}")
    return dtype


def _flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A flag; one that is null is as if it were not there."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise ModelError(f"{name} is {value!r}; it must be true or false")
    return value


def _expert_count(config: Mapping[str, Any], kind: str) -> int:
    """Routed experts of a layer; 0 for a dense model. Raises `ModelError` if other sizes say that there are some."""
    experts = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    if experts or any(name in config for name in _EXPERTS):  # 0 and null say that there are none
        return int(experts)
    signs = [name for name in _OF_EXPERTS if config.get(name)]
    if kind == "mixtral" or "moe" in kind or signs:
        said = f"it has {', '.join(signs)}" if signs else f"model_type is {kind!r}"
        raise ModelError(f"{said}, as a mixture of experts, and none of {', '.join(_EXPERTS)} says how many there are")
    return 0


def _latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )


def _with_experts(shape: Architecture, config: Mapping[str, Any], kind: str, experts: int) -> Architecture:
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    mixtral = kind == "mixtral"
    return replace(
        shape,
        experts=experts,
        dense_layers=config.get("first_k_dense_replace") or 0,
        expert_intermediate=size,
        shared_intermediate=config.get("shared_expert_intermediate_size") or size * (config.get("n_shared_experts") or 0),
        shared_name="shared_expert" if kind.startswith("qwen") else "shared_experts",
        router_bias=config.get("topk_method") == "noaux_tc",
        block="block_sparse_moe" if mixtral else "mlp",
        expert_names=("w1", "w3", "w2") if mixtral else shape.expert_names,
    )


def parameters(model: Architecture) -> Iterator[Parameter]:
    """All parameters, in checkpoint order."""
    yield Parameter("model.embed_tokens.weight", (model.vocab, model.hidden), "embed")
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        for parameter in _layer(at, model, moe=bool(model.experts) and layer >= model.dense_layers):
            yield parameter._replace(layer=layer)
    yield Parameter("model.norm.weight", (model.hidden,), "whole")
    if not model.tied:
        yield Parameter("lm_head.weight", (model.vocab, model.hidden), "head")


def _layer(at: str, model: Architecture, *, moe: bool) -> Iterator[Parameter]:
    yield from _grouped(at + "self_attn.", model) if model.latent is None else _latents(at + "self_attn.", model, model.latent)
    if moe:
        yield from _experts(f"{at}{model.block}.", model)
    else:
        yield from _mlp(at + "mlp.", model.hidden, model.intermediate)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Parameter(f"{at}{norm}.weight", (model.hidden,), "whole")


def _grouped(at: str, model: Architecture) -> Iterator[Parameter]:
    sizes: tuple[tuple[Role, int], ...] = (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads))
    for role, heads in sizes:
        yield Parameter(f"{at}{role}_proj.weight", (heads * model.head_dim, model.hidden), role)
        if model.qkv_bias:
            yield Parameter(f"{at}{role}_proj.bias", (heads * model.head_dim,), role)
        if model.qk_norm and role != "v":
            yield Parameter(f"{at}{role}_norm.weight", (model.head_dim,), "whole")
    yield Parameter(at + "o_proj.weight", (model.hidden, model.heads * model.head_dim), "columns")


def _latents(at: str, model: Architecture, latent: Latent) -> Iterator[Parameter]:
    query = model.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        yield Parameter(at + "q_a_proj.weight", (latent.q_rank, model.hidden), "whole")
        yield Parameter(at + "q_a_layernorm.weight", (latent.q_rank,), "whole")
        yield Parameter(at + "q_b_proj.weight", (query, latent.q_rank), "rows")
    else:
        yield Parameter(at + "q_proj.weight", (query, model.hidden), "rows")
    yield Parameter(at + "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_dim, model.hidden), "whole")
    yield Parameter(at + "kv_a_layernorm.weight", (latent.kv_rank,), "whole")
    yield Parameter(at + "kv_b_proj.weight", (model.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank), "rows")
    yield Parameter(at + "o_proj.weight", (model.hidden, model.heads * latent.value_dim), "columns")


def _mlp(
    at: str, hidden: int, intermediate: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Parameter]:
    gate, up, down = names
    yield Parameter(f"{at}{gate}.weight", (intermediate, hidden), "gate")
    yield Parameter(f"{at}{up}.weight", (intermediate, hidden), "up")
    yield Parameter(f"{at}{down}.weight", (hidden, intermediate), "down")


def _experts(at: str, model: Architecture) -> Iterator[Parameter]:
    yield Parameter(at + "gate.weight", (model.experts, model.hidden), "whole")
    if model.router_bias:
        yield Parameter(at + "gate.e_score_correction_bias", (model.experts,), "whole")
    for expert in range(model.experts):
        mlp = _mlp(f"{at}experts.{expert}.", model.hidden, model.expert_intermediate, model.expert_names)
        yield from (parameter._replace(expert=expert) for parameter in mlp)
    if model.shared_intermediate:
        yield from _mlp(f"{at}{model.shared_name}.", model.hidden, model.shared_intermediate)
        if model.shared_name == "shared_expert":
            yield Parameter(f"{at}shared_expert_gate.weight", (1, model.hidden), "whole")
