"""The leader rank of a target: the shell around `LeaderMachine`. Talks to the source, and to the target's other ranks.

Its own rank is ordered like the others, by a call instead of over the network.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from syncline.stages.completions import TaskScope

from .control_client import ControlClient
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
    Step,
)
from .leader_machine import LeaderMachine
from .messages import (
    AbortRequest,
    Ack,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    JoinRequest,
    Landing,
    ManifestReply,
    PrepareReply,
    PrepareRequest,
    RankOrder,
    State,
    Status,
    VoteReply,
)
from .rank import Rank

log = logging.getLogger("syncline.engine")

T = TypeVar("T")

_GRACE_S = 2.0
"""At most so long is a rank waited for that has to give a push up; a tenth of short deadlines."""
_STATUS_S = 2.0
_JOIN_S = 10.0
_TWO_PHASE_ONLY = (
    "this target takes pushes from syncline sources, which connect first (POST /connect); a source that speaks only the "
    "two-phase protocol names no version and no push, and how its data would travel is not set up here"
)


@dataclass(kw_only=True)
class _Member:
    """Another rank, as the leader reaches it."""

    incarnation: str
    client: ControlClient
    watch: asyncio.Task[None] | None = None


@dataclass(kw_only=True)
class _Push:
    """What the source asked, and what the ranks said."""

    prepare: PrepareRequest
    landing: Landing
    deadline: float
    grace_s: float
    complete: CompleteRequest | None = None
    timer: asyncio.TimerHandle | None = None
    prepared: dict[int, PrepareReply] = field(default_factory=dict)
    votes: dict[int, VoteReply] = field(default_factory=dict)
    began: dict[Step, float] = field(default_factory=dict)
    ended: float = 0.0

    def took(self, first: Step) -> float:
        """Seconds from the first order ``first`` to the end."""
        return max(0.0, self.ended - self.began[first]) if first in self.began and self.ended else 0.0


class Leader:
    """The leader of a target.

    Args:
        rank: the leader's own rank (0).
        world_size: ranks of the target.
        scope: where work in the background runs.
        secret: shared secret of the target's ranks.
        heartbeat_s, patience_s: see `ControlClient.watch`.
        drop_watches: ends the watches that a rank holds on this process.
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
    ) -> None:
        self._rank = rank
        self._scope = scope
        self._secret, self._heartbeat_s, self._patience_s = secret, heartbeat_s, patience_s
        self._drop_watches = drop_watches
        self._machine = LeaderMachine(world_size)
        self._members: dict[int, _Member] = {}
        self._waiting: dict[tuple[Call, str], list[asyncio.Future[Answer]]] = {}
        self._pushes: dict[str, _Push] = {}
        self._last: tuple[str, CompleteReply] | None = None
        self._source = ("", -1)
        self._linked: ConnectRequest | None = None
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
        statuses = await self._ask_members(lambda _rank, client: client.status())
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
        self._check_ready()
        own = await self._rank.manifest()
        replies = await self._ask_members(lambda _rank, client: client.manifest(), timeout_s=60.0)
        if replies is None:
            raise TargetUnreachable("a rank of the target did not give its manifest; ask again later")
        return ManifestReply(
            manifests=[own, *(reply.manifests[0] for reply in replies)],
            incarnation=self._rank.fence.incarnation,
            manifest_digest="+".join([self._rank.manifest_digest, *(reply.manifest_digest for reply in replies)]),
        )

    async def _ask_members(
        self, call: Callable[[int, ControlClient], Coroutine[Any, Any, T]], timeout_s: float = _STATUS_S
    ) -> list[T] | None:
        """Ask every other rank; None if one of them does not answer."""
        members = [(rank, self._members[rank]) for rank in sorted(self._members)]
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*(call(rank, member.client) for rank, member in members)))
        except (TimeoutError, SynclineError):
            return None

    def _check_ready(self) -> None:
        if not self._machine.ready:
            missing = f"ranks {list(self._machine.missing)} have not joined" if self._machine.missing else "it is being fenced"
            raise TargetUnreachable(f"the target is not ready: {missing}; ask again later")

    # calls of the source

    async def connect(self, request: ConnectRequest) -> Ack:
        """All ranks link up side by side; the first failure ends it for all."""
        self._check_ready()
        await self._make_way(request)
        digests = request.manifest_digest.split("+")
        world_size = self._rank.world_size
        if sorted(links.rank for links in request.ranks) != list(range(world_size)) or len(digests) != world_size:
            raise ProtocolError(f"the connect request is not for the {world_size} ranks of this target")
        self._linked = None
        calls = [self._connect_one(request, rank, digests[rank]) for rank in range(world_size)]
        await _all_or_first_error(calls, request.timeout_s)
        self._linked = request
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
        links = [links for links in request.ranks if links.rank == rank]
        mine = ConnectRequest(
            target=request.target,
            plan_digest=request.plan_digest,
            manifest_digest=digest,
            source_incarnation=request.source_incarnation,
            generation=request.generation,
            landing=request.landing,
            in_flight=request.in_flight,
            verify=request.verify,
            ranks=links,
            timeout_s=request.timeout_s,
        )
        if rank == 0:
            await self._rank.connect(mine)
        elif rank in self._members:
            await self._members[rank].client.connect(mine)
        else:
            raise TargetUnreachable(f"rank {rank} of the target is gone")

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        if request.version is None or not request.push_id:
            raise ProtocolError(_TWO_PHASE_ONLY)
        self._rank.fence.check_incarnation(request.incarnation)
        if self._linked is None:
            raise ProtocolError("this target is not linked with a source; connect first")
        push_id = request.push_id
        if push_id not in self._pushes:
            self._pushes[push_id] = self._new_push(request, self._linked.landing)
            self._arm(push_id)
        event = PrepareAsked(push_id=push_id, version=request.version, landing=self._linked.landing)
        push = self._pushes[push_id]
        answer = await self._call("prepare", push_id, event)
        self._tidy()
        if not answer.ok:
            return PrepareReply(status="error", error=answer.error, message=answer.message, **self._identity(push))
        digests = {rank: digest for reply in push.prepared.values() for rank, digest in reply.digests.items()}
        return PrepareReply(status="already" if answer.already else "ready", digests=digests, **self._identity(push))

    def _identity(self, push: _Push) -> dict[str, Any]:
        fence = self._rank.fence
        digests = [push.prepared[rank].manifest_digest for rank in sorted(push.prepared)]
        return {"incarnation": fence.incarnation, "version": fence.version, "manifest_digest": "+".join(digests)}

    def _new_push(self, request: PrepareRequest, landing: Landing) -> _Push:
        grace_s = _grace_s(request.timeout_s)
        deadline = time.monotonic() + request.timeout_s - grace_s
        return _Push(prepare=request, landing=landing, deadline=deadline, grace_s=grace_s)

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        if request.version is None or not request.push_id:
            raise ProtocolError(_TWO_PHASE_ONLY)
        self._rank.fence.check_incarnation(request.incarnation)
        if self._last is not None and self._last[0] == request.push_id:
            return self._last[1]
        push = self._pushes.get(request.push_id)
        if push is not None and push.complete is None and self._machine.step == "prepare":
            push.complete = request
            push.grace_s = _grace_s(request.timeout_s)
            push.deadline = time.monotonic() + request.timeout_s - push.grace_s
            self._arm(request.push_id)
        answer = await self._call("complete", request.push_id, CompleteAsked(push_id=request.push_id))
        reply = self._complete_reply(answer, push)
        if answer.ok:
            self._last = (request.push_id, reply)
        self._tidy()
        return reply

    def _complete_reply(self, answer: Answer, push: _Push | None) -> CompleteReply:
        votes = push.votes if push is not None else {}
        return CompleteReply(
            success=answer.ok,
            num_buckets_received=max((vote.buckets for vote in votes.values()), default=0),
            message=answer.message,
            error=answer.error,
            state=self.state,
            version=self._rank.fence.version,
            votes={str(rank): vote.yes for rank, vote in sorted(votes.items())},
            landing_bytes=sum(vote.landing_bytes for vote in votes.values()),
            commit_s=push.took("commit") if push is not None else 0.0,
            pause_s=push.took("pause") if push is not None else 0.0,
        )

    async def abort(self, request: AbortRequest) -> Ack:
        reason = f"the source aborted the push: {request.reason}" if request.reason else "the source aborted the push"
        answer = await self._call("abort", request.push_id, AbortAsked(push_id=request.push_id, reason=reason))
        return Ack(ok=answer.ok, message=answer.message, error=answer.error, serving=self._rank.serving)

    def source_left(self, peer: str) -> None:
        """Nobody watches any more under the name ``peer``: if that is the source, its push has ended."""
        push_id = self._machine.push_id
        if push_id is not None and peer == self._source[0]:
            reason = "the source went away: its control connection ended"
            self._feed(AbortAsked(push_id=push_id, reason=reason, error="SourceRankLost"))

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
            self._disarm(self._pushes.pop(push_id))

    # members

    async def join(self, request: JoinRequest) -> Ack:
        """Another rank says that it is there. It is watched from now on."""
        world_size = self._rank.world_size
        if request.world_size != world_size or not 0 < request.rank < world_size:
            raise ProtocolError(
                f"rank {request.rank} of {request.world_size} cannot join this target: it has ranks 0 to {world_size - 1}"
            )
        client = ControlClient(
            request.address,
            secret=self._secret,
            timeout_s=_JOIN_S,
            heartbeat_s=self._heartbeat_s,
            patience_s=self._patience_s,
        )
        member = _Member(incarnation=request.incarnation, client=client)
        opened = asyncio.Event()
        watch = self._watch(request.rank, member, opened.set)
        member.watch = asyncio.create_task(watch, name=f"syncline-member-{request.rank}")
        try:
            async with asyncio.timeout(_JOIN_S):
                await _first(opened.wait(), member.watch)
        except TimeoutError:
            pass
        if not opened.is_set() or self._closed:
            await self._forget(member)
            raise TargetUnreachable(f"the leader cannot reach rank {request.rank} at {request.address}")
        before = self._members.pop(request.rank, None)
        self._members[request.rank] = member
        if before is not None:
            _ = self._scope.start(self._forget(before))
        self._feed(
            Joined(rank=request.rank, incarnation=request.incarnation, process=request.process, serving=request.serving)
        )
        if member.watch.done():
            self._lose(request.rank, request.incarnation, "its connection ended as it joined")
        return Ack(serving=self._rank.serving)

    async def _watch(self, rank: int, member: _Member, opened: Callable[[], None]) -> None:
        try:
            reason = await member.client.watch(opened)
        except SynclineError as error:
            reason = str(error)
        if self._members.get(rank) is member:
            self._lose(rank, member.incarnation, reason)

    def _lose(self, rank: int, incarnation: str, reason: str) -> None:
        member = self._members.get(rank)
        if member is not None and member.incarnation == incarnation:
            del self._members[rank]
            _ = self._scope.start(self._forget(member))
            log.warning("rank %d of the target was lost: %s", rank, reason)
            self._feed(Lost(rank=rank, incarnation=incarnation, reason=reason))

    async def _forget(self, member: _Member) -> None:
        """Close both directions, so that the rank notices and joins again."""
        if member.watch is not None and member.watch is not asyncio.current_task():
            member.watch.cancel()
            await asyncio.gather(member.watch, return_exceptions=True)
        await member.client.close()
        await self._drop_watches(member.incarnation)

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
                    self._arm_grace(order.push_id)
                case Drop():
                    self._drop(order)
                case Over():
                    push = self._pushes.get(order.push_id)
                    if push is not None:
                        push.ended = time.monotonic()
                        self._disarm(push)

    def _send(self, order: Send) -> None:
        push = self._pushes.get(order.push_id)
        if push is not None:
            push.began.setdefault(order.step, time.monotonic())
        for rank in order.ranks:
            member = self._members.get(rank)
            _ = self._scope.start(self._deliver(order, rank, member, push))

    async def _deliver(self, order: Send, rank: int, member: _Member | None, push: _Push | None) -> None:
        """Give one order to one rank and tell the machine how it went."""
        replied: dict[str, Any] = {"push_id": order.push_id, "step": order.step, "rank": rank}
        try:
            result = await self._carry_out(order, rank, member, push)
        except TargetUnreachable as error:
            if member is not None:
                self._lose(rank, member.incarnation, str(error))
        except SynclineError as error:
            message = "; ".join(error.problems) if isinstance(error, PlanError) else str(error)
            self._feed(Replied(**replied, ok=False, error=type(error).__name__, message=message, serving=None))
        except Exception as error:  # a bug of ours must not leave a push without its end
            log.exception("rank %d failed to %s", rank, order.step)
            self._feed(Replied(**replied, ok=False, error="PushError", message=repr(error), serving=None))
        else:
            self._feed(Replied(**replied, **result))

    async def _carry_out(self, order: Send, rank: int, member: _Member | None, push: _Push | None) -> dict[str, Any]:
        if rank != 0 and member is None:
            raise TargetUnreachable(f"rank {rank} is gone")
        who = self._rank if member is None else member.client
        incarnation = self._rank.fence.incarnation if member is None else member.incarnation
        if order.step == "prepare":
            assert push is not None
            return await self._order_prepare(push, rank, who, incarnation)
        if order.step == "vote":
            assert push is not None
            return await self._order_vote(push, rank, who, incarnation)
        ack = await who.order(
            RankOrder(
                push_id=order.push_id,
                incarnation=incarnation,
                order=order.step,
                version=order.version,
                in_flight=self._linked.in_flight if self._linked is not None else "keep",
                flush_cache=push is not None and push.complete is not None and push.complete.flush_cache,
                reason=order.reason,
                timeout_s=self._remaining(push, order.step),
            )
        )
        return {"ok": ack.ok, "serving": ack.serving, "error": ack.error, "message": ack.message}

    async def _order_prepare(
        self, push: _Push, rank: int, who: Rank | ControlClient, incarnation: str
    ) -> dict[str, Any]:
        asked = push.prepare
        reply = await who.prepare(
            PrepareRequest(
                num_buckets=asked.num_buckets,
                version=asked.version,
                plan_digest=asked.plan_digest,
                push_id=asked.push_id,
                incarnation=incarnation,
                digests=asked.digests,
                timeout_s=self._remaining(push, "prepare"),
            )
        )
        push.prepared[rank] = reply
        already = reply.status == "already"
        return {"ok": reply.status != "error", "already": already, "error": reply.error, "message": reply.message}

    async def _order_vote(self, push: _Push, rank: int, who: Rank | ControlClient, incarnation: str) -> dict[str, Any]:
        asked = push.complete
        assert asked is not None
        vote = await who.vote(
            CompleteRequest(
                version=asked.version,
                push_id=asked.push_id,
                incarnation=incarnation,
                digests=asked.digests,
                timeout_s=self._remaining(push, "vote"),
            )
        )
        push.votes[rank] = vote
        return {"ok": vote.yes, "error": vote.error, "message": vote.message}

    def _drop(self, order: Drop) -> None:
        if order.rank != 0:
            self._lose(order.rank, order.incarnation, order.reason)
            return
        log.error("the leader's own rank did not obey: %s; it is fenced and joins again", order.reason)
        _ = self._scope.start(self._rejoin())

    async def _rejoin(self) -> None:
        """The leader's own rank could not do what it was ordered: it serves nothing, and joins again once it is at rest."""
        self._rank.fence.fence("it did not obey an order in time")
        await self._rank.abandon("it did not obey an order in time")
        self._rank.fence.incarnation = f"{self._rank.process}/{time.monotonic_ns()}"
        self.start()

    # time

    def _remaining(self, push: _Push | None, step: Step) -> float:
        if push is None or step in ("abort", "fence"):
            return _GRACE_S
        return max(0.05, push.deadline - time.monotonic())

    def _arm(self, push_id: str) -> None:
        push = self._pushes[push_id]
        self._disarm(push)
        delay = max(0.0, push.deadline - time.monotonic())
        push.timer = asyncio.get_running_loop().call_later(delay, self._feed, DeadlinePassed(push_id=push_id))

    def _arm_grace(self, push_id: str) -> None:
        push = self._pushes.get(push_id)
        delay = _GRACE_S if push is None else push.grace_s
        if push is not None:
            self._disarm(push)
        event = DeadlinePassed(push_id=push_id, grace=True)
        timer = asyncio.get_running_loop().call_later(delay, self._feed, event)
        if push is not None:
            push.timer = timer

    @staticmethod
    def _disarm(push: _Push) -> None:
        if push.timer is not None:
            push.timer.cancel()
            push.timer = None

    async def close(self) -> None:
        """Let go of every rank. A push under way is given up by every rank for itself."""
        self._closed = True
        members, self._members = self._members, {}
        for push in self._pushes.values():
            self._disarm(push)
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(TargetLost("the receiver was closed"))
        await asyncio.gather(*(self._forget(member) for member in members.values()))


def _grace_s(timeout_s: float) -> float:
    return min(_GRACE_S, timeout_s / 10)


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


async def _first(wait: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
    """Returns when either has ended."""
    waiter = asyncio.create_task(wait)
    try:
        await asyncio.wait({waiter, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
