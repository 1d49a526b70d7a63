"""The rules of the pipeline under everything that can happen to it, in any order."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from syncline.scheduler.errors import IllegalTransition
from syncline.scheduler.events import (
    Cancelled,
    DeadlinePassed,
    TargetLost,
    VotesCollected,
    VotesFailed,
)
from syncline.scheduler.machine import Limits
from syncline.scheduler.records import Phase


def _load(name: str):
    """A module beside this one: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(f"syncline_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


around = _load("pipeline_world")
TARGETS, World, make_tasks = around.TARGETS, around.World, around.make_tasks


class AnythingGoes(RuleBasedStateMachine):
    @initialize(max_bytes=st.integers(0, 12), h2d=st.integers(1, 3), prepare=st.integers(1, 3), send=st.integers(1, 3))
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
