"""One push as the leader of a target has it before it: what the source asked, what the ranks said, how much time is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .leader_events import Replied, Send, Step
from .messages import (
    Ack,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    LandingTime,
    PrepareReply,
    PrepareRequest,
    RankOrder,
    VoteReply,
)

GRACE_S = 2.0
"""At most so long is a rank waited for that has to give a push up; a tenth of short deadlines."""


class Obeys(Protocol):
    """A rank, in this process (`Rank`) or another (`ControlClient`)."""

    async def prepare(self, request: PrepareRequest) -> PrepareReply: ...
    async def vote(self, request: CompleteRequest) -> VoteReply: ...
    async def order(self, order: RankOrder) -> Ack: ...


@dataclass(kw_only=True)
class Push:
    """A push under way, or one that has just ended.

    Attributes:
        asked: the source's prepare.
        completing: the source's complete, once it has come.
        link: what the source connected with.
        prepared, votes: what the ranks answered.
        began: when the first order of a step went out (seconds, monotonic).
        ended: when the push was over; 0 before.
    """

    asked: PrepareRequest
    link: ConnectRequest
    completing: CompleteRequest | None = None
    prepared: dict[int, PrepareReply] = field(default_factory=dict)
    votes: dict[int, VoteReply] = field(default_factory=dict)
    began: dict[Step, float] = field(default_factory=dict)
    ended: float = 0.0
    grace_s: float = GRACE_S
    _deadline: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def allow(self, timeout_s: float, expired: Callable[[], None]) -> None:
        """From now on the push may take ``timeout_s`` seconds, of which the last part is kept for giving it up."""
        self.grace_s = min(GRACE_S, timeout_s / 10)
        self._deadline = time.monotonic() + timeout_s - self.grace_s
        self.call_in(max(0.0, timeout_s - self.grace_s), expired)

    def call_in(self, delay_s: float, expired: Callable[[], None]) -> None:
        """Call ``expired`` then, unless something else is asked for before."""
        self.disarm()
        self._timer = asyncio.get_running_loop().call_later(delay_s, expired)

    def disarm(self) -> None:
        """Nothing is called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def remaining_s(self) -> float:
        """Seconds that a rank may take for what it is ordered now."""
        return max(0.05, self._deadline - time.monotonic())

    def prepare_reply(self, **fields: Any) -> PrepareReply:
        """The answer to the source, with what the ranks hold."""
        replies = [self.prepared[rank] for rank in sorted(self.prepared)]
        digests = {rank: digest for reply in replies for rank, digest in reply.digests.items()}
        return PrepareReply(manifest_digest="+".join(reply.manifest_digest for reply in replies), digests=digests, **fields)

    def fill_in(self, reply: CompleteReply) -> None:
        """Add the ranks' votes and the times to the answer to the source."""
        began, votes = self.began, self.votes
        reply.num_buckets_received = max((vote.buckets for vote in votes.values()), default=0)
        reply.votes = {str(rank): vote.yes for rank, vote in sorted(votes.items())}
        reply.landing_bytes = sum(vote.landing_bytes for vote in votes.values())
        reply.landings = [LandingTime(rank, vote.landing_s, vote.starved_s) for rank, vote in sorted(votes.items())]
        if "commit" in began:
            reply.commit_s = max(0.0, began.get("resume", self.ended) - began["commit"])
        if "pause" in began:
            reply.pause_s = max(0.0, self.ended - began["pause"])


async def carry_out(order: Send, rank: int, who: Obeys, incarnation: str, push: Push | None) -> Replied:
    """Give one order to one rank. Raises what the rank answers, or that it does not answer."""
    if order.step == "prepare":
        assert push is not None
        return await _prepare(order, rank, who, incarnation, push)
    if order.step == "vote":
        assert push is not None
        return await _vote(order, rank, who, incarnation, push)
    ending = order.step in ("abort", "fence")
    ack = await who.order(
        RankOrder(
            push_id=order.push_id,
            incarnation=incarnation,
            order=order.step,
            version=order.version,
            in_flight="keep" if push is None else push.link.in_flight,
            flush_cache=push is not None and push.completing is not None and push.completing.flush_cache,
            reason=order.reason,
            timeout_s=GRACE_S if push is None or ending else push.remaining_s,
        )
    )
    return Replied(
        push_id=order.push_id, step=order.step, rank=rank, ok=ack.ok, serving=ack.serving, error=ack.error, message=ack.message
    )


async def _prepare(order: Send, rank: int, who: Obeys, incarnation: str, push: Push) -> Replied:
    asked = push.asked
    reply = await who.prepare(
        PrepareRequest(
            num_buckets=asked.num_buckets,
            version=asked.version,
            plan_digest=asked.plan_digest,
            push_id=asked.push_id,
            incarnation=incarnation,
            digests=asked.digests,
            timeout_s=push.remaining_s,
        )
    )
    push.prepared[rank] = reply
    return Replied(
        push_id=order.push_id,
        step=order.step,
        rank=rank,
        ok=reply.status != "error",
        already=reply.status == "already",
        error=reply.error,
        message=reply.message,
    )


async def _vote(order: Send, rank: int, who: Obeys, incarnation: str, push: Push) -> Replied:
    asked = push.completing
    assert asked is not None
    vote = await who.vote(
        CompleteRequest(
            version=asked.version,
            push_id=asked.push_id,
            incarnation=incarnation,
            digests=asked.digests,
            timeout_s=push.remaining_s,
        )
    )
    push.votes[rank] = vote
    return Replied(push_id=order.push_id, step=order.step, rank=rank, ok=vote.yes, error=vote.error, message=vote.message)
