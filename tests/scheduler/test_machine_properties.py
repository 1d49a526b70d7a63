"""The rules of the pipeline under everything that can happen to it, in any order.

Two independent judges look at every step: `PipelineMachine.validate`, from the machine's records, and `Auditor`, from the
stream of instructions alone. Both are shown to find every way in which a guard can be wrong.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from syncline.scheduler.errors import BudgetError, IllegalTransition, InvariantBroken
from syncline.scheduler.events import (
    STAGES,
    BarrierDone,
    BarrierFailed,
    Cancelled,
    CollectVotes,
    DeadlinePassed,
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
    VotesFailed,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.records import Phase, TaskState
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
        last = "prepare" if "prepare" in spec.stages else spec.stages[-1]
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
            )
        )
    return tasks


class AnythingGoes(RuleBasedStateMachine):
    @initialize(
        max_bytes=st.integers(0, 12), h2d=st.integers(1, 3), prepare=st.integers(1, 3), send=st.integers(1, 3)
    )
    def begin(self, max_bytes: int, h2d: int, prepare: int, send: int) -> None:
        self.world = World(Limits(max_tmp_bytes=max_bytes, h2d=h2d, prepare=prepare, send=send))

    @precondition(lambda self: not self.world.live)
    @rule(data=st.data(), count=st.integers(0, 8), groups=st.integers(1, 3), wanted=st.sets(st.sampled_from(TARGETS)))
    def push(self, data: st.DataObject, count: int, groups: int, wanted: set[int]) -> None:
        def draw(low: int, high: int) -> int:
            return data.draw(st.integers(low, high))

        tasks = make_tasks(draw, count, groups, self.world.machine.limits.max_tmp_bytes)
        self.world.start(tasks, range(groups), wanted or {0})

    @precondition(lambda self: self.world.stages)
    @rule(place=st.integers(0, 20))
    def stage_ends(self, place: int) -> None:
        self.world.end_stage(place)

    @precondition(lambda self: self.world.stages)
    @rule(place=st.integers(0, 20))
    def another_stage_ends(self, place: int) -> None:
        self.world.end_stage(place)

    @precondition(lambda self: self.world.barriers)
    @rule(place=st.integers(0, 20))
    def barrier_ends(self, place: int) -> None:
        self.world.end_barrier(place)

    @precondition(lambda self: self.world.stages)
    @rule(place=st.integers(0, 20))
    def stage_fails(self, place: int) -> None:
        self.world.end_stage(place, OSError("broken"))

    @precondition(lambda self: self.world.barriers)
    @rule(place=st.integers(0, 20))
    def barrier_fails(self, place: int) -> None:
        self.world.end_barrier(place, OSError("broken"))

    @rule(which=st.integers(0, 3), at_task=st.integers(0, 12))
    def target_lost(self, which: int, at_task: int) -> None:
        self.world.feed(TargetLost, target=which, at_task=at_task, reason="killed")

    @rule()
    def deadline(self) -> None:
        self.world.feed(DeadlinePassed, deadline_s=1.0)

    @rule()
    def cancelled(self) -> None:
        self.world.feed(Cancelled, reason="the trainer said so")

    @precondition(lambda self: self.world.machine.phase is Phase.VOTING)
    @rule(ok=st.booleans())
    def votes(self, ok: bool) -> None:
        if ok:
            self.world.feed(VotesCollected)
        else:
            self.world.feed(VotesFailed, error=OSError("no"))

    @precondition(lambda self: self.world.machine.phase in (Phase.RUNNING, Phase.IDLE))
    @rule()
    def early_votes_are_illegal(self) -> None:
        with pytest.raises(IllegalTransition):
            self.world.machine.handle(VotesCollected(now=self.world.now))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


AnythingGoes.TestCase.settings = settings(
    deadline=None, max_examples=250, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestAnythingGoes = AnythingGoes.TestCase


# -------------------------------------------------------------------------------------------- guards shown able to fail


def play(seed: int, kind=PipelineMachine, *, validate: bool, audit: bool) -> None:
    """A few random pushes, with a failure, loss or cancellation now and then."""
    rng = random.Random(seed)
    size = rng.choice((0, 3, 8, 8, 20))
    limits = Limits(max_tmp_bytes=size, h2d=rng.randint(1, 3), prepare=rng.randint(1, 3), send=rng.randint(1, 3))
    world = World(limits, kind, validate=validate, audit=audit)
    for _ in range(3):
        groups = rng.randint(1, 3)
        tasks = make_tasks(rng.randint, rng.randint(0, 9), groups, rng.choice((0, size // 3, size)))
        world.start(tasks, range(groups), TARGETS)
        while world.live and (world.stages or world.barriers or world.machine.phase is Phase.VOTING):
            step(world, rng)
        if world.live:
            raise AssertionError("the push stands still")
    world.drain()


def step(world: World, rng: random.Random) -> None:
    chance = rng.random()
    if chance < 0.02:
        world.feed(Cancelled, reason="x")
    elif chance < 0.06:
        world.feed(TargetLost, target=rng.randint(0, 2), at_task=rng.randint(0, 12), reason="x")
    elif world.stages and (chance < 0.75 or not world.barriers):
        world.end_stage(rng.randrange(100), OSError() if chance < 0.08 else None)
    elif world.barriers:
        world.end_barrier(rng.randrange(100))
    elif world.machine.phase is Phase.VOTING:
        world.feed(VotesCollected)


class NoWatermark(PipelineMachine):
    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.budget.limit = 10**9


class AdmitsOutOfOrder(PipelineMachine):
    def _admissible(self, push, spec) -> bool:
        return self.budget.fits(spec.tmp_bytes)


class ReleasesTwice(PipelineMachine):
    def _release(self, record, state, why) -> None:
        super()._release(record, state, why)
        self.batch.append(self.batch[-1])


class ForgetsToRelease(PipelineMachine):
    def _finish_task(self, push, record, why) -> None:
        if record.stage is None:
            super()._finish_task(push, record, why)
        else:  # leaves a task that nobody wants in the pipeline
            record.move(self._now, TaskState.WAITING, why)


class ReleasesAbandonedWork(PipelineMachine):
    def _abandon(self, push, record) -> None:
        super()._abandon(push, record)
        self.budget.release(record.key)
        self.batch.append(ReleaseBuffers(push_id=push.push_id, task=record.spec.index))

    def _end_abandoned(self, record, why) -> None:
        del self.late[record.key]


class PreparesAsTheyCome(PipelineMachine):
    def _head(self, push, stage):
        if stage == "prepare":
            for record in reversed(push.active.values()):
                if record.state is TaskState.WAITING and record.stage == stage:
                    return record.spec
        return super()._head(push, stage)


class SendsAsTheyCome(PipelineMachine):
    def _head(self, push, stage):
        if stage == "send":
            for record in push.active.values():
                if record.state is TaskState.WAITING and record.stage == stage and push.wanted(record.spec):
                    return record.spec
        return super()._head(push, stage)


class EarlierStagesFirst(PipelineMachine):
    def _sweep(self, push) -> bool:
        started = [self._start_next(push, stage) for stage in STAGES]
        self._start_barrier(push)
        return any(started)


class BarrierEarly(PipelineMachine):
    def _barrier_due(self, push, group) -> bool:
        return True


class BarrierWaitsForSends(PipelineMachine):
    def _barrier_due(self, push, group) -> bool:
        return super()._barrier_due(push, group) and not any(r.spec.group == group for r in push.active.values())


class NoGate(PipelineMachine):
    def _gate_open(self, push, spec, stage) -> bool:
        return True


class NoConcurrencyLimit(PipelineMachine):
    def _slot_free(self, stage) -> bool:
        return True


class ForgetsAbandonedSlots(PipelineMachine):
    def _on_push_started(self, event) -> None:
        self.in_flight = dict.fromkeys(STAGES, 0)
        super()._on_push_started(event)


class VotesBeforeTheSendsAreDone(PipelineMachine):
    def _complete(self, push) -> bool:
        return push.admitted == len(push.schedule.tasks) and push.gate == len(push.schedule.groups)


class VotesBeforeTheBarrier(PipelineMachine):
    def _complete(self, push) -> bool:
        return len(push.done) == len(push.schedule.tasks)


class FinishesWithoutVotes(PipelineMachine):
    def _advance(self, push) -> None:
        super()._advance(push)
        if self.phase is Phase.VOTING:
            self.phase = Phase.FINISHED
            self.batch.append(FinishPush(push_id=push.push_id, peak_tmp_bytes=0, lost=()))


class GoesOnWithoutTargets(PipelineMachine):
    def _fail(self, push, error) -> None:
        if not push.all_lost():
            super()._fail(push, error)


class FreesTheSourceEarly(PipelineMachine):
    def _check_source(self, push) -> None:
        if not push.source_free:
            push.source_free = True
            self.batch.append(SourceFree(push_id=push.push_id))


class NeverFreesTheSource(PipelineMachine):
    def _check_source(self, push) -> None:
        pass


class FreesTheSourceUnderAbandonedWork(PipelineMachine):
    def _abandon(self, push, record) -> None:
        super()._abandon(push, record)
        if record.reading:
            record.reading = False
            push.readers -= 1


class OneAtATime(PipelineMachine):
    def _admissible(self, push, spec) -> bool:
        return super()._admissible(push, spec) and not push.active


# kind -> what validate() says, what the auditor says
WRONG = {
    NoWatermark: ("rule 1: .* above the watermark", "above the watermark"),
    AdmitsOutOfOrder: ("rule 1: the tasks admitted", "admitted out of order"),
    ReleasesTwice: ("rule 1: the buffers", "released twice"),
    ForgetsToRelease: ("progress: .* nobody wants", "released: False"),
    ReleasesAbandonedWork: ("rule 1: the budget holds", "released with work in flight"),
    PreparesAsTheyCome: ("rule 2: prepare", "prepare of"),
    SendsAsTheyCome: ("rule 2: send", "send of"),
    EarlierStagesFirst: ("rule 3", "admitted before sending"),
    BarrierEarly: ("rule 4: the barrier", "barrier before the last prepare"),
    BarrierWaitsForSends: ("progress: the barrier", None),  # slower, and no instruction is wrong
    NoGate: ("rule 4: task", "collective before the barrier"),
    NoConcurrencyLimit: ("rule 5: .* its limit", "above a concurrency limit"),
    ForgetsAbandonedSlots: ("rule 5: .* are counted", "above a concurrency limit"),
    VotesBeforeTheSendsAreDone: ("rule 7: the push is voting", "voting before all is sent"),
    VotesBeforeTheBarrier: ("rule 7: the push is voting", "voting before the last barrier"),
    FinishesWithoutVotes: ("rule 7: .* did not vote", "finished early"),
    GoesOnWithoutTargets: ("rule 7: all targets are lost", "all targets are lost"),
    FreesTheSourceEarly: ("source: free is True", "source free: True"),
    NeverFreesTheSource: ("source: free is False", "source free: False"),
    FreesTheSourceUnderAbandonedWork: ("source: free is True", "source free: True"),
    OneAtATime: ("progress: .* could start", None),
}


def verdicts(kind, judge: str, seeds: int = 300):
    """What one judge says about a machine, over a number of seeds."""
    for seed in range(seeds):
        try:
            play(seed, kind, validate=judge == "validate", audit=judge == "audit")
        except InvariantBroken as error:
            yield str(error)
        except AssertionError as error:
            yield f"AssertionError: {error}"
        except (BudgetError, IllegalTransition, IndexError, KeyError):
            pass  # the machine fell over its own mistake before the judge saw it


CASES = [
    pytest.param(kind, judge, pattern, id=f"{kind.__name__}-{judge}")
    for kind, patterns in WRONG.items()
    for judge, pattern in zip(("validate", "audit"), patterns, strict=True)
    if pattern is not None
]


@pytest.mark.parametrize(("kind", "judge", "pattern"), CASES)
def test_every_guard_is_missed(kind, judge: str, pattern: str) -> None:
    said = []
    for verdict in verdicts(kind, judge):
        if re.search(pattern, verdict):
            return
        said.append(verdict)
    pytest.fail(f"{judge} did not find {kind.__name__}; it said {said[:5]}")


def test_the_machine_itself_passes_what_the_wrong_ones_fail() -> None:
    for seed in range(300):
        play(seed, validate=True, audit=True)
