"""The digest against a reference written from its definition alone, for every cut into segments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

from syncline.scheduler.leaves import leaf_grid, split
from syncline.scheduler.programs import Leaves, Segment
from syncline.stages.digest import (
    add_digests,
    digest_bucket,
    digest_bytes,
    digest_segment,
    digest_view,
    to_hex,
)

UID = 2**64 - 3  # seeds wrap around


def reference(content: np.ndarray, leaf_bytes: int) -> int:
    """Walk the split axis as the definition says: leaves are ``rows`` steps inside one index of the axes before it."""
    shape = content.shape
    steps = [math.prod(shape[axis + 1 :]) * content.itemsize for axis in range(len(shape))]
    axis = next((a for a, step in enumerate(steps) if step <= leaf_bytes), max(len(shape) - 1, 0))
    flat = content.reshape(-1).view(np.uint8)
    if not shape:
        return xxhash.xxh3_128(flat.tobytes(), seed=UID).intdigest()
    rows = max(1, leaf_bytes // steps[axis])
    total, number = 0, 0
    for lead in range(math.prod(shape[:axis])):
        for start in range(0, shape[axis], rows):
            stop = min(start + rows, shape[axis])
            at = (lead * shape[axis] + start) * steps[axis]
            leaf = flat[at : at + (stop - start) * steps[axis]]
            total += xxhash.xxh3_128(leaf.tobytes(), seed=(UID + number) % 2**64).intdigest()
            number += 1
    return total % 2**128


def segments(shape: tuple[int, ...], itemsize: int, leaf_bytes: int, limit: int) -> list[tuple[Segment, int]]:
    """A tensor cut into segments as the planner cuts it, packed into a bucket; with each one's place in the tensor."""
    grid = leaf_grid(shape, itemsize, leaf_bytes)
    found, at = [], 0
    for part in split(grid, limit):
        leaves = Leaves(
            item_uid=UID, first=part.first, blocks=part.blocks, block_nbytes=part.block_nbytes, leaf_nbytes=grid.leaf_nbytes
        )
        segment = Segment(item=0, name="t", box=part.box, dtype="int16", offset=at, nbytes=part.nbytes, leaves=leaves)
        found.append((segment, part.offset))
        at += -(-part.nbytes // 256) * 256
    return found


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(shape=shapes, leaf_bytes=st.integers(1, 400), limit=st.integers(1, 5000), seed=st.integers(0, 2**31))
def test_any_cut_gives_the_digest_of_the_whole(shape, leaf_bytes, limit, seed):
    content = np.random.default_rng(seed).integers(-(2**15), 2**15, size=shape, dtype=np.int16)
    flat = torch.from_numpy(content.reshape(-1).copy()).view(torch.uint8)
    cut = segments(shape, 2, leaf_bytes, limit)
    last = cut[-1][0]
    bucket = torch.zeros(last.offset + last.nbytes, dtype=torch.uint8)
    for segment, at in cut:
        bucket[segment.offset : segment.offset + segment.nbytes] = flat[at : at + segment.nbytes]
    assert digest_bucket(bucket, [segment for segment, _ in cut]) == reference(content, leaf_bytes)
    backwards = [digest_segment(bucket, segment) for segment, _ in reversed(cut)]
    assert add_digests(backwards) == reference(content, leaf_bytes)


@given(shape=shapes, leaf_bytes=st.integers(1, 400), limit=st.integers(1, 5000), seed=st.integers(0, 2**31), data=st.data())
def test_strided_views_are_digested_where_they_are(shape, leaf_bytes, limit, seed, data):
    content = np.random.default_rng(seed).integers(-(2**15), 2**15, size=shape, dtype=np.int16)
    order = data.draw(st.permutations(range(len(shape))))
    stored = torch.from_numpy(content.copy()).permute(order).contiguous().permute(np.argsort(order).tolist())
    total = 0
    for segment, _ in segments(shape, 2, leaf_bytes, limit):
        box = tuple(slice(s, s + n) for s, n in zip(segment.box.start, segment.box.shape, strict=True))
        total += digest_view(stored[box], segment.leaves)
    assert total % 2**128 == reference(content, leaf_bytes)


@given(nbytes=st.integers(1, 2000), leaf=st.integers(1, 300), at=st.integers(0, 1999), flip=st.integers(1, 255))
def test_every_byte_counts(nbytes, leaf, at, flip):
    content = torch.arange(nbytes).to(torch.uint8)
    leaves = Leaves(item_uid=1, first=0, blocks=1, block_nbytes=nbytes, leaf_nbytes=leaf)
    before = digest_bytes(memoryview(content.numpy()), leaves)
    content[at % nbytes] ^= flip
    assert digest_bytes(memoryview(content.numpy()), leaves) != before


def test_leaves_that_swap_places_are_noticed():
    leaves = Leaves(item_uid=1, first=0, blocks=1, block_nbytes=20, leaf_nbytes=10)
    assert digest_bytes(memoryview(b"a" * 10 + b"b" * 10), leaves) != digest_bytes(memoryview(b"b" * 10 + b"a" * 10), leaves)


def test_equal_content_under_another_name_is_noticed():
    one, other = (Leaves(item_uid=uid, first=0, blocks=1, block_nbytes=4, leaf_nbytes=4) for uid in (1, 2))
    assert digest_bytes(memoryview(b"abcd"), one) != digest_bytes(memoryview(b"abcd"), other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.complex64])
def test_every_element_type_is_digested_by_its_bytes(dtype):
    content = torch.arange(40 * 8).to(torch.uint8).view(dtype)[:40].reshape(8, 5)
    size = content.element_size()
    leaves = Leaves(item_uid=9, first=3, blocks=1, block_nbytes=40 * size, leaf_nbytes=10 * size)
    want = digest_bytes(memoryview(content.reshape(-1).view(torch.uint8).numpy()), leaves)
    stored = torch.empty(5, 8, dtype=dtype).t()
    stored.view(torch.uint8 if size == 1 else dtype).copy_(content.view(torch.uint8 if size == 1 else dtype))
    assert digest_view(content, leaves) == want
    assert digest_view(stored, leaves) == want


def test_nothing_has_the_digest_zero():
    leaves = Leaves(item_uid=1, first=0, blocks=0, block_nbytes=0, leaf_nbytes=1)
    assert digest_view(torch.empty(0, 3), leaves) == 0
    one = Leaves(item_uid=1, first=0, blocks=1, block_nbytes=0, leaf_nbytes=1)
    assert digest_bytes(memoryview(b""), one) == 0
    assert add_digests([]) == 0


def test_a_view_that_does_not_fit_the_leaves_is_refused():
    leaves = Leaves(item_uid=1, first=0, blocks=3, block_nbytes=100, leaf_nbytes=10)
    with pytest.raises(ValueError, match="do not fit"):
        digest_view(torch.zeros(4, 6).t(), leaves)


def test_hex():
    assert to_hex(255) == "0" * 30 + "ff"
    assert to_hex(2**128 + 1) == to_hex(1) == "0" * 31 + "1"
