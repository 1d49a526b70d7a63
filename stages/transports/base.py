"""What a transport is: a `Sender` on every source rank and a `ReceivingHalf` on every rank of a target.

One sender per source rank and transport kind serves all receivers of that kind. A receiver has one receiving half, which
takes buckets from all its owners (source ranks), in plan order. All methods are called on one event loop and none blocks
it; coroutines may be awaited from tasks of that loop. Whatever fails is a `TransportError`.

A push, seen from both ends::

    source rank                                    one rank of a target
    -----------                                    --------------------
    offers = await sender.offer(receivers)
                        offers travel by the control plane
    await sender.link(receivers, ...)       <->    await half.link(descriptors, ...)           once
    await sender.begin(push_id, ...)               await half.begin(push_id, ...)              every push, either first
    loan = await sender.claim(task)                bucket = await half.receive(task)
    ... assemble loan.memory ...                   ... copy, digest ...
    sender.send(task, loan.memory, receivers)      half.release(task)
    loan.release()
    await sender.end(committed)                    await half.end(committed)

Landing modes. ``streamed``: a bucket is valid from `receive` to `release`, and only a few are under way at a time.
``staged`` and ``mapped``: all buckets of a push stay valid until `ReceivingHalf.end`, or for as long as the `Lease` of the
push is held; the whole push lies in `ReceivingHalf.space`.

After an error, or a push that did not end well, some links may be unusable: `Sender.linked` says which are left. The
others are offered and linked anew (also while the rest stay), never repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import torch
import xxhash

from syncline.scheduler.programs import Landing, ReceiverId, SourceTask, TargetTask

from ..completions import Completion, Signal
from ..errors import TransportError

LandingMode = Literal["staged", "streamed", "mapped"]

AHEAD = 4
"""Buckets that a receiver on a device works on at once, as far as they have come: an end is noticed late, and until then the
device would wait.
"""

OnLost = Callable[[ReceiverId, TransportError], None]
"""Called on the loop, at most once per link, as soon as a receiver's link is seen to be broken (not after `drop`)."""


def push_key(push_id: str) -> int:
    """64 bits that name a push on the wire."""
    return xxhash.xxh3_64_intdigest(push_id.encode())


Offer = TypeVar("Offer")


def decode_offer(descriptor: bytes, kind: type[Offer], owner: int) -> Offer:
    """A sender's descriptor; `TransportError` if it is not one of this ``kind``."""
    try:
        return msgspec.msgpack.decode(descriptor, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"what source rank {owner} offers is not a {kind.__name__}: {error}") from error


class Loan(Protocol):
    """Memory on loan. `syncline.stages.buffers.Buffer` is one."""

    @property
    def memory(self) -> torch.Tensor:
        """1-d uint8, as long as was asked for."""
        ...

    def launched(self) -> None:
        """What is to be in it was launched on the calling thread's stream: whoever takes it asks the device whether it is done.

        From any thread, before `Sender.send`. If nobody says so, it is there then.
        """
        ...

    def release(self) -> None:
        """Give it back, once nothing uses it any more."""
        ...


