"""Where the ranks of a gloo communicator find each other: a key-value store that one rank hosts on a socket.

Torch's own store (``TCPStore``) asks the name service for the peer's name at every connection, even on loopback. Where that
service does not answer, each connection stalls for five seconds or ten; hence this one. It does what gloo needs: set a key,
and wait for a key.

Requests and replies are frames: 4 bytes of length, then msgpack. The first frame of a connection is a token that only those
know to whom the control plane told the endpoint.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
from torch._C import _distributed_c10d as c10d

from .errors import TransportError

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 2**20
_CHUNK = 2**16


class Rendezvous:
    """A store on this rank or another one. Keep it while communicators are made through it, and as long as they live.

    Attributes:
        endpoint: ``token@host:port``, for the other ranks.
        store: the store itself, for one thread at a time.
        close: lets go of it, and of the store itself where this rank hosts it. Idempotent, from any thread, never blocks;
            the last reference does it, too.
    """

    def __init__(self, endpoint: str, store: c10d.Store, close: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.store = store
        self.close = weakref.finalize(self, close)

    @classmethod
    def host(cls, bind_host: str, *, timeout_s: float) -> Rendezvous:
        """Host a store that listens on ``bind_host`` only. Quick."""
        server = _Server(bind_host)
        try:
            store = _RemoteStore(server.endpoint, timeout_s)
        except BaseException:
            server.close()
            raise

        def close() -> None:
            server.close()
            store.connection.close()

        return cls(server.endpoint, store, close)

    @classmethod
    def join(cls, endpoint: str, *, timeout_s: float) -> Rendezvous:
        """Reach a hosted store. Blocks for at most ``timeout_s``: not for the event loop."""
        store = _RemoteStore(endpoint, timeout_s)
        return cls(endpoint, store, store.connection.close)

    def interrupt(self) -> None:
        """End a wait in the store, with an error where it waits; then the store is of no use. From any thread, never blocks."""
        if isinstance(self.store, _RemoteStore):
            with contextlib.suppress(OSError):
                self.store.connection.shutdown(socket.SHUT_RDWR)


class _RemoteStore(c10d.Store):
    """What gloo asks. It calls these methods from C++ and takes a `RuntimeError` for a failure."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        super().__init__()
        token, _, address = endpoint.rpartition("@")
        host, _, port = address.rpartition(":")
        self._timeout_s = timeout_s
        try:
            self.connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.sendall(_frame(token.encode()))
        except (OSError, ValueError) as error:
            raise TransportError(f"no rendezvous at {address} within {timeout_s:g} s: {error}") from error

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(_Request(key=key, value=value if isinstance(value, bytes) else value.encode()), self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._ask(_Request(key=key), self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            self._ask(_Request(key=key), until - time.monotonic())

    def _ask(self, request: _Request, timeout_s: float) -> bytes:
        try:
            self.connection.settimeout(max(0.001, timeout_s))
            self.connection.sendall(_frame(msgspec.msgpack.encode(request)))
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            return self._read(length)
        except TimeoutError:
            self.connection.close()  # a late reply would be taken for another one's
            raise RuntimeError(f"nobody came to the rendezvous with {request.key!r} in time") from None
        except OSError as error:
            raise RuntimeError(f"the rendezvous went away: {error}") from None

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            if not part:
                raise ConnectionError("the rank that hosts it closed it")
            data += part
        return bytes(data)


class _Request(msgspec.Struct, array_like=True):
    key: str
    value: bytes | None = None
    """None asks for the key's value, and waits until there is one."""


@dataclass(kw_only=True, eq=False)
class _Client:
    connection: socket.socket
    known: bool = False
    """It has shown the token."""
    received: bytearray = field(default_factory=bytearray)


class _Server:
    """The store, in a thread of its own."""

    def __init__(self, bind_host: str) -> None:
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._listener = socket.create_server((bind_host, 0), family=family)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        port = self._listener.getsockname()[1]
        self.endpoint = f"{self._token}@{f'[{bind_host}]' if ':' in bind_host else bind_host}:{port}"
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, list[_Client]] = defaultdict(list)
        self._clients: set[_Client] = set()
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._run, name="syncline-rendezvous-host", daemon=True).start()

    def close(self) -> None:
        """End the thread, which closes everything. From any thread; never blocks."""
        self._wake.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._turn(selector):
                pass
        for closing in (self._listener, self._woken, *(client.connection for client in self._clients)):
            closing.close()

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        for key, _ in selector.select():
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept(selector)
            elif not self._heard(key.data):
                selector.unregister(key.fileobj)
                key.data.connection.close()
                self._clients.discard(key.data)
        return True

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # it may have gone by now
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            client = _Client(connection=connection)
            self._clients.add(client)
            selector.register(connection, selectors.EVENT_READ, client)

    def _heard(self, client: _Client) -> bool:
        """Take in what a client sent; False if it is gone, or not one of ours."""
        try:
            data = client.connection.recv(_CHUNK)
            client.received += data
            while (frame := self._next_frame(client)) is not None:
                self._handle(client, frame)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        return bool(data)

    def _next_frame(self, client: _Client) -> bytes | None:
        received = client.received
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        if length > _MOST_BYTES:
            raise ValueError(f"a frame of {length} bytes; at most {_MOST_BYTES} are taken")
        if len(received) < _LENGTH.size + length:
            return None
        frame = bytes(received[_LENGTH.size : _LENGTH.size + length])
        del received[: _LENGTH.size + length]
        return frame

    def _handle(self, client: _Client, frame: bytes) -> None:
        if not client.known:
            client.known = hmac.compare_digest(frame, self._token.encode())
            if not client.known:
                raise ValueError("a stranger")
            return
        request = msgspec.msgpack.decode(frame, type=_Request)  # raises a ValueError
        if request.value is not None:
            self._values[request.key] = request.value
            _reply(client, b"")
            for waiting in self._waiting.pop(request.key, ()):
                _reply(waiting, request.value)
        elif request.key in self._values:
            _reply(client, self._values[request.key])
        else:
            self._waiting[request.key].append(client)


def _frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _reply(client: _Client, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it is gone, or does not read what it asked for: then it times out
        client.connection.sendall(_frame(data))
