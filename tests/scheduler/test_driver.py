"""The asyncio shell, on asyncio's loop and on uvloop's, with fake stages whose work ends when the test says so."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from syncline.scheduler.driver import Driver, Limits, Stuck, TaskSpec
from syncline.scheduler.errors import (
    AllTargetsLost,
    DeadlineExceeded,
    IllegalTransition,
    PlanError,
    PushCancelled,
    SchedulerClosed,
    StageFailure,
)
from syncline.scheduler.events import STAGES, Cancelled, TargetLost
from syncline.scheduler.records import TaskState

PATIENCE_S = 10.0


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    return request.param


def task(index, *, group=0, tmp=1, stages=STAGES, targets=(0,), reads=True):
    return TaskSpec(
        index=index, group=group, tmp_bytes=tmp, stages=stages, targets=frozenset(targets), reads_source=reads
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


class Work:
    """A completion that ends when it is told to."""

    def __init__(self, *, signalled: bool) -> None:
        self.signalled = signalled
        self.over = False
        self.error: BaseException | None = None
        self.callback: Callable[[], None] | None = None
        self.polls = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.over and self.error is not None:
            raise self.error
        return self.over

    def subscribe(self, callback: Callable[[], None]) -> bool:
        self.callback = callback
        return self.signalled

    def end(self, error: BaseException | None = None) -> None:
        self.over, self.error = True, error
        if self.signalled and self.callback is not None:
            self.callback()


class Rig:
    """A driver with fake stages. ``auto``: work is done at once; else it waits in ``flying`` for `end`."""

    def __init__(self, *, auto: bool = False, signalled: bool = True, **limits: int) -> None:
        self.auto = auto
        self.signalled = signalled
        self.flying: dict[tuple[str, int], Work] = {}
        self.old: list[tuple[tuple[str, int], Work]] = []
        self.started: list[tuple[str, int]] = []
        self.released: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, int]] = []
        self.freed: list[int] = []
        self.voted = 0
        self.hold_votes: asyncio.Event | None = None
        self.raises: dict[tuple[str, int], BaseException] = {}
        self.limits = Limits(**{"max_tmp_bytes": 100, **limits})
        self.driver = Driver(
            {stage: FakeStage(self, stage) for stage in STAGES},
            lambda group: self.start("barrier", group),
            limits=self.limits,
            release=lambda push_id, index: self.released.append((push_id, index)),
            drop_target=lambda target, at_task: self.dropped.append((target, at_task)),
        )
        self.checked(self.driver._machine)

    def checked(self, machine) -> None:
        handle = machine.handle

        def handle_and_validate(event):
            orders = handle(event)
            machine.validate()
            return orders

        machine.handle = handle_and_validate

    def start(self, stage: str, index: int) -> Work | None:
        self.started.append((stage, index))
        if (stage, index) in self.raises:
            raise self.raises[stage, index]
        if self.auto:
            return None
        work = Work(signalled=self.signalled)
        self.flying[stage, index] = work
        return work

    async def end(self, stage: str, index: int, error: BaseException | None = None) -> None:
        """Wait until that work is in flight, and end it."""
        await until(lambda: (stage, index) in self.flying)
        self.flying.pop((stage, index)).end(error)

    def set_aside(self) -> list[Work]:
        """Take what is in flight out of the way of the next push."""
        work = list(self.flying.values())
        self.flying.clear()
        return work

    async def votes(self) -> None:
        self.voted += 1
        if self.hold_votes is not None:
            await self.hold_votes.wait()

    def run(self, tasks, *, push_id=1, groups=(0,), targets=(0,), deadline_s=PATIENCE_S, votes=None):
        return self.driver.run(
            push_id,
            tasks,
            groups,
            frozenset(targets),
            collect_votes=votes or self.votes,
            deadline_s=deadline_s,
            on_source_free=lambda: self.freed.append(push_id),
        )

    async def closed(self) -> None:
        """Close, and look that nothing is left over."""
        assert await self.driver.close(PATIENCE_S) == ()
        assert self.driver.abandoned == 0
        assert self.driver.tmp_bytes == 0
        assert not self.driver._flights and not self.driver._source_free
        assert asyncio.all_tasks() == {asyncio.current_task()}


class FakeStage:
    def __init__(self, rig: Rig, stage: str) -> None:
        self.rig = rig
        self.stage = stage

    def start(self, index: int) -> Work | None:
        return self.rig.start(self.stage, index)


def spans_of(outcome) -> set[tuple[str, int]]:
    return {(span.stage, span.index) for span in outcome.spans}


# ------------------------------------------------------------------------------------------------------ the plain course


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


# -------------------------------------------------------------------------------------------------------------- failures


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
        await until(lambda: rig.driver.abandoned == 0)
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
        await until(lambda: rig.driver.abandoned == 0)
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
        await until(lambda: rig.driver.abandoned == 0)
        assert rig.started == before, "nothing is started for a push that has ended"
        assert sorted(rig.released) == [(1, 0), (1, 1)]
        rig.auto = True
        await rig.run((task(0),), push_id=2)
        await rig.closed()

    loop(main())


def test_cancelling_at_every_turn_of_the_loop(loop) -> None:
    async def main() -> None:
        rig = Rig()
        push_id = 0
        for turns in range(1, 40):
            push_id += 1
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
            await until(lambda: rig.driver.abandoned == 0 and rig.driver.tmp_bytes == 0)
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
        rig = Rig(auto=True)
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
        assert len(rig.started) <= count + 6, "only what starts with the push itself"
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
        await until(lambda: rig.driver.abandoned == 0)
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
        await until(lambda: rig.driver.abandoned == 0)
        assert len(set(rig.released)) == len(rig.released)
        assert sorted(rig.freed) == list(range(1, 61))
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
