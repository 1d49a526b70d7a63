"""How Megatron trainers and engines split a model, at any size.

Their memory is laid out here once more, apart from the adapters that read it from live models: at scale there is no live
model to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from syncline.scheduler.layout import Layout, Manifest

from .layouts import Draft, Model, fsdp, indivisible, manifests_of, part, share_equal, sibling
from .models import Architecture, Parameter, kimi_k2

_VOCAB_PAD = 128
"""Megatron pads the vocabulary to a multiple of this for each rank."""


class Fleet(NamedTuple):
    """Manifests of a source and of its targets."""

    sources: list[Manifest]
    targets: list[list[Manifest]]


# --------------------------------------------------------------------------------------------------------------- Megatron


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """A Megatron trainer: TP fastest, then DP, then PP; the ranks of a stage are, for experts, expert-TP, EP, replicas."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def problems(self, shape: Architecture) -> list[str]:
        """Why this model cannot be split so."""
        stage, found = self.tp * self.dp, []
        if stage % (self.ep * self.etp):
            found.append(f"ep * etp = {self.ep * self.etp} does not divide the {stage} ranks of a stage (tp * dp)")
        if self.pp > shape.layers:
            found.append(f"pp = {self.pp} is above the {shape.layers} layers")
        sizes = {"tp": [("heads", shape.heads), ("intermediate", shape.intermediate)]}
        if shape.latent is None:
            sizes["tp"].append(("kv_heads", shape.kv_heads))
        if shape.experts:
            sizes |= {"ep": [("experts", shape.experts)], "etp": [("expert_intermediate", shape.expert_intermediate)]}
        return found + indivisible(self, sizes)

    def manifests(self, model: Model, ranks_per_host: int) -> list[Manifest]:
        stage = self.tp * self.dp
        keys = [(r // stage, r % self.tp, self._expert_place(r) if model.shape.experts else 0) for r in range(self.world)]
        return manifests_of(share_equal(keys, lambda rank: self._layout(model, rank)), "trainer", ranks_per_host)

    def _expert_place(self, rank: int) -> tuple[int, int]:
        within = rank % (self.tp * self.dp)
        return within // self.etp % self.ep, within % self.etp

    def _layout(self, model: Model, rank: int) -> Layout:
        shape, t, stage = model.shape, rank % self.tp, rank // (self.tp * self.dp)
        mine = np.array_split(np.arange(shape.layers), self.pp)[stage].tolist()
        experts = part(shape.experts, self.ep, self._expert_place(rank)[0])
        draft = Draft(model, expert_group=1)
        padded = -(-shape.vocab // (_VOCAB_PAD * self.tp)) * _VOCAB_PAD * self.tp
        qkv: dict[str, list[int]] = {}
        last = stage == self.pp - 1
        for index in model.rows_with(experts):
            p = model.rows[index]
            if p.role == "embed":
                if stage == 0 or (shape.tied and last):
                    draft.vocabulary(p.name, index, part(padded, self.tp, t))
            elif p.role == "head" or p.layer < 0:
                if last:
                    rows = part(padded, self.tp, t)
                    draft.vocabulary(p.name, index, rows) if p.role == "head" else draft.whole(p.name, index)
            elif p.layer in mine:
                if p.role in {"q", "k", "v"}:
                    qkv.setdefault(p.name.replace(f".{p.role}_proj.", ".linear_qkv."), []).append(index)
                else:
                    self._in_layer(draft, model, rank, index)
        for buffer, (q, k, v) in qkv.items():
            self._interleaved(draft, shape, buffer, (q, k, v), t)
        return draft.layout()

    def _in_layer(self, draft: Draft, model: Model, rank: int, index: int) -> None:
        p, t, parts = model.rows[index], rank % self.tp, self.tp
        if p.expert >= 0:
            _, t = self._expert_place(rank)
            parts = self.etp
        if p.role in {"gate", "up"}:  # [gate; up] of this rank
            rows = part(p.shape[0], parts, t)
            draft.rows(sibling(p.name, "linear_fc1"), index, rows, len(rows) * p.shape[1] if p.role == "up" else 0)
        elif p.role in {"down", "columns"}:
            draft.columns(p.name, index, part(p.shape[1], parts, t))
        elif p.role == "rows":
            draft.rows(p.name, index, part(p.shape[0], parts, t))
        else:
            draft.whole(p.name, index)

    def _interleaved(self, draft: Draft, shape: Architecture, buffer: str, qkv: tuple[int, int, int], t: int) -> None:
        """Queries, keys and values of one group after those of the other."""
        wide = (shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim)
        end = 0
        for group in part(shape.kv_heads, self.tp, t):
            for index, rows in zip(qkv, wide, strict=True):
                end = draft.rows(buffer, index, range(group * rows, (group + 1) * rows), end)


# ---------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine: ``dp`` groups of ``tp`` ranks; ``ep`` ranks share out whole experts, else experts are sliced over all ranks.

    Fused as engines do it (``qkv_proj``, ``gate_up_proj``, ``w13`` and ``w2``), or every parameter on its own. Key-value
    heads are replicated where there are fewer than ranks. ``whole``: its loader takes whole boxes only.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    fused: bool = True
    whole: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def etp(self) -> int:
        """Ranks that share an expert."""
        return self.world // self.ep

    def problems(self, shape: Architecture) -> list[str]:
        """Why this model cannot be split so."""
        found = [] if self.world % self.ep == 0 else [f"ep = {self.ep} does not divide the {self.world} ranks (tp * dp)"]
        sizes = {"tp": [("heads", shape.heads), ("intermediate", shape.intermediate)]}
        if shape.latent is None and shape.kv_heads % self.tp and self.tp % shape.kv_heads:
            found.append(f"tp = {self.tp} and kv_heads = {shape.kv_heads}: neither divides the other")
        if shape.experts and not found:
            sizes |= {"ep": [("experts", shape.experts)], "etp": [("expert_intermediate", shape.expert_intermediate)]}
        return found + indivisible(self, sizes)

    def manifests(self, model: Model, host: str, ranks_per_host: int) -> list[Manifest]:
        return manifests_of(self.layouts(model), host, ranks_per_host)

    def layouts(self, model: Model) -> list[Layout]:
        """What each rank holds; targets on other hosts hold the same."""
        sparse = bool(model.shape.experts)
        keys = [(r % self.tp, r if sparse else 0) for r in range(self.world)]
        return share_equal(keys, lambda rank: self._layout(model, rank))

    def _layout(self, model: Model, rank: int) -> Layout:
        draft = Draft(model)
        ends: dict[str, int] = {}
        padded = -(-model.shape.vocab // (64 * self.tp)) * 64 * self.tp
        mine = part(model.shape.experts, self.ep, rank // self.etp)
        for index in model.rows_with(mine):
            p = model.rows[index]
            if p.role in {"embed", "head"}:
                draft.vocabulary(p.name, index, part(padded, self.tp, rank % self.tp))
            elif p.expert >= 0:
                self._expert(draft, p, index, rank, p.expert - mine.start)
            elif p.role == "whole":
                draft.whole(p.name, index)
            elif p.role in {"columns", "down"}:
                draft.columns(p.name, index, part(p.shape[1], self.tp, rank % self.tp))
            else:
                buffer = self._fused_into(p)
                ends[buffer] = draft.rows(buffer, index, self._rows(model.shape, p, rank % self.tp), ends.get(buffer, 0))
        layout = draft.layout()
        return layout if not self.whole else _whole(layout)

    def _fused_into(self, p: Parameter) -> str:
        fused = {"q": "qkv_proj", "k": "qkv_proj", "v": "qkv_proj", "gate": "gate_up_proj", "up": "gate_up_proj"}
        return sibling(p.name, fused[p.role]) if self.fused and p.role in fused else p.name

    def _rows(self, shape: Architecture, p: Parameter, t: int) -> range:
        if p.role in {"k", "v"} and shape.kv_heads < self.tp:
            head, rows = t * shape.kv_heads // self.tp, p.shape[0] // shape.kv_heads
            return range(head * rows, (head + 1) * rows)
        return part(p.shape[0], self.tp, t)

    def _expert(self, draft: Draft, p: Parameter, index: int, rank: int, local: int) -> None:
        s = rank % self.etp
        at, kind = p.name.split(".experts.")[0] + ".experts.", p.name.rsplit(".", 1)[1]
        if p.role == "down":
            columns = part(p.shape[1], self.etp, s)
            buffer, skip = (f"{at}w2_{kind}", local) if self.fused else (p.name, 0)
            draft.columns(buffer, index, columns, skip * p.shape[0] * len(columns))
            return
        rows = part(p.shape[0], self.etp, s)
        buffer, skip = (f"{at}w13_{kind}", 2 * local + (p.role == "up")) if self.fused else (p.name, 0)
        draft.rows(buffer, index, rows, skip * len(rows) * p.shape[1])


def _whole(layout: Layout) -> Layout:
    return Layout(
        tensors=layout.tensors, pieces=layout.pieces, buffers=layout.buffers, aliases=layout.aliases, whole_tensors=True
    )


def kimi_k2_manifests(
    shape: Architecture | None = None, *, shards: int = 32, replicas: int = 8, targets: int = 4, engine: Engine | None = None
) -> Fleet:
    """A model of Kimi-K2's shapes: HSDP over ``replicas * shards`` ranks to targets with TP 8 and EP 32."""
    model, engine = Model.of(shape or kimi_k2()), engine or Engine(tp=8, dp=4, ep=32)
    layouts = engine.layouts(model)
    served = [manifests_of(layouts, f"engine{target}-", 8) for target in range(targets)]
    return Fleet(fsdp(model, shards=shards, replicas=replicas), served)
