"""Where a row comes from: machine, versions, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

_PACKAGES = ("syncline", "torch", "numpy", "msgspec", "uvloop", "xxhash", "aiohttp")
_CHECKOUT = Path(__file__).resolve().parents[2]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a row was measured on. Rows of different machines are not compared.

    Attributes:
        cores: that this process may use.
        memory_bytes: of the machine.
        gpu: names of its GPUs.
        system: kernel and C library.
    """

    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    gpu: tuple[str, ...] = ()
    system: str = ""
    python: str = ""

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            gpu=_gpus(),
            system=platform.platform(),
            python=platform.python_version(),
        )


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows of a run share.

    Attributes:
        commit: of the checkout that syncline runs from; None outside one.
        dirty: whether tracked files of it differ from that commit.
    """

    machine: Machine
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None

    @classmethod
    def here(cls) -> Provenance:
        """Of this process."""
        commit, dirty = _revision()
        return cls(machine=Machine.here(), versions=_versions(_PACKAGES), commit=commit, dirty=dirty)


def load() -> float:
    """Processes that wanted to run, as an average over the last minute: above ours, others disturb."""
    return os.getloadavg()[0]


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _revision() -> tuple[str | None, bool | None]:
    """Commit and whether it is dirty. A checkout that merely contains the environment we are installed in is not ours."""
    if _git("rev-parse", "--show-toplevel") != str(_CHECKOUT):
        return None, None
    commit = _git("rev-parse", "HEAD")
    return commit, None if commit is None else bool(_git("status", "--porcelain", "--untracked-files=no"))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_CHECKOUT), *arguments],  # noqa: S607 - whichever git the user has
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
