"""The plan's copies as what kernels take: a source rank's tasks as parts of a bucket, a receiver's as landings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.programs import Copy, SourceTask, TargetTask
from syncline.stages.copies import WIRE, torch_dtype

from .gathered import by_segment, gathered, own_view, quantized_part
from .land import Landed
from .views import Moved, Part, View, matrices


def parts_of(
    task: SourceTask,
    buffers: Sequence[torch.Tensor],
    messages_at: Sequence[int] = (),
    *,
    local: Sequence[Copy] | None = None,
) -> list[Moved | Part]:
    """The segments of a bucket on its owner; those that are quantized together with their scales.

    Args:
        task: a task that this rank owns.
        buffers: the rank's own tensors in the order of its manifest's buffers, on the bucket's device.
        messages_at: where in the memory that is given at each run each received message lies, in bytes, at multiples of
            256; what stands for direct messages is not read, since they come straight into the bucket.
        local: the rank's own copies, if other than the task's: those that have been staged read wire memory instead.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """
    placed = by_segment(task, [*((copy, 0) for copy in (task.local if local is None else local)), *gathered(task, messages_at)])
    scales = {one.scales for one in task.quantized}
    codes = {one.codes: one for one in task.quantized}
    parts: list[Moved | Part] = []
    for number, segment in enumerate(task.segments):
        if number in codes:
            parts.append(quantized_part(task, codes[number], placed[number], buffers))
        elif number not in scales:
            moves = tuple(move for copy, at in placed[number] for move in moves_of(copy, buffers, at))
            parts.append(Moved(offset=segment.offset, nbytes=segment.nbytes, moves=moves, leaves=segment.leaves))
    return parts


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
            places=tuple(own_view(region, buffers) for region in landing.dests),
            leaves=landing.segment.leaves,
        )
        for landing in task.landings
    ]


def moves_of(copy: Copy, buffers: Sequence[torch.Tensor], at: int) -> Iterator[tuple[View, View]]:
    """A copy as matrices; ``at``: where wire memory that it reads begins in the memory given at each run, in bytes."""
    src, dst = copy.src, copy.dst
    base = None if src.buffer == WIRE else own_view(src, buffers)
    first = src.offset + at // ITEMSIZE[src.dtype] if base is None else 0
    for shape, (start, steps), (to, to_steps) in matrices(src.shape, src.strides, dst.strides):
        read = View(base=base, offset=first + start, shape=shape, strides=steps, dtype=torch_dtype(src.dtype))
        write = View(base=None, offset=dst.offset + to, shape=shape, strides=to_steps, dtype=torch_dtype(dst.dtype))
        yield read, write
