"""CUDA IPC over what stands for CUDA: handles counted, events asked, what is lent, and processes of their own.

The stand-in is shared memory (`standins`): this tests our logic. CUDA itself is tested in tests/cuda.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import signal
import threading
import weakref
from types import SimpleNamespace

import msgspec
import pytest
import torch

from syncline.scheduler.programs import ReceiverId
from syncline.stages.cudart import CudaIpc
from syncline.stages.errors import TransportError
from syncline.stages.launched import DONE, Launched, both, failed
from syncline.stages.transports.base import AHEAD
from syncline.stages.transports.cuda_ipc import EVENTS, VERSION, CudaIpcOffer, CudaIpcSender
from syncline.stages.transports.cuda_ipc_receiver import _pairs
from syncline.stages.workers import Workers

MODES = ["streamed", "staged"]
each_mode = pytest.mark.parametrize("landing", MODES)


@each_mode
async def test_handles_are_opened_and_closed_once_per_buffer_not_once_per_push(world, landing):
    one = await world(seed=3, transport="cuda_ipc", landing=landing, targets=[1, 1], tensors=4, elements=500)
    source = one.sources[0]
    for version in range(1, 31):
        await one.push(version)
    exports = source.runtime.log.count("export")
    assert exports == source.sender.exported == 1  # the ring
    for target in one.targets.values():
        assert target.runtime.log == ["open"]
        assert target.half.handles == (1, 0)
    await one.close()
    for target in one.targets.values():
        assert target.runtime.log == ["open", "close"]
    assert source.runtime.log == ["export"]
    assert not source.sender._loans, "a closed sender looks into no ring"


@each_mode
async def test_the_source_lets_go_of_memory_after_the_receivers(world, landing):
    one = await world(seed=3, transport="cuda_ipc", landing=landing)
    (target,), source = one.targets.values(), one.sources[0]
    await one.push(1)
    held = target.half._owners[0].imports
    view = held.view(target.half._owners[0].offer.ring)
    closing = asyncio.create_task(source.sender.close())
    async with asyncio.timeout(10):
        while not held._over:
            await asyncio.sleep(0)
    assert not closing.done()
    assert source.sender.exported
    assert int(view[0]) >= 0
    del view
    await closing
    assert target.runtime.log == ["open", "close"]


@each_mode
async def test_a_receiver_looks_when_the_event_says_so(world, landing):
    one = await world(seed=21, transport="cuda_ipc", landing=landing)
    (target,), source = one.targets.values(), one.sources[0]
    source.fill(1)
    source.runtime.hold = True
    claim = source.sender.claim

    def launch(task):
        loan = claim(task)
        assert loan.done, "there is room"
        loan.result.launched()
        return loan

    source.sender.claim = launch
    await target.half.begin("a", timeout_s=30)
    receiving = asyncio.create_task(target.half.receive(target.program.tasks[0]))
    push = asyncio.create_task(source.push("a"))
    async with asyncio.timeout(10):
        while not source.runtime._held:
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not receiving.done()
    source.runtime.finish()
    assert (await receiving).numel() == target.program.tasks[0].nbytes
    push.cancel()
    await asyncio.gather(push, return_exceptions=True)


@each_mode
async def test_nothing_is_asked_of_the_device_for_a_bucket_that_nothing_was_launched_for(world, landing):
    """Two processes take turns on a device: a record of one waits until the other has done what it was given."""
    one = await world(seed=21, transport="cuda_ipc", landing=landing)
    source = one.sources[0]
    source.runtime.hold = True  # whatever is recorded is not done
    await one.push(1)
    assert not source.runtime._held


async def test_staged_buckets_are_copied_ahead_and_called_off_when_their_push_is_over(world, monkeypatch):
    """The device has the next copies before the end of the first was noticed."""
    one = await world(seed=21, transport="cuda_ipc", landing="staged", tensors=30, elements=900)
    (target,) = one.targets.values()
    half, tasks = target.half, [task.index for task in target.program.tasks]
    assert len(tasks) > AHEAD + 1
    begun, done, bring = [], asyncio.Event(), half._bring

    async def late(task):
        begun.append(task.index)
        await done.wait()
        return await bring(task)

    monkeypatch.setattr(half, "_bring", late)
    receiving = asyncio.create_task(half.receive(target.program.tasks[0]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == tasks[:AHEAD]
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    ahead = list(half._coming.values())
    assert len(ahead) == AHEAD - 1
    await half.end(False)
    assert not half._coming
    await asyncio.gather(*ahead, return_exceptions=True)
    assert all(task.cancelled() for task in ahead)
    done.set()
    begun.clear()
    await one.push(1)
    assert begun == tasks, "each once, in plan order"


async def test_a_copy_that_fails_keeps_nothing_of_where_it_went_and_came_from(world, monkeypatch):
    """Not even for as long as somebody has its error."""
    one = await world(seed=21, transport="cuda_ipc", landing="staged")
    (target,), source = one.targets.values(), one.sources[0]
    copied = []

    def copy(pairs):
        copied.extend(weakref.ref(memory) for pair in pairs for memory in pair)
        return both(Launched(DONE, lambda: 0, pairs), failed(MemoryError("no room")))

    monkeypatch.setattr(target.half._runtime, "copy", copy)
    source.fill(1)
    await target.half.begin("a", timeout_s=30)
    push = asyncio.create_task(source.push("a"))
    gc.disable()
    try:
        with pytest.raises(MemoryError, match="no room") as raised:
            await target.half.receive(target.program.tasks[0])
        await asyncio.sleep(0.01)
        assert raised.value.__traceback__ is not None
        assert copied
        assert [memory() for memory in copied[:2]] == [None, None]
    finally:
        gc.enable()
    push.cancel()
    await asyncio.gather(push, return_exceptions=True)


def test_what_lies_between_lent_segments_is_copied_in_one_piece():
    spans = [(0, 10), (256, 100), (512, 256), (768, 0), (768, 5), (1024, 7), (1280, 9)]
    landings = [SimpleNamespace(segment=SimpleNamespace(offset=at, nbytes=nbytes)) for at, nbytes in reversed(spans)]
    task = SimpleNamespace(landings=landings)
    bucket, place = torch.arange(1289) % 251, torch.full((1289,), -1)
    lent = {512: torch.full((256,), 300), 1280: torch.full((9,), 301)}
    pairs = _pairs(task, place, bucket, lent)
    assert len(pairs) == 4
    for destination, origin in pairs:
        destination.copy_(origin)
    for at, nbytes in spans:
        assert torch.equal(place[at : at + nbytes], lent.get(at, bucket[at : at + nbytes])[:nbytes])
    ((_, whole),) = _pairs(task, place, bucket, {})
    assert whole is bucket


async def test_more_buckets_than_events_wait_their_turn(world):
    one = await world(seed=22, transport="cuda_ipc", landing="streamed")
    source = one.sources[0]
    empty = dataclasses.replace(source.program.tasks[0], nbytes=0)  # takes an event, and no room in the ring
    loans = [source.sender.claim(dataclasses.replace(empty, index=index)) for index in range(EVENTS + 3)]
    assert [loan.done for loan in loans] == [True] * EVENTS + [False] * 3
    for loan in loans[:3]:
        loan.result.release()
    assert all(loan.done for loan in loans)
    for loan in loans[3:]:
        loan.result.release()


def lent_of(source, runtime):
    """Every segment that one copy of the rank's own memory makes up, with that memory made shareable first."""
    found = {}
    for task in source.program.tasks:
        whole = {}
        for segment in task.segments:
            (piece,) = [p for p in source.manifest.pieces if source.manifest.tensors[p.tensor].name == segment.name]
            if segment.nbytes and piece.box == segment.box:
                own = runtime.allocate(segment.nbytes)
                content = source.buffers[piece.buffer].as_strided(piece.box.shape, piece.strides, piece.offset)
                own.copy_(content.contiguous().reshape(-1).view(torch.uint8))
                whole[segment.offset] = own
        found[task.index] = whole
    return found


