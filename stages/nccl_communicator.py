"""A NCCL communicator of our own: point-to-point bytes of device memory among a few ranks, apart from the trainer's groups.

As `syncline.stages.communicator` for gloo, with the same methods (but for the barrier, which is gloo's). All NCCL calls of a
device are made by one thread, `Issuer`: NCCL does not like two, and the order of operations has to be the same on all ranks
that share communicators (`Issuer.expect`). Communicators are made non-blocking, so that thread never waits for a peer.

Not `torch.distributed.ProcessGroupNCCL`: its watchdog ends the process over a peer that stalls, which is for the trainer's own
groups to decide and not for weights that are sent on the side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

import torch

from .completions import Signal
from .errors import TransportError
from .issuing import Issuing, Key, Link, Message, NcclRuntime, Operation
from .rendezvous import Rendezvous
from .workers import call_in_thread

log = logging.getLogger("syncline.stages")

_ASK_S = 100e-6
_LONGEST_S = 86_400.0
_GREETING = -1


class Issuer:
    """The one thread that makes NCCL calls for a device. Runs while there are communicators, from the first to the last."""

    def __init__(self, runtime: NcclRuntime, clock: Callable[[], float] = time.monotonic) -> None:
        self.runtime = runtime
        self.clock = clock
        self._lock = threading.Lock()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._machine = Issuing(runtime, self._start_abort)
        self._running = False

    def expect(self, steps: Iterable[Iterable[Key]]) -> None:
        """The messages of the push that begins, in the plan's order; see `syncline.stages.issuing.IssueOrder`."""
        wanted = [frozenset(step) for step in steps]
        self._tell(lambda: self._machine.expect(wanted))

    def make(self, link: Link) -> None:
        self._tell(lambda: self._machine.make(link))

    def submit(self, operation: Operation) -> None:
        self._tell(lambda: self._machine.submit(operation))

    def give_up(self, link: Link, error: TransportError) -> None:
        self._tell(lambda: self._machine.give_up(link, error))

    def _tell(self, command: Callable[[], None]) -> None:
        with self._lock:
            self._commands.put(command)
            if not self._running:
                threading.Thread(target=self._run, name="syncline-nccl", daemon=True).start()
                self._running = True  # not before: if there is no thread now, the next command asks for one again

    def _run(self) -> None:
        machine = self._machine
        while True:
            try:
                with contextlib.suppress(Empty):
                    self._commands.get(timeout=_ASK_S if machine.busy else None)()
                    while True:
                        self._commands.get_nowait()()
                machine.turn(self.clock())
            except Exception as error:  # nobody may be left to wait for a thread that has ended
                log.exception("the thread that makes NCCL calls failed; its communicators are aborted")
                machine.give_up_all(TransportError(f"the thread that makes NCCL calls failed: {error!r}"))
            with self._lock:
                if machine.idle and self._commands.empty():
                    self._running = False
                    return

    def _start_abort(self, link: Link) -> None:
        def abort() -> None:
            try:
                if link.communicator is not None:
                    self.runtime.abort(link.communicator)
            except (TransportError, RuntimeError) as error:  # the device is lost, and nothing on it is used any more
                log.warning("%s: its communicator could not be aborted: %s", link.label, error)
            finally:
                self._tell(lambda: self._machine.aborted(link))

        try:
            threading.Thread(target=abort, name="syncline-nccl-abort", daemon=True).start()
        except RuntimeError:  # there is no thread to be had: others wait a while, but nobody for ever
            abort()


