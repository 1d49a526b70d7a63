"""How the ranks of a source act as one: rank 0 is the hub, every other rank keeps one connection to it.

There is one primitive, `exchange`: every rank contributes a payload to a step (``"attempt/step"``), rank 0 decides on all
of them, and all ranks get the decision. A rank that fails fails the whole attempt: its error reaches every rank at once
(`watch`), ends every exchange of that attempt, and so none waits in a collective for one that has left. A rank whose
connection ends is lost for good.

A trainer may block its event loop for minutes between two pushes. So there are no heartbeats (a rank that is stopped is
noticed by the deadline of the exchange that waits for it), and a rank leaves an exchange only when what it had to say has
left the process: the others need it, and its loop may not turn again soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from .errors import (
    AuthError,
    ControlError,
    ProtocolError,
    PushTimeout,
    SourceRankLost,
    SynclineError,
    error_from_wire,
    wire_text,
)
from .trace_clock import ClockLog

log = logging.getLogger("syncline.engine")

Decide = Callable[[Sequence[bytes]], Awaitable[bytes]]
OnAbort = Callable[[str, SynclineError], None]
OnNote = Callable[[str, bytes], None]
_MAX_FRAME = 2**30
_DELIVER_S = 5.0
_GOODBYE_S = 1.0
LOST = "*"
"""The step that a lost rank fails: every one."""
_GOODBYE = "goodbye"
"""The note that comes before an orderly close. It takes part in no later step, and whoever is still busy with the last one
may finish it."""
_TOKEN_HEADER = "X-Syncline-Token"  # noqa: S105 - the name of a header


class Frame(msgspec.Struct, kw_only=True, array_like=True):
    """One message between a rank and the hub. ``error`` is a class name of `syncline.engine.errors`, or empty."""

    step: str
    payload: bytes = b""
    error: str = ""
    note: bool = False
    """A note outside any exchange (see `Coordination.tell`)."""


class Coordination(Protocol):
    """The ranks of a source, acting as one."""

    rank: int
    world_size: int
    clock: ClockLog
    """When steps came and went: what aligns the ranks' traces."""

    def watch(self, on_abort: OnAbort, on_note: OnNote) -> None:
        """Call these on the loop: when another rank failed an attempt, and when a note comes in."""
        ...

    async def exchange(self, step: str, payload: bytes, decide: Decide, timeout_s: float) -> bytes:
        """Contribute to ``step``; returns rank 0's decision. Raises the error that any rank contributed."""
        ...

    async def fail(self, attempt: str, error: SynclineError) -> None:
        """Fail an attempt: every exchange of it raises ``error`` on every rank. The first failure counts."""
        ...

    def forget(self, past: Callable[[str], bool]) -> None:
        """Drop what came in for attempts that are over and that nobody asked for."""
        ...

    def tell(self, topic: str, payload: bytes) -> None:
        """Send a note: from a rank to rank 0; from rank 0 to all other ranks. Never blocks; lost with a lost rank."""
        ...

    async def close(self) -> None: ...


