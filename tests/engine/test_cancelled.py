"""Whoever is cancelled, wherever he waits, leaves nothing behind: no thread, no descriptor, no task."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine, coordinator, transfer, wiring
from syncline.engine.errors import ClosedError, SourceRankLost, SynclineError
from syncline.engine.meeting import meet
from syncline.engine.session import Session


def ours():
    """Threads, and what descriptors are of."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline")]
    files = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this look
            files.append(str(path.readlink()))
    return sorted(names), files


async def nothing_is_left(before, what):
    """What is about to end gets time for it: a thread on its way out, a connection that the loop has yet to drop."""
    for look in range(300):
        (threads, files), tasks = ours(), asyncio.all_tasks() - {asyncio.current_task()}
        if threads == before[0] and len(files) <= len(before[1]) and not tasks:
            return
        if look % 100 == 20:  # which takes long
            gc.collect()
        await asyncio.sleep(0.01)
    left = sorted(set(files) - set(before[1]))
    pytest.fail(f"{what}: left are threads {threads}, descriptors {left}, tasks {tasks}")


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


@pytest.mark.parametrize("what", ["engine", "receiver"])
async def test_closed_while_it_begins(what, tmp_path):
    """By another task, after so many turns of the loop, until it is there before it is closed."""
    turns, began = 0, False
    while not began:
        before = ours()
        receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/{turns}")
        engine = None
        if what == "engine":
            await receiver.start()
            engine = engine_of(receiver, "shm")
        beginning = asyncio.create_task(engine.connect() if engine else receiver.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        began = beginning.done()
        await (engine or receiver).close()
        if began:
            await beginning
        else:
            with pytest.raises(ClosedError, match="closed"):
                await beginning
        await receiver.close()
        await nothing_is_left(before, f"the {what}, closed after {turns} turns")
        turns = 3 * turns + 1
    assert turns > 4


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("whose", ["engine", "receiver"])
async def test_a_close_outlasts_whoever_cancels_all_tasks(whose, transport, tmp_path):
    """As `asyncio.run` does at its end, and many who shut down: after so many turns of the loop, until it is over by then."""
    turns, over = 0, False
    while not over:
        before = ours()
        receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/{turns}")
        await receiver.start()
        engine = engine_of(receiver, transport)
        await engine.connect()
        closing = asyncio.create_task((engine if whose == "engine" else receiver).close())
        for _ in range(turns):
            await asyncio.sleep(0)
        over = closing.done()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await engine.close()  # neither raises what others were cancelled by
        await receiver.close()
        await nothing_is_left(before, f"the {whose}, all tasks cancelled after {turns} turns")
        turns += 1 + turns // 8
    assert turns > 4


@pytest.mark.parametrize("what", ["connect", "start"])
async def test_who_was_cancelled_before_it_begins_is_told_so(what, tmp_path):
    """As by Ctrl-C while a trainer computes: nobody has closed anything."""
    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s")
    if what == "connect":
        await receiver.start()
    engine = engine_of(receiver, "shm") if what == "connect" else None

    async def caller():
        asyncio.current_task().cancel()
        await (engine.connect() if engine else receiver.start())

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(caller())
    if engine:
        await engine.close()
    await receiver.close()


@pytest.mark.parametrize("where", ["locate", "locate in a push", "close"])
async def test_a_target_that_closes_its_engine(where, tmp_path, monkeypatch):
    """It waits for whoever waits for it; that ends."""
    monkeypatch.setattr(transfer, "_CALL_OFF_S", 0.2)
    monkeypatch.setattr(coordinator, "_CLOSE_S", 0.2)
    closes = []

    class Closes(RemoteTarget):
        async def locate(self, config):
            if where in closes:
                await engine.close()
            return await super().locate(config)

        async def close(self):
            if where == "close":
                await engine.close()

    async with Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s") as receiver:
        engine = TransferEngine(
            source=ModuleSource(nn.Linear(8, 8), world_size=1), targets=[Closes(receiver.address)],
            config=TransferConfig(trace=False),
        )  # fmt: skip
        if where == "locate":
            closes.append(where)
            with pytest.raises(ClosedError):
                await engine.connect()
        else:
            await engine.connect()
        if where == "locate in a push":
            closes.append(where)
            engine._session._coordinator.handles[0].unlinked("a test")
            with pytest.raises((asyncio.CancelledError, SynclineError)):
                await engine.push(1)
        await engine.close()


@pytest.fixture
def stubborn(tmp_path):
    """A target that cannot be closed the first time."""

    class Stubborn(RemoteTarget):
        refused = False

        async def close(self):
            if not Stubborn.refused:
                Stubborn.refused = True
                raise OSError("its folder stays")

    return Stubborn


async def test_what_cannot_be_closed_keeps_nothing_else_open(stubborn, tmp_path):
    before = ours()
    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s")
    await receiver.start()
    engine = TransferEngine(
        source=ModuleSource(nn.Linear(8, 8), world_size=1), targets=[stubborn(receiver.address)],
        config=TransferConfig(trace=False, transport="gloo"),
    )  # fmt: skip
    await engine.connect()
    with pytest.raises(OSError, match="folder"):
        await engine.close()
    await engine.close()
    await receiver.close()
    await nothing_is_left(before, "one of the targets could not be closed")


def test_what_cannot_be_closed_keeps_no_thread(silent):
    async def close():
        raise OSError("its folder stays")

    engine = blocking_engine(silent)
    engine._begun = SimpleNamespace(close=close)
    with pytest.raises(OSError, match="folder"):
        engine.close_blocking()
    assert not [thread for thread in threading.enumerate() if thread.name == "syncline-loop"]


def test_an_engine_is_closed_after_its_device_was_lost(silent, monkeypatch):
    """Then nothing can be asked of CUDA any more, not even what comes before what."""

    def lost(_work):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = blocking_engine(silent, connect_timeout_s=0.2)
    with pytest.raises(SynclineError):
        engine.connect_blocking()
    monkeypatch.setattr(transfer, "after_caller", lost)
    with pytest.raises(RuntimeError, match="illegal memory"):
        engine.push_blocking(1)
    engine.close_blocking()
    assert not [thread for thread in threading.enumerate() if thread.name == "syncline-loop"]


def test_what_cannot_be_closed_is_said_each_time(silent):
    async def close():
        raise OSError("its folder stays")

    engine = blocking_engine(silent)
    engine._begun = SimpleNamespace(close=close)
    for _ in range(3):
        with pytest.raises(OSError, match="folder"):
            engine.close_blocking()


def test_who_waits_in_another_thread_is_not_forgotten_when_the_loop_ends(silent, monkeypatch):
    """Also where what he waits for takes no cancellation."""
    monkeypatch.setattr(transfer, "_STOP_S", 0.1)
    began = threading.Event()

    async def connect():
        began.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    engine = blocking_engine(silent)
    monkeypatch.setattr(transfer, "_CALL_OFF_S", 0.1)
    monkeypatch.setattr(engine, "_connect", connect)
    with ThreadPoolExecutor(1) as other:
        connecting = other.submit(engine.connect_blocking)
        assert began.wait(60)
        engine.close_blocking()
        with pytest.raises(ClosedError):
            connecting.result(60)


@pytest.mark.parametrize("turns", range(12))
async def test_a_connect_that_is_cut_off_as_it_closes_is_closed_with_the_engine(turns, silent):
    before = ours()
    engine = blocking_engine(silent)
    connecting = asyncio.create_task(engine.connect())
    while engine._begun is None or engine._begun._coordinator is None:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)  # it waits for an answer that does not come
    connecting.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await engine.close()
    await nothing_is_left(before, f"all tasks cancelled {turns} turns after the connect")


