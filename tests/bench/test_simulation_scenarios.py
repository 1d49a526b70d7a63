"""Simulated pushes of real plans: what is counted, what knobs do, and that the real driver takes the same turns."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from syncline.bench.simulation import whatif
from syncline.bench.simulation.bounds import bounds
from syncline.bench.simulation.clock import VirtualLoop, _Skip
from syncline.bench.simulation.command import SimulateArgs, main
from syncline.bench.simulation.export import trace_of
from syncline.bench.simulation.gpus import GpuWorld
from syncline.bench.simulation.hardware import Gpus, find
from syncline.bench.simulation.play import Knobs, play
from syncline.bench.simulation.published import published
from syncline.bench.simulation.ranks import Done, Looks, spec_of
from syncline.bench.simulation.setups import scenario
from syncline.bench.simulation.simulate import Prediction, Scenario, simulate
from syncline.bench.simulation.whatif import effects
from syncline.bench.simulation.world import Disturbance, ScenarioError, Terms
from syncline.engine import TransferConfig
from syncline.engine.trace import Trace
from syncline.scheduler.driver import Driver, Limits, TaskSpec
from syncline.scheduler.errors import SynclineError
from syncline.scheduler.plan import build_plan

SMALL = {"model": "qwen2.5-0.5b", "source": ("fsdp:4",), "target": ("2x tp:2",)}
QUICK = msgspec.structs.replace(find("h100-400g"), begin_s=0.0005, end_s=0.0005)
"""A model of a billion parameters takes ten milliseconds: control must not take twice as long."""
KNOBS: dict[str, Any] = {"max_tmp_bytes": "64MiB", "bucket_bytes": "8MiB", "landing": "streamed"}


def small(**more: Any) -> Scenario:
    what = {**SMALL, "hardware": QUICK, "config": TransferConfig(**{**KNOBS, **more.pop("knobs", {})}), **more}
    return scenario(**what)


@pytest.fixture(scope="module")
def there() -> Scenario:
    return small()


@pytest.fixture(scope="module")
def prediction(there: Scenario) -> Prediction:
    return simulate(there)


# ------------------------------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize("source", ["fsdp:4", "megatron:tp=2,pp=2"])
@pytest.mark.parametrize("route", ["auto", "gather"])
def test_a_load_is_what_the_ranks_programs_say(source: str, route: str) -> None:
    what = small(source=(source,), knobs={"route": route})
    plan, load = what.plans.of(what.options)
    for rank, shares in enumerate(load.sources):
        program = plan.source_program(rank)
        assert [share.index for share in shares] == [task.index for task in program.tasks]
        for share, task in zip(shares, program.tasks, strict=True):
            assert (share.nbytes, share.tmp_bytes, share.group) == (task.nbytes, task.tmp_bytes, task.group)
            assert share.receivers == tuple(plan.receivers.index(receiver) for receiver in task.receivers)
            assert sorted(share.takes) == sorted((message.peer, message.nbytes) for message in task.receives)
            assert sorted(share.gives) == sorted((message.peer, message.nbytes) for message in task.sends)
            copies = [*task.local, *(copy for message in task.sends for copy in message.copies)]
            assert share.pieces == len(copies)
    for place, tasks in enumerate(load.receivers):
        assert tasks == [task.index for task in plan.target_program(*plan.receivers[place]).tasks]


def test_every_byte_is_moved_once(there: Scenario, prediction: Prediction) -> None:
    plan, load = there.plans.of(there.options)
    assert prediction.sent_bytes == plan.traffic.received.sum()
    assert prediction.tasks == plan.total_tasks
    for outcome, shares in zip(prediction.outcomes, load.sources, strict=True):
        seen = [(span.stage, span.index) for span in outcome.spans if span.stage != "barrier"]
        specs = [spec_of(share, load.target_of, offloaded=False) for share in shares]
        assert sorted(seen) == sorted((stage, spec.index) for spec in specs for stage in spec.stages)
        assert outcome.peak_tmp_bytes <= there.config.watermark


def test_no_push_is_faster_than_its_bound(there: Scenario, prediction: Prediction) -> None:
    terms = bounds(there)
    plan, _ = there.plans.of(there.options)
    nic = there.hardware.nic  # type: ignore[union-attr]
    assert terms["infer_bytes / nic"] == pytest.approx(plan.traffic.received.max() / nic)
    assert terms["sent / (senders x nic)"] == pytest.approx(plan.traffic.received.sum() / (4 * nic))
    assert max(terms.values()) < prediction.seconds
    assert prediction.used_s["nic into"] == pytest.approx(terms["infer_bytes / nic"])


def test_fp8_sends_about_half_and_reads_all() -> None:
    whole = small(offloaded=True)
    half = small(wire="fp8", offloaded=True, target=("2x tp:1",))
    plain = small(offloaded=True, target=("2x tp:1",))
    plan, _ = half.plans.of(half.options)
    names = {name for name in plan.routes.names if name.endswith("_scale_inv")}
    matrices = 24 * 7
    assert len(names) == matrices
    wide, narrow = (sum(s.plans.of(s.options)[0].traffic.received.tolist()) for s in (plain, half))
    embedded = 2 * 151936 * 896 * 2  # bf16, to two targets; it is not quantized
    assert (narrow - embedded) / (wide - embedded) == pytest.approx(0.5, abs=0.01)
    assert bounds(whole)["h2d / pcie"] == pytest.approx(bounds(half)["h2d / pcie"], rel=0.1)


def test_the_same_scenario_gives_the_same_prediction(there: Scenario, prediction: Prediction) -> None:
    again = simulate(there)
    assert again.seconds == prediction.seconds
    assert [list(o.spans) for o in again.outcomes] == [list(o.spans) for o in prediction.outcomes]


# --------------------------------------------------------------------------------------------------------- what knobs do


@pytest.fixture(scope="module")
def changed(there: Scenario) -> dict[tuple[str, str], float]:
    found = {(e.knob, e.after): e.seconds for e in effects(there)[0] if e.seconds is not None}
    assert found
    return found


def data_s(prediction: Prediction) -> float:
    return prediction.seconds - prediction.control_s


def test_the_bottleneck_is_the_network_and_doubling_it_nearly_halves_the_push(
    prediction: Prediction, changed: dict[tuple[str, str], float]
) -> None:
    assert prediction.bottleneck in {"nic into", "nic out"}
    faster = changed["hardware: nic", "97 GB/s"] - prediction.control_s
    slower = changed["hardware: nic", "24.25 GB/s"] - prediction.control_s
    assert 0.45 < faster / data_s(prediction) < 0.8
    assert 1.6 < slower / data_s(prediction) < 2.1


def test_what_is_no_bottleneck_changes_little(prediction: Prediction, changed: dict[tuple[str, str], float]) -> None:
    for after in ("622 GB/s", "2488 GB/s"):
        assert changed["hardware: kernel", after] == pytest.approx(prediction.seconds, rel=0.05)
    assert changed["hardware: nvlink", "180 GB/s"] == pytest.approx(prediction.seconds, rel=0.02)


def test_one_send_at_a_time_leaves_links_idle(prediction: Prediction, changed: dict[tuple[str, str], float]) -> None:
    assert changed["send_concurrency", "1"] > prediction.seconds


def test_a_slower_poller_and_smaller_buckets_cost_time_when_there_are_many(prediction: Prediction) -> None:
    lazy = simulate(small(knobs={"poll_interval_s": 0.02, "send_concurrency": 1}))
    eager = simulate(small(knobs={"poll_interval_s": 0.0001, "send_concurrency": 1}))
    assert lazy.seconds > 1.2 * eager.seconds
    tiny = simulate(small(knobs={"bucket_bytes": "1MiB"}))
    assert tiny.tasks > 4 * prediction.tasks
    assert tiny.seconds > prediction.seconds


def test_the_watermark_limits_memory_and_then_speed() -> None:
    roomy, tight = (small(knobs={"max_tmp_bytes": size, "send_concurrency": 8}) for size in ("256MiB", "16MiB"))
    fast, slow = simulate(roomy), simulate(tight)
    assert slow.peak_tmp_bytes <= 16 * 2**20 < fast.peak_tmp_bytes
    assert slow.seconds > fast.seconds
    assert "the watermark is reached" in slow.critical.by_why


def test_staged_adds_the_commit_and_offloading_the_copy_to_the_device(there: Scenario, prediction: Prediction) -> None:
    staged = simulate(replace(there, config=replace(there.config, landing="staged")))
    assert staged.commit_s > 10 * prediction.commit_s
    assert staged.landing_bytes == staged.sent_bytes
    hardware = msgspec.structs.replace(there.hardware, h2d=1e9)
    offloaded = simulate(replace(there, offloaded=True, hardware=hardware))
    assert offloaded.bottleneck == "h2d"
    assert offloaded.seconds > bounds(replace(there, offloaded=True, hardware=hardware))["h2d / pcie"]


def test_a_straggler_holds_up_the_push_and_is_named(there: Scenario, prediction: Prediction) -> None:
    slow = simulate(replace(there, disturbance=Disturbance(stragglers={2: 5.0})))
    assert slow.seconds > 1.5 * prediction.seconds
    where = next(iter(slow.critical.by_where))
    assert "source rank 2" in where


def test_a_plan_is_made_again_only_for_knobs_that_shape_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = small(knobs={"bucket_bytes": "2MiB", "max_tmp_bytes": "256MiB"})
    there.plans.of(there.options)
    made: list[object] = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return build_plan(*args)

    monkeypatch.setattr("syncline.bench.simulation.simulate.build_plan", counted)
    for knobs in ({"send_concurrency": 4}, {"poll_interval_s": 0.01}, {"workers": 8}, {"max_tmp_bytes": "128MiB"}):
        simulate(replace(there, config=replace(there.config, **knobs)))
    assert not made
    lower = replace(there, config=replace(there.config, max_tmp_bytes="128MiB"))
    fresh = build_plan(there.plans.sources, there.plans.targets, lower.options)
    kept = lower.plans.of(lower.options)[0]
    assert (kept.routes.tasks.nbytes == fresh.routes.tasks.nbytes).all()
    simulate(replace(there, config=replace(there.config, bucket_bytes="1MiB")))
    assert len(made) == 1


# --------------------------------------------------------------------------------------------- the driver in real life


def moments(played_spans: Iterator[Any]) -> tuple[list[tuple[str, int]], dict[int, set[tuple[str, int]]]]:
    """The order in which work ended, and what had been started by each end."""
    spans = list(played_spans)
    ends = [(span.stage, span.index) for span in spans]
    started = {place: {(s.stage, s.index) for s in spans if s.start <= spans[place].end} for place in range(len(spans))}
    return ends, started


async def test_the_real_driver_takes_the_same_turns_on_a_real_loop() -> None:
    """Work ends in the order in which it did in virtual time; by each end the same work has been started."""
    what = small(source=("full:1",), knobs={"send_concurrency": 3, "max_tmp_bytes": "20MiB"})
    _, load = what.plans.of(what.options)
    knobs = Knobs(limits=Limits(max_tmp_bytes=what.config.watermark, send=3), offloaded=True)

    class Signalled(GpuWorld):
        polled = False

    terms = Terms(landing="streamed", disturbance=Disturbance(jitter=0.5, seed=3))
    hardware = what.hardware
    assert isinstance(hardware, Gpus)
    played = await asyncio.to_thread(play, load, lambda loop: Signalled(loop, load, hardware, terms), knobs)
    ends, started = moments(iter(played.outcomes[0].spans))

    flying: dict[tuple[str, int], Done] = {}
    begun: set[tuple[str, int]] = set()

    class Stage:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, task: int) -> Done:
            begun.add((self.name, task))
            flying[self.name, task] = done = Done()
            return done

    driver = Driver(
        stages={"h2d": Stage("h2d"), "prepare": Stage("prepare"), "send": Stage("send")},
        barrier=lambda group: begun.add(("barrier", group)),
        limits=knobs.limits,
        release=lambda _push, _task: None,
        drop_target=lambda _target, _task: None,
    )
    specs = tuple(spec_of(share, load.target_of, offloaded=True) for share in load.sources[0])

    async def votes() -> None:
        return None

    push = asyncio.create_task(
        driver.run(1, specs, load.groups, frozenset(load.target_of), collect_votes=votes, deadline_s=60, on_source_free=list)
    )
    places = [place for place, end in enumerate(ends) if end[0] != "barrier"]
    for _ in range(20):
        await asyncio.sleep(0)
    for place, following in zip(places, [*places[1:], None], strict=True):
        flying[ends[place]].end()
        for _ in range(20):
            await asyncio.sleep(0)
        if following is not None:
            assert {one for one in begun if one[0] != "barrier"} == {s for s in started[place] if s[0] != "barrier"}
    outcome = await push
    assert [(span.stage, span.index) for span in outcome.spans if span.stage != "barrier"] == [
        end for end in ends if end[0] != "barrier"
    ]
    await driver.close(1)


class Ticking(VirtualLoop):
    """A turn of the loop takes a microsecond: the real poller can spin on it."""

    def __init__(self) -> None:
        super().__init__()
        loop = self

        class Tick(_Skip):
            def select(self, timeout: float | None) -> list[Any]:
                found = super().select(timeout)
                loop._now += 1e-6
                return found

        self._selector = Tick(self)


class Until:
    """Polled: it is over when it is time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self.loop, self.at = loop, at

    def poll(self) -> bool:
        return self.loop.time() >= self.at

    def subscribe(self, callback: object) -> bool:
        return False


