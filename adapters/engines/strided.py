"""Strided copies as boxes: which box of one tensor a copy reads, and which box of another it writes. Pure arithmetic.

A copy between two views is one set of index ranges with two strides each. Where every range runs along one axis on both
sides, it is a pair of boxes; where it does not (a head's rows split in two, every second row), it is cut until it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from syncline.scheduler.boxes import Box, row_major
from syncline.scheduler.layout import Index

MOST_BOXES = 4096
"""A copy that falls into more boxes than this is not worth describing as boxes."""


class Span(NamedTuple):
    """``steps`` steps, each ``src`` elements further in the source and ``dst`` in the destination."""

    steps: int
    src: int
    dst: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A copy between two flat memories: elements at ``src + sum(i * span.src)`` go to ``dst + sum(i * span.dst)``."""

    spans: tuple[Span, ...]
    src: int
    dst: int

    @classmethod
    def between(cls, shape: Sequence[int], *, src: tuple[int, Sequence[int]], dst: tuple[int, Sequence[int]]) -> Transfer:
        """From two views of one ``shape``: (offset, strides) of each, in elements."""
        spans = tuple(Span(n, a, b) for n, a, b in zip(shape, src[1], dst[1], strict=True) if n != 1)
        return cls(spans=spans, src=src[0], dst=dst[0])

    @property
    def volume(self) -> int:
        return math.prod(span.steps for span in self.spans)

    def reversed(self) -> Transfer:
        """With source and destination exchanged."""
        spans = tuple(Span(n, b, a) for n, a, b in self.spans)
        return Transfer(spans=spans, src=self.dst, dst=self.src)

    def joined(self) -> Transfer:
        """The same copy with as few spans as possible."""
        spans: list[Span] = []
        for span in sorted(self.spans, key=lambda s: (-s.src, -s.dst)):
            last = spans[-1] if spans else None
            if last is not None and (last.src, last.dst) == (span.steps * span.src, span.steps * span.dst):
                spans[-1] = Span(last.steps * span.steps, span.src, span.dst)
            else:
                spans.append(span)
        return replace(self, spans=tuple(spans))


class Base(NamedTuple):
    """A tensor in flat memory: what boxes are boxes of."""

    shape: Index
    strides: Index
    offset: int = 0

    @classmethod
    def of(cls, shape: Sequence[int]) -> Base:
        """Row-major from the memory's first element."""
        return cls(tuple(shape), row_major(shape))

    def place(self, at: int) -> Index | None:
        """Coordinates of a flat place; None if the tensor has no element there."""
        rest = at - self.offset
        found = [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda a: -self.strides[a]):
            if self.shape[axis] > 1:
                found[axis], rest = divmod(rest, self.strides[axis])
        inside = rest == 0 and all(0 <= i < n for i, n in zip(found, self.shape, strict=True))
        return tuple(found) if inside else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Aligned:
    """A transfer each of whose spans runs along one axis of a base on the source side: it reads the box ``box``."""

    transfer: Transfer
    box: Box
    axes: tuple[int, ...]
    """For each span the base's axis."""


def aligned(transfer: Transfer, base: Base) -> list[Aligned] | None:
    """Cut a transfer until its source side consists of boxes of ``base``.

    Returns None where it repeats elements, leaves the base, or falls into too many boxes.
    """
    found: list[Aligned] = []
    todo = [transfer]
    while todo:
        if len(found) + len(todo) > MOST_BOXES:
            return None
        current = todo.pop()
        if current.volume == 0:
            continue
        if any(span.src <= 0 or span.dst <= 0 for span in current.spans):
            return None
        start = base.place(current.src)
        if start is None:
            return None
        axes = [_axis(span, start, base) for span in current.spans]
        bad = next((number for number, axis in enumerate(axes) if axis is None), None)
        if bad is None:
            shape = [1] * len(base.shape)
            for span, axis in zip(current.spans, axes, strict=True):
                if axis is None or shape[axis] != 1:
                    return None
                shape[axis] = span.steps
            box = Box(start=start, shape=tuple(shape))
            found.append(Aligned(transfer=current, box=box, axes=tuple(axis for axis in axes if axis is not None)))
        else:
            todo += _cut(current, bad, start, base)
    return found


def _axis(span: Span, start: Index, base: Base) -> int | None:
    """The axis that a span runs along, step by step, without leaving it."""
    for axis, (n, stride) in enumerate(zip(base.shape, base.strides, strict=True)):
        if n > 1 and stride == span.src and start[axis] + span.steps <= n:
            return axis
    return None


def _cut(transfer: Transfer, number: int, start: Index, base: Base) -> Iterator[Transfer]:
    """Cut span ``number``: into rows of the axis that it runs over, if it covers whole ones; else step by step."""
    span = transfer.spans[number]
    rest = transfer.spans[:number] + transfer.spans[number + 1 :]
    for axis, (n, stride) in enumerate(zip(base.shape, base.strides, strict=True)):
        if n > 1 and stride == span.src and start[axis] == 0 and span.steps % n == 0:
            outer, inner = Span(span.steps // n, span.src * n, span.dst * n), Span(n, span.src, span.dst)
            yield replace(transfer, spans=(*rest, *((outer,) if outer.steps > 1 else ()), inner))
            return
    for step in range(span.steps) if span.steps <= MOST_BOXES else ():
        yield Transfer(spans=rest, src=transfer.src + step * span.src, dst=transfer.dst + step * span.dst)
    if span.steps > MOST_BOXES:  # more than can be found: says so by overflowing the limit
        yield from (replace(transfer, spans=()) for _ in range(MOST_BOXES + 1))


class BoxPair(NamedTuple):
    """A copy of a box of one tensor to a box of another. ``axes``: for each axis of the source the destination's, or -1."""

    src: Box
    dst: Box
    axes: tuple[int, ...]


def box_pairs(transfer: Transfer, src: Base, dst: Base) -> list[BoxPair] | None:
    """A transfer as pairs of boxes of two tensors; None if it cannot be put so."""
    found: list[BoxPair] = []
    for part in aligned(transfer.joined(), src) or ():
        for side in aligned(part.transfer.reversed(), dst) or ():
            for read in aligned(side.transfer.reversed(), src) or ():  # once more: the first cut was for its axes alone
                written = aligned(read.transfer.reversed(), dst)
                if written is None or len(written) != 1:
                    return None
                found.append(_pair(read, written[0], len(src.shape)))
    return found if sum(pair.src.volume for pair in found) == transfer.volume else None


def _pair(read: Aligned, written: Aligned, ndim: int) -> BoxPair:
    axes = [-1] * ndim
    for axis, other in zip(read.axes, written.axes, strict=True):  # cutting keeps the order of what it does not cut
        axes[axis] = other
    return BoxPair(read.box, written.box, tuple(axes))
