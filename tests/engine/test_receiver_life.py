"""Receivers in one process: the engine that serves beside them, options, start and end."""

from __future__ import annotations

import asyncio

import pytest

from syncline.engine.errors import ClosedError, ConfigError, TransportError
from syncline.engine.receiver import Receiver

MODES = ["staged", "streamed", "mapped"]

# the engine that serves


class Engine:
    """Implements `Serving` and notes what it is asked. ``raising``: name of a call that raises; ``hanging``: that hangs."""

    def __init__(self, *, fences=True):
        self.calls = []
        self.raising = self.hanging = ""
        if fences:
            self.fence = self._fence

    async def _note(self, name, detail):
        self.calls.append((name, detail))
        if self.raising == name:
            raise ZeroDivisionError(name)
        if self.hanging == name:
            await asyncio.Event().wait()

    async def pause(self, in_flight):
        await self._note("pause", in_flight)

    async def resume(self, version):
        await self._note("resume", version)

    async def flush(self, version):
        await self._note("flush", version)

    async def _fence(self, reason):
        await self._note("fence", reason)


@pytest.mark.parametrize("landing", MODES)
async def test_the_engine_is_paused_for_a_commit_and_resumed_on_the_new_version(targets, landing):
    engine = Engine()
    target = await targets(landing=landing, version=1, serving=engine)
    await target.source.connect(in_flight="drain")
    await target.push(2)
    assert engine.calls == [("resume", 1), ("pause", "drain"), ("resume", 2)]
    await target.source.prepare(3)
    target.deliver(3)
    assert (await target.source.complete(3, flush_cache=True)).success
    assert engine.calls[3:] == [("pause", "drain"), ("flush", 3), ("resume", 3)]


@pytest.mark.parametrize("fences", [True, False])
async def test_a_fenced_target_stops_its_engine_once(targets, fences):
    engine = Engine(fences=fences)
    target = await targets(serving=engine)
    assert [name for name, _ in engine.calls] == ["fence" if fences else "pause"]
    await target.source.prepare(1)
    await target.source.abort()
    assert len(engine.calls) == 1
    await target.push(1)
    assert [name for name, _ in engine.calls[1:]] == ["pause", "resume"]


@pytest.mark.parametrize("how", ["raising", "hanging"])
async def test_an_engine_that_cannot_be_paused_goes_on_with_the_old_version(targets, how):
    engine = Engine()
    target = await targets(version=1, serving=engine)
    setattr(engine, how, "pause")
    await target.source.prepare(2)
    target.deliver(2)
    result = await target.source.complete(2, timeout_s=0.6)
    assert not result.success
    assert result.error == ("LoaderError" if how == "raising" else "TargetLost")
    assert target.states() == [("COMMITTED", 1)]
    assert target.hold(1)
    assert engine.calls[-1] == ("resume", 1)
    with target.leader.gate.forward(0.0) as version:
        assert version == 1
    engine.raising = engine.hanging = ""
    await target.push(2)


async def test_an_engine_that_raises_in_resume_harms_only_itself(targets, caplog):
    engine = Engine()
    target = await targets(version=1, serving=engine)
    engine.raising = "resume"
    await target.push(2)
    assert "raised in resume" in caplog.text
    assert target.states() == [("COMMITTED", 2)]


# its life


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": 2, "world_size": 2, "leader": "unix:/x"}, "world_size"),
        ({"rank": -1}, "world_size"),
        ({"rank": 1, "world_size": 2}, "leader"),
        ({"leader": "unix:/x"}, "leader"),
        ({"rank": 1, "world_size": 2, "leader": "nowhere"}, "nowhere"),
        ({"workers": 0}, "workers"),
        ({"initial_version": -1}, "initial_version"),
        ({"patience_s": 0.0}, "patience_s"),
        ({"heartbeat_s": float("inf")}, "heartbeat_s"),
    ],
)
def test_bad_options(rig, options, problem):
    with pytest.raises(ConfigError, match=problem):
        Receiver(rig.ToyLoader(), "unix:/tmp/x.sock", **options)


