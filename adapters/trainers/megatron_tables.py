r"""Tables that map Megatron parameters to checkpoint tensors: a `Family` is a list of `Row`s.

A row is the parameter's name in a Megatron model and a rule, which names the checkpoint tensors that it consists of::

    Row("decoder.layers.{layer}.self_attention.linear_proj.weight", Same("model.layers.{layer}.self_attn.o_proj.weight"))

``{layer}`` and ``{expert}`` stand for numbers: local ones in Megatron's names, those of the whole model in the
checkpoint's. Names are without what wrappers put in front (``module.``). Which axis is sharded over how many ranks, Megatron's
parameter says itself. To add a family, write a table like those in `syncline.adapters.trainers.families` and pass it as
``MegatronSource(..., family=MY_FAMILY)``; rows of another family can be reused: ``Family(name="mine", rows=(Row(...),
*LLAMA.rows))``, where the first row that matches wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from syncline.engine.errors import ConfigError

from . import megatron_layout as layout
from .megatron_layout import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """What rules need to know about a model.

    Attributes:
        heads, groups, head_dim: query heads, KV groups, elements of a head.
        gated: feed-forward blocks have a gate.
        vocabulary: rows of the embeddings in the checkpoint; None: as many as the model has (no padding).
    """

    heads: int
    groups: int
    head_dim: int
    gated: bool = True
    vocabulary: int | None = None


class Rule(Protocol):
    """What the first axis of a whole Megatron tensor consists of."""

    @property
    def stride(self) -> int | None:
        """In how many rounds the whole tensor is dealt out to ranks; None: as the parameter says."""
        ...

    def segments(self, rows: int, dims: Dims) -> Sequence[Segment]:
        """Segments of ``rows`` rows in all; names are templates. Raises `ValueError` where ``rows`` cannot be right."""
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """One checkpoint tensor of the same shape.

    Write ``stride=2`` where each rank holds two halves of its own one behind the other (``linear_fc1`` with a gate, for a
    checkpoint that has gate and up in one tensor): not every parameter says so itself.
    """

    to: str
    stride: int | None = None

    def segments(self, rows: int, dims: Dims) -> Sequence[Segment]:
        return layout.whole_segments(self.to, rows)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One checkpoint tensor with a row for each token; Megatron pads it at the end."""

    to: str
    stride: int | None = None

    def segments(self, rows: int, dims: Dims) -> Sequence[Segment]:
        vocabulary = rows if dims.vocabulary is None else dims.vocabulary
        if rows < vocabulary:
            raise ValueError(f"it has {rows} rows (padding included) for a vocabulary of {vocabulary}")
        return layout.vocabulary_segments(self.to, rows, vocabulary)


@dataclass(frozen=True, slots=True)
class Gated:
    """Two checkpoint tensors: each rank holds ``[gate; up]`` of its own."""

    gate: str
    up: str
    stride: int | None = 2  # whatever the parameter says: Transformer Engine's linear layers know of no stride

    def segments(self, rows: int, dims: Dims) -> Sequence[Segment]:
        if not dims.gated:
            raise ValueError("Megatron's gated_linear_unit is False, so that it is not [gate; up]; give it a row of its own")
        if rows % 2:
            raise ValueError(f"it has {rows} rows, which are not two equal halves")
        return layout.gated_segments(self.gate, self.up, rows)


@dataclass(frozen=True, slots=True)
class QKV:
    """Three checkpoint tensors, interleaved by KV group."""

    q: str
    k: str
    v: str
    stride: int | None = None

    def segments(self, rows: int, dims: Dims) -> Sequence[Segment]:
        wanted = (dims.heads + 2 * dims.groups) * dims.head_dim
        if rows != wanted or dims.heads % dims.groups:
            raise ValueError(
                f"it has {rows} rows; {dims.heads} query heads and 2 x {dims.groups} KV heads of {dims.head_dim} make {wanted}"
            )
        return layout.qkv_segments(self.q, self.k, self.v, heads=dims.heads, groups=dims.groups, head_dim=dims.head_dim)