@each_mode
async def test_what_is_lent_is_copied_straight_out_of_the_sources_storage(world, landing):
    one = await world(
        connect=False, seed=24, transport="cuda_ipc", landing=landing, shapes=[[30, 7], [64], [5, 5, 5], [200]],
        bucket_bytes=1 << 14,
    )  # fmt: skip
    source, (receiver, target) = one.sources[0], next(iter(one.targets.items()))
    source.fill(1)
    lent = lent_of(source, source.runtime)
    first = source.program.tasks[0]
    assert set(lent[first.index]) == {segment.offset for segment in first.segments}
    assert len(first.segments) > 1
    del lent[first.index][first.segments[1].offset]  # one goes through the bucket
    source.sender = CudaIpcSender(
        program=source.program, landing=landing, ring_nbytes=1 << 16, runtime=source.runtime, workers=source.workers,
        on_lost=source._lost, lent=lent,
    )  # fmt: skip
    await one.connect()
    assert source.sender.exported == 1 + sum(len(segments) for segments in lent.values())
    await target.half.begin("a", timeout_s=30)
    await source.sender.begin("a", timeout_s=30)
    for task, taken in zip(source.program.tasks, target.program.tasks, strict=True):
        loan = await source.sender.claim(task)
        whole = len(lent[task.index]) == len(task.segments)
        assert loan.memory.numel() == (0 if whole else task.nbytes)
        loan.memory.fill_(0x77)
        sent = source.sender.send(task, loan.memory, [receiver])
        bucket = await target.half.receive(taken)
        got = {} if target.half.persistent else target.half.lent(taken)
        for landing_ in taken.landings:
            at, nbytes = landing_.segment.offset, landing_.segment.nbytes
            content = got[at] if at in got else bucket[at : at + nbytes]
            expected = lent[task.index].get(at, torch.full((nbytes,), 0x77, dtype=torch.uint8))
            assert torch.equal(content, expected)
        assert target.half.persistent or not sent[receiver].done  # until the receiver has its own copy, the source's is in use
        target.half.release(taken)
        await sent[receiver]
        loan.release()
        del bucket, got, content
    await target.half.end(True)