def test_bad_addresses(rig):
    with pytest.raises(ConfigError, match="secret"):
        Receiver(rig.ToyLoader(), "tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match="neither"):
        Receiver(rig.ToyLoader(), "localhost:1")


async def test_a_receiver_has_one_life(rig, run_dir):
    receiver = Receiver(rig.ToyLoader(), f"unix:{run_dir}/x.sock")
    assert (receiver.state, receiver.version, receiver.serving_version) == ("FENCED", None, None)
    await receiver.start()
    with pytest.raises(ClosedError):
        await receiver.start()
    await receiver.close()
    await receiver.close()
    with pytest.raises(ClosedError):
        await receiver.start()
    with pytest.raises(ClosedError):
        await receiver.status()


async def test_a_receiver_that_cannot_listen_leaves_nothing(rig, run_dir):
    async with Receiver(rig.ToyLoader(), f"unix:{run_dir}/x.sock"):
        second = Receiver(rig.ToyLoader(), f"unix:{run_dir}/x.sock")
        with pytest.raises(ConfigError, match="another process"):
            await second.start()


async def test_over_tcp_with_a_secret(rig):
    async with Receiver(rig.ToyLoader(), "tcp://127.0.0.1:0", secret="s", half_factory=(halves := rig.Halves())) as receiver:
        assert not receiver.address.endswith(":0")
        source = rig.ToySource(receiver.address, secret="s")
        await source.connect()
        assert (await source.prepare(1)).status == "ready"
        halves.of[0].deliver_all(1)
        assert (await source.complete(1)).success
        await source.close()


async def test_another_host_may_be_told(rig):
    receiver = Receiver(rig.ToyLoader(), "tcp://0.0.0.0:0", secret="s", advertise="127.0.0.1")
    async with receiver:
        assert receiver.address.startswith("tcp://127.0.0.1:")
        source = rig.ToySource(receiver.address, secret="s")
        assert (await source.client.status()).ready
        await source.close()


@pytest.mark.parametrize(
    ("landing", "after"), [("staged", ("COMMITTED", 1)), ("streamed", ("FENCED", None)), ("mapped", ("COMMITTED", 1))]
)
async def test_closing_in_the_middle_of_a_push(targets, until, landing, after):
    target = await targets(world=2, landing=landing, version=1)
    await target.source.prepare(2)
    for rank in (0, 1):
        target.halves.of[rank].deliver(target.source.programs[rank].tasks[0], 2)
    completing = asyncio.create_task(target.source.complete(2))
    await until(lambda: target.leader._leader._machine.step == "vote")
    await until(lambda: landing != "streamed" or all(loader.calls for loader in target.loaders))
    async with asyncio.timeout(20):
        await target.leader.close()
        result = await completing
        assert (result.success, result.error) == (False, "TargetLost")
        await target.receivers[1].close()
    assert target.states() == [after] * 2
    assert all(half.closed for half in target.halves.of.values())


async def test_many_pushes_with_failures_leave_nothing_behind(targets, until):
    target = await targets(world=2, version=0)
    await target.push(1)
    tasks = len(asyncio.all_tasks())
    leader, rank = target.leader._leader, target.receivers[1]._rank
    for version in range(2, 60):
        assert (await target.source.prepare(version)).status == "ready"
        if version % 3:
            target.deliver(version)
            assert (await target.source.complete(version)).success
        elif version % 2:
            await target.source.abort()
        else:
            target.halves.of[1].fail(TransportError("by the test"))
            target.deliver(version, ranks=[0])
            assert (await target.source.complete(version)).error == "TransportError"
    assert target.states() == [("COMMITTED", 59)] * 2
    assert target.hold(59)
    assert (leader._pushes, leader._waiting, rank._update) == ({}, {}, None)
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
