"""``syncline bench gpu``: its parts run on the CPU, its figures need a GPU."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
import torch

from syncline.bench import gpu_floors
from syncline.bench.cli import main
from syncline.bench.gpu import Ask, Bench, GpuArgs, _named, _told, table
from syncline.bench.gpu_bed import GpuSetup, gpu_bed
from syncline.bench.gpu_floors import Sizes, floors, kernels
from syncline.bench.gpu_peer import Command
from syncline.bench.measure.rows import Row, Skipped, line

CPU = torch.device("cpu")
SIZES = Sizes(rows=130, columns=256, big=1 << 12, repeat=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line(capsys):
    assert main(["bench", "gpu"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert "no GPU" in line


def test_what_kernels_make_is_compared_with_the_reference():
    rows = [*floors(CPU, SIZES), *kernels(CPU, SIZES)]
    assert [row.name for row in rows if row.right is None] == ["launch"]
    assert all(row.right for row in rows if row.name != "launch")
    assert all(len(row.seconds) in {2, 200} for row in rows)


def test_a_kernel_that_is_wrong_is_seen(monkeypatch):
    assemble = gpu_floors.assemble

    def wrong(bucket, *args, **options):
        limbs = assemble(bucket, *args, **options)
        bucket[5] ^= 1
        return limbs

    monkeypatch.setattr(gpu_floors, "assemble", wrong)
    assert [row.name for row in kernels(CPU, SIZES) if row.right] == ["land, with digest"]


@pytest.mark.parametrize("setup", [{"place": "padded"}, {"fp8": True, "source_ranks": 2}])
async def test_the_bed_pushes_and_looks_at_every_element(setup):
    async with gpu_bed(GpuSetup(device="cpu", tensors=2, rows=160, columns=256, **setup)) as here:
        pushes = await here.push({"landing": "streamed"}, repeat=2)
        assert (pushes.errors, pushes.ok, pushes.intact) == ((), True, True)
        here._content += 1
        assert not (await here.target.ask(Command(do="verify", content=here._content))).ok  # other content is not taken for it
        for facts in await here.facts():
            assert facts.descriptors
            assert facts.threads


@pytest.mark.slow
async def test_a_lost_target_ends_the_pushes_and_comes_back_to_the_same_engine():
    """What tests/cuda does with a stopped or killed receiver, on the CPU."""
    config = {"landing": "streamed", "push_timeout_s": 10.0, "target_timeout_s": 2.0, "connect_timeout_s": 10.0}
    async with gpu_bed(GpuSetup(device="cpu", tensors=2, rows=64, columns=64)) as here:
        assert (await here.push(config, keep=True)).intact
        many = asyncio.create_task(here.push_only(config, repeat=100_000, keep=True))
        here.target.process.kill()
        await here.target.process.wait()
        assert (await many).errors
        await here.start_target()
        assert (await here.push(config, keep=True)).intact


def test_rows_say_what_was_asked_and_whether_it_is_met(capsys):
    bench = Bench(GpuArgs(device="cpu"))
    for timed in floors(CPU, SIZES):
        bench._floors[timed.name] = 1e9
        bench._add(bench._timed("floor", timed))
    bench._add(bench._timed("work", next(iter(kernels(CPU, SIZES))), Ask(of="device to device", at_least=math.inf)))
    bench._add(Skipped(row="a push", skipped="TransportError: no", failed=True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines][-2:] == ["gather bf16, strided", "a push"]
    assert lines[-2]["asked"] == ">= inf"
    assert lines[-2]["met"] is False
    assert lines[-2]["integrity"] is True
    shown = list(table(bench.rows))
    assert len(shown) == 1 + len(lines)
    assert "NOT" in shown[-2]
    assert "FAILED: TransportError: no" in shown[-1]
    assert all(isinstance(row, Row) for row in bench.rows[:-1])


def test_pushes_without_a_busy_stage_do_not_meet_what_was_asked_of_it():
    """Nothing was measured: no ratio, and none that is small enough."""
    bench, push = Bench(GpuArgs(device="cpu")), SimpleNamespace(seconds=1.0, busy_s={"prepare": 0.0})
    pushes = SimpleNamespace(reports=[push, push], busy_s={}, tasks=1, connect_s=0.0, peak_tmp_bytes=0)
    row = bench._timed("work", next(iter(floors(CPU, SIZES))))
    row = bench._overlap(_named(row, "a push", _told(pushes, SimpleNamespace(peak_bytes=0), warm=1)))
    assert row.figures["met"] is False
    assert math.isnan(row.figures["ratio"])
    assert json.loads(line(row))["ratio"] is None
    assert "nan" in list(table([row]))[-1]


@pytest.mark.parametrize("strict", [False, True])
def test_strict_makes_a_ratio_that_is_not_met_an_error(monkeypatch, capsys, strict):
    async def run(bench):
        for timed in floors(CPU, SIZES):
            bench._floors[timed.name] = 1e9
        bench._add(bench._timed("work", next(iter(kernels(CPU, SIZES))), Ask(of="device to device", at_least=math.inf)))

    monkeypatch.setattr(Bench, "run", run)
    assert main(["bench", "gpu", "--device", "cpu", *(["--strict"] if strict else [])]) == int(strict)
    assert "NOT" in capsys.readouterr().err


def test_asked_ratios():
    assert Ask(of="x", at_least=0.6).met(0.6)
    assert not Ask(of="x", at_least=0.6).met(0.59)
    assert Ask(of="x", at_most=1.08).met(1.0)
    assert not Ask(of="x", at_most=1.08).met(1.09)
