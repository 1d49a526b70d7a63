"""Bugs to seed in the adapter's layout: each leaves every shape as it was, so that only contents tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncline.adapters.trainers import megatron_mapping
from syncline.adapters.trainers.families import FAMILIES
from syncline.adapters.trainers.megatron_layout import Segment, Shard, qkv_segments
from syncline.adapters.trainers.megatron_tables import QKV, Dims, Family, Gated, Row, Vocabulary


class ContiguousQKV(QKV):
    """All queries, then all keys, then all values."""

    def segments(self, rows: int, dims: Dims) -> list[Segment]:
        found = qkv_segments(self.q, self.k, self.v, heads=dims.heads, groups=dims.groups, head_dim=dims.head_dim)
        return sorted(found, key=lambda segment: (self.q, self.k, self.v).index(segment.to))


class SwappedGated(Gated):
    """``[up; gate]``."""

    def segments(self, rows: int, dims: Dims) -> list[Segment]:
        return list(super().segments(rows, dims))[::-1]


class PaddedVocabulary(Vocabulary):
    """Padding is content."""

    def segments(self, rows: int, dims: Dims) -> list[Segment]:
        return [Segment(self.to, rows, 0, rows)]


def _with_rules(model_type: str, change: Callable[[Row], Row]) -> Family:
    family = next(family for family in FAMILIES if model_type in family.model_types)
    return replace(family, rows=tuple(map(change, family.rows)))


def _contiguous_qkv(row: Row) -> Row:
    rule = row.rule
    return replace(row, rule=ContiguousQKV(rule.q, rule.k, rule.v)) if isinstance(rule, QKV) else row


def _swapped_gate(row: Row) -> Row:
    rule = row.rule
    return replace(row, rule=SwappedGated(rule.gate, rule.up)) if isinstance(rule, Gated) else row


def _padding_kept(row: Row) -> Row:
    return replace(row, rule=PaddedVocabulary(row.rule.to)) if isinstance(row.rule, Vocabulary) else row


def _whole_gate(row: Row) -> Row:
    """Shards of ``[gate; up]`` put one behind the other, as if the whole were cut in rows."""
    return replace(row, rule=replace(row.rule, stride=1)) if isinstance(row.rule, Gated) else row


TABLES = {
    "contiguous qkv": _contiguous_qkv,
    "gate and up swapped": _swapped_gate,
    "gate and up cut as one": _whole_gate,
    "padding kept": _padding_kept,
}


def _reversed_rank_order(local: Any, segments: Any, shard: Shard | None) -> Any:
    """On `o_proj` and `down_proj`, whose columns are sharded."""
    if shard is not None and shard.axis == 1:
        shard = shard._replace(rank=shard.ranks - 1 - shard.rank)
    return _boxes(local, segments, shard)


def _permuted_experts(mapper: Any, parameter: Any, match: Any, layers: Any) -> Any:
    numbers = _numbers(mapper, parameter, match, layers)
    if numbers is not None and "expert" in numbers:
        first = mapper.places.expert.rank * mapper.local_experts
        numbers["expert"] = first + (numbers["expert"] - first + 1) % mapper.local_experts
    return numbers


def _layers_from_zero(_chunk: Any) -> Any:
    """As if every chunk began with layer 0."""
    numbers = _layer_numbers(_chunk)
    return {path: int(path.rpartition(".")[2]) for path in numbers}


_boxes = megatron_mapping.boxes
_numbers = megatron_mapping._Mapper._numbers
_layer_numbers = megatron_mapping.layer_numbers

CODE = {
    "rank order reversed": (megatron_mapping, "boxes", _reversed_rank_order),
    "experts permuted": (megatron_mapping._Mapper, "_numbers", _permuted_experts),
    "layers numbered by chunk": (megatron_mapping, "layer_numbers", _layers_from_zero),
}


class Seeded:
    """A seeded bug: the options that make a source have it; `restore` takes it out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._undo: list[tuple[Any, str, Any]] = []
        if name in CODE:
            place, attribute, value = CODE[name]
            self._undo.append((place, attribute, getattr(place, attribute)))
            setattr(place, attribute, value)

    def options(self, model_type: str) -> dict[str, Any]:
        return {"family": _with_rules(model_type, TABLES[self._name])} if self._name in TABLES else {}

    def restore(self) -> None:
        for place, attribute, value in self._undo:
            setattr(place, attribute, value)
