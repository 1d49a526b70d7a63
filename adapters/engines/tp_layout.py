"""What one rank of a tensor-parallel engine holds, as boxes: for any ``nn.Module`` that is sharded and fused as engines do it.

Modules like those of vLLM and SGLang fuse ``q_proj``, ``k_proj`` and ``v_proj`` into ``qkv_proj``, gate and up into
``gate_up_proj``, stack experts into ``w13_weight`` and ``w2_weight``, replicate KV heads where there are fewer than ranks, and
pad the vocabulary. `tp_layout` says so in the boxes that `ModuleLoader` takes, from the config and the parameters' names::

    layout = tp_layout(model.config, model, Parallel(tp_rank=rank, tp_size=4))
    loader = ModuleLoader(model, layout=layout)

Every rule is a pattern of a parameter's name and a function of its local shape; a user's own go before ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import SimpleNamespace
from typing import Any

from torch import nn

from syncline.engine.errors import ConfigError
from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Index

from ..named_box import NamedBox, named_box, padding_box

Shapes = nn.Module | Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Where a rank stands in its engine.

    Attributes:
        tp_rank, tp_size: tensor parallelism.
        ep_rank, ep_size: expert parallelism: each rank holds a run of whole experts. 1 has every rank hold a slice of every
            expert, as tensor parallelism does.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.ep_rank < self.ep_size):
            raise ValueError(f"{self}: ranks go from 0 to size - 1")

    @property
    def experts(self) -> tuple[int, int]:
        """Rank and size of the tensor parallelism inside experts."""
        return (self.tp_rank, self.tp_size) if self.ep_size == 1 else (0, 1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What rules need to know of a model, as `sizes_of` reads it from a config."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    moe_inner: int
    expert_names: tuple[str, str, str]
    """What the checkpoint calls an expert's gate, up and down."""
    q_lora: int


@dataclass(frozen=True, kw_only=True)
class Local:
    """A parameter as a rule sees it: its name's match, its local shape, the model's sizes, and where the rank stands."""

    match: re.Match[str]
    shape: Index
    sizes: Sizes
    parallel: Parallel

    def name(self, part: str) -> str:
        """The name with what the pattern's group 2 matched replaced by ``part``."""
        start, stop = self.match.span(2)
        text = self.match.string
        return text[:start] + part + text[stop:]


Maker = Callable[[Local], Sequence[NamedBox]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose whole name matches the regular expression ``pattern`` hold what ``make`` says."""

    pattern: str
    make: Maker


def tp_layout(config: Any, params: Shapes, parallel: Parallel, *, rules: Iterable[Rule] = ()) -> dict[str, list[NamedBox]]:
    """The ``layout`` of a rank's `ModuleLoader`.

    Args:
        config: the model's Hugging Face config, an object or a dict (of the whole model, not of the rank's part).
        params: the rank's module, or its parameters' local shapes by name.
        parallel: where the rank stands.
        rules: tried before the built-in ones; the first that matches a name decides.

    Returns:
        Boxes by parameter name. Parameters that no rule matches (norms, routers) are not listed: each rank holds all of them.

    Raises:
        PlanError: local shapes that do not fit the config; lists all of them.
        ConfigError: ``config`` is neither a config object nor a dict, or says nothing of the model's sizes.
    """
    sizes, problems = sizes_of(config), []
    found: dict[str, list[NamedBox]] = {}
    every = [(re.compile(rule.pattern), rule.make) for rule in (*rules, *RULES)]
    for name, shape in _shapes(params).items():
        match, make = next(((m, make) for pattern, make in every if (m := pattern.fullmatch(name))), (None, None))
        if match is None or make is None:
            continue
        try:
            found[name] = list(make(Local(match=match, shape=shape, sizes=sizes, parallel=parallel)))
        except ValueError as error:
            problems.append(f"{name} of local shape {shape} at {parallel}: {error}")
    if problems:
        raise PlanError(problems)
    return found


def sizes_of(config: Any) -> Sizes:
    """Read a Hugging Face config, an object or a dict; of a multimodal one, its text part. Raises `ConfigError`."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if isinstance(text, Mapping):
        part = text.get("text_config")
        text = SimpleNamespace(**(part if isinstance(part, Mapping) and "num_attention_heads" not in text else text))
    if text is None or isinstance(text, str | bytes | PathLike):
        raise ConfigError(
            [f"config is {config!r}; give the model's config object or a dict, as AutoConfig.from_pretrained(…) does"]
        )
    if not hasattr(text, "num_attention_heads"):
        raise ConfigError([f"config, a {type(config).__name__}, has no num_attention_heads: is it the model's own config?"])

    def first(*names: str, default: int = 0) -> int:
        return next((int(value) for name in names if (value := getattr(text, name, None)) is not None), default)

    heads = first("num_attention_heads", default=1)
    mixtral = getattr(text, "model_type", "") in ("mixtral", "minimax", "minimax_m2", "phimoe")
    return Sizes(
        heads=heads,
        kv_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=first("hidden_size") // heads),
        vocab=first("vocab_size"),
        experts=first("num_local_experts", "num_experts", "n_routed_experts"),
        moe_inner=first("moe_intermediate_size", "intermediate_size"),
        expert_names=("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"),
        q_lora=first("q_lora_rank"),
    )


