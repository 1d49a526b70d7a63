"""Device memory that one process shows to another: handles as fixed structs, each allocation exported and opened once.

The CUDA calls are behind `IpcRuntime` (implemented in `syncline.stages.cudart`); everything here runs, and is tested,
without a GPU. Nothing is pickled: a handle is 64 bytes that the driver gives, in a struct of ours.

Order of the end: a receiver closes what it opened once nothing that it made uses it any more, and says so; only then does
the source let go of the memory. A handle that the source still shows after that leads nowhere.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch

from .completions import Signal
from .errors import TransportError
from .launched import Launched

HANDLE_NBYTES = 64
UUID_NBYTES = 16

Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_NBYTES, max_length=HANDLE_NBYTES)]
Uuid = Annotated[bytes, msgspec.Meta(min_length=UUID_NBYTES, max_length=UUID_NBYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An allocation: the physical device that it lies on, the driver's handle, and its size in bytes."""

    device: Uuid
    handle: Handle
    nbytes: Count


class EventHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event of another process: its device and the driver's handle."""

    device: Uuid
    handle: Handle


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes within an exported allocation: its number in the table that they came with, start and length."""

    allocation: Count
    start: Count
    nbytes: Count


class Event(Protocol):
    """A CUDA event, or what stands for it."""

    def query(self) -> bool:
        """Whether everything before its last record is done."""
        ...


class IpcRuntime(Protocol):
    """What the transport needs of CUDA. One device; the calls are short, `allocate` and `open` take about a millisecond.

    Attributes:
        device: where memory is allocated and looked at.
        uuid: of the physical device (``CUDA_VISIBLE_DEVICES`` renumbers ordinals, not these).
    """

    device: torch.device
    uuid: bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """1-d uint8 device memory, touched, aligned to 256 bytes."""
        ...

    def allocation_of(self, memory: torch.Tensor) -> tuple[int, int]:
        """Address and size of the allocation that ``memory`` lies in. `TransportError` if it cannot be shared."""
        ...

    def export(self, address: int) -> bytes:
        """The handle of the allocation at ``address``."""
        ...

    def open(self, handle: MemoryHandle) -> int:
        """Map another process's allocation; its address here. `TransportError` if its device is not visible here."""
        ...

    def close(self, address: int) -> None:
        """Undo `open`."""
        ...

    def view(self, owner: Any, address: int, nbytes: int) -> torch.Tensor:
        """A 1-d uint8 tensor over mapped memory, which keeps ``owner`` alive."""
        ...

    def make_event(self) -> Event:
        """An event that can be shown to other processes."""
        ...

    def export_event(self, event: Any) -> bytes:
        """Its handle."""
        ...

    def open_event(self, handle: EventHandle) -> Event:
        """Another process's event."""
        ...

    def record(self, event: Any) -> None:
        """Record an event of this process behind everything that the calling thread has given its current stream."""
        ...

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Launched:
        """Start copying (destination, source). May block on a CPU. If it fails midway, what was started is under way all the
        same: the error is told at its end.
        """
        ...


class Exports:
    """Allocations of this process that others may open. Each is exported once, whatever lies in it.

    Attributes:
        handles: what has been exported, by number.
    """

    def __init__(self, runtime: IpcRuntime) -> None:
        self._runtime = runtime
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self.handles: list[MemoryHandle] = []

    def place(self, memory: torch.Tensor) -> Place:
        """Where ``memory`` (contiguous) lies in what others can open. `TransportError` if it cannot be shared."""
        nbytes = memory.numel() * memory.element_size()
        if memory.device.type != self._runtime.device.type:
            raise TransportError(
                f"{nbytes} bytes on {memory.device} were to be shared as device memory of {self._runtime.device}: "
                "CUDA IPC takes memory of its own device only (for tensors on the CPU choose transport 'shm' or 'auto')"
            )
        base, size = self._runtime.allocation_of(memory)
        start = memory.data_ptr() - base
        if start < 0 or start + nbytes > size:
            raise TransportError(f"{nbytes} bytes do not lie within one allocation ({size} bytes): they cannot be shared")
        if base not in self._numbers:
            self._numbers[base] = len(self.handles)
            handle = self._runtime.export(base)
            self.handles.append(MemoryHandle(device=self._runtime.uuid, handle=handle, nbytes=size))
        self._kept.append(memory)
        return Place(self._numbers[base], start, nbytes)

    def close(self) -> None:
        """Let go of the memory. Only when nobody has it open any more."""
        self._kept.clear()


