"""CUDA IPC between processes of one host: the receiving half. See `cuda_ipc` for how it works."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import NamedTuple

import torch

from syncline.scheduler.programs import Landing, TargetProgram, TargetTask

from ..completions import Signal
from ..errors import TransportError
from ..ipc import Event, Imports, IpcRuntime
from ..launched import DONE, follow
from ..watch import Watch
from ..workers import Workers, call_in_thread
from .base import AHEAD, LandingMode, PrivateLease, decode_offer, push_key
from .channel import Channel, Kind, Message, reached
from .cuda_ipc import NO_EVENT, VERSION, CudaIpcOffer

_ORDERLY_S = 1.0
_ENDED_PUSHES = 16  # remembered, so that what was still on its way is recognised


class _Arrived(NamedTuple):
    """Where in the ring a bucket is, and the event that says since when (or `NO_EVENT`)."""

    offset: int
    slot: int


class _Push:
    """What has come from one owner for one push."""

    def __init__(self, error: TransportError | None) -> None:
        self.arrived: dict[int, Signal[_Arrived]] = {}
        self.unacknowledged: set[int] = set()
        self._error = error

    def arrival(self, task: int) -> Signal[_Arrived]:
        signal = self.arrived.get(task)
        if signal is None:
            signal = self.arrived[task] = Signal()
            if self._error is not None:
                signal.fail(_anew(self._error))
        return signal

    def fail(self, error: TransportError) -> None:
        self._error = error
        for signal in self.arrived.values():
            signal.fail(_anew(error))


class _Owner:
    """The link with one source rank."""

    def __init__(
        self, rank: int, offer: CudaIpcOffer, sock: socket.socket, runtime: IpcRuntime, *,
        is_over: Callable[[int], bool], forget: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.rank = rank
        self.offer = offer
        self.error: TransportError | None = None
        self.channel = Channel(sock, on_message=self._heard, on_closed=self._lost)
        self._loop = asyncio.get_running_loop()
        self._runtime = runtime
        self._is_over = is_over
        self._forget = forget
        self._pushes: dict[int, _Push] = {}
        self.imports = Imports(runtime, self._all_closed)
        self.closed: Signal[None] = Signal()
        self._closing = False
        self._ring: torch.Tensor | None = None
        self._events: list[Event] = []
        self._lent: dict[int, dict[int, torch.Tensor]] = {}

    def open(self) -> None:
        """Open everything that is offered, once. Blocks: on a worker."""
        self.imports.open(self.offer.allocations)
        self._ring = self.imports.view(self.offer.ring)
        self._events = [self._runtime.open_event(handle) for handle in self.offer.events]
        self._lent = {
            task: {segment.offset: self.imports.view(segment.place) for segment in segments}
            for task, segments in self.offer.lent.items()
        }

    def lent(self, task: int) -> Mapping[int, torch.Tensor]:
        return self._lent.get(task, {})

    def push(self, key: int) -> _Push:
        push = self._pushes.get(key)
        if push is None:
            push = self._pushes[key] = _Push(self.error)
        return push

    def keep_only(self, key: int) -> None:
        """A new push: whatever there was of others is over."""
        for other in [other for other in self._pushes if other != key]:
            self.end(other)

    def end(self, key: int) -> None:
        """Give back whatever was not released of a push."""
        push = self._pushes.pop(key, None)
        if push is not None:
            push.fail(TransportError("the push is over"))
            for task in push.unacknowledged:
                self.channel.send(Message(Kind.ACK, task, key))

    def bucket(self, arrived: _Arrived, nbytes: int) -> torch.Tensor:
        """A bucket's bytes in the ring."""
        ring = self._ring
        if ring is None:
            raise _anew(self.error or TransportError(f"the memory of source rank {self.rank} is closed here"))
        bucket = ring[arrived.offset : arrived.offset + nbytes]
        if bucket.numel() != nbytes:
            raise TransportError(f"source rank {self.rank} named bytes beyond its ring of {ring.numel()} bytes")
        return bucket

    def event(self, arrived: _Arrived) -> Event:
        if arrived.slot == NO_EVENT:
            return DONE
        if arrived.slot >= len(self._events):
            raise TransportError(f"source rank {self.rank} named event {arrived.slot} of {len(self._events)}")
        return self._events[arrived.slot]

    def acknowledge(self, key: int, task: int) -> None:
        """Say that a bucket was taken, unless the source has given this receiver up meanwhile."""
        self.check()
        self.push(key).unacknowledged.discard(task)
        self.channel.send(Message(Kind.ACK, task, key))

    def check(self) -> None:
        if self.error is not None:
            raise _anew(self.error)
        try:
            self.channel.check()
        except TransportError as error:
            raise TransportError(f"source rank {self.rank}: {error}") from None

    def close(self) -> None:
        """Begin to close what was opened; `closed` ends when nothing looks into it any more and it is."""
        for key in list(self._pushes):
            self.end(key)
        self._fail(TransportError("this link is closed"))

    def _heard(self, message: Message) -> None:
        if message.kind is Kind.BUCKET:
            push = self.push(message.push)
            push.unacknowledged.add(message.task)
            push.arrival(message.task).set(_Arrived(message.a, message.b))
            if self._is_over(message.push):
                self.end(message.push)
        elif message.kind is Kind.UNMAP:
            self._fail(TransportError(f"source rank {self.rank} has closed the link; link anew"))

    def _lost(self, error: TransportError) -> None:
        self._fail(TransportError(f"source rank {self.rank}: {error}"))

    def _fail(self, error: TransportError) -> None:
        """Nothing more comes. What was opened is closed as soon as nothing looks into it."""
        self.error = self.error or error
        for push in self._pushes.values():
            push.fail(error)
        self._ring = None
        self._lent.clear()
        self._events.clear()
        self._forget(self.rank)
        if not self._closing:  # closing a handle may take a millisecond
            self._closing = True
            _ = call_in_thread(self.imports.close, name="syncline-ipc-close")

    def _all_closed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the channel
            self._loop.call_soon_threadsafe(self._say_closed)

    def _say_closed(self) -> None:
        self.channel.send(Message(Kind.RELEASED))
        self.closed.set()


