"""What fails in a push, in one process: what is served after it, what the source is told, and that the next push goes well."""

from __future__ import annotations

import asyncio
import threading

import pytest

from syncline.engine.errors import NotServing, TargetUnreachable, TransportError
from syncline.engine.messages import JoinRequest
from syncline.engine.receiver import Receiver

OLD = ("COMMITTED", 1)
FENCED = ("FENCED", None)
AFTER = {"staged": OLD, "streamed": FENCED, "mapped": OLD}
"""By landing mode: state and served version after a failure between the first byte and the commit."""
MODES = list(AFTER)


async def check_and_recover(target, after, *, held=None):
    """After a failure: what is served, that nothing is paused for ever, and that the next push commits."""
    assert target.states() == [after] * target.world
    for receiver in target.receivers:
        if after == FENCED:
            with pytest.raises(NotServing, match="fenced"):
                receiver.gate.enter(5.0)
        else:
            with receiver.gate.forward(5.0) as version:
                assert version == after[1]
                assert target.hold(version)
    await target.source.connect()
    await target.push(10)
    assert target.hold(10)
    assert target.states() == [("COMMITTED", 10)] * target.world


async def first_bucket(target, until, version):
    """Every rank gets its first bucket, and has taken it."""
    for rank, half in target.halves.of.items():
        half.deliver(target.source.programs[rank].tasks[0], version)
    if target.landing == "streamed":
        await until(lambda: all(half.released for half in target.halves.of.values()))


def boom():
    raise ZeroDivisionError("by the test")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("landing", MODES)
async def test_aborted_before_the_first_byte(targets, landing, world):
    target = await targets(world=world, landing=landing, version=1)
    await target.source.prepare(2)
    answer = await target.source.abort()
    assert (answer.ok, answer.serving) == (True, 1)
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "PushAborted")
    await check_and_recover(target, OLD)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("landing", MODES)
async def test_aborted_in_the_middle(targets, until, landing, world):
    target = await targets(world=world, landing=landing, version=1)
    await target.source.prepare(2)
    await first_bucket(target, until, 2)
    await target.source.abort(reason="enough")
    assert "enough" in (await target.source.complete(2)).message
    assert target.leader.version == 1
    await check_and_recover(target, AFTER[landing])


async def test_one_rank_with_bytes_fences_all_of_a_streamed_target(targets, until):
    target = await targets(world=2, landing="streamed", version=1)
    await target.source.prepare(2)
    target.halves.of[1].deliver(target.source.programs[1].tasks[0], 2)
    await until(lambda: target.halves.of[1].released)
    await target.source.abort()
    await until(lambda: target.states() == [FENCED] * 2)
    await check_and_recover(target, FENCED)


@pytest.mark.parametrize("landing", MODES)
async def test_the_source_vanishes_without_a_word(targets, until, landing):
    target = await targets(world=2, landing=landing, version=1)
    await target.source.prepare(2, timeout_s=0.5)
    await first_bucket(target, until, 2)
    await until(lambda: all(receiver.state != "UPDATING" for receiver in target.receivers))
    await until(target.is_ready)
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "PushTimeout")
    await check_and_recover(target, AFTER[landing])


async def test_the_source_vanishes_and_its_watch_tells(targets, until, rig):
    target = await targets(world=2, version=1)
    source = rig.ToySource(target.leader.address, incarnation="short-lived")
    await source.connect()
    opened = asyncio.Event()
    watch = asyncio.create_task(source.client.watch(opened.set))
    await opened.wait()
    await source.prepare(2, timeout_s=1000.0)
    await source.close()
    await until(lambda: target.states() == [OLD] * 2)
    result = await target.source.complete(2, push_id=source.push_id)
    assert (result.success, result.error) == (False, "SourceRankLost")
    await watch
    late = await target.source.prepare(3, push_id="sent before the source left, read after")
    assert (late.status, late.error) == ("error", "ProtocolError")
    await check_and_recover(target, OLD)


