"""CUDA IPC between processes of one host: buckets are assembled in device memory that receivers look into.

The source keeps a ring in device memory, exported once, and an event for each bucket that may be under way, recorded right
behind the kernels that write it. What needs no transform does not pass through the ring: the storage that it lies in is
exported, and receivers copy straight out of it. Handles and places travel once, in the offer; each push tells only that a
bucket is there (where in the ring, which event) and, back, that it was taken. Control goes over one `Channel` for each
receiver.

No side ever waits for a device: the receiver asks a bucket's event before it looks, and acknowledges when its own copy is done.
Nothing is launched to say that a bucket is there: two processes take turns on a device, and a record that waits for its turn
would hold up a receiver that has all it needs. As with shared memory, giving a receiver up shuts its channel before bytes
are used again, and a receiver throws away what it has copied if it finds the channel shut afterwards.

Memory of a process that ends is gone for those who look into it. So nothing is ever served from it: with ``staged`` landing a
receiver copies into memory of its own, and ``mapped`` is not possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from syncline.scheduler.programs import ReceiverId, SourceProgram, SourceTask

from ..buffers import Buffer, BufferPool, aligned
from ..completions import Completion, Signal
from ..errors import TransportError, without_frames
from ..ipc import EventHandle, Exports, IpcRuntime, MemoryHandle, Place, Slots, Use
from ..workers import Workers
from .base import LandingMode, Loan, OnLost, push_key
from .channel import Channel, Kind, Message
from .reception import Reception

RING_BUCKETS = 8
"""Of the largest buckets the ring has room for so many."""

EVENTS = 16
"""Buckets that may be under way at once."""

NO_EVENT = 2**64 - 1
"""In place of a slot: nothing was launched that writes the bucket."""

VERSION = 2

Lent = Mapping[int, Mapping[int, torch.Tensor]]
"""Task -> offset in its bucket -> bytes that are sent from where they lie (1-d uint8, whole segments)."""


class LentSegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A segment that receivers copy out of the source's own storage: its offset in the bucket, and where it lies."""

    offset: int
    place: Place


class CudaIpcOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a receiver needs to link up: the doorway, and everything that it will look into.

    Attributes:
        version: of this struct; others are refused.
        path, token: of the doorway.
        allocations: exported memory, by number.
        ring: where buckets are assembled.
        events: by slot.
        lent: what does not pass through the ring, by task.
    """

    version: int
    path: str
    token: int
    mode: LandingMode
    allocations: list[MemoryHandle]
    ring: Place
    events: list[EventHandle]
    lent: dict[int, list[LentSegment]]


class _Link:
    """One linked receiver."""

    def __init__(self, receiver: ReceiverId, channel: Channel) -> None:
        self.receiver = receiver
        self.channel = channel
        self.ready = False
        self.gone: Signal[None] = Signal()
        self.under_way: dict[tuple[int, int], Signal[None]] = {}

    def fail(self, error: TransportError) -> None:
        """End everything under way, with the channel shut first."""
        self.channel.close()
        self.gone.set()
        under_way, self.under_way = self.under_way, {}
        for signal in under_way.values():
            signal.fail(error)


class _Place:
    """Implements `Loan`: a bucket's place in the ring, and its event.

    Attributes:
        offset: where in the ring.
        slot: of the event that says since when the bucket is there; `NO_EVENT` if it needs none.
    """

    def __init__(self, buffer: Buffer, use: Use, slots: Slots, record: Callable[[], None]) -> None:
        self.memory = buffer.memory
        self.offset = buffer.offset
        self.slot = NO_EVENT
        self._use = use
        self._buffer = buffer
        self._slots = slots
        self._record = record

    def launched(self) -> None:
        self._record()
        self.slot = self._use.slot

    def release(self) -> None:
        self._slots.release(self._use)
        self._buffer.release()


class _Nowhere:
    """Implements `Loan` for a task that is lent as a whole: no bytes, and no event, since nothing writes it."""

    offset = 0
    slot = NO_EVENT

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def launched(self) -> None:
        """Kernels that only read what is lent have been launched."""

    def release(self) -> None:
        """There is nothing to give back."""


class _Shown(NamedTuple):
    """What is made once, at the first offer.

    Attributes:
        exports: what receivers may open; keeps it.
        memory: of the ring.
        events: by slot.
        ring, handles, lent: where receivers find the ring, the events, and what does not pass through the ring.
    """

    exports: Exports
    memory: torch.Tensor
    events: list[Any]
    ring: Place
    handles: list[EventHandle]
    lent: dict[int, list[LentSegment]]


class CudaIpcSender:
    """Implements `Sender`.

    Args:
        program: what this source rank does.
        landing: landing mode; not ``mapped``.
        ring_nbytes: most bytes for the ring; the largest bucket that has to pass through it must have room there.
        runtime: the calls of CUDA, on the device where buckets are assembled.
        workers: threads that allocate.
        on_lost: see `OnLost`.
        lent: what is sent straight out of the rank's own memory.
        directory: where the doorway is made; a short path.

    Raises:
        TransportError: the landing mode is not possible.
    """

    kind = "cuda_ipc"
    in_place = True
    lends = True

    def __init__(
        self,
        *,
        program: SourceProgram,
        landing: LandingMode,
        ring_nbytes: int,
        runtime: IpcRuntime,
        workers: Workers,
        on_lost: OnLost,
        lent: Lent | None = None,
        directory: Path | None = None,
    ) -> None:
        if landing == "mapped":
            raise TransportError("landing 'mapped' needs shared memory that outlives its process; CUDA IPC has none")
        self._mode: LandingMode = landing
        self._runtime = runtime
        self._workers = workers
        self._on_lost = on_lost
        self._lent = dict(lent or {})
        self._whole = _lent_as_a_whole(program, self._lent)
        self._ring_nbytes = max(1, ring_capacity(program, ring_nbytes, self._whole))
        self._reception = Reception(directory, self._welcome)
        self._links: dict[ReceiverId, _Link] = {}
        self._key = 0
        self._exports = Exports(runtime)
        self._pool: BufferPool | None = None
        self._slots = Slots(EVENTS)
        self._events: list[Any] = []
        self._loans: dict[int, _Place | _Nowhere] = {}
        self._nowhere = _Nowhere(runtime.device)
        self._shown: _Shown | None = None
        self._showing: Signal[_Shown] | None = None
        self._closed = False

    @property
    def linked(self) -> frozenset[ReceiverId]:
        return frozenset(receiver for receiver, link in self._links.items() if link.ready and link.channel.is_open)

    @property
    def landing_bytes(self) -> int:
        return 0

    @property
    def ring(self) -> BufferPool | None:
        """The ring, for accounting; None before the first offer."""
        return self._pool

    @property
    def exported(self) -> int:
        """Allocations that were exported: one for each, however many pushes there were."""
        return len(self._exports.handles)

    async def offer(self, receivers: Collection[ReceiverId]) -> Mapping[int, bytes]:
        self._check_open()
        self.drop(receivers)
        shown = await self._show()
        offer = CudaIpcOffer(
            version=VERSION, path=self._reception.expect(receivers), token=self._reception.token, mode=self._mode,
            allocations=shown.exports.handles, ring=shown.ring, events=shown.handles, lent=shown.lent,
        )  # fmt: skip
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
        self._key = push_key(push_id)
        return {}

    def claim(self, task: SourceTask) -> Signal[Loan]:
        """Room in the ring, then an event. For a task that is lent as a whole neither, whatever others wait for: it must not
        hold an event while it waits to be sent behind one that has none yet.
        """
        loan: Signal[Loan] = Signal()
        if self._pool is None or self._closed:
            loan.fail(TransportError(f"task {task.index}: there is no ring: no link was offered yet, or the sender is closed"))
        elif task.index in self._whole:
            self._loans[task.index] = self._nowhere
            loan.set(self._nowhere)
        else:
            room = self._pool.acquire(task.nbytes)
            _when(room, lambda: loan.fail(room.error) if room.error else self._with_event(task, room.result, loan))
        return loan

    def send(
        self,
        task: SourceTask,
        bucket: torch.Tensor,
        receivers: Collection[ReceiverId],
        lent: Mapping[int, torch.Tensor] | None = None,
    ) -> Mapping[ReceiverId, Completion | None]:
        loan = self._loans.get(task.index)
        if loan is None or bucket.data_ptr() != loan.memory.data_ptr() or bucket.device.type != self._runtime.device.type:
            raise TransportError(
                f"task {task.index}: its bucket of {bucket.numel()} bytes on {bucket.device} was not assembled in the ring "
                f"of transport 'cuda_ipc' on {self._runtime.device}"
            )
        return {receiver: self._notify(receiver, task, loan) for receiver in receivers}

    def drop(self, receivers: Collection[ReceiverId]) -> None:
        for receiver in list(receivers):
            self._reception.forget(receiver)
            link = self._links.pop(receiver, None)
            if link is not None:
                link.fail(TransportError("dropped by the source"))

    async def end(self, committed: Collection[ReceiverId]) -> None:
        """Nothing to do: a receiver that still reads a bucket acknowledges it in its own time."""

    async def close(self, timeout_s: float = 5.0) -> None:
        if not self._closed:
            self._closed = True
            self._reception.close()
            await self._await_closing(timeout_s)
        self.drop(list(self._links))
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._loans.clear()
        self._slots.close()
        self._exports.close()
        self._events.clear()
        self._shown = None

    # --------------------------------------------------------------------------------------------------------------

    async def _show(self) -> _Shown:
        """What receivers are shown: made once, also where an offer is called off meanwhile, which a worker's job is not."""
        if self._shown is None:
            if self._showing is None:
                self._showing = self._workers.submit(self._make)
                self._showing.subscribe(self._made)
            await self._showing
        self._check_open()
        assert self._shown is not None
        return self._shown

    def _made(self) -> None:
        """It is there, or has failed. Nobody has it if this sender was closed meanwhile, and it goes."""
        showing, self._showing = self._showing, None
        if showing is None or showing.error is not None or self._closed:
            return
        self._shown = showing.result
        self._exports, self._events = self._shown.exports, self._shown.events
        self._pool = BufferPool(self._shown.memory)

    def _make(self) -> _Shown:
        """Allocate the ring and export everything. On a worker."""
        exports = Exports(self._runtime)
        try:
            return self._export(exports)
        except Exception as error:  # noqa: BLE001 - told, without the frames that would hold the ring as long as the error
            exports.close()
            raise without_frames(error) from None

    def _export(self, exports: Exports) -> _Shown:
        lent = {
            task: [LentSegment(offset, exports.place(segment)) for offset, segment in segments.items()]
            for task, segments in self._lent.items()
        }
        events = [self._runtime.make_event() for _ in range(EVENTS)]
        handles = [EventHandle(device=self._runtime.uuid, handle=self._runtime.export_event(event)) for event in events]
        memory = self._runtime.allocate(self._ring_nbytes)  # last: most of what fails does so before
        return _Shown(exports, memory, events, exports.place(memory), handles, lent)

    async def _await_closing(self, timeout_s: float) -> None:
        """Ask receivers to close what they have opened; memory is let go of when they have, or after ``timeout_s``."""
        links = [link for link in self._links.values() if link.ready and link.channel.is_open]
        for link in links:
            link.channel.send(Message(Kind.UNMAP))
        try:
            async with asyncio.timeout(timeout_s):
                for link in links:
                    await link.gone
        except TimeoutError:
            return

    def _with_event(self, task: SourceTask, buffer: Buffer, loan: Signal[Loan]) -> None:
        slot = self._slots.acquire()

        def lend() -> None:
            if slot.error is not None:
                buffer.release()
                loan.fail(slot.error)
                return
            record = partial(self._runtime.record, self._events[slot.result.slot])
            place = self._loans[task.index] = _Place(buffer, slot.result, self._slots, record)
            loan.set(place)

        _when(slot, lend)

    def _notify(self, receiver: ReceiverId, task: SourceTask, place: _Place | _Nowhere) -> Signal[None]:
        signal: Signal[None] = Signal()
        link = self._links.get(receiver)
        if link is None or not link.channel.is_open:
            signal.fail(TransportError(f"receiver {receiver} is not linked any more"))
            return signal
        link.under_way[self._key, task.index] = signal
        link.channel.send(Message(Kind.BUCKET, task.index, self._key, place.offset, place.slot))
        return signal

    def _welcome(self, receiver: ReceiverId, channel: Channel) -> None:
        previous = self._links.get(receiver)
        if previous is not None:
            previous.fail(TransportError(f"receiver {receiver} linked up twice"))
        link = self._links[receiver] = _Link(receiver, channel)
        channel.hand_over(on_message=partial(self._heard, link), on_closed=partial(self._lost, link))

    def _heard(self, link: _Link, message: Message) -> None:
        if message.kind is Kind.ACK:
            signal = link.under_way.pop((message.push, message.task), None)
            if signal is not None:
                signal.set()
        elif message.kind is Kind.READY:
            link.ready = True
            self._reception.ready(link.receiver)
        elif message.kind is Kind.RELEASED:
            link.gone.set()

    def _lost(self, link: _Link, error: TransportError) -> None:
        link.fail(TransportError(f"receiver {link.receiver}: {error}"))
        if self._links.get(link.receiver) is link:
            del self._links[link.receiver]
        self._reception.fail(link.receiver, error)
        if not self._closed:
            self._on_lost(link.receiver, error)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this sender is closed")


def _when(signal: Signal[Any], callback: Callable[[], None]) -> None:
    """Call back when it has ended; at once if it has."""
    if signal.done:
        callback()
    else:
        signal.subscribe(callback)


def ring_capacity(program: SourceProgram, watermark: int, whole: Collection[int] = ()) -> int:
    """Bytes for the ring of a source rank: room for `RING_BUCKETS` of the largest, within ``watermark``.

    No more than that, not even for one bucket: those for other transports count here too, and may be larger.
    """
    sizes = [aligned(task.nbytes) for task in program.tasks if task.owner == program.rank and task.index not in whole]
    return min(watermark, sum(sizes), RING_BUCKETS * max(sizes, default=0))


def _lent_as_a_whole(program: SourceProgram, lent: Lent) -> frozenset[int]:
    """Tasks of whose buckets nothing passes through the ring."""
    found = set()
    for task in program.tasks:
        offsets = lent.get(task.index, {})
        if offsets and all(segment.offset in offsets for segment in task.segments if segment.nbytes):
            found.add(task.index)
    return frozenset(found)
