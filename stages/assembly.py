"""How a bucket is put together on its owner, and taken apart where it lands, with its digest computed on the way.

Contents that are contiguous on both sides are copied leaf by leaf and each leaf is hashed while it is still in the
processor's cache, which costs about half of hashing it from memory. What gets hashed is always the copy, never the
original; but large contents that need no cast may be sent straight from the rank's own memory, and received straight into
live parameters: these are hashed where they lie. Both classes are built once from the plan; their methods run on worker
threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Index
from syncline.scheduler.programs import Copy, Landing, Message, Region, Segment, SourceTask, TargetTask

from .copies import WIRE, CopyPlan, address_of, is_contiguous, move_bytes, resolve, torch_dtype
from .digest import add_digests, bytes_of, digest_bytes, digest_view, flat, hash_leaf, leaf_bounds
from .errors import TransportError
from .frames import FRAME_NBYTES
from .kernels.gathered import by_segment, gathered, quantized_part
from .kernels.plain import write_part
from .kernels.views import Part


def row_major(shape: Index) -> Index:
    """Strides of a row-major tensor without gaps, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def segment_region(segment: Segment) -> Region:
    """A whole segment as a region of its bucket."""
    shape = segment.box.shape
    return Region(WIRE, segment.offset // ITEMSIZE[segment.dtype], shape, row_major(shape), segment.dtype)


class _Fill(NamedTuple):
    """One copy that makes up a whole segment, contiguous on both sides. ``src`` is flat; casting if dtypes differ."""

    segment: Segment
    src: torch.Tensor
    address: int
    cast: bool


class Assembly:
    """The bucket of one task on its owner.

    Args:
        task: a task that this rank owns.
        local: its copies out of the rank's own tensors (without those that read mapped files).
        staged: copies whose source lies in the task's file staging instead (wire memory on both sides).
        buffers: the rank's own tensors.
        messages_at: where in the task's private memory received messages lie (`task_memory.Layout.messages`).
    """

    def __init__(
        self,
        task: SourceTask,
        local: Sequence[Copy],
        staged: Sequence[Copy],
        buffers: Sequence[torch.Tensor],
        messages_at: Sequence[int] = (),
    ) -> None:
        waits = _touched(task.segments, [copy for message in task.receives for copy in message.copies])
        waits |= {one.scales for one in task.quantized if one.codes in waits}
        self._quantized, self._quantized_late = _quantized_parts(task, [*local, *staged], buffers, messages_at, waits)
        local, staged, receives = _unquantized(task, local, staged)
        starts = {s.offset: s for i, s in enumerate(task.segments) if i not in waits and s.nbytes}
        self._fills: list[_Fill] = []
        rest: list[Copy] = []
        for copy in local:
            segment = starts.get(copy.dst.offset * ITEMSIZE[copy.dst.dtype])
            fill = _find_fill(segment, copy, buffers) if segment is not None else None
            if fill is None:
                rest.append(copy)
            else:
                self._fills.append(fill)
        filled = {fill.segment.offset for fill in self._fills}
        self._local = CopyPlan(rest, buffers)
        self._staged = CopyPlan(staged, buffers)
        self._unpack = [CopyPlan(copies, buffers) if copies else None for copies in receives]
        self._early = [s for i, s in enumerate(task.segments) if i not in waits and s.offset not in filled]
        self._late = [s for i, s in enumerate(task.segments) if i in waits]

    def has_to_fill(self, *, verify: bool, lend: bool) -> bool:
        """Whether `fill` has anything to do: not where all is lent and nothing is hashed."""
        copied = bool(len(self._local) or len(self._staged) or self._quantized)
        return verify or copied or not lend or not all(map(_can_lend, self._fills))

    def has_to_finish(self, *, verify: bool) -> bool:
        """Something is left to be done when all messages have been unpacked: see `finish`."""
        return bool(self._quantized_late) or (verify and bool(self._late))

    @property
    def lent(self) -> dict[int, torch.Tensor]:
        """Segments that can be sent straight from the rank's own memory: offset in the bucket -> bytes there (1-d uint8)."""
        return {fill.segment.offset: fill.src.view(torch.uint8) for fill in self._fills if _can_lend(fill)}

    def fill(self, bucket: torch.Tensor, files: torch.Tensor | None, *, verify: bool, lend: bool = False) -> int:
        """Copy or quantize everything local into ``bucket``; the digest of what is complete by that (0 if not ``verify``).

        With ``lend``, what is `lent` is not copied, and hashed where it lies.
        """
        fills = [fill for fill in self._fills if not (lend and _can_lend(fill))]
        parts = _run_fills(fills, bucket, verify=verify)
        if lend and verify:
            parts += [digest_bytes(bytes_of(f.src.view(torch.uint8)), f.segment.leaves) for f in self._fills if _can_lend(f)]
        self._local.run(dst=bucket)
        self._staged.run(src=files, dst=bucket)
        for part in self._quantized:
            write_part(part, bucket, files)
        return add_digests(parts) + (_digest(bucket, self._early) if verify else 0)

    def unpack(self, number: int, message: torch.Tensor, bucket: torch.Tensor) -> None:
        """Unpack received message ``number`` (not a direct one) into ``bucket``, but for what `finish` quantizes."""
        plan = self._unpack[number]
        if plan is not None:
            plan.run(src=message, dst=bucket)

    def finish(self, bucket: torch.Tensor, memory: torch.Tensor | None, *, verify: bool) -> int:
        """When all messages are there: quantize what they have completed; the digest of all that they have (or 0).

        ``memory``: the task's private memory, in which the messages lie.
        """
        for part in self._quantized_late:
            write_part(part, bucket, memory)
        return _digest(bucket, self._late) if verify else 0


def _can_lend(fill: _Fill) -> bool:
    return not fill.cast and fill.segment.nbytes >= FRAME_NBYTES


def _digest(bucket: torch.Tensor, segments: Sequence[Segment]) -> int:
    if not segments:
        return 0
    content = bytes_of(bucket)
    return add_digests(digest_bytes(content[s.offset : s.offset + s.nbytes], s.leaves) for s in segments)


def direct_range(message: Message, *, sends: bool) -> tuple[int, int]:
    """Where in wire memory a direct message's bytes lie: start and length."""
    (copy,) = message.copies
    region = copy.src if sends else copy.dst
    return region.offset * ITEMSIZE[region.dtype], message.nbytes


def _touched(segments: Sequence[Segment], copies: Sequence[Copy]) -> set[int]:
    """Indexes of the segments that ``copies`` write to."""
    starts = [segment.offset for segment in segments]
    return {bisect_right(starts, copy.dst.offset * ITEMSIZE[copy.dst.dtype]) - 1 for copy in copies}


def _quantized_parts(
    task: SourceTask, own: Sequence[Copy], buffers: Sequence[torch.Tensor], messages_at: Sequence[int], waits: Collection[int]
) -> tuple[list[Part], list[Part]]:
    """Quantized segments whose weight this rank has by itself, and those that messages complete."""
    if not task.quantized:
        return [], []
    placed = by_segment(task, [*((copy, 0) for copy in own), *gathered(task, messages_at)])
    early: list[Part] = []
    late: list[Part] = []
    for one in task.quantized:
        (late if one.codes in waits else early).append(quantized_part(task, one, placed[one.codes], buffers))
    return early, late


def _unquantized(
    task: SourceTask, local: Sequence[Copy], staged: Sequence[Copy]
) -> tuple[Sequence[Copy], Sequence[Copy], list[Sequence[Copy]]]:
    """The copies (of each message, for the third) that end in segments as they are."""
    receives: list[Sequence[Copy]] = [() if message.direct else message.copies for message in task.receives]
    if not task.quantized:
        return local, staged, receives
    codes = {one.codes for one in task.quantized}

    def plain(copies: Sequence[Copy]) -> Sequence[Copy]:
        return [copy for copy in copies if not _touched(task.segments, [copy]) & codes]

    return plain(local), plain(staged), [plain(copies) for copies in receives]


def _find_fill(segment: Segment, copy: Copy, buffers: Sequence[torch.Tensor]) -> _Fill | None:
    """``copy`` as the one that makes up ``segment``, if it does and is contiguous on both sides."""
    if copy.dst.shape != segment.box.shape or not is_contiguous(copy.dst.shape, copy.dst.strides):
        return None
    if not is_contiguous(copy.src.shape, copy.src.strides):
        return None
    cast = copy.src.dtype != copy.dst.dtype
    src = resolve(copy.src, buffers, raw=not cast).local
    return None if src is None else _Fill(segment, flat(src), src.data_ptr(), cast)


def _run_fills(fills: Sequence[_Fill], bucket: torch.Tensor, *, verify: bool) -> list[int]:
    base = address_of(bucket, max((fill.segment.offset + fill.segment.nbytes for fill in fills), default=0))
    content = bytes_of(bucket)
    parts: list[int] = []
    for segment, src, src_at, cast in fills:
        at, nbytes = segment.offset, segment.nbytes
        if cast:
            parts.append(_cast_fill(segment, src, bucket[at : at + nbytes], verify=verify))
        elif verify:
            parts.append(move_and_digest(content[at : at + nbytes], base + at, src_at, segment))
        else:
            move_bytes(base + at, src_at, nbytes)
    return parts


def _cast_fill(segment: Segment, src: torch.Tensor, part: torch.Tensor, *, verify: bool) -> int:
    dst = part.view(torch_dtype(segment.dtype))
    if not verify:
        dst.copy_(src)
        return 0
    content, item = bytes_of(part), dst.element_size()
    total = 0
    for start, stop, seed in leaf_bounds(segment.leaves):
        dst[start // item : stop // item].copy_(src[start // item : stop // item])
        total += hash_leaf(content[start:stop], seed)
    return total


def move_and_digest(content: memoryview, dst_at: int, src_at: int, segment: Segment) -> int:
    """Move a segment's contiguous bytes to ``dst_at``, hashing each leaf of the copy, whose bytes ``content`` shows."""
    leaves = segment.leaves
    if leaves.blocks == 1 and leaves.block_nbytes <= leaves.leaf_nbytes:  # the many small ones
        move_bytes(dst_at, src_at, segment.nbytes)
        return digest_bytes(content, leaves)
    total = 0
    for start, stop, seed in leaf_bounds(leaves):
        move_bytes(dst_at + start, src_at + start, stop - start)
        total += hash_leaf(content[start:stop], seed)
    return total


class _Dest(NamedTuple):
    """A place where a segment lands. ``content``: its bytes, if contiguous."""

    segment: Segment
    view: torch.Tensor
    address: int
    content: memoryview | None


class LandingCopies:
    """The copies of one task on a receiver: from its bucket into the receiver's own tensors.

    Args:
        task: a task of the receiver's program.
        buffers: the receiver's own tensors, in the order of its manifest's buffers.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """

    def __init__(self, task: TargetTask, buffers: Sequence[torch.Tensor]) -> None:
        self._landings = [[_dest(landing, region, buffers) for region in landing.dests] for landing in task.landings]
        copies = [Copy(segment_region(lg.segment), region) for lg in task.landings for region in lg.dests]
        self._plan = CopyPlan(copies, buffers)
        self._nbytes = max((lg.segment.offset + lg.segment.nbytes for lg in task.landings), default=0)
        self._task, self._buffers = task, buffers
        self._placed: frozenset[int] = frozenset()

    @property
    def places(self) -> dict[int, torch.Tensor]:
        """Segments that have one place, contiguous: offset in the bucket -> the bytes there (1-d uint8)."""
        single = (dests[0] for dests in self._landings if len(dests) == 1)
        return {d.segment.offset: flat(d.view).view(torch.uint8) for d in single if d.content is not None}

    @property
    def idle(self) -> bool:
        """Nothing has to be copied."""
        return not len(self._plan)

    def leave(self, placed: Collection[int]) -> None:
        """The segments at these offsets come into their `places` by themselves: they are hashed there, and never copied."""
        self._placed = frozenset(placed)
        landings = [lg for lg in self._task.landings if lg.segment.offset not in self._placed]
        copies = [Copy(segment_region(lg.segment), region) for lg in landings for region in lg.dests]
        self._plan = CopyPlan(copies, self._buffers)
        self._nbytes = max((lg.segment.offset + lg.segment.nbytes for lg in landings), default=0)

    def run(self, bucket: torch.Tensor) -> None:
        """Copy every segment of ``bucket`` to all its places."""
        self._plan.run(src=bucket)

    def run_and_digest(self, bucket: torch.Tensor) -> int:
        """The same, and the digest of what has landed, computed from where it landed.

        Raises `TransportError` if a segment that lands in several places is not the same in all of them.
        """
        base = address_of(bucket, self._nbytes)
        placed, landings = self._placed, self._landings
        parts = [self._land(dests, bucket, base) for dests in landings if dests[0].segment.offset not in placed]
        there = [dests[0] for dests in landings if dests[0].segment.offset in placed]
        return add_digests(parts + [digest_bytes(d.content, d.segment.leaves) for d in there if d.content is not None])

    @staticmethod
    def _land(dests: list[_Dest], bucket: torch.Tensor, base: int) -> int:
        digests = {_land_at(dest, bucket, base) for dest in dests}
        if len(digests) > 1:
            raise TransportError(f"{dests[0].segment.name} landed differently in the {len(dests)} places that hold it")
        return digests.pop() if digests else 0


def _dest(landing: Landing, region: Region, buffers: Sequence[torch.Tensor]) -> _Dest:
    side = resolve(region, buffers, raw=True)
    if side.local is None:
        raise ValueError("a landing place is in the receiver's own tensors, not in wire memory")
    content = bytes_of(side.local) if side.contiguous and side.local.numel() else None
    return _Dest(landing.segment, side.local, side.base, content)


def _land_at(dest: _Dest, bucket: torch.Tensor, base: int) -> int:
    segment = dest.segment
    if segment.nbytes == 0:
        return 0
    if dest.content is not None:
        return move_and_digest(dest.content, dest.address, base + segment.offset, segment)
    source = bucket[segment.offset : segment.offset + segment.nbytes].view(dest.view.dtype)
    dest.view.copy_(source.view(dest.view.shape))
    return digest_view(dest.view, segment.leaves)