@pytest.mark.parametrize("interval_s", [0.001, 0.004])
def test_ends_are_seen_when_the_real_poller_sees_them(interval_s: float) -> None:
    durations = [0.00005, 0.003, 0.0007, 0.00019, 0.0101, 0.00025, 0.0004, 0.02, 0.00001, 0.0017]

    async def real() -> list[float]:
        loop = asyncio.get_running_loop()

        class Stage:
            def start(self, task: int) -> Until:
                return Until(loop, loop.time() + durations[task])

        driver = Driver(
            stages={"prepare": Stage()}, barrier=lambda _group: None, limits=Limits(max_tmp_bytes=1, prepare=1),
            release=lambda _push, _task: None, drop_target=lambda _target, _task: None, poll_interval_s=interval_s,
            clock=loop.time,
        )  # fmt: skip
        specs = [TaskSpec(index=i, group=0, tmp_bytes=0, stages=("prepare",), targets=frozenset()) for i in range(10)]

        async def votes() -> None:
            return None

        outcome = await driver.run(
            1, specs, (0,), frozenset({0}), collect_votes=votes, deadline_s=60, on_source_free=lambda: None
        )
        return [span.end - span.start for span in outcome.spans if span.stage == "prepare"]

    async def ours() -> list[float]:
        loop = asyncio.get_running_loop()
        looks = Looks(loop, interval_s)
        found = []
        for duration in durations:
            began = loop.time()
            looks.watch()
            seen: asyncio.Future[None] = loop.create_future()
            loop.call_later(duration, looks.ended, began, lambda seen=seen: seen.set_result(None))
            await seen
            found.append(loop.time() - began)
        return found

    with asyncio.Runner(loop_factory=Ticking) as runner:
        expected = runner.run(real())
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found = runner.run(ours())
    assert found == pytest.approx(expected, abs=5e-5)


