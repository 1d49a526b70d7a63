"""What one rank has to do for a push: the plan, seen from one source rank or from one target rank.

Programs are plain data. They are derived from the plan once and reused for every push. All offsets are fixed by the
plan, so no metadata travels with the data.

Wire: a task's *bucket* is ``nbytes`` contiguous bytes. Each `Segment` of it (a part of one canonical tensor, row-major,
in the wire dtype) starts at a 256-byte-aligned ``offset``.

Landing space: a target that keeps a whole push in spare memory before it commits (``staged``, ``mapped``) lays bucket
after bucket. The parts of a split tensor are adjacent there, so that every tensor is contiguous in landing space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from .layout import Box, Index

ALIGN = 256
"""Alignment in bytes of every segment within a bucket and of every tensor within landing space."""


class ReceiverId(NamedTuple):
    """One rank of one target. ``target`` is the target's position in the plan."""

    target: int
    rank: int


class Region(NamedTuple):
    """A strided view: ``offset`` and ``strides`` in elements of ``dtype``, from the first element of the memory named.

    On the source side and in ``Landing.dests``, ``buffer`` is an index into the rank's own manifest buffers.
    In wire memory (bucket or message) ``buffer`` is -1.
    """

    buffer: int
    offset: int
    shape: Index
    strides: Index
    dtype: str


class Copy(NamedTuple):
    """Copy ``src`` to ``dst`` (same shape), casting where the dtypes differ."""

    src: Region
    dst: Region


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaves:
    """How a segment's bytes fall into digest leaves.

    The segment is ``blocks`` blocks of ``block_nbytes`` contiguous bytes; each block is cut into leaves of
    ``leaf_nbytes`` with one shorter leaf at its end where it does not divide. Leaf ``i`` of the segment (counted through
    all blocks) has the 64-bit seed ``(item_uid + first + i) mod 2**64``: it depends on the tensor and on the leaf's place
    in it, never on how tensors were cut into segments and buckets.
    """

    item_uid: int
    first: int
    blocks: int
    block_nbytes: int
    leaf_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of one canonical tensor in a bucket: its box, wire dtype, place in the bucket, and digest leaves."""

    item: int
    name: str
    box: Box
    dtype: str
    offset: int
    nbytes: int
    leaves: Leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One point-to-point message of the gather in `prepare`: contiguous bytes from a contributor to the task's owner.

    ``tag`` is unique within a push for the pair of ranks. On the contributor ``copies`` pack its own buffers into the
    message (wire dtype: the cast is done before the send; what is quantized comes in the source's own type); on the owner they
    unpack the message into the bucket.
    ``direct`` says that no packing is needed: there is exactly one copy, its local side is contiguous, and no cast: the
    contributor sends straight out of its buffer, the owner receives straight into the bucket.
    """

    peer: int
    tag: int
    nbytes: int
    copies: tuple[Copy, ...]
    direct: bool = False


class Quantization(NamedTuple):
    """A segment of a bucket that its owner quantizes, and the one that takes its scales: indexes into `SourceTask.segments`.

    Copies whose ``dst`` lies in that segment have the source's own element type on their other side: they say where the
    parts of the weight are that becomes the segment once all of them are there. ``format`` as in `syncline.scheduler.formats`.
    Groups are counted from the segment's first row and column.
    """

    codes: int
    scales: int
    format: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTask:
    """A task as one source rank sees it: as its owner (assembles and sends) or as a contributor (sends pieces to the owner).

    Attributes:
        index: position in plan order, the same on every rank. A rank's program holds only the tasks it takes part in.
        group: mesh group.
        owner: source rank that assembles and sends the bucket.
        nbytes: bytes of the bucket.
        tmp_bytes: temporary bytes that *this rank* holds while the task is in flight (bucket if it is owner and the bucket
            is not landing memory, packed messages, staging of received messages, copies out of mapped files).
        landing_offset: where the bucket lies in the owner's landing space (shared by all receivers on a host).
        receivers: who gets the bucket (owner only; empty for contributors).
        relayed: those of them that get it from another rank of their target, not from the owner.
        segments: wire layout of the bucket (owner only).
        local: copies out of this rank's own buffers into the bucket (owner only).
        receives: messages from contributors (owner only).
        sends: messages to the owner (contributor only).
        file_bytes: bytes that `h2d` copies out of mapped files for this task on this rank.
        quantized: segments that are quantized (owner only).
    """

    index: int
    group: int
    owner: int
    nbytes: int
    tmp_bytes: int
    landing_offset: int
    receivers: tuple[ReceiverId, ...] = ()
    relayed: tuple[ReceiverId, ...] = ()
    segments: tuple[Segment, ...] = ()
    local: tuple[Copy, ...] = ()
    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    file_bytes: int = 0
    quantized: tuple[Quantization, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceProgram:
    """Everything that source rank ``rank`` does for a push, in plan order.

    Attributes:
        landing_nbytes: bytes of this owner's landing space.
        groups: all mesh groups of the plan in order, also those in which this rank has no task.
        total_tasks: number of tasks of the whole plan.
    """

    plan_digest: str
    rank: int
    world_size: int
    tasks: tuple[SourceTask, ...]
    landing_nbytes: int
    groups: tuple[int, ...]
    total_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Landing:
    """A segment as one receiver takes it.

    ``pieces`` are indexes into the pieces of the receiver's manifest. ``dests``, one for each, are regions of the
    receiver's own buffers, all of which get the segment's content (more than one where the receiver holds a tied tensor
    twice; equal ones where two pieces name the same memory). Their shape is the segment's box shape and their dtype the
    wire dtype.
    ``landing_offset`` is the segment's place in this receiver's own (private) landing space; ``shared_offset`` its place
    in the owner's landing space (see `SourceTask.landing_offset`).
    """

    segment: Segment
    dests: tuple[Region, ...]
    pieces: tuple[int, ...]
    landing_offset: int
    shared_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTask:
    """A bucket as one receiver takes it: assembled by source rank ``owner``, ``nbytes`` long.

    Attributes:
        via: rank of the receiver's own target that passes it on to the receiver; None: it comes from the owner.
        onward: ranks of the receiver's own target that the receiver passes it on to.
    """

    index: int
    owner: int
    nbytes: int
    landing_offset: int
    shared_offset: int
    landings: tuple[Landing, ...]
    via: int | None = None
    onward: tuple[int, ...] = ()

    @property
    def is_relayed(self) -> bool:
        """The receiver gets it from, or passes it on to, another rank of its target."""
        return self.via is not None or bool(self.onward)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetProgram:
    """Everything that one receiver takes in a push, in plan order.

    Attributes:
        landing_nbytes: bytes of the private landing space that holds a whole push of this receiver.
        owners: source ranks that send to this receiver.
        shared_nbytes: bytes of each owner's landing space, in the order of ``owners``.
        bucket_nbytes: the largest bucket.
        digest_kind: for example ``xxh3_128:262144``.
        skipped: names of the receiver's manifest that are out of the push's scope: they stay as they are.
    """

    plan_digest: str
    receiver: ReceiverId
    tasks: tuple[TargetTask, ...]
    landing_nbytes: int
    owners: tuple[int, ...]
    shared_nbytes: tuple[int, ...]
    bucket_nbytes: int
    digest_kind: str
    skipped: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """One msgpack document."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> TargetProgram:
        """The inverse of `to_bytes`. Raises `ValueError` for anything that is not a program.

        A decoded program is well formed, not yet right: see `syncline.scheduler.proof.check_target_program`.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not the bytes of a target program: {error}") from error
