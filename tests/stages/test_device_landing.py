"""Landing by kernels, in plain torch on the CPU: the same content and digests as the CPU's own landing; what is lent."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.stages import device_landing
from syncline.stages.assembly import LandingCopies
from syncline.stages.completions import Signal
from syncline.stages.device_landing import DeviceCopies, DeviceDigest, LandingStream
from syncline.stages.digest import digest_bucket
from syncline.stages.errors import TransportError
from syncline.stages.launched import Launched, both, failed, follow, then
from syncline.stages.watch import Watch

CPU = torch.device("cpu")


def _slow_device():
    spec = importlib.util.spec_from_file_location("slow_device", Path(__file__).with_name("slow_device.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SLOW = _slow_device()


@pytest.fixture(scope="session")
def target(peer):
    """``target(seed)``: a rank of a target, with live memory."""
    return lambda seed, ranks=2: peer.TargetRank(
        peer.make_spec(seed=seed, transport="shm", landing="streamed", targets=[ranks], tensors=9), 0, 0
    )


def aligned(nbytes):
    room = torch.empty(nbytes + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


def same_bytes(buffers):
    """Copies, byte by byte: torch would make a bool of what is none."""
    return [buffer.view(torch.uint8).clone().view(buffer.dtype) for buffer in buffers]


def a_bucket(task, seed):
    bucket = aligned(task.nbytes)
    values = torch.randint(0, 2, (task.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bucket.copy_(values)  # 0 and 1: bool tensors take nothing else


def from_aligned(work):
    def checked(bucket, *arguments, **keywords):
        assert bucket.data_ptr() % 256 == 0
        return work(bucket, *arguments, **keywords)

    return checked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shift", [0, 80])
def test_as_landing_on_the_cpu(target, seed, verify, shift, monkeypatch):
    """Wherever in landing memory a bucket begins (``shift``): kernels are given an address that they can rely on."""
    for name in ("land", "assemble"):
        monkeypatch.setattr(device_landing, name, from_aligned(getattr(device_landing, name)))
    rank = target(seed)
    live = same_bytes(rank.buffers)
    stream = LandingStream(CPU)
    for task in rank.program.tasks:
        bucket = aligned(shift + task.nbytes)[shift:].copy_(a_bucket(task, task.index))
        expected = LandingCopies(task, rank.buffers).run_and_digest(bucket)
        copies = DeviceCopies(task, live, stream, shift=shift)
        for _ in range(2):
            done = copies.run_and_digest(bucket, {}) if verify else copies.run(bucket, {})
            assert done.event.query()
            assert done.result() == (expected if verify else 0)
        digest = DeviceDigest(task, stream, shift=shift).run(bucket).result()
        assert digest == digest_bucket(bucket, [landing.segment for landing in task.landings])
    assert len(live) == len(rank.buffers)
    for ours, theirs in zip(live, rank.buffers, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    rank.workers.close()


@given(seed=st.integers(0, 50), chosen=st.integers(0, 2**12))
@settings(max_examples=20)
def test_what_is_lent_is_read_where_it_lies(target, seed, chosen):
    rank = target(seed, ranks=1)
    live, stream = same_bytes(rank.buffers), LandingStream(CPU)
    for task in rank.program.tasks:
        bucket, lent = a_bucket(task, seed), {}
        expected = LandingCopies(task, rank.buffers).run_and_digest(bucket)
        for number, landing in enumerate(task.landings):
            at, nbytes = landing.segment.offset, landing.segment.nbytes
            if nbytes and chosen >> number & 1:
                lent[at] = aligned(nbytes).copy_(bucket[at : at + nbytes])
                bucket[at : at + nbytes] = 0x5A
        if len(lent) == len([landing for landing in task.landings if landing.segment.nbytes]):
            bucket = bucket[:0]
        assert DeviceCopies(task, live, stream).run_and_digest(bucket, lent).result() == expected
    for ours, theirs in zip(live, rank.buffers, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    rank.workers.close()


def test_a_tensor_that_differs_in_its_places_is_named(target, monkeypatch):
    rank = target(1)
    task = next(task for task in rank.program.tasks if any(len(landing.dests) > 1 for landing in task.landings))
    copies = DeviceCopies(task, rank.buffers, LandingStream(CPU))
    monkeypatch.setattr("syncline.stages.device_landing.read_landed", lambda limbs: (0, False))
    with pytest.raises(TransportError, match="t0"):
        copies.run_and_digest(a_bucket(task, 1), {}).result()
    rank.workers.close()


class Later:
    """An event that is done when it is told."""

    done = False

    def query(self):
        return self.done


async def test_the_end_of_launched_work_is_asked_for():
    watch, event, other = Watch(), Later(), Later()
    started = Signal()
    whole = follow(started, watch)
    started.set(both(Launched(event, lambda: 3, None), Launched(other, lambda: 2**128 - 1, None)))
    for _ in range(20):
        await asyncio.sleep(0)
    event.done = True
    for _ in range(20):
        await asyncio.sleep(0)
    assert not whole.done
    other.done = True
    async with asyncio.timeout(5):
        assert await whole == 2
    failed = Signal()
    failed.fail(TransportError("could not launch"))
    with pytest.raises(TransportError, match="could not launch"):
        await follow(failed, watch)


class Memory:
    """Something that a device works on."""


async def test_launched_work_holds_what_it_uses_to_its_end_whoever_goes_away():
    watch, event, memory = Watch(), Later(), Memory()
    held = weakref.ref(memory)
    started = Signal()
    waiting = asyncio.create_task(_waits(follow(started, watch)))
    started.set(Launched(event, lambda: 7, memory))
    del memory, started
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    ended = watch.close()
    for _ in range(20):
        await asyncio.sleep(0)
    gc.collect()
    assert held() is not None
    assert not ended.done
    event.done = True
    async with asyncio.timeout(5):
        await ended
    gc.collect()
    assert held() is None


async def _waits(signal):
    return await signal


@pytest.mark.parametrize("how", ["copy", "copy and digest", "digest"])
async def test_launches_hold_buckets_and_tables_until_they_are_done(target, how):
    rank, slow = target(3), SLOW.SlowDevice(free=False)
    stream, watch = SLOW.SlowLanding(slow), Watch()
    task = rank.program.tasks[0]
    bucket = a_bucket(task, 1)
    lent = {at: aligned(n).fill_(0) for at, n in [(lg.segment.offset, lg.segment.nbytes) for lg in task.landings[:1]] if n}
    copies, digest = DeviceCopies(task, rank.buffers, stream), DeviceDigest(task, stream)
    started = Signal()
    whole = follow(started, watch)
    if how == "digest":
        started.set(digest.run(bucket))
    else:
        started.set(copies.run(bucket, lent) if how == "copy" else copies.run_and_digest(bucket, lent))
    held = [weakref.ref(bucket), *(weakref.ref(memory) for memory in lent.values() if how != "digest")]
    kernels = digest._kernels if how == "digest" else copies._kernels[how != "copy"]
    held.append(weakref.ref(kernels))
    del bucket, lent, copies, digest, kernels, started
    await asyncio.sleep(0)
    watch.close()
    gc.collect()
    assert all(one() is not None for one in held)
    slow.done = float("inf")
    async with asyncio.timeout(5):
        await whole
    del whole
    gc.collect()
    assert all(one() is None for one in held)
    rank.workers.close()


async def test_a_launch_that_fails_midway_is_told_when_the_device_is_done():
    slow, watch = SLOW.SlowDevice(free=False), Watch()
    memory = Memory()
    held = weakref.ref(memory)

    def work(_limbs):
        raise MemoryError("no room for the second kernel")

    started = Signal()
    whole = follow(started, watch)
    started.set(then(SLOW.SlowLanding(slow).launch(work, lambda _: 0, memory), lambda: 1 / 0))
    del memory
    for _ in range(20):
        await asyncio.sleep(0)
    assert not whole.done
    assert held() is not None
    slow.done = float("inf")
    async with asyncio.timeout(5):
        with pytest.raises(MemoryError, match="second kernel"):
            await whole


@pytest.fixture
def uncollected():
    """No garbage collector: what is held by a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", ["copy", "kernels"])
