"""Which machine this is, for deciding whether two processes can share memory."""

from __future__ import annotations

import platform
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (only looked at)


def host_id() -> str:
    """Text that is equal in two processes exactly when they can share memory.

    It joins the host name, the kernel's boot id (two machines may carry one name) and the identity of the shared-memory
    file system (two containers of one machine may each have their own). A part that the system does not have is empty.
    """
    return f"{platform.node()}|{_boot_id()}|{_shared_memory_id()}"


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _shared_memory_id() -> str:
    try:
        found = _SHARED_MEMORY.stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"
