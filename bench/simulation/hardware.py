"""What a simulated machine is like: rates and delays, as data. `presets` has some; a calibration writes this machine's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.scheduler.errors import SynclineError


class HardwareError(SynclineError):
    """No such hardware, or a file that does not describe any."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gpus"):
    """Accelerators, one a rank. Rates in bytes a second for each rank and each way, delays in seconds.

    Attributes:
        h2d: host to device over PCIe.
        kernel: the fused kernel of ``prepare`` (bytes read and bytes written).
        copy: copies on the device (bytes read and bytes written).
        digest: bytes digested on the device.
        nvlink: to other ranks of the same host.
        nic: of one network card; ``ranks_per_nic`` ranks of a host share it.
        wire_s, local_s: until a message's first byte is at another host, or another rank of the same one.
        launch_s: start of one kernel or message.
        task_s: Python's share of one stage of one task.
        round_s: one round of the barrier (gloo); it takes log2(ranks) of them.
        begin_s, end_s: control before the first task (enter, prepare) and after the last byte (vote, pause, commit, resume).
        sources: where each number is from.
    """

    name: str
    h2d: float
    kernel: float
    copy: float
    digest: float
    nvlink: float
    nic: float
    ranks_per_nic: int = 1
    wire_s: float = 10e-6
    local_s: float = 5e-6
    launch_s: float = 20e-6
    task_s: float = 50e-6
    round_s: float = 100e-6
    begin_s: float = 0.01
    end_s: float = 0.01
    sources: dict[str, str] = {}


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of work on a host's cores: seconds a byte of one thread alone, and its share of the memory bus meanwhile."""

    s_per_byte: float
    bus: float = 0.0
    cores: float = 1.0


class Cores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cores"):
    """One host without accelerators, which all processes share: its cores and its memory bus.

    Attributes:
        copy: memcpy, from memory to memory.
        digest: digest of what lies in memory.
        copy_digest: copied leaf by leaf, and digested in between.
        loopback: one gloo message between two processes, both ends together.
        landed: the first touch by a receiver of what another process has just written (digest of a mapped buffer).
        loopback_s: until a message begins to move: posted, woken, scheduled.
        notify_s: a notice over a unix socket.
        task_s, land_s: Python's share of a task, on the source and on a receiver.
        piece_s: of a segment more.
        round_s: one round of the barrier.
        begin_s, end_s: control of a push, with one source rank and one target.
        target_s, source_s: the same for each target and each source rank more.
        sources: where each number is from.
    """

    name: str
    cores: float
    copy: Work
    digest: Work
    copy_digest: Work
    loopback: Work
    loopback_s: float = 200e-6
    notify_s: float = 100e-6
    task_s: float = 300e-6
    land_s: float = 200e-6
    piece_s: float = 10e-6
    round_s: float = 200e-6
    begin_s: float = 3e-3
    end_s: float = 3e-3
    target_s: float = 1e-3
    source_s: float = 2e-3
    sources: dict[str, str] = {}


Hardware = Gpus | Cores


def find(name: str) -> Hardware:
    """A preset by name, or a file that `save` wrote. Raises `HardwareError`."""
    from .presets import presets

    known = {hardware.name: hardware for hardware in presets()}
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        there = "is a folder, not a file" if path.is_dir() else "no such preset, and no such file"
        raise HardwareError(f"hardware {name!r}: {there}; presets are {', '.join(known)}")
    try:
        return checked(msgspec.json.decode(path.read_bytes(), type=Hardware))
    except (OSError, msgspec.DecodeError) as error:
        raise HardwareError(f"{path} does not describe hardware: {error}") from error


def save(hardware: Hardware, path: Path) -> None:
    """Write it as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(hardware), indent=2) + b"\n")


_RATE, _DELAY_S = (1e3, 1e18), (0.0, 3600.0)
_RANGES = {"s_per_byte": (0.0, 1e-3), "bus": (0.0, 16.0), "cores": (1e-3, 1e6), "ranks_per_nic": (1, 1e6)}
"""What is neither a delay nor a rate."""


def checked(hardware: Hardware) -> Hardware:
    """``hardware``, if all its numbers make sense. Raises `HardwareError` that lists those that do not."""
    wrong = [
        f"{name} is {value:g} (from {least:g} to {most:g})"
        for name, value, (least, most) in _numbers(hardware)
        if not least <= value <= most  # NaN is not either
    ]
    if wrong:
        raise HardwareError(f"hardware {hardware.name!r}: {', '.join(wrong)}")
    return hardware


def _numbers(described: Hardware | Work, of: str = "") -> list[tuple[str, float, tuple[float, float]]]:
    """Every number with its range: rates in bytes a second, delays in seconds."""
    found: list[tuple[str, float, tuple[float, float]]] = []
    for name in described.__struct_fields__:
        value = getattr(described, name)
        if isinstance(value, Work):
            found += _numbers(value, f"{name}.")
        elif isinstance(value, (int, float)):
            found.append((of + name, value, _RANGES.get(name, _DELAY_S if name.endswith("_s") else _RATE)))
    return found
