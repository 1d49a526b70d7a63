"""What a task holds while it is in flight: its bucket, its messages, its copies out of mapped files.

Everything is asked for at once, when the task's first stage starts: one request to the rank's private memory, sized before,
and one to the transport in whose memory the bucket has to lie. First stages start in plan order and each of the two serves its
requests in order, so what a task waits for is only ever held by earlier ones, which can go on without it. Asked for later, the
bucket's memory could go to tasks behind it, which are not sent before it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from syncline.scheduler.programs import ReceiverId, SourceTask

from .buffers import Buffer, BufferPool, aligned
from .completions import Signal
from .transports.base import Loan, Sender

Key = tuple[int, int]
"""(push, task): work of a failed push may still hold memory when the same task runs in the next push."""


class Layout(NamedTuple):
    """How a task's private memory is cut, in bytes from its start (each part aligned).

    Attributes:
        files: bytes of copies out of mapped files, at the start.
        messages: start of each message's memory, -1 for one that needs none.
        bucket: start of the bucket if it is taken from private memory.
        without_bucket, with_bucket: bytes in all.
        assembles: the rank makes the bucket; others contribute to it.
    """

    files: int
    messages: tuple[int, ...]
    bucket: int
    without_bucket: int
    with_bucket: int
    assembles: bool

    @classmethod
    def of(cls, files: int, messages: tuple[int, ...], bucket: int | None) -> Layout:
        """Cut memory for ``files`` bytes, ``messages`` (bytes of each, -1 for one that needs none) and, on its owner, a
        ``bucket``.
        """
        at, starts = aligned(files), []
        for nbytes in messages:
            starts.append(-1 if nbytes < 0 else at)
            at += aligned(max(nbytes, 0))
        return cls(files, tuple(starts), at, at, at + aligned(bucket or 0), bucket is not None)


class Holding:
    """The memory of one task of one push.

    Attributes:
        bucket: where the bucket is assembled (1-d uint8, as long as the bucket), once claimed; None for contributors.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.bucket: torch.Tensor | None = None
        self.private: Signal[Buffer] | None = None
        self.shared: Signal[Loan] | None = None

    def message(self, number: int, nbytes: int) -> torch.Tensor:
        """Memory of message ``number``."""
        start = self.layout.messages[number]
        return self._private()[start : start + nbytes]

    def files(self) -> torch.Tensor | None:
        """Memory for copies out of mapped files; None if the task has none."""
        return self._private()[: self.layout.files] if self.layout.files else None

    def memory(self) -> torch.Tensor | None:
        """All private memory of the task; None if it has none."""
        return None if self.private is None else self._private()

    def _private(self) -> torch.Tensor:
        if self.private is None:
            raise ValueError("this task has no private memory")
        return self.private.result.memory

    def launched(self) -> None:
        """The bucket is being written by what was launched on the calling thread's stream: see `Loan.launched`."""
        if self.shared is not None:
            self.shared.result.launched()

    def release(self) -> None:
        """Give everything back. Only when nothing of the task is in flight."""
        if self.private is not None:
            _give_back(self.private)
        if self.shared is not None:
            _give_back(self.shared)
        self.private = self.shared = self.bucket = None


def _give_back(signal: Signal[Buffer] | Signal[Loan]) -> None:
    if not signal.done:  # the request still waits: give the memory back as soon as it comes
        signal.subscribe(lambda: _give_back(signal))
    elif signal.error is None:
        signal.result.release()


class TaskMemory:
    """The holdings of all tasks in flight on one source rank. Outlives pushes.

    Args:
        pool: private memory, of `private_capacity`.
        routes: which sender serves each receiver. Buckets with a receiver over shared memory are assembled there.
    """

    def __init__(self, pool: BufferPool, routes: Mapping[ReceiverId, Sender]) -> None:
        self.pool = pool
        self._in_place = {receiver: sender for receiver, sender in routes.items() if sender.in_place}
        self._holdings: dict[Key, Holding] = {}

    @property
    def in_flight(self) -> int:
        """Tasks that hold memory now."""
        return len(self._holdings)

    async def claim(self, key: Key, task: SourceTask, layout: Layout) -> Holding:
        """Ask for all that the task needs, and wait for its private memory. Later calls return the same holding."""
        holding = self._holdings.get(key)
        if holding is None:
            holding = self._holdings[key] = Holding(layout)
            nbytes = self._private_nbytes(task, layout)
            if nbytes:
                holding.private = self.pool.acquire(nbytes)
            home = self._home(task)
            if home is not None and layout.assembles:
                holding.shared = home.claim(task)
        if holding.private is not None:
            await holding.private
        return holding

    async def claim_bucket(self, key: Key, task: SourceTask) -> None:
        """Then, on the owner, wait for the bucket's: of the transport that needs it there, else it lies in private memory."""
        holding = self._holdings[key]
        if holding.shared is not None:
            holding.bucket = (await holding.shared).memory
        elif holding.private is not None:
            start = holding.layout.bucket
            holding.bucket = holding.private.result.memory[start : start + task.nbytes]
        else:
            holding.bucket = torch.empty(0, dtype=torch.uint8, device=self.pool.device)

    def bucket(self, key: Key) -> torch.Tensor:
        """The bucket of a task whose `prepare` is done."""
        bucket = self._holdings[key].bucket
        if bucket is None:
            raise ValueError(f"task {key[1]} of push {key[0]} has no bucket")
        return bucket

    def release(self, push: int, task: int) -> None:
        """Give back what a task holds. Nothing of it may be in flight. A task that holds nothing is fine."""
        holding = self._holdings.pop((push, task), None)
        if holding is not None:
            holding.release()

    def _private_nbytes(self, task: SourceTask, layout: Layout) -> int:
        return layout.without_bucket if self._home(task) is not None else layout.with_bucket

    def _home(self, task: SourceTask) -> Sender | None:
        """The sender in whose memory the bucket has to lie, by the plan: whether or not its receivers are still there."""
        return next((self._in_place[receiver] for receiver in task.receivers if receiver in self._in_place), None)


def private_capacity(needs: Iterable[tuple[SourceTask, Layout]], watermark: int, *, in_place: Collection[ReceiverId]) -> int:
    """Bytes of private memory to set aside for a rank: what the watermark admits, no more than all tasks need together.

    Args:
        needs: this rank's tasks with their layouts.
        watermark: most temporary bytes of all tasks in flight.
        in_place: receivers whose transport has buckets assembled in its own memory.
    """
    places = frozenset(in_place)
    sizes = [layout.with_bucket if places.isdisjoint(task.receivers) else layout.without_bucket for task, layout in needs]
    return max(min(watermark, sum(sizes)), max(sizes, default=0))
