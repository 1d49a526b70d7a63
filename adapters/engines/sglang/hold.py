"""One stand-in at a time changes an SGLang server: `Hold`.

SGLang takes updates from whoever calls, and mixes those of two callers. So a stand-in holds the server from before it pauses it
until it has resumed or fenced it, in two ways:

- a locked file on this host, named by the server's life. The kernel lets go of it when the process dies.
- a mark at the server: while an update is under way its weights' version is ``syncline-unfinished@<place>.<who>.<number>``. It
  is read back before every step that counts, and goes on counting with every bucket. Two hosts see each other by that alone.

Within a stand-in several may hold the server at a time: a push, an attempt to attach, memory that was released. Each has a
`Hold` of its own, and none lets go of another's.

A mark whose owner is dead, told by the lock (same place) or by its standing still (another host), keeps nobody out. What is
then at the server is no version, and only a whole push makes one of it.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from syncline.engine.errors import BusyError, ConfigError, LoaderError
from syncline.engine.host import host_id

from ..unfinished import UNFINISHED
from .front import SGLangFront


class Hold:
    """The right to change one server. Belongs to one stand-in, on one event loop; others may come once all are released.

    Args:
        front: the server.
        life: names the server on this host; see `ServerInfo.life`.
        patience_s: a mark of another host that has stood still so long is a dead one's, in seconds.
        folder: of the lock files, 0700; None takes one of this user, beside other temporary files.

    Raises:
        ConfigError: the folder belongs to another user, or is open to others.
        LoaderError: it cannot be made.
    """

    def __init__(self, front: SGLangFront, *, life: str, patience_s: float, folder: Path | None = None) -> None:
        self._front, self.life, self._patience_s = front, life, patience_s
        folder = Path(tempfile.gettempdir()) / f"syncline-{os.getuid()}" if folder is None else folder
        path = folder / f"sglang-{life or hashlib.sha256(front.url.encode()).hexdigest()[:16]}.lock"
        with _lock_files(folder):
            found = _own(folder)
        self._place = hashlib.sha256(f"{host_id()}|{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:8]
        self._who = f"{self._place}.{secrets.token_hex(4)}"
        self._common = _Common(path, front.url)

    def share(self) -> Hold:
        """Another hold of the same stand-in on the same server: taken and released by itself."""
        return copy.copy(self)

    @property
    def held(self) -> bool:
        """The server is ours to change until this one is released."""
        return self in self._common.holders

    @property
    def ours(self) -> bool:
        """The server is ours to change, by this hold or by another one of the same stand-in."""
        return bool(self._common.holders)

    async def take(self) -> str:
        """Make the server ours, unless it is. Returns what it says as its weights' version.

        A call that fails, or is cancelled, changes nothing.

        Raises:
            BusyError: another stand-in changes it now.
            ConfigError, LoaderError: it cannot be locked here; says why.
        """
        if self.held:
            return await self._front.weight_version()
        self._common.take(self)
        try:
            said = await self._front.weight_version()
            self.look(said)
        except BaseException:
            self.release()
            raise
        return said

    def release(self) -> None:
        """Others may change it, unless another hold of this stand-in is held. Idempotent."""
        self._common.release(self)

    def look(self, said: str) -> None:
        """Raise `BusyError` if a living stand-in has marked the server, as far as can be told from here."""
        since = self._common.seen(said)
        owner = said.removeprefix(f"{UNFINISHED}@")
        if owner == said or self.is_mine(said):
            return
        if owner.startswith(f"{self._place}."):
            if not self.held:
                self._common.take(self)
                self.release()
            return
        if time.monotonic() - since < self._patience_s:
            raise BusyError(
                f"{self._front.url} is being updated from another host ({said}); push again when that has ended, or once "
                f"nothing has come of it for {self._patience_s:g} s"
            )

    def mark(self) -> str:
        """A new mark; what the server says from now on as its weights' version, until an update has ended."""
        self._common.marks += 1
        return f"{UNFINISHED}@{self._who}.{self._common.marks}"

    def is_mine(self, said: str) -> bool:
        """Whether a weights' version is a mark of this stand-in."""
        return said.startswith(f"{UNFINISHED}@{self._who}.")

    async def confirm(self) -> None:
        """Raise `LoaderError` unless this one is held and the server still says our mark."""
        said = await self._front.weight_version()
        if not self.held or not self.is_mine(said):
            raise LoaderError(
                f"{self._front.url} says weight version {said!r} in the middle of an update: another process changes it, too; "
                "let one source at a time push into a server"
            )


class _Common:
    """What all holds of a stand-in on a server have in common: the locked file, the marks it has made and those it has seen."""

    def __init__(self, path: Path, url: str) -> None:
        self._path, self._url = path, url
        self._file = -1
        self._seen = ("", 0.0)
        self.holders: set[Hold] = set()
        self.marks = 0

    def seen(self, said: str) -> float:
        """Since when the server says this as its weights' version, as far as was looked."""
        if said != self._seen[0]:
            self._seen = (said, time.monotonic())
        return self._seen[1]

    def take(self, hold: Hold) -> None:
        """Raises `BusyError` while another stand-in has the lock."""
        if not self.holders:
            self._file = self._lock()
        self.holders.add(hold)

    def release(self, hold: Hold) -> None:
        if hold not in self.holders:
            return
        self.holders.remove(hold)
        if not self.holders:
            with contextlib.suppress(OSError):  # one that stays keeps nobody out
                if self._is_there(self._file):  # ours and locked, so nobody else's; a cleaner may have made room for another's
                    self._path.unlink()
            os.close(self._file)

    def _lock(self) -> int:
        while True:
            with _lock_files(self._path.parent):
                _own(self._path.parent)  # a cleaner of temporary files may have removed it: it is empty between pushes
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                mine = False
                try:
                    self._lock_file(file)
                    mine = self._is_there(file)  # else whoever held it has just removed it
                finally:
                    if not mine:
                        os.close(file)
            if mine:
                with contextlib.suppress(OSError):  # whose it is is said as a courtesy
                    os.pwrite(file, str(os.getpid()).encode(), 0)
                return file

    def _lock_file(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(file, 32, 0).decode(errors="replace").strip()
            raise BusyError(
                f"another source (process {who or 'unknown'}) is updating {self._url}; push again when it has ended"
            ) from None

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False


def _own(folder: Path) -> os.stat_result:
    """Make it unless it is there. Raises `ConfigError` if it belongs to another user, or is open to others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError([f"folder {folder} does not belong to this user alone; it must be a folder of its own, 0700"])
    return found


@contextlib.contextmanager
def _lock_files(folder: Path) -> Iterator[None]:
    """``with``: an `OSError` becomes a `LoaderError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise LoaderError(
            f"no lock file can be made in {folder} ({error}); make {folder.parent} a folder where this user may write, or set "
            "TMPDIR to one"
        ) from error
