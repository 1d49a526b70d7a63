"""Shared memory between processes of one host: the receiving half. See `shm` for how it works."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping as MappingOf
from functools import partial

import torch

from syncline.scheduler.programs import Landing, TargetProgram, TargetTask

from ..completions import Signal
from ..errors import TransportError
from ..workers import call_in_thread
from .base import LandingMode, decode_offer, push_key
from .channel import Channel, Kind, Message, reached
from .shared_memory import Mapping, end_lease
from .shm import RING, ShmOffer

_ENDED_PUSHES = 16  # remembered, so that what was still on its way is recognised


class ShmLease:
    """Implements `Lease`: the leases of one push, one for each owner. Released on the loop."""

    def __init__(self, ends: Collection[Callable[[], object]], notices: Collection[tuple[Channel, Message]]) -> None:
        self._ends = tuple(ends)
        self._notices = tuple(notices)

    def release(self) -> None:
        for end in self._ends:
            end()
        for channel, message in self._notices:
            channel.send(message)
        self._ends = self._notices = ()


class _Push:
    """What has come from one owner for one push."""

    def __init__(self, error: TransportError | None) -> None:
        self.segment: Signal[int] = Signal()
        self.lease_fd = -1
        self.arrived: dict[int, Signal[int]] = {}
        self.unacknowledged: set[int] = set()
        self._error = error
        if error is not None:
            self.segment.fail(error)

    def arrival(self, task: int) -> Signal[int]:
        """Ends with the bucket's place in the ring once it is there."""
        signal = self.arrived.get(task)
        if signal is None:
            signal = self.arrived[task] = Signal()
            if self._error is not None:
                signal.fail(self._error)
        return signal

    def fail(self, error: TransportError) -> None:
        self._error = error
        self.segment.fail(error)
        for signal in self.arrived.values():
            signal.fail(error)


class _Owner:
    """The link with one source rank."""

    def __init__(self, rank: int, offer: ShmOffer, sock: socket.socket, is_over: Callable[[int], bool]) -> None:
        self.rank = rank
        self.segments = offer.segments
        self.streamed = offer.mode == "streamed"
        self.mappings: dict[int, Signal[Mapping]] = {}
        self.all_mapped: Signal[None] = Signal()
        self.error: TransportError | None = None
        self.channel = Channel(sock, on_message=self._heard, on_closed=self._lost)
        self._is_over = is_over
        self._pushes: dict[int, _Push] = {}

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
        if push is None:
            return
        for task in push.unacknowledged:
            self.channel.send(Message(Kind.ACK, task, key))
        if push.lease_fd >= 0:
            end_lease(push.lease_fd)
            self.channel.send(Message(Kind.RELEASED, push=key))

    def acknowledge(self, key: int, task: int) -> None:
        """Say that a bucket was taken, unless the source has given this receiver up meanwhile."""
        self.check()
        self.push(key).unacknowledged.discard(task)
        self.channel.send(Message(Kind.ACK, task, key))

    def check(self) -> None:
        try:
            self.channel.check()
        except TransportError as error:
            raise self.error or TransportError(f"source rank {self.rank}: {error}") from None

    async def memory(self, key: int) -> torch.Tensor:
        """The landing buffer of a push, or the ring."""
        number = await self.push(key).segment
        if number not in self.mappings:
            raise TransportError(f"source rank {self.rank} named shared memory {number}, which it has not shown")
        return (await self.mappings[number]).memory

    def hold(self, key: int) -> tuple[Callable[[], object], Message] | None:
        """Take the lease of a push over from it."""
        push = self.push(key)
        if push.lease_fd < 0 or not push.segment.done:
            return None
        end = self.mappings[push.segment.result].result.hold(push.lease_fd)
        push.lease_fd = -1
        return end, Message(Kind.RELEASED, push=key)

    def close(self) -> None:
        for key in list(self._pushes):
            self.end(key)
        self.channel.close()
        self._fail(TransportError("this link is closed"))
        self.mappings.clear()

    def _heard(self, message: Message) -> None:
        if message.kind is Kind.MAP:
            (fd,) = message.fds
            self.mappings[message.a] = call_in_thread(partial(_map, fd, message.b), name="syncline-map")
            if len(self.mappings) >= self.segments:
                self.all_mapped.set()
        elif message.kind is Kind.UNMAP:
            self.mappings.pop(message.a, None)
        elif message.kind is Kind.BEGIN:
            self._begun(message)
        elif message.kind is Kind.BUCKET:
            self._arrived(message)

    def _begun(self, message: Message) -> None:
        lease_fd = message.fds[0] if message.fds else -1
        push = self.push(message.push)
        push.lease_fd = lease_fd
        push.segment.set(message.a if lease_fd >= 0 else RING)
        if self._is_over(message.push):
            self.end(message.push)

    def _arrived(self, message: Message) -> None:
        push = self.push(message.push)
        if self.streamed:
            push.unacknowledged.add(message.task)
        push.arrival(message.task).set(message.a)
        if self._is_over(message.push):
            self.end(message.push)

    def _lost(self, error: TransportError) -> None:
        self._fail(TransportError(f"source rank {self.rank}: {error}"))

    def _fail(self, error: TransportError) -> None:
        self.error = self.error or error
        self.all_mapped.fail(error)
        for push in self._pushes.values():
            push.fail(error)


