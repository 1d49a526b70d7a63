"""A rank's tasks, checked and indexed once per plan, so that starting a push costs the same for any number of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .errors import PlanError
from .events import STAGES, StageName, TaskSpec

_SHOWN = 20


class Schedule:
    """The tasks of one rank in plan order, with what the machine looks up. Immutable once built.

    Attributes:
        tasks: in plan order.
        groups: all mesh groups in order, also those in which this rank has no task.
        position: place of each mesh group in ``groups``.
        queues: for each stage, the tasks that run it, in plan order.
        prepares: for each mesh group, how many tasks of this rank have a ``prepare``.
        readers: how many tasks read source storage.
        targets: all targets that any task is sent to.
        largest: the task with the most temporary bytes; None if there is no task.
    """

    def __init__(
        self,
        *,
        tasks: tuple[TaskSpec, ...],
        groups: tuple[int, ...],
        queues: dict[StageName, list[TaskSpec]],
        prepares: dict[int, int],
        readers: int,
        targets: frozenset[int],
        largest: TaskSpec | None,
    ) -> None:
        self.tasks = tasks
        self.groups = groups
        self.position = {group: place for place, group in enumerate(groups)}
        self.queues = queues
        self.prepares = prepares
        self.readers = readers
        self.targets = targets
        self.largest = largest

    @classmethod
    def of(cls, tasks: Iterable[TaskSpec], groups: Sequence[int]) -> Schedule:
        """Build at one go. Raises `PlanError` as `ScheduleBuilder.build` does."""
        builder = ScheduleBuilder(groups)
        for spec in tasks:
            builder.add(spec)
        return builder.build()


class ScheduleBuilder:
    """Builds a `Schedule` task by task, so that a caller with thousands of them can pause in between."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._position = {group: place for place, group in enumerate(self._groups)}
        self._tasks: list[TaskSpec] = []
        self._queues: dict[StageName, list[TaskSpec]] = {stage: [] for stage in STAGES}
        self._prepares = dict.fromkeys(self._groups, 0)
        self._readers = 0
        self._largest: TaskSpec | None = None
        self._targets: set[frozenset[int]] = set()
        self._checked: set[tuple[StageName, ...]] = set()
        self._problems: list[str] = []
        if len(self._position) != len(self._groups):
            self._problems.append(f"mesh groups {self._groups} name a group twice")

    def add(self, spec: TaskSpec) -> None:
        """Append the next task in plan order."""
        if spec.group not in self._position:
            self._problems.append(f"task {spec.index} is of mesh group {spec.group}; the plan has {self._groups}")
            return
        self._check(spec)
        self._tasks.append(spec)
        for stage in spec.stages:
            if stage in self._queues:
                self._queues[stage].append(spec)
        if "prepare" in spec.stages:
            self._prepares[spec.group] += 1
        self._readers += spec.reads_source
        if "send" in spec.stages:
            self._targets.add(spec.targets)
        if self._largest is None or spec.tmp_bytes > self._largest.tmp_bytes:
            self._largest = spec

    def build(self) -> Schedule:
        """The schedule.

        Raises:
            PlanError: tasks out of plan order, mesh groups interleaved, unknown or out-of-order stages, negative bytes,
                or a send to nobody.
        """
        if self._problems:
            more = len(self._problems) - _SHOWN
            raise PlanError([*self._problems[:_SHOWN], *([f"and {more} more like these"] if more > 0 else [])])
        return Schedule(
            tasks=tuple(self._tasks),
            groups=self._groups,
            queues=self._queues,
            prepares=self._prepares,
            readers=self._readers,
            targets=frozenset().union(*self._targets),
            largest=self._largest,
        )

    def _check(self, spec: TaskSpec) -> None:
        if self._tasks:
            before = self._tasks[-1]
            if spec.index <= before.index:
                self._problems.append(f"task {spec.index} comes after task {before.index}; tasks must be in plan order")
            if self._position[spec.group] < self._position[before.group]:
                self._problems.append(
                    f"task {spec.index} of mesh group {spec.group} comes after task {before.index} of group {before.group}; "
                    "the tasks of a group must lie together, in the order of the groups"
                )
        if spec.stages not in self._checked:
            if not spec.stages or spec.stages != tuple(stage for stage in STAGES if stage in spec.stages):
                self._problems.append(
                    f"task {spec.index} has stages {spec.stages}; they must be some of {STAGES} in that order"
                )
            else:
                self._checked.add(spec.stages)
        if spec.tmp_bytes < 0:
            self._problems.append(f"task {spec.index} has {spec.tmp_bytes} temporary bytes; it must be at least 0")
        if not spec.targets and "send" in spec.stages:
            self._problems.append(f"task {spec.index} has a send stage and no target")
