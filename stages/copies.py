"""Copies between a rank's own tensors and wire memory, resolved once from the plan and run at every push.

A `CopyPlan` turns `syncline.scheduler.programs.Copy` entries into addresses and views when it is built; running it does
no planning. Copies whose two sides are contiguous and of one dtype become plain memory moves; everything else goes
through `Tensor.copy_`, which casts (to nearest even) where the dtypes differ and moves bits untouched where they agree.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.errors import PlanError
from syncline.scheduler.programs import Copy, Region

from .digest import RAW

WIRE = -1
"""`Region.buffer` of wire memory (a bucket or a message)."""

move_bytes: Callable[[int, int, int], object] = ctypes.memmove
"""``move_bytes(dst_address, src_address, nbytes)``: libc's memmove; other threads run meanwhile."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a dtype name of `syncline.scheduler.dtypes`."""
    dtype = getattr(torch, name)
    if name not in ITEMSIZE or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of an element type that can travel")
    return dtype


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Row-major without gaps; axes of one element may have any stride."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def span_nbytes(region: Region) -> int:
    """Bytes from a region's first element to the end of its last."""
    if 0 in region.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(region.shape, region.strides, strict=True))
    return (last + 1) * ITEMSIZE[region.dtype]


def local_view(region: Region, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The view that a region of the rank's own buffers names. `PlanError` if the buffers are not those of the plan."""
    if not 0 <= region.buffer < len(buffers):
        raise PlanError([f"the plan names buffer {region.buffer}, but there are {len(buffers)}: {_STALE}"])
    base = buffers[region.buffer].detach()
    problem = _mismatch(region, base)
    if problem:
        raise PlanError([f"buffer {region.buffer}: {problem}: {_STALE}"])
    return base.as_strided(region.shape, region.strides, base.storage_offset() + region.offset)


_STALE = "the plan was made from another manifest; connect again"


def _mismatch(region: Region, base: torch.Tensor) -> str | None:
    if base.device.type != "cpu":
        return f"lives on {base.device}, and the CPU stages copy CPU tensors only"
    if base.dtype != torch_dtype(region.dtype):
        return f"has dtype {base.dtype}, planned was {region.dtype}"
    item = base.element_size()
    end = (base.storage_offset() + region.offset) * item + span_nbytes(region)
    if end > base.untyped_storage().nbytes():
        return f"is {base.untyped_storage().nbytes()} bytes long, planned were {end}"
    return None


class WireView(NamedTuple):
    """A region of wire memory: resolved against the memory of the moment."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, wire: torch.Tensor) -> torch.Tensor:
        flat = wire[self.start : self.start + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


class Side(NamedTuple):
    """One side of a copy. ``base`` is the address of a local view, or the byte offset of a wire region."""

    base: int
    local: torch.Tensor | None
    wire: WireView | None
    contiguous: bool

    def view(self, memory: torch.Tensor | None) -> torch.Tensor:
        if self.local is not None:
            return self.local
        if self.wire is None or memory is None:
            raise ValueError("this copy needs wire memory and was given none")
        return self.wire.of(memory)


def resolve(region: Region, buffers: Sequence[torch.Tensor], *, raw: bool) -> Side:
    """Resolve one side of a copy. ``raw`` views the elements as integers, so that their bits stay as they are."""
    contiguous = is_contiguous(region.shape, region.strides)
    dtype = RAW[ITEMSIZE[region.dtype]] if raw else torch_dtype(region.dtype)
    if region.buffer != WIRE:
        view = local_view(region, buffers)
        return Side(view.data_ptr(), view.view(dtype) if view.dtype != dtype else view, None, contiguous)
    start = region.offset * ITEMSIZE[region.dtype]
    return Side(start, None, WireView(start, span_nbytes(region), dtype, region.shape, region.strides), contiguous)


class Move(NamedTuple):
    """A plain move. Addresses are ``at + is_wire * (address of the wire memory)``."""

    dst: int
    dst_wire: int
    src: int
    src_wire: int
    nbytes: int


class CopyPlan:
    """Copies in the order of the plan, ready to run.

    Args:
        copies: what to copy. Regions with buffer -1 are wire memory, others the rank's own ``buffers``.
        buffers: the rank's own tensors in the order of its manifest's buffers; kept alive by the plan.

    Raises:
        PlanError: the buffers are not those that the copies were planned for (dtype, size, device).
    """

    def __init__(self, copies: Sequence[Copy], buffers: Sequence[torch.Tensor]) -> None:
        self._moves: list[Move] = []
        self._strided: list[tuple[Side, Side]] = []
        self._alive: list[torch.Tensor] = []
        self._src_nbytes = 0
        self._dst_nbytes = 0
        for copy in copies:
            self._add(copy, buffers)

    def _add(self, copy: Copy, buffers: Sequence[torch.Tensor]) -> None:
        if copy.src.shape != copy.dst.shape:
            raise PlanError([f"a copy from shape {copy.src.shape} to shape {copy.dst.shape}: a bug in the planner"])
        raw = copy.src.dtype == copy.dst.dtype
        src, dst = resolve(copy.src, buffers, raw=raw), resolve(copy.dst, buffers, raw=raw)
        if 0 in copy.src.shape:
            return
        self._src_nbytes = max(self._src_nbytes, _wire_end(src))
        self._dst_nbytes = max(self._dst_nbytes, _wire_end(dst))
        if raw and src.contiguous and dst.contiguous:
            nbytes = math.prod(copy.src.shape) * ITEMSIZE[copy.src.dtype]
            self._alive += [side.local for side in (src, dst) if side.local is not None]
            self._moves.append(Move(dst.base, int(dst.local is None), src.base, int(src.local is None), nbytes))
        else:
            self._strided.append((src, dst))

    def __len__(self) -> int:
        return len(self._moves) + len(self._strided)

    def run(self, *, src: torch.Tensor | None = None, dst: torch.Tensor | None = None) -> None:
        """Copy. ``src`` and ``dst`` are the wire memories (1-d uint8, contiguous) that the two sides' wire regions lie in.

        Other threads run meanwhile. Call it from a worker thread.
        """
        src_at, dst_at = address_of(src, self._src_nbytes), address_of(dst, self._dst_nbytes)
        for move in self._moves:
            move_bytes(move.dst + move.dst_wire * dst_at, move.src + move.src_wire * src_at, move.nbytes)
        for source, destination in self._strided:
            destination.view(dst).copy_(source.view(src))


def _wire_end(side: Side) -> int:
    return 0 if side.wire is None else side.wire.start + side.wire.nbytes


def address_of(memory: torch.Tensor | None, nbytes: int) -> int:
    """Address of wire memory of which the first ``nbytes`` are used; `ValueError` if it is too short or not plain bytes."""
    if memory is None:
        if nbytes:
            raise ValueError(f"these copies use {nbytes} bytes of wire memory and were given none")
        return 0
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.device.type != "cpu":
        raise ValueError(f"wire memory is a contiguous 1-d uint8 CPU tensor, not {memory.dtype} of shape {tuple(memory.shape)}")
    if memory.numel() < nbytes:
        raise ValueError(f"wire memory of {memory.numel()} bytes is too short for copies that use {nbytes}")
    return memory.data_ptr()
