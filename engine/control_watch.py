"""The connection by which one process watches another, and the calls of a push that go over it: both ends.

A request of HTTP costs several times what a message over a connection that stands costs, and a push has a handful of them, of
which those between pause and resume hold up requests. And the connection reaches the very process that is watched: it ends
when that does.

Text is a question for a sign of life, echoed as it is. Binary messages are `CallFrame` and `AnswerFrame`, in msgpack; bodies
and status are those of the ``POST`` of that name. Where there is a secret, each is signed over the nonce that opened the
connection and its own number, which only grows, and a call over its time: none can be made up, changed, repeated, put before
another one or held back for longer than a request of HTTP could.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from .auth import Signer
from .errors import ProtocolError

PROTOCOL: Final = "syncline-calls-1"
"""WebSocket subprotocol: the other side takes calls. One that does not say so is called by HTTP."""

CALLS: Final = frozenset({"prepare_weights_update", "complete_weights_update", "vote", "order"})
"""What may be called so."""

MOST_CALL_BYTES: Final = 2**16
"""Larger bodies go by HTTP: what is signed and taken apart here holds up the loop, and must not fill a socket that a stopped
process does not empty.
"""

_ROOM_BYTES = 2**10
MOST_FRAME_BYTES: Final = MOST_CALL_BYTES + _ROOM_BYTES

_MOST_AT_ONCE = 64
"""Calls under way on one connection; a push has one or two."""


class CallFrame(msgspec.Struct, frozen=True, array_like=True):
    """A call. Its ``number`` is greater than those before it on this connection."""

    number: int
    name: str
    body: bytes
    signed: tuple[str, str] = ("", "")
    """See `Signer.sign_call`."""


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the call of that number."""

    number: int
    status: int
    body: bytes
    mac: str = ""


class Line:
    """The calling end of a watch that takes calls.

    Args:
        socket: the connection.
        signer, nonce: of the address, and what opened the connection; None where there is no secret.
        peer: the name under which it was opened; empty: none.

    Attributes:
        heard: set whenever a sign of life has come.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, signer: Signer | None, nonce: str, peer: str) -> None:
        self.peer = peer
        self._socket = socket
        self._signer = signer
        self._nonce = nonce
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AnswerFrame]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._ended = ""
        self.heard = asyncio.Event()

    @property
    def takes_calls(self) -> bool:
        """The other side knows how, and the connection stands."""
        return self._socket.protocol == PROTOCOL and not self._ended

    @property
    def calls_under_way(self) -> int:
        """Calls without an answer yet."""
        return len(self._waiting)

    async def call(self, name: str, body: bytes) -> tuple[int, bytes]:
        """Call, and wait for the answer: its status and body. However long it takes: set a deadline around it.

        Raises:
            ConnectionError: the connection has ended.
            AuthError: the answer is not signed with our secret.
        """
        if self._ended:
            raise ConnectionResetError(self._ended)
        number = next(self._numbers)
        signed = ("", "") if self._signer is None else self._signer.sign_call(self._nonce, number, name, body)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        # a task of its own: a caller who gives up must not cancel what others of this connection wait for, too
        sending = asyncio.create_task(self._send(CallFrame(number, name, body, signed)))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        try:
            await asyncio.wait({sending, answer}, return_when=asyncio.FIRST_COMPLETED)
            frame = await answer
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # asked for, whatever becomes of the caller
        if self._signer is not None:
            self._signer.check_answer(frame.mac, self._nonce, number, frame.status, frame.body)
        return frame.status, frame.body

    async def _send(self, frame: CallFrame) -> None:
        try:
            await self._socket.send_bytes(msgspec.msgpack.encode(frame))
        except (ConnectionError, RuntimeError) as error:
            self.end(str(error))

    async def listen(self) -> None:
        """Take in what comes until the connection ends; then calls without an answer fail."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._answered(msgspec.msgpack.decode(message.data, type=AnswerFrame))
                else:
                    self.heard.set()
        finally:
            self.end("the connection ended")

    def end(self, why: str) -> None:
        """Nothing more is called or answered."""
        self._ended = self._ended or why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError(why))
        for sending in self._sending:
            if sending is not asyncio.current_task():
                sending.cancel()

    def _answered(self, frame: AnswerFrame) -> None:
        answer = self._waiting.get(frame.number)  # None: nobody waits for it any more
        if answer is not None and not answer.done():
            answer.set_result(frame)


Answer = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Name and body of a call -> status and body of its answer. Raises nothing."""


class Watched:
    """The answering end of a watch.

    Args:
        socket: the connection, prepared.
        signer, nonce: as for `Line`.
        answer: carries out a call.
        calls: the tasks that calls run in; they go on when the connection ends, as requests of HTTP do.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        signer: Signer | None,
        nonce: str,
        *,
        answer: Answer,
        calls: set[asyncio.Task[None]],
    ) -> None:
        self._socket = socket
        self._signer = signer
        self._nonce = nonce
        self._answer = answer
        self._calls = calls
        self._under_way = 0
        self._last = 0

    async def serve(self) -> None:
        """Echo and take calls until one side ends it. The one who watches judges how long an echo may take.

        Raises:
            ProtocolError, AuthError: something came that is no call, or is not signed.
        """
        with contextlib.suppress(ConnectionError, RuntimeError):  # it went away while we answered
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    await self._socket.send_str(message.data)
                elif message.type is aiohttp.WSMsgType.BINARY:
                    frame = self._checked(message.data)
                    self._under_way += 1
                    task = asyncio.create_task(self._carry_out(frame), name=f"syncline-call-{frame.name}")
                    self._calls.add(task)
                    task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way -= 1
        self._calls.discard(task)

    def _checked(self, data: bytes) -> CallFrame:
        try:
            frame = msgspec.msgpack.decode(data, type=CallFrame)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"what came over a watch is no call: {error}") from None
        if self._signer is not None:
            self._signer.check_call(frame.signed, self._nonce, frame.number, frame.name, frame.body)
        if frame.number <= self._last or frame.name not in CALLS:
            raise ProtocolError(f"call {frame.number} of {frame.name[:40]!r} came over a watch after call {self._last}")
        if self._under_way >= _MOST_AT_ONCE:
            raise ProtocolError(f"more than {_MOST_AT_ONCE} calls at once came over a watch")
        self._last = frame.number
        return frame

    async def _carry_out(self, call: CallFrame) -> None:
        status, body = await self._answer(call.name, call.body)
        mac = ""
        if self._signer is not None:
            mac = self._signer.sign_answer(self._nonce, call.number, status, body)
        with contextlib.suppress(ConnectionError, RuntimeError):  # whoever asked has gone
            await self._socket.send_bytes(msgspec.msgpack.encode(AnswerFrame(call.number, status, body, mac)))
