"""A target that comes back with another model is reported for itself; the others commit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import PlanError, TargetLost


def model_of(seed, *, width=8, extra=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, width), nn.Linear(width, 3)] + ([nn.Linear(3, 2)] if extra else [])
    return nn.Sequential(*layers)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


class Fleet:
    """Receivers by name, started and ended by the test; a source of seed 9."""

    def __init__(self, folder):
        self.folder = folder
        self.models, self.receivers = {}, {}
        self.source = model_of(9)

    async def start(self, name, model):
        self.models[name] = model
        self.receivers[name] = Receiver(loader=ModuleLoader(model), listen=self.address(name))
        await self.receivers[name].start()

    async def restart(self, name, model):
        await self.receivers[name].close()
        await self.start(name, model)

    def address(self, name):
        return f"unix:{self.folder}/{name}.sock"

    def engine(self, *names, **config):
        targets = [RemoteTarget(self.address(name)) for name in names]
        config = TransferConfig(trace=False, push_timeout_s=20, **config)
        return TransferEngine(source=ModuleSource(self.source, world_size=1), targets=targets, config=config)


@pytest.fixture
async def fleet(run_dir):
    made = Fleet(run_dir)
    yield made
    for receiver in made.receivers.values():
        await receiver.close()


OTHERS = {
    "another shape": lambda: model_of(2, width=6),
    "more tensors": lambda: model_of(2, extra=True),
    "other names": lambda: nn.Sequential(nn.Identity(), *model_of(2)),
}


@pytest.mark.parametrize("landing", ["staged", "streamed"])
@pytest.mark.parametrize("other", OTHERS)
async def test_a_target_with_another_model_is_reported_for_itself(fleet, other, landing):
    for name in ("a", "b", "c"):
        await fleet.start(name, model_of(1))
    b = fleet.address("b")
    async with fleet.engine("a", "b", "c", landing=landing) as engine:
        assert (await engine.push(1)).ok
        await fleet.restart("b", OTHERS[other]())
        for version in (2, 3):  # and it stays so
            nn.init.normal_(fleet.source[0].weight)
            report = await engine.push(version)
            assert [target.ok for target in report.targets.values()] == [True, False, True]
            assert isinstance(report.targets[b].error, PlanError)
            assert f"target {b} came back with other tensors" in str(report.targets[b].error)
            assert "target 0" not in str(report.targets[b].error)  # which is a healthy one
            assert same(fleet.models["a"], fleet.source)
            assert same(fleet.models["c"], fleet.source)
            assert (fleet.receivers["b"].state, fleet.receivers["b"].version) == ("FENCED", None)
        await fleet.restart("b", model_of(3))
        report = await engine.push(3)  # the same version once more brings it up to date
        assert report.ok
        assert report.targets[fleet.address("a")].already
        assert same(fleet.models["b"], fleet.source)
        nn.init.normal_(fleet.source[0].weight)
        assert (await engine.push(4)).ok


async def test_a_target_that_is_as_it_was_again_takes_part_again(fleet):
    """With the very tensors of before, addresses included: nothing but the misfit itself tells that it was away."""
    await fleet.start("a", model_of(1))
    await fleet.start("b", model_of(1))
    b = fleet.address("b")
    before = fleet.models["b"]
    async with fleet.engine("a", "b") as engine:
        assert (await engine.push(1)).ok
        await fleet.restart("b", model_of(2, width=6))
        for version in (2, 3):
            assert isinstance((await engine.push(version)).targets[b].error, PlanError)
        await fleet.restart("b", before)
        nn.init.normal_(fleet.source[0].weight)
        report = await engine.push(4)
        assert report.ok, report
        assert same(fleet.models["a"], fleet.source)
        assert same(fleet.models["b"], fleet.source)


async def test_the_problem_says_which_tensors(fleet):
    await fleet.start("a", model_of(1))
    async with fleet.engine("a") as engine:
        assert (await engine.push(1)).ok
        await fleet.restart("a", model_of(2, width=6))
        report = await engine.push(2)
        error = report.targets[fleet.address("a")].error
        assert any("0.weight" in problem for problem in error.problems)
        await fleet.receivers["a"].close()
        assert isinstance((await engine.push(3)).targets[fleet.address("a")].error, (TargetLost, PlanError))


async def test_at_connect_it_is_an_error_of_all(fleet):
    await fleet.start("a", model_of(1))
    await fleet.start("b", model_of(2, width=6))
    with pytest.raises(PlanError):
        await fleet.engine("a", "b").connect()


async def test_a_source_that_changed_is_an_error_of_all(fleet):
    await fleet.start("a", model_of(1))
    await fleet.start("b", model_of(1))
    async with fleet.engine("a", "b") as engine:
        assert (await engine.push(1)).ok
        fleet.source[0] = nn.Linear(4, 7)
        for version in (2, 3):
            with pytest.raises(PlanError):
                await engine.push(version)
        assert fleet.receivers["a"].version == fleet.receivers["b"].version == 1
        fleet.source[0] = nn.Linear(4, 8)
        assert (await engine.push(4)).ok
