"""The order in which one thread issues messages, and when it gives communicators up: without NCCL, clock or thread."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.scheduler.programs import Message as PlanMessage, ReceiverId, SourceProgram, SourceTask
from syncline.stages.errors import TransportError
from syncline.stages.frames import frames
from syncline.stages.issuing import IssueOrder, Issuing, Key, Link, Message, Operation
from syncline.stages.transports import nccl
from syncline.stages.transports.nccl import GATHER, plan_order

# ------------------------------------------------------------------------------------------------------------- order


def operation(key, until=1e9):
    said = []
    one = Operation(SimpleNamespace(error=None), key, (), until, said.append)
    one.said = said
    return one


@st.composite
def transfers(draw):
    """Who owns each task, who contributes to it, who receives it: for some ranks of a source and of some targets."""
    ranks = draw(st.integers(1, 4))
    targets = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    receivers = [ReceiverId(t, r) for t, n in enumerate(targets) for r in range(n)]
    tasks = []
    for index in range(draw(st.integers(1, 8))):
        owner = draw(st.integers(0, ranks - 1))
        others = [rank for rank in range(ranks) if rank != owner]
        contributors = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        chosen = draw(st.lists(st.sampled_from(receivers), unique=True))
        tasks.append((index, owner, sorted(contributors), tuple(sorted(chosen))))
    return ranks, targets, receivers, tasks


def program_of(rank, ranks, tasks):
    """A source rank's program, as far as messages go. Tags count the messages of each pair of ranks."""
    tags, mine = {}, []
    for index, owner, contributors, receivers in tasks:
        messages = {}
        for other in contributors:
            tags[other, owner] = tags.get((other, owner), -1) + 1
            messages[other] = tags[other, owner]
        base = {"index": index, "group": 0, "owner": owner, "nbytes": 256, "tmp_bytes": 0, "landing_offset": 0}
        if rank == owner:
            got = tuple(PlanMessage(peer=p, tag=t, nbytes=1, copies=()) for p, t in messages.items())
            mine.append(SourceTask(**base, receivers=receivers, receives=got))
        elif rank in messages:
            mine.append(SourceTask(**base, sends=(PlanMessage(peer=owner, tag=messages[rank], nbytes=1, copies=()),)))
    return SourceProgram(
        plan_digest="", rank=rank, world_size=ranks, tasks=tuple(mine), landing_nbytes=0, groups=(0,), total_tasks=len(tasks)
    )


def steps_of(rank, transfer):
    ranks, targets, receivers, tasks = transfer
    members = {target: range(count) for target, count in enumerate(targets)}
    return list(plan_order(program_of(rank, ranks, tasks), members, receivers, gather=True))


@given(transfers())
def test_the_order_is_task_by_task_and_target_by_target(transfer):
    ranks, targets, _, _ = transfer
    for rank in range(ranks):
        program = program_of(rank, ranks, transfer[3])
        members = {target: range(count) for target, count in enumerate(targets)}
        live = [receiver for receiver in transfer[2] if sum(receiver) % 3]
        expected = []
        for task in program.tasks:
            exchanged = [Key(GATHER, False, m.peer, m.tag) for m in task.receives]
            expected.append(tuple(exchanged + [Key(GATHER, True, m.peer, m.tag) for m in task.sends]))
            for target in members:
                there = [r for r in task.receivers if r.target == target and r in live]
                expected.append(tuple(Key(f"target-{target}", True, 1 + r.rank, task.index) for r in there))
        assert list(plan_order(program, members, live, gather=True)) == [group for group in expected if group]


def test_planning_the_order_looks_at_each_receiver_of_a_task_once(monkeypatch):
    """It runs on the loop at the beginning of every push."""
    cut, looked = [], []
    monkeypatch.setattr(nccl, "frames", lambda *what: cut.append(what) or frames(*what))

    class Counted(ReceiverId):
        def __hash__(self):
            looked.append(self)
            return super().__hash__()

    receivers = tuple(Counted(target, rank) for target in range(30) for rank in range(4))
    program = program_of(0, 1, [(index, 0, [], receivers) for index in range(20)])
    steps = list(plan_order(program, {target: range(4) for target in range(30)}, list(receivers), gather=False))
    assert len(steps) == 20 * 30
    assert len(cut) == 20
    assert len(looked) <= 3 * 20 * len(receivers)


