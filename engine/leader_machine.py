"""The leader's protocol of a target, pure: events in, orders out. No I/O, no asyncio, no clock.

    prepare -> (data) -> vote -> pause -> commit -> resume
       |         |        |       |         |         |
       '---------+--------+-------'         '----+----'
              failure: abort                failure: fence every rank

A failure before the first commit order aborts: every rank that is left goes back to what it held (``streamed`` ranks that
wrote a byte are fenced, and then so are all). A failure after it fences all ranks until a whole push has committed: some
may hold the new version and some the old one. The leader's own rank is a member like the others, rank 0. Forward passes
start there: it is paused first and let go last.

Members come by `Joined`. One that comes back as another process, or that holds another version than the target, fences
the target: nothing is served that not all ranks hold.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

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
    Order,
    Over,
    PrepareAsked,
    Replied,
    Send,
    Step,
)
from .messages import Landing

_REMEMBERED_PUSHES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a push failed: class name of the error, and text."""

    error: str
    message: str


@dataclass(kw_only=True, slots=True)
class _Member:
    incarnation: str
    process: str


@dataclass(kw_only=True, slots=True)
class _Push:
    push_id: str
    version: int | None
    landing: Landing = "staged"
    step: Step = "prepare"
    waiting: set[int] = field(default_factory=set)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    already: set[int] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    failure: Failure | None = None
    fell_back: dict[int, int | None] = field(default_factory=dict)

    @property
    def ending(self) -> bool:
        return self.step in ("abort", "fence")


