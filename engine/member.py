"""The other ranks' side of joining: find the leader, stay joined, decide alone while there is none."""

from __future__ import annotations

import asyncio
import itertools
import logging

from .control_client import ControlClient
from .errors import SynclineError
from .messages import JoinRequest
from .rank import Rank

log = logging.getLogger("syncline.engine")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class Member:
    """Keeps one rank joined to its leader.

    Args:
        rank: the rank.
        leader: control address of the leader rank.
        address: where this rank listens.
        secret: shared secret of the target's ranks.
        heartbeat_s, patience_s: see `ControlClient.watch`.
    """

    def __init__(
        self, rank: Rank, *, leader: str, address: str, secret: str | None, heartbeat_s: float, patience_s: float
    ) -> None:
        self._rank = rank
        self._leader = leader
        self._address = address
        self._client = ControlClient(leader, secret=secret, timeout_s=10.0, heartbeat_s=heartbeat_s, patience_s=patience_s)
        self.joined = asyncio.Event()
        """Set while the leader has accepted this rank and the connection to it stands."""

    async def run(self) -> None:
        """Join, and join again whenever the leader goes away; never returns by itself."""
        pause = _FIRST_PAUSE_S
        for life in itertools.count():
            self._rank.fence.incarnation = f"{self._rank.process}/{life}"
            try:
                await self._client.join(self._request())
                pause = _FIRST_PAUSE_S
                reason = await self._client.watch(self.joined.set)
            except SynclineError as error:
                reason = str(error)
                log.debug("rank %d cannot join its leader: %s", self._rank.rank, reason)
            self.joined.clear()
            # from here on no order of the leader is obeyed until the next join
            self._rank.fence.incarnation = f"{self._rank.process}/{life}+"
            await self._rank.abandon(f"the leader at {self._leader} went away: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _request(self) -> JoinRequest:
        return JoinRequest(
            rank=self._rank.rank,
            address=self._address,
            incarnation=self._rank.fence.incarnation,
            process=self._rank.process,
            world_size=self._rank.world_size,
            serving=self._rank.serving,
        )

    async def close(self) -> None:
        await self._client.close()
