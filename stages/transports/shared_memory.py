"""Shared memory without names: segments that only descriptors lead to, and leases on them that the kernel keeps.

A segment is an anonymous file (``memfd``). Receivers get descriptors through the control channel; when the last process
that holds one is gone, so is the memory, however the processes ended. Its size is sealed, and nobody but the source that
made it can write to it. Receivers map it privately: a stray write there goes to a page of their own.

A lease is a shared ``flock`` on an open file description made for one receiver and one push. The source takes the lock and
hands the description over; it ends when the receiver releases it or its last process is gone. Whether anyone still holds
a lease is asked by trying an exclusive lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import torch

from ..errors import TransportError
from ..workers import Workers

_PAGE = mmap.PAGESIZE
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1


def is_available() -> bool:
    """This kind of shared memory exists here (Linux)."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class Segment:
    """Shared memory that this process writes. Made touched: the first push finds its pages there.

    Attributes:
        number: names it between the two ends of a link.
        memory: 1-d uint8 tensor over it.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        size = max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
        self._fd = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Also where nobody takes it: whoever had it made was cancelled.
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False
        try:
            os.ftruncate(self._fd, size)
            shared = mmap.mmap(self._fd, size)
            self._seal()
        except OSError as error:
            self._close()
            raise TransportError(f"{size} bytes of shared memory could not be had: {error}") from error
        self.memory = torch.frombuffer(shared, dtype=torch.uint8)[:nbytes]
        self.memory.fill_(0)  # touches every page; other threads run meanwhile, which madvise does not let them

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def open_for_reading(self) -> int:
        """A new descriptor, of an open file description of its own, for a receiver to map."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def open_lease(self) -> int:
        """A new descriptor that holds a lease. Hand it over, and close it here."""
        fd = self.open_for_reading()
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def is_leased(self) -> bool:
        """Some process holds a lease."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Let go. The memory lives on where it is mapped. Idempotent."""
        if self._close.alive:
            self._close()
            self._fd = -1
            self.memory = torch.empty(0, dtype=torch.uint8)

    def _seal(self) -> None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        with contextlib.suppress(OSError):  # older kernels: receivers hold read-only descriptors all the same
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)


async def made(workers: Workers, number: int, nbytes: int) -> Segment:
    """A segment, made by a worker. For whoever is cancelled meanwhile it is closed once it is there."""
    making = workers.submit(Segment, number, nbytes)
    try:
        return await making
    except asyncio.CancelledError:
        making.subscribe(lambda: None if making.error is not None else making.result.close())
        raise


class Mapping:
    """A segment as a receiver sees it.

    Attributes:
        memory: 1-d uint8 tensor over it. Keeps the mapping alive, also after `close` of everything else.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        size = max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self.memory[::_PAGE].sum()  # reads one byte a page: the first push finds the pages mapped

    def hold(self, lease_fd: int) -> weakref.finalize[[int], mmap.mmap]:
        """Tie a lease to the mapping: it ends when it is called, or when the last tensor over the mapping is gone."""
        end = weakref.finalize(self._map, end_lease, lease_fd)
        end.atexit = False  # the kernel does it
        return end


def end_lease(fd: int) -> None:
    """Release a lease by its descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # also where the descriptor was inherited
    os.close(fd)
