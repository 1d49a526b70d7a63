"""Forward passes and loaders on a GPU, whose calls return before the device has done what they launched.

Marks of a slow device stand for it; on a GPU: the tests marked ``cuda``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch

from syncline.engine.errors import NotServing
from syncline.engine.gate import Gate
from syncline.stages.device_marks import DeviceMarks

PATIENCE_S = 20.0


class Marks:
    """Makes marks that are done, in the order in which they were made, when `done` says how many."""

    def __init__(self):
        self.made, self.done, self.threads = 0, 0, []

    def __call__(self):
        self.made += 1
        self.threads.append(threading.get_ident())
        number = self.made
        return lambda: number <= self.done


async def turns(count=30):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_pause_waits_for_what_passes_have_launched():
    marks = Marks()
    gate = Gate(version=1, mark=marks)

    def forward():
        with gate.forward():
            pass

    for _ in range(2):
        thread = threading.Thread(target=forward)
        thread.start()
        await asyncio.to_thread(thread.join)
    async with gate.forward():
        pass
    assert marks.made == 3
    assert marks.threads[2] == threading.get_ident(), "the mark is made on the thread that leaves"
    assert gate.inside == 0
    pausing = asyncio.create_task(gate.pause())
    for marks.done in (0, 1, 2):
        await turns()
        assert not pausing.done(), f"{3 - marks.done} passes run on the device"
        with pytest.raises(NotServing):
            gate.enter(0.0)
    marks.done = 3
    await asyncio.wait_for(pausing, PATIENCE_S)


async def test_a_pass_that_raises_may_have_launched_something_too():
    marks = Marks()
    gate = Gate(version=1, mark=marks)
    with pytest.raises(ZeroDivisionError), gate.forward():
        raise ZeroDivisionError
    pausing = asyncio.create_task(gate.pause())
    await turns()
    assert not pausing.done()
    marks.done = 1
    await asyncio.wait_for(pausing, PATIENCE_S)


async def test_a_pause_that_is_given_up_leaves_the_next_one_to_wait():
    marks = Marks()
    gate = Gate(version=1, mark=marks)
    with gate.forward():
        pass
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.pause(), 0.01)
    await gate.resume(1)
    with gate.forward() as version:
        assert version == 1
    marks.done = 1
    pausing = asyncio.create_task(gate.pause())
    await turns()
    assert not pausing.done()
    marks.done = 2
    await asyncio.wait_for(pausing, PATIENCE_S)


async def test_a_mark_that_cannot_be_made_or_asked_for_is_told_and_lets_nobody_in_for_ever():
    def broken():
        raise RuntimeError("the device is gone")

    gate = Gate(version=1, mark=broken)
    with pytest.raises(RuntimeError, match="gone"), gate.forward():
        pass
    assert gate.inside == 0
    gate = Gate(version=1, mark=lambda: broken)
    with pytest.raises(RuntimeError, match="gone"), gate.forward():
        pass
    with pytest.raises(RuntimeError, match="gone"):
        await gate.pause()


def test_marks_that_are_done_do_not_add_up():
    marks = Marks()
    gate = Gate(version=1, mark=marks)
    for _ in range(1000):
        with gate.forward():
            marks.done = marks.made
    assert len(gate._launched) <= 1


@pytest.mark.parametrize("landing", ["staged", "streamed", "mapped"])
async def test_weights_change_when_passes_are_over_and_are_served_when_they_are_written(targets, until, monkeypatch, landing):
    """Both ways: no commit while the device runs a pass, no pass while the device runs what the loader launched."""
    marks = Marks()
    monkeypatch.setattr(DeviceMarks, "__call__", lambda _self: marks())
    target = await targets(version=1, landing=landing)
    gate, source = target.receivers[0].gate, target.source

    async def push():
        assert (await source.prepare(2)).status == "ready"
        target.deliver(2)
        return await source.complete(2)

    with gate.forward() as version:
        assert version == 1
    pushing = asyncio.create_task(push())
    await until(lambda: gate.version is None)
    await turns()
    assert target.hold(1), "a pass of the old version is on the device"
    assert not pushing.done()
    marks.done = 1
    await until(lambda: marks.made == 2)  # behind what the loader has launched
    await turns()
    assert target.hold(2)
    assert gate.version is None, "the device still writes"
    assert not pushing.done()
    marks.done = 2
    assert (await asyncio.wait_for(pushing, PATIENCE_S)).success
    with gate.forward() as version:
        assert version == 2


async def test_a_device_that_never_gets_there_costs_one_push(targets, until, monkeypatch):
    marks = Marks()
    monkeypatch.setattr(DeviceMarks, "__call__", lambda _self: marks())
    target = await targets(version=1)
    with target.receivers[0].gate.forward():
        pass
    assert (await target.source.prepare(2)).status == "ready"
    target.deliver(2)
    result = await target.source.complete(2, timeout_s=0.3)
    assert not result.success
    assert target.hold(1)
    await until(lambda: target.receivers[0].gate.version == 1)


# marks


class Event:
    def __init__(self):
        self.stream = None

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.stream in DONE


DONE = set()


@pytest.fixture
def cuda(monkeypatch):
    """What marks need of torch.cuda, with two devices; the second is current."""
    DONE.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Event)


def test_marks_are_made_where_the_weights_are(cuda):
    marks = DeviceMarks()
    mark = marks()  # nothing is known yet: where this thread is
    assert not mark()
    DONE.add("stream of cuda:1")
    assert mark()
    marks.of(["cpu", "cuda:0", "cuda:1"])
    mark = marks()
    assert not mark()
    DONE.add("stream of cuda:0")
    assert mark()
    marks.of(["cpu", "meta"])
    assert marks() is None


def test_without_a_gpu_in_use_there_is_nothing_to_mark():
    if torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    assert DeviceMarks()() is None


@pytest.mark.cuda
async def test_a_gpu_that_still_runs_a_pass_keeps_the_gate_from_pausing():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    marks = DeviceMarks()
    marks.of(["cuda:0"])
    gate = Gate(version=1, mark=marks)
    weights = torch.zeros(1 << 20, device="cuda:0")
    with gate.forward():
        torch.cuda._sleep(1_000_000_000)
        seen = weights.clone()
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query(), "the pass is on the device"
    await asyncio.wait_for(gate.pause(), PATIENCE_S)
    assert behind.query()
    with torch.cuda.stream(torch.cuda.Stream()):  # not ordered behind the pass
        weights.fill_(1)
    assert not seen.any()
