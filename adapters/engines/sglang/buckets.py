"""How landed tensors are put together again for SGLang's loader: whole tensors, fused groups in one load, aligned buckets.

SGLang takes a bucket as names, types, shapes and one run of bytes, in which each tensor starts where the one before it ends;
that place has to be a multiple of its element's size. So a bucket holds its tensors by falling element size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from syncline.engine.errors import LoaderError
from syncline.engine.loader import Landed
from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Manifest
from syncline.stages.copies import torch_dtype

_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A whole tensor in a bucket: ``piece`` of the manifest, from byte ``offset`` on."""

    piece: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that are loaded in one call, in the order of their bytes."""

    slots: tuple[Slot, ...]
    nbytes: int


def together(name: str) -> str:
    """Names with the same answer must be loaded in one call.

    SGLang fuses some projections while it loads (``q_a_proj`` with ``kv_a_proj_with_mqa``) and forgets halves that come alone;
    weights belong with their scales. All of those are in one module of one layer, so that is what is kept together.
    """
    parts = name.split(".")
    layered = any(part.isdigit() for part in parts)
    return ".".join(parts[:-2]) if layered and len(parts) > 3 else name


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """All tensors of a manifest of whole tensors, in its order, in buckets of about ``bucket_bytes``.

    A group that is larger than that has a bucket of its own.
    """
    groups: dict[str, list[int]] = {}
    for index, piece in enumerate(manifest.pieces):
        groups.setdefault(together(manifest.tensors[piece.tensor].name), []).append(index)
    filled: list[list[int]] = []
    size = bucket_bytes
    for group in groups.values():
        nbytes = sum(_nbytes(manifest, index) for index in group)
        if size + nbytes > bucket_bytes:
            filled.append([])
            size = 0
        filled[-1] += group
        size += nbytes
    return [_bucket(manifest, pieces) for pieces in filled]


def _nbytes(manifest: Manifest, index: int) -> int:
    piece = manifest.pieces[index]
    return math.prod(piece.box.shape) * ITEMSIZE[piece.dtype]


def _bucket(manifest: Manifest, pieces: Sequence[int]) -> Bucket:
    slots = []
    for index in sorted(pieces, key=lambda index: -ITEMSIZE[manifest.pieces[index].dtype]):
        piece = manifest.pieces[index]
        slots.append(
            Slot(
                piece=index,
                name=manifest.tensors[piece.tensor].name,
                dtype=piece.dtype,
                shape=tuple(piece.box.shape),
                offset=0,
                nbytes=_nbytes(manifest, index),
            )
        )
    return _laid_out(slots)


class Assembly:
    """The buckets of one push while they fill. Not thread-safe.

    Args:
        buckets: as planned.
        optional: tensors that may stay away; all others have to come.
    """

    def __init__(self, buckets: Sequence[Bucket], optional: Collection[str] = ()) -> None:
        self._buckets = buckets
        self._optional = optional
        self._number = {slot.piece: number for number, bucket in enumerate(buckets) for slot in bucket.slots}
        self._slots = {slot.piece: slot for bucket in buckets for slot in bucket.slots}
        self._missing = {piece: slot.nbytes for piece, slot in self._slots.items()}
        self._bucket_missing = [bucket.nbytes for bucket in buckets]
        self._memory: dict[int, torch.Tensor] = {}

    def add(self, part: Landed) -> int | None:
        """Copy a part to its place. Returns the number of the bucket that it completes."""
        number, slot = self._number[part.piece], self._slots[part.piece]
        if part.tensor.dtype != torch_dtype(slot.dtype):
            raise LoaderError(f"{slot.name} landed as {part.tensor.dtype}; the server was told {slot.dtype}")
        memory = self._memory.get(number)
        if memory is None:
            memory = self._memory[number] = torch.empty(self._buckets[number].nbytes, dtype=torch.uint8)
        whole = memory[slot.offset : slot.offset + slot.nbytes].view(part.tensor.dtype).view(slot.shape)
        box = tuple(slice(start, start + size) for start, size in zip(part.box.start, part.box.shape, strict=True))
        whole[box].copy_(part.tensor)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        self._missing[part.piece] -= nbytes
        self._bucket_missing[number] -= nbytes
        return number if self._bucket_missing[number] == 0 else None

    def take(self, number: int) -> tuple[Bucket, torch.Tensor]:
        """A bucket and its bytes, which are let go of here. Optional tensors that stayed away are left out of it."""
        bucket, memory = self._buckets[number], self._memory.pop(number, _EMPTY)
        if self._bucket_missing[number]:
            there = [slot for slot in bucket.slots if not self._missing[slot.piece]]
            parts = [memory[slot.offset : slot.offset + slot.nbytes] for slot in there]
            memory = torch.cat([_EMPTY, *parts])
            bucket = _laid_out(there)
        self._bucket_missing[number] = 0
        return bucket, memory

    def rest(self) -> list[int]:
        """Buckets that are not complete, for want of optional tensors only.

        Raises:
            LoaderError: others are missing, too; lists them.
        """
        missing = [slot for piece, slot in self._slots.items() if self._missing[piece]]
        wanted = [slot.name for slot in missing if slot.name not in self._optional or self._missing[slot.piece] < slot.nbytes]
        if wanted:
            raise LoaderError(f"{len(wanted)} tensors did not come whole: {', '.join(wanted[:10])}")
        return [number for number, left in enumerate(self._bucket_missing) if left]


def _laid_out(slots: Sequence[Slot]) -> Bucket:
    offset, placed = 0, []
    for slot in slots:
        placed.append(replace(slot, offset=offset))
        offset += slot.nbytes
    return Bucket(slots=tuple(placed), nbytes=offset)
