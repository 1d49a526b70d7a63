"""The leader's decisions, event by event."""

from __future__ import annotations

import pytest

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

PAUSE_ORDER = {"pause": [(0,), (1, 2)], "resume": [(1, 2), (0,)]}


class Ranks:
    """Ranks that do what they are told, but for what a test says. Notes every order."""

    def __init__(self, world=3, serving=1):
        self.machine = LeaderMachine(world)
        self.serving = dict.fromkeys(range(world), serving)
        self.sent = []
        self.other = []
        self.queue = []
        for rank in range(world):
            self.feed(Joined(rank=rank, incarnation=f"i{rank}", process=f"p{rank}", serving=serving))
        self.run()

    def feed(self, event):
        for order in self.machine.handle(event):
            if isinstance(order, Send):
                self.sent.append((order.step, order.ranks))
                self.queue.append(order)
            else:
                self.other.append(order)

    def run(self, *, but=(), no=(), already=()):
        """Reply to everything; ``but``: (step, rank) that stay silent; ``no``: that refuse."""
        while self.queue:
            order = self.queue.pop(0)
            for rank in order.ranks:
                if (order.step, rank) in but:
                    continue
                if order.step == "resume":
                    self.serving[rank] = order.version
                if order.step == "fence":
                    self.serving[rank] = None
                self.feed(
                    Replied(
                        push_id=order.push_id,
                        step=order.step,
                        rank=rank,
                        ok=(order.step, rank) not in no,
                        already=rank in already,
                        serving=self.serving[rank],
                        error="LoaderError" if (order.step, rank) in no else "",
                        message="boom" if (order.step, rank) in no else "",
                    )
                )

    def prepare(self, push_id="p", version=2, landing="staged"):
        self.feed(PrepareAsked(push_id=push_id, version=version, landing=landing))

    def complete(self, push_id="p"):
        self.feed(CompleteAsked(push_id=push_id))

    def answers(self, call):
        return [order for order in self.other if isinstance(order, Answer) and order.call == call]

    def steps(self):
        return [step for step, _ in self.sent]


def test_a_whole_push_and_its_order():
    ranks = Ranks()
    ranks.prepare()
    ranks.run()
    assert ranks.answers("prepare")[0].ok
    ranks.complete()
    ranks.run()
    assert ranks.answers("complete")[0].ok
    assert ranks.sent == [
        ("prepare", (0, 1, 2)),
        ("vote", (0, 1, 2)),
        *(("pause", group) for group in PAUSE_ORDER["pause"]),
        ("commit", (0, 1, 2)),
        *(("resume", group) for group in PAUSE_ORDER["resume"]),
    ]
    assert ranks.other[-2] == Over(push_id="p", committed=True)
    assert (ranks.machine.serving, ranks.machine.push_id, ranks.machine.ready) == (2, None, True)


def test_streamed_pauses_the_leader_first_and_lets_it_go_last():
    ranks = Ranks()
    ranks.prepare(landing="streamed")
    ranks.run()
    ranks.feed(AbortAsked(push_id="p", reason="why"))
    ranks.run()
    assert ranks.sent == [("prepare", (0,)), ("prepare", (1, 2)), ("abort", (1, 2)), ("abort", (0,))]


def test_a_single_rank():
    ranks = Ranks(world=1)
    ranks.prepare()
    ranks.run()
    ranks.complete()
    ranks.run()
    assert ranks.sent == [(step, (0,)) for step in ("prepare", "vote", "pause", "commit", "resume")]
    assert ranks.machine.serving == 2


