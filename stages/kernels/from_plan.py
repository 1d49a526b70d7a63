"""The plan's copies as what kernels take: a source rank's tasks as parts of a bucket, a receiver's as landings."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.errors import PlanError
from syncline.scheduler.programs import Copy, Region, SourceTask, TargetTask
from syncline.stages.copies import WIRE, span_nbytes, torch_dtype

from .land import Landed
from .views import Moved, View, matrices


def parts_of(task: SourceTask, buffers: Sequence[torch.Tensor], messages_at: Sequence[int] = ()) -> list[Moved]:
    """The segments of a bucket on its owner.

    Args:
        task: a task that this rank owns.
        buffers: the rank's own tensors in the order of its manifest's buffers, on the bucket's device.
        messages_at: where in the memory that is given at each run each received message lies, in bytes, at multiples of
            256; what stands for direct messages is not read, since they come straight into the bucket.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """
    starts = [segment.offset for segment in task.segments]
    moves: defaultdict[int, list[tuple[View, View]]] = defaultdict(list)
    gathered = [
        (copy, at)
        for message, at in zip(task.receives, messages_at, strict=True)
        if not message.direct
        for copy in message.copies
    ]
    for copy, at in [*((copy, 0) for copy in task.local), *gathered]:
        number = bisect_right(starts, copy.dst.offset * ITEMSIZE[copy.dst.dtype]) - 1
        moves[number].extend(_moves(copy, buffers, at))
    return [
        Moved(offset=segment.offset, nbytes=segment.nbytes, moves=tuple(moves[number]), leaves=segment.leaves)
        for number, segment in enumerate(task.segments)
    ]


def landings_of(task: TargetTask, buffers: Sequence[torch.Tensor]) -> list[Landed]:
    """The segments of a bucket as a receiver takes them.

    Args:
        task: a task of the receiver's program.
        buffers: the receiver's own tensors in the order of its manifest's buffers.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """
    return [
        Landed(
            offset=landing.segment.offset,
            places=tuple(_tensor(region, buffers) for region in landing.dests),
            leaves=landing.segment.leaves,
        )
        for landing in task.landings
    ]


def _moves(copy: Copy, buffers: Sequence[torch.Tensor], at: int) -> Iterator[tuple[View, View]]:
    src, dst = copy.src, copy.dst
    base = None if src.buffer == WIRE else _tensor(src, buffers)
    first = src.offset + at // ITEMSIZE[src.dtype] if base is None else 0
    for shape, (start, steps), (to, to_steps) in matrices(src.shape, src.strides, dst.strides):
        read = View(base=base, offset=first + start, shape=shape, strides=steps, dtype=torch_dtype(src.dtype))
        write = View(base=None, offset=dst.offset + to, shape=shape, strides=to_steps, dtype=torch_dtype(dst.dtype))
        yield read, write


def _tensor(region: Region, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The view of a rank's own tensor that a region names."""
    if not 0 <= region.buffer < len(buffers):
        raise PlanError([f"the plan names buffer {region.buffer}, but there are {len(buffers)}: connect again"])
    base = buffers[region.buffer].detach()
    start = base.storage_offset() + region.offset
    if base.dtype != torch_dtype(region.dtype):
        raise PlanError([f"buffer {region.buffer} has dtype {base.dtype}, planned was {region.dtype}: connect again"])
    if start * base.element_size() + span_nbytes(region) > base.untyped_storage().nbytes():
        raise PlanError([f"buffer {region.buffer} is shorter than planned: connect again"])
    return base.as_strided(region.shape, region.strides, start)
