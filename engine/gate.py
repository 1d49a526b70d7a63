"""The gate between forward passes and commits: many forward passes at once, or one commit and no forward pass.

    with gate.forward() as version:          # from a thread
        logits = model(tokens)
    async with gate.forward() as version:    # from asyncio
        ...

A forward pass that comes while a commit (or a ``streamed`` push) is under way waits for its end; on a fenced target it
raises `NotServing`. A pass that is already running is always let out first: it never sees parameters change.

On a GPU a pass runs on after its call has returned: kernels are only queued then. So the gate is given a ``mark``: a pass
that leaves is over when the device has done what the leaving thread had launched on its current stream. Launch a pass on that
stream, or let that stream wait for it.

In a target of several ranks the passes are started by the leader rank, which is paused first and resumed last. A rank
whose passes were let in while the leader's wait at the gate could not be paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from syncline.stages.watch import Poll, Watch

from .errors import NotServing
from .messages import InFlight


class ForwardPass:
    """One forward pass: a context manager for threads (``with``) and for asyncio (``async with``); gives the version."""

    def __init__(self, gate: Gate, timeout_s: float | None) -> None:
        self._gate = gate
        self._timeout_s = timeout_s

    def __enter__(self) -> int:
        return self._gate.enter(self._timeout_s)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._gate.leave()

    async def __aenter__(self) -> int:
        return await self._gate.enter_async(self._timeout_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave()


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Gate:
    """Readers-writer gate of one rank; implements `syncline.engine.loader.Serving`. Every method may be called from any thread.

    Args:
        version: what forward passes may read from the start; None: the gate starts fenced.
        mark: called by each pass that leaves, on its thread; what it returns says when a device has done what that thread has
            launched (None: at once).
    """

    def __init__(self, *, version: int | None = None, mark: Callable[[], Poll | None] = lambda: None) -> None:
        self._changed = threading.Condition()
        self._mode: Literal["open", "paused", "fenced"] = "fenced" if version is None else "open"
        self._version = version
        self._reason = "nothing was committed yet"
        self._inside = 0
        self._mark = mark
        self._launched: deque[Poll] = deque()  # what passes that have left may still have under way on a device
        self._waiting: set[Callable[[], None]] = set()

    @property
    def version(self) -> int | None:
        """The version that a forward pass started now would read; None while paused or fenced."""
        with self._changed:
            return self._version if self._mode == "open" else None

    @property
    def inside(self) -> int:
        """Forward passes that are running."""
        with self._changed:
            return self._inside

    def forward(self, timeout_s: float | None = None) -> ForwardPass:
        """One forward pass: a context manager that gives the version it reads.

        Args:
            timeout_s: longest wait for a commit under way, in seconds. None waits; a commit ends by its own deadline.

        Raises:
            NotServing: (on entering) the target is fenced, or the wait was too long.
        """
        return ForwardPass(self, timeout_s)

    def enter(self, timeout_s: float | None = None) -> int:
        """Begin a forward pass from a thread; `leave` ends it. On an event loop it never waits: see `enter_async`."""
        with self._changed:
            if self._mode == "paused" and _on_a_loop():
                # Waiting here would stop the very loop that has to carry the commit out.
                raise NotServing("a commit is under way, and this is an event loop: use 'async with gate.forward()' on it")
            if not self._changed.wait_for(lambda: self._mode != "paused", timeout_s):
                raise NotServing(self._too_long(timeout_s))
            return self._admit()

    async def enter_async(self, timeout_s: float | None = None) -> int:
        """Begin a forward pass on the event loop; `leave` ends it."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with self._changed:
                        if self._mode != "paused":
                            return self._admit()
                        wait, forget = self._subscribe()
                    try:
                        await wait
                    finally:
                        forget()
        except TimeoutError:
            raise NotServing(self._too_long(timeout_s)) from None

    def leave(self) -> None:
        """End a forward pass: what it has launched on this thread's current stream is waited for by the next `pause`."""
        try:
            launched = self._mark()
            if launched is not None:
                with self._changed:
                    self._launched.append(launched)
                    self._drained()  # else they would add up between pauses
        finally:
            with self._changed:
                self._inside -= 1
                if self._inside == 0:
                    self._notify()

    async def pause(self, in_flight: InFlight = "keep") -> None:
        """Let no forward pass in; returns when the running ones are out and the device has done what they launched.

        It never blocks the loop, and may be cancelled. ``in_flight`` is for whoever knows requests.
        """
        with self._changed:
            self._mode = "paused"
            self._notify()
        await self._empty()
        watch = Watch()
        try:
            await watch.until(self._drained)
        finally:
            _ = watch.close()

    async def _empty(self) -> None:
        while True:
            with self._changed:
                if self._inside == 0:
                    return
                wait, forget = self._subscribe()
            try:
                await wait
            finally:
                forget()

    async def resume(self, version: int) -> None:
        """Let forward passes in again, on ``version``."""
        with self._changed:
            self._mode, self._version = "open", version
            self._notify()

    async def fence(self, reason: str) -> None:
        """Let no forward pass in until the next `resume`: those that wait and those that come raise `NotServing`."""
        with self._changed:
            self._mode, self._reason = "fenced", reason
            self._notify()

    def _drained(self) -> bool:
        """Whether the devices have done what all passes that have left had launched. Forgets what is done."""
        with self._changed:
            while self._launched and self._launched[0]():
                self._launched.popleft()
            return not self._launched

    def _admit(self) -> int:
        if self._mode == "fenced" or self._version is None:
            raise NotServing(f"this target is fenced ({self._reason}): it serves again once a whole push has committed")
        self._inside += 1
        return self._version

    def _too_long(self, timeout_s: float | None) -> str:
        return f"a commit is under way and did not end within {timeout_s} s; wait longer, or push with a shorter deadline"

    def _subscribe(self) -> tuple[asyncio.Future[None], Callable[[], None]]:
        """A future that the next change resolves, and what forgets it. The lock is held."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_resolve, future)

        self._waiting.add(wake)

        def forget() -> None:
            with self._changed:
                self._waiting.discard(wake)

        return future, forget

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._waiting:
            wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