async def test_a_leader_that_comes_and_goes_is_no_close(tmp_path):
    """Who waits is told that it came, and not that the receiver is closed."""
    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/1", rank=1, world_size=2, leader=f"unix:{tmp_path}/0")
    await receiver.start()
    waiting = asyncio.create_task(receiver.joined())
    for _ in range(3):
        await asyncio.sleep(0)
    receiver._member.joined.set()
    receiver._member.joined.clear()
    await waiting
    await receiver.close()


async def test_a_link_that_cannot_be_closed_keeps_no_thread_and_no_other_link(tmp_path):
    before, closed = ours(), []

    def path(name, error=None):
        async def close():
            closed.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(close=close)

    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s")
    await receiver.start()
    receiver._rank._retired = [path("a", RuntimeError("CUDA error: the device is lost")), path("b")]
    with pytest.raises(RuntimeError, match="lost"):
        await receiver.close()
    assert closed == ["a", "b"]
    await nothing_is_left(before, "a link could not be closed")


async def test_a_store_that_hangs_is_told_in_time():
    may_end = threading.Event()
    store = SimpleNamespace(check=lambda _keys: may_end.wait(60), set=lambda *_: may_end.wait(60))
    group = SimpleNamespace(get_group_store=lambda: store)
    for rank in (0, 1):
        with pytest.raises(SourceRankLost, match="store"):
            await meet(group, rank, 2, "127.0.0.1", 0.2)
    may_end.set()


