"""``syncline bench sweep`` and ``recommend``, as users start them, on a few megabytes; and plots."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from syncline.bench.measure.bed import Setup, bed
from syncline.bench.measure.errors import BenchError
from syncline.bench.tuning.advice import RecommendArgs, main as recommend
from syncline.bench.tuning.journal import read
from syncline.bench.tuning.measuring import measure
from syncline.bench.tuning.plots import front, heat_maps, pareto
from syncline.bench.tuning.recommend import NothingFits, candidates
from syncline.bench.tuning.records import Record, Request, Sample
from syncline.bench.tuning.space import MIB, Configuration, Space
from syncline.bench.tuning.sweep import SweepArgs, main as sweep, parse_duration
from syncline.engine import TransferConfig
from syncline.scheduler.errors import SynclineError

DEFAULT = Configuration.default("gloo", "staged")
SMALL = ("--source", "module", "--tensors", "4", "--nbytes", str(4 * MIB))


def syncline(folder, *words):
    command = [sys.executable, "-m", "syncline.bench.cli", "bench", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.timeout(300)  # some 25 s on two idle cores, most of it the start of a dozen processes
def test_sweep_and_recommend_end_to_end(tmp_path):
    done = syncline(tmp_path, "sweep", *SMALL, "--budget", "12s", "--out", "here")
    assert done.returncode == 0, done.stderr
    for name in ("heat.png", "pareto.png"):
        assert (tmp_path / "here" / name).read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "here" / "rows.jsonl").read_bytes()
    records, _ = read(tmp_path / "here" / "rows.jsonl")
    assert all(record.sample.usable for record in records), records
    assert {record.configuration.transport for record in records} == {"shm", "gloo"}
    assert "left" in done.stderr and "peak tmp" in done.stdout  # estimates, tables
    configs = [eval(text, {"TransferConfig": TransferConfig}) for text in done.stdout.splitlines() if text.startswith("Tr")]
    assert [config.transport for config in configs] == ["shm", "gloo"]

    args = SweepArgs(source="module", tensors=4, nbytes=4 * MIB, budget="12s", out=tmp_path / "here")
    assert sweep(args) == 0  # what is there is not measured again; on a busy machine there may be time for more
    assert (tmp_path / "here" / "rows.jsonl").read_bytes().startswith(rows)
    with pytest.raises(BenchError, match="another sweep"):
        sweep(dataclasses.replace(args, nbytes=8 * MIB))
    with pytest.raises(NothingFits, match="the least is"):
        recommend(RecommendArgs(sweep=tmp_path / "here", memory="1KiB"))

    advice = syncline(tmp_path, "recommend", "--sweep", "here", "--transport", "gloo", "--verify", "--rounds", "4")
    assert advice.returncode in {0, 1} and advice.stderr == "", advice.stderr  # on a busy machine it may turn out worse
    assert advice.stdout.startswith("TransferConfig(") and "verified: gloo, staged" in advice.stdout
    assert "recommended" in advice.stdout


async def test_what_a_plan_or_a_config_refuses_is_a_sample():
    async with bed(Setup(tensors=2, nbytes=2 * MIB)) as here:
        for changes, refusal in (
            ({"bucket_bytes": 2**16, "max_tmp_bytes": 2**16}, "PlanError"),
            ({"bucket_bytes": 2 * MIB, "max_tmp_bytes": MIB}, "ConfigError"),
            ({}, ""),
        ):
            request = Request(configuration=dataclasses.replace(DEFAULT, **changes), pushes=3, phase="map", block=0)
            sample = await measure(here, request)
            assert sample.refused.startswith(refusal) and sample.error == "" and sample.usable == (not refusal)
            assert len(sample.seconds) == (0 if refusal else 3)


def test_the_simulator_is_searched_under_the_limit(capsys):
    args = RecommendArgs(simulate="qwen3-8b", source=("fsdp:2",), target=("tp:2",), memory="64MiB", budget="3s")
    assert recommend(args) == 0
    out = capsys.readouterr().out
    config = eval(out.splitlines()[0], {"TransferConfig": TransferConfig})
    assert config.watermark <= 64 * MIB and config.transport == "auto"
    assert "simulated: qwen3-8b" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (RecommendArgs(simulate="qwen3-8b"), "needs --source and --target"),
        (RecommendArgs(simulate="qwen3-8b", source=("fsdp:2",), target=("tp:2",), verify=True), "leave out --simulate"),
        (RecommendArgs(memory="lots"), "--memory"),
    ],
)
def test_wrong_arguments_of_recommend_are_refused(args, said):
    with pytest.raises(BenchError, match=said):
        recommend(args)


def test_wrong_arguments_of_sweep_are_refused(tmp_path):
    for args, said in (
        (SweepArgs(out=tmp_path, budget="soon"), "no time, or above"),
        (SweepArgs(out=tmp_path, budget="0s"), "no time, or above"),
        (SweepArgs(out=tmp_path, transports=("gloo",), landings=("mapped",)), "needs transport shm"),
        (SweepArgs(out=tmp_path, source="ddp:2"), "KIND"),
    ):
        with pytest.raises(BenchError, match=said):
            sweep(args)
    assert [parse_duration(text) for text in ("9min", "90s", "1.5h", "7")] == [540, 90, 5400, 7]


def made_up(transport):
    """Some cells measured, one refused, one failed twice."""
    default, found = Configuration.default(transport, "staged"), []
    for block, (bucket, watermark) in enumerate(((32, 256), (4, 16), (1, 4), (8, 64), (2, 256), (16, 64), (16, 64))):
        c = dataclasses.replace(default, bucket_bytes=bucket * MIB, max_tmp_bytes=watermark * MIB)
        sample = Sample(seconds=(0.2, 0.1 + bucket / 500, 0.1), peak_tmp_bytes=min(c.max_tmp_bytes, 90 * MIB), intact=True)
        if bucket == 1:
            sample = Sample(refused="PlanError: no")
        if bucket == 16:
            sample = Sample(seconds=(0.1,), error="PushTimeout: …")
        found.append(Record(request=Request(configuration=c, pushes=3, phase="map", block=block), sample=sample))
    return found


def test_plots_of_any_state_of_a_sweep(tmp_path):
    nothing = [dataclasses.replace(r, sample=Sample(refused="PlanError: no")) for r in made_up("shm")]
    for records in ([*made_up("shm"), *made_up("gloo")], made_up("gloo")[:1], nothing):
        for draw in (heat_maps, pareto):
            assert draw(records, tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_front_has_nothing_that_another_beats_in_both():
    found = candidates(made_up("gloo"))
    best = front(found)
    assert best == sorted(best, key=lambda c: c.peak_tmp_bytes) == sorted(best, key=lambda c: -c.seconds)
    for one in found:
        beaten = any(b.seconds <= one.seconds and b.peak_tmp_bytes <= one.peak_tmp_bytes and b != one for b in found)
        assert (one in best) == (not beaten)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: value}, f"{name} is {value}") for name in ("targets", "tensors", "nbytes", "most") for value in (0, -1)),
        ({"targets": 10**9}, "targets is"),
        ({"tensors": 10**9}, "tensors is"),
        *(({"budget": text}, "no time, or above") for text in ("nan", "inf", "-1s", "0s", "1e9h", "9" * 400 + "s", "8000h")),
        ({"source": "fsdp:0"}, "--source"),
        ({"transports": ("gloo",), "landings": ("mapped",)}, "mapped needs"),
    ],
)
def test_bad_arguments_of_a_sweep_are_told_before_anything_is_written(changes, said, tmp_path):
    with pytest.raises(BenchError, match=said):
        sweep(SweepArgs(out=tmp_path / "out", **changes))
    assert not (tmp_path / "out" / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": 3}, "rounds is 3"),
        ({"simulate": None}, "are for --simulate"),
        ({"rounds": -1}, "rounds is -1"),
        *(({"memory": text}, "--memory") for text in ("0", "nan", "-1GiB", "9" * 400)),
        ({"ranks_per_host": 0}, "ranks_per_host is 0"),
        ({"budget": "inf"}, "no time, or above"),
        ({"landing": "mapped"}, "cluster of accelerators"),
    ],
)
def test_bad_arguments_of_recommend_are_told(changes, said):
    args = {"simulate": "qwen2.5-0.5b", "source": ("fsdp:2",), "target": ("tp:2",), **changes}
    with pytest.raises(SynclineError, match=said):
        recommend(RecommendArgs(**args))


def test_the_simulator_is_asked_of_what_simulate_can_be_told(capsys):
    args = RecommendArgs(simulate="qwen2.5-0.5b", source=("fsdp:2",), target=("tp:1",), budget="1s")
    for changes, said in (({"wire": "fp8"}, "fp8"), ({"offloaded": True}, "offloaded"), ({"colocated": True}, "colocated")):
        assert recommend(dataclasses.replace(args, **changes)) == 0
        assert f", {said} on h100-400g" in capsys.readouterr().out
    assert recommend(dataclasses.replace(args, hardware="cpu-2", landing="mapped")) == 0
    assert "mapped" in capsys.readouterr().out


def test_all_heat_maps_have_the_same_axes_and_unmeasured_sizes(tmp_path, monkeypatch):
    seen = []

    def note(_axes, buckets, watermarks, _default):
        seen.append((tuple(buckets), tuple(watermarks)))

    monkeypatch.setattr("syncline.bench.tuning.plots._frame", note)
    made = [
        Record(
            request=Request(configuration=c, pushes=3, phase="map", block=0),
            sample=Sample(seconds=(0.1, 0.1, 0.1), intact=True, peak_tmp_bytes=c.max_tmp_bytes),
        )
        for c in (DEFAULT, Configuration.default("shm", "staged").but(bucket_bytes=2 * MIB))
    ]
    space = Space.of(64 * MIB)
    heat_maps(made, tmp_path / "heat.png", space)
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0] == (space.axes["bucket_bytes"], space.axes["max_tmp_bytes"])
