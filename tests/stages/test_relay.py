"""Ranks of a target pass buckets on to each other: contents, order, memory, and what happens when one does not."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from syncline.scheduler.programs import TargetTask
from syncline.stages.completions import Signal
from syncline.stages.errors import TransportError
from syncline.stages.transports.relay import Relay

TWO_SIDED = [("gloo", "streamed"), ("gloo", "staged"), ("nccl", "streamed"), ("nccl", "staged")]
each_transport = pytest.mark.parametrize(("transport", "landing"), TWO_SIDED)
WHOLE = [[7, 5], [301], [40, 30], [3], [900], [64, 64], [1], [500, 2]]
"""Shapes that no rank of three can cut: every rank keeps all of each."""


def check(one, version):
    for receiver, target in one.targets.items():
        assert target.wrong(version) == [], receiver


@each_transport
@pytest.mark.parametrize("sources", [1, 3])
async def test_what_is_passed_on_arrives_push_after_push(world, transport, landing, sources):
    one = await world(
        seed=3, transport=transport, landing=landing, sources=sources, targets=[3, 2, 1], shapes=WHOLE * 3, apart=True
    )
    assert any(task.relayed for source in one.sources for task in source.program.tasks)
    for version in range(1, 6):
        await one.push(version)
        check(one, version)


@each_transport
async def test_what_is_cut_goes_beside_what_is_whole(world, transport, landing):
    shapes = [[40, 30], [301], [12, 9], [77, 2], [3], [64, 33], [2000], [50, 6]]
    one = await world(seed=5, transport=transport, landing=landing, sources=2, targets=[3, 3], shapes=shapes, apart=True)
    for version in (1, 2, 3):
        await one.push(version)
        check(one, version)


@each_transport
async def test_a_bucket_leaves_its_owner_once_for_each_target(world, transport, landing):
    one = await world(seed=4, transport=transport, landing=landing, targets=[3], shapes=WHOLE * 4, apart=True)
    (source,) = one.sources
    sent = Counter()
    original = source.sender.send

    def send(task, bucket, receivers, lent=None):
        sent[task.index] += len(receivers)
        return original(task, bucket, receivers, lent)

    source.sender.send = send
    await one.push(1)
    check(one, 1)
    first, *others = source.program.tasks
    assert sent[first.index] == 3  # everybody's first one: see `syncline.scheduler.relays`
    assert {sent[task.index] for task in others} == {1}


@each_transport
async def test_large_segments_that_travel_alone_are_passed_on(world, transport, landing, monkeypatch):
    monkeypatch.setattr("syncline.stages.frames.FRAME_NBYTES", 1024)
    one = await world(
        seed=6, transport=transport, landing=landing, targets=[3], shapes=WHOLE * 2, bucket_bytes=16384, apart=True
    )
    for target in one.targets.values():
        if landing == "streamed":
            target.half.expose({
                task.index: {
                    segment.segment.offset: torch.empty(segment.segment.nbytes, dtype=torch.uint8) for segment in task.landings
                }
                for task in target.program.tasks
            })  # fmt: skip
    pushing = asyncio.create_task(one.push(1))
    if landing == "streamed":
        for target in one.targets.values():
            while target.half._lead is None:
                await asyncio.sleep(0)
        for target in one.targets.values():
            await target.half.first_bytes()
            target.half.open_places(live=False)  # buffers after all
    await pushing
    check(one, 1)


@each_transport
async def test_a_rank_that_passes_nothing_on_ends_the_push_and_the_next_one_works(world, transport, landing):
    one = await world(seed=8, transport=transport, landing=landing, targets=[3], shapes=WHOLE * 4, apart=True)
    (source,) = one.sources
    source.fill(1)
    stuck = next(iter(one.targets.values()))
    for target in one.targets.values():
        await target.half.begin("a", timeout_s=5)
    given = next(task for task in stuck.program.tasks if task.onward)
    stuck.half._pass_on = lambda task, memory: None
    pushing = asyncio.create_task(source.push("a", timeout_s=5))
    receiving = [asyncio.create_task(target.receive()) for target in one.targets.values()]
    await stuck.half.receive(given)
    await stuck.half.end(committed=False)
    await asyncio.wait(receiving, timeout=30)
    outcomes = [task.result() for task in receiving]
    assert all("TransportError" in outcome["error"] for outcome in outcomes[1:])
    await pushing
    for target in one.targets.values():
        await target.abandon()
    await source.end([])
    del stuck.half._pass_on
    await one.connect()
    await one.push(2)
    check(one, 2)


@each_transport
async def test_a_relay_that_breaks_is_known_at_the_source_before_any_deadline(world, transport, landing):
    """Both its ends live, and the links with the source are whole: those go with it."""
    one = await world(seed=8, transport=transport, landing=landing, targets=[3], shapes=WHOLE * 4, apart=True)
    (source,) = one.sources
    source.fill(1)
    for target in one.targets.values():
        await target.half.begin("a", timeout_s=300)
    first = next(iter(one.targets.values()))
    _ = first.half._relays[0].communicator.abort()
    pushing = asyncio.create_task(source.push("a", timeout_s=300))
    receiving = [asyncio.create_task(target.receive()) for target in one.targets.values()]
    await asyncio.wait([pushing, *receiving], timeout=30)
    assert all(task.done() for task in (pushing, *receiving))
    assert set(source.lost) == set(one.targets)
    for text in source.lost.values():  # by its own name, not by its place in a communicator
        assert "send to" not in text or any(f"send to rank {rank} of target 0" in text for rank in range(3))
    for target in one.targets.values():
        await target.abandon()
    await source.end([])
    await one.connect()
    await one.push(2)
    check(one, 2)


async def test_an_offer_without_the_ranks_that_pass_on_is_refused(world):
    one = await world(connect=False, seed=9, transport="gloo", landing="staged", targets=[2], shapes=WHOLE, apart=True)
    source, targets = one.sources[0], list(one.targets)
    source.sender._relays = {}
    offers = await source.sender.offer(targets)
    results = await asyncio.gather(
        source.sender.link(targets, timeout_s=3), *(one.targets[r].link({0: offers[0]}, timeout_s=3) for r in targets),
        return_exceptions=True,
    )  # fmt: skip
    assert any("has only ranks [] pass on" in str(result) for result in results)


# -------------------------------------------------------------------------------------------------------------- its turns


class Recorded:
    """Stands for a communicator: notes what is started, ends nothing."""

    usable = True

    def __init__(self):
        self.started = []
        self.signals = []

    def set_deadline(self, timeout_s):
        pass

    def send_all(self, parts, peer, tag):
        return self._start("send", peer, tag)

    def recv_all(self, parts, peer, tag):
        return self._start("recv", peer, tag)

    def _start(self, *what):
        self.started.append(what)
        self.signals.append(Signal())
        return self.signals[-1]


def tasks():
    def one(index, **more):
        return TargetTask(index=index, owner=0, nbytes=1, landing_offset=0, shared_offset=0, landings=(), **more)

    return [one(2, via=5), one(4, onward=(5, 7)), one(6, via=7)]


async def test_messages_start_in_plan_order_whatever_is_ready_first():
    wire, (takes, gives, takes_too) = Recorded(), tasks()
    relay = Relay(wire, [3, 5, 7])
    relay.begin(tasks(), timeout_s=1)
    relay.recv(takes_too, [])
    relay.send(gives, [])
    assert wire.started == []
    relay.recv(takes, [])
    assert wire.started == [("recv", 1, 2), ("send", 1, 4), ("send", 2, 4), ("recv", 2, 6)]


async def test_a_failure_ends_what_waits_for_its_turn_and_nothing_that_is_under_way():
    wire, (takes, gives, takes_too) = Recorded(), tasks()
    relay = Relay(wire, [3, 5, 7])
    relay.begin(tasks(), timeout_s=1)
    first, last = relay.recv(takes, []), relay.recv(takes_too, [])
    relay.fail(TransportError("over"))
    assert isinstance(last.error, TransportError)
    assert not first.done
    late = relay.send(gives, [])
    assert isinstance(late.error, TransportError)
    assert wire.started == [("recv", 1, 2)]
    wire.signals[0].set()
    await first


async def test_one_send_that_fails_fails_the_whole():
    wire, (takes, gives, _) = Recorded(), tasks()
    relay = Relay(wire, [3, 5, 7])
    relay.begin(tasks(), timeout_s=1)
    relay.recv(takes, [])
    sent = relay.send(gives, [])
    wire.signals[1].set()
    wire.signals[2].fail(TransportError("gone"))
    with pytest.raises(TransportError, match="gone"):
        await sent


@pytest.mark.parametrize("landing", ["streamed", "staged"])
async def test_receivers_of_one_process_share_an_issuer(world, monkeypatch, landing):
    one = await world(
        connect=False, seed=11, transport="nccl", landing=landing, sources=2, targets=[2, 2], shapes=WHOLE, apart=True
    )
    shared = one.peer.Issuer(one.peer.nccl_runtime(one.spec))
    monkeypatch.setattr(one.peer, "Issuer", lambda runtime: shared)
    await one.connect()
    for version in (1, 2, 3):
        await one.push(version)
        check(one, version)