@each_mode
async def test_offers_of_another_kind_are_refused_before_anything_is_opened(world, landing):
    one = await world(connect=False, seed=25, transport="cuda_ipc", landing=landing)
    (receiver, target), source = next(iter(one.targets.items())), one.sources[0]
    good = msgspec.msgpack.decode((await source.sender.offer([receiver]))[0], type=CudaIpcOffer)
    other = "staged" if landing == "streamed" else "streamed"
    for change, error in (
        ({"version": VERSION + 1}, f"version {VERSION + 1}"),
        ({"mode": other}, other),
        ({"path": "/nowhere"}, "cannot be reached"),
    ):
        wrong = msgspec.msgpack.encode(msgspec.structs.replace(good, **change))
        with pytest.raises(TransportError, match=error):
            await target.link({0: wrong}, timeout_s=5)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(good))
    for key, value in (("events", [{"device": b"", "handle": b""}]), ("ring", [0, 0]), ("allocations", 3), ("more", 1)):
        with pytest.raises(TransportError, match="is not a"):
            await target.link({0: msgspec.msgpack.encode({**raw, key: value})}, timeout_s=5)
    assert target.runtime.log == []


async def test_places_beyond_what_was_shown_are_refused(world):
    one = await world(connect=False, seed=25, transport="cuda_ipc", landing="streamed")
    (receiver, target), source = next(iter(one.targets.items())), one.sources[0]
    good = msgspec.msgpack.decode((await source.sender.offer([receiver]))[0], type=CudaIpcOffer)
    linking = asyncio.create_task(source.sender.link([receiver], timeout_s=5))
    wrong = msgspec.structs.replace(good, ring=msgspec.structs.replace(good.ring, nbytes=2**40))
    with pytest.raises(TransportError, match="beyond"):
        await target.link({0: msgspec.msgpack.encode(wrong)}, timeout_s=5)
    assert set(await linking) == {receiver}
    assert target.runtime.log == ["open", "close"]


