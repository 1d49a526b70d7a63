"""The calling end of the control plane: one target's leader as a source sees it, or one rank as another rank does."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import msgspec
from multidict import CIMultiDictProxy

from .address import Address
from .auth import NONCE, Signer
from .control import ANSWER_MARGIN_S, JSON, LARGE_BYTES, MOST_REPLY_BYTES, MSGPACK, PEER, ErrorReply, crunch, watch_name
from .control_watch import MOST_CALL_BYTES, PROTOCOL, Line
from .errors import AuthError, ClosedError, ProtocolError, TargetUnreachable
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

T = TypeVar("T", bound=msgspec.Struct)

_MODEST_REPLY_BYTES = 2**24
_NUDGES = 2
"""An echo is missed only after so many waits in a row: a loop of our own that was blocked must not count as theirs."""


class ControlClient:
    """Calls one control address. Made anywhere; used on one event loop; every call has a deadline.

    Args:
        address: ``unix:/path`` or ``tcp://host:port``.
        secret: shared secret, if the address has one.
        timeout_s: deadline of calls that carry none of their own, in seconds.
        heartbeat_s: `watch` asks for an echo so often, in seconds.
        patience_s: a process that gives no echo for so long counts as gone, in seconds.

    Every call raises `TargetUnreachable` (no answer), `AuthError`, `ProtocolError`, or the typed error that was answered.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: str | None = None,
        timeout_s: float = 60.0,
        heartbeat_s: float = 2.0,
        patience_s: float = 10.0,
    ) -> None:
        self.address = address
        self._where = Address.parse(address)
        self._signer = Signer(secret) if secret else None
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._patience_s = patience_s
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._line: Line | None = None
        self._closed = False
        self._peer = ""

    @property
    def calls_under_way(self) -> int:
        """Connections in use, watches among them, and calls that go over a watch."""
        connectors = [session.connector for session in self._sessions.values()]
        over_watch = 0 if self._line is None else self._line.calls_under_way
        return over_watch + sum(len(connector._acquired) for connector in connectors if connector)  # noqa: SLF001 - told nowhere

    async def status(self) -> Status:
        return await self._call("GET", "status", None, Status)

    async def manifest(self) -> ManifestReply:
        return await self._call("GET", "manifest", None, ManifestReply, most=MOST_REPLY_BYTES)

    async def connect(self, request: ConnectRequest) -> Ack:
        """Also makes source and generation the name under which `watch` watches: see `watch_name`."""
        self._peer = watch_name(request)
        if self._line is not None and self._line.peer not in ("", self._peer):
            self._line = None  # that of the link before, which may stand for a moment more
        await self._close(keep=True)
        return await self._call("POST", "connect", request, Ack, timeout_s=request.timeout_s + ANSWER_MARGIN_S, pack=True)

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        return await self._ask("prepare_weights_update", request, PrepareReply, request.timeout_s)

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        return await self._ask("complete_weights_update", request, CompleteReply, request.timeout_s)

    async def abort(self, request: AbortRequest) -> Ack:
        return await self._call("POST", "abort", request, Ack)

    async def join(self, request: JoinRequest) -> Ack:
        """Also makes ``request.incarnation`` the name under which `watch` watches."""
        self._peer = request.incarnation
        await self._close(keep=True)
        return await self._call("POST", "join", request, Ack)

    async def vote(self, request: CompleteRequest) -> VoteReply:
        return await self._ask("vote", request, VoteReply, request.timeout_s)

    async def order(self, request: RankOrder) -> Ack:
        return await self._ask("order", request, Ack, request.timeout_s)

    async def watch(self, opened: Callable[[], None] | None = None) -> str:
        """Hold a connection; returns why it ended: at once when the process dies, after ``patience_s`` when it is stopped.

        Args:
            opened: called once the connection stands.
        """
        headers, nonce = self._headers("GET", "watch", b"")
        if self._peer:
            headers[PEER] = self._peer
        try:
            async with asyncio.timeout(self._timeout_s):
                socket = await self._open().ws_connect(
                    self._url("watch"), headers=headers, protocols=(PROTOCOL,), max_msg_size=_MODEST_REPLY_BYTES
                )
        except aiohttp.WSServerHandshakeError as error:
            raise AuthError(f"{self.address} refused to be watched: HTTP {error.status}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable("watch", error, self._timeout_s) from error
        try:
            if self._signer is not None:
                self._signer.check_reply(nonce, 101, _handshake_headers(socket), b"")
            self._line = line = Line(socket, self._signer, nonce, headers.get(PEER, ""))
            if opened is not None:
                opened()
            return await self._watch(socket, line)
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(0.5):
                    await socket.close()

    async def close(self) -> None:
        """End every call and watch."""
        self._closed = True
        line, self._line = self._line, None
        if line is not None:
            line.end("this client was closed")
        await self._close(keep=True)
        await self._close(keep=False)

    async def _close(self, *, keep: bool) -> None:
        session = self._sessions.pop(keep, None)
        if session is not None:
            await session.close()

    async def _watch(self, socket: aiohttp.ClientWebSocketResponse, line: Line) -> str:
        heard = line.heard
        reader = asyncio.create_task(line.listen(), name="syncline-watch-reader")
        why = "the watch was given up"
        try:
            while True:
                heard.clear()
                with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
                    async with asyncio.timeout(self._patience_s):  # a stopped process may not empty its end
                        await socket.send_str("?")
                for _ in range(_NUDGES):
                    await _first(reader, heard, self._patience_s / _NUDGES)
                    if reader.done() or heard.is_set():
                        break
                if reader.done():
                    why = f"the connection to {self.address} ended"
                    return why
                if not heard.is_set():
                    why = f"{self.address} gave no sign of life for {self._patience_s:g} s"
                    return why
                await asyncio.wait({reader}, timeout=self._heartbeat_s)
        finally:
            if self._line is line:
                self._line = None
            line.end(why)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _ask(self, name: str, request: msgspec.Struct, kind: type[T], timeout_s: float) -> T:
        """A call of a push, which only the process that was linked can answer: over the watch, or a connection left open."""
        return await self._call("POST", name, request, kind, timeout_s=timeout_s + ANSWER_MARGIN_S, keep=True)

    async def _call(
        self,
        method: str,
        name: str,
        request: msgspec.Struct | None,
        kind: type[T],
        *,
        timeout_s: float | None = None,
        pack: bool = False,
        keep: bool = False,
        most: int = _MODEST_REPLY_BYTES,
    ) -> T:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if pack:  # a plan: its size is known only when it is encoded
            body = await asyncio.to_thread(msgspec.msgpack.encode, request)
        else:
            body = b"" if request is None else msgspec.json.encode(request)
        line = self._line
        if keep and line is not None and line.takes_calls and len(body) <= MOST_CALL_BYTES:
            return await self._call_over(line, name, body, kind, timeout_s)
        headers, nonce = await crunch(len(body), self._headers, method, name, body)
        if request is not None:
            headers["Content-Type"] = MSGPACK if pack else JSON
        data = io.BytesIO(body) if len(body) > LARGE_BYTES else body or None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open(keep=keep).request(method, self._url(name), data=data, headers=headers) as response,
            ):
                answer = await self._read(response, most)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(name, error, timeout_s) from error
        if self._signer is not None and response.status != 401:
            await crunch(len(answer), self._signer.check_reply, nonce, response.status, response.headers, answer)
        return await crunch(len(answer), self._decode, name, response.status, response.content_type, answer, kind)

    async def _call_over(self, line: Line, name: str, body: bytes, kind: type[T], timeout_s: float) -> T:
        """The same over the watch that stands."""
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await line.call(name, body)
        except (OSError, TimeoutError) as error:
            raise self._unreachable(name, error, timeout_s) from error
        return await crunch(len(answer), self._decode, name, status, JSON, answer, kind)

    def _decode(self, name: str, status: int, content_type: str, answer: bytes, kind: type[T]) -> T:
        where = f"{self.address}/{name}"
        try:
            if status >= 400:
                raise msgspec.json.decode(answer, type=ErrorReply).to_error(where)
            decode: Any = msgspec.msgpack.decode if content_type == MSGPACK else msgspec.json.decode
            return decode(answer, type=kind)  # type: ignore[no-any-return]
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{where} answered HTTP {status} with something that is no {kind.__name__}: {error}") from error

    async def _read(self, response: aiohttp.ClientResponse, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := await response.content.readany():
            size += len(part)
            if size > most:
                raise ProtocolError(f"{self.address} answered more than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    def _headers(self, method: str, name: str, body: bytes) -> tuple[dict[str, str], str]:
        headers = {} if self._signer is None else self._signer.sign(method, f"/{name}", body)
        return headers, headers.get(NONCE, "")

    def _url(self, name: str) -> str:
        where = self._where
        host = "localhost" if where.path else f"{f'[{where.host}]' if ':' in where.host else where.host}:{where.port}"
        return f"http://{host}/{name}"

    def _open(self, *, keep: bool = False) -> aiohttp.ClientSession:
        """``keep``: connections are left open for the next call. Else each call has one of its own: one that was left open
        may belong to a process that is gone by now, while another one listens there.
        """
        if self._closed:
            raise ClosedError(f"the client of {self.address} is closed")
        if keep not in self._sessions:
            connector: aiohttp.BaseConnector
            if self._where.path:
                connector = aiohttp.UnixConnector(self._where.path, force_close=not keep, limit=0)
            else:
                connector = aiohttp.TCPConnector(force_close=not keep, limit=0)
            self._sessions[keep] = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._sessions[keep]

    def _unreachable(self, name: str, error: BaseException, timeout_s: float) -> TargetUnreachable:
        what = f"no answer within {timeout_s:.3g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return TargetUnreachable(f"{self.address}/{name}: {what}; is the process there, and is the address right?")


async def _first(reader: asyncio.Task[None], heard: asyncio.Event, timeout_s: float) -> None:
    waiter = asyncio.create_task(heard.wait())
    try:
        await asyncio.wait({reader, waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)


def _handshake_headers(socket: aiohttp.ClientWebSocketResponse) -> CIMultiDictProxy[str]:
    return socket._response.headers  # noqa: SLF001 - the only way to the headers of the handshake
