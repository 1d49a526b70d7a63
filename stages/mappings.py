"""What memory of this process is backed by: page-locking treats files unlike anonymous memory."""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Locking(Enum):
    """How a range may be page-locked."""

    PLAIN = "plain"
    """Anonymous, or shared and writable: its pages stay what they are."""
    READ_ONLY = "read-only"
    """It cannot be written here: a device may be let read it, and no more."""
    NOT = "not"
    """A private writable mapping of a file: plain locking would make every page an anonymous copy, and read-only locking would
    keep the device at the file's page when the process writes its own."""


class _Mapping(NamedTuple):
    start: int
    end: int
    locking: Locking


class Mappings:
    """The mappings of this process when this was made; good for memory that lived then and still does.

    Args:
        text: as ``/proc/self/maps`` gives it; None reads that. Where there is none, everything counts as anonymous.
    """

    def __init__(self, text: str | None = None) -> None:
        if text is None:
            try:
                text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
        self._mappings = [_mapping(line) for line in text.splitlines()]
        self._starts = [mapping.start for mapping in self._mappings]

    def locking(self, address: int, nbytes: int) -> Locking:
        """How ``nbytes`` (at least 1) from ``address`` may be page-locked, all of them alike."""
        first = max(0, bisect_right(self._starts, address) - 1)
        found = set()
        for mapping in self._mappings[first : bisect_right(self._starts, address + nbytes - 1)]:
            if mapping.end > address:
                found.add(mapping.locking)
        if found <= {Locking.PLAIN}:
            return Locking.PLAIN
        return found.pop() if len(found) == 1 else Locking.NOT


def _mapping(line: str) -> _Mapping:
    span, mode, _offset, _device, inode, *_path = line.split(maxsplit=5)
    start, _, end = span.partition("-")
    writable, shared, file = mode[1] == "w", mode[3] == "s", inode != "0"
    locking = Locking.PLAIN
    if not writable:
        locking = Locking.READ_ONLY
    elif file and not shared:
        locking = Locking.NOT
    return _Mapping(int(start, 16), int(end, 16), locking)
