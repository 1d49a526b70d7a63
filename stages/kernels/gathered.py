"""Where the parts of a bucket come from: the plan's copies by segment, and quantized segments as kernels take them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.errors import PlanError
from syncline.scheduler.formats import parse_format
from syncline.scheduler.programs import Copy, Quantization, Region, SourceTask
from syncline.stages.copies import WIRE, span_nbytes, torch_dtype

from .views import Part, Piece, Quantized, View

Placed = tuple[Copy, int]
"""A copy into a bucket, and where the wire memory that it may read from begins in the memory given at each run, in bytes."""


def gathered(task: SourceTask, messages_at: Sequence[int]) -> list[Placed]:
    """What received messages bring that does not come straight into the bucket."""
    messages = zip(task.receives, messages_at, strict=True)
    return [(copy, at) for message, at in messages if not message.direct for copy in message.copies]


def by_segment(task: SourceTask, copies: Iterable[Placed]) -> defaultdict[int, list[Placed]]:
    """Copies into a bucket by the segment that they write to."""
    starts = [segment.offset for segment in task.segments]
    found: defaultdict[int, list[Placed]] = defaultdict(list)
    for copy, at in copies:
        found[bisect_right(starts, copy.dst.offset * ITEMSIZE[copy.dst.dtype]) - 1].append((copy, at))
    return found


def quantized_part(task: SourceTask, which: Quantization, copies: Sequence[Placed], buffers: Sequence[torch.Tensor]) -> Part:
    """A segment of codes with its scales; ``copies`` say where the weight's parts lie."""
    codes, scales = task.segments[which.codes], task.segments[which.scales]
    rows, columns = codes.box.shape
    pieces = []
    for copy, at in copies:
        src = copy.src
        base = None if src.buffer == WIRE else own_view(src, buffers)
        first = src.offset + at // ITEMSIZE[src.dtype] if base is None else 0
        row, column = divmod(copy.dst.offset - codes.offset, columns)
        shape, (down, across) = (src.shape[0], src.shape[1]), src.strides
        view = View(base=base, offset=first, shape=shape, strides=(down, across), dtype=torch_dtype(src.dtype))
        pieces.append(Piece(view=view, row=row, column=column))
    how = Quantized(how=parse_format(which.format), scale_offset=scales.offset, scale_leaves=scales.leaves)
    return Part(
        offset=codes.offset, shape=(rows, columns), dtype=torch_dtype(codes.dtype), pieces=tuple(pieces), leaves=codes.leaves,
        quantized=how,
    )  # fmt: skip


def own_view(region: Region, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
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
