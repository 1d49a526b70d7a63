"""Every guard of the machine is shown able to fail: taken away, both judges find it."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

from syncline.scheduler.errors import BudgetError, IllegalTransition, InvariantBroken
from syncline.scheduler.events import (
    STAGES,
    Cancelled,
    FinishPush,
    ReleaseBuffers,
    SourceFree,
    TargetLost,
    VotesCollected,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.records import Phase, TaskState


def _load(name: str):
    """A module beside this one: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(f"syncline_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


around = _load("pipeline_world")
TARGETS, World, make_tasks = around.TARGETS, around.World, around.make_tasks


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
