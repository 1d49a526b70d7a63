"""What a source is told when it cannot connect, or a deadline passes; and several sources of one target."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from torch import nn

from syncline.adapters.engines import ModuleLoader, SGLangTarget, VLLMTarget
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import BusyError, PlanError, PushTimeout, TargetUnreachable, TransportError
from syncline.engine.session import _typed
from syncline.engine.targets import LeaderAddress
from syncline.engine.wiring import Wiring
from syncline.scheduler.errors import DeadlineExceeded
from syncline.scheduler.programs import ReceiverId

TARGETS = {
    "receiver": lambda port: RemoteTarget(f"tcp://127.0.0.1:{port}"),
    "vllm": lambda port: VLLMTarget(f"http://127.0.0.1:{port}"),
    "sglang": lambda port: SGLangTarget(f"http://127.0.0.1:{port}"),
}


def engine_of(model, target, **knobs):
    config = TransferConfig(trace=False, push_timeout_s=20, **knobs)
    return TransferEngine(source=ModuleSource(model, world_size=1), targets=[target], config=config)


@pytest.fixture
async def silent():
    """The port of a server that accepts and never answers."""

    async def accept(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read()
            while await reader.read(65536):
                pass
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("kind", TARGETS)
async def test_a_server_that_never_answers_is_named(silent, kind):
    target = TARGETS[kind](silent)
    engine = engine_of(nn.Linear(2, 2), target, connect_timeout_s=1.0)
    with pytest.raises(TargetUnreachable, match="within") as caught:
        await engine.connect()
    assert target.address in str(caught.value)
    assert "push" not in str(caught.value)
    await engine.close()


class Engine:
    """A target whose leader has the secret that it says, whatever the config's."""

    def __init__(self, receiver, secret):
        self.address, self._secret = receiver.address, secret

    def problems(self, config):
        return ()

    async def locate(self, config):
        return LeaderAddress(self.address, self._secret)

    async def close(self):
        pass


@pytest.mark.parametrize("config", [None, "the config's"])
@pytest.mark.parametrize("leader", [None, "its own"])
async def test_the_secret_is_the_one_that_the_target_says(run_dir, leader, config):
    receiver = Receiver(ModuleLoader(nn.Linear(4, 3)), f"unix:{run_dir}/t.sock", secret=leader)
    await receiver.start()
    async with engine_of(nn.Linear(4, 3), Engine(receiver, leader), secret=config) as engine:
        assert (await engine.push(1)).ok
    await receiver.close()


@pytest.mark.parametrize(("own", "config"), [(None, "s"), ("s", None), ("s", "t")])
async def test_a_receiver_by_its_address_shares_the_targets_secret_or_else_the_configs(run_dir, own, config):
    receiver = Receiver(ModuleLoader(nn.Linear(4, 3)), f"unix:{run_dir}/t.sock", secret="s")
    await receiver.start()
    async with engine_of(nn.Linear(4, 3), RemoteTarget(receiver.address, own), secret=config) as engine:
        assert (await engine.push(1)).ok
    await receiver.close()


@pytest.mark.parametrize("error", [TimeoutError(), DeadlineExceeded("3 tasks are left"), DeadlineExceeded("")])
@pytest.mark.parametrize(("what", "limit"), [("connect", "connect_timeout_s = 3 s"), ("push", "push_timeout_s = 7 s")])
def test_a_deadline_names_its_own_knob_and_a_reason(error, what, limit):
    found = _typed(error, what, TransferConfig(connect_timeout_s=3.0, push_timeout_s=7.0))
    assert isinstance(found, PushTimeout)
    said, _, reason = str(found).partition(": ")
    assert said == f"the {what} did not end within {limit}"
    assert reason.strip()
    assert str(error) in reason


async def test_sources_of_one_target_push_in_turn(run_dir):
    """Whoever finds that another one has linked since links anew, within its push."""
    models = [nn.Linear(4, 3) for _ in range(3)]
    receiver = Receiver(ModuleLoader(models[0]), f"unix:{run_dir}/t.sock")
    await receiver.start()
    one, two = (engine_of(model, RemoteTarget(receiver.address)) for model in models[1:])
    await one.connect()
    await two.connect()
    for version, (engine, model) in enumerate(zip([one, two, two, one], [*models[1:], models[2], models[1]], strict=True), 1):
        nn.init.normal_(model.weight)
        report = await engine.push(version)
        assert report.ok, str(report)
        assert models[0].weight.equal(model.weight)
    await one.close()
    await two.close()
    await receiver.close()


