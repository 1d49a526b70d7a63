"""The language of the pipeline: what a rank has to do, what happens to it, and what the machine orders.

Events go into `PipelineMachine.handle`, instructions come out. Both are plain frozen data; they are msgspec structs because
half a dozen of them are made for every task, and a frozen dataclass takes ten times as long to make. Every event carries
``now``, seconds on any clock that does not go back: the machine has no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from .schedule import Schedule

StageName = Literal["h2d", "prepare", "send"]

STAGES: tuple[StageName, ...] = ("h2d", "prepare", "send")
"""The stages of a task in the order in which it goes through them. The fourth stage, the barrier, belongs to a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A task as the scheduler of one rank sees it. A rank's list holds only the tasks that it takes part in.

    Attributes:
        index: place in plan order, the same on every rank.
        group: mesh group.
        tmp_bytes: temporary bytes that this rank holds from the start of the task's first stage to the end of its last.
        stages: the stages that this rank runs, in the order of `STAGES`. A contributor has no ``send``, a source in host
            memory no ``h2d``.
        targets: the targets that get the task. The send is skipped once all of them are lost.
        reads_source: whether the task reads the trainer's storage: until its ``prepare`` ends, or, where it has none
            (zero copy), until its last stage ends.
        lends: its ``send`` reads the trainer's storage too, so that it does so until its last stage ends.
    """

    index: int
    group: int
    tmp_bytes: int
    stages: tuple[StageName, ...]
    targets: frozenset[int]
    reads_source: bool = True
    lends: bool = False


class LostTarget(NamedTuple):
    """A target that was lost during a push: tasks from ``at_task`` on are not sent to it."""

    target: int
    at_task: int
    reason: str


# ---------------------------------------------------------------------------------------------------------------- events


class PushStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A push begins. ``push_id`` is greater than that of every earlier push.

    ``targets`` are those that take part; a task's targets outside of it are as good as lost from the start.
    """

    now: float
    push_id: int
    schedule: Schedule
    targets: frozenset[int]


class StageDone(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The work of a stage has ended well. It may come late, for abandoned work of a push that has failed."""

    now: float
    push_id: int
    task: int
    stage: StageName


class StageFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a stage has ended with an error: nothing of it is in flight any more."""

    now: float
    push_id: int
    task: int
    stage: StageName
    error: BaseException


class BarrierDone(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Every rank has entered the barrier of ``group``."""

    now: float
    push_id: int
    group: int


class BarrierFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The barrier of ``group`` has ended with an error."""

    now: float
    push_id: int
    group: int
    error: BaseException


class VotesCollected(msgspec.Struct, frozen=True, kw_only=True):
    """Every target that is not lost has voted for the version."""

    now: float


class VotesFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The votes could not be had. ``error`` is what the push fails with."""

    now: float
    error: Exception


class TargetLost(msgspec.Struct, frozen=True, kw_only=True):
    """Target ``target`` is lost: sends to it of tasks from ``at_task`` on never start. Ignored when no push runs."""

    now: float
    target: int
    at_task: int
    reason: str


class DeadlinePassed(msgspec.Struct, frozen=True, kw_only=True):
    """The push's deadline, ``deadline_s`` seconds after its start, has passed. Ignored when no push runs."""

    now: float
    deadline_s: float


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The push is called off. It fails with ``error``, or with `PushCancelled` of ``reason``. Ignored when no push runs."""

    now: float
    reason: str
    error: Exception | None = None


Event = (
    PushStarted
    | StageDone
    | StageFailed
    | BarrierDone
    | BarrierFailed
    | VotesCollected
    | VotesFailed
    | TargetLost
    | DeadlinePassed
    | Cancelled
)


# ---------------------------------------------------------------------------------------------------------- instructions


class StartStage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Start a stage of a task. Its bytes are reserved. Answered by exactly one `StageDone` or `StageFailed`."""

    push_id: int
    task: int
    stage: StageName


class StartBarrier(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Enter the barrier of a group. Answered by exactly one `BarrierDone` or `BarrierFailed`."""

    push_id: int
    group: int


class ReleaseBuffers(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Nothing of the task is in flight: give its buffers back. Exactly once for every task that was started."""

    push_id: int
    task: int


class DropTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Send nothing to ``target`` from ``at_task`` on. Sends that are in flight end through their own completions."""

    push_id: int
    target: int
    at_task: int


class SourceFree(msgspec.Struct, frozen=True, kw_only=True):
    """No started or pending task of the push reads source storage any more. Once per push, possibly after it failed."""

    push_id: int


class CollectVotes(msgspec.Struct, frozen=True, kw_only=True):
    """Every send has completed and every barrier is done on this rank: ask the targets for their votes."""

    push_id: int


class FinishPush(msgspec.Struct, frozen=True, kw_only=True):
    """The push is complete. ``lost`` are the targets that were lost on the way."""

    push_id: int
    peak_tmp_bytes: int
    lost: tuple[LostTarget, ...]


class FailPush(msgspec.Struct, frozen=True, kw_only=True):
    """The push has failed with ``error``. Work in flight is abandoned: its stage ends still come, and then its release."""

    push_id: int
    error: Exception


Instruction = StartStage | StartBarrier | ReleaseBuffers | DropTarget | SourceFree | CollectVotes | FinishPush | FailPush
