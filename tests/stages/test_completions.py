"""Signals, task scopes, worker threads."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
import torch

from syncline.stages.completions import Signal, TaskScope
from syncline.stages.errors import TransportError
from syncline.stages.workers import Workers, call_in_thread


async def test_a_signal_calls_back_once_and_keeps_its_first_end():
    signal, calls = Signal(), []
    assert signal.subscribe(lambda: calls.append("early"))
    assert not signal.poll()
    signal.set(7)
    signal.fail(ValueError("late"))
    signal.set(8)
    assert signal.subscribe(lambda: calls.append("late"))
    await asyncio.sleep(0)
    assert calls == ["early", "late"]
    assert signal.poll()
    assert await signal == await signal == 7


async def test_a_failed_signal_raises_for_everyone_who_asks():
    signal = Signal()
    waiting = asyncio.gather(*(_wait(signal) for _ in range(3)), return_exceptions=True)
    await asyncio.sleep(0)
    signal.fail(TransportError("gone"))
    assert [str(error) for error in await waiting] == ["gone"] * 3
    for ask in (signal.poll, lambda: signal.result):
        with pytest.raises(TransportError):
            ask()


async def _wait(signal):
    return await signal


async def test_a_waiter_that_is_cancelled_does_not_cancel_the_work():
    signal = Signal()
    waiter = asyncio.create_task(_wait(signal))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    signal.set(1)
    assert await signal == 1


async def test_ending_from_other_threads():
    good, bad = Signal(), Signal()
    thread = threading.Thread(target=lambda: (good.set_threadsafe(1), bad.fail_threadsafe(ValueError("x"))))
    thread.start()
    assert await good == 1
    with pytest.raises(ValueError, match="x"):
        await bad
    thread.join()


def test_ending_after_the_loop_is_closed_is_harmless():
    loop = asyncio.new_event_loop()
    signal = Signal(loop)
    loop.close()
    signal.set_threadsafe()
    signal.fail_threadsafe(ValueError())


async def test_a_scope_ends_signals_and_gives_up_what_is_late():
    scope = TaskScope()

    async def answer(value):
        if value is None:
            await asyncio.Event().wait()
        if value < 0:
            raise TransportError("negative")
        return value

    good, bad, never = (scope.start(answer(value)) for value in (1, -1, None))
    assert await good == 1
    with pytest.raises(TransportError, match="negative"):
        await bad
    await asyncio.sleep(0)
    assert scope.running == 1
    assert not await scope.join(0.01)
    with pytest.raises(TransportError, match="given up"):
        await never
    assert scope.running == 0
    assert await scope.join(0.01)


async def test_workers_return_results_and_errors_and_run_torch_on_one_thread():
    before = torch.get_num_threads()
    workers = Workers(2)
    assert torch.get_num_threads() == before
    assert await workers.submit(divmod, 7, 2) == (3, 1)
    assert await workers.submit(torch.get_num_threads) == 1
    assert not await workers.submit(torch.is_grad_enabled)
    with pytest.raises(ZeroDivisionError):
        await workers.submit(divmod, 1, 0)
    assert workers.close()
    assert workers.close()
    with pytest.raises(Exception, match="stopped"):
        await workers.submit(divmod, 1, 1)


async def test_workers_do_not_keep_what_they_worked_on():
    workers = Workers(1)
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    await workers.submit(tensor.sum)
    del tensor
    await workers.submit(int)
    assert gone() is None
    workers.close()


async def test_closing_workers_is_bounded():
    workers = Workers(1)
    go = threading.Event()
    job = workers.submit(go.wait)
    assert not workers.close(timeout_s=0.01)
    go.set()
    assert await job
    assert workers.close()


async def test_a_blocking_call_gets_a_thread_of_its_own():
    assert await call_in_thread(threading.current_thread, name="mine") is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await call_in_thread(lambda: 1 // 0, name="mine")