# ----------------------------------------------------------------------------------------------------- what users get


def test_a_simulated_push_is_a_trace_like_another(there: Scenario, prediction: Prediction, tmp_path: Path) -> None:
    trace_of(there, prediction).save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    assert [len(spans) for spans in trace.ranks] == [len(outcome.spans) for outcome in prediction.outcomes]
    assert trace.seconds == pytest.approx(prediction.seconds)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_command_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    args = SimulateArgs(**{**SMALL, **KNOBS}, what_if="all")
    assert main(args) == 0
    text = capsys.readouterr().out
    for word in ("bottleneck", "critical path", "bound", "what if", "send_concurrency", "hardware: nic"):
        assert word in text
    assert main(replace(args, json=True, what_if="none")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["seconds"] == pytest.approx(sum(step["end"] - step["start"] for step in facts["critical"]["steps"]))
    assert facts["bottleneck"] == "control"  # 20 ms of it, for a billion parameters


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(({"straggler": (text,)}, "straggler") for text in ("3", "x:2", "1:0", "1:nan", "1:inf", "3:1e300", "4:2", "-1:2")),
        ({"straggler": ("1:2", "1:3")}, "rank 1 was given a factor before"),
        *(({"jitter": value}, "jitter") for value in (math.nan, math.inf, -1.0, 1e300)),
        *(({"ranks_per_host": value}, "ranks_per_host") for value in (0, -8)),
        *(({"poll_interval_s": value}, "poll_interval_s") for value in (math.nan, 0.0, -1.0, 1e-300, 1e300)),
        *(({name: 0}, name) for name in ("workers", "h2d_concurrency", "prepare_concurrency", "send_concurrency")),
        *(({name: "0"}, name) for name in ("max_tmp_bytes", "bucket_bytes")),
        ({"max_tmp_bytes": "4KiB"}, "above the watermark"),
        ({"max_tmp_bytes": "8000000GiB"}, "above 1125899906842624"),
        ({"landing": "mapped"}, "cluster of accelerators"),
        ({"hardware": "no-such"}, "no such preset"),
        ({"hardware": "/"}, "is a folder, not a file"),
        ({"source": ()}, "--published"),
    ],
)
def test_bad_arguments_are_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SynclineError, match=said) as error:
        main(SimulateArgs(**{**SMALL, **arguments}))
    assert len(str(error.value).splitlines()) < 20  # not a line for each tensor


