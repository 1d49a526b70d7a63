"""The asyncio shell around `PipelineMachine`: carries out its instructions, turns what happens into events.

One driver serves an engine for its whole life. Stages run as completions, not as asyncio tasks: starting one costs no
more than a call, and work that a failed push leaves in flight stays watched until it ends and only then gives its buffers
back. Everything here runs on the loop, in slices of half a millisecond; blocking work is the stages' to keep off it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .completion import Completion, Stage
from .errors import IllegalTransition, PushCancelled, SchedulerClosed
from .events import (
    BarrierDone,
    BarrierFailed,
    Cancelled,
    CollectVotes,
    DeadlinePassed,
    DropTarget,
    Event,
    FailPush,
    FinishPush,
    Instruction,
    PushStarted,
    ReleaseBuffers,
    SourceFree,
    StageDone,
    StageFailed,
    StageName,
    StartBarrier,
    StartStage,
    TargetLost,
    TaskSpec,
    VotesCollected,
    VotesFailed,
)
from .machine import Limits, PipelineMachine
from .outcome import PushLog, PushOutcome, Span, SpanName
from .poller import SLICE_S, Flight, Poller
from .records import Transition
from .schedule import Schedule, ScheduleBuilder

__all__ = ["Completion", "Driver", "Limits", "PushOutcome", "Span", "Stage", "Stuck", "TaskSpec"]

_CHUNK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Stuck:
    """Work that was still in flight when `Driver.close` gave up on it, after ``seconds``. ``index``: task or mesh group."""

    push_id: int
    stage: SpanName
    index: int
    seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    push_id: int
    log: PushLog
    collect_votes: Callable[[], Awaitable[None]]
    end: asyncio.Future[FinishPush | FailPush]
    scope: asyncio.TaskGroup | None = None
    early: list[TargetLost | Cancelled] = field(default_factory=list)
    votes: asyncio.Task[None] | None = None


class Driver:
    """Runs pushes on one rank, one at a time.

    Args:
        stages: what runs each stage.
        barrier: enters the barrier of a mesh group, as `Stage.start` does with a task.
        limits: watermark and concurrency limits.
        release: called with (push_id, task) once nothing of the task is in flight; exactly once for every task that was
            started. It may come long after the push has failed, and while the next one runs.
        drop_target: called with (target, at_task) when a target is lost in the push that runs: nothing is to be sent to it
            from that task on.
        poll_interval_s: longest pause between two questions to a completion that has to be polled.
        clock: seconds, never going back. Times in outcomes and stories are of this clock.
        open_range: called with each piece of work when it starts; what it returns is called when that has ended. Neither may
            raise. For profilers.
    """

    def __init__(
        self,
        stages: Mapping[StageName, Stage],
        barrier: Callable[[int], Completion | None],
        *,
        limits: Limits,
        release: Callable[[int, int], None],
        drop_target: Callable[[int, int], None],
        poll_interval_s: float = 0.001,
        clock: Callable[[], float] = time.perf_counter,
        open_range: Callable[[SpanName, int], Callable[[], None]] | None = None,
    ) -> None:
        self.clock = clock
        self._open_range = open_range
        self._stages = dict(stages)
        self._barrier = barrier
        self._release = release
        self._drop_target = drop_target
        self._machine = PipelineMachine(limits)
        self._poller = Poller(settle=self._settle, interval_s=poll_interval_s, clock=clock)
        self._inbox: deque[Event] = deque()
        self._orders: deque[Instruction] = deque()
        self._flights: set[Flight] = set()
        self._source_free: dict[int, Callable[[], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run: _Run | None = None
        self._log: PushLog | None = None
        self._plan: tuple[tuple[TaskSpec, ...], Schedule] | None = None
        self._awake = False
        self._closed = False
        self._deaf = False
        self._quiet: asyncio.Future[None] | None = None
        self._carry_out: dict[type, Callable[[Any], None]] = {
            StartStage: self._start_stage,
            StartBarrier: self._start_barrier,
            ReleaseBuffers: lambda order: self._release(order.push_id, order.task),
            DropTarget: self._tell_drop_target,
            SourceFree: lambda order: self._tell_source_free(order.push_id),
            CollectVotes: self._collect_votes,
            FinishPush: self._end_run,
            FailPush: self._end_run,
        }

    # -------------------------------------------------------------------------------------------------- what others call

    @property
    def abandoned(self) -> int:
        """How many stages and barriers of ended pushes are still in flight, with their bytes reserved."""
        return self._machine.abandoned

    @property
    def tmp_bytes(self) -> int:
        """Temporary bytes that are reserved now."""
        return self._machine.budget.in_use

    @property
    def in_flight(self) -> dict[str, int]:
        """Tasks in each stage now."""
        return {str(stage): count for stage, count in self._machine.in_flight.items()}

    def story(self, task: int) -> tuple[Transition, ...]:
        """What a task of the current or last push went through."""
        return self._machine.story(task)

    def snapshot(self) -> PushOutcome | None:
        """The current or last push so far, one that failed included. None before the first."""
        return self._log.outcome(self.clock(), self._machine.budget.peak) if self._log else None

    def post(self, event: TargetLost | Cancelled) -> None:
        """Tell the push that runs that a target is lost or that it is called off. No effect if none runs. On the loop only."""
        run = self._run
        if run is not None and run.scope is None:
            run.early.append(event)  # The machine does not know of the push yet and would take it for old news.
        elif run is not None:
            self._put(event)

    async def run(
        self,
        push_id: int,
        tasks: Sequence[TaskSpec],
        groups: Sequence[int],
        targets: frozenset[int],
        *,
        collect_votes: Callable[[], Awaitable[None]],
        deadline_s: float,
        on_source_free: Callable[[], None],
    ) -> PushOutcome:
        """Run one push to its end. Tasks given as a tuple are checked once and remembered for the next push.

        Args:
            push_id: greater than that of every earlier push.
            tasks: what this rank does, in plan order.
            groups: all mesh groups of the plan in order: this rank takes part in their barriers even where it has no task.
            targets: those that take part. Other targets of a task get nothing.
            collect_votes: awaited when every send and every barrier of this rank is done; returns when all targets that are
                not lost have voted yes, raises what the push shall fail with. Must end soon after it is cancelled.
            deadline_s: seconds from now.
            on_source_free: called once, as soon as nothing reads source storage any more; after a failure that may be later
                than the end of this call, since work in flight cannot be taken back.

        Raises:
            StageFailure: a stage or barrier ended with an error.
            DeadlineExceeded: the deadline passed.
            PushCancelled: it was called off by a `Cancelled` event without an error of its own.
            AllTargetsLost: no target is left.
            PlanError: the tasks cannot be run within the limits, or are not in plan order. Nothing was started.
            SchedulerClosed, IllegalTransition: the driver is closed, or another push runs.
            Exception: what ``collect_votes`` raised, or the error of a `Cancelled` event.

            Work that is still in flight is then abandoned: see `abandoned`.
        """
        loop = self._enter(push_id)
        deadline = loop.time() + deadline_s
        log = PushLog(push_id, self.clock())
        run = _Run(push_id=push_id, log=log, collect_votes=collect_votes, end=loop.create_future())
        self._run, self._log = run, log
        self._source_free[push_id] = on_source_free
        timer: asyncio.TimerHandle | None = None
        try:
            schedule = await self._schedule(tasks, groups)
            timer = loop.call_at(deadline, self._pass_deadline, deadline_s)
            last = await self._until_end(
                run, PushStarted(now=self.clock(), push_id=push_id, schedule=schedule, targets=targets)
            )
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(run)
        if isinstance(last, FailPush):
            try:
                raise last.error
            finally:
                del last, run  # Else the error, its traceback and this frame would keep each other alive.
        return log.outcome(self.clock(), last.peak_tmp_bytes)

    async def settle(self, timeout_s: float) -> int:
        """Between pushes: wait at most ``timeout_s`` seconds for work that failed ones left in flight; how much is left."""
        if not self._deaf:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._until_quiet(asyncio.get_running_loop())
            except TimeoutError:
                pass  # What is left is in the answer.
        return self.abandoned

    async def close(self, timeout_s: float) -> tuple[Stuck, ...]:
        """Call off the push that runs, wait at most ``timeout_s`` seconds for all work in flight, and watch nothing any more.

        Returns what was still in flight then: its buffers were not released and must not be freed. No push can be started
        afterwards. Closing twice is harmless.
        """
        self._closed = True
        loop = asyncio.get_running_loop()
        if loop is self._loop and not self._deaf:
            self.post(Cancelled(now=self.clock(), reason="the engine is being closed"))
            try:
                async with asyncio.timeout(timeout_s):
                    await self._until_quiet(loop)
            except TimeoutError:
                pass  # What is left is in the answer.
            finally:
                self._poller.stop()
                self._deaf = True
        now = self.clock()
        return tuple(
            Stuck(push_id=flight.push_id, stage=flight.stage, index=flight.index, seconds=now - flight.started)
            for flight in self._flights
        )

    # ------------------------------------------------------------------------------------------------------- one push

    def _enter(self, push_id: int) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise SchedulerClosed(f"push {push_id} was started on a closed driver; make a new engine")
        if self._run is not None:
            raise IllegalTransition(f"push {push_id} was started while push {self._run.push_id} runs; wait for its result")
        if self._loop is not loop and self._flights:
            raise SchedulerClosed(
                f"push {push_id} was started on another event loop than the last one, which left {len(self._flights)} stages "
                "in flight; use one loop for an engine's whole life"
            )
        if self._loop is not loop:
            self._loop, self._awake = loop, False  # a call planned on the old loop never comes
        return loop

    async def _schedule(self, tasks: Sequence[TaskSpec], groups: Sequence[int]) -> Schedule:
        if self._plan is not None and self._plan[0] is tasks and self._plan[1].groups == tuple(groups):
            return self._plan[1]
        builder = ScheduleBuilder(groups)
        for place, spec in enumerate(tasks, start=1):
            builder.add(spec)
            if place % _CHUNK == 0:
                await asyncio.sleep(0)
        schedule = builder.build()
        if isinstance(tasks, tuple):
            self._plan = (tasks, schedule)
        return schedule

    async def _until_end(self, run: _Run, event: PushStarted) -> FinishPush | FailPush:
        for early in run.early:
            if isinstance(early, Cancelled):
                raise early.error or PushCancelled(f"push {run.push_id} was called off before it started: {early.reason}")
        # The group never sees an exception of its own: stages and votes end as events, and the outcome is a value. So what
        # leaves it is a cancellation from outside, bare, and no group of exceptions.
        async with asyncio.TaskGroup() as scope:
            run.scope = scope
            for each in (event, *run.early):
                self._put(each)
            last = await run.end
            if run.votes is not None:
                run.votes.cancel()
        return last

    def _leave(self, run: _Run) -> None:
        # From here on nothing of this push is started any more, whatever the machine still has to say: see `_launch`.
        self._run = None
        if not run.end.done() or run.end.cancelled():  # cancelling a task cancels the future that it awaits
            run.log.ended = self.clock()
            self._put(Cancelled(now=self.clock(), reason="the task that ran it was cancelled"))
            self._pump()
        if self._machine.push is None or self._machine.push.push_id != run.push_id:
            self._tell_source_free(run.push_id)
        self._check_quiet()

    def _pass_deadline(self, deadline_s: float) -> None:
        self._put(DeadlinePassed(now=self.clock(), deadline_s=deadline_s))

    async def _votes(self, run: _Run) -> None:
        try:
            await run.collect_votes()
        except asyncio.CancelledError:
            if not run.end.done():
                self._put(VotesFailed(now=self.clock(), error=PushCancelled("collecting the votes was cancelled")))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the push fails with it
            self._put(VotesFailed(now=self.clock(), error=error))
        else:
            self._put(VotesCollected(now=self.clock()))

    # ----------------------------------------------------------------------------------------- events in, orders out

    def _put(self, event: Event) -> None:
        if not self._deaf:
            self._inbox.append(event)
            self._wake()

    def _wake(self) -> None:
        if not self._awake and self._loop is not None:
            self._awake = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Handle events and carry out orders, each event's orders before the next event, for one slice of time."""
        self._awake = True  # What is put meanwhile is seen below: no need to be woken for it.
        until = self.clock() + SLICE_S
        while self._orders or self._inbox:
            try:
                if self._orders:
                    order = self._orders.popleft()
                    self._carry_out[type(order)](order)
                else:
                    self._orders.extend(self._machine.handle(self._inbox.popleft()))
            except Exception as error:  # noqa: BLE001 - a callback or the machine is broken: the push fails with it
                self._crash(error)
            if self.clock() >= until:
                break
        self._awake = False
        if self._orders or self._inbox:
            self._wake()
        else:
            self._check_quiet()

    def _crash(self, error: Exception) -> None:
        """Something that must not raise did: end the push with it, and let everybody else go on."""
        run = self._run
        if run is None or run.end.done():
            assert self._loop is not None
            self._loop.call_exception_handler({"message": "syncline: error after the end of a push", "exception": error})
            return
        run.log.ended = self.clock()
        run.end.set_result(FailPush(push_id=run.push_id, error=error))
        self._inbox.append(Cancelled(now=self.clock(), reason=str(error), error=error))

    # ------------------------------------------------------------------------------------------------ carrying out orders

    def _running(self, push_id: int) -> _Run | None:
        """The run of ``push_id``, None once it has ended: orders may come late, even while the next push runs."""
        run = self._run
        return run if run is not None and run.push_id == push_id and not run.end.done() else None

    def _start_stage(self, order: StartStage) -> None:
        self._launch(order.push_id, order.stage, order.task, self._stages[order.stage].start)

    def _start_barrier(self, order: StartBarrier) -> None:
        self._launch(order.push_id, "barrier", order.group, self._barrier)

    def _launch(self, push_id: int, stage: SpanName, index: int, start: Callable[[int], Completion | None]) -> None:
        run = self._running(push_id)
        if run is None:
            self._report(push_id, stage, index, PushCancelled(f"{stage} was not started: the push has ended"))
            return
        close = None if self._open_range is None else self._open_range(stage, index)
        began = self.clock()
        try:
            completion = start(index)
        except Exception as error:  # noqa: BLE001 - whatever a stage raises, the push fails with it
            if close is not None:
                close()
            self._report(push_id, stage, index, error)
            return
        run.log.took_off(stage, began)
        if completion is None:
            run.log.landed(stage, index, began, self.clock())
            if close is not None:
                close()
            self._report(push_id, stage, index, None)
            return
        flight = Flight(
            push_id=push_id, stage=stage, index=index, completion=completion, started=began, log=run.log, close=close
        )
        self._flights.add(flight)
        if not completion.subscribe(partial(self._signalled, flight)):
            assert self._loop is not None
            self._poller.watch(flight, self._loop)

    def _signalled(self, flight: Flight) -> None:
        self._settle(flight)

    def _settle(self, flight: Flight) -> bool:
        """Ask whether ``flight`` is over, and report it if it is."""
        if flight.ended:
            return True
        failure: BaseException | None = None
        try:
            if not flight.completion.poll():
                return False
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - however the work ended, it ended
            failure = error
        flight.ended = True
        self._flights.discard(flight)
        flight.log.landed(flight.stage, flight.index, flight.started, self.clock())
        if flight.close is not None:
            flight.close()
        self._report(flight.push_id, flight.stage, flight.index, failure)
        return True

    def _report(self, push_id: int, stage: SpanName, index: int, error: BaseException | None) -> None:
        now = self.clock()
        event: Event
        if stage == "barrier":
            if error is None:
                event = BarrierDone(now=now, push_id=push_id, group=index)
            else:
                event = BarrierFailed(now=now, push_id=push_id, group=index, error=error)
        elif error is None:
            event = StageDone(now=now, push_id=push_id, task=index, stage=stage)
        else:
            event = StageFailed(now=now, push_id=push_id, task=index, stage=stage, error=error)
        self._put(event)

    def _collect_votes(self, order: CollectVotes) -> None:
        run = self._running(order.push_id)
        if run is not None and run.scope is not None:
            run.votes = run.scope.create_task(self._votes(run), name=f"votes of push {order.push_id}")

    def _tell_drop_target(self, order: DropTarget) -> None:
        if self._running(order.push_id) is not None:
            self._drop_target(order.target, order.at_task)

    def _tell_source_free(self, push_id: int) -> None:
        callback = self._source_free.pop(push_id, None)
        if callback is not None:
            callback()

    def _end_run(self, order: FinishPush | FailPush) -> None:
        run = self._running(order.push_id)
        push = self._machine.push
        if run is not None and push is not None:
            run.log.ended = self.clock()
            run.log.lost = dict(push.lost)
            run.end.set_result(order)

    # ------------------------------------------------------------------------------------------------------------ the end

    def _is_quiet(self) -> bool:
        return self._run is None and not (self._flights or self._orders or self._inbox)

    def _check_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done() and self._is_quiet():
            self._quiet.set_result(None)

    async def _until_quiet(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_quiet():
            self._quiet = loop.create_future()
            await self._quiet