def _shapes(params: Shapes) -> dict[str, Index]:
    if isinstance(params, nn.Module):
        return {name: tuple(tensor.shape) for name, tensor in params.state_dict(keep_vars=True).items()}
    return {name: tuple(shape) for name, shape in params.items()}


# rules


def column(local: Local) -> list[NamedBox]:
    """Rows of one checkpoint tensor: rank r has the r-th of ``tp_size`` equal parts."""
    return [_rows(local.match.string, local.shape, local.parallel.tp_rank, local.parallel.tp_size, 0)]


def row(local: Local) -> list[NamedBox]:
    """The same along axis 1. A bias, which is added once, is whole on every rank."""
    if len(local.shape) == 1:
        return [named_box(local.match.string, local.shape)]
    rank, size = local.parallel.tp_rank, local.parallel.tp_size
    start, shape = [0] * len(local.shape), list(local.shape)
    start[1], shape[1] = rank * shape[1], shape[1] * size
    return [named_box(local.match.string, shape, start=start, size=local.shape)]


def qkv(local: Local) -> list[NamedBox]:
    """This rank's query heads, then its key heads, then its value heads. Fewer KV heads than ranks: some ranks share one."""
    sizes, parallel = local.sizes, local.parallel
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shared = _kv_place(local)
    return _stack(
        local, [("q_proj", queries, parallel.tp_rank, parallel.tp_size), ("k_proj", keys, *shared), ("v_proj", keys, *shared)]
    )


def kv(local: Local) -> list[NamedBox]:
    """``k_proj`` or ``v_proj`` alone: this rank's KV heads."""
    return [_rows(local.match.string, local.shape, *_kv_place(local), 0)]


def gate_up(local: Local) -> list[NamedBox]:
    """This rank's rows of the gate, then its rows of up."""
    rank, size = local.parallel.tp_rank, local.parallel.tp_size
    if local.shape[0] % 2:
        raise ValueError("gate and up are of equal height, and the rows do not divide by 2")
    full = local.shape[0] // 2 * size
    return _stack(local, [(part, full, rank, size) for part in ("gate_proj", "up_proj")])


_MOST_VOCAB_PADDING = 1024
"""Rows of a rank. Engines pad to multiples of 64 or 128 rows of all ranks, or of each."""


