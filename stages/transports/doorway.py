"""Where receivers of one host find a source: a Unix socket in a private directory, there only while links are made.

Once all have come, socket and directory are removed: links need no name, and nothing is left behind however the processes
end. A directory whose owner was killed in between is swept away by the next source that opens a doorway.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import TransportError

_PREFIX = "syncline-"
_SOCKET = "link"
_TRIES = 16


def default_directory() -> Path:
    """A directory with short names, in memory where there is one (a socket's path has at most 107 bytes)."""
    memory = Path("/dev/shm")  # noqa: S108 - the doorway itself is a fresh directory of mode 0700
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class Doorway:
    """A listening socket. ``on_connection`` is called on the loop with each connected socket.

    Attributes:
        path: the socket's path, for the receivers.
    """

    def __init__(self, on_connection: Callable[[socket.socket], None], directory: Path | None = None) -> None:
        parent = default_directory() if directory is None else directory
        sweep(parent)
        self._loop = asyncio.get_running_loop()
        self._on_connection = on_connection
        self._home, self._lock = _make_home(parent)
        self.path = str(self._home / _SOCKET)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(self.path)
        except OSError as error:
            self.close()
            raise TransportError(f"no socket could be made at {self.path}: {error}") from error
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Remove socket and directory. Connections stay. Idempotent."""
        if self._lock < 0:
            return
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        _remove(self._home)
        os.close(self._lock)
        self._lock = -1

    def _accept(self) -> None:
        while self._lock >= 0:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            self._on_connection(connection)


def sweep(parent: Path) -> None:
    """Remove doorways of this user whose owner is dead: a living one holds a lock on its directory."""
    for home in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if home.is_symlink() or not home.is_dir() or home.stat().st_uid != os.getuid():
                continue
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(home)
            finally:
                os.close(fd)


def _make_home(parent: Path) -> tuple[Path, int]:
    for _ in range(_TRIES):
        home = parent / f"{_PREFIX}{secrets.token_hex(8)}"
        home.mkdir(mode=0o700)
        fd = -1
        try:
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if home.stat().st_ino == os.fstat(fd).st_ino:
                return home, fd
        except OSError:  # a sweeper came between: it takes a fresh directory without a lock for a dead one's
            pass
        if fd >= 0:
            os.close(fd)
    raise TransportError(f"no private directory could be made in {parent}")


def _remove(home: Path) -> None:
    with contextlib.suppress(OSError):
        (home / _SOCKET).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        home.rmdir()
