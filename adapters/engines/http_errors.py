"""How errors leave the generation server, and who may call it."""

from __future__ import annotations

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from syncline.engine.auth import Signer
from syncline.engine.errors import AuthError, ClosedError, SynclineError

from .http_messages import ErrorReply
from .requests import ForwardFailed, QueueFull, RequestError, RequestInvalid, RequestTimeout

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (AuthError, 401),
    (RequestInvalid, 400),
    (msgspec.MsgspecError, 400),
    (UnicodeDecodeError, 400),
    (QueueFull, 429),
    (RequestTimeout, 504),
    (ForwardFailed, 500),
    (RequestError, 503),
    (ClosedError, 503),
)


def json_reply(reply: msgspec.Struct, status: int = 200) -> web.Response:
    """A struct as JSON."""
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json", status=status)


def error_reply(error: Exception) -> ErrorReply:
    """What the caller is told."""
    reply = ErrorReply(error=type(error).__name__, message=str(error), retryable=isinstance(error, ClosedError))
    if isinstance(error, RequestError):
        reply.retryable, reply.token_ids, reply.versions = error.retryable, error.token_ids, error.versions
    return reply


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns typed errors into replies with their status."""
    try:
        return await handler(request)
    except (SynclineError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _failed(error)


def secret_guard(secret: str) -> Middleware:
    """A middleware that lets only calls pass that are signed with the secret, and signs answers that are not streams."""
    signer = Signer(secret)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            signer.check_headers(request.headers)
            nonce = signer.check(request.method, request.path_qs, request.headers, await request.read())
        except AuthError as error:
            return _failed(error)
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            response.headers.update(signer.sign_reply(nonce, response.status, response.body))
        return response

    return guard


def _failed(error: Exception) -> web.Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    response = json_reply(error_reply(error), status)
    if status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response
