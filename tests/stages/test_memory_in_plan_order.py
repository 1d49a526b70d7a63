"""No task waits for memory that is held by tasks which are sent after it, whatever each of them needs of which pool.

The machine, `TaskMemory` and `CudaIpcSender` are the real ones; the device is not, and what is in flight ends in any order.
How the watermark is divided among the pools is not relied on: each has room for the largest task, and as much more as comes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from syncline.scheduler.events import PushStarted, ReleaseBuffers, StageDone, StartStage, TaskSpec
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.programs import ReceiverId
from syncline.scheduler.schedule import Schedule
from syncline.stages.buffers import BufferPool
from syncline.stages.task_memory import Layout, TaskMemory
from syncline.stages.transports.cuda_ipc import EVENTS, CudaIpcSender
from syncline.stages.workers import Workers

RECEIVER = ReceiverId(0, 0)
UNIT = 256
HERE = Path(__file__).parent


def _standins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("standins_of_memory", HERE / "standins.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


STANDINS = _standins()


class Task(SimpleNamespace):
    """As much of a recipe, and of its task, as is looked at: in units of memory."""

    def __init__(self, index: int, bucket: int, beside: int, *, lent_whole: bool, uploads: bool) -> None:
        self.lent_whole = lent_whole
        self.stages = ("h2d", "prepare", "send") if uploads else ("prepare", "send")
        segment = SimpleNamespace(offset=0, nbytes=bucket * UNIT)
        self.task = SimpleNamespace(index=index, owner=0, nbytes=bucket * UNIT, receivers=(RECEIVER,), segments=[segment])
        self.layout = Layout.of(0, (beside * UNIT,) if beside else (), bucket * UNIT)
        self.tmp_nbytes = self.layout.without_bucket if lent_whole else self.layout.with_bucket


class World:
    """One source rank that pushes to one receiver over CUDA IPC. ``ring`` and ``private``: bytes of the pools."""

    def __init__(self, tasks: list[Task], ring: int, private: int, limits: Limits) -> None:
        self.tasks = tasks
        self.runtime = STANDINS.SharedMemoryIpc()
        self.workers = Workers(1)
        self.sender = CudaIpcSender(
            program=SimpleNamespace(tasks=[one.task for one in tasks], rank=0), landing="staged", ring_nbytes=ring,
            runtime=self.runtime, workers=self.workers, on_lost=lambda *_: None,
            lent={one.task.index: {0: self.runtime.allocate(UNIT)} for one in tasks if one.lent_whole},
        )  # fmt: skip
        self.memory = TaskMemory(BufferPool.private(private), {RECEIVER: self.sender})
        self.machine = PipelineMachine(limits)
        self.in_flight: list[tuple[str, int]] = []
        self.running: set[asyncio.Task[None]] = set()

    async def push(self, choose) -> None:
        """``choose`` says which of several things in flight ends next."""
        await self.sender.offer([RECEIVER])
        specs = tuple(
            TaskSpec(index=index, group=0, tmp_bytes=one.tmp_nbytes, stages=one.stages, targets=frozenset({0}))
            for index, one in enumerate(self.tasks)
        )
        self._feed(PushStarted(now=0.0, push_id=1, schedule=Schedule.of(specs, [0]), targets=frozenset({0})))
        while True:
            for _ in range(8):  # everything that can go on has
                await asyncio.sleep(0)
            if not self.in_flight:
                break
            stage, task = self.in_flight.pop(choose(len(self.in_flight)))
            self._feed(StageDone(now=0.0, push_id=1, task=task, stage=stage))
        push = self.machine.push
        stuck = {index: (record.state.value, record.stage) for index, record in push.active.items()} if push else {}
        assert len(push.done) == len(self.tasks), f"nothing is in flight, and tasks wait for each other: {stuck}"

    def close(self) -> None:
        self.workers.close()
        self.runtime.free()

    def _feed(self, event) -> None:
        for order in self.machine.handle(event):
            if isinstance(order, StartStage):
                running = asyncio.create_task(self._run(order.stage, order.task))
                self.running.add(running)
                running.add_done_callback(self.running.discard)
            elif isinstance(order, ReleaseBuffers):
                self.memory.release(1, order.task)

    async def _run(self, stage: str, index: int) -> None:
        one, key = self.tasks[index], (1, index)
        if stage != "send":
            await self.memory.claim(key, one.task, one.layout)
        if stage == "prepare":
            await self.memory.claim_bucket(key, one.task)
        self.in_flight.append((stage, index))


def tasks_of(shapes: list[tuple[int, int, bool, bool]]) -> list[Task]:
    return [
        Task(index, bucket, beside, lent_whole=lent, uploads=uploads and beside > 0)
        for index, (bucket, beside, lent, uploads) in enumerate(shapes)
    ]


def run(
    shapes: list[tuple[int, int, bool, bool]], choose: Callable[[int], int], *, watermark: int = 1000, ring: int = 0,
    private: int = 0, **limits: int,
) -> None:  # fmt: skip
    """``ring``, ``private``: units beyond what the largest task needs; ``watermark`` beyond the largest of both."""
    tasks = tasks_of(shapes)
    bucket = max((one.task.nbytes for one in tasks if not one.lent_whole), default=0)
    beside = max(one.layout.without_bucket for one in tasks)
    most = bucket + beside + watermark * UNIT

    async def whole() -> None:
        world = World(tasks, bucket + ring * UNIT, beside + private * UNIT, Limits(max_tmp_bytes=most, **limits))
        try:
            await world.push(choose)
        finally:
            for running in world.running:
                running.cancel()
            await asyncio.gather(*world.running, return_exceptions=True)
            await world.sender.close(0.0)
            world.close()

    asyncio.run(whole())


def any_shape(random: Random) -> tuple[int, int, bool, bool]:
    """Of a task that needs a bucket only; one that needs memory beside it, from its ``h2d`` on or not; one that is lent."""
    bucket, beside = random.randint(1, 2), random.randint(1, 2)
    return random.choice(
        [(bucket, 0, False, False), (bucket, beside, False, random.random() < 0.5), (bucket, beside, True, False)]
    )


@given(random=st.randoms(use_true_random=True))
@settings(max_examples=150)
def test_every_push_ends_whatever_ends_first(random: Random) -> None:
    """All choices have the same chance: small examples, which Hypothesis likes, have room for everybody."""
    shapes = [any_shape(random) for _ in range(random.randint(1, 40))]
    limits = {stage: random.randint(1, 4) for stage in ("h2d", "prepare", "send")}
    room = {"watermark": random.choice([0, 4, 1000]), "ring": random.choice([0, 3]), "private": random.choice([0, 100])}
    run(shapes, random.randrange, **room, **limits)


@pytest.mark.parametrize("late", ["first", "last"])
def test_tasks_that_are_lent_hold_no_event_that_one_before_them_needs(late: str) -> None:
    """Two buckets, and a ring with room for one; the many behind them need none, and are ready before the second is."""
    run([(1, 0, False, False)] * 2 + [(1, 1, True, False)] * 2 * EVENTS, choose(late), private=100, prepare=2, send=1)


@pytest.mark.parametrize("late", ["first", "last"])
def test_a_task_that_needs_memory_beside_its_bucket_is_not_overtaken(late: str) -> None:
    """The second waits for what the first has beside its bucket; those behind need a bucket only, of a ring with one."""
    run([(1, 1, False, False)] * 2 + [(1, 0, False, False)] * 4, choose(late), prepare=3, send=1)


def choose(late: str) -> Callable[[int], int]:
    """Of what is in flight, what began last ends first, or the other way round."""
    return lambda count: 0 if late == "last" else count - 1
