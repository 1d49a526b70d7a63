"""The other ranks of a target as its leader reaches them: who has joined, and who is still there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from syncline.stages.completions import TaskScope

from .control_client import ControlClient
from .errors import ProtocolError, SynclineError, TargetUnreachable
from .messages import JoinRequest

log = logging.getLogger("syncline.engine")

T = TypeVar("T")

_JOIN_S = 10.0


@dataclass(kw_only=True, eq=False)
class Member:
    """Another rank. ``incarnation`` names its connection: a new one for each time it joins."""

    rank: int
    incarnation: str
    client: ControlClient
    watch: asyncio.Task[None] | None = None


class Roster:
    """Members by rank, each of them watched.

    Args:
        world_size: ranks of the target, the leader among them.
        scope: where work in the background runs.
        secret: shared secret of the target's ranks.
        heartbeat_s, patience_s: see `ControlClient.watch`.
        drop_watches: ends the watches that a rank holds on this process.
        on_lost: told when a member is gone: rank, incarnation, reason.
    """

    def __init__(
        self,
        *,
        world_size: int,
        scope: TaskScope,
        secret: str | None,
        heartbeat_s: float,
        patience_s: float,
        drop_watches: Callable[[str], Awaitable[None]],
        on_lost: Callable[[int, str, str], None],
    ) -> None:
        self._world_size = world_size
        self._scope = scope
        self._secret, self._heartbeat_s, self._patience_s = secret, heartbeat_s, patience_s
        self._drop_watches = drop_watches
        self._on_lost = on_lost
        self._members: dict[int, Member] = {}
        self._closed = False

    def get(self, rank: int) -> Member | None:
        """The member with this rank, if it is there."""
        return self._members.get(rank)

    async def join(self, request: JoinRequest) -> None:
        """Take in a rank, in place of what was there under its number. It is watched from now on.

        Raises:
            ProtocolError: it belongs to another target.
            TargetUnreachable: it cannot be reached at the address that it says.
        """
        if request.world_size != self._world_size or not 0 < request.rank < self._world_size:
            raise ProtocolError(
                f"rank {request.rank} of {request.world_size} cannot join this target: it has ranks 0 to {self._world_size - 1}"
            )
        client = ControlClient(
            request.address,
            secret=self._secret,
            timeout_s=_JOIN_S,
            heartbeat_s=self._heartbeat_s,
            patience_s=self._patience_s,
        )
        member = Member(rank=request.rank, incarnation=request.incarnation, client=client)
        if not await self._begin_watch(member) or self._closed:
            await self._forget(member)
            raise TargetUnreachable(f"the leader cannot reach rank {request.rank} at {request.address}")
        before = self._members.pop(request.rank, None)
        self._members[request.rank] = member
        if before is not None:
            _ = self._scope.start(self._forget(before))

    async def _begin_watch(self, member: Member) -> bool:
        opened = asyncio.Event()
        member.watch = asyncio.create_task(self._watch(member, opened.set), name=f"syncline-member-{member.rank}")
        waiter = asyncio.create_task(opened.wait())
        try:
            await asyncio.wait({waiter, member.watch}, timeout=_JOIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        return opened.is_set() and not member.watch.done()

    async def _watch(self, member: Member, opened: Callable[[], None]) -> None:
        try:
            reason = await member.client.watch(opened)
        except SynclineError as error:
            reason = str(error)
        self.lose(member.rank, member.incarnation, reason)

    def lose(self, rank: int, incarnation: str, reason: str) -> None:
        """Give a member up, if it is still the one with this incarnation. It notices, and joins again."""
        member = self._members.get(rank)
        if member is not None and member.incarnation == incarnation:
            del self._members[rank]
            _ = self._scope.start(self._forget(member))
            log.warning("rank %d of the target was lost: %s", rank, reason)
            self._on_lost(rank, incarnation, reason)

    async def ask(self, call: Callable[[ControlClient], Coroutine[Any, Any, T]], timeout_s: float) -> list[T] | None:
        """Ask every member, in order of rank; None if one of them gives no answer."""
        members = [self._members[rank] for rank in sorted(self._members)]
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*(call(member.client) for member in members)))
        except (TimeoutError, SynclineError):
            return None

    async def _forget(self, member: Member) -> None:
        """Close both directions."""
        if member.watch is not None and member.watch is not asyncio.current_task():
            member.watch.cancel()
            await asyncio.gather(member.watch, return_exceptions=True)
        await member.client.close()
        await self._drop_watches(member.incarnation)

    async def close(self) -> None:
        """Let go of every member."""
        self._closed = True
        members, self._members = self._members, {}
        await asyncio.gather(*(self._forget(member) for member in members.values()))
