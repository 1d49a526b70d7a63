"""The root of the error tree and the errors that pure code raises. The whole tree is drawn in `syncline.engine.errors`."""

from __future__ import annotations

from collections.abc import Sequence


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