class _Opened:
    """One opened allocation. What looks into it keeps it alive; it is closed when the last of that is gone."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


class Imports:
    """Allocations of one other process, opened in this one. Each once, however often and by whatever it is used.

    Args:
        runtime: what opens and closes.
        all_closed: called, from whatever thread, when `close` was called and the last use has ended.

    Attributes:
        opened, closed: how many handles have been opened and closed so far.
    """

    def __init__(self, runtime: IpcRuntime, all_closed: Callable[[], None] | None = None) -> None:
        self._runtime = runtime
        self._all_closed = all_closed or (lambda: None)
        self._lock = threading.RLock()
        self._tables: list[_Opened] = []
        self._over = self._told = False
        self.opened = 0
        self.closed = 0

    def open(self, handles: list[MemoryHandle]) -> None:
        """Open a table of handles. Blocks for about a millisecond each. `TransportError`: nothing stays open."""
        for handle in handles:
            if self._over:
                raise TransportError("the link was closed while it was made")
            address = self._runtime.open(handle)
            opened = _Opened(address, handle.nbytes)
            end = weakref.finalize(opened, self._close_one, address)
            end.atexit = False  # the driver does it
            self.opened += 1
            with self._lock:
                if not self._over:
                    self._tables.append(opened)
            del opened  # nor may an error's traceback keep it open

    def view(self, place: Place) -> torch.Tensor:
        """The bytes that ``place`` names, 1-d uint8. They stay open as long as the tensor or a view of it lives."""
        if self._over:
            raise TransportError("the source's memory is closed here")
        if place.allocation >= len(self._tables):
            raise TransportError(f"the source named allocation {place.allocation}, and has shown {len(self._tables)}")
        size = self._tables[place.allocation].nbytes
        if place.start + place.nbytes > size:
            raise TransportError(f"the source named bytes beyond its allocation of {size} bytes")
        opened = self._tables[place.allocation]
        return self._runtime.view(opened, opened.address + place.start, place.nbytes)

    def close(self) -> None:
        """Close everything as soon as nothing looks into it any more, last opened first. Idempotent."""
        with self._lock:
            if self._over:
                return
            self._over = True
        while self._tables:
            self._tables.pop()  # its finalizer closes it, now or with the last view
        self._tell()

    def _close_one(self, address: int) -> None:
        try:
            self._runtime.close(address)
        finally:  # it is open no more, or nobody can close it: the source must not wait for it
            with self._lock:
                self.closed += 1
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            last = self._over and not self._told and not self._tables and self.closed == self.opened
            self._told = self._told or last
        if last:
            self._all_closed()


class Use(NamedTuple):
    """One use of a slot. No two uses of any slot have the same generation."""

    slot: int
    generation: int


class Slots:
    """A few reusable things (events) by number, handed out in the order of requests.

    An event remembers its last record only, so a slot is used again only when its use has been given back; a use that was
    given back already cannot give back the next one's.
    """

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._used: dict[int, int] = {}
        self._waiting: deque[Signal[Use]] = deque()
        self._generation = 0
        self._serving = False

    @property
    def in_use(self) -> int:
        return len(self._used)

    def acquire(self) -> Signal[Use]:
        """A slot, when one is free and every request before this one has been served."""
        signal: Signal[Use] = Signal()
        self._waiting.append(signal)
        self._serve()
        return signal

    def release(self, use: Use) -> None:
        """Give a slot back. `ValueError` if this use was given back before."""
        if self._used.get(use.slot) != use.generation:
            raise ValueError(f"slot {use.slot} was given back twice (generation {use.generation})")
        del self._used[use.slot]
        self._free.append(use.slot)
        self._serve()

    def close(self) -> None:
        """Fail all requests that wait."""
        while self._waiting:
            self._waiting.popleft().fail(TransportError("this sender is closed"))

    def _serve(self) -> None:
        if self._serving:  # as in `BufferPool`
            return
        self._serving = True
        try:
            while self._waiting and self._free:
                self._generation += 1
                use = Use(self._free.popleft(), self._generation)
                self._used[use.slot] = use.generation
                self._waiting.popleft().set(use)
        finally:
            self._serving = False