def test_more_tasks_than_can_be_simulated_are_refused_before_they_are_planned() -> None:
    there = scenario(**{**SMALL, "model": "kimi-k2"}, hardware=QUICK, config=TransferConfig(bucket_bytes="256KiB"))
    with pytest.raises(ScenarioError, match=r"about \d{7} tasks of 1\.9 TiB"):
        simulate(there)


def test_mapped_landing_is_simulated_on_one_host() -> None:
    there = scenario(**SMALL, hardware=find("cpu-2"), config=TransferConfig(landing="mapped"))
    mapped, staged = (simulate(replace(there, config=TransferConfig(landing=kind))) for kind in ("mapped", "staged"))
    assert mapped.commit_s < staged.commit_s and mapped.landing_bytes > staged.landing_bytes
    assert {manifest.host for ranks in (there.plans.sources, *there.plans.targets) for manifest in ranks} == {"here"}


def slowed(name: str, factor: float) -> Any:
    return msgspec.structs.replace(getattr(find("cpu-2"), name), s_per_byte=getattr(find("cpu-2"), name).s_per_byte * factor)


@pytest.mark.parametrize(
    ("what", "knobs", "named"),
    [
        ({"round_s": 1.0}, {}, "barrier"),
        ({"begin_s": 5.0}, {}, "control"),
        ({"end_s": 5.0}, {}, "control"),
        ({"h2d": 1e8}, {}, "h2d"),
        ({"kernel": 1e8}, {}, "kernel"),
        ({"copy": 1e8}, {}, "install"),
        ({"digest": 1e8}, {}, "install"),
        ({"nic": 1e8}, {}, "nic into"),
        ({"nic": 1e8, "colocated": True, "nvlink": 1e8}, {}, "nvlink into"),
        ({"task_s": 0.1}, {}, "python"),
        ({"wire_s": 1.0}, {}, "latency"),
        ({"local_s": 1.0, "colocated": True}, {}, "latency"),
        ({}, {"poll_interval_s": 1.0}, "poll"),
    ],
)
def test_what_dominates_a_push_is_named(what: dict[str, Any], knobs: dict[str, Any], named: str) -> None:
    colocated = what.pop("colocated", False)
    there = scenario(
        model="qwen2.5-0.5b", source=("fsdp:4",), target=("tp:2",), offloaded=True, colocated=colocated,
        hardware=msgspec.structs.replace(QUICK, **what), config=TransferConfig(max_tmp_bytes="256MiB", **knobs),
    )  # fmt: skip
    prediction = simulate(there)
    assert prediction.bottleneck == named
    assert prediction.critical.by_what[named] > 0.8 * prediction.seconds


