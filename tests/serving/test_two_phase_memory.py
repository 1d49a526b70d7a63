"""Memory for an update: what came tells whether it is what was announced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.adapters.engines.two_phase_memory import Arena
from syncline.adapters.engines.two_phase_messages import Announced
from syncline.engine.errors import PushError

FLOATS = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "complex64"]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from([*FLOATS, *INTEGERS, "bool"])), min_size=1, max_size=6)


def announce(described):
    return [
        Announced(name=str(number), shape=shape, dtype=getattr(torch, dtype), bucket=0)
        for number, (shape, dtype) in enumerate(described)
    ]


def content(tensor, seed):
    """Random bytes of numbers that weights may be."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(tensor.shape)
    if tensor.dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.uint8)
    if tensor.dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(tensor.dtype).view(torch.uint8)
    return torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)


@settings(deadline=None, max_examples=200)
@given(tensors, st.integers(0, 2**31))
def test_what_was_announced_is_taken_as_it_came(described, seed):
    announced = announce(described)
    arena = Arena(announced)
    for index, tensor in enumerate(announced):
        arena.rooms[index][: tensor.nbytes] = content(tensor, seed)
        arena.check(index)
    for tensor in announced:  # and nothing that came later has touched it
        taken = arena.weights[tensor.name]
        assert (taken.shape, taken.dtype) == (torch.Size(tensor.shape), tensor.dtype)
        raw = taken.contiguous().reshape(-1).view(torch.uint8) if tensor.nbytes else torch.empty(0, dtype=torch.uint8)
        assert torch.equal(raw, content(tensor, seed))


@settings(deadline=None, max_examples=200)
@given(st.tuples(shapes, st.sampled_from([*FLOATS, *INTEGERS, "bool"])), st.integers(1, 400), st.integers(0, 2**31))
def test_more_than_was_announced_is_noticed(described, more, seed):
    (tensor,) = announce([described])
    arena = Arena([tensor])
    sent = torch.randint(0, 256, (tensor.nbytes + more,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    sent[tensor.nbytes] = arena._mark[0] ^ 1  # else one time in 256 the first byte too much is what was there
    arena.rooms[0][: len(sent)] = sent
    with pytest.raises(PushError, match=rf"0 \(bucket 0\): more bytes came than the {tensor.nbytes} that were"):
        arena.check(0)


@settings(deadline=None, max_examples=200)
@given(shapes.filter(math.prod), st.sampled_from([*FLOATS, "bool", "int64", "int32"]), st.data())
def test_an_element_too_few_is_noticed(shape, dtype, data):
    (tensor,) = announce([(shape, dtype)])
    count = data.draw(st.integers(0, math.prod(shape) - 1))
    arena = Arena([tensor])
    sent = count * tensor.dtype.itemsize
    arena.rooms[0][:sent] = content(tensor, 1)[:sent]
    with pytest.raises(PushError, match=f"fewer bytes came than the {tensor.nbytes} that were"):
        arena.check(0)


def test_room_for_far_more_than_there_is_memory_takes_none():
    arena = Arena(announce([((3,), "float32")]))
    assert arena.rooms[0].numel() > 2**34
    arena.rooms[0][2**33] = 1  # a page of it


def test_an_update_beyond_all_address_space_is_refused():
    with pytest.raises(MemoryError, match="no room"):
        Arena(announce([((2**60, 2), "float32")]))
