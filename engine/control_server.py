"""The HTTP server of one rank of a target. What the calls mean is the `Service`'s business."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from syncline.stages.closing import uninterrupted
from syncline.stages.workers import call_in_thread

from .address import Address, inode_of, open_listener, remove_socket_file
from .auth import NONCE, Signer
from .control import JSON, MOST_BYTES, MOST_BYTES_ELSEWHERE, MSGPACK, PEER, REQUESTS, ErrorReply, crunch, http_status
from .control_watch import MOST_FRAME_BYTES, PROTOCOL, Watched
from .errors import AuthError, ClosedError, ConfigError, ProtocolError, SynclineError
from .messages import (
    AbortRequest,
    Ack,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    JoinRequest,
    ManifestReply,
    PrepareReply,
    PrepareRequest,
    RankOrder,
    Status,
    VoteReply,
)

log = logging.getLogger("syncline.engine")

_READ_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 1.0


class Service(Protocol):
    """What a rank of a target does when it is called. Errors of ours are answered by name."""

    async def on_status(self) -> Status: ...
    async def on_manifest(self) -> ManifestReply: ...
    async def on_connect(self, request: ConnectRequest) -> Ack: ...
    async def on_prepare(self, request: PrepareRequest) -> PrepareReply: ...
    async def on_complete(self, request: CompleteRequest) -> CompleteReply: ...
    async def on_abort(self, request: AbortRequest) -> Ack: ...
    async def on_join(self, request: JoinRequest) -> Ack: ...
    async def on_vote(self, request: CompleteRequest) -> VoteReply: ...
    async def on_order(self, request: RankOrder) -> Ack: ...

    def on_unwatched(self, peer: str) -> None:
        """The last watch of ``peer`` has ended: its process is gone, or it watches no more."""
        ...


class ControlServer:
    """Listens at a control address and hands calls to a service. Runs in the loop that started it.

    Args:
        service: what answers.
        listen: ``unix:/path`` or ``tcp://host:port``.
        secret: shared secret. Without one only a unix socket or loopback is served.
        advertise: host under which others reach this server; None: that of ``listen``.

    Raises:
        ConfigError: the address is malformed, or is beyond loopback and there is no secret.
    """

    def __init__(self, service: Service, listen: str, *, secret: str | None = None, advertise: str | None = None) -> None:
        self._service = service
        self._advertise = advertise
        self._wanted = Address.parse(listen)
        if not self._wanted.is_local and not secret:
            raise ConfigError([f"listen {listen!r} is beyond loopback and secret is not set; set one on both sides"])
        self._signer = Signer(secret) if secret else None
        self._real: Address | None = None
        self._inode = 0
        self._runner: web.AppRunner | None = None
        self._watches: dict[web.WebSocketResponse, str] = {}
        self._watch_began = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def address(self) -> str:
        """Where others reach it, with the real port."""
        real = self._real or self._wanted
        return str(Address(host=self._advertise, port=real.port) if self._advertise and real.host else real)

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if the address cannot be had. `close` ends it, also when this was cancelled."""
        await uninterrupted(self._start())

    async def _start(self) -> None:
        # not on asyncio's own threads, which others may keep busy: this is not called off
        listener, real = await call_in_thread(lambda: open_listener(self._wanted), name="syncline-listen")
        self._real, self._inode = real, inode_of(real)
        app = web.Application()
        app.router.add_get("/status", self._handler(self._status))
        app.router.add_get("/manifest", self._handler(self._manifest))
        app.router.add_get("/watch", self._watch)
        for name in REQUESTS:
            app.router.add_post(f"/{name}", self._handler(self._post))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Stop listening and end every connection, in bounded time."""
        self._closing = True
        if self._calls:  # what is being called may still be answered
            await asyncio.wait(self._calls, timeout=_CLOSE_TIMEOUT_S)
        await self.drop_watches(None)
        await self._end_calls()
        if self._runner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * _CLOSE_TIMEOUT_S + 1.0):
                    await self._runner.cleanup()
            self._runner = None
        if self._real is not None:
            remove_socket_file(self._real, self._inode)

    async def _end_calls(self) -> None:
        """Call off what is being called; waits for it, for a bounded time."""
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_CLOSE_TIMEOUT_S)

    async def drop_watches(self, peer: str | None) -> None:
        """End the watches of ``peer``; None: all."""
        sockets = [socket for socket, name in self._watches.items() if peer is None or name == peer]
        await asyncio.gather(*(_close_socket(socket) for socket in sockets))

    async def watched(self, peer: str, timeout_s: float) -> bool:
        """Whether ``peer`` watches this server; waits for it to begin, at most ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while peer not in self._watches.values():
                    await self._watch_began.wait()
        except TimeoutError:
            return False
        return True

    # calls

    def _handler(
        self, call: Callable[[web.Request, bytes], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await self._read(request)
            except AuthError as error:
                return _failed(error)
            except SynclineError as error:
                return await self._signed(request, _json(*_failure(_name(request), error)))
            try:
                response = await call(request, body)
            except Exception as error:  # noqa: BLE001 - whatever a call raises is answered, typed
                response = _json(*_failure(_name(request), error))
            return await self._signed(request, response)

        return handle

    async def _read(self, request: web.Request) -> bytes:
        """The body, once the call has proved to be allowed."""
        _refuse_pages(request)
        if self._signer is not None:
            self._signer.check_headers(request.headers)
        most = MOST_BYTES.get(_name(request), MOST_BYTES_ELSEWHERE)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                while part := await request.content.readany():
                    size += len(part)
                    if size > most:
                        raise ProtocolError(f"the body of {request.path} is longer than {most} bytes")
                    parts.append(part)
        except TimeoutError:
            raise ProtocolError(f"the body of {request.path} did not come within {_READ_TIMEOUT_S:g} s") from None
        body = b"".join(parts)
        if self._signer is not None:
            await crunch(size, self._signer.check, request.method, request.path_qs, request.headers, body)
        return body

    async def _status(self, _request: web.Request, _body: bytes) -> web.Response:
        return _json(await self._service.on_status())

    async def _manifest(self, _request: web.Request, _body: bytes) -> web.Response:
        reply = await self._service.on_manifest()
        return web.Response(body=msgspec.msgpack.encode(reply), content_type=MSGPACK)

    async def _post(self, request: web.Request, body: bytes) -> web.Response:
        return _json(await self._take(_name(request), body, packed=request.content_type == MSGPACK))

    async def _take(self, name: str, body: bytes, *, packed: bool) -> msgspec.Struct:
        decode = msgspec.msgpack.decode if packed else msgspec.json.decode
        try:
            message = await crunch(len(body), decode, body, type=REQUESTS[name])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the body of /{name} is not a {REQUESTS[name].__name__}: {error}") from None
        return await self._call(name, message)

    async def _over_watch(self, name: str, body: bytes) -> tuple[int, bytes]:
        """A call that came over a watch: status and body of its answer."""
        try:
            if self._closing:
                raise ClosedError("this address is being closed")
            reply, status = await self._take(name, body, packed=False), 200
        except Exception as error:  # noqa: BLE001 - whatever a call raises is answered, typed
            reply, status = _failure(name, error)
        return status, msgspec.json.encode(reply)

    async def _call(self, name: str, message: Any) -> msgspec.Struct:
        service = self._service
        match name:
            case "connect":
                return await service.on_connect(message)
            case "prepare_weights_update":
                return await service.on_prepare(message)
            case "complete_weights_update":
                return await service.on_complete(message)
            case "abort":
                return await service.on_abort(message)
            case "join":
                return await service.on_join(message)
            case "vote":
                return await service.on_vote(message)
            case _:
                return await service.on_order(message)

    async def _signed(self, request: web.Request, response: web.Response) -> web.Response:
        if self._signer is not None:
            body = response.body
            assert isinstance(body, bytes)
            nonce = request.headers.get(NONCE, "")
            response.headers.update(await crunch(len(body), self._signer.sign_reply, nonce, response.status, body))
        return response

    # watches

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """See `Watched`."""
        headers, nonce = {}, ""
        try:
            if self._closing:
                raise ClosedError("this address is being closed")
            _refuse_pages(request)
            if self._signer is not None:
                nonce = self._signer.check(request.method, request.path_qs, request.headers, b"")
                headers = self._signer.sign_reply(nonce, 101, b"")
        except SynclineError as error:
            return _failed(error)
        socket = web.WebSocketResponse(
            timeout=_CLOSE_TIMEOUT_S, max_msg_size=MOST_FRAME_BYTES, protocols=(PROTOCOL,), compress=False
        )
        socket.headers.update(headers)
        await socket.prepare(request)
        peer = request.headers.get(PEER, "")
        self._watches[socket] = peer
        self._watch_began.set()
        self._watch_began = asyncio.Event()
        watched = Watched(socket, self._signer, nonce, answer=self._over_watch, calls=self._calls)
        try:
            await watched.serve()
        except SynclineError as error:
            log.warning("a watch of %s was ended: %s", self.address, error)
            with contextlib.suppress(ConnectionError, RuntimeError):
                await socket.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION)
        finally:
            del self._watches[socket]
            if peer and not self._closing and peer not in self._watches.values():
                self._service.on_unwatched(peer)
        return socket


def _refuse_pages(request: web.Request) -> None:
    """A web page of any site may call what listens on its reader's machine; then the browser says where it comes from."""
    if "Origin" in request.headers:
        raise AuthError("calls of web pages are refused")


def _name(request: web.Request) -> str:
    return request.path.removeprefix("/")


def _json(reply: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), status=status, content_type=JSON)


def _failure(name: str, error: Exception) -> tuple[msgspec.Struct, int]:
    """The answer to a call of ``name`` that raised, in the form that its caller expects, and its status."""
    if not isinstance(error, SynclineError):
        log.error("/%s failed", name, exc_info=error)
    reply = ErrorReply.of(error)
    message = f"{reply.message}\n{reply.traceback}" if reply.traceback else reply.message
    match name:
        case "prepare_weights_update":
            return PrepareReply(status="error", message=message, error=reply.error), 200
        case "complete_weights_update":
            return CompleteReply(success=False, message=message, error=reply.error), 200
        case _:
            return reply, http_status(error)


def _failed(error: Exception) -> web.Response:
    return _json(ErrorReply.of(error), http_status(error))


async def _close_socket(socket: web.WebSocketResponse) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)