class Sender(Protocol):
    """The sending half of a transport on one source rank."""

    @property
    def kind(self) -> str:
        """Name of the transport: ``shm``, ``gloo``, ``cuda_ipc`` or ``nccl``."""
        ...

    @property
    def in_place(self) -> bool:
        """Buckets for this transport have to be assembled in memory that `claim` gives; it sends from nowhere else."""
        ...

    @property
    def lends(self) -> bool:
        """`send` takes segments that are not in the bucket (``lent``): they go out from where they lie."""
        ...

    @property
    def linked(self) -> frozenset[ReceiverId]:
        """Receivers that a push can reach now."""
        ...

    @property
    def landing_bytes(self) -> int:
        """Bytes of landing memory held now (``staged`` and ``mapped`` over shared memory), all buffers together."""
        ...

    async def offer(self, receivers: Collection[ReceiverId]) -> Mapping[int, bytes]:
        """Get ready for receivers to link up: target -> descriptor (the same for all ranks of the target).

        Allocates and touches whatever memory pushes will use. Receivers that were linked before and are offered again
        are dropped first.
        """
        ...

    async def link(self, receivers: Collection[ReceiverId], *, timeout_s: float) -> Mapping[ReceiverId, TransportError]:
        """Wait until the offered ``receivers`` have linked up, at most ``timeout_s`` seconds. Returns those that failed.

        Runs while the receivers call `ReceivingHalf.link`: start both, then wait for both.
        """
        ...

    async def begin(
        self, push_id: str, *, timeout_s: float, lease_timeout_s: float = 5.0
    ) -> Mapping[ReceiverId, TransportError]:
        """Start a push that may take ``timeout_s`` seconds. Returns receivers that were lost over it (already dropped).

        Every attempt has a ``push_id`` of its own. Receivers that nothing is sent to in a push take no part in it.

        With landing memory this claims a buffer that no receiver holds a lease on. If none is free within
        ``lease_timeout_s``, another one is allocated; at the bound, the receivers that hold too many are dropped.
        """
        ...

    def claim(self, task: SourceTask) -> Signal[Loan]:
        """Memory to assemble the task's bucket in: only if `in_place`. Comes when there is room, in the order of the claims.

        Landing memory of the push that is current comes at once. Whatever is on loan is not used for another bucket or
        another push until it is released.
        """
        ...

    def send(
        self,
        task: SourceTask,
        bucket: torch.Tensor,
        receivers: Collection[ReceiverId],
        lent: Mapping[int, torch.Tensor] | None = None,
    ) -> Mapping[ReceiverId, Completion | None]:
        """Start sending an assembled bucket to ``receivers`` (all of this kind).

        Segments in ``lent`` (offset -> bytes, 1-d uint8) are not in the bucket: they are sent from where they lie. Only
        where the transport `lends`.

        A completion (signalled; None: done at once) ends when the bucket's memory is not used for that receiver any more.
        It fails with `TransportError` if the receiver is lost, and then too the memory is not used any more. With landing
        memory that is at once: the bytes are where they have to be.
        """
        ...

    def drop(self, receivers: Collection[ReceiverId]) -> None:
        """Give receivers up. Their completions under way end soon, their links close, their peers notice. Idempotent."""
        ...

    async def end(self, committed: Collection[ReceiverId]) -> None:
        """The push is over; ``committed`` are the receivers that committed it.

        Two-sided transports drop the links of the others, which may have work left under way (see `linked`). One-sided
        ones keep them; a bucket that such a receiver still reads stays in use until the receiver's own `end`.
        """
        ...

    async def close(self, timeout_s: float = 5.0) -> None:
        """Drop everyone and free everything, in bounded time. Idempotent."""
        ...


class Lease(Protocol):
    """A receiver's hold on the landing memory of one push. The source does not write there until it is released.

    Ends by itself when the process dies, or when the last tensor over that memory is gone.
    """

    def release(self) -> None:
        """Let go. Idempotent. Tensors over the memory stay readable, but their content may change from now on."""
        ...


