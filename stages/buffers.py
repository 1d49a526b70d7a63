"""Temporary memory: one block of bytes, touched when it is made, from which buckets and messages are cut.

Memory is handed out strictly in the order of requests and comes back by `Buffer.release` only, never because a reference
went away: a send or a receive that is still under way may use memory that no Python object names any more. Every buffer
has a *generation*, so that a late release of an earlier use of the same bytes cannot free a later one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import torch

from syncline.scheduler.programs import ALIGN

from .completions import Signal
from .errors import TransportError


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of buffers."""
    return -(-nbytes // ALIGN) * ALIGN


class Buffer:
    """Bytes on loan from a `BufferPool`.

    Attributes:
        memory: 1-d uint8 tensor of the size asked for.
        offset: where it lies in the pool's memory, in bytes.
        generation: counts uses of the pool; no two buffers of a pool have the same.
    """

    __slots__ = ("_pool", "generation", "memory", "offset")

    def __init__(self, pool: BufferPool, memory: torch.Tensor, offset: int, generation: int) -> None:
        self._pool = pool
        self.memory = memory
        self.offset = offset
        self.generation = generation

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def launched(self) -> None:
        """Private memory, and the host's, is written when the host says so."""

    def release(self) -> None:
        """Give the bytes back, once nothing uses them any more. `ValueError` if they were given back before."""
        self._pool.take_back(self)


class BufferPool:
    """A fixed block of memory, cut by first fit.

    Args:
        memory: 1-d uint8 tensor that the pool takes over: private memory, or shared memory of a transport.

    Attributes:
        capacity: bytes in all.
        device: where they are.
        in_use: bytes on loan now, as asked for.
        peak: the most bytes on loan at once since the last `reset_peak`.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.device = memory.device
        self.capacity = memory.numel()
        self.in_use = 0
        self.peak = 0
        self._holes: list[tuple[int, int]] = [(0, self.capacity)]
        self._loans: dict[int, int] = {}
        self._waiting: deque[tuple[int, Signal[Buffer]]] = deque()
        self._generation = 0
        self._closed: TransportError | None = None
        self._serving = False

    @classmethod
    def private(cls, capacity: int) -> BufferPool:
        """A pool of the process's own memory, touched here so that the first push finds it mapped. Blocks for that long."""
        return cls(torch.empty(aligned(capacity), dtype=torch.uint8).fill_(0))

    def acquire(self, nbytes: int) -> Signal[Buffer]:
        """A buffer, as soon as there is room for it and every request before this one has been served.

        The signal fails with `TransportError` if the pool is too small for it ever, or closed while it waits.
        """
        signal: Signal[Buffer] = Signal()
        if self._closed is not None:
            signal.fail(self._closed)
        elif aligned(nbytes) > self.capacity:
            signal.fail(
                TransportError(f"a buffer of {nbytes} bytes was asked of a pool of {self.capacity}; raise max_tmp_bytes")
            )
        else:
            self._waiting.append((nbytes, signal))
            self._serve()
        return signal

    def close(self) -> None:
        """Fail all requests that wait, and let go of the memory. Buffers on loan stay valid and may be given back."""
        self._closed = TransportError("the buffer pool is closed")
        self._memory = self._memory.new_empty(0)
        while self._waiting:
            self._waiting.popleft()[1].fail(self._closed)

    def reset_peak(self) -> None:
        self.peak = self.in_use

    def _serve(self) -> None:
        if self._serving:  # whoever was served has given back at once: the loop that serves it goes on with that
            return
        self._serving = True
        try:
            while self._waiting:
                nbytes, signal = self._waiting[0]
                offset = self._cut(aligned(nbytes))
                if offset is None:
                    return
                self._waiting.popleft()
                signal.set(self._lend(offset, nbytes))
        finally:
            self._serving = False

    def _lend(self, offset: int, nbytes: int) -> Buffer:
        self._generation += 1
        self._loans[self._generation] = nbytes
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        return Buffer(self, self._memory[offset : offset + nbytes], offset, self._generation)

    def _cut(self, nbytes: int) -> int | None:
        for index, (start, size) in enumerate(self._holes):
            if size >= nbytes:
                if size == nbytes:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + nbytes, size - nbytes)
                return start
        return None

    def take_back(self, buffer: Buffer) -> None:
        """`Buffer.release`."""
        nbytes = self._loans.pop(buffer.generation, None)
        if nbytes is None:
            raise ValueError(f"buffer {buffer.generation} of {buffer.nbytes} bytes was released twice")
        self.in_use -= nbytes
        insort(self._holes, (buffer.offset, aligned(nbytes)))
        self._join_holes()
        self._serve()

    def _join_holes(self) -> None:
        joined: list[tuple[int, int]] = []
        for start, size in self._holes:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            elif size:
                joined.append((start, size))
        self._holes = joined