def blocking_engine(port, **knobs):
    return TransferEngine(
        source=ModuleSource(nn.Linear(8, 8), world_size=1), targets=[RemoteTarget(f"tcp://127.0.0.1:{port}")],
        config=TransferConfig(trace=False, **knobs),
    )  # fmt: skip


def test_threads_that_hang_hold_up_no_close(silent):
    """Such as one that asks a store whose host is stopped."""
    may_end, engine = threading.Event(), blocking_engine(silent, connect_timeout_s=0.2)
    with pytest.raises(SynclineError):
        engine.connect_blocking()
    engine._thread.loop.call_soon_threadsafe(engine._thread.loop.run_in_executor, None, may_end.wait)
    engine.close_blocking()
    assert not may_end.is_set()
    may_end.set()


def test_closed_by_several_threads_at_once(silent):
    for _ in range(50):
        engine = blocking_engine(silent)
        with ThreadPoolExecutor(3) as threads:
            closing = [threads.submit(engine.close_blocking) for _ in range(3)]
        assert [one.result() for one in closing] == [None] * 3


async def test_a_receiver_that_is_closed_while_somebody_waits_for_its_leader(tmp_path):
    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/1", rank=1, world_size=2, leader=f"unix:{tmp_path}/0")
    await receiver.start()
    waiting = asyncio.create_task(receiver.joined())
    await asyncio.sleep(0)
    await receiver.close()
    with pytest.raises(ClosedError):
        await waiting


async def test_a_receiver_is_closed_on_its_own_loop(tmp_path):
    before = ours()
    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s")
    await receiver.start()

    def elsewhere():
        with pytest.raises(SynclineError, match="another event loop"):
            asyncio.run(receiver.close())

    await asyncio.to_thread(elsewhere)
    await receiver.close()
    await nothing_is_left(before, "a close on another loop was refused")


def test_an_engine_that_is_closed_while_another_thread_connects(silent):
    engine = blocking_engine(silent, connect_timeout_s=600)
    said = []

    def connect():
        try:
            engine.connect_blocking()
        except ClosedError as error:
            said.append(str(error))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    while engine._connecting is None:
        time.sleep(0.01)
    engine.close_blocking()
    thread.join(60)
    assert said == ["this engine was closed while it connected; make a new one"]
    engine.close_blocking()  # idempotent
    with pytest.raises(ClosedError):
        engine.push_blocking(1)


