"""A gloo communicator of our own: point-to-point bytes and barriers among a few ranks, apart from the trainer's groups.

Facts about gloo that shape this module (torch 2.11 to 2.13):

- posting an operation may wait for a lock that gloo's own thread holds while it moves megabytes: operations are posted by
  a thread, in order, never by the event loop;
- point-to-point work says that it is completed only after ``wait()``: one thread waits, first in first out;
- a wait that times out closes the connection to that peer, and every other operation with it fails at once. That is the
  only way to abort work: `close` uses it (a receive that nobody answers, with a timeout of a millisecond);
- so after any error a communicator is of no use. It is closed and another one is made, under another name;
- gloo loses a send whose peer dies at the moment at which gloo's own thread begins to write it: its ``wait`` returns at its
  deadline only, whatever is closed meanwhile. Once connections are closed nothing touches memory any more, so `abort` tells
  those who wait for such an operation that it has failed, and leaves the thread to its wait.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .completions import Signal, WorkCompletion, gloo_text
from .errors import TransportError
from .rendezvous import Rendezvous
from .workers import call_in_thread

__all__ = ["Communicator", "PointToPoint", "Rendezvous", "unique_name"]

_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)
_CUT_AGAIN_S = 0.05
_LOST_AFTER = 10
"""Cuts after which an operation that still has not ended is one that gloo has lost: the others end with the first."""


def unique_name(what: str) -> str:
    """A name for a communicator that no other one has had: stale ranks of an earlier one can't meet those of this."""
    return f"{what}-{secrets.token_hex(8)}"


