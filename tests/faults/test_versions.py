"""Faults of versions and of repetition: pushes twice, at once, late, to the restarted, to the moved; and what they leave."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.engine.errors import BusyError, PlanError, SynclineError, VersionConflict
from syncline.engine.linking import transports
from syncline.engine.rank import Rank

SHAPES = {"a": (9, 5), "b": (7,), "c": (4, 4)}


def become(whole, version):
    """Content that says its version, in every element."""
    for tensor in whole.values():
        tensor.fill_(float(version))


def holds(model, version):
    return all(tensor.unique().tolist() == [float(version)] for tensor in model.state_dict().values())


class Held:
    """A half factory whose halves give buckets out only when ``go`` is set; ``reached`` is set when one waits."""

    def __init__(self, *, from_bucket=0):
        self.go, self.reached = asyncio.Event(), asyncio.Event()
        self.from_bucket = from_bucket
        self.make = transports("127.0.0.1")

    def __call__(self, kind, program, landing, workers):
        half = self.make(kind, program, landing, workers)
        receive = half.receive

        async def held(task):
            bucket = await receive(task)
            if task.index >= self.from_bucket and not self.go.is_set():
                self.reached.set()
                await self.go.wait()
            return bucket

        half.receive = held
        return half


# two at once


async def test_a_second_push_of_one_engine_is_refused_and_the_first_goes_on(start_target, connect, kit):
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    held = Held()
    target = await start_target(model, half_factory=held)
    pusher = await connect(whole, [target])
    (engine,) = pusher.engines
    become(whole, 1)
    handle = engine.start_push(1)
    await held.reached.wait()
    with pytest.raises(BusyError, match="wait for its result before pushing version 2"):
        engine.start_push(2)
    with pytest.raises(BusyError):
        await engine.push(2)
    held.go.set()
    assert (await handle.result).ok
    assert holds(model, 1)
    become(whole, 2)
    await pusher.push_well(2)
    assert holds(model, 2)


async def test_a_second_source_is_refused_while_a_push_runs_and_nothing_is_interleaved(start_target, connect, engines, kit):
    first, second = kit.stamped(SHAPES), kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(first))
    held = Held()
    target = await start_target(model, half_factory=held)
    pusher = await connect(first, [target], bucket_bytes=100)
    other = engines(second, [target], bucket_bytes=100)
    become(first, 1)
    become(second, 2)
    handle = pusher.engines[0].start_push(1)
    await held.reached.wait()
    with pytest.raises(BusyError, match="another source is under way"):
        await other.connect()
    held.go.set()
    assert (await handle.result).ok
    assert holds(model, 1)
    await other.connect()
    await other.push_well(2)
    assert holds(model, 2)


async def test_two_sources_that_take_turns_never_mix(start_target, connect, kit, transport, landing):
    """Each connects over the other's head; a push is whole, or refused with a typed error and well the next time."""
    sizes = (64, 256)
    wholes = [kit.stamped(SHAPES), kit.stamped({**SHAPES, "a": (9, 5)})]
    model = kit.Bag(kit.poisoned(wholes[0]))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    settings = {"transport": transport, "landing": landing, "push_timeout_s": 10.0, "target_timeout_s": 3.0}
    pushers = [await connect(whole, [target], bucket_bytes=size, **settings) for whole, size in zip(wholes, sizes, strict=True)]
    committed = None
    for version in range(1, 7):
        turn = version % 2
        become(wholes[turn], version)
        try:
            report = await pushers[turn].push(version)
        except SynclineError:
            report = None
        if report is not None and report.ok:
            committed = version
        served = await target.served()
        assert served in (committed, None)
        if served is not None:
            assert holds(model, served)
    become(wholes[0], 10)
    await pushers[0].push_well(10)
    assert holds(model, 10)


# skew


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_version_behind_the_receivers_is_a_conflict(start_target, connect, kit, ranks):
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 7.0) for name, t in whole.items()})
    target = await start_target(model, initial_version=7)
    pusher = await connect(kit.row_shards(whole, ranks), [target])
    results = await pusher.results(5)
    assert [type(result) for result in results] == [VersionConflict] * ranks
    assert "version 5 is older than version 7" in str(results[0])
    assert await target.served() == 7
    assert holds(model, 7)
    await pusher.push_well(8)
    assert kit.differing(model, whole) == []


# idempotent retry


