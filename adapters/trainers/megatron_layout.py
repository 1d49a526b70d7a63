"""Where the elements of a Megatron parameter lie in the tensors of a checkpoint: arithmetic on shapes, without Megatron.

A *whole* Megatron tensor is what the shards of all tensor-parallel ranks make up. Along its first axis it is a row of
`Segment`s, each some rows of one canonical tensor, or padding. A rank holds `Run`s of it. What a rank holds of a segment is
a box; `boxes` finds all of them.

Two layouts are easily taken for something simpler, and fit by shape when they are:

- ``linear_qkv`` is interleaved by KV group: the query heads of group 0, its key head, its value head, then group 1.
- ``linear_fc1`` of a gated MLP is ``[gate; up]`` on *each* rank: as a whole ``[gate; up]`` it is dealt out with a stride of 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from syncline.scheduler.layout import Index

from ..named_box import NamedBox, named_box


class Segment(NamedTuple):
    """Rows ``start .. start + size`` of canonical tensor ``to``, which has ``rows`` rows. Padding has an empty ``to``."""

    to: str
    rows: int
    start: int
    size: int


class Shard(NamedTuple):
    """How the whole tensor is dealt out: along ``axis``, to ``ranks`` ranks, in ``stride`` rounds; we are ``rank``."""

    axis: int
    ranks: int
    rank: int
    stride: int = 1


class Run(NamedTuple):
    """Consecutive indices ``start .. start + size`` of an axis of the whole tensor, and where they begin on this rank."""

    start: int
    size: int
    local: int


def whole_segments(to: str, rows: int) -> list[Segment]:
    """All rows are those of one canonical tensor."""
    return [Segment(to, rows, 0, rows)]


def vocabulary_segments(to: str, rows: int, vocabulary: int) -> list[Segment]:
    """The first ``vocabulary`` rows, and padding up to ``rows``."""
    return [Segment(to, vocabulary, 0, vocabulary), *([Segment("", 0, 0, rows - vocabulary)] if rows > vocabulary else [])]


def gated_segments(gate: str, up: str, rows: int) -> list[Segment]:
    """The upper half and the lower half."""
    half = rows // 2
    return [Segment(gate, half, 0, half), Segment(up, half, 0, half)]


def qkv_segments(q: str, k: str, v: str, *, heads: int, groups: int, head_dim: int) -> list[Segment]:
    """For each KV group its query heads, its key head, its value head."""
    queries = heads // groups * head_dim
    segments = []
    for group in range(groups):
        segments.append(Segment(q, heads * head_dim, group * queries, queries))
        segments += [Segment(to, groups * head_dim, group * head_dim, head_dim) for to in (k, v)]
    return segments


def runs(extent: int, shard: Shard) -> list[Run]:
    """What our rank holds of an axis of ``extent``: in each of ``stride`` rounds every rank gets one chunk in turn."""
    chunk = extent // (shard.ranks * shard.stride)
    return [Run((turn * shard.ranks + shard.rank) * chunk, chunk, turn * chunk) for turn in range(shard.stride)]


def boxes(local: Index, segments: Sequence[Segment], shard: Shard | None) -> list[NamedBox]:
    """The boxes that a parameter of shape ``local`` holds; none where it holds padding only.

    Args:
        local: the parameter's shape on this rank.
        segments: what the whole tensor's first axis consists of.
        shard: how the whole tensor is dealt out; None where every rank holds all of it.
    """
    if not local:
        return [named_box(segment.to, ()) for segment in segments if segment.to]
    whole = whole_shape(local, shard)
    held = [[Run(0, extent, 0)] for extent in whole]
    if shard is not None:
        held[shard.axis] = runs(whole[shard.axis], shard)
    return [box for segment, at in _placed(segments) if segment.to for box in _segment_boxes(segment, at, whole, held)]


def whole_shape(local: Index, shard: Shard | None) -> Index:
    """The shape that the shards of all ranks make up."""
    if shard is None:
        return local
    return tuple(extent * (shard.ranks if axis == shard.axis else 1) for axis, extent in enumerate(local))


def _placed(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    """Each segment with the row of the whole tensor at which it begins."""
    at = 0
    for segment in segments:
        yield segment, at
        at += segment.size


def _segment_boxes(segment: Segment, at: int, whole: Index, held: Sequence[Sequence[Run]]) -> Iterator[NamedBox]:
    """What we hold of one segment, which begins at row ``at`` of the whole tensor."""
    for row, *columns in itertools.product(*held):
        first, last = max(row.start, at), min(row.start + row.size, at + segment.size)
        if last > first:
            yield named_box(
                segment.to,
                (segment.rows, *whole[1:]),
                start=(segment.start + first - at, *(run.start for run in columns)),
                size=(last - first, *(run.size for run in columns)),
                local_start=(row.local + first - row.start, *(run.local for run in columns)),
            )
