"""Manifests of large models without the models: shapes only, built column by column.

For planning at scale (`kimi_k2_manifests`) and for simulation. No memory is allocated for weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.scheduler.dtypes import itemsize
from syncline.scheduler.layout import BufferTable, Layout, Manifest, PieceTable, TensorTable

Split = Literal["rows", "columns", "expert", "none"]
"""How an engine cuts a parameter over the ranks of a target: its rows, its columns, by whole experts, or not."""

_Ints = npt.NDArray[np.int64]


class Parameter(NamedTuple):
    """A parameter of a model. ``expert`` is its expert's number, or -1."""

    name: str
    shape: tuple[int, ...]
    split: Split
    expert: int = -1


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shapes of a DeepSeek-V3-like model (latent attention, routed and shared experts). Kimi-K2 by default."""

    layers: int = 61
    dense_layers: int = 1
    experts: int = 384
    hidden: int = 7168
    intermediate: int = 18432
    expert_intermediate: int = 2048
    heads: int = 64
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    vocab: int = 163840
    dtype: str = "bfloat16"


def parameters(config: MoEConfig) -> Iterator[Parameter]:
    """All parameters, in checkpoint order."""
    yield Parameter("model.embed_tokens.weight", (config.vocab, config.hidden), "rows")
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        yield from _attention(prefix + "self_attn.", config)
        if layer < config.dense_layers:
            yield from _mlp(prefix + "mlp.", config.hidden, config.intermediate)
        else:
            yield from _experts(prefix + "mlp.", config)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Parameter(f"{prefix}{norm}.weight", (config.hidden,), "none")
    yield Parameter("model.norm.weight", (config.hidden,), "none")
    yield Parameter("lm_head.weight", (config.vocab, config.hidden), "rows")


def _attention(prefix: str, config: MoEConfig) -> Iterator[Parameter]:
    query = config.heads * (config.nope_dim + config.rope_dim)
    keys = config.heads * (config.nope_dim + config.value_dim)
    yield Parameter(prefix + "q_a_proj.weight", (config.q_rank, config.hidden), "none")
    yield Parameter(prefix + "q_a_layernorm.weight", (config.q_rank,), "none")
    yield Parameter(prefix + "q_b_proj.weight", (query, config.q_rank), "rows")
    yield Parameter(prefix + "kv_a_proj_with_mqa.weight", (config.kv_rank + config.rope_dim, config.hidden), "none")
    yield Parameter(prefix + "kv_a_layernorm.weight", (config.kv_rank,), "none")
    yield Parameter(prefix + "kv_b_proj.weight", (keys, config.kv_rank), "rows")
    yield Parameter(prefix + "o_proj.weight", (config.hidden, config.heads * config.value_dim), "columns")


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Parameter]:
    yield Parameter(prefix + "gate_proj.weight", (intermediate, hidden), "rows")
    yield Parameter(prefix + "up_proj.weight", (intermediate, hidden), "rows")
    yield Parameter(prefix + "down_proj.weight", (hidden, intermediate), "columns")


def _experts(prefix: str, config: MoEConfig) -> Iterator[Parameter]:
    yield Parameter(prefix + "gate.weight", (config.experts, config.hidden), "none")
    yield Parameter(prefix + "gate.e_score_correction_bias", (config.experts,), "none")
    for expert in range(config.experts):
        for parameter in _mlp(f"{prefix}experts.{expert}.", config.hidden, config.expert_intermediate):
            yield parameter._replace(split="expert", expert=expert)
    yield from _mlp(prefix + "shared_experts.", config.hidden, config.expert_intermediate)


def tensor_table(parameters: Sequence[Parameter], dtype: str) -> TensorTable:
    """The canonical tensors of some parameters, all of one type."""
    depth = max(len(p.shape) for p in parameters)
    return TensorTable(
        names=tuple(p.name for p in parameters),
        shape=np.array([(*p.shape, *(1,) * (depth - len(p.shape))) for p in parameters], np.int64),
        ndim=np.array([len(p.shape) for p in parameters], np.int64),
        dtype=np.zeros(len(parameters), np.int64),
        dtypes=(dtype,),
        group=np.zeros(len(parameters), np.int64),
    )


def boxed_layout(table: TensorTable, start: _Ints, shape: _Ints, *, names: Sequence[str] | None = None) -> Layout:
    """A rank that holds one box of each tensor, each contiguous in a buffer of its own.

    Args:
        table: the tensors, all of one type.
        start, shape: the boxes, (tensors, depth). Empty boxes are left out.
    """
    kept = np.flatnonzero((shape > 0).all(axis=1))
    start, shape = start[kept], shape[kept]
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    ndim = table.ndim[kept]
    strides[np.arange(shape.shape[1]) >= ndim[:, None]] = 0
    zeros = np.zeros(len(kept), np.int64)
    dtype = table.dtypes[0]
    return Layout(
        tensors=table,
        pieces=PieceTable(
            tensor=kept, ndim=ndim, start=start, shape=shape, buffer=np.arange(len(kept)), offset=zeros,
            strides=strides, dtype=zeros, dtypes=(dtype,),
        ),
        buffers=BufferTable(
            names=tuple(names or table.names) if len(kept) == len(table) else tuple(table.names[i] for i in kept),
            nbytes=shape.prod(axis=1) * itemsize(dtype), device=zeros, devices=("cpu",), kind=zeros, kinds=("memory",),
            padding=zeros,
        ),
    )  # fmt: skip


def _slice(shape: _Ints, axis: int, rank: int, ranks: int) -> tuple[_Ints, _Ints]:
    """Shard ``rank`` along ``axis``: equal blocks, the last ones shorter or empty (as ``torch.chunk`` cuts)."""
    start, size = np.zeros_like(shape), shape.copy()
    block = -(-shape[:, axis] // ranks)
    start[:, axis] = np.minimum(block * rank, shape[:, axis])
    size[:, axis] = np.minimum(block, shape[:, axis] - start[:, axis])
    return start, size


def hsdp_source(table: TensorTable, *, shards: int, replicas: int, ranks_per_host: int = 8) -> list[Manifest]:
    """Rows of every tensor cut over ``shards`` ranks, the whole ``replicas`` times; ranks of a replica are consecutive."""
    layouts = [boxed_layout(table, *_slice(table.shape, 0, shard, shards)) for shard in range(shards)]
    world = shards * replicas
    return [
        Manifest(rank=rank, world_size=world, host=f"trainer{rank // ranks_per_host}", layout=layouts[rank % shards])
        for rank in range(world)
    ]


def expert_parallel_layouts(table: TensorTable, parameters: Sequence[Parameter], *, ranks: int) -> list[Layout]:
    """A target whose ranks hold whole experts (blocks of them), slices of what splits by rows or columns, and the rest."""
    split = np.array([("none", "rows", "columns", "expert").index(p.split) for p in parameters])
    expert = np.array([p.expert for p in parameters])
    block = -(-(int(expert.max(initial=-1)) + 1) // ranks)
    layouts = []
    for rank in range(ranks):
        start, shape = np.zeros_like(table.shape), table.shape.copy()
        for axis, code in ((0, 1), (1, 2)):
            rows = np.flatnonzero(split == code)
            if len(rows):
                start[rows], shape[rows] = _slice(table.shape[rows], axis, rank, ranks)
        mine = np.flatnonzero((split != 3) | (expert // max(block, 1) == rank))
        layouts.append(boxed_layout(_rows(table, mine), start[mine], shape[mine]))
    return layouts


def _rows(table: TensorTable, rows: _Ints) -> TensorTable:
    return TensorTable(
        names=tuple(table.names[i] for i in rows.tolist()), shape=table.shape[rows], ndim=table.ndim[rows],
        dtype=table.dtype[rows], dtypes=table.dtypes, group=table.group[rows],
    )  # fmt: skip


class Fleet(NamedTuple):
    """Manifests of a source and of its targets."""

    sources: list[Manifest]
    targets: list[list[Manifest]]


def kimi_k2_manifests(
    config: MoEConfig | None = None, *, shards: int = 32, replicas: int = 8, targets: int = 4, target_ranks: int = 32
) -> Fleet:
    """A model of Kimi-K2's shapes: HSDP over ``replicas * shards`` ranks to expert-parallel targets."""
    config = config or MoEConfig()
    rows = list(parameters(config))
    table = tensor_table(rows, config.dtype)
    layouts = expert_parallel_layouts(table, rows, ranks=target_ranks)
    served = [
        [
            Manifest(rank=rank, world_size=target_ranks, host=f"engine{target}-{rank // 8}", layout=layouts[rank])
            for rank in range(target_ranks)
        ]
        for target in range(targets)
    ]
    return Fleet(hsdp_source(table, shards=shards, replicas=replicas), served)
