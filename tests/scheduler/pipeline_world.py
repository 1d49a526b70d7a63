"""What is around a pipeline machine in a test: the work in flight, and two independent judges of every step.

`PipelineMachine.validate` judges by the machine's records, `Auditor` by the stream of instructions alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.scheduler.events import (
    STAGES,
    BarrierDone,
    BarrierFailed,
    CollectVotes,
    DropTarget,
    FailPush,
    FinishPush,
    PushStarted,
    ReleaseBuffers,
    SourceFree,
    StageDone,
    StageFailed,
    StartBarrier,
    StartStage,
    TargetLost,
    TaskSpec,
    VotesCollected,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.records import Phase
from syncline.scheduler.schedule import Schedule

SHAPES = tuple(
    tuple(stage for bit, stage in enumerate(STAGES) if mask >> bit & 1) for mask in range(1, 8)
)  # every choice of stages
TARGETS = (0, 1, 2)


# ------------------------------------------------------------------------------------------------------------ the auditor


@dataclass
class Course:
    """One push, as its instructions tell it."""

    tasks: dict[int, TaskSpec]
    groups: tuple[int, ...]
    targets: frozenset[int]
    started: dict[int, list[str]] = field(default_factory=dict)
    ended: dict[int, list[str]] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    barriers: list[int] = field(default_factory=list)
    barriers_done: list[int] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    failed: bool = False
    free: bool = False
    asked: bool = False
    voted: bool = False
    finished: bool = False

    def wanted(self, spec: TaskSpec) -> bool:
        return any(t in self.targets and spec.index < self.lost.get(t, 10**9) for t in spec.targets)

    def over(self, spec: TaskSpec) -> bool:
        """Whether the task has nothing left to do."""
        left = [s for s in spec.stages if s not in self.ended.get(spec.index, [])]
        return not left or (left == ["send"] and not self.wanted(spec) and not self.flying(spec.index))

    def flying(self, index: int) -> bool:
        return len(self.started.get(index, [])) > len(self.ended.get(index, []))

    def reading(self, spec: TaskSpec) -> bool:
        """Whether the task reads source storage, or will."""
        if not spec.reads_source or (self.failed and not self.flying(spec.index)):
            return False
        if self.passed_over(spec):  # found out when its turn comes
            return any(i < spec.index and i not in self.started and not self.passed_over(t) for i, t in self.tasks.items())
        last = "prepare" if "prepare" in spec.stages and not spec.lends else spec.stages[-1]
        return last not in self.ended.get(spec.index, []) and not self.over(spec)

    def passed_over(self, spec: TaskSpec) -> bool:
        """Whether the task would only be sent, to nobody, and so is never started."""
        return spec.stages == ("send",) and spec.index not in self.started and not self.wanted(spec)


class Auditor:
    """Checks the stream of instructions against the rules, knowing nothing of the machine."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.courses: dict[int, Course] = {}
        self.now = 0

    def see(self, event, orders) -> None:
        self.note(event)
        admitted = False
        for order in orders:
            if isinstance(order, StartStage):
                first = self.courses[order.push_id].tasks[order.task].stages[0] == order.stage
                assert not (admitted and order.stage == "send" and not first), "admitted before sending"
                admitted |= first
            self.obey(order)
        self.settle()

    def note(self, event) -> None:
        match event:
            case PushStarted():
                tasks = {spec.index: spec for spec in event.schedule.tasks}
                self.courses[event.push_id] = Course(tasks, event.schedule.groups, event.targets)
                self.now = event.push_id
            case StageDone() | StageFailed():
                self.courses[event.push_id].ended.setdefault(event.task, []).append(event.stage)
            case BarrierDone() | BarrierFailed():
                self.courses[event.push_id].barriers_done.append(event.group)
            case TargetLost():
                course = self.courses.get(self.now)
                if course and not course.finished and not course.failed and event.target in course.targets:
                    course.lost[event.target] = min(event.at_task, course.lost.get(event.target, 10**9))
            case VotesCollected():
                self.courses[self.now].voted = True

    def obey(self, order) -> None:
        course = self.courses[order.push_id]
        match order:
            case StartStage():
                self.start(course, course.tasks[order.task], order.stage)
            case StartBarrier():
                self.enter(course, order.group)
            case ReleaseBuffers():
                assert order.task in course.started, "released and never started"
                assert order.task not in course.released, "released twice"
                assert not course.flying(order.task), "released with work in flight"
                assert course.failed or course.over(course.tasks[order.task]), "released too soon"
                course.released.add(order.task)
            case DropTarget():
                assert course.lost[order.target] == order.at_task
            case SourceFree():
                assert not course.free, "source freed twice"
                course.free = True
            case CollectVotes():
                assert not course.failed
                assert all(course.over(spec) for spec in course.tasks.values()), "voting before all is sent"
                assert tuple(course.barriers_done) == course.groups, "voting before the last barrier"
                course.asked = True
            case FinishPush():
                assert course.asked and course.voted and not course.failed, "finished early"
                assert not course.targets <= course.lost.keys(), "finished with no target left"
                course.finished = True
            case FailPush():
                assert not course.finished and not course.failed
                course.failed = True

    def start(self, course: Course, spec: TaskSpec, stage: str) -> None:
        assert not course.failed and not course.finished, "started after the end"
        started = course.started.setdefault(spec.index, [])
        assert (*started, stage) == spec.stages[: len(started) + 1], "stages out of order"
        assert course.ended.get(spec.index, []) == started, "two stages of a task at once"
        later = [i for i, names in course.started.items() if i > spec.index and stage in names]
        assert not later, f"{stage} of {spec.index} started after that of {later}"
        if not started:
            waiting = [i for i, other in course.tasks.items() if i < spec.index and i not in course.started]
            assert all(course.passed_over(course.tasks[i]) for i in waiting), "admitted out of order"
        if stage == "send":
            assert course.wanted(spec), "sent to nobody"
        if stage != "h2d":
            before = course.groups[: course.groups.index(spec.group)]
            assert set(before) <= set(course.barriers_done), "collective before the barrier of an earlier group"
        started.append(stage)
        self.check_limits()

    def enter(self, course: Course, group: int) -> None:
        assert not course.failed and not course.finished
        course.barriers.append(group)
        assert tuple(course.barriers) == course.groups[: len(course.barriers)], "barriers out of order"
        assert len(course.barriers) == len(course.barriers_done) + 1, "two barriers at once"
        for spec in course.tasks.values():
            if spec.group == group and "prepare" in spec.stages:
                assert "prepare" in course.ended.get(spec.index, []), "barrier before the last prepare"

    def check_limits(self) -> None:
        held = 0
        flying = dict.fromkeys(STAGES, 0)
        for course in self.courses.values():
            for index, started in course.started.items():
                held += course.tasks[index].tmp_bytes if index not in course.released else 0
                if course.flying(index):
                    flying[started[-1]] += 1
        assert held <= self.limits.max_tmp_bytes, "above the watermark"
        assert all(flying[stage] <= getattr(self.limits, stage) for stage in STAGES), "above a concurrency limit"

    def settle(self) -> None:
        """What must hold once all instructions are out."""
        for course in self.courses.values():
            for index, spec in course.tasks.items():
                over = index in course.started and not course.flying(index) and (course.failed or course.over(spec))
                assert over == (index in course.released), f"task {index} released: {index in course.released}"
            reading = [i for i, spec in course.tasks.items() if course.reading(spec)]
            assert course.free == (not reading), f"source free: {course.free}, read by {reading}"
        course = self.courses.get(self.now)
        if course and not course.failed:
            assert not course.targets <= course.lost.keys(), "all targets are lost"
            done = all(course.over(s) for s in course.tasks.values()) and tuple(course.barriers_done) == course.groups
            assert done == course.asked, "votes are not asked for"
        self.check_progress()

    def check_progress(self) -> None:
        """The first unfinished task of the plan can always go on, unless what it waits for is still in flight."""
        course = self.courses.get(self.now)
        if course is None or course.failed or course.asked:
            return
        busy = any(c.flying(i) for c in self.courses.values() for i in c.started)
        waits_for_barrier = len(course.barriers) > len(course.barriers_done)
        assert busy or waits_for_barrier, "everything stands still"