class LeaderMachine:
    """Decides for a whole target. Feed it events with `handle`; carry out the orders that it returns, in order.

    Args:
        world_size: ranks of the target.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.serving: int | None = None
        self._members: dict[int, _Member] = {}
        self._processes: dict[int, str] = {}
        self._push: _Push | None = None
        self._outcomes: OrderedDict[str, Failure | None] = OrderedDict()
        self._must_fence = ""
        self._fences = 0
        self._orders: list[Order] = []

    @property
    def ready(self) -> bool:
        """All ranks are there and agree on what they hold."""
        return len(self._members) == self.world_size and not self._must_fence and not self._fencing_idle

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not joined."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._members)

    @property
    def push_id(self) -> str | None:
        """The push under way."""
        return None if self._push is None or self._fencing_idle else self._push.push_id

    @property
    def step(self) -> Step | None:
        """What the push under way is doing."""
        return None if self._push is None else self._push.step

    @property
    def waiting(self) -> frozenset[int]:
        """Ranks whose reply to the current step is awaited."""
        return frozenset() if self._push is None else frozenset(self._push.waiting)

    @property
    def _fencing_idle(self) -> bool:
        return self._push is not None and self._push.version is None

    def handle(self, event: Event) -> list[Order]:
        """Take in one event; returns what to do now."""
        self._orders = []
        match event:
            case Joined():
                self._joined(event)
            case Lost():
                self._lost(event)
            case PrepareAsked():
                self._prepare_asked(event)
            case CompleteAsked():
                self._complete_asked(event)
            case AbortAsked():
                self._abort_asked(event)
            case Replied():
                self._replied(event)
            case DeadlinePassed():
                self._deadline(event)
        if self._push is None and self._must_fence:
            self._fence_idle()
        return self._orders

    # members

    def _joined(self, event: Joined) -> None:
        known = self._members.get(event.rank)
        if known is not None and known.incarnation == event.incarnation:
            return  # the same message once more
        if known is not None:
            self._lost(Lost(rank=event.rank, incarnation=known.incarnation, reason=f"rank {event.rank} joined anew"))
        if event.rank == 0 and 0 not in self._processes:
            self.serving = event.serving
        self._members[event.rank] = _Member(incarnation=event.incarnation, process=event.process)
        before = self._processes.setdefault(event.rank, event.process)
        self._processes[event.rank] = event.process
        if before != event.process:
            self._must_fence = f"rank {event.rank} restarted: it has to get a whole push before the target serves again"
        elif event.serving != self.serving:
            self._must_fence = f"rank {event.rank} joined with version {event.serving}, the target has {self.serving}"

    def _lost(self, event: Lost) -> None:
        member = self._members.get(event.rank)
        if member is None or member.incarnation != event.incarnation:
            return
        del self._members[event.rank]
        push = self._push
        if push is None:
            return
        if push.ending:
            self._settle(event.rank)
        else:
            self._fail("TargetLost", f"rank {event.rank} of the target was lost: {event.reason}")

    def _fence_idle(self) -> None:
        self._fences += 1
        reason, self._must_fence = self._must_fence, ""
        self.serving = None
        self._push = _Push(push_id=f"fence-{self._fences}", version=None, failure=Failure(error="TargetLost", message=reason))
        self._end_by("fence")

    # calls of the source

    def _prepare_asked(self, event: PrepareAsked) -> None:
        problem = self._refusal(event)
        if problem is not None:
            self._answer("prepare", event.push_id, problem)
            return
        if self._push is not None:  # the same prepare once more, while the first one runs or after it
            if self._push.step == "prepare" and (self._push.waiting or self._push.groups):
                self._push.calls.append("prepare")
            else:
                self._answer("prepare", event.push_id, None)
            return
        self._push = _Push(push_id=event.push_id, version=event.version, landing=event.landing, calls=["prepare"])
        self._begin("prepare")

    def _refusal(self, event: PrepareAsked) -> Failure | None:
        if self._outcomes.get(event.push_id) is not None:
            return Failure(error="ProtocolError", message=f"push {event.push_id} is over here; this prepare came late")
        if self.push_id not in (None, event.push_id):
            return Failure(
                error="BusyError",
                message=f"push {self.push_id} is under way on this target ({self.step}); push {event.push_id} must wait",
            )
        if not self.ready:
            missing = f"ranks {list(self.missing)} have not joined" if self.missing else "its ranks are being fenced"
            return Failure(error="TargetUnreachable", message=f"the target is not ready: {missing}; ask again later")
        if self._push is not None and self._push.ending:
            return Failure(error="ProtocolError", message=f"push {event.push_id} has failed and is being given up")
        return None

    def _complete_asked(self, event: CompleteAsked) -> None:
        push = self._push
        if push is not None and push.push_id == event.push_id and push.version is not None:
            first = "complete" not in push.calls
            push.calls.append("complete")
            if first and push.step == "prepare":
                if push.waiting or push.groups:
                    self._fail("ProtocolError", "complete was asked before every rank was prepared")
                else:
                    self._begin("vote")
        elif event.push_id in self._outcomes:
            self._answer("complete", event.push_id, self._outcomes[event.push_id])
        else:
            failure = Failure(error="ProtocolError", message=f"push {event.push_id} was never prepared on this target")
            self._answer("complete", event.push_id, failure)

    def _abort_asked(self, event: AbortAsked) -> None:
        push = self._push
        if push is None or push.push_id != event.push_id:
            committed = event.push_id in self._outcomes and self._outcomes[event.push_id] is None
            self._remember(event.push_id, Failure(error=event.error, message=event.reason))
            self._answer("abort", event.push_id, self._too_late(event.push_id) if committed else None)
        elif push.step in ("commit", "resume"):
            self._answer("abort", event.push_id, self._too_late(event.push_id))
        else:
            push.calls.append("abort")
            if not push.ending:
                self._fail(event.error, event.reason)

    @staticmethod
    def _too_late(push_id: str) -> Failure:
        return Failure(error="ProtocolError", message=f"push {push_id} cannot be aborted: its commit was ordered")

    # the course of a push

    def _begin(self, step: Step) -> None:
        push = self._push
        assert push is not None
        push.step = step
        push.groups = self._groups(step, push.landing)
        self._send_next()

    def _groups(self, step: Step, landing: Landing) -> list[tuple[int, ...]]:
        ranks = tuple(sorted(self._members))
        others = tuple(rank for rank in ranks if rank != 0)
        if not others or 0 not in ranks:
            return [ranks]
        if step == "pause" or (step == "prepare" and landing == "streamed"):
            return [(0,), others]
        if step in ("resume", "abort"):
            return [others, (0,)]
        return [ranks]

    def _send_next(self) -> None:
        push = self._push
        assert push is not None
        while push.groups and not push.waiting:
            ranks = tuple(rank for rank in push.groups.pop(0) if rank in self._members)
            push.waiting = set(ranks)
            if ranks:
                reason = push.failure.message if push.failure is not None else ""
                self._orders.append(
                    Send(push_id=push.push_id, step=push.step, ranks=ranks, version=push.version, reason=reason)
                )
        if push.ending and push.waiting:
            self._orders.append(Grace(push_id=push.push_id))
        if not push.waiting:
            self._step_done()

    def _step_done(self) -> None:
        push = self._push
        assert push is not None
        match push.step:
            case "prepare":
                self._prepared()
            case "vote":
                self._begin("pause")
            case "pause":
                self._begin("commit")
            case "commit":
                self._begin("resume")
            case "resume":
                self.serving = push.version
                self._finish(None)
            case "abort" | "fence":
                self._ended()

    def _prepared(self) -> None:
        push = self._push
        assert push is not None
        if not push.already:
            calls, push.calls = push.calls, []
            for call in calls:
                self._answer(call, push.push_id, None)
        elif len(push.already) == self.world_size:
            self._finish(None, already=True)
        else:
            held = sorted(push.already)
            self._must_fence = f"ranks {held} hold version {push.version} and the others do not"
            self._fail("VersionConflict", self._must_fence)

    def _replied(self, event: Replied) -> None:
        push = self._push
        if push is None or push.push_id != event.push_id or push.step != event.step or event.rank not in push.waiting:
            return  # of a step that is over
        if push.ending:
            push.fell_back[event.rank] = event.serving
            if event.ok:
                self._settle(event.rank)
            else:
                self._drop(event.rank, f"it could not {event.step}: {event.message}")
            return
        if not event.ok:
            self._fail(event.error or "PushError", f"rank {event.rank}: {event.message}")
            return
        if event.already:
            push.already.add(event.rank)
        push.waiting.discard(event.rank)
        if not push.waiting:
            self._send_next()

    def _deadline(self, event: DeadlinePassed) -> None:
        push = self._push
        if push is None or push.push_id != event.push_id:
            return
        if push.ending:
            if event.grace:
                for rank in sorted(push.waiting):
                    self._drop(rank, f"it did not obey the order to {push.step}")
        elif push.waiting:
            ranks = sorted(push.waiting)
            self._fail("TargetLost", f"ranks {ranks} of the target did not answer {push.step!r} before the deadline")
        else:
            self._fail("PushTimeout", "the source did not complete the push before its deadline")

    # the end of a push

    def _fail(self, error: str, message: str) -> None:
        push = self._push
        assert push is not None
        push.failure = Failure(error=error, message=message)
        if push.step in ("commit", "resume"):
            self.serving = None
            self._end_by("fence")
        else:
            self._end_by("abort")

    def _end_by(self, step: Step) -> None:
        push = self._push
        assert push is not None
        push.waiting = set()
        push.fell_back = {}
        self._begin(step)

    def _settle(self, rank: int) -> None:
        push = self._push
        assert push is not None
        push.waiting.discard(rank)
        if not push.waiting:
            self._send_next()

    def _drop(self, rank: int, reason: str) -> None:
        """Give up on a rank that did not obey. The leader's own rank obeys at once (see `syncline.engine.rank`)."""
        member = self._members.get(rank)
        if member is not None:
            self._orders.append(Drop(rank=rank, incarnation=member.incarnation, reason=reason))
            self._lost(Lost(rank=rank, incarnation=member.incarnation, reason=reason))

    def _ended(self) -> None:
        push = self._push
        assert push is not None
        if push.step == "abort" and any(serving != self.serving for serving in push.fell_back.values()):
            # Some ranks had written bytes, or could not go back: what is left of the old version is served by none.
            self._must_fence = self._must_fence or f"push {push.push_id} failed after bytes of it were written"
        self._finish(push.failure)

    def _finish(self, failure: Failure | None, *, already: bool = False) -> None:
        push = self._push
        assert push is not None
        self._push = None
        if push.version is not None:
            if not already:
                self._remember(push.push_id, failure)
                self._orders.append(Over(push_id=push.push_id, committed=failure is None))
            for call in push.calls:
                self._answer(call, push.push_id, None if call == "abort" else failure, already=already)

    def _remember(self, push_id: str, outcome: Failure | None) -> None:
        self._outcomes.setdefault(push_id, outcome)
        while len(self._outcomes) > _REMEMBERED_PUSHES:
            self._outcomes.popitem(last=False)

    def _answer(self, call: Call, push_id: str, failure: Failure | None, *, already: bool = False) -> None:
        error, message = ("", "") if failure is None else (failure.error, failure.message)
        self._orders.append(
            Answer(push_id=push_id, call=call, ok=failure is None, already=already, error=error, message=message)
        )
