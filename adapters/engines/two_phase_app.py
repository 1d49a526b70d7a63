"""The two-phase document's endpoints as a small ASGI app: mount it in the server of any engine that has a `Receiver`.

    two_phase = TwoPhaseApp(receiver.address)
    app.mount("/weights", two_phase)                 # FastAPI, Starlette; or
    app = TwoPhaseApp(receiver.address, inner=app)   # answers its own four paths, and hands on everything else

A source that speaks only the document (``/init_weights_update_group``, ``/prepare_weights_update``, broadcasts,
``/complete_weights_update``) then pushes into the receiver, with the fence and the guarantees of every push.

Answers have exactly the document's fields. Its two endpoints return their errors with HTTP 200, as its own code does; the two
for groups answer 400 with ``success`` false, as SGLang does. A body that is not what the path takes is 422, in the same form.
The document knows no authentication: whoever reaches these paths can replace the weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from .two_phase_http import MOST_BYTES, PATHS, answer, too_long
from .two_phase_service import TwoPhaseService

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]


class TwoPhaseApp:
    """An ASGI app in front of a `TwoPhaseService`.

    Args:
        control: control address of the target's leader (`Receiver.address`), what gives it when it is asked, or a service.
        inner: gets every call that is not for one of the four paths; None answers them with 404.
        options: see `TwoPhaseService`.

    Where a server mounts it, the server's lifespan does not reach it: call `close` at the end. With ``inner``, or as the only
    app, it closes itself when the server shuts down.
    """

    def __init__(
        self, control: str | Callable[[], str] | TwoPhaseService, *, inner: ASGI | None = None, **options: Any
    ) -> None:
        self.service = control if isinstance(control, TwoPhaseService) else TwoPhaseService(control, **options)
        self._inner = inner

    async def close(self) -> None:
        """Give up what is under way and leave every group."""
        await self.service.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(scope, receive, send)
        elif kind == "http" and _path(scope) in PATHS:
            await self._http(scope, receive, send)
        elif self._inner is not None:
            await self._inner(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await _respond(send, 404, msgspec.json.encode({"detail": "Not Found"}))

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self.close()
            await send(message)

        if self._inner is not None:
            await self._inner(scope, receive, closing)
            return
        for what in ("startup", "shutdown"):
            await receive()
            await closing({"type": f"lifespan.{what}.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path(scope)
        if scope["method"] != "POST":
            await _respond(send, 405, msgspec.json.encode({"detail": "Method Not Allowed"}))
            return
        body = await _read(receive)
        if body is None:
            await _respond(send, *too_long(path))
        else:
            await _respond(send, *await answer(self.service, path, body))


def _path(scope: Scope) -> str:
    """Without the prefix under which a server mounted this app."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) else path


async def _read(receive: Receive) -> bytes | None:
    """The body; None if it is too long."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        part = message.get("body", b"")
        size += len(part)
        if size > MOST_BYTES:
            return None
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
