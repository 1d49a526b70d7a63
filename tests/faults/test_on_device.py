"""Whole pushes to targets "on a GPU", by the engine's own wiring, with stand-ins for CUDA: what is wired to what, and that all
of it together moves the right bytes. What CUDA itself does, ``tests/cuda`` shows on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from syncline.adapters.engines import ModuleLoader
from syncline.engine import device_wiring, linking, transports, wiring
from syncline.engine.errors import ClosedError, PlanError, PushError, PushTimeout
from syncline.stages.ipc import Exports
from syncline.stages.task_memory import Layout
from syncline.stages.transports.cuda_ipc import ring_capacity

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
    made, standins, slow_device = [], load("standins"), load("slow_device")  # here, since ranks make devices in threads
    fabric, runtimes = standins.Fabric(), []

    def device(_device):
        made.append(slow_device.SlowDevice())
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
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
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


MODES = [(t, m) for t in ("cuda_ipc", "nccl") for m in ("staged", "streamed")]
PLACES = {"on the GPU": (), "some on the host": ("a.weight", "norm"), "on the host": (*SHAPES,)}


@pytest.mark.parametrize("mode", MODES, ids="-".join)
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


@pytest.fixture
async def waiting(kit, device_world):
    """Two source ranks in the midst of a push to two targets; rank 1 waits for what its trainer gave the device before.

    ``await waiting(**config)`` gives the pusher, the targets with their models, what arrives, and the push's results.
    """
    start_target, connect, devices = device_world
    pushes = []

    async def begin(**config):
        whole = content()
        models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
        targets = [await start_target(OnDevice(model)) for model in models]
        pusher = await connect(place(kit.row_shards(whole, 2), host=()), targets, **config)
        devices[1].done = devices[1].recorded
        pushes.append(asyncio.create_task(pusher.results(1)))
        asked = devices[1].asked
        await kit.until(lambda: devices[1].asked > asked or pushes[-1].done())
        return SimpleNamespace(
            pusher=pusher, targets=targets, models=models, whole=whole, results=pushes[-1], slow=devices[1],
            runs=[engine._session._run for engine in pusher.engines],
        )  # fmt: skip

    yield begin
    for push in pushes:
        push.cancel()
    await asyncio.gather(*pushes, return_exceptions=True)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_a_trainers_stream_that_never_gets_there_costs_one_push(waiting, kit, transport):
    at = await waiting(transport=transport, push_timeout_s=6.0)
    results = await at.results
    assert all(isinstance(result, PushTimeout) for result in results), results
    assert any("what the trainer gave it before" in str(result) for result in results), results
    at.slow.done = float("inf")
    await at.pusher.push_well(2)
    assert [kit.differing(model, at.whole) for model in at.models] == [[], []]


async def test_a_rank_that_waits_for_its_trainer_leaves_a_push_that_was_called_off(waiting):
    at = await waiting(push_timeout_s=1000.0)
    at.pusher.engines[0]._running.cancel()
    _, other = await at.results
    assert isinstance(other, PushError)
    assert "cancelled" in str(other)
    assert at.slow.done < at.slow.recorded, "nothing but the other rank ended its wait"


@pytest.mark.parametrize("mode", MODES, ids="-".join)
async def test_a_target_that_is_lost_while_a_rank_waits_for_its_trainer_holds_up_nobody(waiting, kit, mode):
    transport, landing = mode
    at = await waiting(transport=transport, landing=landing, push_timeout_s=1000.0, target_timeout_s=900.0)
    await at.targets[0].leader.close()
    await kit.until(lambda: all(0 in run.lost for run in at.runs))
    at.slow.done = float("inf")
    for report in await at.results:
        assert [target.ok for target in report.targets.values()] == [False, True], str(report)
    assert kit.differing(at.models[1], at.whole) == []


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_no_target_may_be_left_when_the_trainer_has_written(waiting, kit, transport):
    at = await waiting(transport=transport, push_timeout_s=1000.0, target_timeout_s=900.0)
    for target in at.targets:
        await target.leader.close()
    await kit.until(lambda: all(len(run.lost) == 2 for run in at.runs))
    at.slow.done = float("inf")
    for report in await at.results:
        assert [target.ok for target in report.targets.values()] == [False, False], str(report)


@pytest.mark.parametrize("replan", [False, True])
@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_receivers_let_go_of_a_sources_memory_before_it_does_itself(
    start_target, connect, kit, devices, monkeypatch, *, replan, landing
):  # fmt: skip
    logs, open_then = [], []
    make, close = transports.CudaIpc, Exports.close

    def made(device):
        runtime = make(device)
        logs.append(runtime.log)
        return runtime

    def closing(self):
        open_then.append(sum(log.count("open") - log.count("close") for log in logs))
        close(self)

    for module in (transports, linking):
        monkeypatch.setattr(module, "CudaIpc", made)
    monkeypatch.setattr(Exports, "close", closing)
    whole = content()
    (source,) = place(kit.row_shards(whole, 1), host=())
    model = kit.Bag(kit.poisoned(whole))
    pusher = await connect([source], [await start_target(OnDevice(model))], landing=landing, transport="cuda_ipc")
    await pusher.push_well(1)
    assert any("open" in log for log in logs)
    if replan:
        source.held = {name: [(box, tensor.clone()) for box, tensor in parts] for name, parts in source.held.items()}
        source.change()
        await pusher.push_well(2)
        assert kit.differing(model, whole) == []
    else:
        await pusher.close()
    assert open_then == [0]


async def test_a_bucket_that_kernels_write_goes_out_with_the_event_behind_them(kit, device_world, monkeypatch):
    start_target, connect, _ = device_world
    recorded, record = [], load("standins").SharedMemoryIpc.record
    monkeypatch.setattr(load("standins").SharedMemoryIpc, "record", lambda *args: (recorded.append(args), record(*args)))
    model = kit.Bag(kit.poisoned(expected_of(content())))
    sources = place(kit.row_shards(content(), 1), host=())
    pusher = await connect(sources, [await start_target(OnDevice(model))], transport="cuda_ipc", bucket_bytes="600KiB")
    for version in (1, 2):
        recorded.clear()
        report = await pusher.push_well(version)
        assert len(recorded) == report.tasks > 1


@pytest.mark.parametrize("point", ["empty", "pinned", "senders", "cancelled"])
async def test_a_connect_that_fails_leaves_nothing_page_locked(start_target, engines, kit, devices, monkeypatch, *, point):
    whole = {"large": torch.zeros(1024, 1024)}
    target = await start_target(OnDevice(kit.Bag(kit.poisoned(whole))))
    pusher = engines(place(kit.row_shards(whole, 1), host=("large",)), [target])
    began, go_on, asked = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def boom(*_args, **_options):
        asked.extend(device.registered.copy() for device in devices)
        if point == "cancelled":
            loop.call_soon_threadsafe(began.set)
            assert go_on.wait(30)
            return torch.empty(64 << 20, dtype=torch.uint8)
        raise RuntimeError("by the test")

    if point == "senders":
        monkeypatch.setattr(wiring, "Senders", boom)
    else:
        monkeypatch.setattr(load("slow_device").SlowDevice, "pinned" if point == "pinned" else "empty", boom)
    connecting = asyncio.create_task(pusher.connect())
    if point == "cancelled":
        await began.wait()
        connecting.cancel()
        await asyncio.sleep(0)
        go_on.set()
    (failure,) = await asyncio.gather(connecting, return_exceptions=True)
    assert isinstance(failure, asyncio.CancelledError if point == "cancelled" else PushError), failure
    assert asked
    assert all(asked), "it had been page-locked by then"
    assert [device.registered for device in devices] == [{}]


@pytest.mark.parametrize("ends", ["at its deadline", "called off", "closed"])
async def test_a_device_that_hangs_while_a_plan_is_resolved(start_target, engines, kit, devices, monkeypatch, *, ends):
    """What was launched before it may wait for a peer that is gone. What comes of it is let go of, later."""
    whole = {"large": torch.zeros(1024, 1024)}
    target = await start_target(OnDevice(kit.Bag(kit.poisoned(whole))))
    limit = {"connect_timeout_s": 1.0} if ends == "at its deadline" else {}
    pusher = engines(place(kit.row_shards(whole, 1), host=("large",)), [target], **limit)
    hangs, go_on, empty = asyncio.Event(), threading.Event(), load("slow_device").SlowDevice.empty
    loop = asyncio.get_running_loop()

    def late(self, nbytes):
        loop.call_soon_threadsafe(hangs.set)
        assert go_on.wait(60)
        return empty(self, nbytes)

    monkeypatch.setattr(wiring, "_SETTLE_S", 0.1)
    monkeypatch.setattr(load("slow_device").SlowDevice, "empty", late)
    connecting = asyncio.create_task(pusher.engines[0].connect())
    await hangs.wait()
    if ends == "called off":
        connecting.cancel()
    elif ends == "closed":
        await pusher.engines[0].close()
    (failure,) = await asyncio.gather(connecting, return_exceptions=True)
    kinds = {"at its deadline": PushTimeout, "called off": asyncio.CancelledError, "closed": ClosedError}
    assert isinstance(failure, kinds[ends]), failure
    assert [len(device.registered) for device in devices] == [1], "the thread still hangs"
    go_on.set()
    await kit.until(lambda: [device.registered for device in devices] == [{}])


def test_work_for_the_engines_thread_has_the_callers_device(monkeypatch):
    """The current device is one of each thread; the engine's would be 0, whatever GPU a rank has."""
    devices, waited = {threading.get_ident(): 3}, []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.get(threading.get_ident(), 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({threading.get_ident(): device}))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=lambda _: waited.append(device))
    )

    async def work():
        return torch.cuda.current_device()

    with ThreadPoolExecutor(1) as engine:
        assert engine.submit(asyncio.run, device_wiring.after_caller(work())).result() == 3
    assert waited == [3]


