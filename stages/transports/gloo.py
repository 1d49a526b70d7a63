"""Gloo between hosts: each source rank has one communicator with the ranks of each target that it sends to.

Bytes only, point to point only, the task's index as tag. A bucket is one message, or several: large segments travel alone
(`syncline.stages.frames`), out of the trainer's memory and, with ``streamed`` landing, into live parameters, where both are
contiguous and of one type. A receiver posts its receives in plan order: two buckets at a time into buffers of its own or
live memory (``streamed``), or a few ahead straight into private landing memory (``staged``); a send waits for its receive.
``mapped`` is not possible. After any error, and after a push that was not committed, the communicator with that
target is discarded on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from syncline.scheduler.programs import Landing, ReceiverId, SourceTask, TargetProgram, TargetTask

from ..communicator import Communicator, Rendezvous, unique_name
from ..completions import Completion, Signal, all_of
from ..errors import TransportError
from ..frames import Frame, FrameTable
from ..workers import Workers, call_in_thread
from .base import LandingMode, Loan, OnLost, decode_offer

_WINDOW = {"streamed": 2, "staged": 4}
_PLACED_WINDOW = 8
"""Buckets that may be on their way into live memory at a time: they need no buffers."""


class GlooOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one target need to link up: rank 0 of the communicator is the source rank, ``members`` follow."""

    endpoint: str
    name: str
    mode: LandingMode
    members: list[int]


class _TargetLink:
    """The communicator with one target."""

    def __init__(self, target: int, ranks: Sequence[int]) -> None:
        self.target = target
        self.ranks = list(ranks)
        self.name = unique_name(f"target-{target}")
        self.communicator: Communicator | None = None
        self.dropped = asyncio.Event()

    @property
    def receivers(self) -> list[ReceiverId]:
        return [ReceiverId(self.target, rank) for rank in self.ranks]

    @property
    def usable(self) -> bool:
        return self.communicator is not None and self.communicator.usable