class NcclCommunicator:
    """Made by `create`. `send` and `recv` are called on the loop and never block.

    Attributes:
        rank, size: this rank among the members.
        usable: False after the first error or `close`.
    """

    def __init__(self, issuer: Issuer, label: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.label = label
        self._issuer = issuer
        self._loop = asyncio.get_running_loop()
        self._until = float("inf")
        self._made: Signal[None] = Signal()
        self._closed: Signal[None] = Signal()
        self._broken = threading.Event()
        self._link: Link | None = None

    @classmethod
    async def create(
        cls, rendezvous: Rendezvous, *, issuer: Issuer, name: str, label: str, rank: int, size: int, timeout_s: float,
        device: torch.device, one_way: bool = False,
    ) -> NcclCommunicator:  # fmt: skip
        """Meet the other members under ``name``. All members call it; it returns when all connections stand.

        Args:
            label: what it is for on this rank, unique among the communicators of ``issuer``.
            one_way: rank 0 sends to the others, and nothing else is ever sent.

        Raises `TransportError` if they have not met within ``timeout_s`` seconds.
        """
        one = cls(issuer, label, rank, size)
        until = issuer.clock() + timeout_s

        joined: list[Rendezvous] = []
        cancelled = threading.Event()

        def identity() -> bytes:
            mine = Rendezvous.join(rendezvous.endpoint, timeout_s=timeout_s)
            joined.append(mine)
            try:
                return _identity(mine, issuer.runtime, name, rank=rank, size=size, cancelled=cancelled)
            finally:
                mine.close()

        try:
            async with asyncio.timeout(timeout_s):
                unique_id = await call_in_thread(identity, name="syncline-nccl-meet")
                one._start_making(unique_id, until)
                await one._made
                one.set_deadline(until - issuer.clock())
                await one._greet(device, one_way)
        except BaseException as error:
            cancelled.set()
            for client in joined:
                client.interrupt()
            _ = one.abort()
            if isinstance(error, TimeoutError):
                raise TransportError(f"rank {rank} of {size} did not meet the others within {timeout_s:g} s") from None
            raise
        one._until = float("inf")
        return one

    @property
    def usable(self) -> bool:
        return not self._broken.is_set()

    def set_deadline(self, timeout_s: float) -> None:
        """Operations started from now on fail ``timeout_s`` seconds from now, and the communicator with them."""
        self._until = self._issuer.clock() + max(0.001, min(timeout_s, _LONGEST_S))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Signal[None]:
        """Send a contiguous uint8 tensor of device memory that is written already. It must not change until the end."""
        return self.send_all([tensor], peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Signal[None]:
        """Receive exactly ``tensor.numel()`` bytes. The tensor must not be used until the signal has ended."""
        return self.recv_all([tensor], peer, tag)

    def send_all(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        """Send several, in order; the signal ends with the last.

        NCCL has no tags: messages between two ranks go in the order that `Issuer.expect` was told, or in that of the calls.
        """
        return self._start(True, tensors, peer, tag)

    def recv_all(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        """Receive several messages of one tag, in order; the signal ends with the last."""
        return self._start(False, tensors, peer, tag)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Abort everything under way. Returns when done, or after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.abort()

    def abort(self) -> Signal[None]:
        """Start closing; the signal ends when nothing is under way any more and all memory is let go. Idempotent."""
        self._broken.set()
        if self._link is None:
            self._closed.set()
        else:
            self._issuer.give_up(self._link, TransportError("the communicator was closed"))
        return self._closed

    def _start_making(self, unique_id: bytes, until: float) -> None:
        self._link = Link(
            label=self.label, size=self.size, rank=self.rank, unique_id=unique_id, until=until,
            made=self._made.set_threadsafe, failed=self._failed,
        )  # fmt: skip
        self._issuer.make(self._link)

    def _failed(self, error: TransportError) -> None:
        """On the issuer's thread: nothing of this communicator is under way any more."""
        self._broken.set()
        self._made.fail_threadsafe(error)
        self._closed.set_threadsafe()

    async def _greet(self, device: torch.device, one_way: bool) -> None:
        """A byte over every connection: NCCL makes each when it is first used, and would wait for its peer then."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [peer for peer in others if not one_way or self.rank == 0]
        recvs = [peer for peer in others if not one_way or peer == 0]
        scratch = torch.zeros(2 * self.size, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            await call_in_thread(torch.cuda.current_stream(device).synchronize, name="syncline-nccl-scratch")
        messages = [_message(True, scratch[peer : peer + 1], peer) for peer in sends]
        messages += [_message(False, scratch[self.size + peer : self.size + peer + 1], peer) for peer in recvs]
        if messages:
            await self._issue(Key(self.label, True, _GREETING, _GREETING), messages, scratch)

    def _start(self, sends: bool, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Signal[None]:
        messages = [_message(sends, tensor, peer) for tensor in tensors if tensor.numel()]
        return self._issue(Key(self.label, sends, peer, tag), messages, tuple(tensors))

    def _issue(self, key: Key, messages: Sequence[Message], keep: object) -> Signal[None]:
        signal: Signal[None] = Signal()
        if self._link is None or not self.usable:
            signal.fail(TransportError("the communicator is closed, or an operation on it has failed; connect again"))
            return signal
        done = partial(self._done, signal)
        self._issuer.submit(Operation(self._link, key, messages, self._until, done, keep))
        return signal

    def _done(self, signal: Signal[None], error: TransportError | None) -> None:
        if error is None:
            signal.set_threadsafe()
        else:
            self._broken.set()
            signal.fail_threadsafe(error)


def _identity(
    rendezvous: Rendezvous, runtime: NcclRuntime, name: str, *, rank: int, size: int, cancelled: threading.Event
) -> bytes:
    """The identity of a communicator: rank 0 makes it and tells the others, once all have come. Blocks.

    NCCL waits for the ranks of an identity without end, with a thread and sockets of its own: none is made for those who do not
    come, nor by one whom nobody waits for any more.
    """
    try:
        if cancelled.is_set():
            raise RuntimeError("nobody wants to join any more")
        if rank == 0:
            rendezvous.store.wait([f"{name} {other}" for other in range(1, size)])
            if cancelled.is_set():
                raise RuntimeError("nobody wants to join any more")
            unique_id = runtime.unique_id()
            rendezvous.store.set(name, unique_id.hex())
            return unique_id
        rendezvous.store.set(f"{name} {rank}", "here")
        return bytes.fromhex(rendezvous.store.get(name).decode())
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"rank {rank} did not meet the others: {error}") from error


def _message(sends: bool, tensor: torch.Tensor, peer: int) -> Message:
    return Message(sends, tensor.data_ptr(), tensor.numel() * tensor.element_size(), peer)
