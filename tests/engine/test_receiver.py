"""Receivers in one process over a transport in memory: landing modes, versions, what is served when, and whose calls count."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from syncline.engine.address import Address
from syncline.engine.errors import (
    BusyError,
    NotServing,
    PlanError,
    ProtocolError,
    TransportError,
)
from syncline.engine.messages import RankLinks, RankOrder
from syncline.engine.receiver import Receiver

MODES = ["staged", "streamed", "mapped"]
SPARED = ["staged", "mapped"]
"""Modes that leave live parameters alone until the commit."""


@pytest.mark.parametrize("expose", [True, False])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("landing", MODES)
async def test_a_push_lands_and_is_served_by_all_ranks(targets, landing, world, expose):
    target = await targets(world=world, landing=landing, expose=expose)
    assert target.states() == [("FENCED", None)] * world
    result = await target.push(1)
    assert target.hold(1)
    assert target.states() == [("COMMITTED", 1)] * world
    assert (result.state, result.version) == ("COMMITTED", 1)
    assert result.votes == {str(rank): True for rank in range(world)}
    assert result.num_buckets_received > 1
    for receiver in target.receivers:
        with receiver.gate.forward() as version:
            assert version == 1
    await target.push(2)
    assert target.hold(2)


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_addresses_of_live_parameters_never_change(targets, landing):
    target = await targets(landing=landing)
    before = {name: tensor.data_ptr() for name, tensor in target.loaders[0].live.items()}
    for version in (1, 2, 3):
        await target.push(version)
    assert {name: tensor.data_ptr() for name, tensor in target.loaders[0].live.items()} == before


async def test_mapped_keeps_the_lease_until_the_next_commit(targets):
    target = await targets(landing="mapped")
    half = target.halves.of[0]
    await target.push(1)
    assert [lease.released for lease in half.leases] == [False]
    assert (await target.source.prepare(2)).status == "ready"
    assert [lease.released for lease in half.leases] == [False]
    target.deliver(2)
    assert (await target.source.complete(2)).success
    assert [lease.released for lease in half.leases] == [True, False]
    assert target.hold(2)
    await target.source.connect()
    assert [lease.released for lease in half.leases] == [True, False]
    await target.push(3)
    assert [lease.released for lease in half.leases] == [True, True]


@pytest.mark.parametrize("unmaps", [True, False])
async def test_after_mapped_another_mode(targets, unmaps):
    target = await targets(landing="mapped")
    await target.push(1)
    (lease,) = target.halves.of[0].leases
    loader = target.loaders[0]

    def unmap():
        loader.live = {name: tensor.clone() for name, tensor in loader.live.items()}

    if unmaps:
        loader.unmap = unmap
    target.source.landing = target.landing = "staged"
    await target.source.connect()
    assert lease.released == unmaps  # what a loader cannot give up is held on to
    assert target.hold(1)
    for version in (2, 3):
        await target.push(version)
    assert lease.released == unmaps


@pytest.mark.parametrize("expose", [True, False])
@pytest.mark.parametrize("landing", MODES)
async def test_the_loader_is_called_once_per_version_in_order(targets, landing, expose):
    committed = []
    target = await targets(world=2, landing=landing, expose=expose, on_commit=committed.append)
    for version in (1, 2):
        await target.push(version)
    for loader in target.loaders:
        names = [name for name, _ in loader.calls if name != "install"]
        load = ["rebind"] if landing == "mapped" else []
        assert names == ["begin", *load, "finish"] * 2
        assert [detail for name, detail in loader.calls if name in ("begin", "finish")] == [1, 1, 2, 2]
        assert any(name == "install" for name, _ in loader.calls) == (not expose and landing != "mapped")
        first = [name for name, _ in loader.calls].index("finish")
        assert "install" not in [name for name, _ in loader.calls][first + 1 : first + 2]
    assert sorted(committed) == [1, 1, 2, 2]


async def test_a_commit_hook_may_be_a_coroutine(targets):
    committed = []

    async def hook(version):
        await asyncio.sleep(0)
        committed.append((version, target.leader.gate.version))

    target = await targets(on_commit=hook)
    await target.push(1)
    assert committed == [(1, None)]


@pytest.mark.parametrize("landing", SPARED)
async def test_the_old_version_is_served_until_the_commit(targets, landing):
    target = await targets(landing=landing, version=3)
    assert target.states() == [("COMMITTED", 3)]
    assert (await target.source.prepare(4)).status == "ready"
    assert target.states() == [("UPDATING", 3)]
    target.deliver(4)
    async with target.leader.gate.forward() as version:
        assert version == 3
        assert target.hold(3)
    assert (await target.source.complete(4)).success
    assert target.states() == [("COMMITTED", 4)]


async def test_streamed_serves_nothing_while_it_lands_and_passes_wait(targets):
    target = await targets(landing="streamed", version=3)
    assert (await target.source.prepare(4)).status == "ready"
    assert target.states() == [("UPDATING", None)]
    with pytest.raises(NotServing, match="under way"):
        target.leader.gate.enter(0.0)
    waiting = asyncio.create_task(target.leader.gate.enter_async())
    target.deliver(4)
    assert not waiting.done()
    assert (await target.source.complete(4)).success
    assert await waiting == 4
    target.leader.gate.leave()


async def test_a_commit_waits_for_the_passes_that_run(targets, until):
    target = await targets(world=2, version=1)
    assert (await target.source.prepare(2)).status == "ready"
    target.deliver(2)
    with target.receivers[1].gate.forward() as version:
        completing = asyncio.create_task(target.source.complete(2))
        await until(lambda: target.receivers[1].gate.version is None)  # the pause has reached this rank
        with pytest.raises(NotServing):
            target.receivers[1].gate.enter(0.0)
        assert version == 1
        assert target.hold(1)
        assert not completing.done()
    assert (await completing).success
    assert target.hold(2)


async def test_all_ranks_vote_before_any_commits(targets, until):
    target = await targets(world=4, version=1)
    assert (await target.source.prepare(2)).status == "ready"
    target.deliver(2, ranks=[0, 1, 3])
    completing = asyncio.create_task(target.source.complete(2))
    machine = target.leader._leader._machine
    await until(lambda: (machine.step, machine.waiting) == ("vote", {2}))  # the other three have said yes
    assert not completing.done()
    assert target.states() == [("UPDATING", 1)] * 4
    assert target.hold(1)
    target.deliver(2, ranks=[2])
    result = await completing
    assert result.votes == {"0": True, "1": True, "2": True, "3": True}
    assert target.hold(2)


async def test_without_digests(targets):
    target = await targets(verify=False)
    await target.push(1)
    assert target.hold(1)
    assert (await target.leader.status()).digest == ""


# versions


async def test_an_older_version_is_a_conflict(targets):
    target = await targets(version=7)
    reply = await target.source.prepare(5)
    assert (reply.status, reply.error, reply.version) == ("error", "VersionConflict", 7)
    assert "5" in reply.message
    assert "7" in reply.message
    assert target.states() == [("COMMITTED", 7)]


@pytest.mark.parametrize("world", [1, 2])
async def test_the_same_version_is_answered_and_not_applied_twice(targets, world):
    target = await targets(world=world)
    await target.push(1)
    calls = [list(loader.calls) for loader in target.loaders]
    reply = await target.source.prepare(1)
    assert reply.status == "already"
    assert reply.digests == target.source.digests(1)
    assert [loader.calls for loader in target.loaders] == calls
    assert target.states() == [("COMMITTED", 1)] * world
    reply = await target.source.prepare(1, digests=target.source.digests(1))
    assert reply.status == "already"
    reply = await target.source.prepare(1, digests={str(rank): "0" * 32 for rank in range(world)})
    assert (reply.status, reply.error) == ("error", "VersionConflict")
    await target.push(2)


async def test_complete_may_be_repeated(targets):
    target = await targets(world=2)
    first = await target.push(1)
    calls = [list(loader.calls) for loader in target.loaders]
    assert await target.source.complete(1) == first
    assert [loader.calls for loader in target.loaders] == calls
    both = await target.source.prepare(2)
    assert both.status == "ready"
    target.deliver(2)
    once, again = await asyncio.gather(target.source.complete(2), target.source.complete(2))
    assert once.success
    assert again.success
    assert [[detail for name, detail in loader.calls if name == "finish"] for loader in target.loaders] == [[1, 2], [1, 2]]


async def test_prepare_may_be_repeated(targets):
    target = await targets(world=2)
    first = await target.source.prepare(1)
    again = await target.source.prepare(1, push_id=target.source.push_id)
    assert first == again
    both = await asyncio.gather(*(target.source.prepare(1, push_id=target.source.push_id) for _ in range(3)))
    assert {reply.status for reply in both} == {"ready"}
    assert target.halves.of[0].pushes == [target.source.push_id]
    target.deliver(1)
    assert (await target.source.complete(1)).success


async def test_a_version_that_was_committed_keeps_its_content_even_when_fenced(targets):
    target = await targets(landing="streamed")
    await target.push(5)
    await target.source.prepare(6)
    target.halves.of[0].deliver(target.source.programs[0].tasks[0], 6)
    await target.source.abort()
    assert target.states() == [("FENCED", None)]
    assert target.leader.version == 5
    assert (await target.source.prepare(4)).error == "VersionConflict"
    assert (await target.source.prepare(5)).status == "ready"  # not held as a whole any more: it may come again
    target.deliver(5)
    assert (await target.source.complete(5)).success
    await target.source.prepare(6)
    target.halves.of[0].deliver(target.source.programs[0].tasks[0], 6)
    await target.source.abort()
    await target.source.prepare(5)
    target.deliver(9)
    result = await target.source.complete(9)  # digests of version 9's content under version 5
    assert (result.success, result.error) == (False, "VersionConflict")
    assert target.states() == [("FENCED", None)]


# whose calls count


async def test_two_pushes_at_once_are_refused(targets):
    target = await targets(world=2, version=1)
    assert (await target.source.prepare(2, push_id="first")).status == "ready"
    reply = await target.source.prepare(3, push_id="second")
    assert (reply.status, reply.error) == ("error", "BusyError")
    assert "first" in reply.message
    result = await target.source.complete(3, push_id="second")
    assert (result.success, result.error) == (False, "ProtocolError")
    target.deliver(2)
    assert (await target.source.complete(2, push_id="first")).success
    assert target.hold(2)


async def test_another_source_has_to_wait_and_the_same_one_may_begin_again(targets, rig):
    target = await targets(version=1)
    assert (await target.source.prepare(2)).status == "ready"
    other = rig.ToySource(target.leader.address, incarnation="another")
    with pytest.raises(BusyError, match="another source"):
        await other.connect()
    assert target.states() == [("UPDATING", 1)]
    await target.source.connect()
    assert target.states() == [("COMMITTED", 1)]
    await other.connect()
    assert (await other.prepare(2)).status == "ready"
    assert (await target.source.complete(2)).error == "PushAborted"
    target.deliver(2)
    assert (await other.complete(2)).success
    await other.close()


async def test_a_source_that_does_not_watch_cannot_begin_a_push(targets):
    """It went away, and its prepare came late: nobody would end what it begins."""
    target = await targets(version=1)
    reply = await target.source.prepare(2, source_incarnation="source", timeout_s=0.2)
    assert (reply.status, reply.error) == ("error", "ProtocolError")
    assert "does not watch this target" in reply.message
    assert target.states() == [("COMMITTED", 1)]
    await target.push(2)  # of a source that does not say who it is: nothing is known of it


async def test_a_watch_may_begin_just_after_the_prepare(targets):
    target = await targets(version=1)
    preparing = asyncio.create_task(target.source.prepare(2, source_incarnation="source"))
    watch = asyncio.create_task(target.source.client.watch())
    assert (await preparing).status == "ready"
    target.deliver(2)
    assert (await target.source.complete(2)).success
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_a_source_that_has_stopped_watching_is_refused_at_once(targets, until):
    target = await targets(version=1)
    opened = asyncio.Event()
    watch = asyncio.create_task(target.source.client.watch(opened.set))
    await opened.wait()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await until(lambda: target.leader._leader._source_left)
    async with asyncio.timeout(30):
        reply = await target.source.prepare(2, source_incarnation="source", timeout_s=1000.0)
    assert (reply.status, reply.error) == ("error", "ProtocolError")
    await target.source.connect()
    watch = asyncio.create_task(target.source.client.watch())
    assert (await target.source.prepare(2, source_incarnation="source")).status == "ready"
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await until(lambda: target.states() == [("COMMITTED", 1)])


async def test_calls_out_of_order(targets, rig):
    target = await targets(version=1)
    unknown = await target.source.complete(1, push_id="nobody")
    assert (unknown.success, unknown.error) == (False, "ProtocolError")
    assert (await target.source.abort(push_id="nobody")).ok
    late = await target.source.prepare(2, push_id="nobody")  # the abort came first
    assert (late.status, late.error) == ("error", "ProtocolError")
    await target.push(2)
    committed = target.source.push_id
    answer = await target.source.abort(push_id=committed)
    assert (answer.ok, answer.error) == (False, "ProtocolError")
    assert target.states() == [("COMMITTED", 2)]
    assert (await target.source.prepare(2, push_id=committed)).status == "already"
    assert (await target.source.prepare(3, push_id="failed")).status == "ready"
    await target.source.abort(push_id="failed")
    assert (await target.source.prepare(3, push_id="failed")).error == "ProtocolError"
    assert target.states() == [("COMMITTED", 2)]
    await target.push(4)


async def test_messages_for_another_incarnation_are_rejected(targets):
    target = await targets(world=2, version=1)
    incarnation = (await target.leader.status()).incarnation
    reply = await target.source.prepare(2, incarnation="an older life")
    assert (reply.status, reply.error) == ("error", "ProtocolError")
    assert (await target.source.prepare(2, incarnation=incarnation)).status == "ready"
    target.deliver(2)
    result = await target.source.complete(2, incarnation="an older life")
    assert (result.success, result.error) == (False, "ProtocolError")
    order = RankOrder(push_id=target.source.push_id, incarnation="an older life", order="fence")
    with pytest.raises(ProtocolError, match="incarnation"):
        await target.receivers[1].on_order(order)
    assert (await target.source.complete(2, incarnation=incarnation)).success


async def test_before_connect_nothing_can_be_prepared(rig, run_dir):
    async with Receiver(rig.ToyLoader(), f"unix:{run_dir}/x.sock") as receiver:
        source = rig.ToySource(receiver.address)
        await source.plan()
        reply = await source.prepare(1)
        assert (reply.status, reply.error) == ("error", "ProtocolError")
        assert "connect" in reply.message
        await source.close()


async def test_a_plain_two_phase_source_gets_a_clear_answer(targets):
    target = await targets(version=1)
    path = Address.parse(target.leader.address).path
    prepare = {
        "num_buckets": 1,
        "buckets": [{"names": ["a"], "dtypes": ["float32"], "shapes": [[6, 4]]}],
        "group_name": "weight_sync_group",
    }
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        async with session.post("http://x/prepare_weights_update", json=prepare) as response:
            assert response.status == 200
            reply = json.loads(await response.read())
        assert reply["status"] == "error"
        assert "version" in reply["message"]
        body = {"group_name": "weight_sync_group", "flush_cache": False}
        async with session.post("http://x/complete_weights_update", json=body) as response:
            reply = json.loads(await response.read())
        assert (reply["success"], reply["num_buckets_received"]) == (False, 0)
        assert reply["message"]
    assert target.states() == [("COMMITTED", 1)]


async def test_a_stale_plan_is_never_executed(targets):
    target = await targets(world=2, version=1)
    reply = await target.source.prepare(2, plan_digest="another plan")
    assert (reply.status, reply.error) == ("error", "PlanError")
    target.loaders[1].fingerprint = "reallocated"
    reply = await target.source.prepare(2)
    assert (reply.status, reply.error) == ("error", "PlanError")
    assert "rank 1" in reply.message
    assert target.states() == [("COMMITTED", 1)] * 2
    await target.source.connect()
    await target.push(2)


async def test_a_program_that_does_not_fit_the_own_manifest_is_refused(targets):
    target = await targets(world=2, version=1)
    source = target.source
    whole, digest = source.programs[1], (await source.client.status()).manifest_digest

    def links(program):
        return [
            RankLinks(rank=rank, program=data.to_bytes(), transport="shm", descriptors={})
            for rank, data in ((0, source.programs[0]), (1, program))
        ]

    short = type(whole)(**{name: getattr(whole, name) for name in whole.__slots__} | {"tasks": whole.tasks[:-1]})
    with pytest.raises(PlanError, match="unwritten"):
        await source.connect(ranks=links(short))
    with pytest.raises(PlanError, match="rank"):
        await source.connect(ranks=links(source.programs[0]))
    with pytest.raises(ProtocolError, match="no program"):
        await source.connect(ranks=[links(whole)[0], RankLinks(rank=1, program=b"junk", transport="shm", descriptors={})])
    with pytest.raises(ProtocolError, match="2 ranks"):
        await source.connect(ranks=links(whole)[:1])
    with pytest.raises(PlanError, match="manifest"):
        await source.connect(manifest_digest="+".join(["0" * 32, *digest.split("+")[1:]]))
    assert target.states() == [("COMMITTED", 1)] * 2
    await source.connect()
    await target.push(2)


async def test_mapped_needs_parameters_that_may_move(targets):
    with pytest.raises(PlanError, match="movable"):
        await targets(landing="mapped", movable=False)


async def test_a_failed_link_is_told_and_can_be_made_again(targets):
    target = await targets(world=2, version=1)
    half = type(target.halves.of[0])

    class Broken(half):
        async def link(self, descriptors, *, timeout_s):
            if self.program.receiver.rank == 1:
                raise TransportError("by the test")

    make = target.receivers[1]._rank._make_half
    target.receivers[1]._rank._make_half = lambda _kind, program, landing, _workers: Broken(program, landing)
    with pytest.raises(TransportError, match="by the test"):
        await target.source.connect()
    assert (await target.source.prepare(2)).error == "ProtocolError"
    target.receivers[1]._rank._make_half = make
    await target.source.connect()
    await target.push(2)


async def test_a_rank_that_is_not_the_leader_sends_sources_to_the_leader(targets, rig):
    target = await targets(world=2, version=1)
    source = rig.ToySource(target.receivers[1].address)
    assert target.leader.address in (await source.complete(1, push_id="p")).message
    with pytest.raises(ProtocolError, match="leader"):
        await source.client.abort(rig.AbortRequest(push_id="p"))
    with pytest.raises(ProtocolError, match="takes no orders"):
        await target.source.client.order(RankOrder(push_id="p", order="fence"))
    assert target.states() == [("COMMITTED", 1)] * 2
    await source.close()


async def test_status_says_what_a_target_is(targets):
    target = await targets(world=2, version=1)
    status = await target.source.client.status()
    assert (status.state, status.version, status.rank, status.world_size, status.ready) == ("COMMITTED", 1, 0, 2, True)
    assert status.manifest_digest == (await target.source.client.manifest()).manifest_digest
    await target.source.prepare(2)
    assert (await target.source.client.status()).state == "UPDATING"
    await target.source.abort()
    await target.push(2)
    status = await target.source.client.status()
    assert (status.version, status.pushes) == (2, 1)
    assert status.digest == target.source.digests(2)["0"]
    assert status.landing_bytes == sum(program.landing_nbytes for program in target.source.programs.values())