class Solo:
    """A source of one rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.clock = ClockLog()
        self._failed: dict[str, SynclineError] = {}

    def watch(self, on_abort: OnAbort, on_note: OnNote) -> None:
        """Nobody else can abort or tell."""

    async def exchange(self, step: str, payload: bytes, decide: Decide, timeout_s: float) -> bytes:
        if (error := self._failed.get(attempt_of(step))) is not None:
            raise error
        async with asyncio.timeout(timeout_s):
            return await decide([payload])

    async def fail(self, attempt: str, error: SynclineError) -> None:
        self._failed.setdefault(attempt, error)

    def forget(self, past: Callable[[str], bool]) -> None:
        _forget(past, self._failed)

    def tell(self, topic: str, payload: bytes) -> None:
        """There is nobody to tell."""

    async def close(self) -> None:
        """Nothing is open."""


def attempt_of(step: str) -> str:
    """The attempt that a step belongs to."""
    return step.partition("/")[0]


def error_frame(step: str, error: BaseException) -> Frame:
    """The frame that carries the failure of an attempt to another rank."""
    kind = type(error).__name__ if isinstance(error, SynclineError) else "StageError"
    return Frame(step=step, payload=wire_text(error).encode(), error=kind)


def _ignore_abort(_attempt: str, _error: SynclineError) -> None:
    """Until somebody watches."""


def _forget(past: Callable[[str], bool], steps: dict[str, Any]) -> None:
    for step in [step for step in steps if past(step)]:
        del steps[step]


class Hub:
    """Rank 0's side: collects contributions, decides, spreads decisions and failures."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.clock = ClockLog()
        self.token = secrets.token_hex(32)
        self._sockets: dict[int, web.WebSocketResponse] = {}
        self._lost: dict[int, SourceRankLost] = {}
        self._departed: set[int] = set()
        self._contributed: dict[str, dict[int, bytes]] = {}
        self._failed: dict[str, SynclineError] = {}
        self._changed = asyncio.Condition()
        self._outbox: asyncio.Queue[Frame | asyncio.Future[None]] = asyncio.Queue()
        self._on_abort: OnAbort = _ignore_abort
        self._on_note: OnNote = lambda _topic, _payload: None
        self._runner: web.AppRunner | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing = False
        self._meeting = True

    async def start(self, host: str) -> str:
        """Listen; returns the address that other ranks connect to."""
        app = web.Application()
        app.router.add_get("/ranks/{rank}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        self._writer = asyncio.create_task(self._write(), name="syncline-hub-writer")
        port = self._runner.addresses[0][1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def joined(self, timeout_s: float) -> None:
        """Wait until every other rank has connected."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(self._sockets) == self.world_size - 1)
        except TimeoutError:
            missing = sorted(set(range(1, self.world_size)) - set(self._sockets))
            raise SourceRankLost(f"source ranks {missing} did not connect to rank 0 within {timeout_s:g} s") from None
        finally:
            self._meeting = False  # who comes later is looking for another engine

    def watch(self, on_abort: OnAbort, on_note: OnNote) -> None:
        self._on_abort, self._on_note = on_abort, on_note

    async def exchange(self, step: str, payload: bytes, decide: Decide, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                decision = await decide(await self._collect(step, payload, timeout_s))
        except BaseException as error:
            # Whatever stops rank 0 stops the step for all: nobody may wait for a decision that will not come.
            await self.fail(attempt_of(step), self._as_error(step, error, timeout_s))
            if isinstance(error, TimeoutError):
                raise self._as_error(step, error, timeout_s) from error
            raise
        finally:
            self._contributed.pop(step, None)
        self.clock.decided(step)
        self._send(Frame(step=step, payload=decision))
        await self._flushed()
        return decision

    async def _collect(self, step: str, payload: bytes, timeout_s: float) -> list[bytes]:
        parts = self._contributed.setdefault(step, {})
        parts[0] = payload
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(
                        lambda: attempt_of(step) in self._failed or self._lost or len(parts) == self.world_size
                    )
            except TimeoutError:
                missing = sorted(set(range(self.world_size)) - set(parts))
                raise SourceRankLost(
                    f"source ranks {missing} did not reach step {step!r} within {timeout_s:.3g} s: they are stopped, stuck, "
                    "or did not call push; restart them and connect again"
                ) from None
        if attempt_of(step) in self._failed:
            raise self._failed[attempt_of(step)]
        if self._lost:
            raise next(iter(self._lost.values()))
        return [parts[rank] for rank in range(self.world_size)]

    def _as_error(self, step: str, error: BaseException, timeout_s: float) -> SynclineError:
        if isinstance(error, SynclineError):
            return error
        if isinstance(error, TimeoutError):
            return PushTimeout(f"step {step!r} was not decided within {timeout_s:.3g} s")
        return ControlError(f"rank 0 failed in step {step!r}: {type(error).__name__}: {error}")

    async def fail(self, attempt: str, error: SynclineError) -> None:
        async with self._changed:
            if attempt not in self._failed:
                self._failed[attempt] = error
                self._send(error_frame(attempt, error))
            self._changed.notify_all()
        await self._flushed()

    def forget(self, past: Callable[[str], bool]) -> None:
        _forget(past, self._failed)
        _forget(past, self._contributed)
        self.clock.forget(past)

    def tell(self, topic: str, payload: bytes) -> None:
        self._send(Frame(step=topic, payload=payload, note=True))

    def _send(self, frame: Frame) -> None:
        self._outbox.put_nowait(frame)

    async def _flushed(self) -> None:
        """Wait until everything said so far has left this process."""
        mark: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(mark)
        if self._writer is not None and not self._writer.done():
            await mark

    async def _write(self) -> None:
        while True:
            item = await self._outbox.get()
            if isinstance(item, Frame):
                data = msgspec.msgpack.encode(item)
                await asyncio.gather(*(self._deliver(peer, socket, data) for peer, socket in self._sockets.items()))
            elif not item.done():
                item.set_result(None)

    @staticmethod
    async def _deliver(peer: int, socket: web.WebSocketResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(_DELIVER_S):
                await socket.send_bytes(data)
        except TimeoutError:
            log.warning("source rank %d takes nothing from rank 0: its connection is closed", peer)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.close(), 0.1)
        except (ConnectionError, RuntimeError):
            pass  # `_serve` sees the connection end, and says who is lost

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get(_TOKEN_HEADER, ""), self.token):
            raise web.HTTPUnauthorized
        rank = int(request.match_info["rank"])
        if not 0 < rank < self.world_size or rank in self._sockets or not self._meeting:
            raise web.HTTPConflict
        # With no room to buffer in, sending returns when the bytes have left: see `_flushed`.
        socket = web.WebSocketResponse(max_msg_size=_MAX_FRAME, timeout=1.0, writer_limit=0)
        await socket.prepare(request)
        if request.transport is not None:
            request.transport.set_write_buffer_limits(high=0)
        async with self._changed:
            self._sockets[rank] = socket
            self._changed.notify_all()
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    await self._received(rank, msgspec.msgpack.decode(message.data, type=Frame))
        finally:
            await self._left(rank)
        return socket

    async def _received(self, rank: int, frame: Frame) -> None:
        if frame.note and frame.step == _GOODBYE:
            self._departed.add(rank)
            return
        if frame.note:
            self._on_note(frame.step, frame.payload)
            return
        if frame.error:
            error = error_from_wire(frame.error, f"source rank {rank}: {frame.payload.decode()}")
            first = frame.step not in self._failed
            await self.fail(frame.step, error)
            if first:
                self._on_abort(frame.step, error)
            return
        self.clock.arrived(frame.step, rank)
        async with self._changed:
            self._contributed.setdefault(frame.step, {})[rank] = frame.payload
            self._changed.notify_all()

    async def _left(self, rank: int) -> None:
        if self._closing:
            return
        departed = rank in self._departed
        why = "it closed its engine" if departed else "its connection to rank 0 ended; restart it and connect again"
        error = SourceRankLost(f"source rank {rank} went away: {why}")
        self._sockets.pop(rank, None)
        self._lost[rank] = error
        if not departed:
            self._send(error_frame(LOST, error))
            self._on_abort(LOST, error)
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        self._closing = True
        self._send(Frame(step=_GOODBYE, note=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._flushed()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        for socket in list(self._sockets.values()):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.close(), 1.0)
        if self._runner is not None:
            await self._runner.cleanup()


class Spoke:
    """The side of every other rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.clock = ClockLog()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._failed: dict[str, SynclineError] = {}
        self._broken: SynclineError | None = None
        self._hub_departed = False
        self._on_abort: OnAbort = _ignore_abort
        self._on_note: OnNote = lambda _topic, _payload: None
        self._sends: set[asyncio.Task[None]] = set()

    async def start(self, address: str, token: str, timeout_s: float) -> None:
        """Connect to the hub."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=timeout_s))
        try:
            self._socket = await self._session.ws_connect(
                f"{address}/ranks/{self.rank}", headers={_TOKEN_HEADER: token}, max_msg_size=_MAX_FRAME
            )
        except aiohttp.WSServerHandshakeError as error:
            await self._session.close()
            raise AuthError(f"rank 0 at {address} refused source rank {self.rank}: HTTP {error.status}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._session.close()
            raise SourceRankLost(f"source rank {self.rank} cannot reach rank 0 at {address}: {error}") from error
        self._reader = asyncio.create_task(self._read(self._socket), name=f"syncline-rank-{self.rank}-reader")

    def watch(self, on_abort: OnAbort, on_note: OnNote) -> None:
        self._on_abort, self._on_note = on_abort, on_note

    async def exchange(self, step: str, payload: bytes, decide: Decide, timeout_s: float) -> bytes:
        if self._broken is not None:
            raise self._broken
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if (error := self._failed.get(attempt_of(step))) is not None:
            raise error
        self._waiting[step] = future
        self.clock.left(step)
        await self._post(Frame(step=step, payload=payload))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise SourceRankLost(
                f"source rank {self.rank} had no decision of rank 0 on step {step!r} within {timeout_s:.3g} s: rank 0 is "
                "stopped or stuck; restart it and connect again"
            ) from None
        finally:
            self._waiting.pop(step, None)

    async def fail(self, attempt: str, error: SynclineError) -> None:
        if self._broken is None and attempt not in self._failed:
            self._failed[attempt] = error
            await self._post(error_frame(attempt, error))

    def forget(self, past: Callable[[str], bool]) -> None:
        _forget(past, self._failed)
        self.clock.forget(past)

    def tell(self, topic: str, payload: bytes) -> None:
        task = asyncio.ensure_future(self._post(Frame(step=topic, payload=payload, note=True)))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _post(self, frame: Frame) -> None:
        if self._socket is None:
            raise ProtocolError(f"source rank {self.rank} is not connected to rank 0")
        with contextlib.suppress(ConnectionError, RuntimeError):  # the reader notices and says who is lost
            await self._socket.send_bytes(msgspec.msgpack.encode(frame))
        await asyncio.sleep(0)  # uvloop writes at the end of a turn

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._received(msgspec.msgpack.decode(message.data, type=Frame))
        finally:
            why = "it closed its engine" if self._hub_departed else "its connection ended; restart it and connect again"
            self._break(SourceRankLost(f"source rank 0 went away: {why}"))

    def _received(self, frame: Frame) -> None:
        if frame.note and frame.step == _GOODBYE:
            self._hub_departed = True
        elif frame.note:
            self._on_note(frame.step, frame.payload)
        elif frame.step == LOST:
            self._break(error_from_wire(frame.error, frame.payload.decode()))
        elif frame.error:
            self._fail_attempt(frame.step, error_from_wire(frame.error, frame.payload.decode()))
        elif (future := self._waiting.get(frame.step)) is not None and not future.done():
            self.clock.back(frame.step)
            future.set_result(frame.payload)

    def _fail_attempt(self, attempt: str, error: SynclineError) -> None:
        known = attempt in self._failed
        self._failed.setdefault(attempt, error)
        for step, future in self._waiting.items():
            if attempt_of(step) == attempt and not future.done():
                future.set_exception(error)
        if not known:
            self._on_abort(attempt, error)

    def _break(self, error: SynclineError) -> None:
        if self._broken is not None:
            return
        self._broken = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        if not self._hub_departed:
            self._on_abort(LOST, error)

    async def close(self) -> None:
        if self._broken is None and self._socket is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self._post(Frame(step=_GOODBYE, note=True))
        self._broken = self._broken or SourceRankLost("this engine is closed")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._socket.close(), 1.0)
        if self._session is not None:
            await self._session.close()
