"""The landing paths of GPU targets, whole: CUDA IPC's logic, landing kernels in plain torch, loaders of each family.

Over what stands for CUDA (`standins`); on a GPU: tests/cuda.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch

from syncline.engine import landing_device as landing_device_module
from syncline.engine.errors import PlanError
from syncline.engine.landing import Route
from syncline.engine.landing_device import landing_device, make_device_path
from syncline.engine.loader_thread import LoaderThread
from syncline.stages.errors import TransportError
from syncline.stages.transports.base import AHEAD
from syncline.stages.transports.cuda_ipc import CudaIpcSender

CPU = torch.device("cpu")
PATIENCE_S = 20.0


def _slow_device():
    spec = importlib.util.spec_from_file_location("slow_device", Path(__file__).with_name("slow_device.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SLOW = _slow_device()


class Weights:
    """A loader over a target rank's memory: exposes it, hides it, or hides every other buffer."""

    def __init__(self, rank, family):
        self.rank, self.calls = rank, []
        hidden = {"exposed": lambda _: False, "hidden": lambda _: True, "mixed": lambda i: i % 3 == 2}[family]
        self.exposed = [None if hidden(i) else buffer for i, buffer in enumerate(rank.buffers)]

    def buffers(self):
        return self.exposed if any(b is not None for b in self.exposed) else None

    def begin(self, version):
        self.calls.append(f"begin {version}")

    def install(self, landed):
        for piece, box, tensor in landed:
            whole = self.rank.manifest.pieces[piece]
            own = self.rank.buffers[whole.buffer].as_strided(whole.box.shape, whole.strides, whole.offset)
            at = [slice(s - w, s - w + n) for s, w, n in zip(box.start, whole.box.start, box.shape, strict=True)]
            own[tuple(at)].copy_(tensor)

    def finish(self, version):
        self.calls.append(f"finish {version}")


@pytest.fixture
async def bed(world):
    """``await bed(landing, family, verify)``: a source, and the landing path of a target rank."""
    made = []

    async def make(landing, family, verify=True, *, lent=False, slow=None):
        one = await world(connect=False, seed=31, transport="cuda_ipc", landing=landing, targets=[2], tensors=8, verify=verify)
        if lent:
            lend(one.sources[0])
        await one.connect()
        paths = []
        for number, rank in enumerate(one.targets.values()):
            loader = LoaderThread(Weights(rank, family))
            route = Route(
                program=rank.program, manifest=rank.manifest, half=rank.half, loader=loader, workers=rank.workers,
                verify=verify, device=CPU,
            )  # fmt: skip
            stream = None if slow is None else SLOW.SlowLanding(slow[number])
            paths.append(make_device_path(landing, route, loader.loader.buffers(), stream))
            made.append((paths[-1], loader))
        return one, paths

    yield make
    for path, loader in made:
        await path.close()
        loader.close(5.0)


def lend(source):
    """Lend every segment that one piece of memory makes up. The rig's `prepare` writes it to the bucket all the same."""
    lent, keep = {}, {}
    for task in source.program.tasks:
        segments = {}
        for segment in task.segments[::2]:
            pieces = [p for p in source.manifest.pieces if source.manifest.tensors[p.tensor].name == segment.name]
            if segment.nbytes and pieces[0].box == segment.box:
                keep[task.index, segment.offset] = pieces[0]
                segments[segment.offset] = source.runtime.allocate(segment.nbytes)
        if segments and len(segments) < len(task.segments):
            lent[task.index] = segments
    assert lent
    fill = source.fill

    def fill_both(version):
        fill(version)
        for (task, offset), piece in keep.items():
            if task in lent:
                view = source.buffers[piece.buffer].as_strided(piece.box.shape, piece.strides, piece.offset)
                lent[task][offset].copy_(view.contiguous().reshape(-1).view(torch.uint8))

    source.fill = fill_both
    source.sender = CudaIpcSender(
        program=source.program, landing=source.spec["landing"], ring_nbytes=source.spec["watermark"], runtime=source.runtime,
        workers=source.workers, on_lost=source._lost, lent=lent,
    )  # fmt: skip
    for memory in (source.memory._in_place, source.send._routes):
        for receiver in memory:
            memory[receiver] = source.sender


async def push(one, paths, version):
    (source,) = one.sources
    source.fill(version)
    for path in paths:
        await path.begin(f"push-{version}", 30)
    wrote = []
    receiving = [asyncio.create_task(path.receive_all(version, lambda: wrote.append(version))) for path in paths]
    sent, *got = await asyncio.gather(source.push(f"push-{version}"), *receiving)
    assert sent["error"] == ""
    for rank, (receiver, received) in enumerate(zip(one.targets, got, strict=True)):
        assert receiver.rank == rank
        assert received.digest == (sent["digests"][f"0:{rank}"] if one.spec["verify"] else None)
    for path in paths:
        await path.commit(version)
        await path.end(committed=True)
        await path.settled()
    await source.end()
    for target in one.targets.values():
        assert target.wrong(version) == []
    assert wrote == ([version] * len(paths) if one.spec["landing"] == "streamed" else [])


