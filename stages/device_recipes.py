"""What one source rank does for each task on a device: as `syncline.stages.recipes`, with launches instead of copies.

Memory of the host (the trainer's own, where it keeps weights there, and mapped files) is brought to staging memory of the task
by `h2d`; from there on everything lies on the device. Temporary memory of the kernels is a part of the task's private memory,
so the watermark counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.errors import PlanError
from syncline.scheduler.programs import Copy, Leaves, Message, SourceProgram, SourceTask

from .copies import WIRE, is_contiguous, local_view
from .digest import flat
from .frames import FRAME_NBYTES
from .kernels.assemble import Backend, BucketKernels
from .kernels.from_plan import moves_of, parts_of
from .kernels.gathered import by_segment, own_view
from .kernels.views import Hashed, Moved, Part
from .page_locks import PageLocks
from .recipes import stage
from .task_memory import Layout

CHUNK_NBYTES = 4 << 20
"""Pageable memory is copied to page-locked memory in pieces of this size, by several threads."""

_NO_LEAVES = Leaves(item_uid=0, first=0, blocks=0, block_nbytes=0, leaf_nbytes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A tensor of the host and where in a task's staging memory it goes.

    Attributes:
        source: any strides; contiguous where ``locked``.
        at: in bytes.
        locked: it is page-locked: the device reads it where it is.
    """

    source: torch.Tensor
    at: int
    locked: bool

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.source.element_size()

    def target(self, memory: torch.Tensor) -> torch.Tensor:
        """Where it goes in ``memory`` (1-d uint8), in its own shape and type."""
        return memory[self.at : self.at + self.nbytes].view(self.source.dtype).view(self.source.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePacking:
    """How a contributor makes one message.

    Attributes:
        source: the rank's own bytes on the device to send as they are (1-d uint8); None if the message is packed, or lies in
            staging.
        staged_at: where in staging it lies, -1 if it does not.
        kernels: pack it.
    """

    message: Message
    source: torch.Tensor | None = None
    staged_at: int = -1
    kernels: BucketKernels | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRecipe:
    """One task on one source rank.

    Attributes:
        layout: the private memory that it needs; behind the messages lies what the kernels need, number ``scratch``.
        uploads: what `h2d` brings to the beginning of it.
        kernels: how the bucket is put together; None on a contributor.
        packings: messages to the owner; empty on the owner.
        lent: segments that are sent from where they lie: offset in the bucket -> bytes there (1-d uint8).
        scratch: number of the kernels' memory among the layout's messages.
    """

    task: SourceTask
    layout: Layout
    uploads: tuple[Upload, ...]
    kernels: BucketKernels | None
    packings: tuple[DevicePacking, ...]
    lent: Mapping[int, torch.Tensor]
    scratch: int

    @property
    def lent_whole(self) -> bool:
        """All of the task is sent from where it lies: no bucket is assembled."""
        return bool(self.lent) and all(one.offset in self.lent for one in self.task.segments if one.nbytes)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What recipes of a rank have in common.

    Attributes:
        buffers: the rank's own tensors in the order of its manifest's buffers; the recipes keep them alive.
        host: indexes of those that lie in memory of the host, or in mapped files.
        device: where buckets are assembled.
        locks: page-locks memory of the host that is worth it.
        lends: whether a task's large segments are sent from where they lie.
        verify: compute digests.
        backend: of the kernels.
    """

    buffers: Sequence[torch.Tensor]
    host: Collection[int]
    device: torch.device
    locks: PageLocks
    lends: Callable[[SourceTask], bool]
    verify: bool
    backend: Backend = "auto"


def build_device_recipes(program: SourceProgram, bench: Bench) -> dict[int, DeviceRecipe]:
    """Resolve every task of a program. Uploads tables and page-locks memory: call it on a worker thread.

    Raises:
        PlanError: the buffers are not those that were planned for, or lie elsewhere.
        ValueError: a cast or format that kernels don't do.
    """
    for index, buffer in enumerate(bench.buffers):
        if index not in bench.host and buffer.device != bench.device:
            raise PlanError([f"buffer {index} lies on {buffer.device}; this plan assembles on {bench.device}: connect again"])
    return {task.index: _build(task, bench, owner=task.owner == program.rank) for task in program.tasks}


def _build(task: SourceTask, bench: Bench, *, owner: bool) -> DeviceRecipe:
    copies = [*task.local, *(copy for message in task.sends for copy in message.copies)]
    staged = stage([copy for copy in copies if copy.src.buffer in bench.host])
    uploads = tuple(_upload(copy, moved, bench) for copy, moved in staged.items())
    staging = sum(upload.nbytes for upload in uploads)
    if not owner:
        packings = tuple(_packing(message, staged, bench) for message in task.sends)
        sizes = tuple(-1 if one.kernels is None else one.message.nbytes for one in packings)
        return DeviceRecipe(
            task=task,
            layout=Layout.of(staging, sizes, None),
            uploads=uploads,
            kernels=None,
            packings=packings,
            lent={},
            scratch=-1,
        )
    messages = tuple(-1 if message.direct else message.nbytes for message in task.receives)
    places = Layout.of(staging, messages, 0).messages
    lent = _lendable(task, staged, bench) if bench.lends(task) else {}
    parts: list[Part | Moved | Hashed] = list(
        parts_of(task, bench.buffers, places, local=[staged.get(copy, copy) for copy in task.local])
    )
    parts = [Hashed(content=lent[p.offset], leaves=p.leaves) if p.offset in lent else p for p in parts]  # type: ignore[union-attr]
    kernels = BucketKernels(parts, bench.device, verify=bench.verify, backend=bench.backend)
    layout = Layout.of(staging, (*messages, kernels.tmp_nbytes or -1), task.nbytes)
    return DeviceRecipe(
        task=task, layout=layout, uploads=uploads, kernels=kernels, packings=(), lent=lent, scratch=len(messages)
    )


def _upload(copy: Copy, moved: Copy, bench: Bench) -> Upload:
    source = local_view(copy.src, bench.buffers)
    locked = is_contiguous(source.shape, source.stride()) and bench.locks.lock(source)
    return Upload(source=source, at=moved.src.offset * ITEMSIZE[moved.src.dtype], locked=locked)


def _packing(message: Message, staged: Mapping[Copy, Copy], bench: Bench) -> DevicePacking:
    if message.direct:
        (copy,) = message.copies
        if copy in staged:
            region = staged[copy].src
            return DevicePacking(message=message, staged_at=region.offset * ITEMSIZE[region.dtype])
        return DevicePacking(message=message, source=flat(own_view(copy.src, bench.buffers)).view(torch.uint8))
    moves = tuple(move for copy in message.copies for move in moves_of(staged.get(copy, copy), bench.buffers, 0))
    part = Moved(offset=0, nbytes=message.nbytes, moves=moves, leaves=_NO_LEAVES)
    kernels = BucketKernels([part], bench.device, verify=False, backend=bench.backend)
    return DevicePacking(message=message, kernels=kernels)


def _lendable(task: SourceTask, staged: Mapping[Copy, Copy], bench: Bench) -> dict[int, torch.Tensor]:
    """Large segments that lie on the device as they travel, in one piece."""
    found = {}
    for number, copies in by_segment(task, [(copy, 0) for copy in task.local]).items():
        segment, (copy, _) = task.segments[number], copies[0]
        whole = len(copies) == 1 and math.prod(copy.dst.shape) * ITEMSIZE[copy.dst.dtype] == segment.nbytes
        plain = copy.src.dtype == copy.dst.dtype and is_contiguous(copy.src.shape, copy.src.strides)
        if whole and plain and copy not in staged and copy.src.buffer != WIRE and segment.nbytes >= FRAME_NBYTES:
            found[segment.offset] = flat(own_view(copy.src, bench.buffers)).view(torch.uint8)
    return found


def chunks(uploads: Sequence[Upload], nbytes: int = CHUNK_NBYTES) -> list[Upload]:
    """Uploads cut along their first axis into pieces of about ``nbytes``."""
    cut: list[Upload] = []
    for upload in uploads:
        source = upload.source
        if not source.dim() or upload.nbytes <= nbytes:
            cut.append(upload)
            continue
        row = upload.nbytes // source.shape[0]
        step = max(1, nbytes // row)
        for start in range(0, source.shape[0], step):
            cut.append(Upload(source=source[start : start + step], at=upload.at + start * row, locked=upload.locked))
    return cut