@pytest.mark.parametrize("step", ["prepare", "vote", "pause", "commit", "resume"])
@pytest.mark.parametrize("how", ["lost", "refuses", "silent", "restarted"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_fails_at_each_step(step, how, rank):
    if rank == 0 and how in ("lost", "restarted"):
        return  # then this machine is gone, too
    ranks = Ranks()
    ranks.prepare()
    quiet = {(step, rank)} if how != "refuses" else set()
    no = {(step, rank)} if how == "refuses" else set()
    ranks.run(but=quiet, no=no)
    if step != "prepare":
        ranks.complete()
        ranks.run(but=quiet, no=no)
    match how:
        case "lost":
            ranks.feed(Lost(rank=rank, incarnation=f"i{rank}", reason="killed"))
        case "silent":
            ranks.feed(DeadlinePassed(push_id="p"))
        case "restarted":
            ranks.feed(Joined(rank=rank, incarnation="new", process="new", serving=None))
    ranks.run()
    late = step in ("commit", "resume")
    answer = ranks.answers("prepare" if step == "prepare" else "complete")[-1]
    assert not answer.ok
    assert answer.error == ("LoaderError" if how == "refuses" else "TargetLost")
    assert f"rank {rank}" in answer.message or f"[{rank}]" in answer.message
    assert ("fence" in ranks.steps()) == (late or how == "restarted")
    assert ("abort" in ranks.steps()) == (not late)
    assert ranks.machine.serving == (None if late or how == "restarted" else 1)
    assert ranks.machine.push_id is None
    assert ranks.machine.step is None
    if how == "lost":
        assert ranks.machine.missing == (rank,)


@pytest.mark.parametrize("step", ["vote", "commit"])
def test_a_rank_that_does_not_obey_is_dropped(step):
    ranks = Ranks()
    ranks.prepare()
    ranks.run()
    ranks.complete()
    end = "abort" if step == "vote" else "fence"
    quiet = {(step, 2), (end, 2)}
    ranks.run(but=quiet)
    ranks.feed(DeadlinePassed(push_id="p"))
    ranks.run(but=quiet)
    assert Grace(push_id="p") in ranks.other
    assert not ranks.answers("complete")
    ranks.feed(DeadlinePassed(push_id="p"))  # not the grace: too early
    assert not ranks.answers("complete")
    ranks.feed(DeadlinePassed(push_id="p", grace=True))
    ranks.run()
    assert Drop(rank=2, incarnation="i2", reason=f"it did not obey the order to {end}") in ranks.other
    assert ranks.answers("complete")[0].error == "TargetLost"
    assert not ranks.machine.ready


def test_late_replies_count_for_nothing():
    ranks = Ranks()
    ranks.prepare()
    order = ranks.queue[0]
    ranks.run(but={("prepare", 2)})
    ranks.feed(AbortAsked(push_id="p", reason="why"))
    ranks.run()
    before = list(ranks.sent)
    for step in ("prepare", "vote", "commit"):
        ranks.feed(Replied(push_id="p", step=step, rank=2, ok=True))
    ranks.feed(Replied(push_id=order.push_id, step="prepare", rank=2, ok=False))
    assert ranks.sent == before
    ranks.prepare("q")
    ranks.feed(Replied(push_id="p", step="prepare", rank=0, ok=True))
    assert ranks.machine.waiting == {0, 1, 2}


def test_pushes_that_are_over_are_answered():
    ranks = Ranks()
    ranks.prepare()
    ranks.run()
    ranks.complete()
    ranks.run()
    ranks.complete()
    assert [answer.ok for answer in ranks.answers("complete")] == [True, True]
    ranks.feed(AbortAsked(push_id="p", reason="why"))
    assert ranks.answers("abort")[-1].error == "ProtocolError"
    ranks.prepare("q", 3)
    ranks.run(no={("prepare", 1)})
    assert ranks.answers("prepare")[-1].error == "LoaderError"
    ranks.complete("q")
    assert ranks.answers("complete")[-1].error == "LoaderError"
    ranks.prepare("q", 3)
    assert ranks.answers("prepare")[-1].error == "ProtocolError"
    ranks.complete("never")
    assert ranks.answers("complete")[-1].error == "ProtocolError"


@pytest.mark.parametrize("step", ["commit", "resume"])
def test_after_the_order_there_is_no_abort(step):
    ranks = Ranks()
    ranks.prepare()
    ranks.run()
    ranks.complete()
    ranks.run(but={(step, 1)})
    ranks.feed(AbortAsked(push_id="p", reason="why"))
    assert ranks.answers("abort")[0].error == "ProtocolError"
    ranks.feed(Replied(push_id="p", step=step, rank=1, ok=True))
    ranks.run()
    assert ranks.answers("complete")[0].ok


def test_complete_before_everybody_is_prepared():
    ranks = Ranks()
    ranks.prepare()
    ranks.run(but={("prepare", 1)})
    ranks.complete()
    ranks.run()
    assert ranks.answers("complete")[0].error == "ProtocolError"
    assert ranks.answers("prepare")[0].error == "ProtocolError"
    assert ranks.machine.serving == 1


def test_all_ranks_hold_the_version():
    ranks = Ranks()
    ranks.prepare(version=1)
    ranks.run(already={0, 1, 2})
    answer = ranks.answers("prepare")[0]
    assert (answer.ok, answer.already) == (True, True)
    assert (ranks.machine.push_id, ranks.machine.serving) == (None, 1)


def test_some_ranks_hold_the_version():
    ranks = Ranks()
    ranks.prepare(version=1)
    ranks.run(already={1})
    assert ranks.answers("prepare")[0].error == "VersionConflict"
    assert ranks.machine.serving is None
    assert ranks.serving == {0: None, 1: None, 2: None}


def test_one_rank_that_cannot_go_back_fences_all():
    ranks = Ranks()
    ranks.prepare(landing="streamed")
    ranks.run()
    ranks.serving[1] = None  # it has written a byte
    ranks.feed(AbortAsked(push_id="p", reason="why"))
    ranks.run()
    assert ranks.serving == {0: None, 1: None, 2: None}
    assert ranks.machine.serving is None
    assert ranks.machine.ready


def test_joining():
    ranks = Ranks()
    assert "fence" not in ranks.steps()
    ranks.feed(Joined(rank=2, incarnation="i2", process="p2", serving=None))  # the same message once more
    assert ranks.machine.ready
    ranks.feed(Joined(rank=2, incarnation="i2b", process="p2", serving=1))  # the same process, with the same version
    assert ranks.machine.ready
    assert "fence" not in ranks.steps()
    ranks.feed(Lost(rank=2, incarnation="i2", reason="late"))  # of the older connection
    assert ranks.machine.ready
    ranks.feed(Joined(rank=2, incarnation="i2c", process="p2", serving=None))  # it fenced itself
    assert not ranks.machine.ready
    ranks.run()
    assert ranks.machine.ready
    assert ranks.serving == {0: None, 1: None, 2: None}


def test_another_process_fences_even_if_it_says_that_it_holds_the_version():
    ranks = Ranks()
    ranks.feed(Lost(rank=1, incarnation="i1", reason="killed"))
    assert (ranks.machine.ready, ranks.machine.missing, ranks.machine.serving) == (False, (1,), 1)
    ranks.feed(Joined(rank=1, incarnation="new", process="new", serving=1))
    ranks.run()
    assert ranks.serving == {0: None, 1: None, 2: None}


def test_nothing_can_be_prepared_while_ranks_are_missing_or_fenced():
    ranks = Ranks()
    ranks.feed(Lost(rank=1, incarnation="i1", reason="killed"))
    ranks.prepare()
    assert "[1]" in ranks.answers("prepare")[-1].message
    ranks.feed(Joined(rank=1, incarnation="new", process="new", serving=None))
    ranks.prepare()
    assert ranks.answers("prepare")[-1].error == "TargetUnreachable"
    ranks.run()
    ranks.prepare()
    ranks.run()
    assert ranks.answers("prepare")[-1].ok


def test_what_is_remembered_is_bounded():
    ranks = Ranks()
    for number in range(2000):
        ranks.feed(AbortAsked(push_id=f"p{number}", reason="why"))
    assert len(ranks.machine._outcomes) < 1000