class PointToPoint(Protocol):
    """What a gather needs of a communicator; `Communicator` is one, for CPU memory."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Signal[None]:
        """Send a contiguous uint8 tensor. It must not change until the signal has ended."""
        ...

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Signal[None]:
        """Receive exactly ``tensor.numel()`` bytes. The tensor must not be used until the signal has ended."""
        ...


class _Operation(NamedTuple):
    """Point-to-point messages on their way. Holds the tensors: gloo reads or writes them until the wait returns."""

    sends: bool
    tensors: Sequence[torch.Tensor]
    peer: int
    member: str
    tag: int
    until: float
    signal: Signal[None]

    def __str__(self) -> str:
        way = "send to" if self.sends else "receive from"
        return f"{way} {self.member} (tag {self.tag}, {sum(tensor.numel() for tensor in self.tensors)} bytes)"


class Communicator:
    """Made by `create`. `send`, `recv` and `barrier` are called on the loop and never block.

    Attributes:
        rank, size: this rank among the members.
        usable: False after the first error or `close`.
    """

    def __init__(self, group: Any, rendezvous: Rendezvous, rank: int, size: int, members: Sequence[str] = ()) -> None:
        self.rank = rank
        self.size = size
        self._members = members or [f"rank {member}" for member in range(size)]
        self._group: Any = group
        self._rendezvous: Rendezvous | None = rendezvous  # a store must outlive the groups made through it
        self._until = float("inf")
        self._broken = threading.Event()
        self._to_post: SimpleQueue[_Operation | None] = SimpleQueue()
        self._to_wait: SimpleQueue[tuple[_Operation, list[Any], RuntimeError | None] | None] = SimpleQueue()
        self._under_way: dict[int, _Operation] = {}
        self._closing: Signal[None] | None = None
        self._poster = threading.Thread(target=self._post, name="syncline-gloo-post", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="syncline-gloo-wait", daemon=True)
        self._poster.start()
        self._waiter.start()
        # A daemon thread that is still inside gloo when the interpreter ends takes the process down with it.
        atexit.register(self._tear_down)

    @classmethod
    async def create(
        cls, rendezvous: Rendezvous, *, name: str, rank: int, size: int, bind_host: str, timeout_s: float,
        members: Sequence[str] = (),
    ) -> Communicator:  # fmt: skip
        """Meet the other members under ``name``. All members call it; it returns when all connections stand.

        ``members``: what errors call them; by default ranks by their number.

        Raises `TransportError` if they have not met within ``timeout_s`` seconds. Cancelled, it waits for nobody any more.
        """
        options = _options(bind_host, timeout_s)
        joined: list[Rendezvous] = []
        cancelled = threading.Event()

        def make() -> tuple[Any, Rendezvous]:
            # a client of its own: one that waits for a key keeps others that share it waiting
            mine = Rendezvous.join(rendezvous.endpoint, timeout_s=timeout_s)
            joined.append(mine)
            if cancelled.is_set():
                raise TransportError("cancelled")
            return _make_group(c10d.PrefixStore(name, mine.store), rank, size, options), mine

        try:
            group, mine = await call_in_thread(make, name="syncline-gloo-make")
        except asyncio.CancelledError:
            cancelled.set()
            for client in joined:
                client.interrupt()
            raise
        return cls(group, mine, rank, size, members)

    @property
    def usable(self) -> bool:
        return not self._broken.is_set()

    def set_deadline(self, timeout_s: float) -> None:
        """Operations started from now on fail ``timeout_s`` seconds from now; the connection to their peer with them."""
        self._until = time.monotonic() + timeout_s

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Signal[None]:
        """Send a contiguous uint8 tensor. It must not change until the signal has ended."""
        return self.send_all([tensor], peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Signal[None]:
        """Receive exactly ``tensor.numel()`` bytes. The tensor must not be used until the signal has ended."""
        return self.recv_all([tensor], peer, tag)

    def send_all(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        """Send several, one message each, in order; the signal ends with the last. Waking the loop once is what that saves."""
        return self._start(True, tensors, peer, tag)

    def recv_all(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        """Receive several messages of one tag, in order; the signal ends with the last."""
        return self._start(False, tensors, peer, tag)

    def barrier(self) -> WorkCompletion | None:
        """Start a barrier of all members (polled); None when there is only one."""
        if self.size == 1:
            return None
        if not self.usable:
            raise TransportError("the communicator is closed, or an operation on it has failed; connect again")
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=max(0.001, min(self._until - time.monotonic(), 86_400.0)))
        return WorkCompletion(self._group.barrier(options), f"the barrier of {self.size} ranks")

    async def close(self, timeout_s: float = 5.0) -> None:
        """Abort everything under way and free threads and sockets. Returns when done, or after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.abort()

    def abort(self) -> Signal[None]:
        """Start closing; the signal ends when nothing is under way any more and all memory is let go. Idempotent."""
        self._broken.set()
        if self._closing is None:
            self._closing = call_in_thread(self._tear_down, name="syncline-gloo-close")
        return self._closing

    def _start(self, sends: bool, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        signal: Signal[None] = Signal()
        if not self.usable:
            signal.fail(TransportError("the communicator is closed, or an operation on it has failed; connect again"))
        else:
            operation = _Operation(sends, tensors, peer, self._members[peer], tag, self._until, signal)
            self._under_way[id(operation)] = operation
            self._to_post.put(operation)
        return signal

    def _post(self) -> None:
        while (operation := self._to_post.get()) is not None:
            works: list[Any] = []
            error: RuntimeError | None = None
            try:
                for tensor in operation.tensors:
                    if self._broken.is_set():
                        raise RuntimeError("the communicator was closed")
                    start = self._group.send if operation.sends else self._group.recv
                    works.append(start([tensor], operation.peer, operation.tag))
            except RuntimeError as raised:
                error = raised
                self._break()
            self._to_wait.put((operation, works, error))  # what was posted is waited for all the same
            del operation, works, error
        self._to_wait.put(None)

    def _wait(self) -> None:
        group = self._group  # outlives a wait that nobody waits for any more
        while (entry := self._to_wait.get()) is not None:
            operation, works, error = entry
            for work in reversed(works):  # they end in order: when the last has, no other has to be slept for
                try:
                    work.wait(timedelta(seconds=max(0.001, min(operation.until - time.monotonic(), 86_400.0))))
                except RuntimeError as raised:
                    error = error or raised
                    self._break()
            if error is None:
                operation.signal.set_threadsafe()
            else:
                operation.signal.fail_threadsafe(TransportError(f"{operation}: {gloo_text(error)}"))
            self._under_way.pop(id(operation), None)
            del entry, operation, works, error
        del group

    def _break(self) -> None:
        if not self._broken.is_set():
            self._broken.set()
            self._cut_all()

    def _cut_all(self) -> None:
        """Close the connections to all peers, so that everything under way fails now and its memory is let go."""
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_ABORT_WAIT)

    def _tear_down(self) -> None:
        self._broken.set()
        self._to_post.put(None)
        left, cuts = -1, 0
        while self._group is not None and (self._poster.is_alive() or self._waiter.is_alive()):
            self._cut_all()  # again and again: an operation may be posted just after a cut
            self._poster.join(_CUT_AGAIN_S)
            self._waiter.join(_CUT_AGAIN_S)
            left, cuts = len(self._under_way), cuts + 1 if left == len(self._under_way) else 0
            if cuts == _LOST_AFTER and not self._poster.is_alive():
                self._give_up()
                break
        self._group = None
        self._rendezvous = None
        atexit.unregister(self._tear_down)

    def _give_up(self) -> None:
        """Gloo has lost what is still under way."""
        for operation in list(self._under_way.values()):
            operation.signal.fail_threadsafe(TransportError(f"{operation}: its connection is closed"))


def _options(bind_host: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - torch offers no other way to choose the address
    options._devices = [gloo.create_device(hostname=bind_host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - threads for collectives, of which we have only barriers
    return options


def _make_group(store: c10d.Store, rank: int, size: int, options: Any) -> Any:
    try:
        return dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise TransportError(f"rank {rank} of {size} did not meet the others: {gloo_text(error)}") from error
