"""What is known about one SGLang server, and its pause: `ServerState`, `SGLangServing`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from syncline.engine.errors import LoaderError
from syncline.engine.messages import InFlight

from .front import MemoryTag, PauseMode, ServerInfo, SGLangFront

log = logging.getLogger("syncline.engine")

UNFINISHED = "syncline-unfinished"
"""What a server is made to say as its weights' version while they are none: changed in part, or released.

It is kept at the server, so that whoever comes next, perhaps after a crash of this process, does not let it serve.
"""

_ABORTED_S = 5.0


@dataclass(kw_only=True)
class ServerState:
    """One life of a server, as its stand-in knows it.

    Attributes:
        info: what it says about itself.
        weight_version: what it has to say as its weights' version; anything else is another one's doing, or another life.
            None while an update is under way.
        paused: how it was paused by us; None: it was not.
        released: kinds of memory that it has given back.
    """

    info: ServerInfo
    weight_version: str | None
    paused: PauseMode | None = None
    released: set[MemoryTag] = field(default_factory=set)


class SGLangServing:
    """Implements `Serving`, `Fencing` and `Flushing` of `syncline.engine.loader` by SGLang's pause.

    ===========  ==============================================================================================
    in_flight    requests that are being answered at a commit
    ===========  ==============================================================================================
    ``keep``     go on with the new weights. A server with ``--disable-radix-cache`` and ``--disable-overlap-schedule``
                 keeps their keys and values (``in_place``); any other reads them anew (``retract``), for the reasons in
                 `ServerInfo.keeps_in_place`
    ``abort``    end with an error
    ``drain``    are answered first; those that come meanwhile wait
    ===========  ==============================================================================================

    Requests that come to a paused server wait until it is resumed.
    """

    def __init__(self, front: SGLangFront, state: ServerState) -> None:
        self._front, self._state = front, state

    async def pause(self, in_flight: InFlight) -> None:
        """No forward pass runs and none will start."""
        if self._state.paused is not None:
            if in_flight == "abort":
                await self._abort()
            return
        if in_flight == "drain":
            await self._front.drain(self._state.info.dialect)
        await self._pause(self._mode(in_flight))

    def _mode(self, in_flight: InFlight) -> PauseMode:
        if in_flight == "abort":
            return "abort"
        return "in_place" if in_flight == "keep" and self._state.info.keeps_in_place else "retract"

    async def _pause(self, mode: PauseMode) -> None:
        self._state.paused = mode
        await self._front.pause(mode, 120.0)
        # The call returns before the scheduler has seen it; this one does not, and goes the same way.
        await self._front.set_weight_version(await self._front.weight_version())

    async def _abort(self) -> None:
        """End the requests of a server that is paused already."""
        if self._state.paused == "in_place":
            await self._pause("retract")
        await self._front.abort_all()

    async def resume(self, version: int) -> None:
        """Generation goes on; not while memory is released, which has to be resumed first."""
        if self._state.released:
            return
        await self._front.resume(self._state.info.dialect)
        self._state.paused = None
        # A health check that came during a long pause has failed, and the server counts as ill until one succeeds.
        await self._front.recover()

    async def fence(self, reason: str) -> None:
        """Pause if that has not been done; requests that are being answered end with SGLang's own error."""
        log.info("SGLang at %s is fenced: %s", self._front.url, reason)
        if self._state.paused is None:
            await self._pause("retract")
        await self._abort()
        if self._state.weight_version is None:
            await self._front.set_weight_version(UNFINISHED)
            self._state.weight_version = UNFINISHED

    async def flush(self, version: int) -> None:
        """Drop the keys and values of running requests, too: they are read anew."""
        if self._state.paused == "in_place":
            await self._pause("retract")
        await self.drop_cache()

    async def drop_cache(self) -> None:
        """Under pause: nothing that old weights have computed is given to later requests.

        Raises:
            LoaderError: SGLang refused to flush, whatever was tried.
        """
        if self._state.paused == "in_place" and not self._state.info.radix_cache:
            return  # nothing outlives its request
        dialect = self._state.info.dialect
        # Of requests that were aborted the last pass may still be looked at: those end by themselves.
        if await self._front.flush_cache(dialect, _ABORTED_S if self._state.paused == "abort" else 0.0):
            return
        if self._state.paused == "in_place":
            await self._pause("retract")
            if await self._front.flush_cache(dialect):
                return
        log.warning("SGLang at %s refuses to flush its cache while requests wait: they are aborted", self._front.url)
        await self._front.abort_all()
        if not await self._front.flush_cache(dialect, _ABORTED_S):
            raise LoaderError(f"{self._front.url} has new weights and refuses to drop what old ones have cached")