@pytest.mark.parametrize("landing", ["streamed", "staged"])
@pytest.mark.parametrize("family", ["exposed", "hidden", "mixed"])
@pytest.mark.parametrize("lent", [False, True])
async def test_pushes_land(bed, landing, family, lent):
    one, paths = await bed(landing, family, lent=lent)
    for version in (1, 2, 3):
        await push(one, paths, version)
    loader = paths[0]._route.loader.loader
    assert loader.calls == [f"{call} {version}" for version in (1, 2, 3) for call in ("begin", "finish")]


@pytest.mark.parametrize("landing", ["streamed", "staged"])
async def test_without_digests(bed, landing):
    one, paths = await bed(landing, "mixed", verify=False)
    await push(one, paths, 1)


async def test_closing_lets_go_of_the_sources_memory(bed):
    one, paths = await bed("streamed", "exposed", lent=True)
    await push(one, paths, 1)
    for path, target in zip(paths, one.targets.values(), strict=True):
        await path.close()
        opened = one.sources[0].sender.exported
        assert target.half.handles == (opened, opened)


@pytest.mark.parametrize("landing", ["streamed", "staged"])
async def test_a_source_that_closes_waits_until_nobody_looks_into_its_memory(bed, landing):
    """What was built to launch must not keep it mapped: an engine that serves on may never link again."""
    one, paths = await bed(landing, "mixed", lent=True)
    await push(one, paths, 1)
    sender = one.sources[0].sender
    opened = sender.exported
    await sender.close()
    for target in one.targets.values():
        assert target.half.handles == (opened, opened)
    with pytest.raises(TransportError, match="closed the link"):
        await paths[0].begin("push-2", 30)


async def until(predicate):
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():
            await asyncio.sleep(0.001)


async def given_up(tasks):
    """Cancel, and let go of: a task holds the frames in which it ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


@pytest.mark.parametrize("lent", [False, True])
async def test_errors_that_are_kept_keep_no_memory_of_the_source_open(bed, lent):
    """A receiver is given up between two buckets: no error may hold the frame that has had the first."""
    one, paths = await bed("streamed", "exposed", lent=lent)
    (source,) = one.sources
    source.hold_before = source.program.tasks[3].index
    source.fill(1)
    for path in paths:
        await path.begin("push", 30)
    receiving = [asyncio.create_task(path.receive_all(1, lambda: None)) for path in paths]
    sending = asyncio.create_task(source.push("push"))
    await source.held.wait()
    links = source.sender._links.values()
    await until(lambda: not any(task < source.hold_before for link in links for _, task in link.under_way))
    source.sender.drop(source.receivers)
    errors = await asyncio.gather(*receiving, return_exceptions=True)
    assert [type(error) for error in errors] == [TransportError] * len(paths)
    halves = [target.half for target in one.targets.values()]
    await until(lambda: all(half.handles[0] == half.handles[1] for half in halves))
    for half in halves:
        owner = half._owners[0]
        for check in (half.check, owner.check, lambda owner=owner: owner.bucket(None, 1)):
            with pytest.raises(TransportError, match="source rank 0"):
                check()
        assert owner.error.__traceback__ is None
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize("family", ["exposed", "hidden", "mixed"])
@pytest.mark.parametrize("lent", [False, True])
async def test_nothing_is_unmapped_while_the_device_works_on_it(bed, family, lent, monkeypatch):
    """A push is given up and its links are closed: buckets, what is lent and what was put together stay until the end."""
    slow = [SLOW.SlowDevice(free=False) for _ in range(2)]
    one, paths = await bed("streamed", family, lent=lent, slow=slow)
    joined = []
    join = landing_device_module._joined
    monkeypatch.setattr(
        landing_device_module, "_joined", lambda *args: joined.append(weakref.ref(whole := join(*args))) or whole
    )
    (source,) = one.sources
    source.fill(1)
    for path in paths:
        await path.begin("push", 30)
    receiving = [asyncio.create_task(path.receive_all(1, lambda: None)) for path in paths]
    sending = asyncio.create_task(source.push("push"))
    halves = [target.half for target in one.targets.values()]
    await until(lambda: all(device.recorded for device in slow))
    await given_up(receiving)
    for path in paths:
        await path.end(committed=False)
        await path.close()
    gc.collect()
    opened, closed = zip(*(half.handles for half in halves), strict=True)
    assert all(one < other for one, other in zip(closed, opened, strict=True)), "what is under way reads some of it"
    assert lent or closed == (0, 0)
    assert all(half._owners[0].channel.is_open for half in halves), "nor is the source told that it may let go"
    assert all(whole() is not None for whole in joined)
    for device in slow:
        device.done = float("inf")
    async with asyncio.timeout(PATIENCE_S):
        for path in paths:
            await path.settled()
    gc.collect()
    await until(lambda: all(half.handles[0] == half.handles[1] for half in halves))
    assert all(whole() is None for whole in joined)
    await until(lambda: not any(half._owners[0].channel.is_open for half in halves))
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_a_device_has_the_next_buckets_before_it_was_seen_to_be_done_with_the_first(bed, monkeypatch):
    """Launching takes no worker's time, and what ends is noticed late: the device must not wait for that."""
    slow = [SLOW.SlowDevice(free=False) for _ in range(2)]
    _, (path, _) = await bed("streamed", "exposed", slow=slow)
    assert path._route.workers.count == 1
    assert len(path._route.program.tasks) > AHEAD > 1

    async def receive(task):
        return torch.zeros(task.nbytes, dtype=torch.uint8)

    monkeypatch.setattr(path._half, "receive", receive)
    monkeypatch.setattr(path._half, "release", lambda task: None)
    receiving = asyncio.create_task(path.receive_all(1, lambda: None))
    await until(lambda: slow[0].recorded == AHEAD)
    for _ in range(100):
        await asyncio.sleep(0)
    assert slow[0].recorded == AHEAD, "nor are all launched at once: each may hold memory"
    slow[0].done = float("inf")
    assert (await receiving).buckets == len(path._route.program.tasks)


