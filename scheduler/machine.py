"""The pure state machine of the pipeline: events in, instructions out. Same events in, same instructions out.

No I/O, no asyncio, no clock. One machine serves an engine for its whole life, because the bytes and the stage slots of work
that a failed push left in flight count against the next push.

The rules, which `PipelineMachine.validate` checks from the bare records:

1. Tasks are admitted in plan order, within the watermark; bytes are reserved first and released exactly once.
2. Every stage, and above all the collectives in ``prepare``, starts its tasks in plan order on every rank. Together with
   rule 1 this keeps ranks from waiting for each other in a circle: the first unfinished task of the plan can always go on.
3. Later stages first: what can be sent is sent before a new task is admitted.
4. A group's barrier starts when its last ``prepare`` on this rank is done; later groups' collectives wait until it is done.
5. Per-stage concurrency limits hold at every moment, abandoned work included.
6. Work that was started cannot be cancelled. It is abandoned, and its bytes stay reserved until its stage ends.
7. A push finishes only after every send and barrier is done and every target has voted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .budget import ByteBudget
from .errors import AllTargetsLost, DeadlineExceeded, IllegalTransition, InvariantBroken, PlanError, PushCancelled, StageFailure
from .events import (
    STAGES,
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
from .invariants import broken_rules
from .records import Phase, PushRecord, TaskRecord, TaskState, Transition

_START: dict[StageName, str] = {stage: f"start {stage}" for stage in STAGES}
_DONE: dict[StageName, str] = {stage: f"{stage} done" for stage in STAGES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The watermark in bytes, and how many tasks may be in each stage at once (at least 1)."""

    max_tmp_bytes: int
    h2d: int = 2
    prepare: int = 2
    send: int = 2

    def __post_init__(self) -> None:
        for name in ("h2d", "prepare", "send"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} concurrency is {getattr(self, name)}; it must be at least 1")


