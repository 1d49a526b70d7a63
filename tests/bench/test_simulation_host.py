"""A host's cores and memory bus, by hand; and the cost model that is made of what was measured."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncline.bench.measure.bed import Setup
from syncline.bench.simulation import calibrate
from syncline.bench.simulation.clock import StandsStill, VirtualLoop
from syncline.bench.simulation.command import CalibrateArgs, UsageError, calibrate_main
from syncline.bench.simulation.fluid import Demand, Fluid, Pool, speeds
from syncline.bench.simulation.hardware import Cores, HardwareError, Work, checked, find, save
from syncline.bench.simulation.legs import Leg
from syncline.bench.simulation.local import scenario_of
from syncline.bench.simulation.presets import presets
from syncline.bench.simulation.primitives import Loopback, Rate
from syncline.bench.simulation.simulate import simulate

FREE = dict.fromkeys(
    ("loopback_s", "notify_s", "task_s", "land_s", "piece_s", "round_s", "begin_s", "end_s", "target_s", "source_s"), 0.0
)
MIB = 2**20


def cores(
    *, copy: float = 0.0, digest: float = 0.0, both: float = 0.0, loopback: float = 0.0, bus: float = 0.0, **more: float
) -> Cores:
    """A host of two cores: seconds for each MiB, and how much of the bus a copy takes."""
    return Cores(
        name="by hand", cores=2, copy=Work(s_per_byte=copy / MIB, bus=bus), digest=Work(s_per_byte=digest / MIB),
        copy_digest=Work(s_per_byte=both / MIB), loopback=Work(s_per_byte=loopback / MIB), **{**FREE, **more},
    )  # fmt: skip


def seconds(setup: Setup, hardware: Cores, **config: object) -> float:
    return simulate(scenario_of(setup, config, hardware)).seconds


EIGHT = Setup(tensors=2, nbytes=8 * MIB, movable=True)
BUCKETS = {"bucket_bytes": 4 * MIB}  # a tensor each: two tasks


# ------------------------------------------------------------------------------------------------------------- the clock


def test_time_passes_only_between_events() -> None:
    async def nap() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600.5)
        first = loop.time()
        for _ in range(1000):
            await asyncio.sleep(0)
        return first, loop.time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(nap()) == (3600.5, 3600.5)


def test_what_nothing_can_end_is_said_to_stand_still() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(StandsStill, match="stands still"):
        runner.run(wait())


# -------------------------------------------------------------------------------------------------------- cores and bus


@pytest.mark.parametrize(
    ("demands", "found"),
    [
        ([Demand()], [1]),
        ([Demand()] * 3, [2 / 3] * 3),
        ([Demand(1, 0.75)] * 2, [2 / 3] * 2),
        ([Demand(1, 1.0), Demand(1, 0.0)], [1, 1]),
        ([Demand(1, 1.0), Demand(1, 1.0), Demand(0.5, 0.0)], [0.5, 0.5, 1]),  # what does not need the bus is not held up
        ([Demand(1, 0.0)] * 3 + [Demand(0, 0.5)], [2 / 3] * 3 + [1]),
        ([], []),
    ],
)
def test_speeds_are_max_min_fair(demands: list[Demand], found: list[float]) -> None:
    assert speeds(demands, Demand(2, 1)) == pytest.approx(found)


def ends(cores: float, threads: int, *work: float) -> dict[int, float]:
    """When pieces of work end that are given at once to one pool."""

    async def run() -> dict[int, float]:
        loop = asyncio.get_running_loop()
        pool = Pool(loop, Fluid(loop, cores), threads, "here")
        found: dict[int, float] = {}
        for number, each in enumerate(work):

            def end(leg: Leg) -> None:
                found[leg.task] = round(loop.time(), 6)

            pool.run(each, Demand(), "work", task=number, after=None, then=end)
        await asyncio.sleep(1000)
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def test_work_side_by_side_shares_a_core_and_work_on_one_thread_queues() -> None:
    assert ends(1, 2, 1, 2) == {0: 2, 1: 3}
    assert ends(2, 2, 1, 2) == {0: 1, 1: 2}
    assert ends(2, 1, 1, 2) == {0: 1, 1: 3}
    assert ends(2, 2, 1, 2, 2) == {0: 1, 1: 2, 2: 3}


# ---------------------------------------------------------------------------------------------------- pushes on one host


def test_staged_over_shared_memory_is_a_copy_and_a_copy_at_commit() -> None:
    assert seconds(EIGHT, cores(copy=1), landing="staged", verify=False, **BUCKETS) == pytest.approx(8, rel=1e-6)
    assert seconds(EIGHT, cores(copy=1, bus=1), landing="staged", verify=False, **BUCKETS) == pytest.approx(16, rel=1e-6)


def test_mapped_is_one_copy_for_any_number_of_receivers() -> None:
    two = Setup(tensors=2, nbytes=8 * MIB, movable=True, targets=2)
    for setup in (EIGHT, two):
        assert seconds(setup, cores(copy=1), landing="mapped", verify=False, **BUCKETS) == pytest.approx(4, rel=1e-6)


def test_each_receiver_digests_and_commits_on_the_same_cores() -> None:
    """Copied and digested by 4; two receivers digest two buckets each on two cores: 8 s; each commits 8 MiB: 8 s."""
    two = Setup(tensors=2, nbytes=8 * MIB, targets=2)
    found = seconds(two, cores(copy=1, both=1, digest=1), landing="staged", **BUCKETS)
    assert found == pytest.approx(4 + 8 + 8, rel=1e-6)


def test_one_worker_copies_one_bucket_after_the_other() -> None:
    found = seconds(EIGHT, cores(copy=1), landing="mapped", verify=False, workers=1, **BUCKETS)
    assert found == pytest.approx(8, rel=1e-6)


def test_over_gloo_messages_of_a_pair_follow_each_other() -> None:
    hardware = cores(copy=1, loopback=1)
    gloo = {"transport": "gloo", "landing": "streamed", "verify": False, **BUCKETS}
    assert seconds(EIGHT, hardware, **gloo) == pytest.approx(8, rel=1e-6)
    two = Setup(tensors=2, nbytes=8 * MIB, targets=2)
    assert seconds(two, hardware, **gloo) == pytest.approx(8, rel=1e-6)  # pairs go side by side, on two cores
    one_core = msgspec.structs.replace(hardware, cores=1)
    assert seconds(two, one_core, **gloo) == pytest.approx(16, rel=1e-6)


# -------------------------------------------------------------------------------------------------------- the cost model


def test_a_cost_model_is_what_small_pushes_say_it_is() -> None:
    """Small pushes of a known machine: from their times alone the fit finds the machine again."""
    known = cores(copy=1e-4, digest=1e-4, both=2e-4, loopback=4e-4, begin_s=0.002, end_s=0.002, task_s=3e-4, land_s=3e-4,
                  piece_s=2e-5, target_s=0.001, source_s=0.0015, loopback_s=1e-4, round_s=1e-4, notify_s=5e-5)  # fmt: skip
    rate = {name: Rate(1 / getattr(known, name).s_per_byte, 2 / getattr(known, name).s_per_byte, 2) for name in
            ("copy", "digest", "copy_digest", "loopback")}  # fmt: skip
    pushes_s = {fit.field: simulate(scenario_of(fit.setup, fit.config, known)).seconds for fit in calibrate._FITS}
    measured = calibrate.Measured(
        cores=2, memory={name: rate[name] for name in ("copy", "digest", "copy_digest")},
        loopback=Loopback(rate["loopback"], 1e-4), pushes_s=pushes_s,
    )  # fmt: skip
    found = calibrate.fitted(measured)
    again = {fit.field: simulate(scenario_of(fit.setup, fit.config, found)).seconds for fit in calibrate._FITS}
    assert again == pytest.approx(pushes_s, rel=0.02)
    assert found.target_s == pytest.approx(known.target_s, rel=0.3)
    assert found.source_s == pytest.approx(known.source_s, rel=0.3)


def test_two_that_cannot_run_at_full_speed_share_the_bus() -> None:
    assert Rate(10e9, 20e9, 2).work() == Work(s_per_byte=1e-10, bus=0.0)
    shared = Rate(10e9, 15e9, 2).work()
    assert speeds([Demand(1, shared.bus)] * 2, Demand(2, 1)) == pytest.approx([0.75, 0.75])


def test_hardware_is_data(tmp_path: Path) -> None:
    for hardware in presets():
        save(hardware, tmp_path / "saved.json")
        assert find(str(tmp_path / "saved.json")) == hardware == find(hardware.name)
        assert hardware.sources
    with pytest.raises(HardwareError, match="presets are h100-400g"):
        find("abacus")
    (tmp_path / "broken.json").write_text('{"type": "gpus", "name": "x"}')
    with pytest.raises(HardwareError, match="does not describe hardware"):
        find(str(tmp_path / "broken.json"))
    with pytest.raises(HardwareError, match="nic is -1"):
        checked(msgspec.structs.replace(presets()[0], nic=-1.0))


@pytest.mark.parametrize("name", ["h100-400g", "cpu-2"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300, 0.0])
def test_every_number_of_a_hardware_file_is_looked_at(name: str, value: float) -> None:
    described = find(name)
    for field in described.__struct_fields__:
        before = getattr(described, field)
        if isinstance(before, Work):
            parts = [p for p in before.__struct_fields__ if value or p == "cores"]  # the others may be 0
            wrong = [(f"{field}.{p}", msgspec.structs.replace(before, **{p: value})) for p in parts]
        elif isinstance(before, (int, float)) and (value or not field.endswith("_s")):
            wrong = [(field, value)]
        else:
            continue
        for said, changed in wrong:
            with pytest.raises(HardwareError, match=rf"{said} is"):
                checked(msgspec.structs.replace(described, **{field: changed}))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"type":"gpus"}', '{"type":"gpus","name":"x","h2d":"fast"}', "\xff", '{"type":"tpus"}']
)
def test_a_file_that_is_no_hardware_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(HardwareError, match="does not describe hardware"):
        find(str(tmp_path / "odd.json"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeat": 0}, "repeat is 0"),
        ({"repeat": -3}, "repeat is -3"),
        ({"check": True, "only": "no such"}, "no configuration is called"),
        ({"model": Path("h100-400g")}, "cluster of accelerators"),
    ],
)
def test_bad_arguments_of_calibrate_are_told_before_anything_is_measured(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure", None)
    with pytest.raises(UsageError, match=said):
        calibrate_main(CalibrateArgs(**changes))
