"""The search, asked of the simulator instead of the machine."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from syncline.bench.plan_view import folded
from syncline.bench.simulation.simulate import Scenario, simulate
from syncline.bench.simulation.world import ScenarioError
from syncline.engine.config import TransferConfig
from syncline.scheduler.errors import PlanError

from .recommend import Limit
from .records import Record, Request, Sample
from .search import Effort, Search
from .space import MIB, Configuration, Space

_EFFORT = Effort(warm=(1, 1), final_warm=(1, 1), final_rounds=5)
"""The same question has the same answer: what is measured again comes from memory, and costs nothing."""


@dataclass(frozen=True, kw_only=True)
class Imagined:
    """A scenario that need not exist, with any knobs; ``name`` says what it is."""

    name: str
    scenario: Scenario

    def __str__(self) -> str:
        return self.name

    def search(self, start: Configuration, budget_s: float, limit: Limit) -> list[Record]:
        """Search from ``start``, or from what keeps to ``limit``. Raises `PlanError`, `ScenarioError` if that has no plan."""
        first = self._simulated(start)
        room = None if limit.nbytes is None else limit.nbytes - (first.landing_bytes if limit.landing else 0)
        if room is not None and MIB <= room < start.max_tmp_bytes:
            start = Configuration.default(start.transport, start.landing, watermark=room // MIB * MIB)
            first = self._simulated(start)
        if first.refused:
            raise PlanError(first.refused.splitlines())
        plan, _ = self.scenario.plans.of(self._with(start).options)
        space = Space.of(int(plan.traffic.sent.max()), most=8)
        if room is not None:
            space = space.within(max(start.max_tmp_bytes, room // MIB * MIB))
        search = Search(space, [start], budget_s=budget_s, effort=_EFFORT)
        known: dict[Configuration, Sample] = {start: first}
        while (request := search.next()) is not None:
            search.tell(self._answer(request, known))
        return search.records

    def _answer(self, request: Request, known: dict[Configuration, Sample]) -> Sample:
        sample = known.get(request.configuration)
        if sample is None:
            sample = known[request.configuration] = self._simulated(request.configuration)
        else:
            sample = dataclasses.replace(sample, elapsed_s=0.0)
        return dataclasses.replace(sample, seconds=sample.seconds * request.pushes)

    def _simulated(self, configuration: Configuration) -> Sample:
        began = time.perf_counter()
        try:
            predicted = simulate(self._with(configuration))
        except PlanError as error:
            return Sample(refused="\n".join(folded(error.problems)), elapsed_s=time.perf_counter() - began)
        except ScenarioError as error:
            return Sample(refused=str(error), elapsed_s=time.perf_counter() - began)
        return Sample(
            seconds=(predicted.seconds,),
            elapsed_s=time.perf_counter() - began,
            peak_tmp_bytes=predicted.peak_tmp_bytes,
            landing_bytes=predicted.landing_bytes,
            tasks=predicted.tasks,
            busy_s=predicted.busy_s,
            intact=True,
        )

    def _with(self, configuration: Configuration) -> Scenario:
        return dataclasses.replace(self.scenario, config=TransferConfig(**configuration.knobs()))
