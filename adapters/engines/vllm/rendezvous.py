"""Where the source and vLLM's workers meet on one host: a 0700 directory of the source, one small file for each rank."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from syncline.engine.errors import ConfigError


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says: the control address at which it listens, or why it does not."""

    address: str = ""
    failure: str = ""


class Rendezvous:
    """A directory in which ranks say where they are. Files appear whole or not at all.

    Raises:
        ConfigError: there is no such directory here, or it is open to others.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            found = self._folder.stat()
        except OSError as error:
            why = f"vLLM's workers cannot reach the directory {str(folder)!r} of the source ({error.strerror})"
            remedy = "they run on another host or in another container: VLLMTarget(url, control_port=..., secret=...)"
            raise ConfigError([f"{why}: {remedy}"]) from None
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                [f"directory {str(folder)!r} does not belong to the user of vLLM's workers alone; it must be 0700"]
            )

    def say(self, rank: int, address: str, failure: str) -> None:
        """Rank ``rank`` is there, or is not."""
        file = self._folder / f"rank-{rank}"
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(Word(address=address, failure=failure)))
        part.replace(file)

    def word(self, rank: int) -> Word | None:
        """What a rank said; None: nothing yet."""
        try:
            return msgspec.json.decode((self._folder / f"rank-{rank}").read_bytes(), type=Word)
        except FileNotFoundError:
            return None

    def leader(self) -> str:
        """Address of the leader; empty: it has said none yet."""
        word = self.word(0)
        return word.address if word is not None else ""
