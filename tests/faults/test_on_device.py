"""Whole pushes to targets "on a GPU", by the engine's own wiring, with stand-ins for CUDA: what is wired to what, and that all
of it together moves the right bytes. What CUDA itself does, ``tests/cuda`` shows on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from syncline.adapters.engines import ModuleLoader
from syncline.engine import device_wiring, linking, transports, wiring
from syncline.engine.errors import PlanError

STAGES = Path(__file__).parents[1] / "stages"
THERE = "cuda:0"


def load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, STAGES / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class OnDevice(ModuleLoader):
    """Says of its buffers that they lie on a GPU."""

    def manifest(self, *, rank, world_size, host):
        known = super().manifest(rank=rank, world_size=world_size, host=host)
        buffers = tuple(dataclasses.replace(buffer, device=THERE) for buffer in known.buffers)
        parts = {name: tuple(getattr(known, name)) for name in ("tensors", "pieces")}
        return type(known)(rank=rank, world_size=world_size, host=host, buffers=buffers, **parts)


@pytest.fixture
def device_world(start_target, connect, devices):
    return start_target, connect, devices


@pytest.fixture
def devices(monkeypatch):
    """Puts stand-ins where the engine makes what talks to CUDA; the devices that were made."""
    made, standins = [], load("standins")
    fabric, runtimes = standins.Fabric(), []

    def device(_device):
        made.append(load("slow_device").SlowDevice())
        return made[-1]

    def ipc(_device):
        runtimes.append(standins.SharedMemoryIpc())
        return runtimes[-1]

    def nccl(_device):
        runtime = fabric.runtime()
        runtime.device = torch.device("cpu")
        return runtime

    monkeypatch.setattr(wiring, "CudaDevice", device)
    for module in (transports, linking):
        monkeypatch.setattr(module, "CudaIpc", ipc)
        monkeypatch.setattr(module, "CudaNccl", nccl)
    monkeypatch.setattr(linking, "_issuers", {})  # made with what stood for NCCL in another test
    monkeypatch.setattr(linking, "landing_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    yield made
    for runtime in runtimes:
        runtime.free()


SHAPES = {
    "a.weight": ((300, 200), torch.bfloat16), "b.weight": ((64, 700), torch.float32), "norm": ((33,), torch.bfloat16),
    "ids": ((50,), torch.int64), "wide": ((400, 700), torch.float32),
}  # fmt: skip


def content():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).mul(9).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def expected_of(whole):
    """``a`` as FP8 with a scale a row; the others as they are."""
    weight = whole["a.weight"].float()
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448.0
    return {**whole, "a.weight": (weight / scale).to(torch.float8_e4m3fn), "a.weight_scale": scale}


def place(sources, *, host):
    """Says of the sources' tensors that they lie on the GPU, but for ``host``."""
    for source in sources:
        source.devices = {name: THERE for name in source.whole if name not in host}
    return sources


PLACES = {"on the GPU": (), "some on the host": ("a.weight", "norm"), "on the host": (*SHAPES,)}


@pytest.mark.parametrize("mode", [(t, m) for t in ("cuda_ipc", "nccl") for m in ("staged", "streamed")], ids="-".join)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("world", [1, 2])
async def test_pushes_arrive_on_the_device(kit, device_world, mode, where, world):
    (transport, landing), host = mode, PLACES[where]
    start_target, connect, devices = device_world
    whole = content()
    expected = expected_of(whole)
    model = kit.Bag(kit.poisoned(expected))
    target = await start_target(OnDevice(model))
    sources = place(kit.row_shards(whole, world), host=host)
    pusher = await connect(sources, [target], landing=landing, transport=transport, max_tmp_bytes="4MiB", bucket_bytes="600KiB")
    for version in (1, 2):
        report = await pusher.push_well(version)
        assert kit.differing(model, expected) == []
        assert report.peak_tmp_bytes <= 4 << 20
    assert len(devices) == world
    await pusher.close()
    assert all(device.registered == {} for device in devices), "page locks are let go of at close"


async def test_auto_takes_cuda_ipc_on_one_host(start_target, connect, kit, devices):
    whole = content()
    model = kit.Bag(kit.poisoned(whole))
    pusher = await connect(place(kit.row_shards(whole, 1), host=()), [await start_target(OnDevice(model))])
    assert set(pusher.engines[0]._session._wired().kinds.values()) == {"cuda_ipc"}
    await pusher.push_well(1)
    assert kit.differing(model, whole) == []


async def test_a_gpu_source_and_a_cpu_target_are_refused_by_name(start_target, engines, kit, devices):
    whole = content()
    target = await start_target(kit.Bag(kit.poisoned(whole)))
    with pytest.raises(PlanError, match=r"source rank 0 holds a.weight.* on cuda:0, and no target is on a GPU"):
        await engines(place(kit.row_shards(whole, 1), host=("norm",)), [target]).connect()


async def test_targets_on_both_kinds_of_memory_are_refused_by_name(start_target, engines, kit, devices):
    whole = content()
    there, here = await start_target(OnDevice(kit.Bag(kit.poisoned(whole)))), await start_target(kit.Bag(kit.poisoned(whole)))
    with pytest.raises(PlanError, match=r"target 1 rank 0 holds .*a.weight.* on cpu, and others are on a GPU"):
        await engines(kit.row_shards(whole, 1), [there, here]).connect()


def test_the_ring_and_the_tasks_share_the_watermark():
    class Recipe:
        def __init__(self, bucket, without):
            self.task = dataclasses.make_dataclass("Task", ["nbytes", "receivers"])(bucket, ("r",))
            self.layout = dataclasses.make_dataclass("Layout", ["with_bucket", "without_bucket"])(bucket + without, without)

    recipes = [Recipe(1 << 20, 2 << 20) for _ in range(20)]
    shares = device_wiring.Shares.of(recipes, 12 << 20, ["r"])
    assert shares.ring + shares.private <= 12 << 20
    assert shares.ring == 4 << 20
    none = device_wiring.Shares.of(recipes, 12 << 20, [])
    assert (none.ring, none.private) == (0, 12 << 20)


def test_a_rank_assembles_where_its_tensors_are():
    class Held:
        def __init__(self, device):
            self.device = torch.device(device)

    assert device_wiring.home_of([Held("cpu"), Held("cuda:3"), Held("cuda:3")]) == torch.device("cuda", 3)
    assert device_wiring.home_of([Held("cpu")]).type == "cuda"
    with pytest.raises(PlanError, match="cuda:1 and cuda:3: a rank has one GPU"):
        device_wiring.home_of([Held("cuda:3"), Held("cuda:1")])
