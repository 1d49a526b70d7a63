"""Ends that have to come about: a close that is carried out whoever is cancelled, a beginning that a close calls off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from syncline.scheduler.errors import SynclineError

T = TypeVar("T")


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Carry ``work`` out to its end, also where the caller is cancelled meanwhile: that is raised when the work has ended.

    For what lets go of things, which must neither stop halfway nor take long.
    """
    task = asyncio.create_task(work)
    cancelled = await _ended(task)
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def _ended(task: asyncio.Task[Any]) -> bool:
    """Wait for the end of ``task``, however often the caller is cancelled meanwhile; whether that was so."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and not task.cancelled():
        task.exception()  # nobody else asks for it: the cancellation is what is told
    return cancelled


async def called_off(task: asyncio.Task[Any] | None, timeout_s: float) -> None:
    """Cancel ``task`` and wait at most ``timeout_s`` seconds for its end: what it calls may wait for whoever waits here."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=timeout_s)


async def in_turn(*steps: Callable[[], Awaitable[object]]) -> None:
    """One step after the other, each whatever the ones before it have raised; the first error is raised when all are done.

    A cancellation of the caller ends it at once, one that comes out of a step by itself is that step's error.
    """
    first: BaseException | None = None
    for step in steps:
        try:
            await step()
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            first = first or SynclineError(f"something that was to be closed had been cancelled: {error!r}")
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    if first is not None:
        try:
            raise first
        finally:
            del first  # else it would hold itself, with this frame


class Closing:
    """A close that is begun once and carried out to its end, whoever calls it, and whoever is cancelled meanwhile.

    Not even the idiom that cancels all tasks of a loop cuts it off. One that has failed is begun anew by the next call.

    Args:
        close: lets go of everything, in bounded time. It may be called again after it was cut off, and then does the rest.
        name: of the task that it runs in.

    Attributes:
        begun: it was called.
    """

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.begun = False
        self._close = close
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._home: asyncio.AbstractEventLoop | None = None

    def here(self) -> None:
        """What is closed lives on the running loop.

        Raises:
            SynclineError: it lives on another one.
        """
        loop = asyncio.get_running_loop()
        if self._home is not None and self._home is not loop:
            raise SynclineError("it lives on another event loop; close it there")
        self._home = loop

    async def __call__(self) -> None:
        """Returns when everything is closed.

        Raises:
            SynclineError: it lives on another event loop, or waits here for its own end.
        """
        if self._is_over:
            return
        self.here()
        self.begun = True
        if self._task is None or self._task.done():
            self._task = self._start()
        if self._task is asyncio.current_task():
            raise SynclineError("what is being closed waits for its own end")
        task = self._task  # others may begin it anew before this one wakes up
        cancelled = await _ended(task)
        while task.cancelled():  # before its first step: nothing else ends it so
            if self._task is task:
                self._task = self._start()
            task = self._task
            cancelled = await _ended(task) or cancelled
        if cancelled:
            raise asyncio.CancelledError
        task.result()

    def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._to_its_end(), name=self._name)

    @property
    def _is_over(self) -> bool:
        return self._task is not None and self._task.done() and not self._task.cancelled() and self._task.exception() is None

    async def _to_its_end(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                await self._close()
            except asyncio.CancelledError:
                if not task.cancelling():
                    raise SynclineError("something that was to be closed had been cancelled from within") from None
                while task.uncancel():
                    pass
            else:
                return

    async def unless(self, task: asyncio.Task[T], error: SynclineError) -> T:
        """Await a task that closing calls off: where it did, and nobody has cancelled the caller, ``error`` is raised."""
        caller = asyncio.current_task()
        before = caller.cancelling() if caller is not None else 0
        try:
            return await task
        except asyncio.CancelledError:
            if not self.begun or (caller is not None and caller.cancelling() > before):
                raise
            raise error from None