@given(transfers(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_whatever_is_ready_first_goes_in_the_plans_order(transfer, rng):
    for rank in range(transfer[0]):
        steps = steps_of(rank, transfer)
        order = IssueOrder()
        assert order.expect(steps) == []
        keys = [key for step in steps for key in step]
        assert len(set(keys)) == len(keys)
        issued = []
        for key in rng.sample(keys, len(keys)):
            order.submit(operation(key))
            while step := order.pop():
                issued.append({one.key for one in step})
        assert issued == [set(step) for step in steps]
        assert not order.waiting


@given(transfers(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_target_that_is_gone_holds_nobody_up(transfer, rng):
    steps = steps_of(0, transfer)
    order, gone = IssueOrder(), f"target-{rng.randrange(len(transfer[1]))}"
    order.expect(steps)
    keys = [key for step in steps for key in step]
    rng.shuffle(keys)
    at, issued, dropped = rng.randint(0, len(keys)), [], []
    for number, key in enumerate([*keys, None]):
        if number == at:
            dropped = order.forget(gone)
        if key is not None and (number < at or key.label != gone):
            order.submit(operation(key))
        while step := order.pop():
            issued += [one.key for one in step]
    assert {key for key in keys if key.label != gone} <= set(issued)
    assert all(one.key.label == gone for one in dropped)
    assert not order.waiting
    assert [key for step in steps for key in sorted(step) if key in issued] == issued


def test_what_was_not_announced_goes_at_once_and_in_turn():
    order = IssueOrder()
    order.expect([[Key("a", True, 1, 0)], [Key("a", True, 1, 1)]])
    for key in (Key("a", True, 1, 1), Key("b", True, 1, 9), Key("b", True, 1, 3)):
        order.submit(operation(key))
    assert [order.pop()[0].key.tag for _ in range(2)] == [9, 3]
    assert order.pop() == []
    assert [one.key.tag for one in order.expect([])] == [1]
    assert not order.waiting


def runs_through(worlds):
    """Whether every message meets its counterpart, when each rank runs one group at a time and holds on until it is over.

    ``worlds``: rank -> its groups, of (peer, both ends' name for the message).
    """
    left = {name: [set(step) for step in steps] for name, steps in worlds.items()}
    while True:
        heads = {name: steps[0] for name, steps in left.items() if steps}
        met = {what for name, step in heads.items() for peer, what in step if (name, what) in heads.get(peer, ())}
        if not met:
            return not heads
        for name, step in heads.items():
            step -= {one for one in step if one[1] in met}
            if not step:
                left[name].pop(0)


def world_of(transfer):
    """Every rank's groups, those of receivers too: they take buckets in plan order, each from its owner."""
    ranks, _targets, receivers, tasks = transfer
    owners = {index: owner for index, owner, _, _ in tasks}
    worlds = {}
    for rank in range(ranks):
        groups = []
        for step in steps_of(rank, transfer):
            group = []
            for key in step:
                if key.label == GATHER:
                    pair = (rank, key.peer) if key.sends else (key.peer, rank)
                    group.append((key.peer, (*pair, key.tag)))
                else:
                    to = ReceiverId(int(key.label.removeprefix("target-")), key.peer - 1)
                    group.append((to, (rank, to, key.tag)))
            groups.append(group)
        worlds[rank] = groups
    for receiver in receivers:
        mine = [index for index, _, _, chosen in tasks if receiver in chosen]
        worlds[receiver] = [[(owners[index], (owners[index], receiver, index))] for index in mine]
    return worlds


@given(transfers())
@settings(max_examples=200)
def test_no_order_of_a_plan_lets_ranks_wait_for_each_other(transfer):
    assert runs_through(world_of(transfer))


def test_ranks_that_pass_on_for_several_owners_may_wait_for_each_other():
    """Why buckets are not passed on over NCCL unless that is asked for: receives are posted ahead of what is passed on.

    Of owner ``x``, ``b`` passes bucket 5 on to ``a``; of ``y``, ``a`` passes bucket 6 on to ``b``.
    """
    ahead = {
        "x": [[("b", (5, "b"))]], "y": [[("a", (6, "a"))]],
        "a": [[("b", (5, "a"))], [("y", (6, "a"))], [("b", (6, "b"))]],
        "b": [[("x", (5, "b"))], [("a", (6, "b"))], [("a", (5, "a"))]],
    }  # fmt: skip
    assert not runs_through(ahead)
    ahead["b"][1:] = ahead["b"][:0:-1]
    assert runs_through(ahead)


def test_another_order_on_one_rank_would_do_that():
    """The property above can fail."""
    tasks = [(0, 0, [1], (ReceiverId(0, 0),)), (1, 1, [0], (ReceiverId(0, 0),))]
    worlds = world_of((2, [1], [ReceiverId(0, 0)], tasks))
    assert runs_through(worlds)
    worlds[0].reverse()
    assert not runs_through(worlds)


# ------------------------------------------------------------------------------------------------------------ machine


class Rank:
    """One rank's machine over the stand-in, with aborts that return when the test says so."""

    def __init__(self, fabric):
        self.runtime = fabric.runtime()
        self.machine = Issuing(self.runtime, self._abort)
        self.to_abort = []

    def _abort(self, link):
        self.to_abort.append(link)

    def finish_aborts(self):
        for link in self.to_abort:
            if link.communicator is not None:
                self.runtime.abort(link.communicator)
            self.machine.aborted(link)
        self.to_abort.clear()

    def link(self, label, size, rank, unique_id, until=10.0):
        said = []
        one = Link(
            label=label, size=size, rank=rank, unique_id=unique_id, until=until, made=lambda: said.append("made"),
            failed=lambda error: said.append(str(error)),
        )  # fmt: skip
        one.said = said
        self.machine.make(one)
        return one

    def move(self, link, memory, peer, tag=0, *, sends, until=10.0):
        said = []
        message = Message(sends, memory.data_ptr(), memory.numel(), peer)
        self.machine.submit(Operation(link, Key(link.label, sends, peer, tag), [message], until, said.append, memory))
        return said


@pytest.fixture
def fabric(standins):
    return standins.Fabric()


@pytest.fixture
def pair(fabric):
    """Two ranks, and a communicator between them."""
    unique_id = fabric.runtime().unique_id()
    ranks = [Rank(fabric), Rank(fabric)]
    links = [one.link("pair", 2, number, unique_id) for number, one in enumerate(ranks)]
    for one in ranks:
        one.machine.turn(0.0)
    assert [link.said for link in links] == [["made"], ["made"]]
    return ranks, links


def bytes_of(number, count=8):
    return torch.full((count,), number, dtype=torch.uint8)


def test_messages_get_through_in_order(pair):
    (a, b), (to_b, to_a) = pair
    sent = [a.move(to_b, bytes_of(n), 1, n, sends=True) for n in (1, 2, 3)]
    memory = [bytes_of(0) for _ in range(3)]
    got = [b.move(to_a, one, 0, n, sends=False) for n, one in enumerate(memory)]
    for _ in range(3):
        a.machine.turn(1.0)
        b.machine.turn(1.0)
    assert sent == got == [[None]] * 3
    assert [int(one[0]) for one in memory] == [1, 2, 3]
    assert not a.machine.busy


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_greet_communicators_in_other_orders_do_not_wait_for_each_other(fabric, standins, ranks):
    """NCCL makes a connection when it is first used, and has taken on a message only when its peer is there, too."""

    class ConnectsAtFirstUse(standins.FabricNccl):
        def ready(self, member):
            self.fabric.match()
            return super().ready(member) and all(moved.done for moved in member.moved[:1])

    names = [f"from-{number}" for number in range(ranks)]
    ids = {name: fabric.runtime().unique_id() for name in names}
    both = [Rank(SimpleNamespace(runtime=lambda: ConnectsAtFirstUse(fabric))) for _ in range(2)]
    said = []
    for number, rank in enumerate(both):
        for name in names[:: 1 if number == 0 else -1]:
            link = rank.link(name, 2, number, ids[name])
            said.append(rank.move(link, bytes_of(7), 1 - number, sends=number == 0))
    for _ in range(2 * ranks):
        for rank in both:
            rank.machine.turn(1.0)
    assert said == [[None]] * (2 * ranks)


def test_messages_of_the_plan_wait_for_what_is_being_launched():
    order = IssueOrder()
    order.expect([[Key("a", True, 1, 0)]])
    order.submit(operation(Key("a", True, 1, 0)))
    order.submit(operation(Key("b", True, 1, 9)))
    assert order.pop({"b"}) == []
    assert order.pop({"c"})[0].key.label == "b"
    assert order.pop({"c"}) == []
    assert order.pop()[0].key.label == "a"


def test_a_stalled_peer_is_given_up_at_the_deadline_and_memory_is_in_use_until_the_abort_is_over(pair, fabric):
    (a, _), (to_b, _) = pair
    under_way = a.move(to_b, bytes_of(1), 1, sends=True, until=5.0)
    a.machine.turn(4.9)
    assert (under_way, a.to_abort, a.machine.busy) == ([], [], True)
    a.machine.turn(5.0)
    assert (under_way, to_b.said, a.to_abort) == ([], ["made"], [to_b])
    late = a.move(to_b, bytes_of(2), 1, 1, sends=True)
    assert isinstance(late[0], TransportError)
    a.machine.turn(6.0)
    assert under_way == []
    a.finish_aborts()
    assert "in time" in str(under_way[0])
    assert "in time" in to_b.said[1]
    assert a.machine.idle


def test_the_others_go_on_when_one_is_given_up(pair, fabric):
    (a, _), (to_b, _) = pair
    unique_id = fabric.runtime().unique_id()
    third = Rank(fabric)
    links = [a.link("third", 2, 0, unique_id), third.link("third", 2, 1, unique_id)]
    for one in (a, third):
        one.machine.turn(0.0)
    a.machine.expect([[Key(label, True, 1, tag)] for tag in (0, 1) for label in ("pair", "third")])
    stalled = a.move(to_b, bytes_of(1), 1, 0, sends=True, until=2.0)
    memory = [bytes_of(0), bytes_of(0)]
    got = [third.move(links[1], one, 0, tag, sends=False) for tag, one in enumerate(memory)]
    sent = [a.move(links[0], bytes_of(7 + tag), 1, tag, sends=True) for tag in (1, 0)]
    a.machine.turn(1.0)
    third.machine.turn(1.0)
    assert sent == [[], []]  # the later one is ready first, and waits
    a.machine.turn(2.0)
    a.machine.turn(2.0)
    third.machine.turn(2.0)
    a.machine.turn(2.0)
    third.machine.turn(2.0)
    assert stalled == []
    assert sent == got == [[None], [None]]
    assert [int(one[0]) for one in memory] == [7, 8]


def test_a_link_that_was_given_up_before_the_plan_is_told_holds_nobody_up(pair, fabric):
    (a, _), (to_b, _) = pair
    third = Rank(fabric)
    unique_id = fabric.runtime().unique_id()
    links = [a.link("third", 2, 0, unique_id), third.link("third", 2, 1, unique_id)]
    for one in (a, third):
        one.machine.turn(0.0)
    a.machine.give_up(to_b, TransportError("dropped"))
    a.finish_aborts()
    a.machine.expect([[Key("pair", True, 1, 0)], [Key("third", True, 1, 0)]])
    memory = bytes_of(0)
    got = third.move(links[1], memory, 0, sends=False)
    lost, sent = a.move(to_b, bytes_of(1), 1, sends=True), a.move(links[0], bytes_of(7), 1, sends=True)
    for one in (a, third, a, third):
        one.machine.turn(1.0)
    assert [str(error) for error in lost] == ["dropped"]
    assert (sent, got, int(memory[0])) == ([None], [None], 7)


@pytest.mark.parametrize("call", ["start", "ready", "group", "mark"])
def test_a_device_that_is_lost_is_the_links_error(pair, fabric, monkeypatch, call):
    """CUDA's own errors come as RuntimeError, whatever is called."""
    (a, _), (to_b, _) = pair

    def lost(*_args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(a.runtime, call, lost)
    link = a.link("other", 2, 0, fabric.runtime().unique_id()) if call == "start" else to_b
    sent = a.move(link, bytes_of(1), 1, sends=True)
    for now in (1.0, 2.0):
        a.machine.turn(now)
        a.finish_aborts()
    assert "illegal memory access" in str(sent[0])
    assert "illegal memory access" in link.said[-1]


def test_those_that_never_come_are_not_waited_for(fabric):
    one = Rank(fabric)
    link = one.link("pair", 2, 0, fabric.runtime().unique_id(), until=3.0)
    one.machine.turn(2.9)
    assert link.said == []
    one.machine.turn(3.0)
    one.finish_aborts()
    assert "did not meet" in link.said[0]


def test_a_peer_that_is_gone_is_an_error_at_once(pair):
    (a, b), (to_b, to_a) = pair
    under_way = a.move(to_b, bytes_of(1), 1, sends=True)
    a.machine.turn(1.0)
    b.machine.give_up(to_a, TransportError("closed"))
    b.finish_aborts()
    a.machine.turn(1.1)
    a.finish_aborts()
    assert "is gone" in str(under_way[0])


def test_sizes_that_differ_are_an_error(pair):
    (a, b), (to_b, to_a) = pair
    sent, got = a.move(to_b, bytes_of(1), 1, sends=True), b.move(to_a, bytes_of(0, 9), 0, sends=False)
    for one in (a, b, a, b):
        one.machine.turn(1.0)
    a.finish_aborts()
    b.finish_aborts()
    assert "8 bytes were sent for 9" in str(sent[0])
    assert "8 bytes were sent for 9" in str(got[0])


def test_a_communicator_is_made_anew_under_its_label(pair, fabric):
    (a, b), (to_b, _) = pair
    waiting = a.move(to_b, bytes_of(1), 1, sends=True, until=2.0)
    a.machine.turn(2.0)
    a.machine.turn(2.0)
    unique_id = fabric.runtime().unique_id()
    again = [one.link("pair", 2, number, unique_id, until=20.0) for number, one in enumerate((a, b))]
    b.finish_aborts()
    a.machine.turn(3.0)  # the abort of the first has not returned yet
    b.machine.turn(3.0)
    assert [link.said for link in again] == [["made"], ["made"]]
    memory = bytes_of(0)
    sent, got = a.move(again[0], bytes_of(5), 1, sends=True, until=9.0), b.move(again[1], memory, 0, sends=False)
    for one in (a, b, a, b):
        one.machine.turn(4.0)
    assert (sent, got, int(memory[0])) == ([None], [None], 5)
    assert waiting == []
    a.finish_aborts()
    assert len(waiting) == 1
    assert "pair" in a.machine.links


@given(st.integers(0, 2**32))
@settings(max_examples=40)
def test_every_operation_ends_exactly_once_whatever_happens(seed):
    rng = random.Random(seed)
    fabric = sys.modules["standins"].Fabric()
    unique_id = fabric.runtime().unique_id()
    ranks = [Rank(fabric), Rank(fabric)]
    links = [one.link("pair", 2, number, unique_id, until=rng.uniform(1, 30)) for number, one in enumerate(ranks)]
    said, now = [], 0.0
    for number in range(60):
        now += rng.uniform(0, 1)
        which = rng.randrange(2)
        one, link = ranks[which], links[which]
        choice = rng.random()
        if choice < 0.4:
            until = now + rng.uniform(0, 10)
            said.append(one.move(link, bytes_of(number % 250), 1 - which, number, sends=which == 0, until=until))
        elif choice < 0.43:
            one.machine.give_up(link, TransportError("closed"))
        elif choice < 0.5:
            one.finish_aborts()
        else:
            one.machine.turn(now)
    for one, link in zip(ranks, links, strict=True):
        one.machine.give_up(link, TransportError("closed"))
        one.finish_aborts()
    assert all(len(answers) == 1 for answers in said)
    assert all(link.said.count("made") <= 1 and len(link.said) == link.said.count("made") + 1 for link in links)
    assert all(one.machine.idle and not one.machine.busy for one in ranks)