async def test_the_same_version_twice_is_answered_and_not_applied_twice(start_target, connect, kit, transport, landing):
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    updates, hooks = [], []
    loader = ModuleLoader(model, movable=landing == "mapped", on_update=updates.append)
    target = await start_target(loader, on_commit=hooks.append)
    pusher = await connect(whole, [target], transport=transport, landing=landing)
    first = await pusher.push_well(1)
    again = await pusher.push_well(1)
    assert (updates, hooks) == ([1], [1])
    assert again.bytes == 0
    assert again.targets[target.address].already
    assert again.digest == first.digest
    become(whole, 9)
    with pytest.raises(VersionConflict):
        await pusher.push(1)
    assert await target.served() == 1
    assert not holds(model, 9)
    await pusher.push_well(2)
    assert holds(model, 2 + 7)
    assert (updates, hooks) == ([1, 2], [1, 2])


# rejoin


async def test_who_restarts_serves_nothing_until_it_has_the_newest(start_target, connect, kit, transport, landing):
    whole = kit.stamped(SHAPES)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(3)]
    movable = landing == "mapped"
    stays = await start_target(ModuleLoader(models[0], movable=movable))
    leaves = await start_target(ModuleLoader(models[1], movable=movable), at="again")
    pusher = await connect(whole, [stays, leaves], transport=transport, landing=landing, push_timeout_s=10.0)
    become(whole, 1)
    await pusher.push_well(1)
    await leaves.leader.close()
    become(whole, 2)
    report = await pusher.push(2)
    assert report.targets[stays.address].ok
    assert not report.targets[leaves.address].ok
    assert isinstance(report.targets[leaves.address].error, SynclineError)
    back = await start_target(ModuleLoader(models[2], movable=movable), at="again")
    assert back.address == leaves.address
    assert (back.leader.state, await back.served()) == ("FENCED", None)
    report = await pusher.push_well(2)  # the same version again brings it up to date
    assert report.targets[stays.address].already
    assert not report.targets[back.address].already
    assert await back.served() == 2
    assert holds(models[2], 2)
    become(whole, 3)
    await pusher.push_well(3)
    assert [await target.served() for target in (stays, back)] == [3, 3]


# stale cache


async def test_the_hook_runs_once_per_version_on_every_rank(start_target, connect, kit, transport, landing):
    whole = kit.stamped(SHAPES)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    seen = []

    def on_commit(version):
        content = [model.a[0, 0].item() for model in models]
        seen.append((version, content.count(float(version)) >= 1))

    loaders = [ModuleLoader(model, movable=landing == "mapped") for model in models]
    target = await start_target(*loaders, on_commit=on_commit)
    pusher = await connect(whole, [target], transport=transport, landing=landing)
    for version in (1, 2):
        become(whole, version)
        await pusher.push_well(version)
        await pusher.push_well(version)  # answered: no hook
    assert seen == [(1, True), (1, True), (2, True), (2, True)]


# stale address


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_target_that_was_reallocated_is_planned_anew(start_target, connect, kit, *, transport, landing, ranks):
    """In the same push: its live memory moved since the plan was made, and the plan would write where it was."""
    whole = kit.stamped(SHAPES)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    targets = [await start_target(ModuleLoader(model, movable=landing == "mapped")) for model in models]
    pusher = await connect(kit.row_shards(whole, ranks), targets, transport=transport, landing=landing, bucket_bytes=100)
    await pusher.push_well(1)
    digest = pusher.engines[0]._session._wiring.plan.digest
    old = models[0].a
    models[0].a = torch.full((9, 5), float("nan"))
    await pusher.push_well(2)
    assert [kit.differing(model, whole) for model in models] == [[], []]
    assert old is not models[0].a
    assert pusher.engines[0]._session._wiring.plan.digest != digest
    assert [await target.served() for target in targets] == [2, 2]
    await pusher.push_well(3)


