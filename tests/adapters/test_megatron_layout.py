"""Where Megatron's elements lie in checkpoint tensors, against whole tensors that plain torch puts together and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.adapters.named_box import NamedBox
from syncline.adapters.trainers.megatron_layout import (
    Shard,
    boxes,
    gated_segments,
    qkv_segments,
    runs,
    vocabulary_segments,
    whole_segments,
)

RANKS = st.sampled_from([1, 2, 3, 4, 8])
COLUMNS = st.sampled_from([(), (1,), (5,), (3, 2)])  # a bias, and weights of two and three axes


def stamped(name: int, rows: int, columns: tuple[int, ...]) -> torch.Tensor:
    """Each element has a number of its own, in all tensors of a test."""
    shape = (rows, *columns)
    count = int(torch.tensor(shape).prod())
    return torch.arange(count).reshape(shape) + name * 1_000_000


def put(canonical: dict[str, torch.Tensor], local: torch.Tensor, found: Sequence[NamedBox]) -> None:
    """Copy what a rank holds into the canonical tensors, and count how often each element was written."""
    for box in found:
        there = tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))
        here = tuple(slice(s, s + n) for s, n in zip(box.local_start, box.size, strict=True))
        assert canonical[box.name].shape == box.shape
        canonical[box.name][there] = torch.where(canonical[box.name][there] == -1, local[here], -2)  # -2: written twice


def check(originals: dict[str, torch.Tensor], locals_: Sequence[torch.Tensor], segments, shard: Shard) -> None:
    canonical = {name: torch.full_like(tensor, -1) for name, tensor in originals.items()}
    for rank, local in enumerate(locals_):
        put(canonical, local, boxes(tuple(local.shape), segments, shard._replace(rank=rank)))
    for name, tensor in originals.items():
        assert torch.equal(canonical[name], tensor), name


@settings(deadline=None, max_examples=200)
@given(groups=st.integers(1, 8), per_group=st.integers(1, 4), head_dim=st.integers(1, 4), ranks=RANKS, columns=COLUMNS)
def test_qkv(groups, per_group, head_dim, ranks, columns):
    """However many ranks there are, more than KV groups too: each holds equal rows of the interleaved whole."""
    heads = groups * per_group
    parts = [stamped(i, n * head_dim, columns) for i, n in enumerate((heads, groups, groups))]
    whole = torch.cat([part.reshape(groups, -1, *columns) for part in parts], dim=1).reshape(-1, *columns)
    if len(whole) % ranks:
        return
    segments = qkv_segments("q", "k", "v", heads=heads, groups=groups, head_dim=head_dim)
    check(dict(zip("qkv", parts, strict=True)), whole.chunk(ranks), segments, Shard(0, ranks, 0))


@settings(deadline=None, max_examples=100)
@given(per_rank=st.integers(1, 5), ranks=RANKS, columns=COLUMNS)
def test_gated(per_rank, ranks, columns):
    """Each rank holds ``[gate; up]``."""
    gate, up = (stamped(i, per_rank * ranks, columns) for i in range(2))
    locals_ = [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    check({"gate": gate, "up": up}, locals_, gated_segments("gate", "up", 2 * per_rank * ranks), Shard(0, ranks, 0, 2))


@settings(deadline=None, max_examples=100)
@given(per_rank=st.integers(1, 6), ranks=RANKS, padding=st.integers(0, 40), columns=COLUMNS)
def test_vocabulary(per_rank, ranks, padding, columns):
    """Padding is nobody's, whole ranks of it included."""
    rows = per_rank * ranks
    vocabulary = max(1, rows - padding)
    original = stamped(0, vocabulary, columns)
    filler = torch.full((rows - vocabulary, *columns), -3)
    locals_ = torch.cat([original, filler]).chunk(ranks)
    check({"embed": original}, locals_, vocabulary_segments("embed", rows, vocabulary), Shard(0, ranks, 0))


@settings(deadline=None, max_examples=100)
@given(rows=st.integers(1, 6), per_rank=st.integers(1, 6), ranks=RANKS)
def test_row_parallel(rows, per_rank, ranks):
    original = stamped(0, rows, (per_rank * ranks,))
    check({"o": original}, original.chunk(ranks, dim=1), whole_segments("o", rows), Shard(1, ranks, 0))


@settings(deadline=None, max_examples=100)
@given(ranks=RANKS, stride=st.integers(1, 4), size=st.integers(1, 4))
def test_strides_are_dealt_out_in_rounds(ranks, stride, size):
    """As Megatron's own initialization does: the whole split into ``ranks x stride`` chunks, every ``ranks``-th is ours."""
    whole = torch.arange(ranks * stride * size)
    for rank in range(ranks):
        mine = torch.cat(whole.split(size)[rank::ranks])
        found = torch.full_like(mine, -1)
        for run in runs(len(whole), Shard(0, ranks, rank, stride)):
            found[run.local : run.local + run.size] = whole[run.start : run.start + run.size]
        assert torch.equal(found, mine)


@pytest.mark.parametrize("columns", [(), (4,)])
def test_replicated(columns):
    original = stamped(0, 6, columns)
    canonical = {"norm": torch.full_like(original, -1)}
    put(canonical, original, boxes(tuple(original.shape), whole_segments("norm", 6), None))
    assert torch.equal(canonical["norm"], original)


def test_a_scalar():
    (box,) = boxes((), whole_segments("scale", 1), None)
    assert (box.name, box.shape, box.size) == ("scale", (), ())


def test_the_check_finds_a_contiguous_slice():
    """The reference is able to say no: queries, keys and values one behind the other are found wrong."""
    parts = [stamped(i, rows, (2,)) for i, rows in enumerate((8, 4, 4))]
    segments = qkv_segments("q", "k", "v", heads=4, groups=2, head_dim=2)
    with pytest.raises(AssertionError):
        check(dict(zip("qkv", parts, strict=True)), torch.cat(parts).chunk(2), segments, Shard(0, 2, 0))
