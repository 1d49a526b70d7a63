"""The targets as rank 0 of the source sees them: their control clients, and what they said last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from syncline.scheduler.layout import Manifest
from syncline.stages.closing import in_turn

from .address import Address
from .config import TransferConfig
from .control_client import ControlClient
from .errors import ConfigError, SynclineError, TargetLost, TargetUnreachable
from .messages import Status

log = logging.getLogger("syncline.engine")

_MOST_PATIENCE_S = 10.0
"""A target whose process shows no sign of life for so long is lost; sooner if ``target_timeout_s`` is shorter."""
_BEATS = 5
_LOOK_AGAIN_S = 0.05
_HEAD_START = 0.95
"""Of the time that whoever asks waits, a target gets so much to answer: an error from here names it. Its `Target.locate`, which
knows still more, should take less."""


class LeaderAddress(NamedTuple):
    """Where the leader rank of a target listens, and the secret that it shares. None: it has none, as a unix socket that only
    this user reaches needs none; a target whose leader takes the config's says so itself.
    """

    address: str
    secret: str | None = None


@runtime_checkable
class Target(Protocol):
    """An inference engine instance as a source names it. Every source rank holds one; only rank 0's is asked for its leader.

    `RemoteTarget` is the plain one. Adapters of engines that do not run a `Receiver` by themselves bring their own: they
    start one in the engine's workers, or stand in for the engine with one of their own.
    """

    @property
    def address(self) -> str:
        """Names the target in reports and errors; the same on every source rank, another one for every target."""
        ...

    def problems(self, config: TransferConfig) -> Sequence[str]:
        """What is wrong with this target before anything is asked of it."""
        ...

    async def locate(self, config: TransferConfig) -> LeaderAddress:
        """Where the leader listens. Asked again whenever the links to the target do not stand, so it may have restarted.

        Raises:
            TargetUnreachable: the engine is not there.
            SynclineError: it is there and cannot be a target; the message says why.
        """
        ...

    async def close(self) -> None:
        """End what `locate` started in this process. Idempotent."""
        ...


@dataclass(frozen=True)
class RemoteTarget:
    """A target in another process: the control address of its leader rank.

    Args:
        address: ``unix:/path`` or ``tcp://host:port``, as `Receiver.address` says.
        secret: shared secret of this target; None takes the config's.
    """

    address: str
    secret: str | None = None

    def problems(self, config: TransferConfig) -> Sequence[str]:
        """The address is malformed, or beyond loopback without a secret."""
        try:
            address = Address.parse(self.address)
        except ConfigError as error:
            return error.problems
        if address.is_local or self.secret or config.secret:
            return ()
        return (f"target {self.address!r} is beyond loopback and no secret is set; set the target's or the config's",)

    async def locate(self, config: TransferConfig) -> LeaderAddress:
        """Its own address, and its own secret or the config's."""
        return LeaderAddress(self.address, self.secret or config.secret)

    async def close(self) -> None:
        """Nothing was started."""


