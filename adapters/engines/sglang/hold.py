"""One stand-in at a time changes an SGLang server: `Hold`.

SGLang takes updates from whoever calls, and mixes those of two callers. So a stand-in holds the server from before it pauses it
until it has resumed or fenced it, in two ways:

- a locked file on this host, named by the server's life. The kernel lets go of it when the process dies.
- a mark at the server: while an update is under way its weights' version is ``syncline-unfinished@<place>.<who>.<number>``. It
  is read back before every step that counts, and goes on counting with every bucket. Two hosts see each other by that alone.

A mark whose owner is dead, told by the lock (same place) or by its standing still (another host), keeps nobody out. What is
then at the server is no version, and only a whole push makes one of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import tempfile
import time
from pathlib import Path

from syncline.engine.errors import BusyError, ConfigError, LoaderError
from syncline.engine.host import host_id

from ..unfinished import UNFINISHED
from .front import SGLangFront


class Hold:
    """The right to change one server. Belongs to one stand-in, on one event loop.

    Args:
        front: the server.
        life: names the server on this host; see `ServerInfo.life`.
        patience_s: a mark of another host that has stood still so long is a dead one's, in seconds.
        folder: of the lock files; None takes a 0700 one of this user, beside other temporary files.
    """

    def __init__(self, front: SGLangFront, *, life: str, patience_s: float, folder: Path | None = None) -> None:
        self._front, self.life, self._patience_s = front, life, patience_s
        folder = _own_folder() if folder is None else folder
        self._path = folder / f"sglang-{life or hashlib.sha256(front.url.encode()).hexdigest()[:16]}.lock"
        found = folder.stat()
        self._place = hashlib.sha256(f"{host_id()}|{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:8]
        self._who = f"{self._place}.{secrets.token_hex(4)}"
        self._file: int | None = None
        self._marks = 0
        self._seen = ("", 0.0)

    @property
    def held(self) -> bool:
        """The server is ours to change."""
        return self._file is not None

    async def take(self) -> str:
        """Make the server ours, unless it is. Returns what it says as its weights' version.

        Raises:
            BusyError: another stand-in changes it now.
        """
        if self._file is not None:
            return await self._front.weight_version()
        self._lock()
        try:
            said = await self._front.weight_version()
            self.look(said)
        except BaseException:
            self.release()
            raise
        return said

    def release(self) -> None:
        """Others may change it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            self._path.unlink(missing_ok=True)  # while it is locked: nobody else's
            os.close(file)

    def look(self, said: str) -> None:
        """Raise `BusyError` if a living stand-in has marked the server, as far as can be told from here."""
        if said != self._seen[0]:
            self._seen = (said, time.monotonic())
        owner = said.removeprefix(f"{UNFINISHED}@")
        if owner == said or self.is_mine(said):
            return
        if owner.startswith(f"{self._place}."):
            if self._file is None:
                self._lock()
                self.release()
            return
        if time.monotonic() - self._seen[1] < self._patience_s:
            raise BusyError(
                f"{self._front.url} is being updated from another host ({said}); push again when that has ended, or once "
                f"nothing has come of it for {self._patience_s:g} s"
            )

    def mark(self) -> str:
        """A new mark; what the server says from now on as its weights' version, until an update has ended."""
        self._marks += 1
        return f"{UNFINISHED}@{self._who}.{self._marks}"

    def is_mine(self, said: str) -> bool:
        """Whether a weights' version is a mark of ours."""
        return said.startswith(f"{UNFINISHED}@{self._who}.")

    async def confirm(self) -> None:
        """Raise `LoaderError` unless the server still says our mark."""
        said = await self._front.weight_version()
        if self._file is None or not self.is_mine(said):
            raise LoaderError(
                f"{self._front.url} says weight version {said!r} in the middle of an update: another process changes it, too; "
                "let one source at a time push into a server"
            )

    def _lock(self) -> None:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                who = os.pread(file, 32, 0).decode(errors="replace").strip()
                os.close(file)
                raise BusyError(
                    f"another source (process {who or 'unknown'}) is updating {self._front.url}; push again when it has ended"
                ) from None
            if self._is_there(file):
                os.pwrite(file, str(os.getpid()).encode(), 0)
                self._file = file
                return
            os.close(file)  # whoever held it has just removed it

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False


def _own_folder() -> Path:
    """Raises `ConfigError` if it belongs to another user, or is open to others."""
    folder = Path(tempfile.gettempdir()) / f"syncline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError([f"folder {folder} does not belong to this user alone; it must be a folder of its own, 0700"])
    return folder