@dataclass(frozen=True, slots=True)
class Row:
    """A Megatron parameter and what it consists of.

    Attributes:
        pattern: its name, with ``{layer}`` and ``{expert}``. A row with ``{expert}`` is that of an expert: sharded over the
            expert-tensor-parallel ranks, numbered by expert-parallel rank, in a mesh group of its own.
        rule: what it consists of.
        axis: the axis along which ranks hold shards, where the parameter does not say so rightly; None: as it says.
    """

    pattern: str
    rule: Rule
    axis: int | None = None

    @property
    def expert(self) -> bool:
        return "{expert}" in self.pattern


class Match(NamedTuple):
    """A row that matches a name, the local numbers in the name (``layer``, ``expert``), and the name up to each of them."""

    row: Row
    numbers: Mapping[str, int]
    paths: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models whose parameters one table maps.

    Attributes:
        name: for `MegatronSource(family=...)` and for messages.
        model_types: ``model_type`` of the Hugging Face configs that it serves.
        rows: the first that matches a parameter wins. Rows that match nothing do no harm.
        numbers: what must agree between both configs: attribute of Megatron's config -> attributes of Hugging Face's, of which
            the first that is there counts.
        embedding, head: checkpoint names of the embeddings and of the output layer, which may be tied.
        allows: knobs of Megatron's config that are refused otherwise because they change silently what weights mean, such as
            ``rotary_interleaved``: for a checkpoint that has them so too.

    Raises:
        ConfigError: something among the rows is no `Row`, or has a placeholder that nothing fills in, that is there twice, or
            that the checkpoint's names lack.
    """

    name: str
    model_types: tuple[str, ...] = ()
    rows: tuple[Row, ...]
    numbers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    allows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problems := [problem for row in self.rows for problem in _problems(row)]:
            raise ConfigError([f"Family {self.name}: {problem}" for problem in problems])

    @cached_property
    def _compiled(self) -> list[tuple[re.Pattern[str], Row]]:
        return [(_compiled(row.pattern), row) for row in self.rows]

    def find(self, name: str) -> Match | None:
        """The row for a parameter; None if there is none."""
        for pattern, row in self._compiled:
            if match := pattern.fullmatch(name):
                numbers = {key: int(value) for key, value in match.groupdict().items()}
                return Match(row, numbers, {key: name[: match.end(key)] for key in numbers})
        return None


_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def _problems(row: object) -> list[str]:
    """What is wrong with a row of a table."""
    if not isinstance(row, Row) or not isinstance(row.pattern, str) or not callable(getattr(row.rule, "segments", None)):
        return [f'{row!r} is no row: write Row("a.name.in.megatron", Same("its.name.in.the.checkpoint"))']
    inside = _PLACEHOLDER.findall(row.pattern)
    known = set(inside)
    found = [f"{{{key}}} in {row.pattern!r} is neither {{layer}} nor {{expert}}" for key in known - {"layer", "expert"}]
    found += [f"{{{key}}} is in {row.pattern!r} more than once" for key in known if inside.count(key) > 1]
    rule: Any = row.rule
    values = [getattr(rule, entry.name) for entry in fields(rule)] if is_dataclass(rule) else []
    for name in (value for value in values if isinstance(value, str)):
        used = set(_PLACEHOLDER.findall(name))
        found += [f"{{{key}}} in {name!r} is not in {row.pattern!r}" for key in used - known]
        # Else layers of other stages, or experts of other ranks, would pass for replicas of one tensor.
        lacks = (known & {"layer", "expert"}) - used if isinstance(rule, (Same, Vocabulary, Gated, QKV)) else ()
        found += [f"{{{key}}} in {row.pattern!r} is not in {name!r}" for key in lacks]
    return sorted(found)


def _compiled(pattern: str) -> re.Pattern[str]:
    """``{layer}`` becomes a group of that name that matches a number; everything else is taken literally."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern)))


def named(template: str, numbers: Mapping[str, int]) -> str:
    """A checkpoint name with its numbers (those of the whole model) filled in."""
    for key, value in numbers.items():
        template = template.replace(f"{{{key}}}", str(value))
    return template