class CudaIpcHalf:
    """Implements `ReceivingHalf` and `Lending`.

    Args:
        program: what this receiver takes.
        landing: landing mode, the same as the source's.
        runtime: the calls of CUDA, on this receiver's device.
        workers: threads that open handles and start copies.
    """

    def __init__(self, *, program: TargetProgram, landing: LandingMode, runtime: IpcRuntime, workers: Workers) -> None:
        if landing == "mapped":
            raise TransportError("landing 'mapped' needs shared memory that outlives its process; CUDA IPC has none")
        self.persistent = landing == "staged"
        self._program = program
        self._mode: LandingMode = landing
        self._runtime = runtime
        self._workers = workers
        self._owners: dict[int, _Owner] = {}
        self._landing = torch.empty(0, dtype=torch.uint8, device=runtime.device)
        self._watch = Watch()
        self._places = {task.index: place for place, task in enumerate(program.tasks)}
        self._coming: dict[int, asyncio.Task[torch.Tensor]] = {}
        self._copying: set[Signal[int]] = set()
        self._key = 0
        self._over: deque[int] = deque(maxlen=_ENDED_PUSHES)
        self._forget: Callable[[int], None] = lambda _rank: None

    @property
    def landing_bytes(self) -> int:
        return self._landing.numel()

    @property
    def handles(self) -> tuple[int, int]:
        """Allocations of sources that were opened and closed so far, over all links of this half."""
        imports = [owner.imports for owner in self._owners.values()]
        return sum(one.opened for one in imports), sum(one.closed for one in imports)

    async def link(self, descriptors: Mapping[int, bytes], *, timeout_s: float) -> None:
        missing = sorted(set(self._program.owners) - set(descriptors))
        if missing:
            raise TransportError(f"no CUDA IPC offer came from source ranks {missing}")
        try:
            async with asyncio.timeout(timeout_s):
                if self.persistent:
                    self._landing = await self._workers.submit(self._runtime.allocate, self._program.landing_nbytes)
                for rank, descriptor in descriptors.items():
                    await self._connect(rank, descriptor)
                for owner in self._owners.values():
                    await self._workers.submit(owner.open)
                    owner.channel.send(Message(Kind.READY))
        except TimeoutError:
            await self.close()
            raise TransportError(f"linking over CUDA IPC took longer than {timeout_s:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def begin(self, push_id: str, *, timeout_s: float) -> None:
        self._finish()
        self._key = push_key(push_id)
        if self._key in self._over:
            raise TransportError(f"push {push_id} was begun here before: every attempt needs an id of its own")
        for owner in self._owners.values():
            owner.check()
            owner.keep_only(self._key)

    async def receive(self, task: TargetTask) -> torch.Tensor:
        if not self.persistent:
            return await self._bring(task)
        place = self._places[task.index]
        for coming in self._program.tasks[place : place + AHEAD]:
            if coming.index not in self._coming:
                self._coming[coming.index] = bringing = asyncio.create_task(self._bring(coming))
                bringing.add_done_callback(_seen)
        return await self._coming.pop(task.index)

    async def _bring(self, task: TargetTask) -> torch.Tensor:
        """The bucket in the ring; with ``staged`` landing a copy of it, once that is done."""
        owner, key = self._owner(task.owner), self._key
        arrived = await owner.push(key).arrival(task.index)
        await self._watch.until(owner.event(arrived).query)
        lent = owner.lent(task.index)
        nbytes = 0 if self._is_whole(task, lent) else task.nbytes
        bucket = owner.bucket(arrived, nbytes)
        if not self.persistent:
            return bucket
        place = self._place(task)
        copying = follow(self._workers.submit(self._runtime.copy, _pairs(task, place, bucket, lent)), self._watch)
        del bucket, lent, place  # the copy holds them until it is done, and then nothing does
        self._copying.add(copying)
        copying.subscribe(lambda: self._copying.discard(copying))
        await copying
        owner.acknowledge(key, task.index)  # raises if the bucket may have been torn meanwhile
        return self._place(task)

    def release(self, task: TargetTask) -> None:
        if not self.persistent:
            self._owner(task.owner).acknowledge(self._key, task.index)

    def lent(self, task: TargetTask) -> Mapping[int, torch.Tensor]:
        """Segments that are not in the bucket: offset -> where they lie. None with ``staged``: all is copied."""
        return {} if self.persistent else self._owner(task.owner).lent(task.index)

    def when_gone(self, forget: Callable[[int], None]) -> None:
        self._forget = forget

    async def settled(self) -> None:
        while self._copying:
            with contextlib.suppress(Exception):  # told to whoever wanted the bucket
                await next(iter(self._copying))

    def check(self) -> None:
        for owner in self._owners.values():
            owner.check()

    def space(self, owner: int) -> torch.Tensor:
        return self._landing

    def offset_of(self, landing: Landing) -> int:
        return landing.landing_offset

    def take_lease(self) -> PrivateLease:
        return PrivateLease()

    async def end(self, committed: bool) -> None:
        self._finish()

    async def close(self, timeout_s: float = 5.0) -> None:
        self._call_off()
        for owner in self._owners.values():
            owner.close()
        _ = self._watch.close()
        self._landing = torch.empty(0, dtype=torch.uint8, device=self._runtime.device)
        for owner in self._owners.values():  # not before: a source lets go of its memory when the channel is shut
            owner.closed.subscribe(owner.channel.close)
        with contextlib.suppress(TimeoutError):  # somebody may still hold a bucket, or the device still read one
            async with asyncio.timeout(min(timeout_s, _ORDERLY_S)):
                for owner in self._owners.values():
                    await owner.closed

    def _gone(self, owner: int) -> None:
        self._forget(owner)

    def _call_off(self) -> None:
        """Nobody asks for what is being brought ahead any more; copies under way are held to their end."""
        for bringing in self._coming.values():
            bringing.cancel()
        self._coming.clear()

    def _finish(self) -> None:
        self._call_off()
        self._over.append(self._key)
        for owner in self._owners.values():
            owner.end(self._key)

    def _owner(self, rank: int) -> _Owner:
        owner = self._owners.get(rank)
        if owner is None:
            raise TransportError(f"not linked with source rank {rank}")
        return owner

    def _place(self, task: TargetTask) -> torch.Tensor:
        """Where a bucket is copied to."""
        return self._landing[task.landing_offset : task.landing_offset + task.nbytes]

    @staticmethod
    def _is_whole(task: TargetTask, lent: Mapping[int, torch.Tensor]) -> bool:
        """Nothing of the bucket passes through the ring."""
        segments = [landing.segment for landing in task.landings if landing.segment.nbytes]
        return bool(lent) and all(segment.offset in lent for segment in segments)

    async def _connect(self, rank: int, descriptor: bytes) -> None:
        offer = decode_offer(descriptor, CudaIpcOffer, rank)
        if offer.version != VERSION:
            raise TransportError(
                f"source rank {rank} offers CUDA IPC links of version {offer.version}, and {VERSION} is known here: "
                "run the same syncline on both sides"
            )
        if offer.mode != self._mode:
            raise TransportError(
                f"source rank {rank} offers landing mode {offer.mode}, this receiver was set up for {self._mode}"
            )
        sock = await reached(offer.path, f"source rank {rank}")
        owner = self._owners[rank] = _Owner(
            rank, offer, sock, self._runtime, is_over=self._over.__contains__, forget=self._gone
        )  # fmt: skip
        me = self._program.receiver
        owner.channel.send(Message(Kind.HELLO, push=offer.token, a=me.target, b=me.rank))


def _anew(error: TransportError) -> TransportError:
    """Another one that says the same. What is raised keeps the frames that it went through, and these what they look into: the
    memory of a source would stay open as long as its link is known.
    """
    return TransportError(str(error))


def _seen(bringing: asyncio.Task[torch.Tensor]) -> None:
    """What it failed with is told to whoever asks for the bucket, if somebody does."""
    if not bringing.cancelled():
        bringing.exception()


def _pairs(
    task: TargetTask, place: torch.Tensor, bucket: torch.Tensor, lent: Mapping[int, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is copied to make a whole bucket in ``place``: all of it, or what is lent, and what lies between as one piece."""
    if not lent:
        return [(place, bucket)] if place.numel() else []
    spans = sorted((landing.segment.offset, landing.segment.nbytes) for landing in task.landings if landing.segment.nbytes)
    pairs = []
    for alone, run in groupby(spans, lambda span: span[0] in lent):
        if alone:
            pairs += [(place[at : at + nbytes], lent[at]) for at, nbytes in run]
        else:
            between = list(run)
            start, stop = between[0][0], sum(between[-1])
            pairs.append((place[start:stop], bucket[start:stop]))
    return pairs
