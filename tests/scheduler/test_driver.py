"""The asyncio shell, on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from syncline.scheduler.driver import Driver, Stuck
from syncline.scheduler.errors import DeadlineExceeded, PushCancelled, SchedulerClosed
from syncline.scheduler.events import STAGES


def _load(name: str):
    """A module beside this one: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(f"syncline_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rigging = _load("driver_rig")
PATIENCE_S, FakeStage, Rig, Work = rigging.PATIENCE_S, rigging.FakeStage, rigging.Rig, rigging.Work
spans_of, task, until = rigging.spans_of, rigging.task, rigging.until


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    return request.param


def test_work_that_is_done_at_once(loop) -> None:
    async def main() -> None:
        rig = Rig(auto=True)
        tasks = tuple(task(i, group=i // 5, tmp=30) for i in range(10))
        outcome = await rig.run(tasks, groups=(0, 1))
        assert spans_of(outcome) == {(s, i) for s in STAGES for i in range(10)} | {("barrier", 0), ("barrier", 1)}
        assert all(outcome.started <= span.start <= span.end <= outcome.ended for span in outcome.spans)
        assert outcome.busy_s.keys() == {*STAGES, "barrier"}
        assert 30 <= outcome.peak_tmp_bytes <= 100
        assert outcome.lost == {}
        assert sorted(rig.released) == [(1, i) for i in range(10)]
        assert (rig.voted, rig.freed) == (1, [1])
        assert rig.driver.snapshot() == outcome
        await rig.closed()

    loop(main())


@pytest.mark.parametrize("signalled", [True, False], ids=["signalled", "polled"])
def test_random_completions_keep_the_limits_and_the_order(loop, signalled: bool) -> None:
    async def main() -> None:
        for seed in range(10):
            rng = random.Random(seed)
            limits = {stage: rng.randint(1, 3) for stage in STAGES}
            rig = Rig(signalled=signalled, max_tmp_bytes=10, **limits)
            tasks = tuple(task(i, group=i // 8, tmp=rng.randint(0, 10)) for i in range(16))
            run = asyncio.ensure_future(rig.run(tasks, groups=(0, 1)))
            while not run.done():
                for stage in STAGES:
                    assert sum(name == stage for name, _ in rig.flying) <= limits[stage]
                if rig.flying and rng.random() < 0.5:
                    rig.flying.pop(rng.choice(list(rig.flying))).end()
                await asyncio.sleep(0)
            outcome = await run
            assert len(outcome.spans) == 16 * 3 + 2
            assert outcome.peak_tmp_bytes <= 10
            for stage in STAGES:
                assert [i for name, i in rig.started if name == stage] == list(range(16))
            await rig.closed()

    loop(main())


def test_several_pushes_in_turn(loop) -> None:
    async def main() -> None:
        rig = Rig(auto=True)
        tasks = (task(0), task(1))
        for push_id in (1, 2, 7):
            await rig.run(tasks, push_id=push_id)
            assert rig.driver._plan is not None and rig.driver._plan[0] is tasks
        assert rig.freed == [1, 2, 7]
        await rig.run([task(0)], push_id=8)
        assert rig.driver._plan[0] is tasks, "a list may change, and is not remembered"
        await rig.closed()

    loop(main())


def test_source_is_free_before_the_sends_are_over(loop) -> None:
    async def main() -> None:
        rig = Rig()
        run = asyncio.ensure_future(rig.run((task(0, stages=("prepare", "send")),)))
        await rig.end("prepare", 0)
        await until(lambda: ("send", 0) in rig.flying)
        assert rig.freed == [1]
        assert not run.done()
        await rig.end("send", 0)
        await rig.end("barrier", 0)
        await run
        assert rig.freed == [1]
        await rig.closed()

    loop(main())


def test_votes_come_after_the_last_send_and_barrier(loop) -> None:
    async def main() -> None:
        rig = Rig()
        rig.hold_votes = asyncio.Event()
        run = asyncio.ensure_future(rig.run((task(0, stages=("send",)),)))
        await rig.end("barrier", 0)
        assert rig.voted == 0
        await rig.end("send", 0)
        await until(lambda: rig.voted == 1)
        assert not run.done()
        rig.hold_votes.set()
        await run
        await rig.closed()

    loop(main())


def test_a_callback_from_within_subscribe_is_taken(loop) -> None:
    class Eager(Work):
        def subscribe(self, callback: Callable[[], None]) -> bool:
            self.over = True
            callback()
            return True

    async def main() -> None:
        rig = Rig(auto=True)
        rig.driver._stages["send"] = type("S", (), {"start": lambda self, index: Eager(signalled=True)})()
        await rig.run((task(0), task(1)))
        await rig.closed()

    loop(main())


# ------------------------------------------------------------------------------------------------------------- the close


def test_close_waits_for_abandoned_work(loop) -> None:
    async def main() -> None:
        rig = Rig()
        with pytest.raises(DeadlineExceeded):
            await rig.run((task(0),), deadline_s=0.001)
        closing = asyncio.ensure_future(rig.driver.close(PATIENCE_S))
        await asyncio.sleep(0)
        assert not closing.done()
        await rig.end("h2d", 0)
        assert await closing == ()
        assert rig.released == [(1, 0)]
        with pytest.raises(SchedulerClosed, match="closed driver"):
            await rig.run((task(0),), push_id=2)
        assert await rig.driver.close(PATIENCE_S) == ()

    loop(main())


@pytest.mark.parametrize("signalled", [True, False], ids=["signalled", "polled"])
def test_close_gives_up_in_time_and_says_what_is_stuck(loop, signalled: bool) -> None:
    async def main() -> None:
        rig = Rig(signalled=signalled)
        with pytest.raises(DeadlineExceeded):
            await rig.run((task(5),), deadline_s=0.001)
        (stuck,) = await rig.driver.close(0.005)
        assert stuck == Stuck(push_id=1, stage="h2d", index=5, seconds=stuck.seconds)
        assert stuck.seconds > 0
        (work,) = rig.set_aside()
        polls = work.polls
        work.end()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rig.released == [], "the engine was told that it is stuck, and holds on to its buffers"
        assert signalled or work.polls == polls, "nothing is asked for any more"

    loop(main())


def test_close_ends_the_push_that_runs(loop) -> None:
    async def main() -> None:
        rig = Rig()
        run = asyncio.ensure_future(rig.run((task(0),)))
        await until(lambda: bool(rig.flying))
        closing = asyncio.ensure_future(rig.driver.close(PATIENCE_S))
        with pytest.raises(PushCancelled, match="closed"):
            await run
        await rig.end("h2d", 0)
        assert await closing == ()

    loop(main())


def test_close_of_a_driver_that_never_ran(loop) -> None:
    async def main() -> None:
        await Rig().closed()

    loop(main())


def test_another_loop_is_fine_unless_work_is_in_flight_on_the_first(loop) -> None:
    rig = Rig(auto=True)

    async def push(push_id: int, **more: Any) -> None:
        await rig.run((task(0),), push_id=push_id, **more)

    loop(push(1))
    loop(push(2))
    rig.auto = False

    async def late() -> None:
        with pytest.raises(DeadlineExceeded):
            await push(3, deadline_s=0.001)

    loop(late())

    async def refused() -> None:
        with pytest.raises(SchedulerClosed, match="another event loop"):
            await push(4)
        (stuck,) = await rig.driver.close(PATIENCE_S)
        assert (stuck.stage, stuck.index) == ("h2d", 0)

    loop(refused())


# ------------------------------------------------------------------------------------------------- manners on the loop


def test_thousands_of_tasks_are_worked_off_in_slices(loop) -> None:
    """With a clock on which every look takes 0.1 ms, no slice may start more than a handful of stages."""

    class SlowClock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 1e-4
            return self.now

    async def main() -> None:
        rig = Rig(auto=True)
        slow = Driver(
            {stage: FakeStage(rig, stage) for stage in STAGES},
            lambda group: rig.start("barrier", group),
            limits=rig.limits,
            release=lambda push_id, index: None,
            drop_target=lambda target, at_task: None,
            clock=SlowClock(),
        )
        rig.driver = slow
        run = asyncio.ensure_future(rig.run(tuple(task(i) for i in range(2000)), deadline_s=60.0))
        seen, most = 0, 0
        while not run.done():
            await asyncio.sleep(0)
            most = max(most, len(rig.started) - seen)
            seen = len(rig.started)
        await run
        assert len(rig.started) == 6001
        assert most <= 8

    loop(main())


def test_signalled_work_is_never_asked_before_it_signals(loop) -> None:
    async def main() -> None:
        rig = Rig(signalled=True)
        run = asyncio.ensure_future(rig.run((task(0, stages=("send",)),)))
        await until(lambda: ("send", 0) in rig.flying)
        for _ in range(50):
            await asyncio.sleep(0)
        work = rig.flying["send", 0]
        assert work.polls == 0
        work.callback()  # a callback that comes too early is not taken for the end
        assert work.polls == 1
        await rig.end("send", 0)
        await rig.end("barrier", 0)
        await run
        await rig.closed()

    loop(main())