@pytest.mark.parametrize(
    ("what", "transport", "named"),
    [
        ({"round_s": 1.0}, "shm", "barrier"),
        ({"begin_s": 5.0}, "shm", "control"),
        ({"copy": slowed("copy", 100)}, "shm", "commit"),
        ({"digest": slowed("digest", 100)}, "shm", "land"),
        ({"copy_digest": slowed("copy_digest", 100)}, "shm", "prepare"),
        ({"task_s": 0.1}, "shm", "python"),
        ({"notify_s": 1.0}, "shm", "notify"),
        ({"loopback": slowed("loopback", 100)}, "gloo", "loopback"),
        ({"loopback_s": 1.0}, "gloo", "loopback"),
    ],
)
def test_what_dominates_a_push_on_one_host_is_named(what: dict[str, Any], transport: Any, named: str) -> None:
    hardware = msgspec.structs.replace(find("cpu-2"), **what)
    there = scenario(**SMALL, hardware=hardware, config=TransferConfig(transport=transport))
    assert simulate(there).bottleneck == named


def test_what_if_keeps_to_its_time_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need a plan of their own come last; what is told stays in the order of the knobs."""
    there = small()
    found, missing = effects(there)
    assert missing == 0
    assert effects(there, 0.0) == ([], len(found))
    seconds = iter(range(100))
    monkeypatch.setattr(whatif, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    quick = [effect for effect in found if effect.knob not in {"bucket_bytes", "max_tmp_bytes", "landing", "route"}]
    assert effects(there, len(quick) + 1) == (quick, len(found) - len(quick))


def test_what_if_shows_sizes_in_their_unit() -> None:
    found = {effect.knob: effect for effect in effects(small(knobs={"max_tmp_bytes": "256MiB"}))[0]}
    assert (found["max_tmp_bytes"].before, found["max_tmp_bytes"].after) == ("256.0 MiB", "512.0 MiB")
    assert (found["poll_interval_s"].before, found["poll_interval_s"].after) == ("0.001 s", "0.002 s")


@pytest.mark.slow
def test_a_published_set_up_can_be_simulated() -> None:
    (slime,) = (each for each in published() if each.who == "slime")
    there = slime.scenario()
    prediction = simulate(there)
    assert max(bounds(there).values()) < prediction.seconds < slime.low
    assert prediction.used_s["nic into"] == 0  # colocated: nothing leaves the host
