"""Boxes from placements: against ``torch.chunk`` of a tensor of indices, in the order in which the sharding was done."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from syncline.adapters.dtensor import _is_grid, held_boxes, local_of, whole

SIZE = st.integers(0, 13)
WAYS = st.integers(1, 4)


def chunk(tensor: torch.Tensor, ways: int, mine: int, axis: int) -> torch.Tensor:
    """``torch.chunk``, with empty chunks where it gives none."""
    chunks = torch.chunk(tensor, ways, axis) if tensor.shape[axis] else ()
    return chunks[mine] if mine < len(chunks) else tensor.narrow(axis, 0, 0)


def read(shape, boxes, local_shape) -> torch.Tensor:
    """A local tensor of indices, filled by the letter of the boxes; -1 where none reaches."""
    whole_tensor = torch.arange(math.prod(shape)).view(shape)
    local = torch.full(local_shape, -1)
    for box in boxes:
        source = tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))
        target = tuple(slice(at, at + n) for at, n in zip(box.local_start, box.shape, strict=True))
        assert (local[target] == -1).all()
        local[target] = whole_tensor[source]
    return local


def coordinates(mesh):
    return itertools.product(*(range(size) for size in mesh))


@settings(max_examples=150)
@given(rows=SIZE, columns=SIZE, mesh=st.tuples(WAYS, WAYS), axes=st.tuples(st.integers(0, 1), st.integers(0, 1)))
def test_plain_shards_split_from_left_to_right(rows, columns, mesh, axes):
    shape, placements = (rows, columns), [Shard(axis) for axis in axes]
    for coordinate in coordinates(mesh):
        expected = torch.arange(rows * columns).view(shape)
        for ways, mine, axis in zip(mesh, coordinate, axes, strict=True):
            expected = chunk(expected, ways, mine, axis)
        boxes = held_boxes(shape, mesh, coordinate, placements)
        assert len(boxes) <= 1
        assert torch.equal(read(shape, boxes, expected.shape), expected)


@settings(max_examples=150)
@given(rows=SIZE, dp=WAYS, tp=WAYS)
def test_fsdp_with_tensor_parallelism_splits_the_right_axis_first(rows, dp, tp):
    placements = [_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)]
    for coordinate in coordinates((dp, tp)):
        expected = chunk(chunk(torch.arange(rows * 2).view(rows, 2), tp, coordinate[1], 0), dp, coordinate[0], 0)
        boxes = held_boxes((rows, 2), (dp, tp), coordinate, placements)
        assert len(boxes) <= 1
        assert torch.equal(read((rows, 2), boxes, expected.shape), expected)


def test_reading_the_placements_from_left_to_right_would_be_wrong():
    """7 rows, first over 2 tensor-parallel ranks, then over 3 of FSDP: the last FSDP rank has nothing of the first half."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    held = {c: [box.start[0] for box in held_boxes((7,), (3, 2), c, placements)] for c in coordinates((3, 2))}
    assert held[2, 0] == []
    assert held[2, 1] == [6]
    literal = torch.cat([chunk(half, 3, 2, 0) for half in torch.arange(7).chunk(2)])
    assert chunk(literal, 2, 0, 0).tolist() == [6]


@settings(max_examples=60)
@given(rows=st.integers(0, 30), mesh=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)))
def test_hsdp_with_expert_and_tensor_parallelism(rows, mesh):
    placements = [Replicate(), _StridedShard(0, split_factor=mesh[2] * mesh[3]), Shard(0), Shard(0)]
    for coordinate in coordinates(mesh):
        expected = torch.arange(rows)
        for axis in (2, 3, 1):
            expected = chunk(expected, mesh[axis], coordinate[axis], 0)
        assert torch.equal(read((rows,), held_boxes((rows,), mesh, coordinate, placements), expected.shape), expected)


@settings(max_examples=60)
@given(rows=SIZE, ways=WAYS, factor=st.integers(2, 4))
def test_a_strided_shard_on_its_own_holds_several_boxes(rows, ways, factor):
    """No axis to the right explains the split factor: every block is split, and the parts are put together."""
    for mine in range(ways):
        blocks = [chunk(torch.arange(rows), factor, block, 0) for block in range(factor)]
        expected = torch.cat([chunk(block, ways, mine, 0) for block in blocks])
        boxes = held_boxes((rows,), (ways,), (mine,), [_StridedShard(0, split_factor=factor)])
        assert torch.equal(read((rows,), boxes, expected.shape), expected)
        if rows:
            torch_says = _StridedShard(0, split_factor=factor)._split_tensor(torch.arange(rows), ways, with_padding=False)[0]
            assert torch.equal(torch_says[mine], expected)


def test_scalars_and_empty_tensors():
    assert held_boxes((), (2,), (1,), [Replicate()]) == (whole(()),)
    assert held_boxes((0, 3), (2,), (1,), [Shard(1)])[0].shape == (0, 1)
    assert held_boxes((2, 3), (4,), (3,), [Shard(0)]) == ()
    scalar = local_of(torch.tensor(3.0))
    assert (scalar.shape, scalar.boxes) == ((), (whole(()),))


def test_partial_is_refused():
    with pytest.raises(ValueError, match=r"Partial\(sum\) holds no final values; redistribute"):
        held_boxes((4,), (2, 2), (0, 0), [Shard(0), Partial()])


@pytest.mark.parametrize(
    ("ranks", "fine"),
    [([[0, 1], [2, 3]], True), ([[3, 1], [2, 0]], True), ([[2, 0], [1, 3]], False), ([[5, 7, 9], [6, 8, 10]], True)],
)
def test_orders_of_ranks_in_a_mesh(ranks, fine):
    assert _is_grid(torch.tensor(ranks)) is fine
