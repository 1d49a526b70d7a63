"""All pieces of one side in one table, sorted by canonical tensor: what the box algebra works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .columns import Ints, ints
from .dtypes import ITEMSIZE
from .sides import Holder

DTYPES: tuple[str, ...] = tuple(ITEMSIZE)
"""Element types in the order of the codes that planning uses."""
SIZES: tuple[int, ...] = tuple(ITEMSIZE.values())

_LAYOUT, _DTYPE, _MARK, _BOX = 0, 1, 2, 3


class Places(NamedTuple):
    """Where rows are in their manifests: rows ``first[t]:first[t + 1]`` are of canonical tensor ``t``."""

    first: Ints
    piece: Ints
    layout: Ints


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Pieces with elements, of tensors that are planned: by tensor, then distinct layout, then place in the layout.

    Attributes:
        first: rows ``first[t]:first[t + 1]`` are of canonical tensor ``t``.
        tensor, piece: canonical tensor, and index into the layout's pieces.
        facts: (rows, 3 + 3 * depth): layout, dtype code, mark, start, shape and strides of each row: everything that tells
            what can be done with a piece, and nothing that tells where in memory it is. The mark says of a source's piece
            that it lies in a mapped file, and of a target's that it must not be cut.
    """

    first: Ints
    tensor: Ints
    piece: Ints
    facts: Ints
    depth: int

    @property
    def layout(self) -> Ints:
        return self.facts[:, _LAYOUT]

    @property
    def dtype(self) -> Ints:
        return self.facts[:, _DTYPE]

    @property
    def places(self) -> Places:
        """What is needed of the table once everything is planned."""
        return Places(self.first, self.piece, self.layout.copy())  # a view would keep all facts

    @property
    def volume(self) -> Ints:
        """Elements of each row."""
        return np.asarray(np.prod(self.facts[:, _BOX + self.depth : _BOX + 2 * self.depth], axis=1, dtype=np.int64))

    def key(self, tensor: int) -> bytes:
        """Equal for tensors of which all the same facts hold."""
        return self.facts[self.first[tensor] : self.first[tensor + 1]].tobytes()

    def of(self, tensor: int) -> Held:
        """The rows of one tensor."""
        facts, d = self.facts[self.first[tensor] : self.first[tensor + 1]], self.depth
        low = facts[:, _BOX : _BOX + d]
        return Held(
            layout=facts[:, _LAYOUT],
            dtype=facts[:, _DTYPE],
            mark=facts[:, _MARK].astype(bool),
            lo=low,
            hi=low + facts[:, _BOX + d : _BOX + 2 * d],
            strides=facts[:, _BOX + 2 * d :],
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """Pieces of one tensor; parallel columns. ``lo`` and ``hi`` are boxes of the tensor, ``strides`` count elements.

    ``mark``: in a mapped file (source), not to be cut (target).
    """

    layout: Ints
    dtype: Ints
    mark: npt.NDArray[np.bool_]
    lo: Ints
    hi: Ints
    strides: Ints


def tabulate(
    holders: Sequence[Holder], indexes: Sequence[Ints], count: int, depth: int, *, marks: Callable[[Holder, Ints], Ints]
) -> Rows:
    """One table of the pieces of all distinct layouts of a side.

    Args:
        marks: `in_file` or `in_host` for sources, `uncut` for targets.
        indexes: for each layout, the canonical tensor of each of its tensors, or -1 to leave its pieces out.
        count: number of canonical tensors.
        depth: axes of the table; the largest number of dimensions of a planned tensor at least.
    """
    picked = [_picked(holder, index) for holder, index in zip(holders, indexes, strict=True)]
    tensor = _chain([index[h.layout.pieces.tensor[rows]] for h, index, rows in zip(holders, indexes, picked, strict=True)])
    order = np.argsort(tensor, kind="stable")
    facts = np.empty((len(order), _BOX + 3 * depth), np.int64)
    parts = list(zip(holders, picked, strict=True))
    facts[:, _LAYOUT] = _chain([np.full(len(rows), i) for i, rows in enumerate(picked)])[order]
    facts[:, _DTYPE] = _chain([_codes(h)[h.layout.pieces.dtype[rows]] for h, rows in parts])[order]
    facts[:, _MARK] = _chain([marks(h, rows) for h, rows in parts])[order]
    at = _BOX
    for name, pad in (("start", 0), ("shape", 1), ("strides", 0)):
        for axis in range(depth):
            columns = [_axis(getattr(h.layout.pieces, name), axis, pad)[rows] for h, rows in parts]
            facts[:, at] = _chain(columns)[order]
            at += 1
    tensor = tensor[order]
    first = np.searchsorted(tensor, np.arange(count + 1))
    return Rows(first=first, tensor=tensor, piece=_chain(picked)[order], facts=facts, depth=depth)


def _picked(holder: Holder, index: Ints) -> Ints:
    pieces = holder.layout.pieces
    if not len(pieces):
        return ints([])
    return np.flatnonzero((index[pieces.tensor] >= 0) & (pieces.shape > 0).all(axis=1))


def _codes(holder: Holder) -> Ints:
    return ints([DTYPES.index(d) if d in ITEMSIZE else -1 for d in holder.layout.pieces.dtypes])


def in_host(holder: Holder, rows: Ints) -> Ints:
    """Mark of source pieces: they lie in a mapped file, or in memory of the host."""
    buffers = holder.layout.buffers
    host = ints([int(device.split(":")[0] == "cpu") for device in buffers.devices])
    return np.maximum(in_file(holder, rows), host[buffers.device[holder.layout.pieces.buffer[rows]]]) if len(rows) else ints([])


def in_file(holder: Holder, rows: Ints) -> Ints:
    """Mark of source pieces: they lie in a mapped file."""
    buffers = holder.layout.buffers
    kinds = ints([int(kind == "file") for kind in buffers.kinds])
    return kinds[buffers.kind[holder.layout.pieces.buffer[rows]]] if len(rows) else ints([])


def uncut(holder: Holder, rows: Ints) -> Ints:
    """Mark of target pieces: they must not be cut."""
    layout = holder.layout
    if layout.whole_tensors or not layout.uncut:
        return np.full(len(rows), int(layout.whole_tensors))
    return ints([int(name in layout.uncut) for name in layout.tensors.names])[layout.pieces.tensor[rows]]


def _axis(column: Ints, axis: int, pad: int) -> Ints:
    return column[:, axis] if axis < column.shape[1] else np.full(len(column), pad)


def _chain(columns: Sequence[Ints]) -> Ints:
    return np.concatenate(columns) if columns else ints([])
