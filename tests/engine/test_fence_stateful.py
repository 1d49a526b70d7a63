"""What a target serves is never a mix and never uncommitted, whatever fails when. On the real fence and leader logic.

The model is a target of 1 to 3 ranks whose bytes are version numbers. A forward pass reads every byte of every rank, one
at a time, and other things happen between two reads. What it read is judged, not what the fence says about itself: with
the fence switched off the same test has to fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase as HypothesisPhase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from syncline.engine.errors import SynclineError
from syncline.engine.fence import Fence, Phase
from syncline.engine.leader_events import (
    AbortAsked,
    Answer,
    CompleteAsked,
    DeadlinePassed,
    Drop,
    Grace,
    Joined,
    Lost,
    Over,
    PrepareAsked,
    Replied,
    Send,
)
from syncline.engine.leader_machine import LeaderMachine

CHUNKS = 2
GARBAGE = -1
FAULTS = ("kill", "lose message", "cut off", "rank deadline", "leader deadline", "source aborts")
MODES = ("staged", "streamed", "mapped")


class Mix(AssertionError):
    """A forward pass read what it must not."""


class NoFence(Fence):
    """The fence switched off: forward passes run whenever there is any version to name."""

    @property
    def serving_version(self):
        return self.version


class Rank:
    """One process: live bytes, landing bytes, fence, and the forward passes that are inside."""

    def __init__(self, rank, process, fence_class, version):
        self.rank = rank
        self.process = process
        self.session = 0
        self.fence = fence_class(incarnation=f"{process}/0", version=version)
        self.live = [GARBAGE if version is None else version] * CHUNKS
        self.landing = [GARBAGE] * CHUNKS
        self.inside = 0
        self.joined = False
        self.shut = version is None  # the gate
        self.waiting = []  # orders that wait for something on this rank
        self.applying = None  # chunks still to copy at commit

    @property
    def incarnation(self):
        return f"{self.process}/{self.session}"

    @property
    def serving(self):
        return self.fence.serving_version

    def rejoin(self):
        self.session += 1
        self.fence.incarnation = self.incarnation


@dataclass
class Message:
    to: int
    incarnation: str
    send: Send
    version: int | None
    landing: str


@dataclass
class Pass:
    version: int
    ranks: list[Rank]
    whole: bool
    reads: list[int] = field(default_factory=list)
    entered: list[Rank] = field(default_factory=list)


class TargetModel(RuleBasedStateMachine):
    fence_class = Fence

    @initialize(world=st.integers(1, 3), mode=st.sampled_from(MODES), start=st.booleans(), other=st.booleans())
    def setup(self, world, mode, start, other):
        self.world, self.mode = world, mode
        self.processes = 0
        self.newest = 1
        self.committed = {1} if start else set()
        self.ranks = [self.fresh(rank, 1 if start else None) for rank in range(world)]
        if other and world > 1:
            self.ranks[-1] = self.fresh(world - 1, None)
        self.pushes = 0
        self.push = None  # (push id, version): what the source is doing
        self.network: list[Message] = []
        self.replies: list[Replied] = []
        self.passes: list[Pass] = []
        self.voted: dict[str, set[int]] = {}
        self.answers: dict[tuple[str, str], Answer] = {}
        self.versions: dict[str, int] = {}
        self.start_leader()
        for rank in self.ranks[1:]:
            self.join(rank)

    def fresh(self, rank, version):
        self.processes += 1
        return Rank(rank, f"p{self.processes}", self.fence_class, version)

    def start_leader(self):
        self.leader = LeaderMachine(self.world)
        self.replies = []
        own = self.ranks[0]
        self.feed(Joined(rank=0, incarnation=own.incarnation, process=own.process, serving=own.serving))
        own.joined = True

    # the leader's shell

    def feed(self, event):
        for order in self.leader.handle(event):
            match order:
                case Send():
                    for rank in order.ranks:
                        member = self.leader._members[rank]
                        self.network.append(Message(rank, member.incarnation, order, order.version, self.mode))
                case Answer():
                    self.answers[order.push_id, order.call] = order
                case Drop():
                    if self.ranks[order.rank].incarnation == order.incarnation:
                        self.ranks[order.rank].joined = False
                case Grace() | Over():
                    pass

    # a rank's shell

    def deliver(self, message):
        rank = self.ranks[message.to]
        send, push_id = message.send, message.send.push_id
        try:
            rank.fence.check_incarnation(message.incarnation)
            match send.step:
                case "prepare":
                    if rank.fence.prepare(push_id, message.version, message.landing) == "already":
                        self.reply(rank, send, already=True)
                        return
                    rank.landing = [GARBAGE] * CHUNKS
                    self.work(rank, send)
                case "vote" | "pause":
                    self.work(rank, send)
                case "commit":
                    rank.fence.committing(push_id)
                    rank.applying = [] if self.mode == "streamed" else list(range(CHUNKS))
                    self.work(rank, send)
                case "resume":
                    rank.fence.resumed(push_id)
                    rank.shut = False
                    self.reply(rank, send)
                case "abort":
                    rank.fence.abort(push_id, send.reason)
                    self.settle(rank)
                    self.reply(rank, send)
                case "fence":
                    rank.fence.fence(send.reason)
                    self.settle(rank)
                    self.reply(rank, send)
        except SynclineError as error:
            self.reply(rank, send, error=error)

    def work(self, rank, send):
        """Do what ``send`` orders if it can be done now; else it waits on the rank."""
        if not self.try_work(rank, send):
            rank.waiting.append(send)

    def try_work(self, rank, send):
        push_id = send.push_id
        if rank.fence.push_id != push_id:
            self.reply(rank, send, error=SynclineError("over"))
            return True
        if send.step == "prepare":
            rank.shut = rank.shut or self.mode == "streamed"
            if self.mode == "streamed" and rank.inside:
                return False
        elif send.step == "vote":
            where = rank.live if self.mode == "streamed" else rank.landing
            if any(chunk != self.versions[push_id] for chunk in where):
                return False
            rank.fence.vote(push_id, digest=f"d{self.versions[push_id]}")
            self.voted.setdefault(push_id, set()).add(rank.rank)
            if len(self.voted[push_id]) == self.world:
                self.committed.add(self.versions[push_id])
        elif send.step == "pause":
            rank.shut = True
            if rank.inside:
                return False
            rank.fence.paused(push_id)
        elif send.step == "commit":
            if rank.applying:
                return False
            rank.fence.applied(push_id)
        self.reply(rank, send)
        return True

    def retry(self, rank):
        waiting, rank.waiting = rank.waiting, []
        for send in waiting:
            try:
                self.work(rank, send)
            except SynclineError as error:
                self.reply(rank, send, error=error)

    def settle(self, rank):
        """After an abort, a fence, a loss or a timeout: forward passes go on if the fence says so."""
        rank.applying = None
        rank.shut = rank.serving is None
        self.retry(rank)

    def reply(self, rank, send, *, already=False, error=None):
        self.replies.append(
            Replied(
                push_id=send.push_id,
                step=send.step,
                rank=rank.rank,
                ok=error is None,
                already=already,
                serving=rank.serving,
                error="" if error is None else type(error).__name__,
                message=str(error),
            )
        )

    def may_enter(self, rank):
        # The gate is the fence's: with the fence switched off nothing holds a pass back.
        return rank.serving is not None and (self.fence_class is NoFence or not rank.shut)

    # rules: the source

    @rule(repeat=st.integers(-1, 2))
    def prepare(self, repeat):
        self.pushes += 1
        version = max(1, self.newest + repeat)
        self.newest = max(self.newest, version)
        self.push = f"push{self.pushes}"
        self.versions[self.push] = version
        self.feed(PrepareAsked(push_id=self.push, version=version, landing=self.mode))

    @precondition(lambda self: self.push)
    @rule()
    def complete(self):
        self.feed(CompleteAsked(push_id=self.push))

    @precondition(lambda self: self.push)
    @rule(age=st.integers(1, 3), call=st.sampled_from(("prepare", "complete", "abort")))
    def late_call(self, age, call):
        push_id = f"push{max(1, self.pushes - age)}"
        match call:
            case "prepare":
                self.feed(PrepareAsked(push_id=push_id, version=self.versions[push_id], landing=self.mode))
            case "complete":
                self.feed(CompleteAsked(push_id=push_id))
            case "abort":
                self.feed(AbortAsked(push_id=push_id, reason="late"))

    @precondition(lambda self: self.push)
    @rule(rank=st.integers(0, 2), chunk=st.integers(0, CHUNKS - 1), age=st.integers(0, 2))
    def land(self, rank, chunk, age):
        """A byte of the current push, or of an older one."""
        self.land_one(self.ranks[rank % self.world], f"push{max(1, self.pushes - age)}", chunk)

    def land_everything(self):
        for rank in self.ranks:
            for chunk in range(CHUNKS):
                self.land_one(rank, self.push, chunk)

    def land_one(self, rank, push_id, chunk):
        blocked = any(send.step == "prepare" for send in rank.waiting)
        if rank.fence.push_id != push_id or rank.fence.phase is not Phase.RECEIVING or blocked:
            return
        if self.mode == "streamed":
            rank.fence.writing(push_id)
            rank.live[chunk] = self.versions[push_id]
        else:
            rank.landing[chunk] = self.versions[push_id]
        self.retry(rank)

    # rules: the network

    @precondition(lambda self: self.network or self.replies)
    @rule(at=st.integers(0, 50), again=st.booleans())
    def deliver_one(self, at, again):
        """Any message, in any order, perhaps twice."""
        at %= len(self.network) + len(self.replies)
        if at < len(self.network):
            message = self.network[at] if again else self.network.pop(at)
            self.deliver(message)
        else:
            at -= len(self.network)
            self.feed(self.replies[at] if again else self.replies.pop(at))

    def deliver_all_orders(self):
        network, self.network = self.network, []
        for message in network:
            self.deliver(message)

    def deliver_all_replies(self):
        replies, self.replies = self.replies, []
        for reply in replies:
            self.feed(reply)

    # rules: long strides, so that faults also meet pushes that have come far

    @rule(rounds=st.integers(1, 12), chunks=st.integers(0, 2 * CHUNKS), complete=st.booleans(), land=st.booleans())
    def stride(self, rounds, chunks, complete, land):
        """Some of the way of a push, everything going well."""
        for rank in self.ranks:
            if not rank.joined:
                self.join(rank)
        if self.push is None or self.is_over(self.push):
            self.prepare(repeat=1)
        for _ in range(rounds):
            self.deliver_all_orders()
            if land:
                self.land_everything()
            for _ in range(chunks):
                for rank in self.ranks:
                    self.copy_one(rank)
            self.deliver_all_replies()
            if complete and (self.push, "prepare") in self.answers and self.leader.step == "prepare":
                self.complete()

    def is_over(self, push_id):
        prepared = self.answers.get((push_id, "prepare"))
        return (push_id, "complete") in self.answers or (prepared is not None and not prepared.ok)

    # rules: faults

    @rule(kind=st.sampled_from(FAULTS), which=st.integers(0, 50), late=st.booleans())
    def fault(self, kind, which, late):
        rank = self.ranks[which % self.world]
        match kind:
            case "kill":
                self.kill(rank, noticed=not late)
            case "lose message" if self.network or self.replies:
                lost = self.network or self.replies
                lost.pop(which % len(lost))
            case "cut off" if rank.rank and rank.joined:
                self.feed(Lost(rank=rank.rank, incarnation=rank.incarnation, reason="no heartbeat"))
                rank.joined = False
            case "rank deadline" if rank.fence.push_id is not None:
                rank.fence.timeout(rank.fence.push_id, "deadline")
                self.settle(rank)
            case "leader deadline" if self.leader.step is not None:
                self.feed(DeadlinePassed(push_id=self.leader._push.push_id, grace=late))
            case "source aborts" if self.push:
                self.feed(AbortAsked(push_id=self.push, reason="the source gave up"))

    def kill(self, old, *, noticed):
        new = self.fresh(old.rank, None)
        self.passes = [p for p in self.passes if not self.break_pass(p, old)]
        self.ranks[old.rank] = new
        if old.rank == 0:
            self.start_leader()
            for rank in self.ranks[1:]:
                rank.joined = False
        elif noticed:
            self.feed(Lost(rank=old.rank, incarnation=old.incarnation, reason="killed"))

    def break_pass(self, a_pass, dead):
        if dead not in a_pass.ranks:
            return False
        for rank in a_pass.entered:
            if rank is not dead:
                rank.inside -= 1
                self.retry(rank)
        return True

    @rule(which=st.integers(0, 2))
    def rejoin(self, which):
        rank = self.ranks[which % self.world]
        if rank.rank and not rank.joined:
            self.join(rank)

    def join(self, rank):
        rank.fence.lost("the leader went away")
        rank.rejoin()
        self.settle(rank)
        rank.joined = True
        self.feed(Joined(rank=rank.rank, incarnation=rank.incarnation, process=rank.process, serving=rank.serving))

    # rules: work on a rank, and forward passes

    @precondition(lambda self: any(rank.applying for rank in self.ranks))
    @rule(which=st.integers(0, 2))
    def copy_a_chunk(self, which):
        self.copy_one(self.ranks[which % self.world])

    def copy_one(self, rank):
        if rank.applying:
            chunk = rank.applying.pop()
            rank.live[chunk] = rank.landing[chunk]
            self.retry(rank)

    @precondition(lambda self: len(self.passes) < 3)
    @rule(alone=st.booleans(), which=st.integers(0, 2))
    def start_pass(self, alone, which):
        ranks = [self.ranks[which % self.world]] if alone else list(self.ranks)
        if self.may_enter(ranks[0]):
            ranks[0].inside += 1
            self.passes.append(Pass(ranks[0].serving, ranks, not alone, entered=[ranks[0]]))

    @precondition(lambda self: self.passes)
    @rule(which=st.integers(0, 2), times=st.integers(1, 3))
    def read(self, which, times):
        a_pass = self.passes[which % len(self.passes)]
        for _ in range(times):
            if a_pass in self.passes:
                self.read_one(a_pass)

    def read_one(self, a_pass):
        """Read one byte; the pass ends after the last one. False if it has to wait at a gate."""
        index, chunk = divmod(len(a_pass.reads), CHUNKS)
        rank = a_pass.ranks[index]
        if rank not in a_pass.entered:
            if not self.may_enter(rank):
                return False
            rank.inside += 1
            a_pass.entered.append(rank)
        a_pass.reads.append(rank.live[chunk])
        if len(a_pass.reads) == CHUNKS * len(a_pass.ranks):
            self.end_pass(a_pass)
        return True

    def end_pass(self, a_pass):
        self.passes.remove(a_pass)
        for rank in a_pass.entered:
            rank.inside -= 1
            self.retry(rank)
        if set(a_pass.reads) != {a_pass.version}:
            raise Mix(f"served as version {a_pass.version}: {a_pass.reads}")
        if a_pass.version not in self.committed:
            raise Mix(f"served version {a_pass.version}, which was never voted for by all ranks")

    @invariant()
    def one_version_at_a_time(self):
        if not hasattr(self, "ranks") or self.fence_class is NoFence:
            return
        served = {rank.serving for rank in self.ranks if self.may_enter(rank)}
        assert len(served) <= 1, served

    @invariant()
    def versions_of_a_rank_are_whole(self):
        if not hasattr(self, "ranks") or self.fence_class is NoFence:
            return
        for rank in self.ranks:
            if rank.serving is not None:
                assert set(rank.live) == {rank.serving}
            assert (rank.fence.state == "FENCED") <= (rank.serving is None)

    # the end: whatever happened, a clean push gets the target to serve

    def teardown(self):
        if not hasattr(self, "ranks") or self.fence_class is NoFence:
            return
        self.calm_down()
        assert self.leader.ready
        assert self.leader.step is None
        self.prepare(repeat=1)
        self.calm_down(prepared=True)
        assert self.answers[self.push, "prepare"].ok, self.answers[self.push, "prepare"]
        self.land_everything()
        self.complete()
        self.calm_down()
        assert self.answers[self.push, "complete"].ok, self.answers[self.push, "complete"]
        assert [rank.fence.state for rank in self.ranks] == ["COMMITTED"] * self.world
        assert self.leader.serving == self.newest
        self.start_pass(alone=False, which=0)
        self.run_passes()
        assert not self.passes
        assert {chunk for rank in self.ranks for chunk in rank.live} == {self.newest}

    def run_passes(self):
        while any(self.read_one(a_pass) for a_pass in list(self.passes)):
            pass

    def calm_down(self, *, prepared=False):
        """Deliver everything in order, let every rank rejoin and every deadline pass that something waits for."""
        for _ in range(60):
            self.run_passes()
            self.deliver_all_orders()
            for rank in self.ranks:
                while rank.applying:
                    self.copy_one(rank)
                if not rank.joined:
                    self.join(rank)
                elif self.orphaned(rank):
                    rank.fence.timeout(rank.fence.push_id, "deadline")
                    self.settle(rank)
            self.deliver_all_replies()
            if not self.network and not self.replies and self.stuck(prepared):
                self.feed(DeadlinePassed(push_id=self.leader._push.push_id, grace=True))
        self.break_waiting_passes()

    def orphaned(self, rank):
        return rank.fence.push_id is not None and rank.fence.push_id != self.leader.push_id

    def stuck(self, prepared):
        leader = self.leader
        return leader.step is not None and not (prepared and leader.step == "prepare" and not leader.waiting)

    def break_waiting_passes(self):
        for a_pass in list(self.passes):
            self.passes.remove(a_pass)
            for rank in a_pass.entered:
                rank.inside -= 1
                self.retry(rank)


def search(fence_class, *, examples, shrink=True):
    class Machine(TargetModel):
        pass

    Machine.fence_class = fence_class
    phases = (HypothesisPhase.generate, HypothesisPhase.shrink) if shrink else (HypothesisPhase.generate,)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            phases=phases,
            deadline=None,
            derandomize=True,
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_what_is_served_is_never_a_mix_and_never_uncommitted():
    search(Fence, examples=800)


def test_with_the_fence_switched_off_the_same_test_fails():
    with pytest.raises(Mix):
        search(NoFence, examples=800, shrink=False)
