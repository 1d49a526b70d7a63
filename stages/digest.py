"""Digest of content: a sum over leaves, so that order, bucket size and splitting do not matter.

A tensor's bytes (row-major, wire dtype) are cut into *leaves* of at most ``leaf_nbytes`` contiguous bytes (see
`syncline.scheduler.programs.Leaves`). Its digest is ``sum(xxh3_128(leaf, seed)) mod 2**128`` over all leaves, where the
seed depends on the tensor and on the leaf's place in it. Digests of parts add up to the digest of the whole: every source
rank and every worker sums what it saw, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from xxhash import xxh3_128_intdigest

from syncline.scheduler.programs import Leaves, Segment

_SEEDS = 2**64
_SUMS = 2**128

RAW: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by item size: views through them move bits untouched, whatever the element type."""


def add_digests(parts: Iterable[int]) -> int:
    """The digest of a whole from the digests of its parts."""
    return sum(parts) % _SUMS


def to_hex(digest: int) -> str:
    """32 hexadecimal digits."""
    return f"{digest % _SUMS:032x}"


def leaf_bounds(leaves: Leaves) -> Iterator[tuple[int, int, int]]:
    """``(start, stop, seed)`` of each leaf, in bytes of the segment."""
    block, leaf = leaves.block_nbytes, leaves.leaf_nbytes
    seed = (leaves.item_uid + leaves.first) % _SEEDS
    for base in range(0, leaves.blocks * block, block or 1):
        end = base + block
        for start in range(base, end, leaf):
            yield start, min(start + leaf, end), seed
            seed = (seed + 1) % _SEEDS


def hash_leaf(leaf: memoryview, seed: int) -> int:
    """What one leaf adds to the sum."""
    return xxh3_128_intdigest(leaf, seed)


def digest_bytes(content: memoryview, leaves: Leaves) -> int:
    """Digest of a segment's contiguous bytes."""
    if leaves.blocks == 1 and leaves.block_nbytes <= leaves.leaf_nbytes:  # the many small ones
        if leaves.block_nbytes == 0:
            return 0
        return xxh3_128_intdigest(content, (leaves.item_uid + leaves.first) % _SEEDS)
    total = 0
    for start, stop, seed in leaf_bounds(leaves):
        total += xxh3_128_intdigest(content[start:stop], seed)
    return total % _SUMS


def flat(memory: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's elements in one axis, of stride 1 (`reshape` leaves a lone element any stride)."""
    return memory.detach().as_strided((memory.numel(),), (1,))


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return flat(memory).view(torch.uint8).numpy().data


def digest_segment(bucket: torch.Tensor, segment: Segment) -> int:
    """Digest of one segment in a bucket (1-d uint8, contiguous)."""
    return digest_bytes(bytes_of(bucket[segment.offset : segment.offset + segment.nbytes]), segment.leaves)


def digest_bucket(bucket: torch.Tensor, segments: Iterable[Segment]) -> int:
    """Sum over the segments of a bucket (1-d uint8, contiguous)."""
    content = bytes_of(bucket)
    parts = (digest_bytes(content[part.offset : part.offset + part.nbytes], part.leaves) for part in segments)
    return add_digests(parts)


def digest_view(view: torch.Tensor, leaves: Leaves) -> int:
    """Digest of a segment where it landed: any strided CPU view that has the segment's shape and the wire dtype.

    A view that is not contiguous is hashed through a contiguous copy of one leaf at a time.
    """
    if view.numel() == 0:
        return 0
    if view.is_contiguous():
        return digest_bytes(bytes_of(view), leaves)
    raw = view.detach().view(RAW[view.element_size()])
    scratch = torch.empty(min(leaves.leaf_nbytes, leaves.block_nbytes) // raw.element_size(), dtype=raw.dtype)
    content = bytes_of(scratch)
    total = 0
    seed = (leaves.item_uid + leaves.first) % _SEEDS
    for part in _leaf_views(raw, leaves):
        scratch[: part.numel()].view(part.shape).copy_(part)
        total += xxh3_128_intdigest(content[: part.numel() * raw.element_size()], seed)
        seed = (seed + 1) % _SEEDS
    return total % _SUMS


def _leaf_views(view: torch.Tensor, leaves: Leaves) -> Iterator[torch.Tensor]:
    """The leaves of a strided view in order: consecutive steps along the split axis, inside one index of the axes before."""
    lead = _leading_axes(tuple(view.shape), view.element_size(), leaves)
    if lead == view.dim():  # a 0-d tensor, or a block for every element
        view = view.unsqueeze(-1)
    steps = view.shape[lead]
    rows = leaves.leaf_nbytes // (leaves.block_nbytes // steps)
    for index in np.ndindex(tuple(view.shape[:lead])):
        block = view[index]
        for start in range(0, steps, rows):
            yield block[start : start + rows]


def _leading_axes(shape: tuple[int, ...], element_size: int, leaves: Leaves) -> int:
    """How many leading axes index the blocks; axes of one step count as leading where that is open."""
    for lead in range(len(shape), -1, -1):
        if math.prod(shape[:lead]) != leaves.blocks or math.prod(shape[lead:]) * element_size != leaves.block_nbytes:
            continue
        step_nbytes = math.prod(shape[lead + 1 :]) * element_size
        if leaves.leaf_nbytes % step_nbytes == 0 or leaves.block_nbytes <= leaves.leaf_nbytes:
            return lead
    raise ValueError(
        f"leaves of {leaves.leaf_nbytes} bytes in {leaves.blocks} blocks of {leaves.block_nbytes} do not fit shape {shape}"
    )
