"""Bringing a server to the state that it has to have, however often it fails to go there: `Reconciler`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from syncline.engine.errors import SynclineError

_AGAIN_S = 0.5


class Reconciler:
    """One server's desired state (resumed, fenced): asked for until it is reached, or another state is wanted.

    A push that ends cannot leave it at one refused call: a server that is not resumed serves nobody, one that is not fenced
    may serve a mix. Whatever the caller of `reach` does, give up included, the attempts go on.

    Args:
        server: what messages call it.
        log: where they go.

    Attributes:
        turn: held during an attempt; whoever else speaks to the server holds it meanwhile.
    """

    def __init__(self, server: str, log: logging.Logger) -> None:
        self.turn = asyncio.Lock()
        self._server, self._log = server, log
        self._desired = object()
        self._attempts: set[asyncio.Task[None]] = set()

    def supersede(self) -> None:
        """Another state is wanted from now on: no new attempt begins for the one before."""
        self._desired = object()

    async def reach(self, state: str, act: Callable[[], Awaitable[None]], *, wait: bool = True) -> None:
        """Attempt ``act`` until it succeeds; each `SynclineError` is logged and followed by another attempt.

        Args:
            state: what the server is to do, for messages.
            act: one attempt. It may find that nothing is left to do, and return.
            wait: until reached or superseded; else until the first attempt is over, so that a dead server holds up nobody.
        """
        desired = self._desired = object()
        attempted = asyncio.Event()

        async def attempt() -> None:
            while self._desired is desired:
                try:
                    async with self.turn:
                        if self._desired is desired:
                            await act()
                    return
                except SynclineError as error:
                    self._log.warning("%s did not %s: %s; trying again", self._server, state, error)
                attempted.set()
                await asyncio.sleep(_AGAIN_S)

        task = asyncio.create_task(attempt(), name=f"syncline-{state}-{self._server}")
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)
        task.add_done_callback(lambda _: attempted.set())
        if wait:
            await asyncio.shield(task)
            return
        await attempted.wait()
        if task.done() and not task.cancelled():
            task.result()  # a bug of ours is no refusal

    async def close(self, patience_s: float = 0.0) -> None:
        """Attempt nothing any more, but for ``patience_s`` seconds. The server stays as it is then."""
        attempts = set(self._attempts)
        if attempts:
            await asyncio.wait(attempts, timeout=patience_s)
        self.supersede()
        for task in attempts:
            task.cancel()
        if attempts:
            await asyncio.wait(attempts)