async def test_work_that_has_failed_holds_nothing_when_that_was_told(uncollected, how):
    slow, watch, memory = SLOW.SlowDevice(free=False), Watch(), Memory()
    held, event = weakref.ref(memory), slow.event()
    event.record(None)

    def work(_limbs):
        raise MemoryError("no room for the first one")

    started, error = Signal(), failed(MemoryError("no room for the second one"))
    whole = follow(started, watch)
    if how == "copy":  # as `CudaIpc.copy` does
        started.set(both(Launched(event, lambda: 0, memory), error))
    else:  # of two errors the second is asked of nobody
        started.set(both(error, SLOW.SlowLanding(slow).launch(work, lambda _: 0, memory)))
    del memory, started
    await asyncio.sleep(0)
    assert held() is not None
    slow.done = float("inf")
    async with asyncio.timeout(5):
        with pytest.raises(MemoryError, match="second one") as raised:
            await whole
    assert raised.value is whole.error
    assert held() is None


async def test_a_closed_watch_leaves_nobody_waiting():
    watch = Watch()
    waiting = watch.until(lambda: False)
    broken = watch.until(lambda: 1 / 0 > 1)
    watch.close()
    with pytest.raises(TransportError, match="closed"):
        await waiting
    with pytest.raises(ZeroDivisionError):
        await broken