def copied_late(copy, device):
    """Copies that are seen to be done when ``device`` says so."""

    def late(pairs):
        copied, event = copy(pairs), device.event()
        event.record(None)
        return copied._replace(event=event)

    return late


@pytest.mark.parametrize(("sends", "copies"), [(1, 1), (4, AHEAD), (8, AHEAD)])
async def test_a_device_has_as_many_copies_as_there_are_sends_up_to_a_bound(world, monkeypatch, sends, copies):
    """Each lasts until its bucket was taken: a source that allows few of them keeps a receiver from working ahead."""
    wide = {"tensors": 30, "elements": 900, "watermark": 2**20}
    one = await world(seed=21, transport="cuda_ipc", landing="staged", sends=sends, **wide)
    (target,) = one.targets.values()
    device, runtime = SLOW.SlowDevice(free=False), target.half._runtime
    monkeypatch.setattr(runtime, "copy", copied_late(runtime.copy, device))
    push = asyncio.create_task(one.push(1))
    await until(lambda: device.recorded == copies)
    for _ in range(200):
        await asyncio.sleep(0)
    assert device.recorded == copies
    device.done = float("inf")
    await push


async def test_a_copy_out_of_the_ring_keeps_it_mapped(bed, monkeypatch):
    one, paths = await bed("staged", "exposed", lent=True)
    (source,) = one.sources
    slow = [SLOW.SlowDevice(free=False) for _ in one.targets]
    for device, target in zip(slow, one.targets.values(), strict=True):
        runtime = target.half._runtime
        monkeypatch.setattr(runtime, "copy", copied_late(runtime.copy, device))
    source.fill(1)
    for path in paths:
        await path.begin("push", 30)
    receiving = [asyncio.create_task(path.receive_all(1, lambda: None)) for path in paths]
    sending = asyncio.create_task(source.push("push"))
    await until(lambda: all(device.recorded for device in slow))
    await given_up(receiving)
    halves = [target.half for target in one.targets.values()]
    for half in halves:
        await half.close(0.05)
    gc.collect()
    assert all(half.handles[1] < half.handles[0] for half in halves)
    settling = [asyncio.create_task(path.settled()) for path in paths]
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(settled.done() for settled in settling), "landing memory is still being written"
    for device in slow:
        device.done = float("inf")
    await until(lambda: all(half.handles[0] == half.handles[1] for half in halves))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*settling)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_mapped_cannot_be_had(bed):
    _, paths = await bed("streamed", "exposed")
    with pytest.raises(PlanError, match="shared memory"):
        make_device_path("mapped", paths[0]._route, None)
    with pytest.raises(ValueError, match="CPU memory"):
        make_device_path("streamed", dataclasses.replace(paths[0]._route, device=None), None)


def test_which_transports_land_on_a_device(peer):
    manifest = peer.target_manifest(peer.make_spec(seed=1, transport="cuda_ipc", landing="streamed"), 0, 0)
    assert landing_device("shm", manifest, None) is None
    assert landing_device("gloo", manifest, [torch.zeros(1)]) is None
    for buffers in (None, [torch.zeros(1), None]):
        with pytest.raises(PlanError, match="weights on cpu; transport 'cuda_ipc' needs all of them on one GPU"):
            landing_device("cuda_ipc", manifest, buffers)
    meta = [torch.zeros(1), torch.zeros(1, device="meta")]
    with pytest.raises(PlanError, match="cpu, meta"):
        landing_device("nccl", manifest, meta)