def _map(fd: int, nbytes: int) -> Mapping:
    try:
        return Mapping(fd, nbytes)
    except (OSError, ValueError) as error:
        raise TransportError(f"{nbytes} bytes of the source's shared memory could not be mapped: {error}") from error
    finally:
        os.close(fd)


class ShmHalf:
    """Implements `ReceivingHalf`.

    Args:
        program: what this receiver takes.
        landing: landing mode, the same as the source's.
    """

    def __init__(self, *, program: TargetProgram, landing: LandingMode) -> None:
        self.persistent = landing != "streamed"
        self._program = program
        self._mode: LandingMode = landing
        self._owners: dict[int, _Owner] = {}
        self._key = 0
        self._spaces: dict[int, torch.Tensor] = {}
        self._over: deque[int] = deque(maxlen=_ENDED_PUSHES)

    @property
    def landing_bytes(self) -> int:
        return 0

    async def link(self, descriptors: MappingOf[int, bytes], *, timeout_s: float) -> None:
        missing = sorted(set(self._program.owners) - set(descriptors))
        if missing:
            raise TransportError(f"no shared-memory offer came from source ranks {missing}")
        try:
            async with asyncio.timeout(timeout_s):
                for rank, descriptor in descriptors.items():
                    await self._connect(rank, descriptor)
                for owner in self._owners.values():
                    await self._greet(owner)
        except TimeoutError:
            await self.close()
            raise TransportError(f"linking over shared memory took longer than {timeout_s:g} s") from None
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
        owner, key = self._owner(task.owner), self._key
        offset = await owner.push(key).arrival(task.index)
        memory = await owner.memory(key)
        if self.persistent:
            self._spaces[task.owner] = memory
            offset = task.shared_offset
        bucket = memory[offset : offset + task.nbytes]
        if bucket.numel() != task.nbytes:
            raise TransportError(f"task {task.index}: source rank {task.owner} named bytes beyond its shared memory")
        return bucket

    def release(self, task: TargetTask) -> None:
        if not self.persistent:
            self._owner(task.owner).acknowledge(self._key, task.index)

    def check(self) -> None:
        for owner in self._owners.values():
            owner.check()

    def space(self, owner: int) -> torch.Tensor:
        if owner not in self._spaces:
            raise TransportError(f"nothing has been received from source rank {owner} in this push")
        return self._spaces[owner]

    def offset_of(self, landing: Landing) -> int:
        return landing.shared_offset

    def take_lease(self) -> ShmLease:
        ends: list[Callable[[], object]] = []
        notices: list[tuple[Channel, Message]] = []
        for owner in self._owners.values():
            held = owner.hold(self._key)
            if held is not None:
                ends.append(held[0])
                notices.append((owner.channel, held[1]))
        return ShmLease(ends, notices)

    async def end(self, committed: bool) -> None:
        self._finish()

    async def close(self, timeout_s: float = 5.0) -> None:
        self._spaces.clear()
        for owner in self._owners.values():
            owner.close()
        self._owners.clear()

    def _finish(self) -> None:
        self._spaces.clear()
        self._over.append(self._key)
        for owner in self._owners.values():
            owner.end(self._key)

    def _owner(self, rank: int) -> _Owner:
        owner = self._owners.get(rank)
        if owner is None:
            raise TransportError(f"not linked with source rank {rank}")
        return owner

    async def _connect(self, rank: int, descriptor: bytes) -> None:
        offer = decode_offer(descriptor, ShmOffer, rank)
        if offer.mode != self._mode:
            raise TransportError(
                f"source rank {rank} offers landing mode {offer.mode}, this receiver was set up for {self._mode}"
            )
        sock = await reached(offer.path, f"source rank {rank}")
        owner = self._owners[rank] = _Owner(rank, offer, sock, self._over.__contains__)
        me = self._program.receiver
        owner.channel.send(Message(Kind.HELLO, push=offer.token, a=me.target, b=me.rank))

    @staticmethod
    async def _greet(owner: _Owner) -> None:
        await owner.all_mapped
        for mapping in list(owner.mappings.values()):
            await mapping
        owner.channel.send(Message(Kind.READY))