async def test_a_watch_of_an_older_connection_ends(targets, until):
    target = await targets(version=1)
    client = target.source.client
    watches = []
    for _ in range(2):
        await target.source.connect()
        opened = asyncio.Event()
        watches.append(asyncio.create_task(client.watch(opened.set)))
        await opened.wait()
    await target.source.prepare(2)
    watches[0].cancel()
    await until(lambda: len(target.leader._server._watches) == 1)
    target.deliver(2)
    assert (await target.source.complete(2)).success
    watches[1].cancel()
    await asyncio.gather(*watches, return_exceptions=True)


@pytest.mark.parametrize("landing", MODES)
async def test_a_link_breaks(targets, until, landing):
    target = await targets(world=2, landing=landing, version=1)
    await target.source.prepare(2)
    await first_bucket(target, until, 2)
    target.halves.of[1].fail(TransportError("the wire is cut"))
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "TransportError")
    assert "the wire is cut" in result.message
    assert "rank 1" in result.message
    await check_and_recover(target, AFTER[landing])


@pytest.mark.parametrize("landing", MODES)
async def test_other_bytes_than_were_sent(targets, until, landing):
    target = await targets(world=2, landing=landing, version=1)
    await target.source.prepare(2)
    target.deliver(3, ranks=[1])
    target.deliver(2, ranks=[0])
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "DigestMismatch")
    assert result.votes["1"] is False
    await check_and_recover(target, AFTER[landing])


@pytest.mark.parametrize("landing", MODES)
async def test_receiving_raises_something(targets, landing):
    target = await targets(world=2, landing=landing, version=1)
    half = target.halves.of[1]
    receive, calls = half.receive, []

    async def failing(task):
        calls.append(task.index)
        if len(calls) == 2:
            boom()
        return await receive(task)

    half.receive = failing
    await target.source.prepare(2)
    target.deliver(2)
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "StageError")
    assert "in boom" in result.message
    assert sorted(half.released) == [task.index for task in target.source.programs[1].tasks]
    half.receive = receive
    await check_and_recover(target, AFTER[landing])


async def test_a_transport_that_moves_nothing(targets):
    target = await targets(version=1)
    await target.source.prepare(2)
    result = await target.source.complete(2, timeout_s=0.4)
    assert (result.success, result.error) == (False, "TargetLost")
    await check_and_recover(target, OLD)


async def test_no_digest_from_the_source_is_no_digest_that_fits(targets):
    target = await targets(version=1)
    await target.source.prepare(2)
    target.deliver(2)
    result = await target.source.complete(2, digests={})
    assert (result.success, result.error) == (False, "ProtocolError")
    await check_and_recover(target, OLD)


# the loader raises


@pytest.mark.parametrize("call", ["begin", "install", "finish"])
@pytest.mark.parametrize("world", [1, 2])
async def test_a_loader_that_raises_while_it_streams(targets, until, call, world):
    target = await targets(world=world, landing="streamed", expose=False, version=1)
    target.loaders[-1].hooks[call] = boom
    await target.source.prepare(2)
    target.deliver(2)
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "LoaderError")
    for line in (f"rank {world - 1}", "Traceback", "in boom", "ZeroDivisionError: by the test"):
        assert line in result.message
    del target.loaders[-1].hooks[call]
    # every bucket was taken all the same: the source was not left with one that nobody wants
    assert sorted(target.halves.of[world - 1].released) == [task.index for task in target.source.programs[world - 1].tasks]
    await check_and_recover(target, FENCED)


@pytest.mark.parametrize("call", ["begin", "install", "finish"])
@pytest.mark.parametrize("world", [1, 2])
async def test_a_loader_that_raises_in_the_commit(targets, until, call, world):
    target = await targets(world=world, landing="staged", expose=False, version=1)
    target.loaders[-1].hooks[call] = boom
    await target.source.prepare(2)
    target.deliver(2)
    result = await target.source.complete(2)
    assert (result.success, result.error, result.state) == (False, "LoaderError", "FENCED")
    assert "in boom" in result.message
    assert target.leader.version == 1
    target.loaders[-1].hooks.clear()
    await check_and_recover(target, FENCED)