@pytest.fixture
def silent():
    """The port of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def test_who_closes_what_is_being_closed_waits_for_its_end(tmp_path, monkeypatch):
    """As after an interrupt: the loop must not be stopped under the first one."""
    ended, may_end, close = [], asyncio.Event(), Session.close

    async def slow(self):
        await may_end.wait()
        await close(self)
        ended.append("session")

    monkeypatch.setattr(Session, "close", slow)
    async with Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s") as receiver:
        engine = engine_of(receiver, "shm")
        await engine.connect()
        first = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        assert not first.done() and not second.done()
        may_end.set()
        await second
        assert ended == ["session"]
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_a_close_does_not_wait_for_threads_that_others_keep_busy(tmp_path, busy_threads):
    receiver = Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s")
    await receiver.start()
    engine = engine_of(receiver, "gloo")
    await engine.connect()
    async with busy_threads(), asyncio.timeout(60):
        await engine.close()
        await receiver.close()


@pytest.fixture
def resolving(monkeypatch):
    """A plan that is being resolved on a thread: ``make()`` it; ``began``, ``may_end``; what was let go of is ``closed``."""
    closed, began, may_end = [], threading.Event(), threading.Event()
    locks = SimpleNamespace(close=lambda: closed.append("locks"))

    def resolve(*_arguments, **_named):
        began.set()
        may_end.wait(60)
        return SimpleNamespace(tmp_nbytes={}, private=torch.empty(0, dtype=torch.uint8), locks=locks)

    device = SimpleNamespace(device=None, stream=lambda: None, on=lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(wiring, "on_device", lambda _: True)
    monkeypatch.setattr(wiring, "home_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(wiring, "CudaDevice", lambda _home: device)
    monkeypatch.setattr(wiring, "transport_kinds", lambda *_: {})
    monkeypatch.setattr(wiring, "in_place", lambda _: [])
    monkeypatch.setattr(wiring, "DeviceRig", SimpleNamespace(resolve=resolve))
    source = SimpleNamespace(buffers=list, rank=0)
    plan = SimpleNamespace(source_program=lambda _: SimpleNamespace(tasks=()))

    def make():
        return wiring.Wiring.make(source, plan, [None], [], SimpleNamespace(workers=1))

    yield SimpleNamespace(make=make, began=began, may_end=may_end, closed=closed)
    may_end.set()


@pytest.mark.parametrize("times", [1, 2])
async def test_what_a_thread_resolves_for_a_source_that_has_gone_is_let_go_of(times, resolving, busy_threads):
    """Its page-locks must not outlive the memory that they lock."""
    async with busy_threads(), asyncio.timeout(60):
        making = asyncio.create_task(resolving.make())
        while not resolving.began.is_set():
            await asyncio.sleep(0.01)
        for _ in range(times):
            making.cancel()
            await asyncio.sleep(0)
        resolving.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await making
    assert resolving.closed == ["locks"]


def test_what_a_thread_resolves_is_let_go_of_after_its_loop_has_ended_too(resolving, monkeypatch):
    monkeypatch.setattr(wiring, "_SETTLE_S", 0.05)

    async def main():
        making = asyncio.create_task(resolving.make())
        while not resolving.began.is_set():
            await asyncio.sleep(0.01)
        making.cancel()

    asyncio.run(main())
    assert resolving.closed == []
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "syncline-resolve")
    resolving.may_end.set()
    thread.join(60)
    assert resolving.closed == ["locks"]


@pytest.mark.parametrize("when", ["start", "on_commit", "pause"])
async def test_what_closes_the_receiver_that_calls_it_holds_up_nothing_for_ever(when, tmp_path, monkeypatch):
    """It waits for the close, and the close for it: the close goes on without it."""
    monkeypatch.setattr("syncline.engine.receiver._CLOSE_S", 0.1)
    monkeypatch.setattr("syncline.engine.rank._SETTLE_S", 0.1)
    began = asyncio.Event()

    class Engine:
        async def pause(self, in_flight):
            if when == "pause":
                began.set()
                await receiver.close()

        async def resume(self, version):
            if when == "start":
                began.set()
                await receiver.close()

    async def hook(version):
        if when == "on_commit":
            began.set()
            await receiver.close()

    receiver = Receiver(
        ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s", serving=Engine(), on_commit=hook, initial_version=0
    )
    async with asyncio.timeout(60):
        if when == "start":
            with pytest.raises(ClosedError):
                await receiver.start()
        else:
            await receiver.start()
            engine = engine_of(receiver, "shm")
            await engine.connect()
            assert not (await engine.push(1)).ok
            await engine.close()
        assert began.is_set()
        await receiver.close()


async def test_a_close_from_another_loop_says_so(tmp_path, monkeypatch):
    may_end, close = asyncio.Event(), Session.close

    async def slow(self):
        await may_end.wait()
        await close(self)

    monkeypatch.setattr(Session, "close", slow)
    async with Receiver(ModuleLoader(nn.Linear(8, 8)), f"unix:{tmp_path}/s") as receiver:
        engine = engine_of(receiver, "shm")
        await engine.connect()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        with pytest.raises(SynclineError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(engine.close()))
        may_end.set()
        await closing
        await asyncio.to_thread(lambda: asyncio.run(engine.close()))  # it is closed, wherever that is asked


async def test_who_was_cancelled_before_is_told_that_it_is_closed(silent):
    """A task that has caught its cancellation goes on: what comes of its next connect is not that one."""
    engine = TransferEngine(
        source=ModuleSource(nn.Linear(8, 8), world_size=1), targets=[RemoteTarget(f"tcp://127.0.0.1:{silent}")],
        config=TransferConfig(trace=False, connect_timeout_s=600),
    )  # fmt: skip
    waiting = asyncio.Event()

    async def work():
        waiting.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with pytest.raises(ClosedError):
            await engine.connect()

    task = asyncio.create_task(work())
    await waiting.wait()
    task.cancel()
    while engine._connecting is None:
        await asyncio.sleep(0)
    await engine.close()
    await task