async def test_a_loader_is_called_with_the_device_of_its_weights(start_target, connect, kit, devices, monkeypatch):
    there = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: there.update({threading.current_thread().name: device}))
    seen = []

    class Asks(OnDevice):
        def begin(self, version):
            seen.append(there.get(threading.current_thread().name))
            super().begin(version)

    whole = content()
    pusher = await connect(place(kit.row_shards(whole, 1), host=()), [await start_target(Asks(kit.Bag(kit.poisoned(whole))))])
    await pusher.push_well(1)
    assert seen == [torch.device("cpu")], "where this test says that its weights are"


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


def recipe(bucket, beside, *, lent_whole=False, receiver="r", owner=0):
    """What is looked at of a recipe for rank 0: the sizes of its bucket and of what is needed beside it."""
    return SimpleNamespace(
        task=SimpleNamespace(index=0, nbytes=bucket, receivers=(receiver,), owner=owner, segments=[]),
        lent_whole=lent_whole, layout=Layout.of(0, (beside,) if beside else (), None if owner else bucket),
    )  # fmt: skip


def test_the_ring_and_the_tasks_share_the_watermark():
    recipes = [recipe(1 << 20, 2 << 20) for _ in range(20)]
    shares = device_wiring.Shares.of(recipes, 12 << 20, ["r"])
    assert (shares.ring, shares.private) == (4 << 20, 8 << 20)
    none = device_wiring.Shares.of(recipes, 12 << 20, [])
    assert (none.ring, none.private) == (0, 12 << 20)
    lent = device_wiring.Shares.of([*recipes, recipe(16 << 20, 0, lent_whole=True)], 12 << 20, ["r"])
    assert lent == shares, "no room for what receivers copy from where it lies"


