"""Stops and starts the forward passes of one rank: its gate, and the engine that serves, if that has a say of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from .errors import LoaderError, SynclineError
from .gate import Gate
from .loader import Fencing, Flushing, Serving
from .messages import InFlight

log = logging.getLogger("syncline.engine")

_ENGINE_TIMEOUT_S = 10.0
"""An engine that takes longer to be resumed or fenced is left to itself: its gate is what keeps it from serving."""


class Switch:
    """The gate of a rank, and its engine's own `Serving`.

    The engine is paused first, since requests that it drains still have to pass the gate, and resumed last. Whatever the
    engine does, nothing passes the gate that must not.
    """

    def __init__(self, gate: Gate, serving: Serving | None) -> None:
        self.gate = gate
        self._serving = None if serving is gate else serving
        self.touched = False
        """A pause was begun and has not been undone by `resume`."""
        self._fenced = self._paused = False

    async def pause(self, in_flight: InFlight) -> None:
        """Returns once no forward pass runs and none will start. May be cancelled; then `resume` or `fence` has to follow."""
        if self._paused:
            return
        self.touched, self._fenced = True, False
        if self._serving is not None:
            await self._ask("pause", self._serving.pause(in_flight))
        await self.gate.pause(in_flight)
        self._paused = True

    async def resume(self, version: int) -> None:
        """Let forward passes run, on ``version``."""
        self._fenced = self._paused = False
        await self.gate.resume(version)
        if self._serving is not None:
            await self._bounded("resume", self._serving.resume(version))
        self.touched = False

    async def fence(self, reason: str) -> None:
        """Let no forward pass run until the next `resume`."""
        self._paused = False
        await self.gate.fence(reason)
        if self._fenced:
            return  # the engine knows
        self.touched = self._fenced = True
        if isinstance(self._serving, Fencing):
            await self._bounded("fence", self._serving.fence(reason))
        elif self._serving is not None:
            await self._bounded("pause", self._serving.pause("abort"))

    async def flush(self, version: int) -> None:
        """Drop cached keys and values, if the engine can."""
        if isinstance(self._serving, Flushing):
            await self._ask("flush", self._serving.flush(version))

    async def _ask(self, what: str, call: Awaitable[None]) -> None:
        try:
            await call
        except SynclineError:
            raise
        except Exception as error:
            raise LoaderError(f"the serving engine raised in {what}: {error!r}") from error

    async def _bounded(self, what: str, call: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                await call
        except TimeoutError:
            log.warning("the serving engine did not %s within %g s", what, _ENGINE_TIMEOUT_S)
        except SynclineError as error:  # it says what is wrong; no bug of ours or of the engine's
            log.warning("the serving engine did not %s: %s: %s", what, type(error).__name__, error)
        except Exception:
            log.exception("the serving engine raised in %s", what)
