"""The receiving half of two-sided transports. See `two_sided` for how they work."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from syncline.scheduler.programs import Landing, TargetProgram, TargetTask

from ..communicator import Rendezvous
from ..completions import Signal, all_of
from ..cudart import enough_memory
from ..errors import TransportError
from ..frames import FrameTable
from ..workers import Workers, call_in_thread
from .base import LandingMode, PrivateLease, decode_offer
from .linked import Linked, Network
from .relay import Relay
from .two_sided import TwoSidedOffer, parts_of

_WINDOW = {"streamed": 2, "staged": 4}
_PLACED_WINDOW = 8
"""Buckets that may be on their way into live memory at a time: they need no buffers."""


class _Lead(NamedTuple):
    """The first message of a push, while nothing else may come: its task, the buffer of that, and its arrival."""

    task: TargetTask
    memory: torch.Tensor
    received: Signal[None]


class TwoSidedHalf:
    """Implements `ReceivingHalf`.

    Args:
        network: what communicators are made of.
        program: what this receiver takes.
        landing: landing mode, the same as the source's.
        workers: threads that allocate and touch memory.
    """

    def __init__(self, *, network: Network, program: TargetProgram, landing: LandingMode, workers: Workers) -> None:
        if landing == "mapped":
            raise TransportError(f"landing 'mapped' needs shared memory; {network.kind} has none")
        self._network = network
        self.persistent = landing == "staged"
        self._program = program
        self._mode: LandingMode = landing
        self._workers = workers
        self._communicators: dict[int, Linked] = {}
        self._relays: dict[int, Relay] = {}
        self._passing: dict[int, Signal[None]] = {}  # tasks that are being passed on
        self._released: dict[int, torch.Tensor] = {}  # buffers of such, that are not needed otherwise
        self._landing = torch.empty(0, dtype=torch.uint8, device=network.device)
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
            raise TransportError(f"no {self._network.kind} offer came from source ranks {missing}")
        try:
            await self._allocate()
            async with asyncio.TaskGroup() as meeting:
                for rank, descriptor in descriptors.items():
                    meeting.create_task(self._meet(rank, descriptor, timeout_s, meeting))
        except* TransportError as errors:
            await self.close()
            raise TransportError("; ".join(str(error) for error in errors.exceptions)) from errors

    async def begin(self, push_id: str, *, timeout_s: float) -> None:
        if self._posted:  # they would take the bytes of this push for those of the last
            self._abort()
        self.check()
        for communicator in self._communicators.values():
            communicator.set_deadline(timeout_s)
        for owner, relay in self._relays.items():
            passed = [task for task in self._program.tasks if task.owner == owner and task.is_relayed]
            relay.begin(passed, timeout_s=timeout_s)
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
        if buffer is not None and task.index in self._passing:
            self._released[task.index] = buffer
        elif buffer is not None:
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
        rest = parts_of(self._frames.of(lead.task)[1:], lead.memory, self._open.get(lead.task.index, {}))
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
                raise TransportError(f"the {self._network.kind} link with source rank {rank} has broken; link anew")
        for rank, relay in self._relays.items():
            if not relay.communicator.usable:
                raise TransportError(f"the {self._network.kind} link to ranks that pass on what rank {rank} sends has broken")
        if not set(self._program.owners) <= set(self._communicators):
            raise TransportError("this half is not linked")

    def space(self, owner: int) -> torch.Tensor:
        return self._landing

    def offset_of(self, landing: Landing) -> int:
        return landing.landing_offset

    def take_lease(self) -> PrivateLease:
        return PrivateLease()

    async def end(self, committed: bool) -> None:
        for sent in list(self._passing.values()) if committed else ():  # the others have it all: these are as good as over
            with contextlib.suppress(TransportError):
                await sent
        self._fail(TransportError("the push is over"))
        if not committed or self._posted:
            self._abort()

    async def close(self, timeout_s: float = 5.0) -> None:
        self._fail(TransportError("this link is closed"))
        # What is still under way holds its memory itself. The next link asks for as much, and there may not be room for both.
        self._landing = torch.empty(0, dtype=torch.uint8, device=self._network.device)
        self._free, self._held, self._released = [], {}, {}
        communicators = [*self._communicators.values(), *(relay.communicator for relay in self._relays.values())]
        self._communicators, self._relays = {}, {}
        for communicator in communicators:
            _ = communicator.abort()  # begun here: what waits for it may be cancelled before its first step
        await asyncio.gather(*(communicator.close(timeout_s) for communicator in communicators))

    def _abort(self) -> None:
        """Nothing more goes over these links."""
        for communicator in (*self._communicators.values(), *(relay.communicator for relay in self._relays.values())):
            _ = communicator.abort()

    async def _allocate(self) -> None:
        def touched(nbytes: int) -> torch.Tensor:
            with enough_memory(nbytes, self._network.device):
                memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._network.device)
            if memory.device.type == "cuda":
                torch.cuda.current_stream(memory.device).synchronize()
            return memory

        if self.persistent:
            self._landing = await self._workers.submit(touched, self._program.landing_nbytes)
        else:
            self._free = [await self._workers.submit(touched, self._program.bucket_nbytes) for _ in range(self._window)]

    async def _meet(self, rank: int, descriptor: bytes, timeout_s: float, meeting: asyncio.TaskGroup) -> None:
        offer = decode_offer(descriptor, TwoSidedOffer, rank)
        if offer.kind != self._network.kind:
            raise TransportError(f"source rank {rank} offers {offer.kind}, this receiver was set up for {self._network.kind}")
        if offer.mode != self._mode:
            raise TransportError(
                f"source rank {rank} offers landing mode {offer.mode}, this receiver was set up for {self._mode}"
            )
        me = self._program.receiver
        if me.rank not in offer.members:
            raise TransportError(f"the offer of source rank {rank} is for ranks {offer.members}, not for rank {me.rank}")
        passes = any(task.owner == rank and task.is_relayed for task in self._program.tasks)
        if passes and me.rank not in offer.relays:
            raise TransportError(f"the offer of source rank {rank} has only ranks {offer.relays} pass on what it sends")
        until = asyncio.get_running_loop().time() + timeout_s
        join = partial(Rendezvous.join, offer.endpoint, timeout_s=timeout_s)
        rendezvous = await call_in_thread(join, name="syncline-rendezvous")
        left = max(0.001, until - asyncio.get_running_loop().time())
        meet = partial(self._network.meet, rendezvous, timeout_s=left)
        if me.rank in offer.relays:
            meeting.create_task(self._meet_relays(rank, offer, meet))
        self._communicators[rank] = await meet(
            name=offer.name, label=f"source-{rank} to {me.rank} of {offer.name}", rank=1 + offer.members.index(me.rank),
            members=[f"source rank {rank}", *(f"rank {member}" for member in offer.members)], one_way=True,
        )  # fmt: skip

    async def _meet_relays(self, owner: int, offer: TwoSidedOffer, meet: Callable[..., Awaitable[Linked]]) -> None:
        me = self._program.receiver.rank
        communicator = await meet(
            name=f"{offer.name}-relay", label=f"source-{owner} by way of {me} of {offer.name}",
            rank=offer.relays.index(me), members=[f"rank {member}" for member in offer.relays], one_way=False,
        )  # fmt: skip
        self._relays[owner] = Relay(communicator, offer.relays)

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
        received = self._recv(task, parts_of(self._frames.of(task)[:1], memory, {}))
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
            parts = parts_of(self._frames.of(task), memory, self._open.get(task.index, {}))
            if not parts:
                self._arrival(task.index).set(memory)
                continue
            self._posted += 1
            self._follow(task, memory, self._recv(task, parts))

    def _recv(self, task: TargetTask, parts: Sequence[torch.Tensor]) -> Signal[None]:
        if task.via is None:
            received = self._communicators[task.owner].recv_all(parts, 0, task.index)
        else:
            received = self._relays[task.owner].recv(task, parts)
        self._under_way.add(received)
        received.subscribe(lambda: self._under_way.discard(received))
        return received

    def _follow(self, task: TargetTask, memory: torch.Tensor, received: Signal[None]) -> None:
        received.subscribe(partial(self._received, task, memory, received))

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
            return self._landing[:0]
        buffer = self._held[task.index] = self._free.pop()
        return buffer[: task.nbytes]

    def _received(self, task: TargetTask, memory: torch.Tensor, received: Signal[None]) -> None:
        self._posted -= 1
        if received.error is not None:
            self._broke(TransportError(f"task {task.index}: {received.error}"))
        elif self._error is None:
            if task.onward:
                self._pass_on(task, memory)
            self._arrival(task.index).set(memory)
            self._post()

    def _pass_on(self, task: TargetTask, memory: torch.Tensor) -> None:
        parts = parts_of(self._frames.of(task), memory, self._open.get(task.index, {}))
        sent = self._passing[task.index] = self._relays[task.owner].send(task, parts)
        self._under_way.add(sent)
        sent.subscribe(partial(self._passed_on, task, sent))

    def _passed_on(self, task: TargetTask, sent: Signal[None]) -> None:
        self._under_way.discard(sent)
        if self._passing.get(task.index) is sent:
            del self._passing[task.index]
        buffer = self._released.pop(task.index, None)
        if buffer is not None:
            self._free.append(buffer)
        if sent.error is not None:
            self._broke(TransportError(f"task {task.index}, passed on to ranks {list(task.onward)}: {sent.error}"))
        self._post()

    def _arrival(self, task: int) -> Signal[torch.Tensor]:
        signal = self._arrivals.get(task)
        if signal is None:
            signal = self._arrivals[task] = Signal()
            if self._error is not None:
                signal.fail(self._error)
        return signal

    def _broke(self, error: TransportError) -> None:
        """A message was lost: the links go, so that those at their other ends know at once. Nobody else would tell them."""
        first = self._error is None
        self._fail(error)
        if first:
            self._abort()

    def _fail(self, error: TransportError) -> None:
        """Nothing more arrives in this push. What has arrived is there to be taken."""
        self._error = self._error or error
        for relay in self._relays.values():
            relay.fail(error)
        for signal in self._arrivals.values():
            signal.fail(error)