def test_mapped_is_refused_with_the_reason(world, peer, standins):
    spec = peer.make_spec(seed=1, transport="cuda_ipc", landing="streamed")
    with pytest.raises(TransportError, match="outlives its process"):
        CudaIpcSender(
            program=peer.make_plan(spec).source_program(0), landing="mapped", ring_nbytes=1, runtime=standins.SharedMemoryIpc(),
            workers=None, on_lost=lambda *_: None,
        )  # fmt: skip


@pytest.fixture
def workers():
    """Threads, with one to spare."""
    made = Workers(2)
    yield made
    made.close()


@pytest.fixture
def runtime(standins):
    """A `Counting` one."""
    made = Counting(standins.SharedMemoryIpc())
    yield made
    made.free()


class Counting:
    """A runtime that remembers what it has allocated, and exports when ``go_on`` is set: it is at first."""

    def __init__(self, runtime):
        self._runtime = runtime
        self.made = []
        self.exporting, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def allocate(self, nbytes):
        memory = self._runtime.allocate(nbytes)
        self.made.append(weakref.ref(memory))
        return memory

    async def all_gone(self):
        """The thread that has made it may hold it for a moment longer than its result is known."""
        async with asyncio.timeout(20):
            while any(memory() is not None for memory in self.made):
                await asyncio.sleep(0.01)

    def export(self, address):
        self.exporting.set()
        assert self.go_on.wait(20)
        return self._runtime.export(address)


@pytest.fixture
def make_sender(peer, runtime, workers, doorways):
    """``make_sender(**options)``: a sender that nobody is linked with."""
    program = peer.make_plan(peer.make_spec(seed=1, transport="cuda_ipc", landing="streamed")).source_program(0)
    return lambda **options: CudaIpcSender(
        program=program, landing="streamed", ring_nbytes=1 << 16, runtime=runtime, workers=workers, on_lost=lambda *_: None,
        directory=doorways, **options,
    )  # fmt: skip


async def test_an_offer_called_off_while_the_ring_is_made_leaves_one_ring_to_the_next(make_sender, runtime, workers):
    """Receivers that are shown one ring, while buckets are assembled in another, would land what happens to lie there."""
    sender, receiver = make_sender(), ReceiverId(0, 0)
    runtime.go_on.clear()
    first = asyncio.create_task(sender.offer([receiver]))
    await asyncio.to_thread(runtime.exporting.wait, 20)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(sender.offer([receiver]))
    await asyncio.sleep(0.05)
    runtime.go_on.set()
    offer = msgspec.msgpack.decode((await second)[0], type=CudaIpcOffer)
    await asyncio.to_thread(workers.close)  # whatever else was given to them is done, too
    assert len(runtime.made) == sender.exported == len(offer.allocations) == 1
    base, _ = runtime.allocation_of(sender.ring._memory)
    assert offer.allocations[offer.ring.allocation].handle == runtime.export(base)
    await sender.close()


@pytest.mark.parametrize("where", ["allocation_of", "export", "make_event"])
async def test_an_offer_that_fails_leaves_nothing_and_may_be_made_again(make_sender, runtime, monkeypatch, where):
    sender, receiver = make_sender(), ReceiverId(0, 0)

    def fails(*_):
        raise TransportError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(runtime, where, fails, raising=False)
        for _ in range(3):
            with pytest.raises(TransportError, match="no room"):
                await sender.offer([receiver])
    await runtime.all_gone()
    assert (sender.exported, sender.ring) == (0, None)
    await sender.offer([receiver])
    assert sender.exported == 1
    await sender.close()


