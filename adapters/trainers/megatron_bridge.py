"""The mapping of megatron-bridge, where it is installed, as a `Family`: ``MegatronSource(..., family=family_from_bridge(b))``.

Only names are taken from it. What the mappings say is read off their attributes, so nothing of megatron-bridge is imported;
its own conversion, which gathers whole tensors on every rank, is not used, nor what some bridges' hooks do to tensors after
it. Mappings that are more than boxes of checkpoint tensors (gates, Mamba, norms minus 1) are refused by name when a model has
such a parameter.

megatron-bridge needs Transformer Engine and transformers 4, so the tests of this module use objects of the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .megatron_layout import Segment
from .megatron_tables import QKV, Dims, Family, Gated, Row, Rule, Same, Vocabulary

_PLAIN = ("AutoMapping", "DirectMapping", "ReplicatedMapping", "ColumnParallelMapping", "RowParallelMapping")
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
_BY_COLUMN = re.compile(r".*\.(linear_fc2|linear_proj)\.weight(\{expert\})?")
"""Weights of which ranks hold columns, whatever their parameters say."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A rule for a mapping that there is no rule for."""

    kind: str
    stride: int | None = None

    def segments(self, rows: int, dims: Dims) -> Sequence[Segment]:
        raise ValueError(f"megatron-bridge maps it by {self.kind}, for which there is no rule; add a row of your own before it")


def family_from_bridge(bridge: Any, *, name: str = "bridge") -> Family:
    """The table of a megatron-bridge model.

    Args:
        bridge: an ``AutoBridge``, a model bridge, or a ``MegatronMappingRegistry``.
        name: of the family, for messages.
    """
    model = getattr(bridge, "_model_bridge", bridge)
    mappings = model.mapping_registry() if hasattr(model, "mapping_registry") else model
    rows = tuple(row for mapping in mappings if (row := _row(mapping)) is not None)
    names = {row.pattern: row.rule.to for row in rows if isinstance(row.rule, Vocabulary)}
    embedding, head = (names.get(end) for end in _ENDS)
    default = Family(name=name, rows=rows)
    return Family(name=name, rows=rows, embedding=embedding or default.embedding, head=head or default.head)


def _row(mapping: Any) -> Row | None:
    """None for names with two numbers of a kind: there is no telling which is which, and what they map stays unmapped."""
    kind = type(mapping).__name__
    pattern, numbers = _placed(str(mapping.megatron_param), None)
    if len(numbers) != len(set(numbers)):
        return None
    rule: Rule = Refused(kind)
    if getattr(mapping, "permute_dims", None) is None:
        rule = _rule(kind, pattern, mapping.hf_param, numbers) or rule
    return Row(pattern, rule, axis=1 if kind == "RowParallelMapping" or _BY_COLUMN.fullmatch(pattern) else None)


def _rule(kind: str, pattern: str, to: str | Mapping[str, str], numbers: Sequence[str]) -> Rule | None:
    if isinstance(to, str):
        name, used = _placed(to, numbers)
        if kind not in _PLAIN or set(used) != set(numbers):
            return None
        return Vocabulary(name) if pattern in _ENDS else Same(name)
    placed = {key: _placed(name, numbers) for key, name in to.items()}
    if any(set(used) != set(numbers) for _, used in placed.values()):
        return None
    parts = {key: name for key, (name, _) in placed.items()}
    if kind == "QKVMapping" and parts.keys() == {"q", "k", "v"}:
        return QKV(parts["q"], parts["k"], parts["v"])
    if kind == "GatedMLPMapping" and parts.keys() == {"gate", "up"}:
        return Gated(parts["gate"], parts["up"])
    return None


def _placed(name: str, numbers: Sequence[str] | None) -> tuple[str, list[str]]:
    """A name whose ``*`` are named: in Megatron's by what is before them, in the checkpoint's in the same order."""
    used: list[str] = []
    pieces = name.split("*")
    for before in pieces[:-1]:
        if numbers is None:
            used.append("layer" if before.endswith("layers.") else "expert")
        else:
            used.append(numbers[len(used)] if len(used) < len(numbers) else "?")
    filled = "".join(before + (f"{{{used[i]}}}" if i < len(used) else "") for i, before in enumerate(pieces))
    return filled, used