async def test_a_loader_that_raises_as_it_is_rebound(targets, until):
    target = await targets(world=2, landing="mapped", version=1)
    await target.push(2)
    target.loaders[0].hooks["rebind"] = boom
    await target.source.prepare(3)
    target.deliver(3)
    result = await target.source.complete(3)
    assert (result.success, result.error) == (False, "LoaderError")
    assert [lease.released for lease in target.halves.of[0].leases] == [False, False]
    target.loaders[0].hooks.clear()
    await until(target.is_ready)
    leases = [lease for half in target.halves.of.values() for lease in half.leases]
    await check_and_recover(target, FENCED)
    assert all(lease.released for lease in leases)


async def test_a_commit_hook_that_raises(targets, until):
    failing = [True]

    def hook(version):
        if failing[0]:
            boom()

    target = await targets(world=2, version=1, on_commit=hook)
    await target.source.prepare(2)
    target.deliver(2)
    result = await target.source.complete(2)
    assert (result.success, result.error) == (False, "LoaderError")
    failing[0] = False
    await check_and_recover(target, FENCED)


async def test_a_loader_that_hangs_in_the_commit(targets, until):
    target = await targets(world=2, version=1)
    go = threading.Event()
    target.loaders[1].hooks["finish"] = lambda: go.wait(60)
    try:
        await target.source.prepare(2)
        target.deliver(2)
        async with asyncio.timeout(10):
            result = await target.source.complete(2, timeout_s=1.0)
        assert (result.success, result.error) == (False, "TargetLost")
        await until(lambda: target.states() == [FENCED] * 2)
        await until(target.is_ready)
        reply = await target.source.prepare(3, timeout_s=0.5)  # the loader still works on the last push
        assert reply.status == "error"
        assert target.states() == [FENCED] * 2
    finally:
        go.set()
    target.loaders[1].hooks.clear()
    await check_and_recover(target, FENCED)


async def test_a_loader_that_hangs_while_it_streams(targets, until):
    target = await targets(landing="streamed", expose=False, version=1)
    go = threading.Event()
    target.loaders[0].hooks["install"] = lambda: go.wait(60)
    try:
        await target.source.prepare(2)
        target.deliver(2)
        result = await target.source.complete(2, timeout_s=0.5)
        assert (result.success, result.error) == (False, "TargetLost")
        await until(lambda: target.states() == [FENCED])
    finally:
        go.set()
    target.loaders[0].hooks.clear()
    await check_and_recover(target, FENCED)


# passes that do not end


@pytest.mark.parametrize("landing", MODES)
async def test_a_pass_that_does_not_end_keeps_the_old_version(targets, until, landing):
    target = await targets(world=2, landing=landing, version=1)
    with target.receivers[1].gate.forward():
        reply = await target.source.prepare(2, timeout_s=0.5)
        if landing == "streamed":
            assert (reply.status, reply.error) == ("error", "TargetLost")
        else:
            target.deliver(2)
            result = await target.source.complete(2, timeout_s=0.5)
            assert (result.success, result.error) == (False, "TargetLost")
        await until(lambda: target.states() == [OLD] * 2)
        with target.leader.gate.forward(5.0):
            assert target.hold(1)
    await check_and_recover(target, OLD)


# ranks that come and go


async def test_a_target_is_not_ready_before_all_ranks_have_joined(rig, run_dir, until):
    leader = Receiver(rig.ToyLoader(rank=0, world=2), f"unix:{run_dir}/0.sock", world_size=2)
    await leader.start()
    source = rig.ToySource(leader.address)
    status = await source.client.status()
    assert not status.ready
    assert "[1]" in status.message
    planning = asyncio.create_task(source.plan())  # waits for ranks that start later
    status = await source.client.status()
    assert not planning.done()
    await leader.close()
    with pytest.raises(TargetUnreachable):
        await planning
    await source.close()


async def test_ranks_find_a_leader_that_starts_late(rig, run_dir):
    options = {"heartbeat_s": 0.2, "patience_s": 5.0}
    member = Receiver(
        rig.ToyLoader(rank=1, world=2), f"unix:{run_dir}/1.sock", rank=1, world_size=2, leader=f"unix:{run_dir}/0.sock",
        **options,
    )  # fmt: skip
    await member.start()
    async with Receiver(rig.ToyLoader(rank=0, world=2), f"unix:{run_dir}/0.sock", world_size=2, **options):
        async with asyncio.timeout(20):
            await member.joined()
    await member.close()


