"""Weights that travel quantized: which they are, and where their scales belong.

A target that holds ``X.weight`` as FP8 where the source has floats declares the scales beside it, as checkpoints do. The
scales are a canonical tensor of their own, which no source rank holds: they are *derived* from the weight, and travel in
the same bucket as the codes that they belong to. What a target takes of a weight begins and ends where groups do, and it
takes the scales of exactly those groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from .boxes import Index
from .columns import Ints
from .formats import CODES, Fp8Format, format_of_target, parse_format
from .problems import Problems
from .rows import DTYPES, Held
from .sides import Holder

CODES_TYPE = DTYPES.index(CODES)
"""Code of the element type of quantized weights."""

QUANTIZED = frozenset({"float32", "bfloat16", "float16"})
"""Element types of the source that can be quantized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """The scales of a canonical tensor: their names at targets (the first one is canonical), shape and format."""

    names: tuple[str, ...]
    shape: Index
    format: Fp8Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A quantized weight for the box algebra.

    Attributes:
        format: how.
        group: rows and columns of a group, and 1 for each further axis of the tables.
        shape: of the weight, (depth).
        wanted: what target layouts want of the scales.
    """

    format: Fp8Format
    group: Ints
    shape: Ints
    wanted: Held

    @classmethod
    def of(cls, how: Fp8Format, shape: Ints, wanted: Held) -> Quantized:
        group = np.ones_like(shape)
        group[:2] = how.group(shape[:2].tolist())
        return cls(format=how, group=group, shape=shape, wanted=wanted)

    def scales_of(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        """Boxes of the scales of some boxes of the weight."""
        return lo // self.group, -(-hi // self.group)

    def cuts(self, lo: Ints, hi: Ints, ends: Ints | None = None) -> Ints:
        """Which boxes begin or end inside a group. ``ends``: where each may end in any case; the weight's end if not given."""
        ends = self.shape if ends is None else ends
        return np.asarray(((lo % self.group != 0) | ((hi % self.group != 0) & (hi != ends))).any(axis=1))


def find_quantized(
    receiving: Iterable[Holder],
    tensor_of: Callable[[str], int],
    held: Mapping[int, tuple[Index, str]],
    *,
    wire_format: str,
    problems: Problems,
) -> dict[int, Companion]:
    """Canonical tensors that some target holds as FP8 and the source as floats, with their scales.

    Reports weights without scales or with unfit ones, and targets that want one weight in different formats.

    Args:
        tensor_of: canonical tensor by the name that a target has for it, or -1.
        held: shape and element type at the source, by canonical tensor.
        wire_format: ``auto``, a format's name, or ``cast`` if nothing is quantized.
    """
    found: dict[int, Companion] = {}
    if wire_format == "cast":
        return found
    for holder in receiving:
        tensors = holder.layout.tensors
        if CODES not in tensors.dtypes:
            continue
        place = {name: row for row, name in enumerate(tensors.names)}
        for row in np.flatnonzero(tensors.dtype == tensors.dtypes.index(CODES)).tolist():
            tensor = tensors[row]
            at = tensor_of(tensor.name)
            if at < 0 or held[at][1] not in QUANTIZED or held[at][0] != tensor.shape:
                continue
            try:
                how = _format_at(holder, tensor.name, tensor.shape, place, wire_format)
            except ValueError as error:
                problems.add(f"{holder.side}: {error}")
                continue
            new = Companion(
                names=(how.scale_name(tensor.name),), shape=tensors[place[how.scale_name(tensor.name)]].shape, format=how
            )
            known = found.setdefault(at, new)
            if (known.format, known.shape) != (new.format, new.shape):
                problems.add(
                    f"{tensor.name}: {holder.where} holds it as {how.name} with scales of shape {new.shape}, another target as "
                    f"{known.format.name} with {known.shape}: one push makes one format of a weight"
                )
            found[at] = replace(known, names=tuple(dict.fromkeys(known.names + new.names)))
    return found


def _format_at(holder: Holder, name: str, shape: Index, place: Mapping[str, int], wire_format: str) -> Fp8Format:
    tensors = holder.layout.tensors
    beside = [name + ending for ending in ("_scale_inv", "_scale") if name + ending in place]
    scales = {scale: (tensors[place[scale]].shape, tensors[place[scale]].dtype) for scale in beside}
    return format_of_target(name, shape, scales, given=None if wire_format == "auto" else parse_format(wire_format))


def misfit(wanted: Held, quantized: Quantized, where: Callable[[int], str]) -> str | None:
    """Why what target layouts want of a weight and of its scales does not go together, in words; None if it does.

    Args:
        wanted: of the weight.
        where: a layout in words.
    """
    codes = np.flatnonzero(wanted.dtype == CODES_TYPE)
    cut = codes[quantized.cuts(wanted.lo[codes], wanted.hi[codes])]
    how = quantized.format
    if len(cut):
        rows, columns = quantized.group[:2].tolist()
        return (
            f"{where(wanted.layout[cut[0]])} takes the box {_words(wanted.lo[cut[0]], wanted.hi[cut[0]])} of it, which cuts "
            f"a group of {rows} rows and {columns} columns in two ({how.name}): one scale would serve two ranks; give its "
            "ranks slices that end where groups do, or hold it in another format or whole"
        )
    mine = zip(wanted.layout[codes].tolist(), *map(_keys, quantized.scales_of(wanted.lo[codes], wanted.hi[codes])), strict=True)
    theirs = quantized.wanted
    needed, taken = set(mine), set(zip(theirs.layout.tolist(), _keys(theirs.lo), _keys(theirs.hi), strict=True))
    for layout, lo, hi in sorted(needed ^ taken)[:1]:
        lacks, has = ("the scales", "codes") if (layout, lo, hi) in needed else ("the codes", "scales")
        return (
            f"{where(layout)} takes {has} of it without {lacks}: with the scales {_words(np.array(lo), np.array(hi))} (groups "
            f"of {how.name}) belongs the part of the weight that they are of, on the same rank"
        )
    return None


def _keys(boxes: Ints) -> list[tuple[int, ...]]:
    return [tuple(row) for row in boxes.tolist()]


def _words(lo: Ints, hi: Ints) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(lo.tolist()[:2], hi.tolist()[:2], strict=True))}]"
