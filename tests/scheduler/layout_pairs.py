"""Layouts of trainers and engines, each told twice: as memory, in plain torch, and as boxes.

Nothing here comes from an adapter or from the planner. `Megatron.memory` and `Engine.memory` cut whole tensors the way that
the trainer or the engine does, with ``chunk``, ``cat`` and ``view``; `…pieces` say by arithmetic which box of which tensor
lies where in that memory. A *bug* is built into the pieces alone (what a wrong adapter says of right memory), or, for a
target, into both (a split that is wrong and agrees with itself: bytes compare equal, and only a forward pass tells).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor, row_major

Tensors = dict[str, torch.Tensor]

BUGS = ("contiguous qkv", "o_proj reversed", "down_proj reversed", "gate and up swapped", "experts permuted", "padding kept")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shapes. ``groups`` are key-value heads; ``experts`` 0 is a dense MLP."""

    layers: int = 1
    hidden: int = 6
    heads: int = 4
    groups: int = 2
    head_dim: int = 2
    ffn: int = 8
    experts: int = 0
    vocab: int = 11
    bias: bool = False
    tied: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical tensors in checkpoint order."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.groups * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                found[f"{at}self_attn.{name}_proj.weight"] = (rows, h)
                if self.bias:
                    found[f"{at}self_attn.{name}_proj.bias"] = (rows,)
            found[f"{at}self_attn.o_proj.weight"] = (h, q)
            found[f"{at}input_layernorm.weight"] = found[f"{at}post_attention_layernorm.weight"] = (h,)
            if self.experts:
                found[f"{at}mlp.gate.weight"] = (self.experts, h)
            for expert in self.mlps(i):
                found[f"{expert}gate_proj.weight"] = found[f"{expert}up_proj.weight"] = (self.ffn, h)
                found[f"{expert}down_proj.weight"] = (h, self.ffn)
        found["model.norm.weight"] = (h,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, h)
        return found

    def mlps(self, layer: int) -> list[str]:
        """Prefixes of the MLPs of a layer: one, or one for each expert."""
        at = f"model.layers.{layer}.mlp."
        return [f"{at}experts.{e}." for e in range(self.experts)] if self.experts else [at]

    def stamped(self) -> Tensors:
        """Every element is its index among all elements of the model (exact in float32 up to 2**24)."""
        full, at = {}, 0
        for name, shape in self.shapes().items():
            size = int(np.prod(shape))
            full[name] = torch.arange(at, at + size, dtype=torch.float32).view(shape)
            at += size
        return full

    def random(self, seed: int) -> Tensors:
        """Weights for a forward pass."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in self.shapes().items()}


class Place(NamedTuple):
    """A box of a canonical tensor, row-major, in rows of ``width`` elements from ``offset`` on in a local buffer."""

    buffer: str
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(kw_only=True)
class Shard:
    """What one rank holds, as boxes: a list in the making."""

    places: list[Place] = field(default_factory=list)
    padding: dict[str, int] = field(default_factory=dict)

    def put(self, buffer: str, name: str, start: tuple[int, ...], shape: tuple[int, ...], offset: int = 0) -> int:
        """The box lies row-major at ``offset``. Returns where it ends."""
        size = int(np.prod(shape))
        if size:
            self.places.append(Place(buffer, name, start, shape, offset, row_major(shape)))
        return offset + size

    def rows(self, buffer: str, name: str, rows: range, rest: tuple[int, ...], offset: int = 0) -> int:
        return self.put(buffer, name, (rows.start, *(0,) * len(rest)), (len(rows), *rest), offset)

    def columns(self, buffer: str, name: str, height: int, columns: range, offset: int = 0) -> int:
        return self.put(buffer, name, (0, columns.start), (height, len(columns)), offset)


def part(size: int, parts: int, index: int) -> range:
    """Block ``index`` of equal blocks."""
    return range(size // parts * index, size // parts * (index + 1))


def manifest(model: Model, shard: Shard, memory: Tensors, *, rank: int, world: int, host: str, **more: object) -> Manifest:
    """A rank's boxes over its memory."""
    shapes, dtype = model.shapes(), str(next(iter(memory.values())).dtype).removeprefix("torch.")
    alias = {"lm_head.weight": "model.embed_tokens.weight"} if model.tied else {}
    names = list(dict.fromkeys(place.name for place in shard.places))
    buffers = list(memory)
    size = next(iter(memory.values())).element_size()
    return Manifest(
        rank=rank,
        world_size=world,
        host=host,
        tensors=[Tensor(name=name, shape=shapes[alias.get(name, name)], dtype=dtype) for name in names],
        pieces=[
            Piece(
                tensor=names.index(place.name), box=Box(start=place.start, shape=place.shape), strides=place.strides,
                buffer=buffers.index(place.buffer), offset=place.offset, dtype=dtype,
            )
            for place in shard.places
        ],
        buffers=[
            Buffer(name=name, nbytes=tensor.numel() * size, padding=shard.padding.get(name, 0) * size)
            for name, tensor in memory.items()
        ],
        **more,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """Every tensor cut along one axis as ``torch.chunk`` cuts, the whole ``replicas`` times."""

    shards: int = 1
    replicas: int = 1
    axis: int = 0

    @property
    def world(self) -> int:
        return self.shards * self.replicas

    def memory(self, model: Model, rank: int, full: Tensors) -> Tensors:
        held = {}
        for name, tensor in full.items():
            chunks = tensor.chunk(self.shards, min(self.axis, tensor.ndim - 1))
            shard = rank % self.shards
            held[name] = chunks[shard].contiguous() if shard < len(chunks) else tensor[:0]
        return held

    def pieces(self, model: Model, rank: int, bug: str = "") -> Shard:
        shard = Shard()
        for name, shape in model.shapes().items():
            axis = min(self.axis, len(shape) - 1)
            block = -(-shape[axis] // self.shards)
            begin = min(shape[axis], rank % self.shards * block)
            size = min(block, shape[axis] - begin)
            start = tuple(begin if d == axis else 0 for d in range(len(shape)))
            shard.put(name, name, start, (*shape[:axis], size, *shape[axis + 1 :]))
        return shard


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """TP fastest, then DP, then PP. The ranks of a stage are, for experts, expert-TP fastest, then EP, then replicas."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    pad: int = 1
    stacked: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def layers(self, model: Model, rank: int) -> range:
        stage = rank // (self.tp * self.dp)
        return part(model.layers, self.pp, stage)

    def ends(self, rank: int) -> tuple[bool, bool]:
        """Whether the rank is of the first, of the last stage."""
        stage = rank // (self.tp * self.dp)
        return stage == 0, stage == self.pp - 1

    def expert_place(self, rank: int) -> tuple[int, int]:
        within = rank % (self.tp * self.dp)
        return within // self.etp % self.ep, within % self.etp

    def rows_padded(self, model: Model) -> int:
        return -(-model.vocab // (self.tp * self.pad)) * self.tp * self.pad

    # ------------------------------------------------------------------------------------------------- as memory

    def memory(self, model: Model, rank: int, full: Tensors) -> Tensors:
        t, (first, last) = rank % self.tp, self.ends(rank)
        held: Tensors = {}
        embed = full["model.embed_tokens.weight"]
        if first:
            held["embedding"] = self._vocabulary(model, embed, t)
        for i in self.layers(model, rank):
            at, out = f"model.layers.{i}.", f"decoder.layers.{i}."
            for kind in ("weight", "bias") if model.bias else ("weight",):
                q, k, v = (full[f"{at}self_attn.{n}_proj.{kind}"] for n in "qkv")
                by_group = [x.view(model.groups, -1, *x.shape[1:]) for x in (q, k, v)]
                held[f"{out}linear_qkv.{kind}"] = torch.cat(by_group, 1).chunk(self.tp)[t].flatten(0, 1).contiguous()
            held[f"{out}linear_proj"] = full[f"{at}self_attn.o_proj.weight"].chunk(self.tp, 1)[t].contiguous()
            for norm in ("input_layernorm", "post_attention_layernorm"):
                held[f"{out}{norm}"] = full[f"{at}{norm}.weight"]
            if model.experts:
                held[f"{out}router"] = full[f"{at}mlp.gate.weight"]
            held |= self._mlps(model, rank, i, full)
        if last:
            held["final_layernorm"] = full["model.norm.weight"]
            if not (model.tied and first):  # with one stage the tied output layer is the embedding itself
                held["output_layer"] = self._vocabulary(model, embed if model.tied else full["lm_head.weight"], t)
        return held

    def _vocabulary(self, model: Model, tensor: torch.Tensor, t: int) -> torch.Tensor:
        padding = tensor.new_full((self.rows_padded(model) - model.vocab, model.hidden), -7.0)
        return torch.cat([tensor, padding]).chunk(self.tp)[t].contiguous()

    def _mlps(self, model: Model, rank: int, layer: int, full: Tensors) -> Tensors:
        e, shard = self.expert_place(rank) if model.experts else (0, rank % self.tp)
        parts = self.etp if model.experts else self.tp
        mine = model.mlps(layer)
        if model.experts:
            mine = [mine[i] for i in np.array_split(np.arange(model.experts), self.ep)[e]]
        fc1 = [
            torch.cat([full[f"{at}{n}_proj.weight"].chunk(parts)[shard] for n in ("gate", "up")]) for at in mine
        ]  # fmt: skip
        fc2 = [full[f"{at}down_proj.weight"].chunk(parts, 1)[shard].contiguous() for at in mine]
        if self.stacked:
            return {f"decoder.layers.{layer}.fc1": torch.stack(fc1), f"decoder.layers.{layer}.fc2": torch.stack(fc2)}
        return {f"{at}fc1": w for at, w in zip(mine, fc1, strict=True)} | {
            f"{at}fc2": w for at, w in zip(mine, fc2, strict=True)
        }

    # -------------------------------------------------------------------------------------------------- as boxes

    def pieces(self, model: Model, rank: int, bug: str = "") -> Shard:
        t, (first, last) = rank % self.tp, self.ends(rank)
        shard, h = Shard(), model.hidden
        if first:
            self._vocabulary_box(model, shard, "embedding", "model.embed_tokens.weight", t=t, bug=bug)
        for i in self.layers(model, rank):
            at, out = f"model.layers.{i}.", f"decoder.layers.{i}."
            for kind, rest in (("weight", (h,)), ("bias", ())) if model.bias else (("weight", (h,)),):
                self._qkv_boxes(model, shard, f"{out}linear_qkv.{kind}", f"{at}self_attn.", kind=kind, rest=rest, t=t, bug=bug)
            slot = self.tp - 1 - t if bug == "o_proj reversed" else t
            columns = part(model.heads * model.head_dim, self.tp, slot)
            shard.columns(f"{out}linear_proj", f"{at}self_attn.o_proj.weight", h, columns)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shard.rows(f"{out}{norm}", f"{at}{norm}.weight", range(h), ())
            if model.experts:
                shard.rows(f"{out}router", f"{at}mlp.gate.weight", range(model.experts), (h,))
            self._mlp_boxes(model, shard, rank, i, bug)
        if last:
            shard.rows("final_layernorm", "model.norm.weight", range(h), ())
            if not (model.tied and first):
                name = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
                self._vocabulary_box(model, shard, "output_layer", name, t=t, bug=bug)
        return shard

    def _vocabulary_box(self, model: Model, shard: Shard, buffer: str, name: str, *, t: int, bug: str) -> None:
        rows = part(self.rows_padded(model), self.tp, t)
        if bug != "padding kept":
            rows = range(min(rows.start, model.vocab), min(rows.stop, model.vocab))
        shard.rows(buffer, name, rows, (model.hidden,))

    def _qkv_boxes(
        self, model: Model, shard: Shard, buffer: str, at: str, *, kind: str, rest: tuple[int, ...], t: int, bug: str
    ) -> None:
        d, per = model.head_dim, model.heads // model.groups
        mine = part(model.groups, self.tp, t)
        if bug == "contiguous qkv":
            end = 0
            for n, wide in (("q", per * d), ("k", d), ("v", d)):
                end = shard.rows(buffer, f"{at}{n}_proj.{kind}", range(mine.start * wide, mine.stop * wide), rest, end)
            return
        end = 0
        for group in mine:
            for n, wide in (("q", per * d), ("k", d), ("v", d)):
                end = shard.rows(buffer, f"{at}{n}_proj.{kind}", range(group * wide, (group + 1) * wide), rest, end)

    def _mlp_boxes(self, model: Model, shard: Shard, rank: int, layer: int, bug: str) -> None:
        e, s = self.expert_place(rank) if model.experts else (0, rank % self.tp)
        parts, h = (self.etp if model.experts else self.tp), model.hidden
        mlps, count = model.mlps(layer), max(1, model.experts) // (self.ep if model.experts else 1)
        rows = part(model.ffn, parts, s)
        columns = part(model.ffn, parts, parts - 1 - s if bug == "down_proj reversed" else s)
        names = ("up", "gate") if bug == "gate and up swapped" else ("gate", "up")
        for local in range(count):
            told = e * count + local
            at = mlps[model.experts - 1 - told] if bug == "experts permuted" and model.experts else mlps[told]
            true = mlps[told]
            fc1, fc2 = (f"decoder.layers.{layer}.fc{n}" if self.stacked else f"{true}fc{n}" for n in (1, 2))
            skip = local if self.stacked else 0
            end = skip * 2 * len(rows) * h
            for n in names:
                end = shard.rows(fc1, f"{at}{n}_proj.weight", rows, (h,), end)
            shard.columns(fc2, f"{at}down_proj.weight", h, columns, skip * h * len(rows))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A target of ``tp`` ranks: projections fused or not, key-value heads replicated when there are fewer than ranks.

    ``ep``: experts are spread whole over the ranks; else each rank has a slice of every expert. Experts are stacked as
    ``w13`` and ``w2``; ``up_first`` stores ``[w3; w1]``. ``separate_head``: a tied model's output layer has memory of its own.
    """

    tp: int = 1
    fused: bool = True
    ep: bool = False
    up_first: bool = False
    pad: int = 1
    separate_head: bool = False

    @property
    def world(self) -> int:
        return self.tp

    def kv_heads(self, model: Model, t: int) -> range:
        if model.groups >= self.tp:
            return part(model.groups, self.tp, t)
        head = t * model.groups // self.tp
        return range(head, head + 1)

    def rows_padded(self, model: Model) -> int:
        return -(-model.vocab // (self.tp * self.pad)) * self.tp * self.pad

    # ------------------------------------------------------------------------------------------------- as memory

    def memory(self, model: Model, rank: int, full: Tensors, bug: str = "") -> Tensors:
        """What the rank should hold; NaN where no weight belongs."""
        back = self.tp - 1 - rank
        held: Tensors = {"embed_tokens": self._vocabulary(model, full["model.embed_tokens.weight"], rank, bug)}
        for i in range(model.layers):
            at, out = f"model.layers.{i}.", f"layers.{i}."
            for kind in ("weight", "bias") if model.bias else ("weight",):
                held |= self._qkv(model, rank, [full[f"{at}self_attn.{n}_proj.{kind}"] for n in "qkv"], f"{out}{kind}.", bug)
            o_proj = full[f"{at}self_attn.o_proj.weight"].chunk(self.tp, 1)
            held[f"{out}o_proj"] = o_proj[back if bug == "o_proj reversed" else rank].contiguous()
            for norm in ("input_layernorm", "post_attention_layernorm"):
                held[f"{out}{norm}"] = full[f"{at}{norm}.weight"].clone()
            held |= self._experts(model, rank, i, full, bug) if model.experts else self._dense(model, rank, i, full, bug)
        held["norm"] = full["model.norm.weight"].clone()
        if not model.tied or self.separate_head:
            head = full["model.embed_tokens.weight" if model.tied else "lm_head.weight"]
            held["lm_head"] = self._vocabulary(model, head, rank, bug)
        return held

    def _vocabulary(self, model: Model, tensor: torch.Tensor, t: int, bug: str) -> torch.Tensor:
        rows = self.rows_padded(model) // self.tp
        if bug == "padding kept":  # the padding is taken for a part of every shard
            spread = tensor.chunk(self.tp)
            mine = spread[t] if t < len(spread) else tensor[:0]
            return torch.cat([mine, tensor.new_full((rows - len(mine), model.hidden), torch.nan)])
        padding = tensor.new_full((self.rows_padded(model) - model.vocab, model.hidden), torch.nan)
        return torch.cat([tensor, padding]).chunk(self.tp)[t].contiguous()

    def _qkv(self, model: Model, t: int, qkv: list[torch.Tensor], at: str, bug: str) -> Tensors:
        heads = self.kv_heads(model, t)
        q, k, v = (x.unflatten(0, (-1, model.head_dim)) for x in qkv)
        mine = [q.chunk(self.tp)[t], k[heads.start : heads.stop], v[heads.start : heads.stop]]
        if bug == "contiguous qkv":
            rows = sum(len(x) for x in mine)
            whole = torch.cat([q, k, v])
            return {f"{at}qkv_proj": whole[min(t * rows, len(whole) - rows) :][:rows].flatten(0, 1).contiguous()}
        if self.fused:
            return {f"{at}qkv_proj": torch.cat(mine).flatten(0, 1).contiguous()}
        return {f"{at}{n}_proj": x.flatten(0, 1).contiguous() for n, x in zip("qkv", mine, strict=True)}

    def _dense(self, model: Model, t: int, layer: int, full: Tensors, bug: str) -> Tensors:
        at, out = f"model.layers.{layer}.mlp.", f"layers.{layer}."
        gate, up = (full[f"{at}{n}_proj.weight"].chunk(self.tp)[t] for n in ("gate", "up"))
        if bug == "gate and up swapped":
            gate, up = up, gate
        down = full[f"{at}down_proj.weight"].chunk(self.tp, 1)
        held = {f"{out}down_proj": down[self.tp - 1 - t if bug == "down_proj reversed" else t].contiguous()}
        if self.fused:
            return held | {f"{out}gate_up_proj": torch.cat([gate, up])}
        return held | {f"{out}gate_proj": gate.contiguous(), f"{out}up_proj": up.contiguous()}

    def _experts(self, model: Model, t: int, layer: int, full: Tensors, bug: str) -> Tensors:
        order = list(range(model.experts))
        if bug == "experts permuted":
            order.reverse()
        if self.ep:
            order = order[part(model.experts, self.tp, t).start : part(model.experts, self.tp, t).stop]
        parts, s = (1, 0) if self.ep else (self.tp, t)
        back = parts - 1 - s if bug == "down_proj reversed" else s
        names = ["up", "gate"] if self.up_first != (bug == "gate and up swapped") else ["gate", "up"]
        w13, w2 = [], []
        for e in order:
            at = f"model.layers.{layer}.mlp.experts.{e}."
            w13.append(torch.cat([full[f"{at}{n}_proj.weight"].chunk(parts)[s] for n in names]))
            w2.append(full[f"{at}down_proj.weight"].chunk(parts, 1)[back])
        out = f"layers.{layer}."
        router = full[f"model.layers.{layer}.mlp.gate.weight"].clone()
        return {f"{out}w13": torch.stack(w13), f"{out}w2": torch.stack(w2), f"{out}router": router}

    # -------------------------------------------------------------------------------------------------- as boxes

    def pieces(self, model: Model, rank: int, bug: str = "") -> Shard:
        shard, h, back = Shard(), model.hidden, self.tp - 1 - rank
        self._vocabulary_box(model, shard, "embed_tokens", "model.embed_tokens.weight", t=rank, bug=bug)
        for i in range(model.layers):
            at, out = f"model.layers.{i}.", f"layers.{i}."
            for kind, rest in (("weight", (h,)), ("bias", ())) if model.bias else (("weight", (h,)),):
                self._qkv_boxes(model, shard, rank, f"{at}self_attn.", f"{out}{kind}.", kind=kind, rest=rest, bug=bug)
            columns = part(model.heads * model.head_dim, self.tp, back if bug == "o_proj reversed" else rank)
            shard.columns(f"{out}o_proj", f"{at}self_attn.o_proj.weight", h, columns)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shard.rows(f"{out}{norm}", f"{at}{norm}.weight", range(h), ())
            self._mlp_boxes(model, shard, rank, i, bug)
        shard.rows("norm", "model.norm.weight", range(h), ())
        if not model.tied or self.separate_head:
            self._vocabulary_box(model, shard, "lm_head", "lm_head.weight", t=rank, bug=bug)
        return shard

    def _vocabulary_box(self, model: Model, shard: Shard, buffer: str, name: str, *, t: int, bug: str) -> None:
        size = self.rows_padded(model) // self.tp
        rows = part(self.rows_padded(model), self.tp, t)
        if bug == "padding kept":
            size_told = -(-model.vocab // self.tp)
            rows = range(t * size_told, (t + 1) * size_told)
        rows = range(min(rows.start, model.vocab), min(rows.stop, model.vocab))
        shard.rows(buffer, name, rows, (model.hidden,))
        shard.padding[buffer] = (size - len(rows)) * model.hidden

    def _qkv_boxes(
        self, model: Model, shard: Shard, t: int, at: str, out: str, *, kind: str, rest: tuple[int, ...], bug: str
    ) -> None:
        d, heads = model.head_dim, self.kv_heads(model, t)
        q, kv = part(model.heads * d, self.tp, t), range(heads.start * d, heads.stop * d)
        if bug == "contiguous qkv":
            wide = len(q) + 2 * len(kv)
            sizes = {"q": model.heads * d, "k": model.groups * d, "v": model.groups * d}
            begin, before, end = min(t * wide, sum(sizes.values()) - wide), 0, 0
            for n, size in sizes.items():
                rows = range(max(begin, before) - before, min(begin + wide, before + size) - before)
                end = shard.rows(f"{out}qkv_proj", f"{at}{n}_proj.{kind}", rows, rest, end) if rows else end
                before += size
            return
        end = 0
        for n, rows in (("q", q), ("k", kv), ("v", kv)):
            name = f"{at}{n}_proj.{kind}"
            end = shard.rows(f"{out}{'qkv' if self.fused else n}_proj", name, rows, rest, end if self.fused else 0)

    def _mlp_boxes(self, model: Model, shard: Shard, t: int, layer: int, bug: str) -> None:
        h, out = model.hidden, f"layers.{layer}."
        whole = bool(model.experts) and self.ep
        rows = part(model.ffn, 1, 0) if whole else part(model.ffn, self.tp, t)
        columns = rows
        if bug == "down_proj reversed" and not whole:
            columns = part(model.ffn, self.tp, self.tp - 1 - t)
        names = ("up", "gate") if bug == "gate and up swapped" else ("gate", "up")
        if not model.experts:
            (at,), end = model.mlps(layer), 0
            for slot, n in zip(("gate", "up"), names, strict=True):
                buffer = "gate_up_proj" if self.fused else f"{slot}_proj"
                end = shard.rows(f"{out}{buffer}", f"{at}{n}_proj.weight", rows, (h,), end if self.fused else 0)
            shard.columns(f"{out}down_proj", f"{at}down_proj.weight", h, columns)
            return
        shard.rows(f"{out}router", f"model.layers.{layer}.mlp.gate.weight", range(model.experts), (h,))
        names = names[::-1] if self.up_first else names
        mine = part(model.experts, self.tp, t) if self.ep else range(model.experts)
        for local, e in enumerate(mine):
            at = model.mlps(layer)[model.experts - 1 - e if bug == "experts permuted" else e]
            end = local * 2 * len(rows) * h
            for n in names:
                end = shard.rows(f"{out}w13", f"{at}{n}_proj.weight", rows, (h,), end)
            shard.columns(f"{out}w2", f"{at}down_proj.weight", h, columns, local * h * len(rows))


# ------------------------------------------------------------------------------------------------------- what is drawn


@st.composite
def models(draw: st.DrawFn, *, moe: bool) -> Model:
    groups, experts = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4])) if moe else 0
    return Model(
        layers=1 if experts else draw(st.sampled_from([1, 1, 2])),
        hidden=draw(st.integers(1, 5)),
        groups=groups,
        heads=draw(st.sampled_from([h for h in (4, 8) if h >= groups])),
        head_dim=draw(st.integers(1, 2)),
        ffn=8,
        experts=experts,
        vocab=draw(st.integers(1, 19)),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if number % n == 0]


@st.composite
def fsdp(draw: st.DrawFn, model: Model) -> FSDP:
    shards = draw(st.integers(1, 8))
    return FSDP(shards=shards, replicas=draw(st.integers(1, max(1, 8 // shards))), axis=draw(st.sampled_from([0, 0, 1])))


@st.composite
def megatron(draw: st.DrawFn, model: Model) -> Megatron:
    tp, dp = draw(st.sampled_from(_divisors(model.groups, 4))), draw(st.integers(1, 2))
    etp = draw(st.sampled_from([n for n in _divisors(tp * dp, 2) if model.ffn % n == 0]))
    ep = draw(st.sampled_from([n for n in _divisors(tp * dp // etp, 8) if model.experts % n == 0])) if model.experts else 1
    return Megatron(
        tp=tp, dp=dp, ep=ep, etp=etp if model.experts else 1, pp=draw(st.sampled_from(_divisors(model.layers, 2))),
        pad=draw(st.integers(1, 3)), stacked=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def engines(draw: st.DrawFn, model: Model) -> Engine:
    tp = draw(st.sampled_from([n for n in (1, 2, 2, 4, 4, 8) if model.heads % n == 0]))
    return Engine(
        tp=tp,
        fused=draw(st.booleans()),
        ep=bool(model.experts) and model.experts % tp == 0 and draw(st.booleans()),
        up_first=draw(st.booleans()),
        pad=draw(st.integers(1, 3)),
        separate_head=draw(st.booleans()),
    )
