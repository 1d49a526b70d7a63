"""Every error that syncline raises on purpose.

    SynclineError
    ├── ConfigError (ValueError)      a config value is wrong; lists every problem
    ├── TraceError (ValueError)       a file is no trace, or contradicts itself
    ├── PlanError                     the manifests do not fit together; lists every problem; no byte was moved
    ├── IllegalTransition             a bug: the state machine was given an event that its state does not allow
    ├── ClosedError                   yours: the engine or receiver is closed, or not connected yet
    ├── BusyError                     yours: a second push was started while one runs
    ├── NotServing                    yours: a forward pass was started on a target that is fenced
    ├── VersionConflict               the version is not newer than what the target holds, or names other content
    ├── ControlError                  the control plane
    │   ├── TargetUnreachable         no answer from the target's control address
    │   ├── AuthError                 the shared secret is missing or wrong
    │   └── ProtocolError             the peer answered something that the protocol does not allow
    ├── TransportError                the data plane: a link broke, a peer went away, a buffer could not be had
    └── PushError                     a push failed; the fence holds
        ├── PushTimeout               its deadline passed
        ├── PushAborted               another rank failed first; names it
        ├── SourceRankLost            a source rank went away
        ├── TargetLost                a target, or one of its ranks, died or stalled
        ├── StageError                a stage raised; names task and stage, carries the task's story
        ├── LoaderError               the target's loader raised; carries the remote traceback's text
        └── DigestMismatch            landed bytes are not the bytes that were sent

Each message says what, where (task, stage, peer, version), the value against its limit, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.scheduler.errors import IllegalTransition, PlanError, SynclineError
from syncline.stages.errors import TransportError

__all__ = [
    "AuthError",
    "BusyError",
    "ClosedError",
    "ConfigError",
    "ControlError",
    "DigestMismatch",
    "IllegalTransition",
    "LoaderError",
    "NotServing",
    "PlanError",
    "ProtocolError",
    "PushAborted",
    "PushError",
    "PushTimeout",
    "SourceRankLost",
    "StageError",
    "SynclineError",
    "TargetLost",
    "TargetUnreachable",
    "TraceError",
    "TransportError",
    "VersionConflict",
    "error_from_wire",
    "wire_text",
]


class ConfigError(SynclineError, ValueError):
    """A config value is wrong. Carries every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n  - ".join([f"{len(self.problems)} problem(s) in the configuration:", *self.problems]))


class TraceError(SynclineError, ValueError):
    """A file that was to be read as a trace cannot be read, is none, or what it says does not fit together."""


class ClosedError(SynclineError):
    """The engine or receiver is closed, or not connected yet. Yours to mend: call `connect()` or `start()` first."""


class BusyError(SynclineError):
    """A second push was started while one runs. Wait for the first one's result."""


class NotServing(SynclineError):
    """A forward pass was started on a target that is fenced: it holds no whole committed version."""


class VersionConflict(SynclineError):
    """The version is older than what the target holds, or names other content than the target holds under it."""


class ControlError(SynclineError):
    """The control plane failed."""


class TargetUnreachable(ControlError):
    """No answer from the target's control address."""


class AuthError(ControlError):
    """The shared secret is missing or wrong."""


class ProtocolError(ControlError):
    """The peer answered something that the protocol does not allow."""


class PushError(SynclineError):
    """A push failed; the fence holds."""


class PushTimeout(PushError):
    """The push's deadline passed."""


class PushAborted(PushError):
    """Another rank failed first; the message names it."""


class SourceRankLost(PushError):
    """A source rank went away during the push."""


class TargetLost(PushError):
    """A target, or one of its ranks, died or stalled."""


class StageError(PushError):
    """A stage raised. The message names task and stage and carries the task's story."""


class LoaderError(PushError):
    """The target's loader raised; the message carries the remote traceback's text."""


class DigestMismatch(PushError):
    """Landed bytes are not the bytes that were sent."""


_BY_NAME: dict[str, type[SynclineError]] = {
    kind.__name__: kind
    for kind in (
        AuthError, BusyError, ClosedError, ControlError, DigestMismatch, LoaderError, NotServing, ProtocolError, PushAborted,
        PushError, PushTimeout, SourceRankLost, StageError, SynclineError, TargetLost, TargetUnreachable, TransportError,
        VersionConflict,
    )
}  # fmt: skip


def wire_text(error: BaseException) -> str:
    """The text of an error as `error_from_wire` takes it: what lists problems says one in each line."""
    return "\n".join(error.problems) if isinstance(error, PlanError) else str(error)


def error_from_wire(kind: str, message: str) -> SynclineError:
    """The typed error that a peer reported by class name and text; `PushError` if the name is not one that travels."""
    if kind == "PlanError":
        return PlanError(message.splitlines())
    return _BY_NAME.get(kind, PushError)(message)
