"""Parameter names to checkpoint names, by small declarative tables.

A parameter is not always one tensor of the checkpoint: transformers holds the experts of a layer as one packed parameter
and saves them one by one; other models save two parameters as one tensor. So a mapping is a set of `NamedBox`es: box of a
parameter here, box of a canonical tensor there, possibly with axes in another order.

Where a name comes from, first match wins: the user's own table (`NameTable`, or any `NameMap`); the conversions that the
model's transformers class saves by (`names_transformers`), or the packed-expert table of its ``config.model_type``; its own
name. Names that wrappers put in front (``_orig_mod.`` and the like) are stripped first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Index

from .named_box import NamedBox, named_box
from .names_transformers import PretrainedPart, conversion_boxes, pretrained_parts

__all__ = [
    "NameMap",
    "NameTable",
    "NamedBox",
    "Rename",
    "Unpack",
    "canonical_boxes",
    "named_box",
    "strip_wrappers",
    "table_for",
]

_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PREFIXES = ("module.", "base_model.model.")


class NameMap(Protocol):
    """Anything that knows the canonical boxes of some parameters."""

    def boxes(self, shapes: Mapping[str, Index]) -> Mapping[str, Sequence[NamedBox]]:
        """Canonical boxes by parameter name, given the full shape of every parameter; unknown names are left out."""
        ...


@dataclass(frozen=True, slots=True)
class Rename:
    """Every match of the regular expression ``pattern`` in a name is replaced by ``to`` (as `re.sub` does)."""

    pattern: str
    to: str


@dataclass(frozen=True, slots=True)
class Unpack:
    r"""A parameter that stacks the tensors of all experts, which the checkpoint holds one by one.

    Attributes:
        pattern: regular expression that the whole name must match.
        to: names of the parts that one expert's slice consists of, in order along its first axis; ``{e}`` stands for the
            expert's number, ``\1`` for a group of ``pattern``.
        transposed: the slice of an expert is the transpose of what the checkpoint holds; its parts lie along its last axis.
    """

    pattern: str
    to: tuple[str, ...]
    transposed: bool = False

    def boxes(self, name: str, shape: Index) -> list[NamedBox] | None:
        """Boxes of parameter ``name`` of shape (experts, parts x rows, ...); None when the pattern does not match."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        axes = tuple(range(len(shape) - 1, 0, -1)) if self.transposed else tuple(range(1, len(shape)))
        if not axes or shape[axes[0]] % len(self.to):
            raise PlanError([f"{name} of shape {shape} has no {len(self.to)} equal parts per expert, as {self.pattern} says"])
        rows = shape[axes[0]] // len(self.to)
        size = (rows, *(shape[axis] for axis in axes[1:]))
        found = []
        for expert in range(shape[0]):
            for part, template in enumerate(self.to):
                start = [expert] + [0] * (len(shape) - 1)
                start[axes[0]] = part * rows
                to = match.expand(template).replace("{e}", str(expert))
                found.append(named_box(to, size, local_start=tuple(start), axes=axes))
        return found


class NameTable:
    """A `NameMap` made of rules: all `Rename`s apply in order; the first `Unpack` that matches ends it."""

    def __init__(self, rules: Iterable[Rename | Unpack]) -> None:
        self.rules = tuple(rules)

    def boxes(self, shapes: Mapping[str, Index]) -> dict[str, Sequence[NamedBox]]:
        """Boxes of the parameters that some rule touches. Raises `PlanError` where a packed shape does not fit its rule."""
        found: dict[str, Sequence[NamedBox]] = {}
        for name, shape in shapes.items():
            boxes = self._apply(name, shape)
            if boxes is not None:
                found[name] = boxes
        return found

    def _apply(self, name: str, shape: Index) -> Sequence[NamedBox] | None:
        current = name
        for rule in self.rules:
            if isinstance(rule, Rename):
                current = re.sub(rule.pattern, rule.to, current)
            elif (boxes := rule.boxes(current, shape)) is not None:
                return boxes
        return None if current == name else (named_box(current, shape),)