class ReceivingHalf(Protocol):
    """The receiving half of a transport on one rank of a target.

    Attributes:
        persistent: buckets stay valid until `end` (``staged``, ``mapped``); `space` and `offset_of` may be used.
    """

    persistent: bool

    @property
    def landing_bytes(self) -> int:
        """Bytes of landing memory that this process itself has allocated (0 when it looks into the source's)."""
        ...

    async def link(self, descriptors: Mapping[int, bytes], *, timeout_s: float) -> None:
        """Link up with every source rank that offers: source rank -> descriptor. Once; a new link is a new half.

        Those that the program takes nothing from are linked too, since they wait for it. Raises `TransportError` if an
        owner of the program offers nothing.
        """
        ...

    async def begin(self, push_id: str, *, timeout_s: float) -> None:
        """Get ready for a push that may take ``timeout_s`` seconds. Forgets the push before it."""
        ...

    async def receive(self, task: TargetTask) -> torch.Tensor:
        """The bucket's bytes (1-d uint8, read only, ``task.nbytes`` long) once they are there. Called in plan order.

        A further `receive` may be started before the bucket before it is released, from another coroutine; in
        ``streamed`` mode it returns when there is room.
        """
        ...

    def release(self, task: TargetTask) -> None:
        """The bucket was taken: its memory may be used again (``streamed``; a no-op when `persistent`).

        Raises `TransportError` if the source has given this receiver up: then what was read since `receive` may be torn,
        and must not be used.
        """
        ...

    def check(self) -> None:
        """Raises `TransportError` if an owner has given this receiver up or is gone. Cheap; for the moment before a vote."""
        ...

    def space(self, owner: int) -> torch.Tensor:
        """The landing space of the push (1-d uint8) that segments from source rank ``owner`` lie in. Only if `persistent`."""
        ...

    def offset_of(self, landing: Landing) -> int:
        """Where in `space` a segment lies, in bytes. Parts of a split tensor are adjacent. Only if `persistent`."""
        ...

    def take_lease(self) -> Lease:
        """Take over the hold on this push's landing memory, which `end` would release. Only if `persistent`."""
        ...

    async def end(self, committed: bool) -> None:
        """The push is over for this rank. Releases the lease if it was not taken over, and buckets that were not released.

        Nothing that `receive` returned may be read any more, but for memory under a lease that was taken over. If it was
        not committed, a two-sided transport gives up its links: link anew.
        """
        ...

    async def close(self, timeout_s: float = 5.0) -> None:
        """Close all links in bounded time. Memory under a lease that was taken over stays. Idempotent."""
        ...


class PrivateLease:
    """Implements `Lease` for memory that nobody else writes: there is nothing to release."""

    def release(self) -> None:
        """Nothing to do."""


@runtime_checkable
class Lending(Protocol):
    """A `ReceivingHalf` may have this too: some segments are to be read from the source's own storage, not from the bucket."""

    def lent(self, task: TargetTask) -> Mapping[int, torch.Tensor]:
        """Offset in the bucket -> where the segment lies (1-d uint8). Once linked; valid from `receive` to `release`.

        A bucket of which everything is lent has no bytes.
        """
        ...

    def when_gone(self, forget: Callable[[int], None]) -> None:
        """``forget`` is called with a source rank when its memory is to be let go of.

        Nothing comes from it any more, and it waits until nobody looks into what it lent.
        """
        ...

    async def settled(self) -> None:
        """Wait until nothing is being copied to landing memory any more, also of pushes that were given up."""
        ...


@runtime_checkable
class Placing(Protocol):
    """A `ReceivingHalf` may have this too: it can receive segments straight into live memory (``streamed``).

    In each push, nothing is written there before `open_places` is called; until then only the first message comes, into a
    buffer (`first_bytes`).
    """

    def expose(self, places: Mapping[int, Mapping[int, torch.Tensor]]) -> frozenset[tuple[int, int]]:
        """Live memory by task and by offset in its bucket (1-d uint8, a whole segment). Once, before `ReceivingHalf.begin`.

        Returns the (task, offset) that will be received there. They are missing in the buckets.
        """
        ...

    async def first_bytes(self) -> None:
        """Returns when something of the push has come (or nothing is to come). Raises `TransportError` if nothing will."""
        ...

    def open_places(self, *, live: bool) -> None:
        """Go on with the push, into live memory; or (not ``live``) into buffers only, when it is to be thrown away."""
        ...

    async def settled(self) -> None:
        """Wait until nothing is under way into live memory any more, also of pushes that were given up."""
        ...
