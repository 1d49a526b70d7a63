"""What is known about one SGLang server, and its pause: `ServerState`, `SGLangServing`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from syncline.engine.errors import BusyError, LoaderError, TargetLost
from syncline.engine.messages import InFlight

from ..reconciler import Reconciler
from ..unfinished import UNFINISHED
from .front import MemoryTag, PauseMode, ServerInfo, SGLangFront
from .hold import Hold

__all__ = ["UNFINISHED", "SGLangServing", "ServerState"]

log = logging.getLogger("syncline.engine")

_ABORTED_S = 5.0


class _NotOurs(LoaderError):
    """Another one has changed the server since: what it is to do now is not for us to say."""


@dataclass(kw_only=True)
class ServerState:
    """One life of a server, as its stand-in knows it.

    Attributes:
        info: what it says about itself.
        weight_version: what it has to say as its weights' version; anything else is another one's doing, or another life.
            None while an update is under way.
        paused: how it was paused by us; None: it was not.
        released: kinds of memory that it has given back.
        releasing: it is about to give memory back, and stays paused for that.
    """

    info: ServerInfo
    weight_version: str | None
    paused: PauseMode | None = None
    released: set[MemoryTag] = field(default_factory=set)
    releasing: bool = False


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

    Requests that come to a paused server wait until it is resumed. From `pause` until `resume` or `fence` has been done the
    server is held; what the stand-in does not hold is another one's, and left alone.

    What has to be so (resumed, or fenced) is attempted until the server has done it, another one has changed it, something else
    is wanted or `close` is called (see `Reconciler`). Only the first attempt is waited for.
    """

    def __init__(self, front: SGLangFront, state: ServerState, hold: Hold) -> None:
        self._front, self._state, self.hold = front, state, hold
        self._reconciler = Reconciler(f"SGLang at {front.url}", log)
        self._in_push = False

    async def pause(self, in_flight: InFlight) -> None:
        """Take the server; no forward pass runs and none will start.

        Raises:
            BusyError: another stand-in is changing it.
            TargetLost: it is not as it was left: another stand-in has changed it.
        """
        self._in_push = True
        self._reconciler.supersede()
        async with self._reconciler.turn:
            try:
                self.expect(await self.hold.take())
                await self._halt(in_flight)
                await self._mark()
            except (BusyError, TargetLost):
                self.hold.release()
                raise

    async def _mark(self) -> None:
        mark = self.hold.mark()
        await self._front.set_weight_version(mark)  # returns when the scheduler has seen the pause, too
        if (said := await self._front.weight_version()) != mark:
            raise BusyError(f"{self._front.url} says weight version {said!r}, not our mark: another source updates it, too")

    def expect(self, said: str) -> None:
        """Raise `TargetLost` if the server is not as it was left."""
        if self._is_as_left(said):
            return
        raise TargetLost(
            f"{self._front.url} says weight version {said!r}, where {self._state.weight_version!r} was left: it was started "
            "anew, or another source has updated it; the next push starts from what it holds now"
        )

    def _is_as_left(self, said: str) -> bool:
        expected = self._state.weight_version
        return expected is None or said == expected or self.hold.is_mine(said)

    async def halt(self, in_flight: InFlight) -> None:
        """Pause the server that is held, and do not say so at the server."""
        self._reconciler.supersede()
        async with self._reconciler.turn:
            await self._halt(in_flight)

    async def _halt(self, in_flight: InFlight) -> None:
        if self._state.paused is not None:
            await self._pause("retract")  # again: somebody may have resumed it meanwhile
            if in_flight == "abort":
                await self._front.abort_all()
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

    async def resume(self, version: int) -> None:
        """Generation goes on; not while memory is released, which has to be resumed first, or about to be."""
        self._in_push = False
        if self._state.released or self._state.releasing:
            return
        if not self.hold.ours:
            log.warning("SGLang at %s is not resumed: another source holds it", self._front.url)
            return
        await self._reach("resume", self._resume)

    async def go_on(self, version: int) -> None:
        """`resume` what was halted, unless a push has paused it since: what becomes of it then is for that one to say."""
        if not self._in_push:
            await self.resume(version)

    async def _resume(self) -> None:
        await self._unmark(await self.hold.take())
        await self._front.resume(self._state.info.dialect)
        self._state.paused = None
        self.hold.release()
        # A health check that came during a long pause has failed, and the server counts as ill until one succeeds.
        await self._front.recover()

    async def _unmark(self, said: str) -> None:
        """Before it goes on: it is still ours, and says which weights it has."""
        whole = self._state.weight_version
        if whole is None or whole == UNFINISHED or not (said == whole or self.hold.is_mine(said)):
            raise _NotOurs(f"{self._front.url} says weight version {said!r}, where {whole!r} was left: it is not resumed")
        if said != whole:
            await self._front.set_weight_version(whole)

    async def fence(self, reason: str) -> None:
        """Pause if that has not been done; requests that are being answered end with SGLang's own error."""
        self._in_push = False
        log.info("SGLang at %s is fenced: %s", self._front.url, reason)
        await self._reach("pause", self._fence)

    async def _fence(self) -> None:
        # Where it is marked and does not answer, whoever comes next pushes all of it: it is not held until it does.
        try:
            said = await self.hold.take()
            if not self._is_as_left(said):
                return  # another one's weights
            await self._pause("retract")
            await self._front.abort_all()
            if said != UNFINISHED:
                await self._front.set_weight_version(UNFINISHED)
            self._state.weight_version = UNFINISHED
        finally:
            self.hold.release()

    async def _reach(self, state: str, act: Callable[[], Awaitable[None]]) -> None:
        async def unless_anothers() -> None:
            try:
                await act()
            except (BusyError, _NotOurs) as error:
                log.warning("SGLang at %s is left as it is and did not %s: %s", self._front.url, state, error)
                self.hold.release()

        await self._reconciler.reach(state, unless_anothers, wait=False)

    async def close(self, patience_s: float = 0.0) -> None:
        """Ask for nothing any more, but for ``patience_s`` seconds. It is let go, and stays paused, or not, as it is then."""
        await self._reconciler.close(patience_s)
        self.hold.release()

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
