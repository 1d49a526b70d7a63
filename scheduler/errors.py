"""The root of the error tree and the errors that pure code raises. The whole tree is drawn in `syncline.engine.errors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SynclineError(Exception):
    """Root of every error that syncline raises on purpose."""


class PlanError(SynclineError):
    """The manifests cannot be planned. Carries *every* problem found, as a compiler does.

    Attributes:
        problems: one line each: what, where, value against limit, and the remedy.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} found while planning; no byte was moved:"
        super().__init__("\n  - ".join([head, *self.problems]))


class IllegalTransition(SynclineError):
    """The state machine was given an event that its state does not allow: a bug in the caller, with the task's story."""


class InvariantBroken(SynclineError):
    """`PipelineMachine.validate()` found a rule of the pipeline broken: a bug in the scheduler. Lists every rule broken."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n  - ".join(["the state of the pipeline breaks its own rules:", *self.problems]))


class BudgetError(SynclineError):
    """Bytes were released twice, reserved twice, or reserved beyond the watermark: a bug in the caller."""


class SchedulerClosed(SynclineError):
    """The driver is closed, or belongs to another event loop. Make a new one."""


class StageFailure(SynclineError):
    """A stage of a task, or the barrier of a group, ended with an error.

    Attributes:
        push_id: the push.
        stage: ``h2d``, ``prepare``, ``send`` or ``barrier``.
        task: place of the task in plan order; None for a barrier.
        group: mesh group.
        cause: the error that the work ended with (also ``__cause__``).
        story: the task's transitions, one line each; empty for a barrier.
    """

    def __init__(
        self, *, push_id: int, stage: str, task: int | None, group: int, cause: BaseException, story: Sequence[str] = ()
    ) -> None:
        self.push_id = push_id
        self.stage = stage
        self.task = task
        self.group = group
        self.cause = cause
        self.story: tuple[str, ...] = tuple(story)
        self.__cause__ = cause
        where = f"barrier of group {group}" if task is None else f"stage {stage} of task {task} (group {group})"
        head = f"{where} failed in push {push_id}: {type(cause).__name__}: {cause}"
        super().__init__("\n  ".join([head, *(["what the task went through:", *self.story] if self.story else [])]))


class DeadlineExceeded(SynclineError):
    """The push's deadline passed. The message names what was still in flight."""


class PushCancelled(SynclineError):
    """The push was called off."""


class AllTargetsLost(SynclineError):
    """No target is left to send to.

    Attributes:
        reasons: why each target was lost, by target.
    """

    def __init__(self, push_id: int, reasons: Mapping[int, str]) -> None:
        self.push_id = push_id
        self.reasons: dict[int, str] = dict(reasons)
        lost = "; ".join(f"target {target}: {reason}" for target, reason in self.reasons.items())
        super().__init__(f"push {push_id} has no target left ({lost or 'it was started without any'})")