class TargetHandle:
    """One target on rank 0: control client, manifests, and whether its links stand."""

    def __init__(self, index: int, target: Target, config: TransferConfig) -> None:
        self.index = index
        self.address = target.address
        self._target = target
        self._config = config
        self._client: ControlClient | None = None
        self._leader: LeaderAddress | None = None
        self.status: Status | None = None
        self.manifests: tuple[Manifest, ...] = ()
        self.raw_manifests: list[bytes] = []
        self.planned_digest = ""
        """Digest of the manifests that the plan in force was made from."""
        self.misfit: SynclineError | None = None
        """Why the manifests that it has now do not fit; the plan in force knows those that it had before."""
        self._planned: list[bytes] = []
        self._planned_before: list[bytes] = []
        self.linked_incarnation = ""
        """The incarnation that the links reach; empty when they do not stand."""
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self._watch: asyncio.Task[None] | None = None

    @property
    def client(self) -> ControlClient:
        """Calls the leader, where it was located last."""
        if self._client is None:
            raise TargetUnreachable(f"target {self.address} has not been located yet")
        return self._client

    async def _locate(self) -> None:
        """Find the leader, which may listen elsewhere than before."""
        leader = await self._target.locate(self._config)
        if leader == self._leader:
            return
        before, self._client, self._leader = self._client, None, leader
        if before is not None:
            await before.close()
        patience_s = min(self._config.target_timeout, _MOST_PATIENCE_S)
        self._client = ControlClient(
            leader.address,
            secret=leader.secret,
            timeout_s=self._config.connect_timeout_s,
            heartbeat_s=patience_s / _BEATS,
            patience_s=patience_s,
        )

    @property
    def linked(self) -> bool:
        return bool(self.linked_incarnation) and not self.lost.is_set()

    async def refresh(self, timeout_s: float, *, wait: bool) -> Status:
        """Ask for the status; fetch the manifests if they changed.

        Args:
            wait: until all ranks of the target have joined its leader.

        Raises:
            TargetUnreachable: there is no answer within ``timeout_s``, or ranks are missing.
        """
        status: Status | None = None
        timeout_s *= _HEAD_START
        try:
            async with asyncio.timeout(timeout_s):
                await self._locate()
                while not (status := await self.client.status()).ready or not await self._fetched(status):
                    if not wait:
                        raise self._not_ready(status)
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            if status is None or status.ready:
                what = "status" if status is None else "manifest"
                raise TargetUnreachable(
                    f"target {self.address} gave no {what} within {timeout_s:.3g} s; is it up and not stopped?"
                ) from None
            raise self._not_ready(status) from None
        self.status = status
        return status

    async def _fetched(self, status: Status) -> bool:
        """The manifests are those that ``status`` speaks of: ranks may come and go between the two calls."""
        if self.raw_manifests and self.status is not None and status.manifest_digest == self.status.manifest_digest:
            return True
        try:
            reply = await self.client.manifest()
        except TargetUnreachable:
            return False
        if reply.manifest_digest != status.manifest_digest:
            return False
        self.misfit = None
        self.raw_manifests = reply.manifests
        self.manifests = tuple(Manifest.from_bytes(data) for data in reply.manifests)
        return True

    @property
    def manifest_digest(self) -> str:
        """Names the manifests as they were fetched last."""
        return "+".join(manifest.digest for manifest in self.manifests)

    def planned(self) -> None:
        """A plan is made from the manifests as they are."""
        self.planned_digest = self.manifest_digest
        self._planned_before, self._planned = self._planned, self.raw_manifests

    @property
    def came_back_changed(self) -> bool:
        """The plan that is being made has other manifests of this target than the one before it."""
        return bool(self._planned_before) and self._planned_before != self.raw_manifests

    def keep_before(self, misfit: SynclineError) -> None:
        """Plan as before it changed: it takes no part. Once it has changed again its manifests are fetched anew."""
        self.misfit = misfit
        self.raw_manifests = self._planned = self._planned_before
        self.manifests = tuple(Manifest.from_bytes(data) for data in self.raw_manifests)
        self.planned_digest = self.manifest_digest

    def _not_ready(self, status: Status) -> TargetUnreachable:
        return TargetUnreachable(
            f"target {self.address} is not ready: {status.message or 'its ranks come and go'}; try again later"
        )

    def needs_link(self) -> bool:
        """The target answers, but the links that stand reach nothing or another incarnation of it."""
        return self.status is not None and (not self.linked or self.status.incarnation != self.linked_incarnation)

    def linked_up(self) -> None:
        """All links to the target stand: watch it."""
        assert self.status is not None
        self.linked_incarnation = self.status.incarnation
        self.lost.clear()
        self.lost_reason = ""
        self._unwatch()
        self._watch = asyncio.create_task(self._watch_it(), name=f"syncline-watch-{self.index}")

    def unlinked(self, reason: str) -> None:
        """The links are gone: the next push has to make new ones."""
        self.linked_incarnation = ""
        self.lost_reason = reason
        self.lost.set()
        self._unwatch()

    def lost_error(self) -> TargetLost:
        return TargetLost(f"target {self.address} is lost: {self.lost_reason or 'it did not answer'}")

    async def _watch_it(self) -> None:
        try:
            reason = await self.client.watch()
        except SynclineError as error:
            reason = str(error)
        self.lost_reason = self.lost_reason or reason
        self.lost.set()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await in_turn(*([] if self._client is None else [self._client.close]), self._target.close)
