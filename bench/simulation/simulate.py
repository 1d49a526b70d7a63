"""The simulation of one push: `Scenario` (what is moved, by what, on what) and `simulate`, which gives a `Prediction`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from syncline.engine.config import TransferConfig
from syncline.scheduler.driver import Limits, PushOutcome
from syncline.scheduler.dtypes import itemsize
from syncline.scheduler.layout import Manifest
from syncline.scheduler.options import PlanOptions
from syncline.scheduler.outcome import SpanName
from syncline.scheduler.plan import Plan, build_plan
from syncline.scheduler.routing import size

from .cores import HostWorld
from .critical import CriticalPath, critical_path
from .gpus import GpuWorld
from .hardware import Gpus, Hardware
from .load import Load, load_of
from .play import Knobs, play
from .world import Disturbance, ScenarioError, Terms, World

_RING_BUCKETS = 8
_SHORTEST_POLL_S, _LONGEST_POLL_S = 1e-6, 60.0
_MOST_TMP = 2**50
_MOST_TASKS = 200_000
"""Of a plan. A simulation makes some ten thousand a second, for each rank that has to do with one."""
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
        """What most of the critical path is spent on: a resource or a kind of work, or else ``control``, ``barrier``,
        ``latency`` or ``poll``.
        """
        return next(iter(self.critical.by_what))

    @property
    def busiest(self) -> str:
        """The kind of resource that served longest."""
        return max(self.used_s, key=lambda kind: self.used_s[kind])

    @property
    def bound_s(self) -> float:
        """Seconds that the busiest resource serves in any case."""
        return max(self.used_s.values(), default=0.0)


class Plans:
    """Plans by their options: made when first asked for."""

    @cached_property
    def _held(self) -> int:
        """Bytes of the largest target, each tensor counted once."""
        return max((_nbytes(ranks) for ranks in self.targets), default=0)

    def __init__(self, sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]]) -> None:
        self.sources, self.targets = sources, targets
        self._made: dict[PlanOptions, tuple[Plan, Load]] = {}

    def of(self, options: PlanOptions) -> tuple[Plan, Load]:
        """The plan, and what it asks of each rank. Raises `PlanError`, or `ScenarioError` for too many tasks."""
        if options not in self._made:
            tasks = self._held // max(min(options.bucket_bytes, options.max_tmp_bytes), options.leaf_bytes)
            if tasks > _MOST_TASKS:
                raise ScenarioError(
                    f"buckets of {size(options.bucket_bytes)} under a watermark of {size(options.max_tmp_bytes)} make about "
                    f"{tasks} tasks of {size(self._held)}, above the limit of {_MOST_TASKS}: take larger buckets "
                    "and a higher watermark"
                )
            plan = next((plan for known, (plan, _) in self._made.items() if _same(plan, known, options)), None)
            if plan is None:
                plan = build_plan(self.sources, self.targets, options)
            self._made[options] = plan, load_of(plan)
        return self._made[options]


def _nbytes(ranks: Sequence[Manifest]) -> int:
    found: dict[str, int] = {}
    for table in {id(manifest.layout): manifest.layout.tensors for manifest in ranks}.values():
        elements = np.where(np.arange(table.shape.shape[1]) < table.ndim[:, None], table.shape, 1).prod(axis=1)
        sizes = elements * np.array([itemsize(kind) for kind in table.dtypes], np.int64)[table.dtype]
        found.update(zip(table.names, sizes.tolist(), strict=True))
    return sum(found.values())


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

    Raises:
        ScenarioError: a straggler is no rank of the source, or the hardware has no such landing, or a knob is out of the
            range that can be simulated.
    """

    plans: Plans
    hardware: Hardware
    config: TransferConfig = field(default_factory=TransferConfig)
    offloaded: bool = False
    disturbance: Disturbance = field(default_factory=Disturbance)

    def __post_init__(self) -> None:
        ranks = len(self.plans.sources)
        beyond = [rank for rank in self.disturbance.stragglers if rank >= ranks]
        if beyond:
            raise ScenarioError(f"straggler {beyond[0]}: the source has ranks 0 to {ranks - 1}")
        if self.config.landing == "mapped" and isinstance(self.hardware, Gpus):
            raise ScenarioError(
                f"landing 'mapped' needs memory that processes of one host share, and {self.hardware.name!r} is a cluster of "
                "accelerators: choose hardware of one host, such as cpu-2, or landing 'staged' or 'streamed'"
            )
        if self.config.watermark > _MOST_TMP:
            raise ScenarioError(f"max_tmp_bytes is {self.config.watermark}, above {_MOST_TMP} ({size(_MOST_TMP)})")
        if not _SHORTEST_POLL_S <= self.config.poll_interval_s <= _LONGEST_POLL_S:
            raise ScenarioError(
                f"poll_interval_s is {self.config.poll_interval_s:g}; it is simulated from {_SHORTEST_POLL_S:g} to "
                f"{_LONGEST_POLL_S:g} seconds"
            )

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
