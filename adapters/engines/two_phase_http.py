"""Bodies and answers of the two-phase document's paths, for whatever server carries them."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.engine.control import crunch
from syncline.engine.errors import SynclineError, wire_text
from syncline.engine.messages import CompleteRequest, PrepareRequest

from .two_phase_messages import (
    CompleteAnswer,
    CompleteUpdate,
    DestroyGroup,
    GroupAnswer,
    InitGroup,
    PrepareAnswer,
    PrepareUpdate,
)
from .two_phase_service import TwoPhaseService

MOST_BYTES = 2**27
"""Longest body: names, types and shapes of all tensors of a large model."""

PATHS = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/prepare_weights_update",
    "/complete_weights_update",
)


async def answer(service: TwoPhaseService, path: str, body: bytes) -> tuple[int, bytes]:
    """HTTP status and body of the answer to a POST to one of `PATHS`."""
    try:
        reply = await _call(service, path, body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _failed(path, 422, f"the body of {path} is not what it takes: {error}")
    except SynclineError as error:  # the service is closing
        return _failed(path, 503, f"{type(error).__name__}: {wire_text(error)}")
    status = 400 if isinstance(reply, GroupAnswer) and not reply.success else 200
    return status, msgspec.json.encode(reply)


def too_long(path: str) -> tuple[int, bytes]:
    """The answer to a body beyond `MOST_BYTES`."""
    return _failed(path, 413, f"the body of {path} is longer than {MOST_BYTES} bytes")


async def _call(service: TwoPhaseService, path: str, body: bytes) -> msgspec.Struct:
    match path:
        case "/init_weights_update_group":
            return await service.init_group(msgspec.json.decode(body, type=InitGroup))
        case "/destroy_weights_update_group":
            return await service.destroy_group(msgspec.json.decode(body, type=DestroyGroup))
        case "/prepare_weights_update":
            return await _prepare(service, body)
        case _:
            return await _complete(service, body)


async def _prepare(service: TwoPhaseService, body: bytes) -> msgspec.Struct:
    said = await crunch(len(body), _decode, body, PrepareRequest)
    if said.push_id or said.plan_digest:  # a source of ours
        return await service.forward_prepare(said)
    return await service.prepare(await crunch(len(body), _decode, body, PrepareUpdate))


async def _complete(service: TwoPhaseService, body: bytes) -> msgspec.Struct:
    said = _decode(body, CompleteRequest)
    if said.push_id:
        return await service.forward_complete(said)
    return await service.complete(_decode(body, CompleteUpdate))


def _decode(body: bytes, kind: Any) -> Any:
    return msgspec.json.decode(body, type=kind)


def _failed(path: str, status: int, message: str) -> tuple[int, bytes]:
    reply: msgspec.Struct
    match path:
        case "/prepare_weights_update":
            reply = PrepareAnswer(status="error", message=message)
        case "/complete_weights_update":
            reply = CompleteAnswer(success=False, message=message)
        case _:
            reply = GroupAnswer(success=False, message=message)
    return status, msgspec.json.encode(reply)
