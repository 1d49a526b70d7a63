"""Landing buffers of ``staged`` and ``mapped`` on the source: which one a push may write, and who holds on to which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import torch

from syncline.scheduler.programs import ReceiverId, SourceTask

from ..completions import Signal
from ..errors import TransportError
from ..workers import Workers
from .base import LandingMode, Loan
from .shared_memory import Segment, made

MAX_BUFFERS = 4
"""Landing buffers that one source rank has at most."""

_ASK_AGAIN_S = 0.01  # a lease may end without a message: its holder's last process has died


class _Place:
    """A bucket's place in a landing buffer, on loan."""

    def __init__(self, landing: LandingBuffers, number: int, memory: torch.Tensor) -> None:
        self.memory = memory
        self._landing = landing
        self._number = number
        self._out = True

    def launched(self) -> None:
        """Memory of the host is written when the host says so."""

    def release(self) -> None:
        if not self._out:
            raise ValueError("a place in landing memory was released twice")
        self._out = False
        self._landing.writers[self._number] -= 1


class LandingBuffers:
    """The landing buffers of one source rank.

    Args:
        nbytes: size of the landing space.
        mode: ``mapped`` keeps two buffers (receivers serve from one), ``staged`` one.
        workers: where memory is allocated and touched.
        holders: says which linked receivers hold a lease on a buffer, by its number.
        drop: gives receivers up.
        retired: called with the number of a buffer that is let go.

    Attributes:
        segments: the buffers, least recently used first.
        writers: buckets on loan in each buffer: work of a failed push may still write there.
    """

    def __init__(
        self,
        nbytes: int,
        mode: LandingMode,
        workers: Workers,
        *,
        holders: Callable[[int], set[ReceiverId]],
        drop: Callable[[set[ReceiverId]], None],
        retired: Callable[[int], None],
    ) -> None:
        self._nbytes = nbytes
        self._kept = 2 if mode == "mapped" else 1
        self._workers = workers
        self._holders = holders
        self._drop = drop
        self._retired = retired
        self._numbers = count(1)
        self._released = asyncio.Event()
        self._current: Segment | None = None
        self.segments: list[Segment] = []
        self.writers: dict[int, int] = {}

    @property
    def current(self) -> Segment | None:
        """The buffer of the push that began last."""
        return self._current

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(segment.nbytes for segment in self.segments)

    async def fill_up(self) -> None:
        """Allocate what pushes will need."""
        self._retire()
        while len(self.segments) < self._kept:
            await self._add()

    async def choose(self, timeout_s: float) -> Segment:
        """The buffer for the next push: one that nobody reads or writes any more.

        Waits ``timeout_s`` seconds for receivers that hold more than their share (one buffer to serve from in ``mapped``);
        then allocates another buffer; with `MAX_BUFFERS` there already, first drops those receivers, or those that hold
        the buffer that was used longest ago. What a dropped receiver holds is left to it.
        """
        segment = await self._wait_for_free(timeout_s)
        if segment is None:
            if len(self.segments) >= MAX_BUFFERS:
                self._make_room()
            segment = await self._add()
        self.segments.remove(segment)
        self.segments.append(segment)
        self._current = segment
        return segment

    def claim(self, task: SourceTask) -> Signal[Loan]:
        """The task's place in the buffer of the current push."""
        signal: Signal[Loan] = Signal()
        if self._current is None:
            signal.fail(TransportError(f"task {task.index}: no push has begun on this transport"))
            return signal
        number = self._current.number
        self.writers[number] += 1
        memory = self._current.memory[task.landing_offset : task.landing_offset + task.nbytes]
        signal.set(_Place(self, number, memory))
        return signal

    def released(self) -> None:
        """Some receiver has released a lease, or is gone."""
        self._released.set()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments.clear()
        self._current = None

    async def _wait_for_free(self, timeout_s: float) -> Segment | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            self._retire()
            for segment in self.segments:
                if not self.writers[segment.number] and not segment.is_leased():
                    return segment
            late = self._hoarders() or any(self.writers[segment.number] for segment in self.segments)
            if len(self.segments) < self._kept or loop.time() >= until or not late:
                return None
            self._released.clear()
            try:
                async with asyncio.timeout(min(_ASK_AGAIN_S, until - loop.time())):
                    await self._released.wait()
            except TimeoutError:
                continue

    def _retire(self) -> None:
        """Let go of buffers that are leased by nobody we know: a dropped receiver may serve from one for ever."""
        for segment in [s for s in self.segments if not self._holders(s.number) and s.is_leased()]:
            segment.close()
            self.segments.remove(segment)
            self._retired(segment.number)

    def _hoarders(self) -> set[ReceiverId]:
        held = [receiver for segment in self.segments for receiver in self._holders(segment.number)]
        return {receiver for receiver in held if held.count(receiver) > self._kept - 1}

    def _make_room(self) -> None:
        self._drop(self._hoarders() or self._holders(self.segments[0].number))
        self._retire()
        if len(self.segments) >= MAX_BUFFERS:
            raise TransportError(
                f"all {MAX_BUFFERS} landing buffers of {self._nbytes} bytes are still being written by an earlier push"
            )

    async def _add(self) -> Segment:
        segment = await made(self._workers, next(self._numbers), self._nbytes)
        self.segments.append(segment)
        self.writers[segment.number] = 0
        return segment