async def test_what_does_not_fit_is_told_with_the_targets_address_and_in_one_line(run_dir):
    receivers = []
    for number, width in enumerate((3, 5)):
        receivers.append(Receiver(ModuleLoader(nn.Linear(4, width)), f"unix:{run_dir}/{number}.sock"))
        await receivers[-1].start()
    targets = [RemoteTarget(receiver.address) for receiver in receivers]
    config = TransferConfig(trace=False)
    engine = TransferEngine(source=ModuleSource(nn.Linear(4, 3), world_size=1), targets=targets, config=config)
    with pytest.raises(PlanError) as caught:
        await engine.connect()
    for problem in caught.value.problems:
        assert problem.endswith(f"; target 1 is {receivers[1].address}")
        assert receivers[0].address not in problem
    await engine.close()

    odd = nn.Module()
    odd.sub = nn.Module()
    odd._modules["line\nbreak"] = nn.Linear(2, 2)
    engine = engine_of(odd, targets[0])
    with pytest.raises(PlanError) as caught:
        await engine.connect()
    assert "line\\nbreak" in str(caught.value)
    assert all(problem.isprintable() for problem in caught.value.problems)
    await engine.close()
    for receiver in receivers:
        await receiver.close()


async def test_a_target_that_gave_no_answer_is_reported_as_such(run_dir):
    receivers = [Receiver(ModuleLoader(nn.Linear(4, 3)), f"unix:{run_dir}/{number}.sock") for number in range(2)]
    for receiver in receivers:
        await receiver.start()
    targets = [RemoteTarget(receiver.address) for receiver in receivers]
    async with TransferEngine(
        source=ModuleSource(nn.Linear(4, 3), world_size=1), targets=targets, config=TransferConfig(trace=False)
    ) as engine:
        await receivers[1].close()
        report = await engine.push(1)
        assert f"{receivers[1].address}: gave no answer: its state is not known; TargetLost: " in str(report)
        assert f"{receivers[0].address}: COMMITTED version 1\n" in str(report) + "\n"
        assert "None" not in str(report)
    await receivers[0].close()


async def test_a_target_that_does_not_link_over_one_transport_does_not_hold_up_those_of_another():
    """A local target that is stopped, and one on another host that waits for the source to come."""
    came, wiring = asyncio.Event(), Wiring.__new__(Wiring)
    wiring.kinds, wiring._dropped = {0: "shm", 1: "gloo"}, {0, 1}
    wiring.receivers = [[ReceiverId(0, 0)], [ReceiverId(1, 0)]]

    class Stopped:
        async def link(self, receivers, *, timeout_s):
            await asyncio.wait_for(came.wait(), timeout_s)
            return {receivers[0]: TransportError("did not come")}

    class There:
        async def link(self, receivers, *, timeout_s):
            came.set()
            return {}

    wiring._senders = {"shm": Stopped(), "gloo": There()}
    failed = await wiring.link([0, 1], timeout_s=20.0)
    assert failed == {"0": ("TransportError", "did not come")}


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.timeout(120)
async def test_a_target_that_refuses_to_link_anew_holds_up_nobody(transport, tmp_path):
    """After a push that was cancelled all targets link anew; for one that says no at once nobody waits until its deadline."""
    receivers = [
        Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/{name}", initial_version=0) for name in ("no", "yes")
    ]
    for receiver in receivers:
        await receiver.start()
    config = TransferConfig(trace=False, transport=transport, push_timeout_s=3600, target_timeout_s=1800)
    async with TransferEngine(
        source=ModuleSource(nn.Linear(8, 8), world_size=1), targets=[RemoteTarget(r.address) for r in receivers], config=config
    ) as engine:
        assert (await engine.push(1)).ok
        engine._session._wiring.drop_targets([0, 1])  # as a push does that is lost or cancelled
        for handle in engine._session._coordinator.handles:
            handle.unlinked("cancelled")

        async def refuse(request):
            raise BusyError("a push is under way")

        receivers[0]._leader.connect = refuse
        report = await engine.push(2)
        assert [result.ok for result in report.targets.values()] == [False, True]
        assert "a push is under way" in str(report)
    for receiver in receivers:
        await receiver.close()


async def test_an_error_of_one_transport_is_told_when_the_others_have_ended():
    ended, wiring = [], Wiring.__new__(Wiring)
    wiring.kinds, wiring._dropped = {0: "shm", 1: "gloo"}, set()
    wiring.receivers = [[ReceiverId(0, 0)], [ReceiverId(1, 0)]]

    class Broken:
        async def link(self, receivers, *, timeout_s):
            raise TransportError("closed")

    class Slow:
        async def link(self, receivers, *, timeout_s):
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(True)
            return {}

    wiring._senders = {"shm": Broken(), "gloo": Slow()}
    with pytest.raises(TransportError, match="closed"):
        await wiring.link([0, 1], timeout_s=20.0)
    assert ended
