"""Executes a plan over plain arrays, and runs a tensor-parallel model on what has landed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from syncline.scheduler.plan import Plan
from syncline.scheduler.programs import Region

Arrays = list[np.ndarray]


def view(memory: np.ndarray, region: Region) -> np.ndarray:
    """A region of flat memory. numpy refuses one that reaches beyond."""
    size = memory.itemsize
    strides = tuple(s * size for s in region.strides)
    return np.ndarray(region.shape, memory.dtype, memory.data, region.offset * size, strides)


def execute(plan: Plan, sources: Sequence[Arrays], targets: Sequence[Sequence[Arrays]]) -> int:
    """Do what the programs say, message by message and bucket by bucket. All memory is of one type.

    Args:
        sources: each rank's buffers, flat.
        targets: buffers of each rank of each target, flat; written to.

    Returns:
        Elements that source ranks sent each other.
    """
    programs = [plan.source_program(rank) for rank in range(len(sources))]
    dtype = next(buffer.dtype for buffers in sources for buffer in buffers)
    wire: dict[tuple[int, int, int], np.ndarray] = {}
    for program, memory in zip(programs, sources, strict=True):
        for task in program.tasks:
            for message in task.sends:
                packed = np.full(message.nbytes // dtype.itemsize, np.nan, dtype)
                for src, dst in message.copies:
                    view(packed, dst)[...] = view(memory[src.buffer], src)
                wire[program.rank, task.owner, message.tag] = packed
    moved = sum(len(packed) for packed in wire.values())
    buckets: dict[int, np.ndarray] = {}
    for program, memory in zip(programs, sources, strict=True):
        for task in program.tasks:
            if task.owner == program.rank:
                bucket = buckets[task.index] = np.full(task.nbytes // dtype.itemsize, np.nan, dtype)
                for src, dst in task.local:
                    view(bucket, dst)[...] = view(memory[src.buffer], src)
                for message in task.receives:
                    packed = wire.pop((message.peer, program.rank, message.tag))
                    for src, dst in message.copies:
                        view(bucket, dst)[...] = view(packed, src)
    assert not wire
    for target, ranks in enumerate(targets):
        for rank, memory in enumerate(ranks):
            for task in plan.target_program(target, rank).tasks:
                for landing in task.landings:
                    segment = landing.segment
                    start = segment.offset // dtype.itemsize
                    content = buckets[task.index][start : start + segment.nbytes // dtype.itemsize]
                    for dest in landing.dests:
                        view(memory[dest.buffer], dest)[...] = content.reshape(dest.shape)
    return moved


# --------------------------------------------------------------------------------------------------- the model itself


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """(heads, tokens, dim), (kv heads, tokens, dim) twice, and the output projection's columns for these heads."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return mixed.transpose(0, 1).flatten(1) @ o.T


def _mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int) -> torch.Tensor:
    return F.linear(x, weight, bias).unflatten(-1, (-1, dim)).transpose(0, 1)


def unsharded(model: Any, full: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits from whole weights."""
    x = full["model.embed_tokens.weight"][tokens]
    for i in range(model.layers):
        at = f"model.layers.{i}."
        a = _norm(x, full[f"{at}input_layernorm.weight"])
        q, k, v = (
            _heads(a, full[f"{at}self_attn.{n}_proj.weight"], full.get(f"{at}self_attn.{n}_proj.bias"), model.head_dim)
            for n in "qkv"
        )
        x = x + _attention(q, k, v, full[f"{at}self_attn.o_proj.weight"])
        a = _norm(x, full[f"{at}post_attention_layernorm.weight"])
        weights = (a @ full[f"{at}mlp.gate.weight"].T).softmax(-1).T if model.experts else torch.ones(1, len(a), dtype=a.dtype)
        for share, mlp in zip(weights, model.mlps(i), strict=True):
            x = x + share[:, None] * _mlp(a, *(full[f"{mlp}{n}_proj.weight"] for n in ("gate", "up", "down")))
    head = full["model.embed_tokens.weight" if model.tied else "lm_head.weight"]
    return _norm(x, full["model.norm.weight"]) @ head.T


def tensor_parallel(model: Any, engine: Any, ranks: Sequence[dict[str, torch.Tensor]], tokens: torch.Tensor) -> torch.Tensor:
    """Logits from the ranks' own buffers; an all-reduce is a sum over the ranks."""
    rows = engine.rows_padded(model) // engine.tp
    x = sum((_embedded(held["embed_tokens"], tokens - t * rows) for t, held in enumerate(ranks)), torch.zeros(()))
    for i in range(model.layers):
        at = f"layers.{i}."
        a = [_norm(x, held[f"{at}input_layernorm"]) for held in ranks]
        x = x + sum(
            _attention(*_qkv(model, engine, held, at, y), held[f"{at}o_proj"]) for y, held in zip(a, ranks, strict=True)
        )
        a = [_norm(x, held[f"{at}post_attention_layernorm"]) for held in ranks]
        mlps = zip(a, ranks, strict=True)
        if model.experts:
            x = x + sum(_experts(model, engine, held, at, y, t=t) for t, (y, held) in enumerate(mlps))
        else:
            x = x + sum(_mlp(y, *_gate_up(held, at), held[f"{at}down_proj"]) for y, held in mlps)
    name = "embed_tokens" if model.tied and not engine.separate_head else "lm_head"
    return torch.cat([_norm(x, held["norm"]) @ held[name].T for held in ranks], -1)[:, : model.vocab]


def _embedded(table: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    here = (local >= 0) & (local < len(table))
    return torch.where(here[:, None], table[local.clamp(0, len(table) - 1)], 0.0)


def _qkv(model: Any, engine: Any, held: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> list[torch.Tensor]:
    q, kv = model.heads // engine.tp * model.head_dim, max(1, model.groups // engine.tp) * model.head_dim

    def parts(kind: str) -> Sequence[torch.Tensor | None]:
        if f"{at}{kind}.qkv_proj" in held:
            return held[f"{at}{kind}.qkv_proj"].split([q, kv, kv])
        return [held.get(f"{at}{kind}.{n}_proj") for n in "qkv"]

    return [_heads(x, w, b, model.head_dim) for w, b in zip(parts("weight"), parts("bias"), strict=True)]


def _gate_up(held: dict[str, torch.Tensor], at: str) -> Sequence[torch.Tensor]:
    fused = held.get(f"{at}gate_up_proj")
    return fused.chunk(2) if fused is not None else [held[f"{at}gate_proj"], held[f"{at}up_proj"]]


def _experts(model: Any, engine: Any, held: dict[str, torch.Tensor], at: str, x: torch.Tensor, *, t: int) -> torch.Tensor:
    shares = (x @ held[f"{at}router"].T).softmax(-1).T
    first = t * (model.experts // engine.tp) if engine.ep else 0
    total = torch.zeros_like(x)
    for local, (w13, w2) in enumerate(zip(held[f"{at}w13"], held[f"{at}w2"], strict=True)):
        one, two = w13.chunk(2)
        gate, up = (two, one) if engine.up_first else (one, two)
        total = total + shares[first + local][:, None] * _mlp(x, gate, up, w2)
    return total
