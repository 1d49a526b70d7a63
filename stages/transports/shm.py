"""Shared memory between processes of one host: buckets are assembled in memory that receivers look into.

``streamed``: a ring that all receivers share; a bucket's bytes are free again when every receiver has acknowledged it.
``staged``, ``mapped``: landing buffers that hold a whole push (see `LandingBuffers`); a bucket is assembled in its final
place, receivers are told, and that is all. One copy serves any number of receivers. Control goes over one `Channel` for
each receiver.

No receiver ever takes torn bytes for good ones. In the ring, giving a receiver up shuts its channel before the bytes are
used again, and it acknowledges a bucket only after it has found the channel open *after* its copy. Landing buffers are
never written while anyone holds a lease on them, whether or not that receiver is still part of anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import torch

from syncline.scheduler.programs import ReceiverId, SourceProgram, SourceTask

from ..buffers import BufferPool, aligned
from ..completions import Completion, Signal
from ..errors import TransportError
from ..workers import Workers
from .base import LandingMode, Loan, OnLost, push_key
from .channel import Channel, Kind, Message
from .reception import Reception
from .shared_memory import Segment, made
from .shm_landing import LandingBuffers

RING = 0
"""Number of the segment that is the ring; landing buffers count from 1."""


class ShmOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver needs to link up: the doorway's path, a token that the doorway asks for, and what it will map."""

    path: str
    token: int
    mode: LandingMode
    segments: int


def ring_capacity(program: SourceProgram, watermark: int, *, buckets: int = 8) -> int:
    """Bytes for the ring of a source rank: room for ``buckets`` of the largest, within the watermark; one at the least."""
    sizes = [aligned(task.nbytes) for task in program.tasks if task.owner == program.rank]
    largest = max(sizes, default=0)
    return max(largest, min(watermark, sum(sizes), buckets * largest))


class _Link:
    """One linked receiver."""

    def __init__(self, receiver: ReceiverId, channel: Channel) -> None:
        self.receiver = receiver
        self.channel = channel
        self.ready: Signal[None] = Signal()
        self.push = 0
        self.leases: dict[int, int] = {}
        self.mapped: set[int] = set()
        self.under_way: dict[tuple[int, int], Signal[None]] = {}

    def map(self, segment: Segment) -> None:
        """Give the receiver a segment to map, once."""
        if segment.number not in self.mapped:
            self.mapped.add(segment.number)
            fds = (segment.open_for_reading(),)
            self.channel.send(Message(Kind.MAP, a=segment.number, b=segment.nbytes, fds=fds))

    def unmap(self, number: int) -> None:
        if number in self.mapped:
            self.mapped.discard(number)
            self.channel.send(Message(Kind.UNMAP, a=number))

    def begin(self, push: int, landing: Segment | None) -> None:
        """Before the first bucket of a push: what it lies in, with a lease on it if that is a landing buffer.

        Not earlier, and not to receivers that the push does not go to: they would never end it.
        """
        self.push = push
        if landing is None:
            self.channel.send(Message(Kind.BEGIN, push=push))
            return
        self.map(landing)
        self.leases[push] = landing.number
        self.channel.send(Message(Kind.BEGIN, push=push, a=landing.number, fds=(landing.open_lease(),)))

    def fail(self, error: TransportError) -> None:
        """End everything under way, with the channel shut first."""
        self.channel.close()
        self.ready.fail(error)
        under_way, self.under_way = self.under_way, {}
        for signal in under_way.values():
            signal.fail(error)


