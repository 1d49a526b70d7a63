"""Whoever is cancelled, wherever he waits, leaves nothing behind: no thread, no descriptor, no task."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ClosedError


def ours():
    """Threads and descriptors."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline")]
    return sorted(names), len(list(Path("/proc/self/fd").iterdir()))


async def nothing_is_left(before, what):
    """What is about to end gets time for it: a thread on its way out, a connection that the loop has yet to drop."""
    for _ in range(300):
        (threads, files), tasks = ours(), asyncio.all_tasks() - {asyncio.current_task()}
        if threads == before[0] and files <= before[1] and not tasks:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{what}: threads {threads}, descriptors {files} of {before[1]}, tasks {tasks}")


def engine_of(receiver, transport):
    return TransferEngine(
        source=ModuleSource(nn.Linear(8, 8), world_size=1), targets=[RemoteTarget(receiver.address)],
        config=TransferConfig(trace=False, transport=transport),
    )  # fmt: skip


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("what", ["start", "connect", "push", "close", "close of the receiver"])
async def test_cancelled_wherever_it_waits(what, transport, tmp_path, cancelled_at):
    number, came_to_it = 0, True
    while came_to_it:
        number += 1
        before = ours()
        receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/{number}.sock")
        if what == "start":
            came_to_it = await cancelled_at(receiver.start(), number)
        else:
            await receiver.start()
            engine = engine_of(receiver, transport)
            if what != "connect":
                await engine.connect()
            under_way = {"connect": engine.connect, "close": engine.close, "close of the receiver": receiver.close}
            came_to_it = await cancelled_at(under_way[what]() if what in under_way else engine.push(1), number)
            await engine.close()
        await receiver.close()
        await nothing_is_left(before, f"{what}, cancelled where it waits for the {number}th time")
    assert number > 1


async def test_an_engine_that_is_closed_while_it_connects(tmp_path):
    before = ours()
    async with Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s") as receiver:
        engine = engine_of(receiver, "shm")
        connecting = asyncio.create_task(engine.connect())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(ClosedError, match="closed while it connected"):
            await connecting
    await nothing_is_left(before, "the engine")
