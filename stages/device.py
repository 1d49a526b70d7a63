"""What the stages need of a device: streams, events, memory of its own and host memory that it can read by itself.

Stages are written against `Device`; `CudaDevice` is the real one. So everything that decides about order and lifetime runs, and
is tested, without a GPU. Nothing here waits for a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from .cudart import enough_memory, load_runtime, own_stream
from .errors import TransportError

_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly
_READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported


class Event(Protocol):
    """Remembers a place in a stream: that of its last record."""

    def record(self, stream: Any) -> None:
        """Remember the end of what ``stream`` has been given so far."""
        ...

    def query(self) -> bool:
        """Whether the device has got there."""
        ...


class Device(Protocol):
    """One device. Calls are short; `empty`, `pinned`, `register` and `unregister` are not, and belong on a thread."""

    @property
    def device(self) -> torch.device: ...

    def stream(self) -> Any:
        """A stream that nothing else is given."""
        ...

    def current_stream(self) -> Any:
        """The stream that the calling thread works on."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Work that the calling thread starts within goes on ``stream``."""
        ...

    def event(self) -> Event:
        """A new event, not recorded yet."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory (1-d uint8), aligned to 256 bytes, for use on any stream: whatever used it before is done."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory (1-d uint8)."""
        ...

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether somebody else has page-locked host memory: torch, or whoever gave it to the trainer."""
        ...

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Page-lock host memory where it is; ``read_only``: memory that cannot be written. It stays so until it was let go of
        as often. `TransportError` if that cannot be done.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`. `TransportError` if it was not registered, or is gone."""
        ...


class Registrations:
    """Host memory that this process has page-locked, counted: several engines may send the same weights, or one that plans anew
    and its plan before. Whoever lets go first takes nothing from the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []

    def holds(self, address: int) -> bool:
        """Whether the page of ``address`` is locked from here: CUDA says that it is, for as long as that lasts."""
        with self._lock:
            before = bisect_right(self._starts, address // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE - 1)
            start = self._starts[before - 1] if before else 0
            return before > 0 and address // mmap.PAGESIZE <= (start + self._held[start][0] - 1) // mmap.PAGESIZE

    def add(self, address: int, nbytes: int, register: Callable[[], None]) -> None:
        """Once more; the first calls ``register``. `TransportError`: as that says, or fewer bytes are locked there already."""
        with self._lock:
            locked, count = self._held.get(address, (nbytes, 0))
            if locked < nbytes:
                raise TransportError(f"{locked} of {nbytes} bytes at {address:#x} are page-locked already")
            if not count:
                register()
                insort(self._starts, address)
            self._held[address] = (locked, count + 1)

    def remove(self, address: int, unregister: Callable[[], None]) -> None:
        """Once less; the last calls ``unregister``. `TransportError`: as that says, or it is not locked."""
        with self._lock:
            if address not in self._held:
                raise TransportError(f"memory at {address:#x} is not page-locked")
            nbytes, count = self._held[address]
            if count > 1:
                self._held[address] = (nbytes, count - 1)
                return
            del self._held[address]
            self._starts.remove(address)
            unregister()


_registrations = Registrations()


class CudaDevice:
    """Implements `Device`.

    Args:
        device: a CUDA device; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise TransportError(f"{device} is not a CUDA device that this process can use")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._runtime: Any = torch.cuda.cudart()
        self._library: Any = load_runtime()

    def stream(self) -> torch.cuda.Stream:
        return own_stream(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def event(self) -> Event:
        with torch.cuda.device(self.device):
            return cast("Event", torch.cuda.Event())

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device), enough_memory(nbytes, self.device):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            # what was freed on this thread's stream may be in use there still: other streams have no order to that
            torch.cuda.current_stream().synchronize()
        return memory

    def pinned(self, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned() and not _registrations.holds(memory.data_ptr())

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        if read_only and not self._reads_read_only:
            raise TransportError(f"{self.device} cannot page-lock memory that is read-only")

        def lock() -> None:
            with torch.cuda.device(self.device):
                code = self._runtime.cudaHostRegister(address, nbytes, _REGISTER_READ_ONLY if read_only else 0)
                self._check(code, f"page-lock {nbytes} bytes of host memory")

        _registrations.add(address, nbytes, lock)

    @functools.cached_property
    def _reads_read_only(self) -> bool:
        """Whether the device offers page-locking of memory that it may only read."""
        value = ctypes.c_int()
        ask = None if self._library is None else self._library.cudaDeviceGetAttribute
        if ask is None or ask(ctypes.byref(value), ctypes.c_int(_READ_ONLY_SUPPORTED), ctypes.c_int(self.device.index)):
            return False
        return bool(value.value)

    def unregister(self, address: int) -> None:
        def unlock() -> None:
            with torch.cuda.device(self.device):
                self._check(self._runtime.cudaHostUnregister(address), "let go of page-locked host memory")

        _registrations.remove(address, unlock)

    def _check(self, code: Any, what: str) -> None:
        if int(code):
            if self._library is not None:
                self._library.cudaGetLastError()  # not sticky: it must not surface in the next launch of torch
            raise TransportError(f"CUDA could not {what}: {self._runtime.cudaGetErrorString(code)} ({int(code)})")