class GlooSender:
    """Implements `Sender`.

    Args:
        landing: landing mode.
        bind_host: address that rendezvous and connections bind to.
        on_lost: see `OnLost`.
    """

    kind = "gloo"
    in_place = False

    def __init__(self, *, landing: LandingMode, bind_host: str, on_lost: OnLost, rendezvous_timeout_s: float = 60.0) -> None:
        if landing == "mapped":
            raise TransportError("landing 'mapped' needs shared memory; gloo has none")
        self._mode: LandingMode = landing
        self._bind_host = bind_host
        self._on_lost = on_lost
        self._timeout_s = rendezvous_timeout_s
        self._rendezvous: Rendezvous | None = None
        self._links: dict[int, _TargetLink] = {}
        self._closing: set[Signal[None]] = set()
        self._forsaken: set[asyncio.Future[Communicator]] = set()
        self._closed = False
        self._frames = FrameTable()

    @property
    def linked(self) -> frozenset[ReceiverId]:
        return frozenset(receiver for link in self._links.values() if link.usable for receiver in link.receivers)

    @property
    def landing_bytes(self) -> int:
        return 0

    async def offer(self, receivers: Collection[ReceiverId]) -> Mapping[int, bytes]:
        if self._closed:
            raise TransportError("this sender is closed")
        self.drop(receivers)
        if self._rendezvous is None:
            host = partial(Rendezvous.host, self._bind_host, timeout_s=self._timeout_s)
            self._rendezvous = await call_in_thread(host, name="syncline-rendezvous")
        offers = {}
        for target in sorted({receiver.target for receiver in receivers}):
            link = _TargetLink(target, sorted(r.rank for r in receivers if r.target == target))
            self._links[target] = link
            offer = GlooOffer(endpoint=self._rendezvous.endpoint, name=link.name, mode=self._mode, members=link.ranks)
            offers[target] = msgspec.msgpack.encode(offer)
        return offers

    async def link(self, receivers: Collection[ReceiverId], *, timeout_s: float) -> Mapping[ReceiverId, TransportError]:
        targets = sorted({receiver.target for receiver in receivers})
        errors = await asyncio.gather(*(self._meet(target, timeout_s) for target in targets))
        failed = {target: error for target, error in zip(targets, errors, strict=True) if error is not None}
        self.drop([receiver for receiver in receivers if receiver.target in failed])
        return {receiver: failed[receiver.target] for receiver in receivers if receiver.target in failed}

    async def begin(
        self, push_id: str, *, timeout_s: float, lease_timeout_s: float = 5.0
    ) -> Mapping[ReceiverId, TransportError]:
        for link in self._links.values():
            if link.communicator is not None:
                link.communicator.set_deadline(timeout_s)
        return {}

    def claim(self, task: SourceTask) -> Signal[Loan]:
        raise TransportError(f"task {task.index}: gloo sends from any memory; there is none to claim")

    def send(
        self,
        task: SourceTask,
        bucket: torch.Tensor,
        receivers: Collection[ReceiverId],
        lent: Mapping[int, torch.Tensor] | None = None,
    ) -> Mapping[ReceiverId, Completion | None]:
        parts = _parts(self._frames.of(task), bucket, lent or {})
        return {receiver: self._send_one(task, parts, receiver) for receiver in receivers}

    def drop(self, receivers: Collection[ReceiverId]) -> None:
        for target in {receiver.target for receiver in receivers}:
            link = self._links.pop(target, None)
            if link is not None:
                link.dropped.set()
                if link.communicator is not None:
                    self._discard(link.communicator)

    async def end(self, committed: Collection[ReceiverId]) -> None:
        done = set(committed)
        self.drop([receiver for link in self._links.values() for receiver in link.receivers if receiver not in done])

    async def close(self, timeout_s: float = 5.0) -> None:
        self._closed = True
        self.drop([receiver for link in self._links.values() for receiver in link.receivers])
        try:
            async with asyncio.timeout(timeout_s):
                for closing in list(self._closing):
                    await closing
        except TimeoutError:
            pass
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    async def _meet(self, target: int, timeout_s: float) -> TransportError | None:
        link = self._links.get(target)
        if link is None or self._rendezvous is None:
            return TransportError(f"target {target} was not offered a link")
        making = asyncio.ensure_future(
            Communicator.create(
                self._rendezvous,
                name=link.name,
                rank=0,
                size=1 + len(link.ranks),
                bind_host=self._bind_host,
                timeout_s=timeout_s,
            )
        )
        dropped = asyncio.create_task(link.dropped.wait())
        wanted = False
        try:
            await asyncio.wait({making, dropped}, return_when=asyncio.FIRST_COMPLETED)
            wanted = not link.dropped.is_set()
        finally:
            dropped.cancel()
            if not wanted:
                self._forsaken.add(making)
                making.add_done_callback(self._forsake)
                making.cancel()
        if not wanted:
            return TransportError(f"target {target} was dropped while it linked up")
        try:
            link.communicator = making.result()
        except TransportError as error:
            return TransportError(f"target {target}: {error}")
        return None

    def _forsake(self, making: asyncio.Future[Communicator]) -> None:
        self._forsaken.discard(making)
        if not making.cancelled() and making.exception() is None:
            self._discard(making.result())

    def _discard(self, communicator: Communicator) -> None:
        closing = communicator.abort()
        self._closing.add(closing)
        closing.subscribe(lambda: self._closing.discard(closing))

    def _send_one(self, task: SourceTask, parts: Sequence[torch.Tensor], receiver: ReceiverId) -> Signal[None] | None:
        link = self._links.get(receiver.target)
        if link is None or link.communicator is None or receiver.rank not in link.ranks:
            signal: Signal[None] = Signal()
            signal.fail(TransportError(f"receiver {receiver} is not linked any more"))
            return signal
        if not parts:
            return None
        sent = link.communicator.send_all(parts, 1 + link.ranks.index(receiver.rank), task.index)
        sent.subscribe(lambda: self._sent(link, receiver, sent))
        return sent

    def _sent(self, link: _TargetLink, receiver: ReceiverId, sent: Signal[None]) -> None:
        if sent.error is not None and self._links.get(link.target) is link:
            self.drop([receiver])
            for other in link.receivers:
                self._on_lost(other, TransportError(f"target {link.target}: {sent.error}"))


