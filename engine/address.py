"""Control addresses: ``unix:/path`` or ``tcp://host:port``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from .errors import ConfigError

_MOST_PATH_BYTES = 107
"""What ``sun_path`` holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Either ``path`` (a unix socket) or ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `ConfigError` for anything else than ``unix:/path`` or ``tcp://host:port``."""
        if text.startswith("unix:"):
            return cls._unix(text)
        if text.startswith("tcp://"):
            parts = urlsplit(text)
            with contextlib.suppress(ValueError):
                if parts.hostname and parts.port is not None and not parts.path.strip("/"):
                    return cls(host=parts.hostname, port=parts.port)
        raise ConfigError([f"address {text!r} is neither 'unix:/path' nor 'tcp://host:port'"])

    @classmethod
    def _unix(cls, text: str) -> Address:
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ConfigError([f"address {text!r}: the path of a unix socket has to be absolute"])
        path = os.path.normpath(path)
        size = len(os.fsencode(path))
        if size > _MOST_PATH_BYTES:
            raise ConfigError([f"address {text!r}: the path has {size} bytes, a unix socket allows {_MOST_PATH_BYTES}"])
        return cls(path=path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """A unix socket, or an address of the loopback interface."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def open_listener(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket and the address that it really has (port 0 takes a free one).

    The directory of a unix socket is created with mode 0700 if it is absent; the socket gets mode 0600 before it listens.
    A socket file that nobody answers at is replaced.

    Raises:
        ConfigError: the address is in use or cannot be bound.
    """
    try:
        return _open_unix(address) if address.path else _open_tcp(address)
    except OSError as error:
        raise ConfigError([f"cannot listen on {address}: {error}"]) from error


def _open_tcp(address: Address) -> tuple[socket.socket, Address]:
    family, kind, proto, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener, Address(host=address.host, port=listener.getsockname()[1])


def _open_unix(address: Address) -> tuple[socket.socket, Address]:
    path = Path(address.path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address.path)
        path.chmod(0o600)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener, address


def _clear_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError([f"cannot listen on unix:{path}: a file that is no socket lies there"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
    raise ConfigError([f"cannot listen on unix:{path}: another process listens there"])


def remove_socket_file(address: Address, inode: int) -> None:
    """Remove the file of a unix socket, unless another process has put its own there."""
    if address.path:
        path = Path(address.path)
        with contextlib.suppress(OSError):
            if path.stat().st_ino == inode:
                path.unlink()


def inode_of(address: Address) -> int:
    """Inode of a unix socket's file; 0 for other addresses."""
    return Path(address.path).stat().st_ino if address.path else 0