def test_no_room_in_the_ring_for_buckets_that_others_assemble():
    own = [recipe(64 << 20, 4 << 20)]
    alone = device_wiring.Shares.of(own, 1 << 30, ["r"])
    shares = device_wiring.Shares.of([*own, *(recipe(256 << 20, 128 << 20, owner=1) for _ in range(20))], 1 << 30, ["r"])
    assert shares.ring == alone.ring == 64 << 20
    assert shares.private == (1 << 30) - shares.ring
    small = device_wiring.Shares.of([recipe(900 << 20, 300 << 20, owner=1)], 300 << 20, ["r"])
    assert (small.ring, small.private) == (0, 300 << 20), "a plan that fits"


def test_the_ring_that_is_made_is_the_share_whatever_else_is_assembled():
    """Buckets for other transports lie in private memory, however large."""
    recipes = [recipe(100 << 20, 7 << 20) for _ in range(2)] + [recipe(256 << 20, 16 << 20, receiver="n") for _ in range(20)]
    shares = device_wiring.Shares.of(recipes, 1 << 30, ["r"])
    program = SimpleNamespace(rank=0, tasks=[one.task for one in recipes])
    assert 100 << 20 <= ring_capacity(program, shares.ring) == shares.ring
    assert shares.ring + shares.private <= 1 << 30
    assert ring_capacity(program, 0) == 0, "all that goes over CUDA IPC is lent"


def test_few_buckets_beside_many_small_needs_get_room_for_more_than_one():
    """What is lent needs a little for its digest each: all of it together is more than the few buckets that go by the ring."""
    lent = [recipe(32 << 20, 2 << 20, lent_whole=True) for _ in range(4400)]
    ringed = [recipe(32 << 20, 0) for _ in range(40)]
    shares = device_wiring.Shares.of([*lent, *ringed], 256 << 20, ["r"])
    assert shares.ring >= 6 * (32 << 20)
    assert shares.private >= 6 * (2 << 20)
    assert shares.ring + shares.private <= 256 << 20


@pytest.mark.parametrize("ringed", [True, False])
def test_buckets_and_what_is_needed_beside_them_never_take_more_than_the_watermark(ringed):
    recipes, places = [recipe(900 << 20, 0), recipe(300 << 20, 600 << 20)], ["r"] if ringed else []
    enough = (1500 if ringed else 900) << 20
    shares = device_wiring.Shares.of(recipes, enough, places)
    assert shares.ring + shares.private == enough
    with pytest.raises(PlanError, match="lower bucket_bytes or raise max_tmp_bytes" if ringed else "do not fit"):
        device_wiring.Shares.of(recipes, enough - 1, places)


def test_a_rank_assembles_where_its_tensors_are():
    class Held:
        def __init__(self, device):
            self.device = torch.device(device)

    assert device_wiring.home_of([Held("cpu"), Held("cuda:3"), Held("cuda:3")]) == torch.device("cuda", 3)
    assert device_wiring.home_of([Held("cpu")]).type == "cuda"
    with pytest.raises(PlanError, match="cuda:1 and cuda:3: a rank has one GPU"):
        device_wiring.home_of([Held("cuda:3"), Held("cuda:1")])
