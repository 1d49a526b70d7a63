"""What the machine keeps: a record for each task that is in flight, and one for each push that still has some."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from .events import STAGES, LostTarget, StageName, TaskSpec
from .schedule import Schedule


class Phase(Enum):
    """Where the machine is. ``FAILED`` still takes the late stage ends of abandoned work."""

    IDLE = "idle"
    RUNNING = "running"
    VOTING = "voting"
    FINISHED = "finished"
    FAILED = "failed"


class TaskState(Enum):
    """Where a task is.

    ``RUNNING``: a stage is in flight. ``WAITING``: between two stages. ``ABANDONED``: the push has ended, its stage is
    still in flight and its bytes stay reserved. ``DROPPED``: the push failed, nothing is in flight, its bytes are given back.
    """

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    ABANDONED = "abandoned"
    DROPPED = "dropped"


class Transition(NamedTuple):
    """One step of a task's story."""

    now: float
    before: TaskState
    after: TaskState
    why: str

    def __str__(self) -> str:
        return f"at {self.now:.6f} s {self.before.value} -> {self.after.value}: {self.why}"


class TaskRecord:
    """A task that has been admitted: its state, how many of its stages have ended, and its story.

    ``stage`` is the one that is in flight or that the task waits for; None once all are over. ``key`` is push and task: what
    the budget and the late ends of abandoned work go by.
    """

    __slots__ = ("_story", "ended", "key", "push", "reading", "since", "spec", "stage", "state")

    def __init__(self, spec: TaskSpec, push: PushRecord) -> None:
        self.spec = spec
        self.push = push
        self.key = (push.push_id, spec.index)
        self.state = TaskState.PENDING
        self.ended = 0
        self.stage: StageName | None = spec.stages[0]
        self.reading = spec.reads_source
        self.since = 0.0
        self._story: list[tuple[float, TaskState, TaskState, str]] = []

    def end_stage(self) -> None:
        """The stage in flight is over: go on to the next."""
        self.ended += 1
        stages = self.spec.stages
        self.stage = stages[self.ended] if self.ended < len(stages) else None

    def move(self, now: float, after: TaskState, why: str) -> None:
        """Change state, and write it into the story."""
        self._story.append((now, self.state, after, why))
        self.state = after
        self.since = now

    @property
    def story(self) -> tuple[Transition, ...]:
        """What the task went through, oldest first."""
        return tuple(Transition(*step) for step in self._story)


@dataclass(slots=True, kw_only=True, eq=False)
class PushRecord:
    """A push on one rank.

    Attributes:
        admitted: how many tasks of the schedule were admitted (or passed over because nobody wants them any more).
        heads: for each stage, the place in its queue of the next task to start it.
        active: tasks that are running or waiting, by index.
        done: indexes of the tasks that went through.
        recent: the last tasks that left ``active``, for their stories.
        gate: place of the mesh group whose barrier is the next to be done: collectives of later groups must wait.
        prepared: for each mesh group, how many prepares are done.
        barrier: mesh group whose barrier is in flight.
        readers: tasks that still read source storage, or will.
        source_free: whether `SourceFree` was given out.
        lost: targets lost so far.
        voted: whether the targets have voted.
        picky: whether there may be tasks that nobody wants any more.
    """

    push_id: int
    started: float
    schedule: Schedule
    targets: frozenset[int]
    admitted: int = 0
    heads: dict[StageName, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    active: dict[int, TaskRecord] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    recent: deque[TaskRecord] = field(default_factory=lambda: deque(maxlen=256))
    gate: int = 0
    prepared: dict[int, int] = field(default_factory=dict)
    barrier: int | None = None
    barrier_since: float = 0.0
    readers: int = 0
    source_free: bool = False
    lost: dict[int, LostTarget] = field(default_factory=dict)
    voted: bool = False
    picky: bool = False

    def __post_init__(self) -> None:
        self.readers = self.schedule.readers
        self.prepared = dict.fromkeys(self.schedule.groups, 0)
        self.picky = not self.schedule.targets <= self.targets

    def lose(self, target: int, at_task: int, reason: str) -> bool:
        """Note that a target is lost; False if that is not news. Of two accounts the one that drops more tasks counts."""
        known = self.lost.get(target)
        if target not in self.targets or (known is not None and known.at_task <= at_task):
            return False
        self.lost[target] = LostTarget(target, at_task, known.reason if known else reason)
        self.picky = True
        return True

    def wanted(self, spec: TaskSpec) -> bool:
        """Whether a target is left that ``spec`` would be sent to."""
        if not self.picky:
            return True
        return any(
            target in self.targets and (target not in self.lost or spec.index < self.lost[target].at_task)
            for target in spec.targets
        )

    def all_lost(self) -> bool:
        """Whether no target of the push is left."""
        return all(target in self.lost for target in self.targets)

    def progress(self, now: float) -> str:
        """One line for error messages: how much is through, and what is in flight for how long."""
        flying = [
            f"{record.stage} of task {record.spec.index} for {now - record.since:.3f} s"
            for record in self.active.values()
            if record.state is TaskState.RUNNING
        ]
        if self.barrier is not None:
            flying.append(f"barrier of group {self.barrier} for {now - self.barrier_since:.3f} s")
        total = len(self.schedule.tasks)
        if not flying and len(self.done) == total and self.gate == len(self.schedule.groups):
            flying.append("the votes of the targets")
        done = f"{len(self.done)} of {total} tasks are through after {now - self.started:.3f} s"
        return f"{done}; in flight: {', '.join(flying) or 'nothing'}"
