"""The simulation of one push: `Scenario` (what is moved, by what, on what) and `simulate`, which gives a `Prediction`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from syncline.engine.config import TransferConfig
from syncline.scheduler.driver import Limits, PushOutcome
from syncline.scheduler.layout import Manifest
from syncline.scheduler.options import PlanOptions
from syncline.scheduler.outcome import SpanName
from syncline.scheduler.plan import Plan, build_plan

from .cores import HostWorld
from .critical import CriticalPath, critical_path
from .gpus import GpuWorld
from .hardware import Gpus, Hardware
from .load import Load, load_of
from .play import Knobs, play
from .world import Disturbance, Terms, World

_RING_BUCKETS = 8
_NEAR = 3
"""Temporary bytes of a part for each of its own, at most: its bucket, its messages, what is copied out of files."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a push is expected to be like.

    Attributes:
        seconds: of the whole push.
        control_s: of these, control before the first task and after the last commit. ``commit_s``: the longest commit.
        busy_s: for each stage, seconds with at least one task in it, on the rank where that is longest.
        used_s: for each kind of resource, seconds of service of the one that served longest. The largest is the bound: no
            order of tasks is faster.
        peak_tmp_bytes: on the rank where it is highest.
        landing_bytes: spare memory for landing, over all receivers (or hosts, where it is shared).
        sent_bytes: over all receivers. ``tasks``: of the plan.
        critical: what the push waited for, from its end back to its beginning.
        outcomes: what each source rank's driver says.
    """

    seconds: float
    control_s: float
    commit_s: float
    busy_s: Mapping[str, float]
    used_s: Mapping[str, float]
    peak_tmp_bytes: int
    landing_bytes: int
    sent_bytes: int
    tasks: int
    critical: CriticalPath = field(repr=False)
    outcomes: Sequence[PushOutcome] = field(repr=False)

    @property
    def bottleneck(self) -> str:
        """The kind of resource that served longest; ``control`` if that took longer than any."""
        name = max(self.used_s, key=lambda kind: self.used_s[kind])
        return name if self.used_s[name] >= self.control_s else "control"

    @property
    def bound_s(self) -> float:
        """Seconds that the busiest resource serves in any case."""
        return max(self.used_s.values(), default=0.0)


class Plans:
    """Plans by their options: made when first asked for."""

    def __init__(self, sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]]) -> None:
        self.sources, self.targets = sources, targets
        self._made: dict[PlanOptions, tuple[Plan, Load]] = {}

    def of(self, options: PlanOptions) -> tuple[Plan, Load]:
        """The plan, and what it asks of each rank. Raises `PlanError`."""
        if options not in self._made:
            plan = next((plan for known, (plan, _) in self._made.items() if _same(plan, known, options)), None)
            if plan is None:
                plan = build_plan(self.sources, self.targets, options)
            self._made[options] = plan, load_of(plan)
        return self._made[options]


def _same(plan: Plan, known: PlanOptions, options: PlanOptions) -> bool:
    """Whether a plan is what a lower watermark would give too: nothing in it comes near that (see `PlanOptions`)."""
    need = _NEAR * options.min_tasks_in_flight * max(plan.peak_task_tmp_bytes, options.bucket_bytes)
    return (
        known.max_tmp_bytes >= options.max_tmp_bytes >= need and replace(known, max_tmp_bytes=options.max_tmp_bytes) == options
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A source, targets, hardware and knobs.

    Attributes:
        plans: of the source and the targets; shared by scenarios that differ in knobs or hardware.
        config: knobs.
        offloaded: the source's weights are in host memory (on accelerators).
    """

    plans: Plans
    hardware: Hardware
    config: TransferConfig = field(default_factory=TransferConfig)
    offloaded: bool = False
    disturbance: Disturbance = field(default_factory=Disturbance)

    @cached_property
    def transport(self) -> Literal["shm", "gloo"]:
        """Of ranks that are processes on one host."""
        return "gloo" if self.config.transport == "gloo" else "shm"

    @property
    def options(self) -> PlanOptions:
        """As the engine makes them of its config."""
        config = self.config
        shared = config.landing != "streamed" and not isinstance(self.hardware, Gpus) and self.transport == "shm"
        return PlanOptions(
            bucket_bytes=config.bucket, max_tmp_bytes=config.watermark, route=config.route, landing=config.landing,
            shared_landing=shared,
        )  # fmt: skip

    @property
    def terms(self) -> Terms:
        """What the world has to know."""
        return Terms(
            landing=self.config.landing, verify=self.config.verify, workers=self.config.workers, offloaded=self.offloaded,
            disturbance=self.disturbance,
        )  # fmt: skip


def simulate(scenario: Scenario) -> Prediction:
    """Run one push in virtual time. The same scenario gives the same prediction.

    Raises:
        PlanError: there is no plan with these knobs.
        StandsStill: the push would hang (a fault of the model or of the scheduler).
    """
    plan, load = scenario.plans.of(scenario.options)
    return _predicted(scenario, plan, load)


def _predicted(scenario: Scenario, plan: Plan, load: Load) -> Prediction:
    config = scenario.config
    limits = Limits(
        max_tmp_bytes=config.watermark,
        h2d=config.h2d_concurrency,
        prepare=config.prepare_concurrency,
        send=config.send_concurrency,
    )
    knobs = Knobs(limits=limits, poll_interval_s=config.poll_interval_s, offloaded=scenario.offloaded)
    played = play(load, lambda loop: make_world(loop, scenario, load), knobs)
    stages: tuple[SpanName, ...] = ("h2d", "prepare", "send", "barrier")
    return Prediction(
        seconds=played.seconds,
        control_s=sum(played.world.control_s()),
        commit_s=played.commit_s,
        busy_s={stage: max(outcome.busy_s[stage] for outcome in played.outcomes) for stage in stages},
        used_s=played.world.used(),
        peak_tmp_bytes=max(outcome.peak_tmp_bytes for outcome in played.outcomes),
        landing_bytes=_landing_bytes(scenario, plan),
        sent_bytes=int(plan.traffic.delivered.nbytes.sum()),
        tasks=plan.total_tasks,
        critical=critical_path(played.last),
        outcomes=played.outcomes,
    )


def make_world(loop: asyncio.AbstractEventLoop, scenario: Scenario, load: Load) -> World:
    """The machine that the scenario names."""
    if isinstance(scenario.hardware, Gpus):
        return GpuWorld(loop, load, scenario.hardware, scenario.terms)
    largest = max((share.nbytes for shares in load.sources for share in shares), default=0)
    ring = max(largest, min(scenario.config.watermark, _RING_BUCKETS * largest))
    return HostWorld(loop, load, scenario.hardware, scenario.terms, transport=scenario.transport, ring=ring)


def _landing_bytes(scenario: Scenario, plan: Plan) -> int:
    if scenario.config.landing == "streamed":
        return 0
    if scenario.options.in_landing:
        return int(plan.routes.landing_nbytes.sum()) * (2 if scenario.config.landing == "mapped" else 1)
    return int(plan.traffic.received.sum())
