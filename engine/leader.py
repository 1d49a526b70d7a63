"""The leader rank of a target: the shell around `LeaderMachine`. Talks to the source, and to the target's other ranks.

Its own rank is ordered like the others, by a call instead of over the network.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from syncline.stages.completions import TaskScope

from .control import watch_name
from .errors import BusyError, PlanError, ProtocolError, SynclineError, TargetLost, TargetUnreachable
from .leader_events import (
    AbortAsked,
    Answer,
    Call,
    CompleteAsked,
    DeadlinePassed,
    Drop,
    Event,
    Grace,
    Joined,
    Lost,
    Over,
    PrepareAsked,
    Replied,
    Send,
)
from .leader_machine import LeaderMachine
from .leader_push import GRACE_S, Push, carry_out
from .messages import (
    AbortRequest,
    Ack,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    JoinRequest,
    ManifestReply,
    PrepareReply,
    PrepareRequest,
    State,
    Status,
)
from .rank import Rank
from .roster import Member, Roster

log = logging.getLogger("syncline.engine")

_STATUS_S = 2.0
_MANIFEST_S = 60.0
_STARTING_S = 10.0
"""While ranks join for the first time, calls wait for them so long."""
_WATCH_S = 5.0
"""A source that begins a push watches its target by then; one that does not has gone, and its prepare came late."""
_FENCING_S = 5.0
"""While ranks are being fenced, calls wait for that so long."""
_TWO_PHASE_ONLY = (
    "this target takes pushes from syncline sources, which connect first (POST /connect); a source that speaks only the "
    "two-phase document names no version and no push: mount syncline.adapters.engines.two_phase_app for it and call that"
)


class Leader:
    """The leader of a target.

    Args:
        rank: the leader's own rank (0).
        world_size: ranks of the target.
        scope: where work in the background runs.
        secret: shared secret of the target's ranks.
        heartbeat_s, patience_s: see `ControlClient.watch`.
        drop_watches: ends the watches that a rank holds on this process.
        watched: whether somebody watches this process under a name, if need be after waiting so many seconds for it.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        world_size: int,
        scope: TaskScope,
        secret: str | None,
        heartbeat_s: float,
        patience_s: float,
        drop_watches: Callable[[str], Awaitable[None]],
        watched: Callable[[str, float], Awaitable[bool]],
    ) -> None:
        self._rank = rank
        self._scope = scope
        self._machine = LeaderMachine(world_size)
        self._roster = Roster(
            world_size=world_size,
            scope=scope,
            secret=secret,
            heartbeat_s=heartbeat_s,
            patience_s=patience_s,
            drop_watches=drop_watches,
            on_lost=lambda rank, incarnation, reason: self._feed(Lost(rank=rank, incarnation=incarnation, reason=reason)),
        )
        self._watched = watched
        self._waiting: dict[tuple[Call, str], list[asyncio.Future[Answer]]] = {}
        self._pushes: dict[str, Push] = {}
        self._last: tuple[str, CompleteReply] | None = None
        self._source = ("", -1)
        self._linked: ConnectRequest | None = None
        self._source_left = False
        self._ready = asyncio.Event()
        self._was_ready = False
        self._closed = False

    def start(self) -> None:
        """The leader's own rank joins."""
        fence = self._rank.fence
        self._feed(Joined(rank=0, incarnation=fence.incarnation, process=self._rank.process, serving=self._rank.serving))

    # what the target is

    @property
    def state(self) -> State:
        """State of the whole target."""
        if self._machine.push_id is not None:
            return "UPDATING"
        if self._machine.step is not None or self._machine.serving is None:
            return "FENCED"
        return self._rank.fence.state

    async def status(self) -> Status:
        own, fence = self._rank, self._rank.fence
        await own.refresh(_STATUS_S)
        statuses = await self._roster.ask(lambda client: client.status(), _STATUS_S)
        digests = [own.manifest_digest, *(status.manifest_digest for status in statuses or ())]
        missing = f"ranks {list(self._machine.missing)} have not joined" if self._machine.missing else ""
        return Status(
            state=self.state,
            version=fence.version,
            digest=fence.digest,
            incarnation=fence.incarnation,
            rank=0,
            world_size=own.world_size,
            ready=self._machine.ready and statuses is not None,
            manifest_digest="+".join(digests),
            landing_bytes=own.landing_bytes + sum(status.landing_bytes for status in statuses or ()),
            pushes=own.pushes,
            message=missing or (fence.reason if self.state == "FENCED" else ""),
        )

    async def manifest(self) -> ManifestReply:
        """All ranks' manifests. Waits while they join for the first time."""
        await self._until_ready(_STARTING_S)
        own = await self._rank.manifest()
        replies = await self._roster.ask(lambda client: client.manifest(), _MANIFEST_S)
        if replies is None:
            raise TargetUnreachable("a rank of the target did not give its manifest; ask again later")
        return ManifestReply(
            manifests=[own, *(reply.manifests[0] for reply in replies)],
            incarnation=self._rank.fence.incarnation,
            manifest_digest="+".join([self._rank.manifest_digest, *(reply.manifest_digest for reply in replies)]),
        )

    async def _until_ready(self, timeout_s: float) -> None:
        """Wait for what is about to happen (ranks join for the first time, or are being fenced), not for a lost rank."""
        missing = self._machine.missing
        if not missing or not self._was_ready:
            try:
                async with asyncio.timeout(min(timeout_s, _STARTING_S if missing else _FENCING_S)):
                    await self._ready.wait()
            except TimeoutError:
                pass
        if not self._machine.ready:
            missing = self._machine.missing
            why = f"ranks {list(missing)} have not joined" if missing else "its ranks are being fenced"
            raise TargetUnreachable(f"the target is not ready: {why}; ask again later")

    # calls of the source

    async def connect(self, request: ConnectRequest) -> Ack:
        """All ranks link up side by side; the first failure ends it for all."""
        await self._until_ready(request.timeout_s)
        await self._make_way(request)
        digests = request.manifest_digest.split("+")
        world_size = self._rank.world_size
        if sorted(links.rank for links in request.ranks) != list(range(world_size)) or len(digests) != world_size:
            raise ProtocolError(f"the connect request is not for the {world_size} ranks of this target")
        self._linked = None
        calls = [self._connect_one(request, rank, digests[rank]) for rank in range(world_size)]
        await _all_or_first_error(calls, request.timeout_s)
        self._linked = request
        self._source_left = False
        self._source = (request.source_incarnation, request.generation)
        return Ack(serving=self._rank.serving)

    async def _make_way(self, request: ConnectRequest) -> None:
        """A source that connects again has given up its push; another source has to wait for the end of one."""
        source, generation = self._source
        push_id = self._machine.push_id
        if request.source_incarnation == source and request.generation < generation:
            raise ProtocolError(f"connect of generation {request.generation} came late: {generation} is linked already")
        if push_id is None:
            return
        if request.source_incarnation != source:
            raise BusyError(f"push {push_id} of another source is under way on this target; connect when it has ended")
        await self.abort(AbortRequest(push_id=push_id, reason="its source connects anew"))

    async def _connect_one(self, request: ConnectRequest, rank: int, digest: str) -> None:
        mine = ConnectRequest(
            target=request.target,
            plan_digest=request.plan_digest,
            manifest_digest=digest,
            source_incarnation=request.source_incarnation,
            generation=request.generation,
            landing=request.landing,
            in_flight=request.in_flight,
            verify=request.verify,
            ranks=[links for links in request.ranks if links.rank == rank],
            timeout_s=request.timeout_s,
        )
        if rank == 0:
            await self._rank.connect(mine)
            return
        member = self._roster.get(rank)
        if member is None:
            raise TargetUnreachable(f"rank {rank} of the target is gone")
        await member.client.connect(mine)

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        if request.version is None or not request.push_id:
            raise ProtocolError(_TWO_PHASE_ONLY)
        self._rank.fence.check_incarnation(request.incarnation)
        await self._until_ready(request.timeout_s / 2)
        link = self._linked
        if link is None:
            raise ProtocolError("this target is not linked with a source; connect first")
        await self._check_source(request, link)
        push_id = request.push_id
        push = self._pushes.get(push_id)
        if push is None:
            push = self._pushes[push_id] = Push(asked=request, link=link)
            push.allow(request.timeout_s, partial(self._feed, DeadlinePassed(push_id=push_id)))
        event = PrepareAsked(push_id=push_id, version=request.version, landing=link.landing)
        answer = await self._call("prepare", push_id, event)
        self._tidy()
        status = "error" if not answer.ok else "already" if answer.already else "ready"
        fence = self._rank.fence
        return push.prepare_reply(
            status=status, error=answer.error, message=answer.message, incarnation=fence.incarnation, version=fence.version
        )

    async def _check_source(self, request: PrepareRequest, link: ConnectRequest) -> None:
        """The source that asks is the one that linked, and it is still there: nobody else would end what it begins.

        A process that was stopped and goes on finds calls of a source that has given it up long ago.

        Raises:
            PlanError: the links are another source's by now. A source that is there plans and links anew, in the same push.
            ProtocolError: the source is not there.
        """
        named = request.source_incarnation
        watches = not self._source_left and (
            named != link.source_incarnation or await self._watched(watch_name(link), min(request.timeout_s / 2, _WATCH_S))
        )
        newest = self._linked
        if newest is None or named not in ("", newest.source_incarnation):
            other = "another source" if newest is None else f"another source ({newest.source_incarnation})"
            raise _stale(f"{other} has linked with this target since")
        if self._source_left or newest is not link or not watches:
            raise ProtocolError("the source does not watch this target, as one that is there does; connect again")

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        if request.version is None or not request.push_id:
            raise ProtocolError(_TWO_PHASE_ONLY)
        self._rank.fence.check_incarnation(request.incarnation)
        push_id = request.push_id
        if self._last is not None and self._last[0] == push_id:
            return self._last[1]
        push = self._pushes.get(push_id)
        if push is not None and push.completing is None and self._machine.step == "prepare":
            push.completing = request
            push.allow(request.timeout_s, partial(self._feed, DeadlinePassed(push_id=push_id)))
        answer = await self._call("complete", push_id, CompleteAsked(push_id=push_id))
        reply = CompleteReply(
            success=answer.ok,
            message=answer.message,
            error=answer.error,
            state=self.state,
            version=self._rank.fence.version,
        )
        if push is not None:
            push.fill_in(reply)
        if answer.ok:
            self._last = (push_id, reply)
        self._tidy()
        return reply

    async def abort(self, request: AbortRequest) -> Ack:
        reason = f"the source aborted the push: {request.reason}" if request.reason else "the source aborted the push"
        answer = await self._call("abort", request.push_id, AbortAsked(push_id=request.push_id, reason=reason))
        return Ack(ok=answer.ok, message=answer.message, error=answer.error, serving=self._rank.serving)

    def unwatched(self, name: str) -> None:
        """Nobody watches any more under ``name``. If that is the source, it is gone, and what it sent before is late."""
        if self._linked is None or name != watch_name(self._linked):
            return
        self._source_left = True
        push_id = self._machine.push_id
        if push_id is not None:
            reason = "the source went away: its control connection ended"
            self._feed(AbortAsked(push_id=push_id, reason=reason, error="SourceRankLost"))

    async def join(self, request: JoinRequest) -> Ack:
        """Another rank says that it is there."""
        await self._roster.join(request)
        self._feed(Joined(rank=request.rank, incarnation=request.incarnation, process=request.process, serving=request.serving))
        return Ack(serving=self._rank.serving)

    async def _call(self, call: Call, push_id: str, event: Event) -> Answer:
        """Give the machine a call of the source; wait for its answer, which the push's timers bound."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((call, push_id), [])
        waiting.append(future)
        self._feed(event)
        try:
            return await future
        finally:
            if future in waiting:
                waiting.remove(future)
            if not waiting and self._waiting.get((call, push_id)) is waiting:
                del self._waiting[call, push_id]

    def _tidy(self) -> None:
        """Forget what was said about pushes that are over."""
        for push_id in [push_id for push_id in self._pushes if push_id != self._machine.push_id]:
            self._pushes.pop(push_id).disarm()

    # the machine's orders

    def _feed(self, event: Event) -> None:
        if self._closed:
            return
        for order in self._machine.handle(event):
            match order:
                case Send():
                    self._send(order)
                case Answer():
                    for future in self._waiting.pop((order.call, order.push_id), []):
                        if not future.done():
                            future.set_result(order)
                case Grace():
                    self._begin_grace(order.push_id)
                case Drop():
                    self._drop(order)
                case Over():
                    self._end(order.push_id)
        if self._machine.ready:
            self._was_ready = True
            self._ready.set()
        else:
            self._ready.clear()

    def _send(self, order: Send) -> None:
        push = self._pushes.get(order.push_id)
        if push is not None:
            push.began.setdefault(order.step, time.monotonic())
        for rank in order.ranks:
            _ = self._scope.start(self._deliver(order, rank, self._roster.get(rank), push))

    async def _deliver(self, order: Send, rank: int, member: Member | None, push: Push | None) -> None:
        """Give one order to one rank and tell the machine how it went."""
        if rank != 0 and member is None:
            return  # its loss is known
        own = self._rank
        who, incarnation = (own, own.fence.incarnation) if member is None else (member.client, member.incarnation)
        refused = partial(Replied, push_id=order.push_id, step=order.step, rank=rank, ok=False)
        try:
            replied = await carry_out(order, rank, who, incarnation, push)
        except TargetUnreachable as error:
            if member is not None:
                self._roster.lose(rank, member.incarnation, str(error))
        except SynclineError as error:
            message = "; ".join(error.problems) if isinstance(error, PlanError) else str(error)
            self._feed(refused(error=type(error).__name__, message=message))
        except Exception as error:  # a bug must not leave a push without its end
            log.exception("rank %d failed to %s", rank, order.step)
            self._feed(refused(error="PushError", message=repr(error)))
        else:
            self._feed(replied)

    def _begin_grace(self, push_id: str) -> None:
        push = self._pushes.get(push_id)
        expired = partial(self._feed, DeadlinePassed(push_id=push_id, grace=True))
        if push is not None:
            push.call_in(push.grace_s, expired)
        else:
            asyncio.get_running_loop().call_later(GRACE_S, expired)

    def _end(self, push_id: str) -> None:
        push = self._pushes.get(push_id)
        if push is not None:
            push.ended = time.monotonic()
            push.disarm()

    def _drop(self, order: Drop) -> None:
        if order.rank != 0:
            self._roster.lose(order.rank, order.incarnation, order.reason)
            return
        log.warning(
            "the target's leader rank was still busy with a push after its deadline (%s): it serves nothing until it is "
            "at rest and a push has committed",
            order.reason,
        )
        _ = self._scope.start(self._rejoin())

    async def _rejoin(self) -> None:
        """The leader's own rank did not do what it was ordered: it serves nothing, and joins again once it is at rest."""
        fence = self._rank.fence
        reason = "it was still busy with a push whose deadline had passed"
        fence.fence(reason)
        await self._rank.abandon(reason)
        fence.incarnation = f"{self._rank.process}/{time.monotonic_ns()}"
        self.start()

    async def close(self) -> None:
        """Let go of every rank. A push under way is given up by every rank for itself."""
        self._closed = True
        for push in self._pushes.values():
            push.disarm()
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(TargetLost("the receiver was closed"))
        await self._roster.close()


def _stale(why: str) -> PlanError:
    """What a source planned for stands no more."""
    return PlanError([f"{why}; push again: a push links anew by itself"])


async def _all_or_first_error(calls: Sequence[Coroutine[Any, Any, None]], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except TimeoutError:
        raise TargetUnreachable(f"not every rank of the target linked up within {timeout_s:.3g} s") from None
    except BaseExceptionGroup as errors:
        ours, rest = errors.split(SynclineError)
        if ours is None:
            raise
        if rest is not None:
            log.warning("connecting failed in more than one way", exc_info=rest)
        first: BaseException = ours
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
