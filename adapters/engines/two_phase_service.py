"""The two-phase document's server, without its HTTP: groups, and one update at a time into a syncline target.

A source that speaks only the document names no version: versions are numbered, each one above what the target holds. One
update at a time: a second prepare is refused while the first one lasts. A source that initializes its group again, or
destroys it, has given up the update that was under way on it; so a source that crashed and came back is never locked out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar, cast

from syncline.engine import RemoteTarget, TransferConfig
from syncline.engine.control_client import ControlClient
from syncline.engine.errors import AuthError, ClosedError, ConfigError, PlanError, SynclineError, wire_text
from syncline.engine.messages import CompleteReply, CompleteRequest, PrepareReply, PrepareRequest

from ..names import NameMap
from .two_phase_messages import (
    NO_GROUP,
    CompleteAnswer,
    CompleteUpdate,
    DestroyGroup,
    GroupAnswer,
    InitGroup,
    PrepareAnswer,
    PrepareUpdate,
    announced,
    told,
)
from .two_phase_update import Update
from .update_group import Backend, Place, UpdateGroup

log = logging.getLogger("syncline.adapters")

T = TypeVar("T")

_CLOSING = "the server is closing"


class TwoPhaseService:
    """Takes updates from sources that speak only the document, into the target at a control address.

    Belongs to the event loop on which it is first called. The target may live in this process or in another one.

    Args:
        control: control address of the target's leader (`Receiver.address`), or what gives it when it is asked.
        secret: shared secret of the target.
        config: how what was received is pushed into the target; None takes the defaults, without a trace.
        timeout_s: longest time between two broadcasts, from the last one to complete, and of complete itself, in seconds.
        group_timeout_s: longest time for the members of a group to meet, in seconds.
        names: a `NameMap` (such as a `NameTable`) for tensors that sources name otherwise than checkpoints do.
        bind_host: address that group connections bind to; None takes the one from which the source is reached.

    Raises:
        ConfigError: lists everything that is wrong.
    """

    def __init__(
        self,
        control: str | Callable[[], str],
        *,
        secret: str | None = None,
        config: TransferConfig | None = None,
        timeout_s: float = 300.0,
        group_timeout_s: float = 60.0,
        names: NameMap | None = None,
        bind_host: str | None = None,
    ) -> None:
        problems = [
            f"{name} is {value!r}; it must be a finite number of seconds above 0"
            for name, value in (("timeout_s", timeout_s), ("group_timeout_s", group_timeout_s))
            if not 0 < value < float("inf")
        ]
        if problems:
            raise ConfigError(problems)
        self._find_control = control if callable(control) else lambda: control
        self._secret = secret
        self._config = config or TransferConfig(trace=False, push_timeout_s=timeout_s)
        self._timeout_s, self._group_timeout_s = timeout_s, group_timeout_s
        self._names, self._bind_host = names, bind_host
        self._groups: dict[str, UpdateGroup] = {}
        self._joining: dict[str, asyncio.Task[UpdateGroup]] = {}
        self._updates: dict[str, Update] = {}
        self._preparing = False
        self._newest = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    # groups

    async def init_group(self, request: InitGroup) -> GroupAnswer:
        """Join a group; returns once its members have met. A group of the same name is left for it."""
        return await self._lasting(self._init_group(request))

    async def _init_group(self, request: InitGroup) -> GroupAnswer:
        name = request.group_name
        busy = await self._leave(name, "its source initialized the group again")
        if name in self._joining:  # asked only now: another call may have come while this one left
            busy = f"group {name!r} is being initialized already"
        if busy:
            return GroupAnswer(success=False, message=busy)
        place = Place(
            name=name,
            host=request.master_address,
            port=request.master_port,
            rank=request.rank_offset,
            world_size=request.world_size,
            backend=cast(Backend, request.backend),
        )
        if self._closed:
            return GroupAnswer(success=False, message=_CLOSING)
        join = UpdateGroup.join(place, timeout_s=self._group_timeout_s, bind_host=self._bind_host)
        self._joining[name] = asyncio.create_task(join)
        try:
            self._groups[name] = await self._joining[name]
        except SynclineError as error:
            return GroupAnswer(success=False, message=f"Failed to initialize custom process group: {error}")
        except asyncio.CancelledError:
            if not self._closed:
                raise
            return GroupAnswer(success=False, message=_CLOSING)
        finally:
            del self._joining[name]
        return GroupAnswer(success=True, message="Succeeded to initialize custom process group.")

    async def destroy_group(self, request: DestroyGroup) -> GroupAnswer:
        """Leave a group. An update under way on it is given up."""
        if request.group_name not in self._groups:
            return GroupAnswer(success=False, message=NO_GROUP)
        busy = await self._lasting(self._leave(request.group_name, "its source destroyed the group"))
        return GroupAnswer(success=not busy, message=busy or "Succeeded to destroy custom process group.")

    async def _leave(self, name: str, reason: str) -> str:
        """Says why not, if it can't be left now."""
        update = self._updates.get(name)
        if update is not None and update.applying:
            return f"an update of group {name!r} is being applied; ask again when it has ended"
        group = self._groups.pop(name, None)
        if update is not None:
            await update.give_up(reason)
            self._forget(name, update)
        if group is not None:
            await group.close()
        return ""

    def _forget(self, name: str, update: Update) -> None:
        """Unless a complete that waited for it has, or another one has taken its place since."""
        if self._updates.get(name) is update:
            del self._updates[name]

    # updates

    async def prepare(self, request: PrepareUpdate) -> PrepareAnswer:
        """Check everything that can be checked, then begin to receive. Whatever does not fit is an error, all at once."""
        return await self._lasting(self._prepare(request))

    async def _prepare(self, request: PrepareUpdate) -> PrepareAnswer:
        group = self._usable(request.group_name)
        if group is None:
            return PrepareAnswer(status="error", message=NO_GROUP)
        busy = next((name for name, update in self._updates.items() if not update.error), "")
        if self._preparing or busy:
            which = f" of group {busy!r}" if busy else ""
            return PrepareAnswer(status="error", message=f"an update{which} is under way; complete it, or destroy its group")
        tensors, problems = announced(request)
        if problems:
            return PrepareAnswer(status="error", message=told(problems))
        update = Update(tensors, request.num_buckets, self._names)
        self._preparing = True
        try:
            await update.check(RemoteTarget(self._find_control(), self._secret), self._config)
        except (SynclineError, MemoryError) as error:
            await update.give_up(str(error))
            problems = list(error.problems) if isinstance(error, PlanError) else [f"{type(error).__name__}: {error}"]
            return PrepareAnswer(status="error", message=told(problems))
        finally:
            self._preparing = False
        if self._usable(request.group_name) is not group:  # left meanwhile
            await update.give_up(NO_GROUP)
            return PrepareAnswer(status="error", message=NO_GROUP)
        self._updates[request.group_name] = update
        update.start(group, self._timeout_s, lambda update: self._failed(request.group_name, update))
        return PrepareAnswer(status="ready", message=f"Started recv loop for {request.num_buckets} buckets")

    async def complete(self, request: CompleteUpdate) -> CompleteAnswer:
        """Wait for the last broadcast, then apply everything at once, or nothing. Goes on if its caller goes away.

        The first call for an update is the only one that ends it. One that repeats it is refused at once, and changes nothing.
        """
        return await self._lasting(self._complete(request))

    async def _complete(self, request: CompleteUpdate) -> CompleteAnswer:
        name = request.group_name
        update = self._updates.get(name)
        if update is None:
            known = name in self._groups
            return CompleteAnswer(success=False, message="no update was prepared" if known else NO_GROUP)
        if update.completing:
            return CompleteAnswer(success=False, message="this update is being completed already")
        update.completing = True  # before anything is waited for: see `complete`
        if not await update.received(self._timeout_s):
            await self._leave(name, "it was not received in time")
            received = update.buckets_received
            return CompleteAnswer(success=False, num_buckets_received=received, message="Recv thread timed out")
        try:
            if update.error:
                return CompleteAnswer(success=False, num_buckets_received=update.buckets_received, message=update.error)
            return await self._apply(update, flush_cache=request.flush_cache)
        finally:
            self._forget(name, update)
            await update.give_up("it is over")

    async def _apply(self, update: Update, *, flush_cache: bool) -> CompleteAnswer:
        received = update.buckets_received
        try:
            target = await update.apply(self._next_version, flush_cache=flush_cache)
        except SynclineError as error:
            return CompleteAnswer(success=False, num_buckets_received=received, message=f"{type(error).__name__}: {error}")
        if target.ok:
            return CompleteAnswer(
                success=True, num_buckets_received=received, message=f"Applied weights from {received} buckets"
            )
        state = f"; the target is {target.state}, version {target.version}" if target.state is not None else ""
        message = f"{type(target.error).__name__}: {target.error}{state}"
        return CompleteAnswer(success=False, num_buckets_received=received, message=message)

    async def _next_version(self) -> int:
        async with self._calling() as client:
            held = (await client.status()).version
        self._newest = max(self._newest, held or 0) + 1
        return self._newest

    def _usable(self, name: str) -> UpdateGroup | None:
        group = self._groups.get(name)
        return group if group is not None and group.usable else None

    def _failed(self, name: str, update: Update) -> None:
        """A source that stopped in the middle of its broadcasts, or after them: what it may still send is nobody's."""
        log.warning("an update of group %r failed: %s", name, update.error)
        group = self._groups.pop(name, None)
        if group is not None:
            _ = group.abort()

    # sources of ours

    async def forward_prepare(self, request: PrepareRequest) -> PrepareReply:
        """A prepare of a syncline source: the target answers it. Sources connect at the control address before."""
        try:
            async with self._calling(unsigned=True) as client:
                return await client.prepare(request)
        except SynclineError as error:
            return PrepareReply(status="error", message=wire_text(error), error=type(error).__name__)

    async def forward_complete(self, request: CompleteRequest) -> CompleteReply:
        """A complete of a syncline source: the target answers it."""
        try:
            async with self._calling(unsigned=True) as client:
                return await client.complete(request)
        except SynclineError as error:
            return CompleteReply(success=False, message=wire_text(error), error=type(error).__name__)

    @contextlib.asynccontextmanager
    async def _calling(self, *, unsigned: bool = False) -> AsyncIterator[ControlClient]:
        """A client of the target. ``unsigned``: for a caller who has not shown that it knows the secret."""
        if unsigned and self._secret is not None:
            raise AuthError(f"this target takes signed calls only, at its control address {self._find_control()}")
        client = ControlClient(self._find_control(), secret=self._secret, timeout_s=self._config.connect_timeout_s)
        try:
            yield client
        finally:
            await client.close()

    # life

    async def close(self) -> None:
        """Give up the update under way, unless it is being applied (that is waited for), and leave every group. Idempotent."""
        self._closed = True
        for joining in self._joining.values():
            joining.cancel()
        for update in [update for update in self._updates.values() if not update.applying]:
            await update.give_up(_CLOSING)
        while self._tasks:
            await asyncio.wait(self._tasks)
        for name in {*self._updates, *self._groups}:
            await self._leave(name, _CLOSING)

    async def _lasting(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry something out even if its caller goes away meanwhile."""
        if self._closed:
            work.close()
            raise ClosedError("this server takes no updates any more")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)