def _parts(cut: Sequence[Frame], bucket: torch.Tensor, elsewhere: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """The memory of each message: in the bucket, or elsewhere."""
    return [elsewhere[f.start] if f.start in elsewhere else bucket[f.start : f.start + f.nbytes] for f in cut]


class _PrivateLease:
    """Implements `Lease` for memory that nobody else writes: there is nothing to release."""

    def release(self) -> None:
        """Nothing to do."""


class _Lead(NamedTuple):
    """The first message of a push, while nothing else may come: its task, the buffer of that, and its arrival."""

    task: TargetTask
    memory: torch.Tensor
    received: Signal[None]


class GlooHalf:
    """Implements `ReceivingHalf`.

    Args:
        program: what this receiver takes.
        landing: landing mode, the same as the source's.
        bind_host: address that connections bind to.
        workers: threads that allocate and touch memory.
    """

    def __init__(self, *, program: TargetProgram, landing: LandingMode, bind_host: str, workers: Workers) -> None:
        if landing == "mapped":
            raise TransportError("landing 'mapped' needs shared memory; gloo has none")
        self.persistent = landing == "staged"
        self._program = program
        self._mode: LandingMode = landing
        self._bind_host = bind_host
        self._workers = workers
        self._communicators: dict[int, Communicator] = {}
        self._landing = torch.empty(0, dtype=torch.uint8)
        self._free: list[torch.Tensor] = []
        self._held: dict[int, torch.Tensor] = {}
        self._frames = FrameTable()
        self._first = next((task.index for task in program.tasks if task.nbytes), -1)
        self._places: dict[int, dict[int, torch.Tensor]] = {}
        self._open: dict[int, dict[int, torch.Tensor]] = {}  # the places of the push that is current
        self._lead: _Lead | None = None
        self._under_way: set[Signal[None]] = set()
        self._to_post: deque[TargetTask] = deque()
        self._posted = 0
        self._arrivals: dict[int, Signal[torch.Tensor]] = {}
        self._error: TransportError | None = TransportError("no push has begun")

    @property
    def landing_bytes(self) -> int:
        return self._landing.numel()

    async def link(self, descriptors: Mapping[int, bytes], *, timeout_s: float) -> None:
        missing = sorted(set(self._program.owners) - set(descriptors))
        if missing:
            raise TransportError(f"no gloo offer came from source ranks {missing}")
        try:
            await self._allocate()
            async with asyncio.TaskGroup() as meeting:
                for rank, descriptor in descriptors.items():
                    meeting.create_task(self._meet(rank, descriptor, timeout_s))
        except* TransportError as errors:
            await self.close()
            raise TransportError("; ".join(str(error) for error in errors.exceptions)) from errors

    async def begin(self, push_id: str, *, timeout_s: float) -> None:
        if self._posted:  # they would take the bytes of this push for those of the last
            for communicator in self._communicators.values():
                _ = communicator.abort()
        self.check()
        for communicator in self._communicators.values():
            communicator.set_deadline(timeout_s)
        self._error = None
        self._arrivals = {}
        self._free += self._held.values()
        self._held = {}
        self._to_post = deque(self._program.tasks)
        self._open = {}
        self._lead = self._post_lead() if self._places else None
        self._post()

    async def receive(self, task: TargetTask) -> torch.Tensor:
        return await self._arrival(task.index)

    def release(self, task: TargetTask) -> None:
        buffer = self._held.pop(task.index, None)
        if buffer is not None:
            self._free.append(buffer)
            self._post()

    def expose(self, places: Mapping[int, Mapping[int, torch.Tensor]]) -> frozenset[tuple[int, int]]:
        for task in self._program.tasks if not self.persistent else ():
            offered = places.get(task.index, {})
            cut = self._frames.of(task)
            taken = {f.start: offered[f.start] for f in cut if f.alone and f.start in offered}
            if task.index == self._first:
                taken.pop(cut[0].start, None)
            if taken:
                self._places[task.index] = taken
        return frozenset((task, offset) for task, taken in self._places.items() for offset in taken)

    async def first_bytes(self) -> None:
        if self._lead is not None:
            await self._lead.received

    def open_places(self, *, live: bool) -> None:
        self._open = self._places if live else {}
        lead, self._lead = self._lead, None
        if lead is None or self._error is not None:
            return
        rest = _parts(self._frames.of(lead.task)[1:], lead.memory, self._open.get(lead.task.index, {}))
        arrivals = [lead.received, self._recv(lead.task, rest)] if rest else [lead.received]
        self._follow(lead.task, lead.memory, all_of(arrivals))
        self._post()

    async def settled(self) -> None:
        while self._under_way:
            with contextlib.suppress(TransportError):
                await next(iter(self._under_way))

    def check(self) -> None:
        for rank, communicator in self._communicators.items():
            if not communicator.usable:
                raise TransportError(f"the gloo link with source rank {rank} has broken; link anew")
        if not set(self._program.owners) <= set(self._communicators):
            raise TransportError("this half is not linked")

    def space(self, owner: int) -> torch.Tensor:
        return self._landing

    def offset_of(self, landing: Landing) -> int:
        return landing.landing_offset

    def take_lease(self) -> _PrivateLease:
        return _PrivateLease()

    async def end(self, committed: bool) -> None:
        self._fail(TransportError("the push is over"))
        if not committed or self._posted:
            for communicator in self._communicators.values():
                _ = communicator.abort()

    async def close(self, timeout_s: float = 5.0) -> None:
        self._fail(TransportError("this link is closed"))
        communicators, self._communicators = self._communicators, {}
        await asyncio.gather(*(communicator.close(timeout_s) for communicator in communicators.values()))

    async def _allocate(self) -> None:
        def touched(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8).fill_(0)

        if self.persistent:
            self._landing = await self._workers.submit(touched, self._program.landing_nbytes)
        else:
            self._free = [await self._workers.submit(touched, self._program.bucket_nbytes) for _ in range(self._window)]

    async def _meet(self, rank: int, descriptor: bytes, timeout_s: float) -> None:
        offer = decode_offer(descriptor, GlooOffer, rank)
        if offer.mode != self._mode:
            raise TransportError(
                f"source rank {rank} offers landing mode {offer.mode}, this receiver was set up for {self._mode}"
            )
        me = self._program.receiver
        if me.rank not in offer.members:
            raise TransportError(f"the offer of source rank {rank} is for ranks {offer.members}, not for rank {me.rank}")
        until = asyncio.get_running_loop().time() + timeout_s
        join = partial(Rendezvous.join, offer.endpoint, timeout_s=timeout_s)
        rendezvous = await call_in_thread(join, name="syncline-rendezvous")
        self._communicators[rank] = await Communicator.create(
            rendezvous,
            name=offer.name,
            rank=1 + offer.members.index(me.rank),
            size=1 + len(offer.members),
            bind_host=self._bind_host,
            timeout_s=max(0.001, until - asyncio.get_running_loop().time()),
        )

    @property
    def _window(self) -> int:
        return _WINDOW[self._mode]

    def _post_lead(self) -> _Lead | None:
        """Post the first message of all, into a buffer. No other is posted before live memory is opened."""
        task = next((task for task in self._to_post if self._frames.of(task)), None)
        if task is None:
            return None
        self._to_post.remove(task)
        memory = self._memory(task)
        received = self._recv(task, _parts(self._frames.of(task)[:1], memory, {}))
        self._posted += 1
        lead = _Lead(task, memory, received)
        received.subscribe(lambda: self._lead_came(lead))
        return lead

    def _lead_came(self, lead: _Lead) -> None:
        if lead.received.error is not None:
            self._fail(TransportError(f"task {lead.task.index}: {lead.received.error}"))

    def _post(self) -> None:
        """Post receives in plan order, as far as the window goes."""
        while self._error is None and self._to_post and self._has_room(self._to_post[0]):
            task = self._to_post.popleft()
            memory = self._memory(task)
            parts = _parts(self._frames.of(task), memory, self._open.get(task.index, {}))
            if not parts:
                self._arrival(task.index).set(memory)
                continue
            self._posted += 1
            self._follow(task, memory, self._recv(task, parts))

    def _recv(self, task: TargetTask, parts: Sequence[torch.Tensor]) -> Signal[None]:
        received = self._communicators[task.owner].recv_all(parts, 0, task.index)
        self._under_way.add(received)
        received.subscribe(lambda: self._under_way.discard(received))
        return received

    def _follow(self, task: TargetTask, memory: torch.Tensor, received: Signal[None]) -> None:
        received.subscribe(partial(self._received, task.index, memory, received))

    def _has_room(self, task: TargetTask) -> bool:
        """Whether a bucket may be posted. Until live memory is opened, none may."""
        if self.persistent:
            return self._posted < self._window
        if self._lead is not None:
            return False
        return self._posted < _PLACED_WINDOW if self._is_placed(task) else bool(self._free)

    def _is_placed(self, task: TargetTask) -> bool:
        """Whether all of a bucket goes straight into live memory (or there is nothing of it)."""
        return len(self._open.get(task.index, ())) == len(self._frames.of(task))

    def _memory(self, task: TargetTask) -> torch.Tensor:
        """Where a bucket comes, but for what goes into live memory; empty if all of it does."""
        if self.persistent:
            return self._landing[task.landing_offset : task.landing_offset + task.nbytes]
        if self._is_placed(task):
            return torch.empty(0, dtype=torch.uint8)
        buffer = self._held[task.index] = self._free.pop()
        return buffer[: task.nbytes]

    def _received(self, task: int, memory: torch.Tensor, received: Signal[None]) -> None:
        self._posted -= 1
        if received.error is not None:
            self._fail(TransportError(f"task {task}: {received.error}"))
        elif self._error is None:
            self._arrival(task).set(memory)
            self._post()

    def _arrival(self, task: int) -> Signal[torch.Tensor]:
        signal = self._arrivals.get(task)
        if signal is None:
            signal = self._arrivals[task] = Signal()
            if self._error is not None:
                signal.fail(self._error)
        return signal

    def _fail(self, error: TransportError) -> None:
        """Nothing more arrives in this push. What has arrived is there to be taken."""
        self._error = self._error or error
        for signal in self._arrivals.values():
            signal.fail(error)
