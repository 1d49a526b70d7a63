"""`h2d`, `prepare` and `send` on real gloo ranks in one process: accounting, failures, and who waits for whom."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from syncline.scheduler.programs import ReceiverId, SourceTask
from syncline.stages.buffers import BufferPool
from syncline.stages.completions import Signal
from syncline.stages.errors import TransportError
from syncline.stages.send import SendStage
from syncline.stages.task_memory import Layout, TaskMemory, private_capacity


@pytest.mark.parametrize("sources", [2, 3, 4])
@pytest.mark.parametrize("landing", ["streamed", "staged"])
async def test_shards_are_gathered_within_the_watermark(world, sources, landing):
    one = await world(
        seed=31 + sources, transport="gloo", landing=landing, sources=sources, targets=[1], cast=True, tensors=10,
        elements=2000, bucket_bytes=2048, watermark=8192,
    )  # fmt: skip
    for version in (1, 2):
        await one.push(version)
        for target in one.targets.values():
            assert target.wrong(version) == []
    for source in one.sources:
        accounted = max((task.tmp_bytes for task in source.program.tasks), default=0)
        assert source.pool.in_use == 0
        assert source.pool.capacity <= max(8192, max(accounted, 0) + 256 * 8)


async def test_every_rank_knows_its_part_of_each_receivers_digest(world):
    one = await world(seed=41, transport="gloo", landing="staged", sources=3, targets=[2])
    await one.push(1)  # compares the sum of the ranks' parts with what each receiver computed
    parts = [source.prepare.digests() for source in one.sources]
    assert sum(len(part) for part in parts) > len(one.targets)
    for source in one.sources:
        owned = [task for task in source.program.tasks if task.owner == source.rank]
        assert bool(owned) == bool(source.prepare.content_digest())


async def test_a_prepare_that_failed_ends_only_when_nothing_uses_its_memory(world):
    one = await world(seed=42, transport="gloo", landing="staged", sources=2, targets=[1], elements=20_000)
    owner = one.sources[0]
    task = next(task for task in owner.program.tasks if task.owner == 0 and task.receives)
    go = threading.Event()
    for _ in range(2):
        blocked = owner.workers.submit(go.wait, 20)
    owner.prepare.begin(1)
    started = owner.prepare.start(task.index)
    await asyncio.sleep(0)
    await owner.communicator.close()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not started.done  # its local copies are still to come
    go.set()
    with pytest.raises(TransportError):
        await started
    await blocked
    assert owner.memory.in_flight == 1
    owner.memory.release(1, task.index)
    assert owner.pool.in_use == 0


async def test_a_contributor_is_done_when_its_messages_have_left(world):
    one = await world(seed=42, transport="gloo", landing="staged", sources=2, targets=[1], elements=20_000)
    owner, helper = one.sources
    task = next(task for task in helper.program.tasks if task.owner == 0)
    helper.prepare.begin(1)
    owner.prepare.begin(1)
    contributed = helper.prepare.start(task.index)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not contributed.done  # nobody has asked for them
    assembled = owner.prepare.start(task.index)
    await contributed
    await assembled
    for source in one.sources:
        source.memory.release(1, task.index)
        assert source.memory.in_flight == 0


async def test_a_task_that_waited_into_the_next_push_touches_nothing_of_it(world):
    one = await world(seed=44, transport="shm", landing="staged", sources=2, targets=[1], elements=20_000)
    owner = one.sources[0]
    task = next(task for task in owner.program.tasks if task.owner == 0 and task.receives)
    hog = await owner.pool.acquire(owner.pool.capacity)
    owner.prepare.begin(1)
    late = owner.prepare.start(task.index)
    await asyncio.sleep(0)
    owner.prepare.begin(2)
    hog.release()
    with pytest.raises(TransportError, match="ended before there was memory"):
        await late
    owner.memory.release(1, task.index)
    assert owner.pool.in_use == 0


async def test_messages_without_a_communicator_are_an_error(world):
    one = await world(seed=42, transport="gloo", landing="staged", sources=2, targets=[1], elements=20_000)
    owner = one.sources[0]
    owner.prepare.communicator = None
    task = next(task for task in owner.program.tasks if task.owner == 0 and task.receives)
    with pytest.raises(TransportError, match="no communicator"):
        await owner.prepare.start(task.index)
    owner.memory.release(-1, task.index)


async def test_h2d_has_nothing_to_do_without_mapped_files(world):
    one = await world(seed=43, transport="shm", landing="staged", files=True, sources=2)
    for source in one.sources:
        for task in source.program.tasks:
            started = source.h2d.start(task.index)
            assert (started is None) == (task.file_bytes == 0)
            if started is not None:
                await started
            source.memory.release(-1, task.index)


# ------------------------------------------------------------------------------------------------------ task memory


class FakeSender:
    """Hands out memory of its own, or none; remembers what was sent."""

    kind = "fake"

    def __init__(self, in_place=False):
        self.in_place = in_place
        self.claims = []
        self.sent = {}
        self.dropped = []

    def claim(self, task):
        signal = Signal()
        self.claims.append((task.index, signal))
        return signal

    def send(self, task, bucket, receivers, lent):
        for receiver in receivers:
            self.sent[task.index, receiver] = Signal()
        return {receiver: self.sent[task.index, receiver] for receiver in receivers}

    def drop(self, receivers):
        self.dropped += receivers
        for (_, receiver), signal in self.sent.items():
            if receiver in receivers:
                signal.fail(TransportError("dropped"))


A, B = ReceiverId(0, 0), ReceiverId(1, 0)


def source_task(index=0, nbytes=100, receivers=(A, B)):
    return SourceTask(index=index, group=0, owner=0, nbytes=nbytes, tmp_bytes=nbytes, landing_offset=0, receivers=receivers)


async def test_a_bucket_lies_where_its_transport_needs_it():
    here, anywhere = FakeSender(in_place=True), FakeSender()
    pool = BufferPool.private(4096)
    memory = TaskMemory(pool, {A: anywhere, B: here})
    layout = Layout.of(10, (20, -1, 30), 100)
    holding = await memory.claim((1, 0), source_task(), layout)
    claim = asyncio.create_task(memory.claim_bucket((1, 0), source_task()))
    await asyncio.sleep(0)
    ((_, signal),) = here.claims
    assert pool.in_use == layout.without_bucket == 256 * 3
    loan = await BufferPool.private(256).acquire(100)
    signal.set(loan)
    await claim
    assert memory.bucket((1, 0)) is loan.memory
    assert [holding.message(i, n).numel() for i, n in ((0, 20), (2, 30))] == [20, 30]
    assert holding.files().numel() == 10
    memory.release(1, 0)
    memory.release(1, 0)
    assert pool.in_use == 0
    holding = await memory.claim((1, 1), source_task(1, receivers=(A,)), layout)
    await memory.claim_bucket((1, 1), source_task(1, receivers=(A,)))
    assert holding.bucket.numel() == 100
    assert pool.in_use == layout.with_bucket == 256 * 4
    memory.release(1, 1)


async def test_memory_that_comes_after_its_task_was_released_is_given_back():
    pool = BufferPool.private(256)
    held = await pool.acquire(256)
    memory = TaskMemory(pool, {A: FakeSender()})
    claim = asyncio.create_task(memory.claim((1, 0), source_task(), Layout.of(5, (), 0)))
    await asyncio.sleep(0)
    memory.release(1, 0)
    held.release()
    await claim
    await asyncio.sleep(0)
    assert pool.in_use == 0


def test_private_memory_counts_buckets_only_where_they_lie_in_it():
    needs = [(source_task(i, receivers=(A,) if i % 2 else (B,)), Layout.of(0, (), 1000)) for i in range(4)]
    assert private_capacity(needs, 10_000, in_place=()) == 4 * 1024
    assert private_capacity(needs, 10_000, in_place=[A]) == 2 * 1024
    assert private_capacity(needs, 10_000, in_place=[A, B]) == 0
    assert private_capacity(needs, 1500, in_place=()) == 1500
    assert private_capacity(needs, 10, in_place=()) == 1024


# ------------------------------------------------------------------------------------------------------------- send


@pytest.fixture
async def sending():
    sender, errors = FakeSender(), []
    tasks = {index: source_task(index) for index in range(3)}
    memory = TaskMemory(BufferPool.private(4096), dict.fromkeys((A, B), sender))
    for index, task in tasks.items():
        await memory.claim((1, index), task, Layout.of(0, (), 100))
        await memory.claim_bucket((1, index), task)
    stage = SendStage(
        tasks=tasks, memory=memory, routes={A: sender, B: sender}, on_receiver_error=lambda *error: errors.append(error)
    )
    stage.begin(1, [A, B])
    return stage, sender, errors


async def test_a_send_is_done_when_every_receiver_is(sending):
    stage, sender, errors = sending
    completion = stage.start(0)
    sender.sent[0, A].set()
    assert not completion.done
    sender.sent[0, B].set()
    await completion
    assert stage.sent_bytes == 200
    assert errors == []


def head_of(stage):
    head = stage.head()
    return None if head is None else (head[0], set(head[1]))


async def test_the_head_is_the_first_task_in_plan_order_that_has_not_gone_out(sending):
    stage, sender, _ = sending
    assert head_of(stage) == (0, set())  # nobody is waited for: it is not being sent yet
    later = stage.start(1)
    assert head_of(stage) == (0, set())
    stage.start(0)
    assert head_of(stage) == (0, {A, B})
    sender.sent[1, A].set()
    sender.sent[1, B].set()
    await later
    sender.sent[0, A].set()
    assert head_of(stage) == (0, {B})
    stage.drop([B])
    assert head_of(stage) == (2, set())
    stage.drop([A])
    assert head_of(stage) is None
    stage.end()
    assert head_of(stage) is None


async def test_the_head_says_since_when_a_receiver_has_taken_nothing(sending, monkeypatch):
    stage, sender, _ = sending
    now = itertools.count(100.0)
    monkeypatch.setattr("syncline.stages.send.time.monotonic", lambda: next(now))
    stage.start(0)
    assert stage.head() == (0, {A: 100.0, B: 101.0})
    stage.start(1)
    sender.sent[1, B].set()  # out of order: it takes something all the same
    assert stage.head() == (0, {A: 100.0, B: 102.0})


async def test_a_receivers_error_is_told_once_and_waits_for_the_drop(sending):
    stage, sender, errors = sending
    completions = [stage.start(0), stage.start(1)]
    for index in (0, 1):
        sender.sent[index, B].set()
        sender.sent[index, A].fail(TransportError("gone"))
    assert [(receiver, str(error)) for receiver, error in errors] == [(A, "gone")]
    assert not any(completion.done for completion in completions)
    stage.drop([A])
    for completion in completions:
        await completion
    stage.drop([A])
    assert stage.start(2) is not None
    assert (2, A) not in sender.sent


async def test_dropping_ends_what_is_under_way(sending):
    stage, sender, errors = sending
    completion = stage.start(0)
    stage.drop([A, B])
    await completion
    assert errors == []
    assert stage.start(1) is None
    assert stage.sent_bytes == 0
    assert sender.dropped == [A, B]


async def test_the_end_of_a_push_ends_what_waits_for_a_drop(sending):
    stage, sender, _ = sending
    completion = stage.start(0)
    sender.sent[0, A].fail(TransportError("gone"))
    sender.sent[0, B].set()
    stage.end()
    await completion


async def test_a_receiver_without_a_transport_is_an_error_of_that_receiver():
    errors = []
    memory = TaskMemory(BufferPool.private(4096), {})
    await memory.claim((1, 0), source_task(), Layout.of(0, (), 100))
    await memory.claim_bucket((1, 0), source_task())
    stage = SendStage(
        tasks={0: source_task()}, memory=memory, routes={}, on_receiver_error=lambda receiver, _: errors.append(receiver)
    )
    stage.begin(1, [A])
    completion = stage.start(0)
    assert errors == [A]
    stage.drop([A])
    await completion
