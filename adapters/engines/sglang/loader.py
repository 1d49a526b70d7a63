"""`SGLangLoader`: a `Loader` that hands what has landed on to an SGLang server, by the server's own endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from syncline.engine.errors import LoaderError
from syncline.engine.loader import Landed
from syncline.scheduler.layout import Layout, Manifest

from .buckets import Assembly, Bucket, plan_buckets
from .front import CacheNotFlushed, Selector, SGLangFront
from .serving import ServerState, SGLangServing
from .ways import Way

T = TypeVar("T")


class SGLangLoader:
    """Implements `syncline.engine.loader.Loader`. Its thread asks; the event loop talks to the server.

    Args:
        front, state, serving: the server.
        way: how buckets reach it.
        layout: what its checkpoint loader takes in: whole tensors.
        bucket_bytes: of the buckets in which tensors are handed on.
        selector: which of its models are updated.
        loop: where ``front`` and ``way`` live.
    """

    def __init__(
        self,
        *,
        front: SGLangFront,
        state: ServerState,
        serving: SGLangServing,
        way: Way,
        layout: Layout,
        bucket_bytes: int,
        selector: Selector,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._front, self._state, self._serving, self._way = front, state, serving, way
        self._layout, self._bucket_bytes, self._selector, self._loop = layout, bucket_bytes, selector, loop
        self._manifest: Manifest | None = None
        self._buckets: list[Bucket] = []
        self._assembly: Assembly | None = None
        self._last: tuple[Bucket, torch.Tensor] | None = None

    def manifest(self, *, rank: int, world_size: int, host: str) -> Manifest:
        """What the server's loader takes in.

        Raises:
            TargetLost: the server that answers is not the one that this loader was made for, or another one has updated it.
            BusyError: another one is updating it.
        """
        self._ask(self._check())
        if self._manifest is None:
            self._manifest = Manifest(
                rank=rank, world_size=world_size, host=host, layout=self._layout, fingerprint=self._state.info.life
            )
            self._buckets = plan_buckets(self._manifest, self._bucket_bytes)
        return self._manifest

    def buffers(self) -> Sequence[torch.Tensor] | None:
        """None: nothing but the server writes its weights."""
        return None

    def begin(self, version: int | None) -> None:
        """From here on the server's weights are none until `finish` has succeeded, and it says so."""
        self._assembly = Assembly(self._buckets, self._layout.optional)
        self._last = None
        self._ask(self._begin())

    def install(self, landed: Sequence[Landed]) -> None:
        """Put parts in their places; hand on the buckets that are complete, the last one excepted: it carries the version."""
        assert self._assembly is not None
        for part in landed:
            number = self._assembly.add(part)
            if number is not None:
                self._hand_on(*self._assembly.take(number))

    def rebind(self, landed: Sequence[Landed]) -> NoReturn:
        """Never called: the manifest does not say ``movable``."""
        raise LoaderError("the weights of an SGLang server cannot be pointed at other memory; use landing 'staged'")

    def finish(self, version: int | None) -> None:
        """Hand on the last bucket with the version, end the session, drop the cache, and see what the server says."""
        assert self._assembly is not None
        for number in self._assembly.rest():
            self._hand_on(*self._assembly.take(number))
        self._assembly = None
        last, self._last = self._last, None
        if last is None:
            raise LoaderError("a push without a single tensor cannot be handed on to SGLang")
        self._ask(self._finish(last, str(version)))

    def _hand_on(self, bucket: Bucket, data: torch.Tensor) -> None:
        before, self._last = self._last, (bucket, data)
        if before is not None:
            self._ask(self._send(*before, None))

    # on the event loop

    async def _check(self) -> None:
        said = await self._front.weight_version()
        if not self._serving.hold.held:
            self._serving.hold.look(said)
            self._serving.expect(said)

    async def _begin(self) -> None:
        if "weights" in self._state.released:
            raise LoaderError(
                f"{self._front.url} has released the memory of its weights; call resume_memory(['weights']) first"
            )
        await self._serving.hold.confirm()
        self._state.weight_version = None
        async with _Dropping(self._way):
            await self._way.begin(self._state.info, self._selector)

    async def _send(self, bucket: Bucket, data: torch.Tensor, version: str | None) -> None:
        async with _Dropping(self._way):
            try:
                await self._way.send(bucket, data, version or self._serving.hold.mark())
            except CacheNotFlushed:
                pass  # it is loaded, and the cache is dropped at the end

    async def _finish(self, last: tuple[Bucket, torch.Tensor], version: str) -> None:
        await self._serving.hold.confirm()
        await self._send(*last, version)
        async with _Dropping(self._way):
            try:
                await self._way.end()
            except CacheNotFlushed:
                pass
        await self._serving.drop_cache()
        if await self._front.weight_version() != version:
            await self._front.set_weight_version(version)
        self._state.weight_version = version

    def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class _Dropping:
    """``async with``: what a way has made is thrown away if something fails."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            await self._way.drop()
