"""What stands for CUDA in tests without a GPU. It shows what our own logic does with it; it shows nothing of CUDA.

`SharedMemoryIpc`: device memory that other processes open is shared memory; events are bytes in it. It works between
threads of one process, too, which CUDA IPC does not.

`Fabric`: what NCCL would move between ranks, among threads of this process. As NCCL does, it matches messages of two ranks in
the order of their issue, and never by tag; and a rank that goes away is an error at the others.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import defaultdict, deque
from typing import Any

import torch

from syncline.stages.errors import TransportError
from syncline.stages.ipc import EventHandle, MemoryHandle
from syncline.stages.launched import DONE, Launched

_PAGE = mmap.PAGESIZE


class _Event:
    """A byte in shared memory: 1 when what it was recorded behind is done."""

    def __init__(self, byte: Any, handle: bytes) -> None:
        self.byte = byte
        self.handle = handle

    def query(self) -> bool:
        return bool(self.byte[0])


class SharedMemoryIpc:
    """Implements `syncline.stages.ipc.IpcRuntime` over memfd.

    Attributes:
        hold: events that are recorded are not done until `finish` is called.
        log: every export, open and close, in order.
    """

    device = torch.device("cpu")
    uuid = bytes(range(16))

    def __init__(self) -> None:
        self.hold = False
        self.log: list[str] = []
        self._own: dict[int, tuple[int, int, mmap.mmap]] = {}
        self._mapped: dict[int, list[mmap.mmap]] = {}
        self._held: list[_Event] = []
        self._events: list[tuple[mmap.mmap, int]] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        size = max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
        fd = os.memfd_create("standin-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        shared = mmap.mmap(fd, size)
        memory = torch.frombuffer(shared, dtype=torch.uint8)
        self._own[memory.data_ptr()] = (fd, size, shared)
        return memory[:nbytes]

    def allocation_of(self, memory: torch.Tensor) -> tuple[int, int]:
        for base, (_, size, _) in self._own.items():
            if base <= memory.data_ptr() < base + size:
                return base, size
        raise TransportError("this memory was not allocated here: it cannot be shared")

    def export(self, address: int) -> bytes:
        fd, _, _ = self._own[address]
        self.log.append("export")
        return f"/proc/{os.getpid()}/fd/{fd}".encode().ljust(64, b"\0")

    def open(self, handle: MemoryHandle) -> int:
        try:
            fd = os.open(handle.handle.rstrip(b"\0").decode(), os.O_RDWR | os.O_CLOEXEC)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise TransportError(f"no such memory: {error}") from error
        mapped = mmap.mmap(fd, handle.nbytes)
        os.close(fd)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped))
        self._mapped.setdefault(address, []).append(mapped)
        self.log.append("open")
        return address

    def close(self, address: int) -> None:
        self._mapped[address].pop()
        self.log.append("close")

    def view(self, owner: Any, address: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=torch.uint8)

    def make_event(self) -> _Event:
        fd = os.memfd_create("standin-event", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE)
        shared = mmap.mmap(fd, _PAGE)
        shared[0] = 1
        self._events.append((shared, fd))
        return _Event(shared, f"/proc/{os.getpid()}/fd/{fd}".encode().ljust(64, b"\0"))

    def export_event(self, event: Any) -> bytes:
        return event.handle

    def open_event(self, handle: EventHandle) -> _Event:
        fd = os.open(handle.handle.rstrip(b"\0").decode(), os.O_RDWR | os.O_CLOEXEC)
        shared = mmap.mmap(fd, _PAGE)
        os.close(fd)
        return _Event(shared, handle.handle)

    def record(self, event: Any) -> None:
        event.byte[0] = not self.hold
        if self.hold:
            self._held.append(event)

    def finish(self) -> None:
        """What was recorded is done."""
        self.hold = False
        for event in self._held:
            event.byte[0] = 1
        self._held.clear()

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Launched:
        for destination, source in pairs:
            destination.copy_(source)
        return Launched(DONE, lambda: 0, pairs)

    def free(self) -> None:
        """Give back descriptors."""
        for fd, _, _ in self._own.values():
            os.close(fd)
        for _, fd in self._events:
            os.close(fd)
        self._own.clear()
        self._events.clear()


class _Moved:
    """A message of a group; ``done`` when it was matched and copied."""

    def __init__(self, member: Any, message: Any) -> None:
        self.member = member
        self.message = message
        self.done = False


class _Mark:
    def __init__(self, fabric: Fabric, moved: list[_Moved]) -> None:
        self._fabric = fabric
        self._moved = moved

    def query(self) -> bool:
        self._fabric.match()
        return all(one.done for one in self._moved)


class _Member:
    def __init__(self, unique_id: bytes, size: int, rank: int) -> None:
        self.unique_id, self.size, self.rank = unique_id, size, rank
        self.moved: list[_Moved] = []
        self.error = ""


class Fabric:
    """All ranks of this process.

    Attributes:
        stalled: members of these (unique_id, rank) take part in nothing: what they issue, and what is issued to them, waits.
        issued: every message that was issued, in order.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: dict[bytes, dict[int, _Member]] = defaultdict(dict)
        self.sends: dict[Any, deque[_Moved]] = defaultdict(deque)
        self.recvs: dict[Any, deque[_Moved]] = defaultdict(deque)
        self.stalled: set[tuple[bytes, int]] = set()
        self.issued: list[tuple[bytes, int, Any]] = []
        self.numbers = itertools.count(1)

    def runtime(self) -> FabricNccl:
        return FabricNccl(self)

    def match(self) -> None:
        with self.lock:
            for pair in list(self.sends):
                unique_id, source, to = pair
                if {(unique_id, source), (unique_id, to)} & self.stalled:
                    continue
                while self.sends[pair] and self.recvs[pair]:
                    self._move(self.sends[pair].popleft(), self.recvs[pair].popleft())

    def _move(self, sent: _Moved, taken: _Moved) -> None:
        if sent.message.nbytes != taken.message.nbytes:
            for one in (sent, taken):
                one.member.error = f"{sent.message.nbytes} bytes were sent for {taken.message.nbytes}"
            return
        ctypes.memmove(taken.message.address, sent.message.address, sent.message.nbytes)
        sent.done = taken.done = True


