"""What one source rank does for each task, resolved once: from the plan's copies and messages to addresses and views."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.programs import Copy, Message, Region, SourceProgram, SourceTask

from .assembly import Assembly, row_major
from .copies import WIRE, CopyPlan, local_view
from .digest import flat
from .task_memory import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a contributor makes one message.

    Attributes:
        source: the rank's own bytes to send as they are (1-d uint8); None if the message is packed, or lies in file staging.
        staged_at: where in the file staging the message lies, -1 if it does not.
        local: packs from the rank's own tensors.
        staged: packs from file staging.
    """

    message: Message
    source: torch.Tensor | None
    staged_at: int
    local: CopyPlan | None
    staged: CopyPlan | None

    @property
    def packed(self) -> bool:
        return self.local is not None or self.staged is not None

    def run(self, message: torch.Tensor, files: torch.Tensor | None) -> None:
        """Pack into ``message``. On a worker thread."""
        if self.local is not None:
            self.local.run(dst=message)
        if self.staged is not None:
            self.staged.run(src=files, dst=message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One task on one source rank.

    Attributes:
        layout: the private memory that it needs.
        from_files: copies out of mapped files into staging (`h2d`); None if there are none.
        assembly: how the bucket is put together; None on a contributor.
        packings: messages to the owner; empty on the owner.
    """

    task: SourceTask
    layout: Layout
    from_files: CopyPlan | None
    assembly: Assembly | None
    packings: tuple[Packing, ...]


def build_recipes(
    program: SourceProgram, buffers: Sequence[torch.Tensor], file_buffers: Collection[int] = ()
) -> dict[int, Recipe]:
    """Resolve every task of a program. Takes a few microseconds a copy: call it on a worker thread.

    Args:
        program: what this rank does.
        buffers: the rank's own tensors in the order of its manifest's buffers. The recipes keep them alive.
        file_buffers: indexes of those that are mapped files.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """
    files = frozenset(file_buffers)
    return {task.index: _build(task, task.owner == program.rank, buffers, files) for task in program.tasks}


def _build(task: SourceTask, owner: bool, buffers: Sequence[torch.Tensor], files: frozenset[int]) -> Recipe:
    copies = [*task.local, *(copy for message in task.sends for copy in message.copies)]
    staged = stage([copy for copy in copies if copy.src.buffer in files])
    file_nbytes = sum(_nbytes(copy.src) for copy in staged)
    from_files = CopyPlan([Copy(copy.src, moved.src) for copy, moved in staged.items()], buffers) if staged else None
    if owner:
        local = [copy for copy in task.local if copy not in staged]
        from_staging = [staged[copy] for copy in task.local if copy in staged]
        messages = tuple(-1 if message.direct else message.nbytes for message in task.receives)
        layout = Layout.of(file_nbytes, messages, task.nbytes)
        assembly = Assembly(task, local, from_staging, buffers, layout.messages)
        return Recipe(task=task, layout=layout, from_files=from_files, assembly=assembly, packings=())
    packings = tuple(_packing(message, staged, buffers) for message in task.sends)
    layout = Layout.of(file_nbytes, tuple(p.message.nbytes if p.packed else -1 for p in packings), None)
    return Recipe(task=task, layout=layout, from_files=from_files, assembly=None, packings=packings)


def _packing(message: Message, staged: Mapping[Copy, Copy], buffers: Sequence[torch.Tensor]) -> Packing:
    if message.direct:
        (copy,) = message.copies
        if copy in staged:
            region = staged[copy].src
            return Packing(
                message=message, source=None, staged_at=region.offset * ITEMSIZE[region.dtype], local=None, staged=None
            )
        source = flat(local_view(copy.src, buffers)).view(torch.uint8)
        return Packing(message=message, source=source, staged_at=-1, local=None, staged=None)
    local = [copy for copy in message.copies if copy not in staged]
    moved = [staged[copy] for copy in message.copies if copy in staged]
    return Packing(
        message=message,
        source=None,
        staged_at=-1,
        local=CopyPlan(local, buffers) if local else None,
        staged=CopyPlan(moved, ()) if moved else None,
    )


def stage(copies: Sequence[Copy]) -> dict[Copy, Copy]:
    """Each copy out of memory that `h2d` reads -> the copy that reads its content from staging instead.

    Contents lie one after the other without gaps, large element types first, so that each is aligned.
    """
    at, moved = 0, {}
    for copy in sorted(copies, key=lambda copy: -ITEMSIZE[copy.src.dtype]):
        shape = copy.src.shape
        region = Region(WIRE, at // ITEMSIZE[copy.src.dtype], shape, row_major(shape), copy.src.dtype)
        moved[copy] = Copy(region, copy.dst)
        at += _nbytes(region)
    return moved


def _nbytes(region: Region) -> int:
    return math.prod(region.shape) * ITEMSIZE[region.dtype]
