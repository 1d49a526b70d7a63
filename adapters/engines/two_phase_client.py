"""The source's side of the two-phase document: calls a server that speaks only it, and broadcasts as rank 0 of its group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec
import torch

from syncline.engine.errors import ProtocolError, PushError, SynclineError, TargetUnreachable
from syncline.engine.messages import BucketMetadata

from .two_phase_messages import (
    NO_GROUP,
    CompleteAnswer,
    CompleteUpdate,
    DestroyGroup,
    GroupAnswer,
    InitGroup,
    PrepareAnswer,
    PrepareUpdate,
)
from .update_group import Backend, HostedStore, Place, UpdateGroup, with_theirs

T = TypeVar("T", bound=msgspec.Struct)

_MOST_REPLY_BYTES = 2**20
_SHOWN = 500


class TwoPhaseClient:
    """Updates one server. Belongs to the event loop on which it is first used.

    Args:
        url: of the server, ``http://host:port``, with a prefix if it has one.
        group_name: of the group.
        members: ranks that the server has in the group.
        backend: of the broadcasts.
        host: address of this machine as the server reaches it; what listens there listens there only.
        port: of the store at which the group meets; 0 takes a free one.
        timeout_s: longest time for the group to meet, for one broadcast, and for one call, in seconds.
    """

    def __init__(
        self, url: str, *, group_name: str, members: int, backend: Backend, host: str, port: int, timeout_s: float
    ) -> None:
        self.url = url.rstrip("/")
        self._name, self._members, self._backend = group_name, members, backend
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._store: HostedStore | None = None
        self._group: UpdateGroup | None = None
        self._changing = asyncio.Lock()

    async def meet(self) -> None:
        """Make the group, unless there is one that is of use.

        Raises:
            TargetUnreachable: nothing answers at the URL.
            PushError: the server refuses, or does not come.
        """
        async with self._changing:
            if self._group is None or not self._group.usable:
                await self._part()
                await self._meet()

    async def _meet(self) -> None:
        self._store = store = await HostedStore.listen(self._host, self._port)
        place = Place(
            name=self._name, host=store.host, port=store.port, rank=0, world_size=1 + self._members, backend=self._backend
        )
        try:
            self._group = await with_theirs(UpdateGroup.join(place, timeout_s=self._timeout_s), self._invite(place))
        except BaseException:
            store.close()
            self._store = None
            raise

    async def part(self) -> None:
        """Leave the group, and have the server leave it, in bounded time."""
        async with self._changing:
            await self._part()

    async def _part(self) -> None:
        group, self._group = self._group, None
        store, self._store = self._store, None
        if group is not None:
            await group.close()
            with contextlib.suppress(SynclineError):  # it may be gone, or have thrown the group away itself
                await self._post("destroy_weights_update_group", DestroyGroup(group_name=self._name), GroupAnswer)
        if store is not None:
            store.close()

    async def prepare(self, buckets: Sequence[BucketMetadata]) -> None:
        """Announce everything that `broadcast` will send, in that order. A server that has lost the group meets anew, once."""
        request = PrepareUpdate(num_buckets=len(buckets), buckets=list(buckets), group_name=self._name)
        for again in (False, True):
            await self.meet()
            said = await self._post("prepare_weights_update", request, PrepareAnswer)
            if said.status == "ready":
                return
            if again or NO_GROUP not in said.message:
                raise PushError(f"{self.url} refused to prepare an update: {said.message or 'it does not say why'}")
            await self.part()

    async def broadcast(self, tensor: torch.Tensor) -> None:
        """Send one tensor; returns when its memory is free again."""
        if self._group is None:
            raise PushError(f"there is no group with {self.url}")
        await self._group.broadcast(tensor.contiguous(), patience_s=self._timeout_s)

    async def complete(self, buckets: int, *, flush_cache: bool) -> None:
        """Have the server apply what was broadcast. Raises `PushError` unless it says that it applied so many buckets."""
        request = CompleteUpdate(group_name=self._name, flush_cache=flush_cache)
        said = await self._post("complete_weights_update", request, CompleteAnswer)
        if not said.success:
            raise PushError(f"{self.url} did not apply the update: {said.message or 'it does not say why'}")
        if said.num_buckets_received != buckets:
            raise PushError(f"{self.url} says that it applied {said.num_buckets_received} buckets; {buckets} were sent")

    async def close(self) -> None:
        """Leave the group and end every call. Idempotent."""
        await self.part()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _invite(self, place: Place) -> None:
        request = InitGroup(
            master_address=place.host,
            master_port=place.port,
            rank_offset=1,
            world_size=place.world_size,
            group_name=place.name,
            backend=place.backend,
        )
        said = await self._post("init_weights_update_group", request, GroupAnswer)
        if not said.success:
            raise PushError(f"{self.url} did not join group {place.name!r}: {said.message or 'it does not say why'}")

    async def _post(self, path: str, request: msgspec.Struct, kind: type[T]) -> T:
        if self._session is None:
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        headers = {"Content-Type": "application/json"}
        where = f"{self.url}/{path}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(where, data=msgspec.json.encode(request), headers=headers) as response,
            ):
                body = await response.content.read(_MOST_REPLY_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            what = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise TargetUnreachable(f"{where}: {what}; is the server there, and the URL right?") from error
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            text = body[:_SHOWN].decode(errors="replace")
            raise ProtocolError(f"{where} answered HTTP {response.status} with no {kind.__name__}: {text}") from error