async def test_a_stale_plan_is_never_executed(start_target, connect, kit, monkeypatch):
    """So that the receiver's check is known to be needed: without it the push is well, and the live parameter has nothing."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(model)
    pusher = await connect(whole, [target])
    await pusher.push_well(1)
    model.a = torch.full((9, 5), float("nan"))
    manifest = Rank.manifest

    async def unchanged(self):
        return self._manifest_bytes or await manifest(self)

    monkeypatch.setattr(Rank, "manifest", unchanged)
    await pusher.push_well(2)
    assert model.a.isnan().all()


async def test_a_target_that_no_longer_fits_is_refused_by_name_and_the_others_go_on(start_target, connect, kit):
    whole = kit.stamped(SHAPES)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    targets = [await start_target(model) for model in models]
    pusher = await connect(whole, targets)
    await pusher.push_well(1)
    models[0].a = torch.zeros(9, 6)
    report = await pusher.push(2)
    error = report.targets[targets[0].address].error
    assert isinstance(error, PlanError)
    assert "a: the source has shape (9, 5), target 0 rank 0 expects (9, 6)" in str(error)
    assert [await target.served() for target in targets] == [1, 2]
    models[0].a = torch.zeros(9, 5)
    await pusher.push_well(2)
    assert [kit.differing(model, whole) for model in models] == [[], []]


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_source_that_was_reallocated_is_planned_anew(start_target, connect, kit, ranks):
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    sources = kit.row_shards(whole, ranks)
    pusher = await connect(sources, [await start_target(model)])
    await pusher.push_well(1)
    last = sources[-1]
    last.held["a"] = [(box, torch.full_like(t, 42.0)) for box, t in last.held["a"]]
    last.change()
    await pusher.push_well(2)
    (box, _) = last.held["a"][0]
    assert model.a[box.start[0] :].unique().tolist() == [42.0]


# registration


async def test_one_range_under_several_names(start_target, connect, kit):
    """The same memory twice, and views of it that overlap: a source may read it as often as it likes."""
    memory = torch.arange(40.0)
    whole = {"twice": memory[:20], "same": memory[:20], "shifted": memory[10:30].view(4, 5), "one": memory[:1].expand(3, 4)}
    model = kit.Bag(kit.poisoned({name: t.clone() for name, t in whole.items()}))
    pusher = await connect(whole, [await start_target(model)])
    await pusher.push_well(1)
    assert kit.differing(model, {name: t.clone() for name, t in whole.items()}) == []


async def test_two_engines_share_one_source(start_target, connect, kit):
    whole = kit.stamped(SHAPES)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    pushers = [await connect(whole, [await start_target(model)]) for model in models]
    await asyncio.gather(*(pusher.push_well(1) for pusher in pushers))
    assert [kit.differing(model, whole) for model in models] == [[], []]


@pytest.mark.parametrize("when", ["before connect", "before the second push"])
async def test_memory_that_was_freed_is_refused_by_name(start_target, engines, kit, when):
    """No crash: a plan that still reads there would end the process."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(model)
    pusher = engines(whole, [target])
    if when != "before connect":
        await (await pusher.connect()).push_well(1)
    content = whole["a"].clone()
    whole["a"].untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"a of shape \(9, 5\) reaches beyond its memory"):
        await (pusher.connect() if when == "before connect" else pusher.push(2))
    assert await target.served() == (None if when == "before connect" else 1)
    whole["a"].untyped_storage().resize_(content.nbytes)
    whole["a"].copy_(content)
    if when == "before connect":
        await pusher.connect()
    await pusher.push_well(2)
    assert kit.differing(model, whole) == []


async def test_a_target_refuses_to_start_with_freed_memory(start_target, kit):
    model = kit.Bag(kit.stamped(SHAPES))
    model.a.untyped_storage().resize_(0)
    with pytest.raises(PlanError, match="reaches beyond its memory"):
        await start_target(model)


# handle leak


def vitals():
    """Open files, threads of ours, and shared memory of this process."""
    gc.collect()
    threads = sum(thread.name.startswith("syncline") for thread in threading.enumerate())
    maps = Path("/proc/self/maps").read_text().count("syncline")
    return {"files": sum(1 for _ in Path("/proc/self/fd").iterdir()), "threads": threads, "maps": maps}


async def test_fifty_updates_leave_no_handle_behind(start_target, connect, kit, transport, landing):
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    pusher = await connect(whole, [target], transport=transport, landing=landing)
    for version in range(1, 6):
        await pusher.push_well(version)
    before = vitals()
    for version in range(6, 56):
        become(whole, version)
        await pusher.push_well(version)
    assert holds(model, 55)
    after = vitals()
    assert all(after[what] <= before[what] for what in before), (before, after)


async def test_connecting_again_and_again_leaves_no_handle_behind(start_target, connect, kit):
    whole = kit.stamped(SHAPES)
    model = nn.ParameterDict({name: nn.Parameter(t.clone()) for name, t in whole.items()})
    counts = []
    for version in range(1, 7):
        target = await start_target(model, initial_version=version - 1)
        pusher = await connect(whole, [target])
        await pusher.push_well(version)
        await pusher.close()
        await target.leader.close()
        counts.append(vitals())
    assert all(counts[-1][what] <= counts[1][what] for what in counts[0]), counts