class ShmSender:
    """Implements `Sender`.

    Args:
        program: what this source rank does.
        landing: landing mode.
        ring_nbytes: most bytes for the ring of ``streamed``; it takes no more than `ring_capacity` says.
        workers: threads that allocate and touch memory.
        on_lost: see `OnLost`.
        directory: where the doorway is made; a short path.
    """

    kind = "shm"
    in_place = True
    lends = False

    def __init__(
        self,
        *,
        program: SourceProgram,
        landing: LandingMode,
        ring_nbytes: int,
        workers: Workers,
        on_lost: OnLost,
        directory: Path | None = None,
    ) -> None:
        self._mode: LandingMode = landing
        self._ring_nbytes = ring_capacity(program, ring_nbytes)
        self._workers = workers
        self._on_lost = on_lost
        self._reception = Reception(directory, self._welcome)
        self._links: dict[ReceiverId, _Link] = {}
        self._key = 0
        self._ring: Segment | None = None
        self._pool: BufferPool | None = None
        self._landing = LandingBuffers(
            program.landing_nbytes, landing, workers, holders=self._holders, drop=self.drop, retired=self._unmap
        )
        self._closed = False

    @property
    def linked(self) -> frozenset[ReceiverId]:
        return frozenset(receiver for receiver, link in self._links.items() if link.ready.done and link.channel.is_open)

    @property
    def landing_bytes(self) -> int:
        return self._landing.nbytes

    @property
    def ring(self) -> BufferPool | None:
        """The ring of ``streamed``, for accounting; None in other modes and before the first offer."""
        return self._pool

    async def offer(self, receivers: Collection[ReceiverId]) -> Mapping[int, bytes]:
        self._check_open()
        self.drop(receivers)
        await self._allocate()
        self._check_open()
        path, segments = self._reception.expect(receivers), max(1, len(self._landing.segments))
        offer = ShmOffer(path=path, token=self._reception.token, mode=self._mode, segments=segments)
        data = msgspec.msgpack.encode(offer)
        return {receiver.target: data for receiver in receivers}

    async def link(self, receivers: Collection[ReceiverId], *, timeout_s: float) -> Mapping[ReceiverId, TransportError]:
        failed = await self._reception.arrivals(receivers, timeout_s)
        self.drop(failed)
        return failed

    async def begin(
        self, push_id: str, *, timeout_s: float, lease_timeout_s: float = 5.0
    ) -> Mapping[ReceiverId, TransportError]:
        self._check_open()
        before = self.linked
        self._key = push_key(push_id)
        if self._mode != "streamed":
            await self._landing.choose(min(timeout_s, lease_timeout_s))
        return {receiver: _hoarded(receiver) for receiver in before - self.linked}

    def claim(self, task: SourceTask) -> Signal[Loan]:
        if self._mode != "streamed":
            return self._landing.claim(task)
        if self._pool is not None:
            return cast("Signal[Loan]", self._pool.acquire(task.nbytes))
        signal: Signal[Loan] = Signal()
        signal.fail(TransportError(f"task {task.index}: there is no ring: no link was offered yet, or the sender is closed"))
        return signal

    def send(
        self,
        task: SourceTask,
        bucket: torch.Tensor,
        receivers: Collection[ReceiverId],
        lent: Mapping[int, torch.Tensor] | None = None,
    ) -> Mapping[ReceiverId, Completion | None]:
        offset = self._offset_of(task, bucket)
        return {receiver: self._notify(receiver, task, offset) for receiver in receivers}

    def drop(self, receivers: Collection[ReceiverId]) -> None:
        error = TransportError("dropped by the source")
        for receiver in list(receivers):
            self._reception.forget(receiver)
            link = self._links.pop(receiver, None)
            if link is not None:
                link.fail(error)
                self._landing.released()

    async def end(self, committed: Collection[ReceiverId]) -> None:
        """Nothing to do: a receiver that still reads a bucket acknowledges it in its own time."""

    async def close(self, timeout_s: float = 5.0) -> None:
        self._closed = True
        self.drop(list(self._links))
        self._reception.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._landing.close()

    # ----------------------------------------------------------------------------------------------------- linking

    async def _allocate(self) -> None:
        if self._mode != "streamed":
            await self._landing.fill_up()
        elif self._ring is None:
            self._ring = await made(self._workers, RING, self._ring_nbytes)
            self._pool = BufferPool(self._ring.memory)

    def _welcome(self, receiver: ReceiverId, channel: Channel) -> None:
        previous = self._links.get(receiver)
        if previous is not None:
            previous.fail(TransportError(f"receiver {receiver} linked up twice"))
        link = _Link(receiver, channel)
        channel.hand_over(on_message=partial(self._heard, link), on_closed=partial(self._lost, link))
        self._links[receiver] = link
        for segment in self._segments():
            link.map(segment)

    def _segments(self) -> list[Segment]:
        return [self._ring] if self._ring is not None else self._landing.segments

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this sender is closed")

    # ------------------------------------------------------------------------------------------------- during pushes

    def _offset_of(self, task: SourceTask, bucket: torch.Tensor) -> int:
        """Where in the ring a bucket lies; 0 in landing memory, where the plan says it."""
        home = self._ring if self._mode == "streamed" else self._landing.current
        if home is None or bucket.device.type != "cpu":
            raise TransportError(f"task {task.index}: its bucket on {bucket.device} is not in this transport's shared memory")
        if task.nbytes == 0:
            return 0
        offset = bucket.data_ptr() - home.memory.data_ptr()
        if self._mode != "streamed":
            offset -= task.landing_offset
        if not 0 <= offset <= home.nbytes - task.nbytes or (offset and self._mode != "streamed"):
            raise TransportError(f"task {task.index}: its bucket was not assembled in this transport's shared memory")
        return offset

    def _notify(self, receiver: ReceiverId, task: SourceTask, offset: int) -> Signal[None] | None:
        signal: Signal[None] = Signal()
        link = self._links.get(receiver)
        if link is None or not link.channel.is_open:
            signal.fail(TransportError(f"receiver {receiver} is not linked any more"))
            return signal
        if link.push != self._key:
            link.begin(self._key, self._landing.current)
        if self._mode == "streamed":
            link.under_way[self._key, task.index] = signal
        link.channel.send(Message(Kind.BUCKET, task.index, self._key, offset))
        return signal if self._mode == "streamed" else None

    def _heard(self, link: _Link, message: Message) -> None:
        if message.kind is Kind.ACK:
            signal = link.under_way.pop((message.push, message.task), None)
            if signal is not None:
                signal.set()
        elif message.kind is Kind.RELEASED:
            link.leases.pop(message.push, None)
            self._landing.released()
        elif message.kind is Kind.READY:
            link.ready.set()
            self._reception.ready(link.receiver)

    def _lost(self, link: _Link, error: TransportError) -> None:
        link.fail(TransportError(f"receiver {link.receiver}: {error}"))
        if self._links.get(link.receiver) is link:
            del self._links[link.receiver]
        self._reception.fail(link.receiver, error)
        self._landing.released()
        self._on_lost(link.receiver, error)

    def _holders(self, number: int) -> set[ReceiverId]:
        return {receiver for receiver, link in self._links.items() if number in link.leases.values()}

    def _unmap(self, number: int) -> None:
        for link in self._links.values():
            link.unmap(number)


def _hoarded(receiver: ReceiverId) -> TransportError:
    return TransportError(f"receiver {receiver} was dropped: it did not release landing memory in time, or its link broke")
