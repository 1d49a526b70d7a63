"""`h2d` and `prepare` on a device, with one that stands for it: its streams do nothing before they are told to.

What the stand-in shows is our own logic: order, lifetime, accounting, and that a device's bytes are those of the CPU stages.
What CUDA itself does with it, the tests marked ``cuda`` show.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from syncline.engine.device_wiring import DeviceRig, Shares
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor
from syncline.scheduler.plan import PlanOptions, build_plan
from syncline.stages import device_recipes
from syncline.stages.assembly import Assembly
from syncline.stages.buffers import BufferPool, aligned
from syncline.stages.communicator import Communicator
from syncline.stages.completions import Signal, TaskScope
from syncline.stages.cudart import enough_memory
from syncline.stages.device import CudaDevice
from syncline.stages.device_events import EventSlots
from syncline.stages.device_h2d import DeviceH2DStage, pool_nbytes
from syncline.stages.device_prepare import DevicePrepareStage
from syncline.stages.device_recipes import Bench, build_device_recipes, chunks
from syncline.stages.digest import add_digests
from syncline.stages.errors import TransportError
from syncline.stages.lanes import Lane
from syncline.stages.page_locks import WORTH_NBYTES, PageLocks
from syncline.stages.recipes import build_recipes
from syncline.stages.rendezvous import Rendezvous
from syncline.stages.task_memory import TaskMemory, private_capacity
from syncline.stages.watch import Watch
from syncline.stages.workers import Workers

PATIENCE_S = 20.0


def _slow_device():
    path = Path(__file__).with_name("slow_device.py")
    spec = importlib.util.spec_from_file_location("slow_device", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SlowDevice


SlowDevice = _slow_device()


# ------------------------------------------------------------------------------------------------------- completions


def test_an_event_is_used_again_only_after_its_use_was_seen_to_be_done():
    device = SlowDevice(free=False)
    slots = EventSlots(device)
    first, second = slots.record(None), slots.record(None)
    assert (slots.made, slots.in_use) == (2, 2)
    assert not first.poll()
    device.done = 1
    assert first.poll()
    assert not second.poll()
    third = slots.record(None)  # in the slot of the first
    assert (slots.made, slots.in_use, third.generation) == (2, 2, 2)
    assert first.poll(), "done stays done, whatever its slot does now"
    assert not third.poll(), "its slot's earlier use is over, this one is not"
    device.done = 3
    assert second.poll()
    assert third.poll()
    assert slots.in_use == 0


def test_an_event_that_was_recorded_anew_is_never_taken_for_its_use_before():
    slots = EventSlots(SlowDevice(free=False))
    done = slots.record(None)
    done._slot.generation += 1  # someone records a slot that is in use
    with pytest.raises(TransportError, match=r"use 2.*its use 1 was under way"):
        done.poll()


def test_what_a_stream_uses_lives_until_its_end_was_seen():
    class Thing:
        pass

    device, thing = SlowDevice(free=False), Thing()
    seen, done = weakref.ref(thing), EventSlots(device).record(None, thing)
    del thing
    assert not done.poll()
    assert seen() is not None
    device.done = 1
    assert done.poll()
    assert seen() is None


# --------------------------------------------------------------------------------------------------------- page locks


def test_a_storage_is_page_locked_once_and_let_go_of_at_the_end():
    device = SlowDevice()
    locks = PageLocks(device)
    whole = torch.zeros(WORTH_NBYTES // 4 * 3)
    assert locks.lock(whole)
    assert locks.lock(whole[1000:2000]), "the same storage"
    assert device.log == [whole.nbytes]
    assert locks.locked_nbytes == whole.nbytes
    assert not locks.lock(torch.zeros(WORTH_NBYTES // 4 - 1)), "too small to be worth it"
    assert locks.close() == []
    assert device.registered == {}
    assert locks.locked_nbytes == 0


def test_memory_that_cannot_be_locked_goes_through_the_pool():
    device = SlowDevice()
    device.refuses = True
    locks, whole = PageLocks(device), torch.zeros(WORTH_NBYTES)
    assert not locks.lock(whole)
    device.refuses = False
    assert not locks.lock(whole), "not asked again"
    assert list(locks.refused.values()) == ["not this memory"]


def test_overlapping_memory_is_not_locked_twice_and_a_lost_lock_is_no_crash():
    device = SlowDevice()
    locks = PageLocks(device)
    memory = torch.zeros(4 * WORTH_NBYTES, dtype=torch.uint8)
    beside = torch.frombuffer(memory.numpy().data[WORTH_NBYTES:], dtype=torch.uint8)  # another storage over the same bytes
    assert locks.lock(memory)
    assert not locks.lock(beside)
    device.registered.clear()
    assert locks.close() == ["was not registered"]
    assert locks.close() == []


# ------------------------------------------------------------------------------------------------------------- stages


SHAPES = {"q.weight": (200, 256), "k.weight": (64, 100), "wide.weight": (3, 70_000), "norm": (77,), "t": (40, 50)}


def world(sources, *, host=(), quantized=True, strided=("t",)):
    """Row shards of a few weights on each source rank, and a target that holds two of them as FP8."""
    generator = torch.Generator().manual_seed(sources)
    whole = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    manifests, memories = [], []
    for rank in range(sources):
        tensors = [Tensor(name=name, shape=shape, dtype="bfloat16") for name, shape in SHAPES.items()]
        pieces, buffers, held = [], [], []
        for index, (name, tensor) in enumerate(whole.items()):
            step = -(-tensor.shape[0] // sources)
            part = tensor[rank * step : (rank + 1) * step]
            local = part.t().contiguous().t() if name in strided and part.dim() == 2 else part.clone()
            held.append(local)
            buffers.append(Buffer(name=name, nbytes=local.nbytes, device="cpu" if name in host else "there"))
            if local.numel():
                start = (rank * step, *(0,) * (tensor.dim() - 1))
                pieces.append(Piece(tensor=index, box=Box(start=start, shape=tuple(local.shape)), buffer=index, offset=0,
                                    strides=local.stride(), dtype="bfloat16"))  # fmt: skip
        manifests.append(Manifest(rank=rank, world_size=sources, host="h", tensors=tensors, pieces=pieces, buffers=buffers))
        memories.append(held)
    return manifests, target_manifest(quantized), memories


def target_manifest(quantized):
    kinds = {"q.weight": "float8_e4m3fn", "k.weight": "float8_e4m3fn"} if quantized else {}
    wanted = {name: (shape, kinds.get(name, "float32" if name == "norm" else "bfloat16")) for name, shape in SHAPES.items()}
    if quantized:
        wanted |= {"q.weight_scale_inv": ((2, 2), "float32"), "k.weight_scale": ((64, 1), "float32")}
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    pieces, buffers = [], []
    for index, (shape, dtype) in enumerate(wanted.values()):
        strides = tuple(torch.empty(shape, device="meta").stride())
        pieces.append(Piece(tensor=index, box=Box.whole(shape), buffer=index, offset=0, strides=strides, dtype=dtype))
        buffers.append(Buffer(name=str(index), nbytes=torch.Size(shape).numel() * sizes[dtype]))
    tensors = [Tensor(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in wanted.items()]
    return Manifest(rank=0, world_size=1, host="h", tensors=tensors, pieces=pieces, buffers=buffers)


def make_plan(manifests, target, *, stage_host, bucket_bytes=100_000, watermark=2_000_000):
    options = PlanOptions(
        bucket_bytes=bucket_bytes, max_tmp_bytes=watermark, route="gather", landing="streamed", leaf_bytes=4096,
        stage_host=stage_host,
    )  # fmt: skip
    return build_plan(manifests, [[target]], options)


class Rank:
    """A source rank that assembles on a device."""

    def __init__(self, plan, manifest, memory, device, *, backend="torch", lends=False, watermark=2_000_000):
        self.device, self.program = device, plan.source_program(manifest.rank)
        self.locks = PageLocks(device)
        host = [i for i, buffer in enumerate(manifest.buffers) if buffer.device == "cpu"]
        bench = Bench(
            buffers=memory, host=host, device=device.device, locks=self.locks, lends=lambda _task: lends, verify=True,
            backend=backend,
        )  # fmt: skip
        self.recipes = build_device_recipes(self.program, bench)
        needs = [(recipe.task, recipe.layout) for recipe in self.recipes.values()]
        capacity = private_capacity(needs, watermark, in_place=())
        base = device.empty(capacity + 256)
        start = -base.data_ptr() % 256
        self.memory = TaskMemory(BufferPool(base[start : start + capacity]), {})
        self.workers, self.scope, self.watch = Workers(2), TaskScope(), Watch()
        shared = {"recipes": self.recipes, "memory": self.memory, "workers": self.workers, "scope": self.scope}
        self.pinned = BufferPool(device.pinned(pool_nbytes(self.recipes)))
        self.h2d = DeviceH2DStage(**shared, lane=Lane(device, self.watch), pool=self.pinned)
        self.prepare = DevicePrepareStage(**shared, lane=Lane(device, self.watch), communicator=None, verify=True)

    def begin(self, push):
        self.h2d.begin(push)
        self.prepare.begin(push)

    async def run(self, push, *, keep=()):
        """All tasks, one after the other; the owned buckets."""
        buckets = {}
        for index, recipe in self.recipes.items():
            up = self.h2d.start(index)
            if up is not None:
                await asyncio.wait_for(up, PATIENCE_S)
            await asyncio.wait_for(self.prepare.start(index), PATIENCE_S)
            if recipe.kernels is not None:
                buckets[index] = self.memory.bucket((push, index)).cpu().clone()
            if index not in keep:
                self.memory.release(push, index)
        return buckets

    def close(self):
        self.workers.close()
        self.locks.close()


def cpu_buckets(plan, rank, memories):
    """What the CPU stages put together, message by message; buckets and digests."""
    programs = [plan.source_program(r) for r in range(len(memories))]
    recipes = [build_recipes(program, memory) for program, memory in zip(programs, memories, strict=True)]
    buckets, parts = {}, []
    for index, recipe in recipes[rank].items():
        if recipe.assembly is None:
            continue
        task, assembly = recipe.task, recipe.assembly
        assert isinstance(assembly, Assembly)
        bucket = torch.full((task.nbytes,), 0x5A, dtype=torch.uint8)
        private = torch.zeros(recipe.layout.without_bucket, dtype=torch.uint8)
        total = assembly.fill(bucket, private[: recipe.layout.files], verify=True)
        for number, message in enumerate(task.receives):
            packing = next(p for p in recipes[message.peer][index].packings if p.message.tag == message.tag)
            at = recipe.layout.messages[number]
            wire = private[at : at + message.nbytes]
            if packing.source is not None:
                (copy,) = message.copies
                size = torch.empty(0, dtype=getattr(torch, copy.dst.dtype)).element_size()
                bucket[copy.dst.offset * size :][: message.nbytes].copy_(packing.source)
                continue
            packing.run(wire, None)
            assembly.unpack(number, wire, bucket)
        parts += [total, assembly.finish(bucket, private, verify=True)]
        buckets[index] = bucket
    return buckets, add_digests(parts)


def segments_equal(task, one, other):
    return all(torch.equal(one[s.offset :][: s.nbytes], other[s.offset :][: s.nbytes]) for s in task.segments)


def check_owner(rank, buckets, expected):
    reference, digest = expected
    assert set(buckets) == set(reference)
    for index, bucket in buckets.items():
        assert segments_equal(rank.recipes[index].task, bucket, reference[index]), index
    assert rank.prepare.content_digest() == digest


@pytest.mark.parametrize("host", [(), tuple(SHAPES), ("q.weight", "norm", "t")])
async def test_a_device_gives_the_bytes_and_digests_of_the_cpu(host):
    manifests, target, memories = world(1, host=host)
    plan = make_plan(manifests, target, stage_host=True)
    rank = Rank(plan, manifests[0], memories[0], SlowDevice())
    expected = cpu_buckets(plan, 0, memories)
    for push in (1, 2):
        rank.begin(push)
        check_owner(rank, await rank.run(push), expected)
        assert rank.memory.pool.in_use == rank.pinned.in_use == 0
        staged = sum(upload.nbytes for recipe in rank.recipes.values() for upload in recipe.uploads)
        assert rank.h2d.pooled_nbytes + rank.h2d.locked_nbytes == staged
        assert bool(staged) == bool(host)
    rank.close()


async def test_ranks_gather_uncast_bytes_to_owners_that_quantize_them():
    manifests, target, memories = world(2)
    plan = make_plan(manifests, target, stage_host=True)
    ranks = [Rank(plan, manifest, memory, SlowDevice()) for manifest, memory in zip(manifests, memories, strict=True)]
    rendezvous = Rendezvous.host("127.0.0.1", timeout_s=PATIENCE_S)
    made = [
        Communicator.create(rendezvous, name="g", rank=r, size=2, bind_host="127.0.0.1", timeout_s=PATIENCE_S) for r in (0, 1)
    ]
    communicators = await asyncio.gather(*made)
    for rank, communicator in zip(ranks, communicators, strict=True):
        rank.prepare.communicator = communicator
        rank.begin(1)
    moved = [m for rank in ranks for task in rank.program.tasks for m in task.sends]
    assert any(copy.src.dtype == "bfloat16" and copy.dst.dtype == "bfloat16" for m in moved for copy in m.copies)
    for rank, buckets in zip(ranks, await asyncio.gather(*(rank.run(1) for rank in ranks)), strict=True):
        check_owner(rank, buckets, cpu_buckets(plan, rank.program.rank, memories))
        rank.close()
    await asyncio.gather(*(communicator.close() for communicator in communicators))


async def test_memory_is_held_until_a_slow_device_is_done_with_it():
    """`lifetime`: the work is only queued when `start` returns, and no byte of it is lent again before its end was seen."""
    manifests, target, memories = world(1, host=("q.weight",), quantized=True)
    plan = make_plan(manifests, target, stage_host=True)
    device = SlowDevice(free=False)
    rank = Rank(plan, manifests[0], memories[0], device)
    first = next(index for index, recipe in rank.recipes.items() if recipe.uploads)
    rank.begin(1)
    up = rank.h2d.start(first)
    await until(lambda: device.recorded == 1)
    held, pinned = rank.memory.pool.in_use, rank.pinned.in_use
    assert held > 0
    assert pinned > 0
    await asyncio.sleep(0.01)
    assert not up.done
    assert rank.pinned.in_use == pinned, "page-locked memory is still being read"
    device.done = 1
    await asyncio.wait_for(up, PATIENCE_S)
    assert rank.pinned.in_use == 0
    assert rank.memory.pool.in_use == held
    work = rank.prepare.start(first)
    await until(lambda: device.recorded == 2)
    await asyncio.sleep(0.01)
    assert not work.done, "launched is not done"
    assert rank.prepare.content_digest() == 0, "nor is its digest there"
    device.done = 2
    await asyncio.wait_for(work, PATIENCE_S)
    assert rank.prepare.content_digest() != 0
    rank.memory.release(1, first)
    assert rank.memory.pool.in_use == 0
    rank.close()


async def test_launches_that_fail_are_waited_for_like_others():
    manifests, target, memories = world(1)
    device = SlowDevice(free=False)
    rank = Rank(make_plan(manifests, target, stage_host=True), manifests[0], memories[0], device)
    index, recipe = next(iter(rank.recipes.items()))

    def broken(*_args, **_kwargs):
        raise RuntimeError("out of memory")

    recipe.kernels.run = broken
    rank.begin(1)
    work = rank.prepare.start(index)
    await until(lambda: device.recorded == 1)
    assert not work.done
    device.done = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(work, PATIENCE_S)
    rank.close()


@pytest.mark.parametrize("stage", ["h2d", "prepare"])
async def test_memory_is_held_when_whoever_waits_for_the_device_is_gone(stage):
    """The owner of the coroutines is closed, which cancels them: what the device works on stays until its end."""
    manifests, target, memories = world(1, host=("q.weight",))
    device = SlowDevice(free=stage == "prepare")
    rank = Rank(make_plan(manifests, target, stage_host=True), manifests[0], memories[0], device)
    first = next(index for index, recipe in rank.recipes.items() if recipe.uploads)
    rank.begin(1)
    up = rank.h2d.start(first)
    await until(lambda: device.recorded == 1)
    if stage == "prepare":
        await asyncio.wait_for(up, PATIENCE_S)
        device.done = 0
        rank.prepare.start(first)
        await until(lambda: device.recorded == 2)
    held = weakref.ref(rank.recipes[first].kernels)
    pinned = rank.pinned.in_use
    assert not await rank.scope.join(0.0)
    ended = rank.watch.close()
    watch, pool = rank.watch, rank.pinned
    rank.close()
    del rank, up
    gc.collect()
    assert held() is not None
    assert pool.in_use == pinned
    assert not ended.done
    device.done = float("inf")
    await asyncio.wait_for(ended, PATIENCE_S)
    assert pool.in_use == 0
    del watch
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("launch", ["launched", "failed"])
async def test_a_device_that_is_lost_ends_what_waits_for_it(monkeypatch, launch):
    """Nothing can be recorded on it any more; the first error is the one to tell."""
    device = SlowDevice()
    lane, launching = Lane(device, Watch()), Signal()

    def lost():
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(device, "event", lost)
    whole = lane.after(launching, used=None)
    if launch == "launched":
        launching.set()
    else:
        launching.fail(RuntimeError("the kernel failed"))
    with pytest.raises(RuntimeError, match="device is lost" if launch == "launched" else "kernel failed"):
        await asyncio.wait_for(whole, PATIENCE_S)


async def test_nothing_holds_the_pool_of_page_locked_memory_when_its_rig_is_closed():
    """Stages may be held for long after it, in cycles: a trainer that collects no garbage keeps them all."""
    device, pinned = SlowDevice(), torch.empty(1024, dtype=torch.uint8)
    rig = DeviceRig(
        device=device, recipes={}, locks=PageLocks(device), shares=Shares(private=0, ring=0), pinned=pinned,
        private=device.empty(0),
    )  # fmt: skip
    memory, held = TaskMemory(BufferPool(rig.private), {}), weakref.ref(pinned)
    del pinned
    workers = Workers(1)
    stages = rig.stages(memory, workers, TaskScope(), SimpleNamespace(verify=True, trace=False))
    await asyncio.wait_for(rig.close(), PATIENCE_S)
    workers.close()
    gc.collect()
    assert stages
    assert held() is None


async def test_page_locked_memory_is_let_go_of_when_the_device_has_read_it():
    device = SlowDevice(free=False)
    locks, watch = PageLocks(device), Watch()
    memory = torch.zeros(WORTH_NBYTES, dtype=torch.uint8)
    assert locks.lock(memory)
    rig = DeviceRig(
        device=device, recipes={}, locks=locks, shares=Shares(private=0, ring=0), pinned=device.pinned(0),
        private=device.empty(0), watch=watch,
    )  # fmt: skip
    reading = Lane(device, watch).done(memory)
    await rig.close(0.0)
    assert device.registered
    assert not reading.done
    device.done = float("inf")
    await asyncio.wait_for(rig.close(), PATIENCE_S)
    assert reading.done
    assert not device.registered


async def test_large_segments_are_lent_and_digested_where_they_lie(monkeypatch):
    monkeypatch.setattr(device_recipes, "FRAME_NBYTES", 200_000)
    manifests, target, memories = world(1, quantized=False, strided=())
    plan = make_plan(manifests, target, stage_host=True, bucket_bytes=1_000_000)
    rank = Rank(plan, manifests[0], memories[0], SlowDevice(), lends=True)
    lent = [memory for recipe in rank.recipes.values() for memory in recipe.lent.values()]
    assert lent, "420 kB of bfloat16 go out from where they lie"
    addresses = {(t.data_ptr(), t.data_ptr() + t.nbytes) for t in memories[0]}
    assert all(any(a <= m.data_ptr() < b for a, b in addresses) for m in lent)
    rank.begin(1)
    await rank.run(1)
    assert rank.prepare.content_digest() == cpu_buckets(plan, 0, memories)[1]
    rank.close()


def test_a_bucket_has_room_wherever_its_task_takes_it_from(monkeypatch):
    """Of what is lent as a whole only a ring needs no room: other transports take a bucket all the same."""
    monkeypatch.setattr(device_recipes, "FRAME_NBYTES", 1)
    manifests, target, memories = world(1, quantized=False, strided=())
    plan = make_plan(manifests, target, stage_host=True, bucket_bytes=50_000)
    rank = Rank(plan, manifests[0], memories[0], SlowDevice(), lends=True)
    recipes = list(rank.recipes.values())
    assert any(recipe.lent_whole for recipe in recipes)
    receivers = {receiver for recipe in recipes for receiver in recipe.task.receivers}
    for recipe in recipes:
        apart, ringed = Shares.of([recipe], 1 << 30, ()), Shares.of([recipe], 1 << 30, receivers)
        assert (apart.ring, apart.private) == (0, recipe.layout.with_bucket)
        assert ringed.private == recipe.layout.without_bucket
        assert ringed.ring == (0 if recipe.lent_whole else aligned(recipe.task.nbytes))
        for in_ring in (frozenset(), frozenset(receivers)):
            rig = DeviceRig(
                device=SlowDevice(), recipes={0: recipe}, locks=None, shares=apart, pinned=torch.empty(0),
                private=torch.empty(0), in_ring=in_ring,
            )  # fmt: skip
            free = recipe.lent_whole and bool(in_ring)
            assert rig.tmp_nbytes == {0: recipe.layout.without_bucket if free else recipe.layout.with_bucket}
    rank.close()


def test_no_room_on_a_device_is_told_with_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 100))
    told = "50 bytes were needed on cuda:0, of whose 100 bytes 7 are free: lower max_tmp_bytes"
    with pytest.raises(TransportError, match=told), enough_memory(50, torch.device("cuda:0")):
        raise torch.OutOfMemoryError


def test_the_watermark_counts_what_is_staged_and_what_kernels_need():
    manifests, target, memories = world(1, host=tuple(SHAPES))
    with_host = make_plan(manifests, target, stage_host=True)
    without = make_plan(manifests, target, stage_host=False)
    assert with_host.peak_task_tmp_bytes > without.peak_task_tmp_bytes
    rank = Rank(with_host, manifests[0], memories[0], SlowDevice())
    for recipe in rank.recipes.values():
        staged = sum(upload.nbytes for upload in recipe.uploads)
        assert recipe.task.file_bytes == staged
        assert recipe.layout.with_bucket >= staged + recipe.task.nbytes + recipe.kernels.tmp_nbytes
    assert rank.memory.pool.capacity <= 2_000_000
    rank.close()


def test_pageable_memory_is_copied_in_pieces_that_cover_it_once():
    manifests, target, memories = world(1, host=tuple(SHAPES))
    rank = Rank(make_plan(manifests, target, stage_host=True), manifests[0], memories[0], SlowDevice())
    uploads = [upload for recipe in rank.recipes.values() for upload in recipe.uploads]
    for upload in uploads:
        pieces = chunks([upload], 4096)
        at = upload.at
        for piece in pieces:
            assert piece.at == at
            at += piece.nbytes
        assert at == upload.at + upload.nbytes
        assert torch.equal(torch.cat([piece.source for piece in pieces]), upload.source)
    rank.close()


async def until(predicate):
    async with asyncio.timeout(PATIENCE_S):
        while not predicate():
            await asyncio.sleep(0.001)


# --------------------------------------------------------------------------------------------------------------- CUDA


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return CudaDevice(torch.device("cuda", 0))


@pytest.mark.cuda
@pytest.mark.parametrize("host", [(), tuple(SHAPES), ("q.weight", "norm", "t")])
async def test_a_gpu_gives_the_bytes_and_digests_of_the_cpu(gpu, host):
    manifests, target, memories = world(1, host=host)
    plan = make_plan(manifests, target, stage_host=True)
    expected = cpu_buckets(plan, 0, memories)
    there = [
        memory if name in host else memory.to(gpu.device) for name, memory in zip(SHAPES, memories[0], strict=True)
    ]  # strides are kept
    rank = Rank(plan, manifests[0], there, gpu, backend="auto")
    for push in (1, 2, 3):
        rank.begin(push)
        check_owner(rank, await rank.run(push), expected)
    assert rank.memory.pool.in_use == rank.pinned.in_use == 0
    assert rank.prepare._lane.slots.in_use == 0
    rank.close()


@pytest.mark.cuda
async def test_memory_of_the_trainer_is_page_locked_in_place_and_let_go_of(gpu):
    memory = torch.arange(WORTH_NBYTES, dtype=torch.int32)
    locks = PageLocks(gpu)
    assert locks.lock(memory), locks.refused
    assert memory.is_pinned()
    there = torch.empty_like(memory, device=gpu.device)
    lane = Lane(gpu, Watch())
    lane.run(there.copy_, memory, non_blocking=True)
    await asyncio.wait_for(lane.done(), PATIENCE_S)
    assert torch.equal(there.cpu(), memory)
    assert locks.close() == []
    assert not memory.is_pinned()


@pytest.mark.cuda
async def test_an_event_of_a_gpu_is_polled_and_used_again(gpu):
    lane = Lane(gpu, Watch())
    big = torch.zeros(1 << 28, dtype=torch.uint8, device=gpu.device)
    for _ in range(50):
        lane.run(big.add_, 1)
        await asyncio.wait_for(lane.done(), PATIENCE_S)
    assert lane.slots.made == 1
    assert int(big[0]) == 50