async def test_a_rank_of_another_target_cannot_join(rig, run_dir, until):
    leader = Receiver(rig.ToyLoader(), f"unix:{run_dir}/0.sock")
    await leader.start()
    client = rig.ControlClient(leader.address)
    for rank, world in ((1, 2), (0, 1), (1, 1)):
        with pytest.raises(Exception, match="cannot join"):
            await client.join(JoinRequest(rank=rank, world_size=world, address="unix:/nowhere", incarnation="i"))
    await client.close()
    await leader.close()


@pytest.mark.parametrize("landing", ["staged", "streamed"])
@pytest.mark.parametrize("when", ["idle", "receiving"])
async def test_a_rank_restarts(targets, until, rig, when, landing):
    target = await targets(world=2, landing=landing, version=1)
    await target.push(2)
    if when == "receiving":
        await target.source.prepare(3)
        await first_bucket(target, until, 3)
    await target.receivers[1].close()
    await until(lambda: target.leader.state != "UPDATING")
    after = FENCED if (when, landing) == ("receiving", "streamed") else ("COMMITTED", 2)
    await until(lambda: (target.leader.state, target.leader.serving_version) == after)
    assert not (await target.source.client.status()).ready
    if when == "receiving":
        result = await target.source.complete(3)
        assert (result.success, result.error) == (False, "TargetLost")
    assert (await target.source.prepare(3)).status == "error"
    target.loaders[1] = rig.ToyLoader(rank=1, world=2)
    target.receivers[1] = target.make(1, target.loaders[1], None)
    await target.receivers[1].start()
    await until(target.is_ready)
    assert target.states() == [FENCED] * 2  # what the leader holds is not served without the other half
    reply = await target.source.prepare(2)
    assert (reply.status, reply.error) == ("error", "ProtocolError")  # connect first: its links are gone
    await target.source.connect()
    await target.push(2)  # the newest version again, with the same content
    assert target.states() == [("COMMITTED", 2)] * 2
    assert target.hold(2)


async def test_the_leader_restarts(targets, until, rig):
    target = await targets(world=2, version=1)
    await target.push(2)
    await target.leader.close()
    await until(lambda: not target.receivers[1]._member.joined.is_set())
    assert target.receivers[1].state == "COMMITTED"
    target.loaders[0] = rig.ToyLoader(rank=0, world=2)
    target.receivers[0] = target.make(0, target.loaders[0], None)
    await target.leader.start()
    await until(target.is_ready)
    assert target.states() == [FENCED] * 2
    await target.source.connect()
    await target.push(3)
    assert target.hold(3)


async def test_a_rank_that_only_lost_sight_of_the_leader_goes_on(targets, until):
    target = await targets(world=2, version=1)
    await target.push(2)
    member = target.receivers[1]._member
    incarnation = target.receivers[1]._rank.fence.incarnation
    await target.leader._server.drop_watches(incarnation)
    await until(lambda: target.receivers[1]._rank.fence.incarnation not in (incarnation, incarnation + "+"))
    await until(member.joined.is_set)
    await until(target.is_ready)
    assert target.states() == [("COMMITTED", 2)] * 2
    await target.source.connect()
    await target.push(3)


async def test_a_rank_that_starts_with_another_version_fences_the_target(rig, run_dir, until):
    options = {"heartbeat_s": 0.2, "patience_s": 5.0, "world_size": 2}
    leader = Receiver(rig.ToyLoader(rank=0, world=2, version=4), f"unix:{run_dir}/0.sock", initial_version=4, **options)
    await leader.start()
    assert leader.state == "COMMITTED"
    member = Receiver(
        rig.ToyLoader(rank=1, world=2, version=5), f"unix:{run_dir}/1.sock", rank=1, leader=leader.address, initial_version=5,
        **options,
    )  # fmt: skip
    await member.start()
    await until(lambda: leader.state == member.state == "FENCED")
    await member.close()
    await leader.close()
