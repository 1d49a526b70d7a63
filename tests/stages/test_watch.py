"""Asking for device work: soon enough whatever it takes, all of it, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, strategies as st

from syncline.stages import ticks
from syncline.stages.ticks import Ticks
from syncline.stages.watch import LONGEST_S, SHORTEST_S, Watch, pause_after

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
each_loop = pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
each_timer = pytest.mark.parametrize("fine", [True, False], ids=["timerfd", "loop timers"])


@pytest.fixture
def _timer(fine, monkeypatch):
    if not fine:
        monkeypatch.setattr(ticks, "_timerfd_calls", lambda: None)


def run(new_loop, coroutine):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


def timers() -> int:
    """Of this process."""
    gc.collect()
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "timerfd" in str(descriptor.readlink())
    return found


@given(st.floats(0, 100), st.floats(0, 100))
def test_an_end_is_noticed_late_by_an_eighth_at_most(quiet_s, more_s):
    pause = pause_after(quiet_s)
    assert SHORTEST_S <= pause <= LONGEST_S
    assert pause <= max(quiet_s / 8, SHORTEST_S)
    assert pause_after(quiet_s + more_s) >= pause


@each_timer
@each_loop
@pytest.mark.usefixtures("_timer")
def test_work_that_ends_in_any_order_is_all_noticed(new_loop):
    async def main():
        watch, asked = Watch(), []

        def after(number, questions):
            left = iter(range(questions))

            def poll():
                asked.append(number)
                return next(left, None) is None

            return poll

        signals = [watch.until(after(number, questions)) for number, questions in enumerate((7, 1, 4, 0, 4))]
        assert signals[3].done
        for signal in signals:
            await signal
        assert [asked.count(number) for number in range(5)] == [8, 2, 5, 1, 5]

    run(new_loop, main())


@each_loop
@pytest.mark.skipif(ticks._timerfd_calls() is None, reason="this system has no timerfd")
def test_pauses_are_not_a_loops_own_timers(new_loop):
    """Those count milliseconds."""

    async def main():
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        fine = Ticks(loop)
        fine.after(SHORTEST_S, over.set)
        assert fine._handle is None
        await over.wait()
        fine.stop()

    run(new_loop, main())


@each_timer
@each_loop
@pytest.mark.usefixtures("_timer")
def test_what_was_asked_for_before_is_forgotten(new_loop):
    async def main():
        called, over = [], asyncio.Event()
        one = Ticks(asyncio.get_running_loop())
        one.after(0.0, lambda: called.append("first"))
        one.after(0.0, lambda: (called.append("second"), over.set()))
        await over.wait()
        one.after(0.0, lambda: called.append("third"))
        one.stop()
        other = Ticks(asyncio.get_running_loop())
        again = asyncio.Event()
        other.after(0.002, again.set)
        await again.wait()
        assert called == ["second"]

    run(new_loop, main())


@each_loop
def test_a_watch_leaves_no_timer_behind(new_loop):
    async def main():
        for closing in (False, True):
            watch = Watch()
            left = iter(range(5))
            await watch.until(lambda left=left: next(left, None) is None)
            if closing:
                watch.close()
            del watch

    before = timers()
    run(new_loop, main())
    assert timers() == before


@each_loop
def test_a_watch_that_still_asks_keeps_itself_alive(new_loop):
    """Nobody else may hold it: who waits holds the signal only."""

    async def main():
        left = iter(range(50))
        signal = Watch().until(lambda: next(left, None) is None)
        gc.collect()
        async with asyncio.timeout(30):
            await signal

    run(new_loop, main())
