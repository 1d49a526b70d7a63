"""What the two ends of the control plane share: endpoints, limits, and how errors travel.

    GET  /status                    Status          JSON
    GET  /manifest                  ManifestReply   msgpack
    POST /connect                   ConnectRequest  -> Ack            msgpack in, JSON out
    POST /prepare_weights_update    PrepareRequest  -> PrepareReply   JSON
    POST /complete_weights_update   CompleteRequest -> CompleteReply  JSON
    POST /abort                     AbortRequest    -> Ack            JSON
    GET  /watch                     websocket; ends when either process does; calls of a push go over it (`control_watch`)
    POST /join                      JoinRequest     -> Ack            JSON, rank to leader
    POST /vote                      CompleteRequest -> VoteReply      JSON, leader to rank
    POST /order                     RankOrder       -> Ack            JSON, leader to rank

A call that fails is answered with an `ErrorReply` and a status of 400 or more. ``prepare`` and ``complete`` answer in
their own form, as a source that knows only the two-phase protocol expects. Fields that are not known are ignored.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import msgspec

from .errors import (
    AuthError,
    BusyError,
    ControlError,
    PlanError,
    ProtocolError,
    SynclineError,
    VersionConflict,
    error_from_wire,
)
from .messages import AbortRequest, CompleteRequest, ConnectRequest, JoinRequest, PrepareRequest, RankOrder

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "connect": ConnectRequest,
    "prepare_weights_update": PrepareRequest,
    "complete_weights_update": CompleteRequest,
    "abort": AbortRequest,
    "join": JoinRequest,
    "vote": CompleteRequest,
    "order": RankOrder,
}
"""``POST`` endpoints and what they take."""

MOST_BYTES: dict[str, int] = {
    "connect": 2**30,  # programs of all ranks
    "prepare_weights_update": 2**27,  # names, dtypes and shapes of all tensors, from sources that send them
}
MOST_BYTES_ELSEWHERE = 2**20
MOST_REPLY_BYTES = 2**30
ANSWER_MARGIN_S = 5.0
"""Seconds by which a caller waits longer than the time that it grants, so that the typed answer comes first."""

PEER = "X-Syncline-Peer"
"""Who watches: see `watch_name`; for a rank that watches its leader, its incarnation."""


def watch_name(request: ConnectRequest) -> str:
    """The name under which a source watches a target that it connected to with ``request``."""
    return f"{request.source_incarnation}/{request.generation}"


P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 2**19
"""Bodies beyond this are encoded, signed, checked and decoded in a thread: plans and manifests of large models."""


async def crunch(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function``, in a thread if ``size`` bytes would hold up the loop."""
    if size <= LARGE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class ErrorReply(msgspec.Struct, kw_only=True):
    """A failed call: class name of the error (see `syncline.engine.errors`), its text, and the remote traceback's text."""

    error: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> ErrorReply:
        """An error of ours travels by its name; any other as `ControlError`, with its traceback."""
        if isinstance(error, PlanError):
            return cls(error="PlanError", message="\n".join(error.problems))
        if isinstance(error, SynclineError):
            return cls(error=type(error).__name__, message=str(error))
        return cls(error=ControlError.__name__, message=f"{type(error).__name__}: {error}", traceback=traceback_text(error))

    def to_error(self, where: str) -> SynclineError:
        """The error to raise at the caller."""
        if self.error == "PlanError":
            return error_from_wire(self.error, self.message)
        text = f"{where}: {self.message}"
        return error_from_wire(self.error, f"{text}\n{self.traceback}" if self.traceback else text)


def traceback_text(error: BaseException) -> str:
    """The traceback of ``error`` as text."""
    return "".join(traceback.format_exception(error)).rstrip()


def http_status(error: BaseException) -> int:
    """The HTTP status that goes with an error."""
    match error:
        case AuthError():
            return 401
        case ProtocolError():
            return 400
        case BusyError() | VersionConflict() | PlanError():
            return 409
        case SynclineError():
            return 503
        case _:
            return 500
