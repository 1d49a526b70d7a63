"""Membership in a weight-update group as other frameworks make it: SGLang's ``/init_weights_update_group`` and its kin.

Those groups come from a function that many frameworks have copied, ``init_custom_process_group``: a `TCPStore` that rank 0
hosts, under the prefixes of the group's name, and torch's own process group over it. A member made here meets theirs and
touches nothing of this process's default group.

    store = await HostedStore.listen("127.0.0.1")             # at rank 0
    place = Place(name="weights", host=store.host, port=store.port, rank=0, world_size=2)
    group, _ = await asyncio.gather(UpdateGroup.join(place, timeout_s=30), tell_the_others(place))
    await group.broadcast(tensor)                               # from rank 0 to all; every member calls it, in one order
    await group.close()

Only broadcasts from rank 0, of bytes: what the others see as a tensor of some type is here the same memory as uint8. After
any error a group is of no use; it is closed, and another one is made.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Coroutine
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from syncline.engine.errors import ConfigError
from syncline.stages.closing import uninterrupted
from syncline.stages.completions import Signal, gloo_text
from syncline.stages.errors import TransportError
from syncline.stages.workers import call_in_thread

from .update_group_meeting import Backend, HostedStore, Place, meet

__all__ = ["Backend", "HostedStore", "Place", "UpdateGroup", "with_theirs"]

T = TypeVar("T")

_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)
_CUT_AGAIN_S = 0.05
_NOTICE_S = 1.0
_LONGEST_S = 86_400.0


class _Broadcast(NamedTuple):
    """Bytes on their way. Holds the tensor: the backend reads or writes it until its work has ended."""

    what: str
    tensor: torch.Tensor
    until: float
    patience_s: float
    signal: Signal[None]


class UpdateGroup:
    """One member. Made by `join`; lives on the event loop that called it.

    Attributes:
        place: which group, and who in it.
    """

    def __init__(self, place: Place, group: Any, store: c10d.Store) -> None:
        self.place = place
        self._group: Any = group
        self._store: c10d.Store | None = store  # must outlive the group
        self._until = float("inf")
        self._broken = threading.Event()
        self._reason = "it was closed"
        self._queue: SimpleQueue[_Broadcast | None] = SimpleQueue()
        self._closing: Signal[None] | None = None
        self._thread = threading.Thread(target=self._run, name="syncline-update-group", daemon=True)
        self._thread.start()
        # A daemon thread that is still inside gloo when the interpreter ends takes the process down with it.
        atexit.register(self._tear_down)

    @classmethod
    async def join(cls, place: Place, *, timeout_s: float, bind_host: str | None = None) -> UpdateGroup:
        """Meet the other members. Cancelled, it waits for nobody any more.

        Args:
            bind_host: address of this machine that the others reach; None takes the one from which rank 0 is reached.

        Raises:
            ConfigError: the place is none; lists everything.
            TransportError: the members have not met within ``timeout_s`` seconds.
        """
        problems = place.problems()
        if problems:
            raise ConfigError(problems)
        cancelled = threading.Event()
        meeting = call_in_thread(lambda: meet(place, timeout_s, bind_host, cancelled), name="syncline-update-group-make")
        try:
            group, store = await meeting
        except asyncio.CancelledError:
            cancelled.set()
            with contextlib.suppress(TransportError, TimeoutError):  # it notices at once, while the store is still there
                async with asyncio.timeout(_NOTICE_S):
                    await meeting
            raise
        return cls(place, group, store)

    @property
    def usable(self) -> bool:
        """False after the first error, and once it is closed."""
        return not self._broken.is_set()

    def set_deadline(self, timeout_s: float) -> None:
        """Broadcasts started from now on fail ``timeout_s`` seconds from now, and the group with them."""
        self._until = time.monotonic() + timeout_s

    def broadcast(
        self, tensor: torch.Tensor, *, patience_s: float = _LONGEST_S, room: torch.Tensor | None = None
    ) -> Signal[None]:
        """Send (at rank 0) or receive (elsewhere) a contiguous tensor, after the broadcasts before it. Never blocks.

        Exactly the tensor's bytes travel: the others must call with as many. It must not change, or be used, until the signal
        has ended; then it holds rank 0's bytes. Fails with `TransportError`.

        Args:
            tensor: any type and shape, in CPU memory (with ``nccl`` it passes through the device), or on the device.
            patience_s: longest time from the end of the broadcast before it, in seconds; see also `set_deadline`.
            room: bytes from the tensor's start on that may be written, where rank 0 is not trusted to send exactly the tensor's
                bytes: gloo ends this process if more come than fit. Not for a member that passes broadcasts on to others.
        """
        signal: Signal[None] = Signal()
        if not self.usable:
            signal.fail(TransportError(self._unusable()))
        elif not tensor.is_contiguous():
            signal.fail(TransportError("a tensor that is not contiguous cannot be broadcast; make it contiguous first"))
        else:
            what = f"broadcast of {tensor.nbytes} bytes in group {self.place.name!r}"
            roomy = room is not None and self.place.backend == "gloo" and not self._passes_on()
            data = room if room is not None and roomy else tensor.detach().reshape(-1).view(torch.uint8)
            self._queue.put(_Broadcast(what, data, self._until, patience_s, signal))
        return signal

    async def close(self, timeout_s: float = 5.0) -> None:
        """Abort what is under way, at the other members, too. Returns when done, or after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.abort()

    def abort(self) -> Signal[None]:
        """Start closing; the signal ends when nothing is under way and all memory is let go. Idempotent."""
        self._broken.set()
        if self._closing is None:
            self._closing = call_in_thread(self._tear_down, name="syncline-update-group-close")
        return self._closing

    def _unusable(self) -> str:
        return f"the group {self.place.name!r} is of no use any more ({self._reason}); make a new one"

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if self._broken.is_set():
                    raise RuntimeError(self._unusable())
                self._carry_out(job)
            except RuntimeError as error:
                self._fail(job, error)
            else:
                job.signal.set_threadsafe()
            del job

    def _carry_out(self, job: _Broadcast) -> None:
        until = min(job.until, time.monotonic() + job.patience_s)
        left = timedelta(seconds=max(0.001, min(until - time.monotonic(), _LONGEST_S)))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = left
        if self.place.backend == "gloo":
            self._group.broadcast([job.tensor], options).wait(left)
            return
        data = job.tensor.to("cuda")
        work = self._group.broadcast([data], options)
        while not work.is_completed():
            if self._broken.wait(0.001) or time.monotonic() > until:
                raise RuntimeError("it was not done before its deadline")
        work.wait()
        if data is not job.tensor:
            job.tensor.copy_(data)

    def _fail(self, job: _Broadcast, error: RuntimeError) -> None:
        text = gloo_text(error)
        if not self._broken.is_set():
            self._reason = text
            self._broken.set()
            self._cut()
        job.signal.fail_threadsafe(TransportError(f"{job.what}, as rank {self.place.rank} of {self.place.world_size}: {text}"))

    def _passes_on(self) -> bool:
        """Broadcasts of gloo form a binomial tree: rank r passes on to r + 2**i for every 2**i above r."""
        step = 1
        while step <= self.place.rank:
            step *= 2
        return self.place.rank + step < self.place.world_size

    def _cut(self) -> None:
        """Close the connections to all members, so that what is under way fails now: in gloo, by a wait that times out."""
        if self.place.backend == "nccl":
            self._group.abort()
            return
        for peer in range(self.place.world_size):
            if peer != self.place.rank:
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_ABORT_WAIT)

    def _tear_down(self) -> None:
        self._broken.set()
        self._queue.put(None)
        while self._group is not None and self._thread.is_alive():
            self._cut()  # again and again: a broadcast may begin just after a cut
            self._thread.join(_CUT_AGAIN_S)
        self._group = None
        self._store = None
        atexit.unregister(self._tear_down)


async def with_theirs(ours: Coroutine[Any, Any, T], theirs: Coroutine[Any, Any, None], *, last_word_s: float = 0.0) -> T:
    """Our side and the server's, at the same time: a collective returns on neither before both have entered it.

    Returns what our side does. When one fails the other is not waited for, since it may never end; a group that our side has
    made by then is closed.

    Args:
        last_word_s: how long the server may take, after our side has failed, to say how it saw that, in seconds.
    """
    mine, server = asyncio.create_task(ours), asyncio.create_task(theirs)
    try:
        await asyncio.wait({mine, server}, return_when=asyncio.FIRST_EXCEPTION)
        if not server.done():
            await asyncio.wait({server}, timeout=last_word_s)
        if server.done():
            server.result()  # the server's own words say more
        return mine.result()
    except BaseException:
        await uninterrupted(_neither(mine, server))
        raise


async def _neither(mine: asyncio.Task[Any], server: asyncio.Task[Any]) -> None:
    for task in (mine, server):
        task.cancel()
    await asyncio.wait({mine, server})
    for task in (mine, server):
        made = None if task.cancelled() or task.exception() else task.result()
        if isinstance(made, UpdateGroup):  # nobody else knows of it
            await made.close()