# -------------------------------------------------------------------------------------------------------------- the world


class World:
    """A machine with what is in flight around it, and both judges."""

    def __init__(self, limits: Limits, kind=PipelineMachine, *, validate=True, audit=True) -> None:
        self.machine = kind(limits)
        self.auditor = Auditor(limits) if audit else None
        self.validate = validate
        self.stages: list[tuple[int, int, str]] = []
        self.barriers: list[tuple[int, int]] = []
        self.push_id = 0
        self.now = 0.0

    @property
    def live(self) -> bool:
        return self.machine.phase in (Phase.RUNNING, Phase.VOTING)

    def feed(self, kind, **fields) -> None:
        self.now += 1.0
        event = kind(now=self.now, **fields)
        orders = self.machine.handle(event)
        for order in orders:
            if isinstance(order, StartStage):
                self.stages.append((order.push_id, order.task, order.stage))
            elif isinstance(order, StartBarrier):
                self.barriers.append((order.push_id, order.group))
        if self.auditor:
            self.auditor.see(event, orders)
        if self.validate:
            self.machine.validate()

    def start(self, tasks, groups, targets) -> None:
        self.push_id += 1
        self.feed(PushStarted, push_id=self.push_id, schedule=Schedule.of(tasks, groups), targets=frozenset(targets))

    def end_stage(self, place: int, error: BaseException | None = None) -> None:
        push_id, task, stage = self.stages.pop(place % len(self.stages))
        if error is None:
            self.feed(StageDone, push_id=push_id, task=task, stage=stage)
        else:
            self.feed(StageFailed, push_id=push_id, task=task, stage=stage, error=error)

    def end_barrier(self, place: int, error: BaseException | None = None) -> None:
        push_id, group = self.barriers.pop(place % len(self.barriers))
        if error is None:
            self.feed(BarrierDone, push_id=push_id, group=group)
        else:
            self.feed(BarrierFailed, push_id=push_id, group=group, error=error)

    def drain(self) -> None:
        """Let everything in flight end, and look that nothing is left over."""
        while self.stages or self.barriers or self.machine.phase is Phase.VOTING:
            if self.stages:
                self.end_stage(0)
            elif self.barriers:
                self.end_barrier(0)
            else:
                self.feed(VotesCollected)
        assert not self.live, "the push stands still"
        assert self.machine.budget.in_use == 0
        assert self.machine.abandoned == 0
        assert self.machine.push is None or self.machine.push.source_free


def make_tasks(draw_int, count: int, groups: int, max_bytes: int) -> list[TaskSpec]:
    """``draw_int(low, high)`` decides everything."""
    marks = sorted(draw_int(0, groups - 1) for _ in range(count))
    tasks, index = [], 0
    for group in marks:
        index += draw_int(1, 3)  # a rank does not take part in every task of the plan
        tasks.append(
            TaskSpec(
                index=index,
                group=group,
                tmp_bytes=draw_int(0, max_bytes),
                stages=SHAPES[draw_int(0, len(SHAPES) - 1)],
                targets=frozenset(t for t in TARGETS if draw_int(0, 1)) or frozenset({draw_int(0, 2)}),
                reads_source=draw_int(0, 3) > 0,
                lends=draw_int(0, 3) == 0,
            )
        )
    return tasks