def vocab(local: Local) -> list[NamedBox]:
    """Rows of the vocabulary, padded at its end so that every rank has as many: rows beyond it are padding."""
    rank, ranks, rows, rest = local.parallel.tp_rank, local.parallel.tp_size, local.shape[0], local.shape[1:]
    first, count = rank * rows, local.sizes.vocab
    if rows * ranks < count:
        raise ValueError(f"{ranks} ranks of {rows} rows do not hold a vocabulary of {count}")
    # Whole on every rank, or dealt out to fewer of them, it would pass as padding, and never be updated.
    if ranks > 1 and (rows >= count or rows - -(-count // ranks) > _MOST_VOCAB_PADDING):
        raise ValueError(
            f"{rows} rows are more than one of {ranks} ranks holds of a vocabulary of {count}: it is "
            "not dealt out to all of them; give a rule of its own"
        )
    held = max(0, min(rows, count - first))
    boxes = []
    if held:
        start = (first, *(0 for _ in rest))
        boxes.append(named_box(local.match.string, (count, *rest), start=start, size=(held, *rest)))
    if held < rows:
        boxes.append(padding_box((rows - held, *rest), local_start=(held, *(0 for _ in rest))))
    return boxes


def w13(local: Local) -> list[NamedBox]:
    """Stacked experts (experts, gate rows then up rows, hidden)."""
    count, doubled, hidden = local.shape
    rank, size = local.parallel.experts
    inner = local.sizes.moe_inner // size
    if inner * size != local.sizes.moe_inner or doubled != 2 * inner:
        raise ValueError(f"{2 * inner} rows were expected for intermediate size {local.sizes.moe_inner} on {size} ranks")
    return [
        named_box(
            _expert(local, number, part), (inner * size, hidden), start=(rank * inner, 0), size=(inner, hidden),
            local_start=(at, half * inner, 0), axes=(1, 2),
        )
        for at, number in enumerate(_experts(local, count))
        for half, part in enumerate(local.sizes.expert_names[:2])
    ]  # fmt: skip


def w2(local: Local) -> list[NamedBox]:
    """Stacked experts (experts, hidden, inner columns)."""
    count, hidden, inner = local.shape
    rank, size = local.parallel.experts
    if inner * size != local.sizes.moe_inner:
        raise ValueError(f"{local.sizes.moe_inner // size} columns were expected for {local.sizes.moe_inner} on {size} ranks")
    return [
        named_box(
            _expert(local, number, local.sizes.expert_names[2]), (hidden, inner * size), start=(0, rank * inner),
            size=(hidden, inner), local_start=(at, 0, 0), axes=(1, 2),
        )
        for at, number in enumerate(_experts(local, count))
    ]  # fmt: skip


def qkv_a(local: Local) -> list[NamedBox]:
    """MLA's ``fused_qkv_a_proj``: ``q_a_proj`` above ``kv_a_proj_with_mqa``, whole on every rank."""
    rows, lora = local.shape[0], local.sizes.q_lora
    if not 0 < lora < rows:
        raise ValueError(f"q_lora_rank is {lora}")
    return _stack(local, [("q_a_proj", lora, 0, 1), ("kv_a_proj_with_mqa", rows - lora, 0, 1)])


def _kv_place(local: Local) -> tuple[int, int]:
    """Which of how many parts of the KV heads this rank holds."""
    heads, kv_heads, rank, size = local.sizes.heads, local.sizes.kv_heads, local.parallel.tp_rank, local.parallel.tp_size
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(f"{heads} heads and {kv_heads} KV heads do not divide among {size} ranks")
    parts = min(size, kv_heads)
    return rank * parts // size, parts


def _experts(local: Local, count: int) -> range:
    """Which experts this rank holds."""
    total, rank, size = local.sizes.experts, local.parallel.ep_rank, local.parallel.ep_size
    first = rank * (total // size) + min(rank, total % size)
    here = total // size + (rank < total % size)
    if here != count:
        raise ValueError(f"{here} of {total} experts were expected on rank {rank} of {size}")
    return range(first, first + count)


def _expert(local: Local, number: int, part: str) -> str:
    return f"{local.match[1]}{number}.{part}.weight"


def _rows(name: str, shape: Sequence[int], rank: int, size: int, at: int) -> NamedBox:
    """The ``rank``-th of ``size`` equal runs of rows, each of ``shape``; it begins at row ``at`` of the parameter."""
    rest = tuple(shape[1:])
    zeros = (0,) * len(rest)
    return named_box(
        name, (shape[0] * size, *rest), start=(rank * shape[0], *zeros), size=tuple(shape), local_start=(at, *zeros)
    )


def _stack(local: Local, parts: Sequence[tuple[str, int, int, int]]) -> list[NamedBox]:
    """One below the other: for each (name, rows of the whole tensor, rank, size) the rank's rows."""
    boxes, at = [], 0
    for part, full, rank, size in parts:
        rows = full // size
        if rows * size != full:
            raise ValueError(f"{full} rows of {part} do not divide among {size} ranks")
        boxes.append(_rows(local.name(part), (rows, *local.shape[1:]), rank, size, at))
        at += rows
    if at != local.shape[0]:
        raise ValueError(f"its parts have {at} rows: {', '.join(f'{part} {full // size}' for part, full, _, size in parts)}")
    return boxes


RULES: tuple[Rule, ...] = (
    Rule(r"(.*\.)?(qkv_proj)\.(?:weight|bias)", qkv),
    Rule(r"(.*\.)?(gate_up_proj)\.(?:weight|bias)", gate_up),
    Rule(r"(.*\.)?(fused_qkv_a_proj(?:_with_mqa)?)\.weight", qkv_a),
    Rule(r"(.*\bexperts\.)(?:routed_experts\.)?(w13)(?:_weight)?", w13),
    Rule(r"(.*\bexperts\.)(?:routed_experts\.)?(w2)(?:_weight)?", w2),
    Rule(r"(.*\.)?(?:embed_tokens|lm_head)\.(?:weight|bias)", vocab),
    Rule(r"(.*\.)?(?:k_proj|v_proj)\.(?:weight|bias)", kv),
    Rule(r"(.*\.)?(?:q_proj|gate_proj|up_proj|q_b_proj|kv_b_proj)\.(?:weight|bias)", column),
    Rule(r"(.*\.)?(?:o_proj|down_proj)\.(?:weight|bias)", row),
)
"""The fused and sharded layers of vLLM's and SGLang's text models, by the names that they share."""
