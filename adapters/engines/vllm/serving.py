"""What a receiver says about forward passes, and what vLLM does about it.

Only the leader rank's worker speaks to vLLM; its endpoints act on all workers. The others' part is to let their main thread go
when the push is over.

==========  ==============================================================================================================
receiver    leader rank: vLLM's endpoints
==========  ==============================================================================================================
pause       ``/pause`` (and keys and values of the old weights dropped, but for those that requests in flight keep)
(loader)    ``/update_weight_version`` to `UNFINISHED`, from where on vLLM refuses to resume (see `plugin`);
            ``/start_weight_update``, then ``/update_weights``, which returns only when the push is over
resume      ``/update_weights`` returns, ``/finish_weight_update`` with the version, ``/resume``, unless somebody else had
            paused vLLM before
fence       ``/update_weights`` returns, ``/finish_weight_update``, ``/update_weight_version`` to `UNFINISHED`,
            ``/pause?mode=abort``; nothing is resumed
==========  ==============================================================================================================
"""

from __future__ import annotations

import asyncio
import logging

from syncline.engine.errors import LoaderError, SynclineError
from syncline.engine.messages import InFlight

from ..reconciler import Reconciler
from ..unfinished import UNFINISHED
from .front import Front, quietly
from .main_thread import MainThread

log = logging.getLogger("syncline.vllm")

_OPEN_S = 20.0
_DRAIN_S = 3600.0
"""A drain lasts as long as the longest request; the push's own deadline ends it."""


class MemberServing:
    """Implements `Serving` and `Fencing` on a rank that is not the leader."""

    def __init__(self, main: MainThread) -> None:
        self._main = main

    async def pause(self, in_flight: InFlight) -> None:
        """The leader has paused vLLM already."""
        self._main.expect()

    async def resume(self, version: int) -> None:
        self._main.release(committed=True)

    async def fence(self, reason: str) -> None:
        self._main.release(committed=False)


class LeaderServing:
    """Implements `Serving`, `Fencing` and `Flushing` on the leader rank.

    Resumed or fenced, it is waited for until vLLM has done it or something else is wanted (see `Reconciler`).

    Args:
        front: vLLM's endpoints.
        main: this worker's main thread.
        prefix_caching: vLLM keeps keys and values for requests to come. They are dropped at every commit, and requests in
            flight are then computed anew from their tokens, since vLLM cannot tell the two apart. Without it, requests that
            are kept go on with the keys and values that they have.
        media: the model takes images and the like. What its encoders computed is dropped at every commit. vLLM does that only
            with everything else, so that requests that are kept are computed anew from their tokens and items.
        no_keep: why this vLLM cannot keep such requests; empty: it can.
    """

    def __init__(self, front: Front, main: MainThread, *, prefix_caching: bool, media: bool = False, no_keep: str = "") -> None:
        self._front, self._main = front, main
        self._prefix_caching = prefix_caching
        self._clear_kept = prefix_caching or media
        self._no_keep = no_keep
        self._update: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._named: int | None = None
        self._flush = False
        self._leave_paused = False
        self._reconciler = Reconciler(f"vLLM at {front.url}", log)

    async def pause(self, in_flight: InFlight) -> None:
        if in_flight == "keep" and self._no_keep:
            raise LoaderError(f"in_flight 'keep': {self._no_keep}; or push with 'drain' or 'abort'")
        self._loop = asyncio.get_running_loop()
        self._reconciler.supersede()
        self._main.expect()
        # With `keep`, no prefix cache and text alone there is nothing that a later request could hit: what is kept is kept.
        clear = self._clear_kept or in_flight != "keep"
        async with self._reconciler.turn:
            if not self._main.paused:
                self._leave_paused = bool(await self._front.is_paused())
            self._main.paused = True
            await self._front.pause(in_flight, clear_cache=clear, timeout_s=_DRAIN_S)
            if self._prefix_caching:
                await self._front.reset_prefix_cache()

    async def flush(self, version: int) -> None:
        """Noted: vLLM is busy with the update now, and its cache is dropped before it resumes."""
        self._flush = True

    def open_session(self, version: int | None) -> None:
        """From the loader's thread: bring every worker's main thread to its `MainThread.serve`.

        Raises:
            LoaderError: vLLM does not begin an update.
        """
        assert self._loop is not None, "a push begins with a pause"
        try:
            asyncio.run_coroutine_threadsafe(self._open(version), self._loop).result(_OPEN_S)
        except SynclineError as error:
            raise LoaderError(f"vLLM did not begin the update: {error}") from error
        except TimeoutError:
            raise LoaderError(f"vLLM did not begin the update within {_OPEN_S:g} s") from None

    async def _open(self, version: int | None) -> None:
        async with self._reconciler.turn:
            if self._main.updating:  # something went wrong between a start and its finish
                await self._front.finish(None)
            await self._mark()
            await self._front.start()
            self._update = asyncio.create_task(self._front.update(f"version {version}"), name="syncline-vllm-update")

    async def _mark(self) -> None:
        """From here on the weights are none, vLLM says so, and nobody resumes it. Somebody may have since our pause."""
        self._named = None
        await self._front.name_version(f"{UNFINISHED}@update")
        if await self._front.is_paused() is False:
            log.warning("vLLM at %s was resumed in the middle of a push; it is paused again", self._front.url)
            await self._front.pause("abort" if self._no_keep else "keep", clear_cache=self._clear_kept)

    async def resume(self, version: int) -> None:
        self._main.release(committed=True)
        await self._reconciler.reach("resume", lambda: self._resume(version))

    async def fence(self, reason: str) -> None:
        """Requests in flight are aborted; those that come wait until a push has committed."""
        self._main.release(committed=False)
        log.warning("vLLM at %s is fenced: %s", self._front.url, reason)
        await self._reconciler.reach("pause", self._fence)

    async def _resume(self, version: int) -> None:
        await self._end_update(version)
        if version != self._named:
            await self._front.name_version(version)
            self._named = version
        if self._flush:
            await self._front.reset_prefix_cache()
            self._flush = False
        if self._main.paused and not self._leave_paused:
            await self._front.resume()
        self._main.paused = self._leave_paused = False

    async def _fence(self) -> None:
        self._flush = False
        await self._end_update(None)
        self._named = None
        self._main.paused = True
        await self._front.name_version(UNFINISHED)
        await self._front.pause("abort", clear_cache=True)

    async def _end_update(self, version: int | None) -> None:
        if self._update is not None:
            failed = await quietly(self._update)
            self._update = None
            if failed is not None:
                raise LoaderError(f"vLLM's update did not end well: {failed}")
        if self._main.updating:
            await self._front.finish(version)
            self._named = version if version is not None and self._front.names_at_finish else self._named

    async def close(self) -> None:
        """End what runs. vLLM stays paused, or not, as it is."""
        await self._reconciler.close()
        if self._update is not None:
            self._update.cancel()
            await quietly(self._update)
        await self._front.close()
