"""Which memory of this process is a mapped file (safetensors, ``torch.load(mmap=True)``, numpy.memmap)."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import NamedTuple

_MAPS = Path("/proc/self/maps")
_NOT_FILES = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage")


class MappedRange(NamedTuple):
    """One mapping: its end, whether it is a file on disk, and whether it may be written."""

    end: int
    is_file: bool
    writable: bool


class MappedFiles:
    """A snapshot of the process's mappings. Where the system does not tell, everything is plain writable memory."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[MappedRange] = []
        try:
            lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            bounds, access, _offset, _device, inode, *path = line.split(maxsplit=5)
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            is_file = inode != "0" and bool(path) and not path[0].startswith(_NOT_FILES)
            self._starts.append(start)
            self._ranges.append(MappedRange(end, is_file, "w" in access))

    def find(self, address: int) -> MappedRange | None:
        """The mapping that holds an address, if the system knows one."""
        at = bisect.bisect_right(self._starts, address) - 1
        return self._ranges[at] if at >= 0 and address < self._ranges[at].end else None