def _qwen_moe() -> NameTable:
    return NameTable([
        Unpack(r"(.*mlp\.experts\.)gate_up_proj", (r"\1{e}.gate_proj.weight", r"\1{e}.up_proj.weight")),
        Unpack(r"(.*mlp\.experts\.)down_proj", (r"\1{e}.down_proj.weight",)),
    ])  # fmt: skip


def _mixtral() -> NameTable:
    return NameTable([
        Rename(r"\.mlp\.", ".block_sparse_moe."),
        Unpack(r"(.*\.experts\.)gate_up_proj", (r"\1{e}.w1.weight", r"\1{e}.w3.weight")),
        Unpack(r"(.*\.experts\.)down_proj", (r"\1{e}.w2.weight",)),
    ])  # fmt: skip


_FAMILIES = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _mixtral),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "ernie4_5_moe"), _qwen_moe
    ),
}


def table_for(model_type: str) -> NameTable | None:
    """The packed-expert table of a transformers ``config.model_type``, for tensors that come without their model."""
    family = _FAMILIES.get(model_type)
    return family() if family else None


def strip_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Each name without what wrappers put in: compile, activation checkpointing, FSDP, DDP, PEFT.

    ``module.`` and ``base_model.model.`` are taken off only where *every* name begins with them, since a model may have a
    part of that name. Where two names would become one, both stay as they are.
    """
    raw = list(names)
    clean = [".".join(part for part in name.split(".") if part not in _COMPONENTS) for name in raw]
    while prefix := next((p for p in _PREFIXES if clean and all(name.startswith(p) for name in clean)), None):
        clean = [name.removeprefix(prefix) for name in clean]
    count = Counter(clean)
    return {name: to if count[to] == 1 else name for name, to in zip(raw, clean, strict=True)}


def canonical_boxes(
    shapes: Mapping[str, Index], *, root: nn.Module | None = None, names: NameMap | None = None
) -> dict[str, tuple[NamedBox, ...]]:
    """Canonical boxes of every parameter.

    Args:
        shapes: full shape of each parameter and buffer, by its name in ``root``.
        root: the module that they come from, if there is one.
        names: the user's own mapping; it sees names without wrappers.
    """
    clean = strip_wrappers(shapes)
    by_clean = {clean[name]: shape for name, shape in shapes.items()}
    found: dict[str, Sequence[NamedBox]] = dict(names.boxes(by_clean)) if names is not None else {}
    rest = {name: shape for name, shape in by_clean.items() if name not in found}
    for part in pretrained_parts(root, clean=lambda path: _clean_path(path, clean)) if root is not None else ():
        below = {name.removeprefix(part.prefix): shape for name, shape in rest.items() if name.startswith(part.prefix)}
        for name, boxes in _converted(part, below).items():
            found[part.prefix + name] = [box.under(part.prefix) for box in boxes]
    return {name: tuple(found.get(clean[name]) or (named_box(clean[name], shape),)) for name, shape in shapes.items()}


def _converted(part: PretrainedPart, shapes: Mapping[str, Index]) -> Mapping[str, Sequence[NamedBox]]:
    boxes = conversion_boxes(part.model, shapes)
    if boxes is not None:
        return boxes
    table = table_for(part.model_type)
    return {} if table is None else table.boxes(shapes)


def _clean_path(path: str, clean: Mapping[str, str]) -> str:
    """The prefix that names below module ``path`` keep when wrappers are stripped."""
    raw = f"{path}." if path else ""
    for name, to in clean.items():
        if name.startswith(raw):
            tail = name[len(raw) :]
            stripped = ".".join(part for part in tail.split(".") if part not in _COMPONENTS)
            if to.endswith(stripped):
                return to[: len(to) - len(stripped)]
            break
    return raw
