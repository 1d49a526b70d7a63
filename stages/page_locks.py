"""Host memory that a device reads by itself: page-locked where it lies, once, and let go of at the end.

Page-locking memory that exists is seven times as fast as allocating page-locked memory and needs no copy afterwards, but it
works in pages, and not for all memory. What cannot be locked, or is too small to be worth it, goes through a pool.
"""

from __future__ import annotations

import mmap

import torch

from .device import Device
from .errors import TransportError

WORTH_NBYTES = 1 << 20
"""Storages smaller than this are not locked: pages are shared with what lies beside them, and a copy costs less."""


class PageLocks:
    """Storages of host tensors that are page-locked in place. Off the loop: locking runs at 19 GB/s.

    A storage is locked once, however many tensors lie in it and however often it is asked for, and kept alive until it is
    let go of: so a lock never outlives the memory that it is on.

    Attributes:
        locked_nbytes: bytes of all storages that are locked here now.
        refused: storages that CUDA would not lock, and why: they go through the pool.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self.locked_nbytes = 0
        self.refused: dict[int, str] = {}

    def lock(self, tensor: torch.Tensor) -> bool:
        """Whether a device can read ``tensor`` (on the CPU) by itself from now on."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._held and self._held[address][0] >= nbytes:
            return True
        if self._device.is_pinned(tensor):
            return True
        if nbytes < WORTH_NBYTES or address in self.refused or self._overlaps(address, nbytes):
            return False
        try:
            self._device.register(address, nbytes)
        except TransportError as error:
            self.refused[address] = str(error)
            return False
        self._held[address] = (nbytes, storage)
        self.locked_nbytes += nbytes
        return True

    def _overlaps(self, address: int, nbytes: int) -> bool:
        """Whether some page of this memory is locked already as part of other memory: it cannot be locked twice."""
        first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
        return any(
            held // mmap.PAGESIZE <= last and (held + size - 1) // mmap.PAGESIZE >= first
            for held, (size, _) in self._held.items()
        )

    def close(self) -> list[str]:
        """Let go of everything; what could not be let go of, in words."""
        held, self._held = self._held, {}
        self.locked_nbytes = 0
        problems = []
        for address in held:
            try:
                self._device.unregister(address)
            except TransportError as error:
                problems.append(str(error))
        return problems