class PipelineMachine:
    """Decides what starts when. What it holds is public for `validate` and for reports, and changed by `handle` alone.

    Attributes:
        limits: watermark and concurrency limits.
        budget: temporary bytes of everything in flight, earlier pushes' abandoned work included.
        phase: where the current (or last) push is.
        push: its record; None before the first push.
        late: abandoned tasks of every push, by (push, task).
        late_barriers: abandoned barriers, as (push, group).
        in_flight: tasks in each stage, abandoned ones included.
        batch: the instructions of the last event.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.budget = ByteBudget(limits.max_tmp_bytes)
        self.phase = Phase.IDLE
        self.push: PushRecord | None = None
        self.late: dict[tuple[int, int], TaskRecord] = {}
        self.late_barriers: set[tuple[int, int]] = set()
        self.in_flight: dict[StageName, int] = {"h2d": 0, "prepare": 0, "send": 0}
        self.batch: list[Instruction] = []
        self._capacity: dict[StageName, int] = {"h2d": limits.h2d, "prepare": limits.prepare, "send": limits.send}
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            PushStarted: self._on_push_started,
            StageDone: self._on_stage_done,
            StageFailed: self._on_stage_failed,
            BarrierDone: self._on_barrier_done,
            BarrierFailed: self._on_barrier_failed,
            VotesCollected: self._on_votes_collected,
            VotesFailed: self._on_votes_failed,
            TargetLost: self._on_target_lost,
            DeadlinePassed: self._on_deadline_passed,
            Cancelled: self._on_cancelled,
        }

    @property
    def abandoned(self) -> int:
        """How many stages and barriers of ended pushes are still in flight."""
        return len(self.late) + len(self.late_barriers)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what is to be done, in this order, before the next event.

        Raises:
            IllegalTransition: the event is not allowed now; the machine is unchanged.
            PlanError: a push was started with a task that can never fit; the machine is unchanged.
        """
        self._now = event.now
        self.batch = []
        self._handlers[type(event)](event)
        return self.batch

    def validate(self) -> None:
        """Check every rule against the records. For tests: linear in the number of tasks. Raises `InvariantBroken`."""
        problems = broken_rules(self)
        if problems:
            raise InvariantBroken(problems)

    def story(self, task: int, push_id: int | None = None) -> tuple[Transition, ...]:
        """The transitions of a task of the current push (or of abandoned work of an earlier one), oldest first.

        Empty for a task that was not admitted yet. Of the tasks that are through, the last few hundred are kept.
        """
        record = self._find(self.push.push_id if push_id is None and self.push else push_id or 0, task)
        return record.story if record else ()

    # ------------------------------------------------------------------------------------------------- events: the push

    def _on_push_started(self, event: PushStarted) -> None:
        if self.phase in (Phase.RUNNING, Phase.VOTING) and self.push is not None:
            raise IllegalTransition(f"push {event.push_id} was started while push {self.push.push_id} is {self.phase.value}")
        if self.push is not None and event.push_id <= self.push.push_id:
            raise IllegalTransition(f"push {event.push_id} was started after push {self.push.push_id}; push ids must grow")
        largest = event.schedule.largest
        if largest is not None and largest.tmp_bytes > self.limits.max_tmp_bytes:
            problem = (
                f"task {largest.index} needs {largest.tmp_bytes} temporary bytes on this rank, above the watermark "
                f"max_tmp_bytes of {self.limits.max_tmp_bytes}: it could never start; raise max_tmp_bytes or lower bucket_bytes"
            )
            raise PlanError([problem])
        push = PushRecord(push_id=event.push_id, started=event.now, schedule=event.schedule, targets=event.targets)
        self.push = push
        self.phase = Phase.RUNNING
        self.budget.reset_peak()
        if push.all_lost():
            self._fail(push, AllTargetsLost(push.push_id, {}))
            return
        self._advance(push)
        self._check_source(push)

    def _on_target_lost(self, event: TargetLost) -> None:
        push = self._live()
        if push is None or not push.lose(event.target, event.at_task, event.reason):
            return
        self.batch.append(DropTarget(push_id=push.push_id, target=event.target, at_task=event.at_task))
        if push.all_lost():
            self._fail(push, AllTargetsLost(push.push_id, {lost.target: lost.reason for lost in push.lost.values()}))
            return
        for record in list(push.active.values()):
            if record.state is TaskState.WAITING and record.stage == "send" and not push.wanted(record.spec):
                self._finish_task(push, record, "nobody is left to send it to")
        self._advance(push)
        self._check_source(push)

    def _on_deadline_passed(self, event: DeadlinePassed) -> None:
        push = self._live()
        if push is not None:
            late = f"push {push.push_id} passed its deadline of {event.deadline_s:g} s"
            self._fail(push, DeadlineExceeded(f"{late}: {self._waits(push)}"))

    def _on_cancelled(self, event: Cancelled) -> None:
        push = self._live()
        if push is not None:
            error = event.error or PushCancelled(f"push {push.push_id} was called off: {event.reason}; {self._waits(push)}")
            self._fail(push, error)

    def _on_votes_collected(self, event: VotesCollected) -> None:
        if self.phase is Phase.FAILED:
            return
        if self.phase is not Phase.VOTING or self.push is None:
            raise IllegalTransition(f"votes came in while the push is {self.phase.value}: {self._waits(self.push)}")
        self.phase = Phase.FINISHED
        self.push.voted = True
        lost = tuple(self.push.lost[target] for target in sorted(self.push.lost))
        self.batch.append(FinishPush(push_id=self.push.push_id, peak_tmp_bytes=self.budget.peak, lost=lost))

    def _on_votes_failed(self, event: VotesFailed) -> None:
        push = self._live()
        if push is not None:
            self._fail(push, event.error)

    # ----------------------------------------------------------------------------------- events: stages and barriers end

    def _on_stage_done(self, event: StageDone) -> None:
        record = self._leave_stage(event)
        if record.state is TaskState.ABANDONED:
            self._end_abandoned(record, f"{event.stage} done late")
        else:
            self._after_stage(record, event.stage)
        self._go_on(record.push)

    def _on_stage_failed(self, event: StageFailed) -> None:
        record = self._leave_stage(event)
        push = record.push
        if record.state is TaskState.ABANDONED:
            self._end_abandoned(record, f"{event.stage} failed late: {event.error!r}")
        elif event.stage == "send" and record.spec.targets.isdisjoint(push.targets - push.lost.keys()):
            # Whoever it was for is lost already: how the send ends is nobody's concern.
            self._after_stage(record, "send")
        else:
            record.move(self._now, TaskState.WAITING, f"{event.stage} failed: {event.error!r}")
            self._fail(push, self._stage_failure(record, event))
        self._go_on(push)

    def _on_barrier_done(self, event: BarrierDone) -> None:
        push = self._leave_barrier(event)
        if push is not None:
            push.gate += 1
            self._go_on(push)

    def _on_barrier_failed(self, event: BarrierFailed) -> None:
        push = self._leave_barrier(event)
        if push is not None:
            failure = StageFailure(push_id=push.push_id, stage="barrier", task=None, group=event.group, cause=event.error)
            self._fail(push, failure)

    def _leave_stage(self, event: StageDone | StageFailed) -> TaskRecord:
        """The record whose stage has ended. Raises `IllegalTransition` if that stage was not in flight."""
        record = self._find(event.push_id, event.task)
        if record is None or record.state not in (TaskState.RUNNING, TaskState.ABANDONED) or record.stage != event.stage:
            state = f"is {record.state.value}" if record else "was not started"
            story = "\n  ".join(str(step) for step in record.story) if record else "none"
            raise IllegalTransition(
                f"{type(event).__name__} of {event.stage} for task {event.task} of push {event.push_id}, which {state}; "
                f"its story:\n  {story}"
            )
        self.in_flight[event.stage] -= 1
        return record

    def _leave_barrier(self, event: BarrierDone | BarrierFailed) -> PushRecord | None:
        """The push whose barrier has ended, None if it was abandoned. Raises `IllegalTransition` if none was in flight."""
        if (event.push_id, event.group) in self.late_barriers:
            self.late_barriers.remove((event.push_id, event.group))
            return None
        push = self.push
        if push is None or push.push_id != event.push_id or push.barrier is None or push.barrier != event.group:
            what = f"{type(event).__name__} of group {event.group} of push {event.push_id}"
            raise IllegalTransition(f"{what}: that barrier is not in flight")
        push.barrier = None
        return push

    def _after_stage(self, record: TaskRecord, stage: StageName) -> None:
        push = record.push
        if stage == "prepare":
            push.prepared[record.spec.group] += 1
        record.end_stage()
        if record.reading and ((stage == "prepare" and not record.spec.lends) or record.stage is None):
            record.reading = False
            push.readers -= 1
        if record.stage is None or (record.stage == "send" and not push.wanted(record.spec)):
            self._finish_task(push, record, _DONE[stage])
        else:
            record.move(self._now, TaskState.WAITING, _DONE[stage])

    def _go_on(self, push: PushRecord) -> None:
        """After something has ended: the current push may use what it gave back, and its own push may be done reading."""
        if self.push is not None:
            self._advance(self.push)
            self._check_source(self.push)
        self._check_source(push)

    # ------------------------------------------------------------------------------------------------ what may start now

    def _advance(self, push: PushRecord) -> None:
        """Start everything that may start, later stages first, until nothing more may."""
        if self.phase is not Phase.RUNNING:
            return
        while self._sweep(push):
            pass
        if self._complete(push):
            self.phase = Phase.VOTING
            self.batch.append(CollectVotes(push_id=push.push_id))

    def _sweep(self, push: PushRecord) -> bool:
        """Start what may start, later stages first. True if it made a task the next one that begins with a later stage."""
        admitted = push.admitted
        self._start_barrier(push)
        while self._start_next(push, "send"):
            pass
        while self._start_next(push, "prepare"):
            pass
        while self._start_next(push, "h2d"):
            pass
        tasks = push.schedule.tasks
        return admitted < push.admitted < len(tasks) and tasks[push.admitted].stages[0] != "h2d"

    def _start_barrier(self, push: PushRecord) -> None:
        if push.barrier is not None or push.gate == len(push.schedule.groups):
            return
        group = push.schedule.groups[push.gate]
        if self._barrier_due(push, group):
            push.barrier, push.barrier_since = group, self._now
            self.batch.append(StartBarrier(push_id=push.push_id, group=group))

    def _start_next(self, push: PushRecord, stage: StageName) -> bool:
        spec = self._head(push, stage) if self._slot_free(stage) else None
        if spec is None or not self._gate_open(push, spec, stage):
            return False
        record = push.active.get(spec.index)
        if record is None:
            if spec.stages[0] != stage or not self._admissible(push, spec):
                return False
            record = self._admit(push, spec)
        elif record.state is not TaskState.WAITING or record.stage != stage:
            return False
        self._start(push, record, stage)
        return True

    def _head(self, push: PushRecord, stage: StageName) -> TaskSpec | None:
        """The only task that may start ``stage`` next: stages start in plan order."""
        queue = push.schedule.queues[stage]
        place = push.heads[stage]
        if push.picky and stage == "send":
            while place < len(queue) and not push.wanted(queue[place]):
                place += 1
            push.heads[stage] = place
        return queue[place] if place < len(queue) else None

    def _slot_free(self, stage: StageName) -> bool:
        return self.in_flight[stage] < self._capacity[stage]

    def _gate_open(self, push: PushRecord, spec: TaskSpec, stage: StageName) -> bool:
        """Whether the barriers of all earlier groups are done. ``h2d`` is local and may run ahead of them."""
        return stage == "h2d" or push.schedule.position[spec.group] <= push.gate

    def _barrier_due(self, push: PushRecord, group: int) -> bool:
        return push.prepared[group] == push.schedule.prepares[group]

    def _admissible(self, push: PushRecord, spec: TaskSpec) -> bool:
        if push.picky:
            self._pass_over_unwanted(push)
        return push.schedule.tasks[push.admitted] is spec and self.budget.fits(spec.tmp_bytes)

    def _complete(self, push: PushRecord) -> bool:
        if push.picky:
            self._pass_over_unwanted(push)
        return len(push.done) == len(push.schedule.tasks) and push.gate == len(push.schedule.groups)

    # --------------------------------------------------------------------------------------------------- changes of state

    def _admit(self, push: PushRecord, spec: TaskSpec) -> TaskRecord:
        record = TaskRecord(spec, push)
        self.budget.reserve(record.key, spec.tmp_bytes)
        push.active[spec.index] = record
        push.admitted += 1
        return record

    def _pass_over_unwanted(self, push: PushRecord) -> None:
        """Tasks that would only be sent, to nobody, are done without being admitted."""
        tasks = push.schedule.tasks
        while push.admitted < len(tasks):
            spec = tasks[push.admitted]
            if spec.stages != ("send",) or push.wanted(spec):
                return
            push.admitted += 1
            push.done.add(spec.index)
            push.readers -= spec.reads_source

    def _start(self, push: PushRecord, record: TaskRecord, stage: StageName) -> None:
        record.move(self._now, TaskState.RUNNING, _START[stage])
        push.heads[stage] += 1
        self.in_flight[stage] += 1
        self.batch.append(StartStage(push_id=push.push_id, task=record.spec.index, stage=stage))

    def _finish_task(self, push: PushRecord, record: TaskRecord, why: str) -> None:
        self._release(record, TaskState.DONE, why)
        push.done.add(record.spec.index)

    def _end_abandoned(self, record: TaskRecord, why: str) -> None:
        del self.late[record.key]
        self._release(record, TaskState.DROPPED, why)

    def _release(self, record: TaskRecord, state: TaskState, why: str) -> None:
        """Nothing of the task is in flight any more: give its bytes back."""
        push = record.push
        record.move(self._now, state, why)
        if record.reading:
            record.reading = False
            push.readers -= 1
        self.budget.release(record.key)
        push.active.pop(record.spec.index, None)
        push.recent.append(record)
        self.batch.append(ReleaseBuffers(push_id=push.push_id, task=record.spec.index))

    def _fail(self, push: PushRecord, error: Exception) -> None:
        """End the push: what is in flight is abandoned, what is not gives its bytes back, what is pending never starts."""
        self.phase = Phase.FAILED
        self.batch.append(FailPush(push_id=push.push_id, error=error))
        if push.barrier is not None:
            self.late_barriers.add((push.push_id, push.barrier))
            push.barrier = None
        push.readers = sum(record.reading for record in push.active.values())
        for record in list(push.active.values()):
            if record.state is TaskState.RUNNING:
                self._abandon(push, record)
            else:
                self._release(record, TaskState.DROPPED, "the push failed")
        self._check_source(push)

    def _abandon(self, push: PushRecord, record: TaskRecord) -> None:
        """Work that was started cannot be taken back: its bytes stay reserved until its stage ends."""
        record.move(self._now, TaskState.ABANDONED, f"the push failed with {record.stage} in flight")
        del push.active[record.spec.index]
        self.late[record.key] = record

    def _check_source(self, push: PushRecord) -> None:
        if push.readers == 0 and not push.source_free:
            push.source_free = True
            self.batch.append(SourceFree(push_id=push.push_id))

    # ------------------------------------------------------------------------------------------------------------ look-ups

    def _live(self) -> PushRecord | None:
        return self.push if self.phase in (Phase.RUNNING, Phase.VOTING) else None

    def _find(self, push_id: int, task: int) -> TaskRecord | None:
        if (push_id, task) in self.late:
            return self.late[push_id, task]
        push = self.push
        if push is None or push.push_id != push_id:
            return None
        if task in push.active:
            return push.active[task]
        return next((record for record in reversed(push.recent) if record.spec.index == task), None)

    def _stage_failure(self, record: TaskRecord, event: StageFailed) -> StageFailure:
        return StageFailure(
            push_id=event.push_id,
            stage=event.stage,
            task=event.task,
            group=record.spec.group,
            cause=event.error,
            story=[str(step) for step in record.story],
        )

    def _waits(self, push: PushRecord | None) -> str:
        """How far the push is and what it waits for, in one line for error messages."""
        if push is None:
            return "no push was started"
        left_over = f"; {self.abandoned} stages of an earlier push are in flight too" if self.abandoned else ""
        return push.progress(self._now) + left_over