class FabricNccl:
    """Implements `syncline.stages.issuing.NcclRuntime` over a `Fabric`."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def unique_id(self) -> bytes:
        return next(self.fabric.numbers).to_bytes(128, "little")

    def start(self, size: int, unique_id: bytes, rank: int) -> _Member:
        with self.fabric.lock:
            member = self.fabric.members[unique_id][rank] = _Member(unique_id, size, rank)
        return member

    def ready(self, member: _Member) -> bool:
        if member.error:
            raise TransportError(member.error)
        return len(self.fabric.members[member.unique_id]) == member.size

    def group(self, member: _Member, messages: Any) -> None:
        fabric = self.fabric
        with fabric.lock:
            for message in messages:
                moved = _Moved(member, message)
                member.moved.append(moved)
                fabric.issued.append((member.unique_id, member.rank, message))
                if message.sends:
                    fabric.sends[member.unique_id, member.rank, message.peer].append(moved)
                else:
                    fabric.recvs[member.unique_id, message.peer, member.rank].append(moved)

    def mark(self, member: _Member) -> _Mark:
        return _Mark(self.fabric, list(member.moved))

    def abort(self, member: _Member) -> None:
        with self.fabric.lock:
            for pairs in (self.fabric.sends, self.fabric.recvs):
                for pair in [pair for pair in pairs if pair[0] == member.unique_id and member.rank in pair[1:]]:
                    del pairs[pair]
            for other in self.fabric.members[member.unique_id].values():
                if other is not member and not other.error:
                    other.error = f"rank {member.rank} is gone"
