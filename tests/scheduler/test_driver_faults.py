"""The asyncio shell when things go wrong: failures, deadlines, cancellation, lost targets, and what is left in flight."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import random
import sys
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from syncline.scheduler.errors import (
    AllTargetsLost,
    DeadlineExceeded,
    IllegalTransition,
    PlanError,
    PushCancelled,
    StageFailure,
)
from syncline.scheduler.events import STAGES, Cancelled, TargetLost
from syncline.scheduler.records import TaskState


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


@pytest.mark.parametrize("signalled", [True, False], ids=["signalled", "polled"])
def test_a_failed_stage_ends_the_push_at_once_and_what_is_in_flight_keeps_its_bytes(loop, signalled: bool) -> None:
    async def main() -> None:
        rig = Rig(signalled=signalled, max_tmp_bytes=10, send=1)
        tasks = (task(0, tmp=6, stages=("prepare", "send")), task(1, tmp=4, stages=("prepare", "send")))
        run = asyncio.ensure_future(rig.run(tasks))
        await rig.end("prepare", 0)
        await until(lambda: ("send", 0) in rig.flying)
        cause = OSError("the link broke")
        await rig.end("prepare", 1, cause)
        with pytest.raises(StageFailure, match="stage prepare of task 1") as caught:
            await run
        assert caught.value.cause is caught.value.__cause__ is cause
        assert any("start prepare" in line for line in caught.value.story)
        assert rig.driver.story(1)[-1].after is TaskState.DROPPED
        snapshot = rig.driver.snapshot()
        assert snapshot is not None and spans_of(snapshot) == {("prepare", 0), ("prepare", 1)}

        # The delayed stream of the first push still reads its buffer: the second push must wait for it.
        assert (rig.driver.abandoned, rig.driver.tmp_bytes, rig.released) == (1, 6, [(1, 1)])
        (delayed,) = rig.set_aside()
        rig.auto = True
        second = asyncio.ensure_future(rig.run(tasks, push_id=2))
        await until(lambda: rig.driver.tmp_bytes == 6 and rig.driver._machine.push.push_id == 2)
        assert rig.started.count(("prepare", 0)) == 1, "no room for it yet"
        delayed.end()
        outcome = await second
        assert outcome.peak_tmp_bytes <= 10
        assert rig.released.count((1, 0)) == rig.released.count((2, 0)) == 1
        assert rig.driver.abandoned == 0
        await rig.closed()

    loop(main())


def test_an_error_is_freed_with_its_last_reference(loop) -> None:
    """Frames hold buffers: an error must not wait for the cycle collector to let go of them."""

    async def main() -> None:
        rig = Rig()
        run = asyncio.ensure_future(rig.run((task(0, stages=("prepare",)), task(1, stages=("prepare",)))))
        await rig.end("prepare", 0, OSError("broken"))
        await asyncio.wait([run])
        gone = weakref.ref(run.exception())
        await rig.end("prepare", 1)
        assert await rig.driver.settle(PATIENCE_S) == 0
        del run
        assert gone() is None
        await rig.closed()

    gc.disable()
    try:
        loop(main())
    finally:
        gc.enable()


def test_deadline(loop) -> None:
    async def main() -> None:
        rig = Rig()
        with pytest.raises(DeadlineExceeded, match=r"deadline of 0.01 s: 0 of 1 tasks .* h2d of task 3"):
            await rig.run((task(3, tmp=5),), deadline_s=0.01)
        assert (rig.driver.abandoned, rig.driver.tmp_bytes, rig.freed) == (1, 5, [])
        await rig.end("h2d", 3)
        assert await rig.driver.settle(PATIENCE_S) == 0
        assert (rig.released, rig.freed) == ([(1, 3)], [1])
        await rig.closed()

    loop(main())


def test_deadline_while_voting_cancels_the_vote(loop) -> None:
    async def main() -> None:
        rig = Rig(auto=True)
        rig.hold_votes = asyncio.Event()
        with pytest.raises(DeadlineExceeded, match="the votes of the targets"):
            await rig.run((task(0),), deadline_s=0.01)
        await rig.closed()

    loop(main())


def test_cancelling_from_outside(loop) -> None:
    async def main() -> None:
        rig = Rig(h2d=2)
        run = asyncio.ensure_future(rig.run(tuple(task(i, tmp=3) for i in range(4))))
        await until(lambda: len(rig.flying) == 2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert (rig.driver.abandoned, rig.driver.tmp_bytes) == (2, 6)
        before = list(rig.started)
        for work in rig.set_aside():
            work.end()
        assert await rig.driver.settle(PATIENCE_S) == 0
        assert rig.started == before, "nothing is started for a push that has ended"
        assert sorted(rig.released) == [(1, 0), (1, 1)]
        rig.auto = True
        await rig.run((task(0),), push_id=2)
        await rig.closed()

    loop(main())


def test_cancelling_at_every_turn_of_the_loop(loop) -> None:
    async def main() -> None:
        rig = Rig()
        for push_id, turns in enumerate(range(1, 40), start=1):
            run = asyncio.ensure_future(rig.run((task(0), task(1)), push_id=push_id))
            for _ in range(turns):
                await asyncio.sleep(0)
                if turns % 2 and rig.flying:
                    rig.flying.pop(next(iter(rig.flying))).end()
            run.cancel()
            await asyncio.wait([run])
            assert run.cancelled() or run.exception() is None
            count = len(rig.started)
            for work in rig.set_aside():
                work.end()
            assert await rig.driver.settle(PATIENCE_S) == 0
            assert len(rig.started) == count
            assert rig.freed == list(range(1, push_id + 1))
        assert len(set(rig.released)) == len(rig.released)
        await rig.closed()

    loop(main())


def test_called_off_by_an_event(loop) -> None:
    async def main() -> None:
        rig = Rig()
        for push_id, error, expected in ((1, None, PushCancelled), (2, RuntimeError("rank 3 failed first"), RuntimeError)):
            run = asyncio.ensure_future(rig.run((task(0),), push_id=push_id))
            await until(lambda: ("h2d", 0) in rig.flying)
            rig.driver.post(Cancelled(now=rig.driver.clock(), reason="rank 3 failed", error=error))
            with pytest.raises(expected, match="rank 3 failed"):
                await run
            await rig.end("h2d", 0)
        rig.driver.post(Cancelled(now=rig.driver.clock(), reason="late"))
        await rig.closed()

    loop(main())


def test_news_that_comes_while_the_tasks_are_still_being_checked_is_not_lost(loop) -> None:
    async def main() -> None:
        rig = Rig(auto=True, validate=False)
        tasks = tuple(task(i, targets=(i % 2,)) for i in range(1000))
        run = asyncio.ensure_future(rig.run(tasks, targets=(0, 1)))
        await asyncio.sleep(0)
        rig.driver.post(TargetLost(now=rig.driver.clock(), target=1, at_task=0, reason="killed"))
        assert rig.started == []
        outcome = await run
        assert outcome.lost.keys() == {1}
        assert ("send", 1) not in rig.started

        run = asyncio.ensure_future(rig.run(list(tasks), push_id=2, targets=(0, 1)))
        await asyncio.sleep(0)
        count = len(rig.started)
        rig.driver.post(Cancelled(now=rig.driver.clock(), reason="another rank failed"))
        with pytest.raises(PushCancelled, match="another rank failed"):
            await run
        assert len(rig.started) == count
        assert rig.freed == [1, 2]
        await rig.closed()

    loop(main())


def test_a_lost_target(loop) -> None:
    async def main() -> None:
        rig = Rig(send=1)
        tasks = tuple(task(i, stages=("prepare", "send"), targets=(i % 2,)) for i in range(4))
        run = asyncio.ensure_future(rig.run(tasks, targets=(0, 1)))
        for i in range(2):
            await rig.end("prepare", i)
        await until(lambda: ("send", 0) in rig.flying)
        rig.driver.post(TargetLost(now=rig.driver.clock(), target=1, at_task=0, reason="killed"))
        for i in (2, 3):
            await rig.end("prepare", i)
        await rig.end("send", 0)
        await rig.end("send", 2)
        await rig.end("barrier", 0)
        outcome = await run
        assert {span.index for span in outcome.spans if span.stage == "send"} == {0, 2}
        assert rig.dropped == [(1, 0)]
        assert outcome.lost[1].reason == "killed"
        await rig.closed()

    loop(main())


def test_losing_all_targets(loop) -> None:
    async def main() -> None:
        rig = Rig()
        run = asyncio.ensure_future(rig.run((task(0),)))
        await until(lambda: bool(rig.flying))
        rig.driver.post(TargetLost(now=rig.driver.clock(), target=0, at_task=0, reason="killed"))
        with pytest.raises(AllTargetsLost, match="target 0: killed"):
            await run
        assert rig.driver.snapshot().lost[0].reason == "killed"
        await rig.end("h2d", 0)
        await rig.closed()

    loop(main())


@pytest.mark.parametrize("where", [*STAGES, "barrier"])
def test_a_stage_that_raises_at_its_start(loop, where: str) -> None:
    async def main() -> None:
        rig = Rig(auto=True)
        rig.raises[where, 0] = OSError("no memory")
        with pytest.raises(StageFailure, match="no memory") as caught:
            await rig.run((task(0),))
        assert caught.value.stage == where
        assert rig.driver.abandoned == 0
        await rig.closed()

    loop(main())


@pytest.mark.parametrize("error", [asyncio.CancelledError(), TimeoutError("gloo"), StopIteration()], ids=repr)
def test_whatever_work_ends_with_is_the_cause(loop, error: BaseException) -> None:
    async def main() -> None:
        for signalled in (True, False):
            rig = Rig(signalled=signalled)
            run = asyncio.ensure_future(rig.run((), groups=(4,)))
            await rig.end("barrier", 4, error)
            with pytest.raises(StageFailure, match="barrier of group 4") as caught:
                await run
            assert caught.value.cause is error
            await rig.closed()

    loop(main())


def test_votes_that_fail(loop) -> None:
    async def no() -> None:
        raise RuntimeError("digests differ")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        rig = Rig(auto=True)
        with pytest.raises(RuntimeError, match="digests differ"):
            await rig.run((task(0),), votes=no)
        with pytest.raises(PushCancelled, match="votes was cancelled"):
            await rig.run((task(0),), push_id=2, votes=cancelled)
        await rig.closed()

    loop(main())


def test_a_callback_that_raises_ends_the_push_with_its_error(loop) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug in the engine")

    async def main() -> None:
        rig = Rig()
        rig.driver._release = broken
        run = asyncio.ensure_future(rig.run((task(0, stages=("prepare",)), task(1))))
        await rig.end("prepare", 0)
        with pytest.raises(ZeroDivisionError, match="a bug in the engine"):
            await run
        rig.driver._release = lambda push_id, index: rig.released.append((push_id, index))
        for work in rig.set_aside():
            work.end()
        assert await rig.driver.settle(PATIENCE_S) == 0
        await rig.closed()

    loop(main())


def test_a_callback_that_raises_after_the_push_goes_to_the_loops_handler(loop) -> None:
    async def main() -> None:
        seen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
        rig = Rig()
        with pytest.raises(DeadlineExceeded):
            await rig.run((task(0),), deadline_s=0.001)
        error = ZeroDivisionError("a bug in the engine")

        def broken(push_id: int, index: int) -> None:
            raise error

        rig.driver._release = broken
        await rig.end("h2d", 0)
        await until(lambda: bool(seen))
        assert seen[0]["exception"] is error
        await rig.closed()

    loop(main())


def test_tasks_that_cannot_run_are_refused_and_nothing_is_started(loop) -> None:
    async def main() -> None:
        rig = Rig(max_tmp_bytes=10)
        with pytest.raises(PlanError, match="above the watermark"):
            await rig.run((task(0, tmp=11),))
        with pytest.raises(PlanError, match="plan order"):
            await rig.run((task(1), task(0)), push_id=2)
        assert rig.started == []
        assert rig.freed == [1, 2], "nothing reads the source"
        rig.auto = True
        await rig.run((task(0),), push_id=3)
        await rig.closed()

    loop(main())


def test_one_push_at_a_time(loop) -> None:
    async def main() -> None:
        rig = Rig()
        run = asyncio.ensure_future(rig.run((task(0, stages=("send",)),)))
        await until(lambda: bool(rig.flying))
        with pytest.raises(IllegalTransition, match="push 2 was started while push 1 runs"):
            await rig.run((), push_id=2)
        await rig.end("send", 0)
        await rig.end("barrier", 0)
        await run
        await rig.closed()

    loop(main())


@pytest.mark.parametrize("signalled", [True, False], ids=["signalled", "polled"])
def test_many_pushes_failing_at_random_leave_nothing_behind(loop, signalled: bool) -> None:
    async def main() -> None:
        rng = random.Random(1)
        rig = Rig(signalled=signalled, max_tmp_bytes=12)
        ends = {"ok": 0, "failed": 0}
        leftovers: list[Work] = []
        for push_id in range(1, 61):
            tasks = tuple(task(i, group=i // 4, tmp=rng.randint(0, 6)) for i in range(8))
            run = asyncio.ensure_future(rig.run(tasks, push_id=push_id, groups=(0, 1)))
            bad_step = rng.choice((None, rng.randrange(30)))
            steps = 0
            while not run.done():
                if leftovers and rng.random() < 0.2:
                    leftovers.pop(rng.randrange(len(leftovers))).end(rng.choice((None, OSError("late"))))
                if rig.flying and rng.random() < 0.7:
                    work = rig.flying.pop(rng.choice(list(rig.flying)))
                    work.end(OSError("broken") if steps == bad_step else None)
                    steps += 1
                await asyncio.sleep(0)
            ends["failed" if run.exception() else "ok"] += 1
            leftovers += rig.set_aside()
        assert ends["ok"] > 10 and ends["failed"] > 10
        for work in leftovers:
            work.end()
        assert await rig.driver.settle(PATIENCE_S) == 0
        assert len(set(rig.released)) == len(rig.released)
        assert sorted(rig.freed) == list(range(1, 61))
        await rig.closed()

    loop(main())