async def test_what_is_lent_is_exported_before_a_ring_is_allocated(make_sender, runtime):
    alien = {0: {0: torch.zeros(64, dtype=torch.uint8)}}
    sender = make_sender(lent=alien)
    with pytest.raises(TransportError, match="cannot be shared"):
        await sender.offer([ReceiverId(0, 0)])
    assert runtime.made == []
    await sender.close()


async def test_a_sender_closed_while_the_ring_is_made_lets_go_of_it(make_sender, runtime):
    sender = make_sender()
    runtime.go_on.clear()
    offering = asyncio.create_task(sender.offer([ReceiverId(0, 0)]))
    await asyncio.to_thread(runtime.exporting.wait, 20)
    await sender.close()
    runtime.go_on.set()
    with pytest.raises(TransportError, match="closed"):
        await offering
    assert sender.ring is None
    assert len(runtime.made) == 1
    await runtime.all_gone()


@each_mode
async def test_between_processes_many_pushes_hold_nothing_more(processes, landing):
    one = await processes(seed=5, transport="cuda_ipc", landing=landing, sources=2, targets=[2, 1])
    await one.push(1)
    before = [await process.resources() for process in one.started]
    for version in range(2, 12):
        await one.push(version)
    assert [await process.resources() for process in one.started] == before


@each_mode
async def test_a_killed_receiver_is_given_up_and_comes_back(processes, landing):
    one = await processes(seed=6, transport="cuda_ipc", landing=landing, targets=[1, 1])
    gone, stays = one.receivers
    await one.push(1)
    one.targets[gone].signal(signal.SIGKILL)
    push_id = await one.begin(2, [stays])
    sent, got = await asyncio.gather(one.sources[0].push(push_id=push_id), one.targets[stays].receive())
    assert one.agrees(stays, [sent], got)
    await one.targets[stays].commit()
    await one.sources[0].end(committed=[stays])
    await one.restart(gone)
    await one.connect([gone])
    await one.push(3)


async def test_a_stopped_receiver_never_sees_another_push_as_its_own(processes):
    """It is given up while it is stopped; the ring is used again; when it goes on it must not take what it finds."""
    one = await processes(seed=7, transport="cuda_ipc", landing="streamed", targets=[1, 1], elements=4000, watermark=16384)
    stopped, stays = one.receivers
    await one.push(1)
    push_id = await one.begin(2)
    receiving = asyncio.create_task(one.targets[stopped].receive(hold_before=(await one.targets[stopped].tasks())[1]))
    other = asyncio.create_task(one.targets[stays].receive())
    push = asyncio.create_task(one.sources[0].push(push_id=push_id))
    await one.targets[stopped].await_held()
    one.targets[stopped].signal(signal.SIGSTOP)
    await one.sources[0].drop(receivers=[stopped])
    sent, got = await asyncio.gather(push, other)
    assert one.agrees(stays, [sent], got)
    one.targets[stopped].signal(signal.SIGCONT)
    await one.targets[stopped].release_hold()
    assert "TransportError" in (await receiving)["error"]


@pytest.mark.parametrize("home", [0, 1, None])
def test_memory_of_a_neighbouring_gpu_is_looked_into_and_never_copied(monkeypatch, home):
    """torch makes a copy of memory that lies on another device than it is told: every push would land what was there once."""
    asked = []

    def as_tensor(span, *, device):
        address, _ = span.__cuda_array_interface__["data"]
        asked.append(device.index)
        return SimpleNamespace(device=device, data_ptr=lambda: address if device.index == home else 7)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    runtime = object.__new__(CudaIpc)
    runtime.device = torch.device("cuda", 0)
    if home is None:
        with pytest.raises(TransportError, match="choose transport 'nccl'"):
            runtime.view(object(), 0x1000, 64)
        return
    view = runtime.view(object(), 0x1000, 64)
    assert view.device.index == asked[-1] == home
    assert view.data_ptr() == 0x1000
