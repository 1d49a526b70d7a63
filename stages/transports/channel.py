"""A control channel between two processes of one host: small fixed messages, with descriptors, over a Unix socket.

Sequenced packets: a message arrives whole or not at all. When the other process dies, or shuts the channel down, this side
learns of it at once, even while the other was stopped; and whoever finds the channel open *after* reading shared memory
knows that the other side had not given it up before (`Channel.check`): giving up shuts the channel first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ..errors import TransportError

_FORMAT = struct.Struct("<B3xIQQQ")
_MAX_FDS = 4


class Kind(IntEnum):
    """What a message says. Source to receiver: MAP, UNMAP, BEGIN, BUCKET. Receiver to source: HELLO, READY, ACK, RELEASED."""

    HELLO = 1
    MAP = 2
    READY = 3
    BEGIN = 4
    BUCKET = 5
    ACK = 6
    RELEASED = 7
    UNMAP = 8


_KINDS = frozenset(Kind)


class Message(NamedTuple):
    """``task``, ``push``, ``a`` and ``b`` mean what the kind says. ``fds`` belong to whoever gets the message."""

    kind: Kind
    task: int = 0
    push: int = 0
    a: int = 0
    b: int = 0
    fds: tuple[int, ...] = ()


class Channel:
    """One end of a channel, on one event loop.

    Args:
        sock: a connected Unix socket of type ``SOCK_SEQPACKET``; the channel takes it over.
        on_message: called on the loop with each message.
        on_closed: called on the loop, once, when the other end is gone; not after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[Message], None],
        on_closed: Callable[[TransportError], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_closed = on_closed
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._open = True
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLRDHUP)
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def is_open(self) -> bool:
        return self._open

    def hand_over(self, *, on_message: Callable[[Message], None], on_closed: Callable[[TransportError], None]) -> None:
        """Call others from now on."""
        self._on_message, self._on_closed = on_message, on_closed

    def check(self) -> None:
        """Raises `TransportError` if the other end has shut the channel down or is gone, whether or not that was noticed."""
        if not self._open or self._poll.poll(0):
            raise TransportError("the other end of the shared-memory link has given this one up, or is gone; link anew")

    def send(self, message: Message) -> None:
        """Send, or queue if the other end does not keep up. Takes over ``message.fds``. Nothing happens on a closed channel."""
        data = _FORMAT.pack(message.kind, message.task, message.push, message.a, message.b)
        if not self._open:
            _close_all(message.fds)
            return
        self._queue.append((data, message.fds))
        if len(self._queue) == 1:
            self._writable()

    def close(self) -> None:
        """Shut down, so that the other end notices even if descriptors of it were inherited somewhere. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for _, fds in self._queue:
            _close_all(fds)
        self._queue.clear()

    def _writable(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            try:
                _send(self._sock, data, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError as error:
                # not from here: the caller of `send` is in the middle of something
                self._loop.call_soon(self._lost, error)
                return
            self._queue.popleft()
            _close_all(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        while self._open:
            try:
                data, fds = _receive(self._sock)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(error)
                return
            if len(data) != _FORMAT.size or data[0] not in _KINDS:
                _close_all(fds)
                self._lost(ValueError(f"{data!r} is no message of this protocol") if data else None)
                return
            kind, task, push, a, b = _FORMAT.unpack(data)
            self._on_message(Message(Kind(kind), task, push, a, b, fds))

    def _lost(self, error: Exception | None) -> None:
        if self._open:
            self.close()
            why = f": {error}" if error is not None else ""
            self._on_closed(TransportError(f"the other end of the shared-memory link is gone{why}"))


async def reached(path: str, who: str) -> socket.socket:
    """A socket for a channel, connected to the doorway at ``path``. `TransportError` if ``who`` is not there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, path)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise TransportError(f"{who} cannot be reached at {path}: {error}") from error
        raise
    return sock


# `socket.send_fds` and `recv_fds` take flags and do not pass them on (Python 3.11)


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def _receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    room = socket.CMSG_LEN(_MAX_FDS * array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(_FORMAT.size + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, tuple(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
