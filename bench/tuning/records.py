"""What a search asks for and is told: plain data, as it is written to a sweep's file. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .noise import Batch
from .space import AXES, Configuration, Space

Phase = Literal["map", "halving", "descent", "final"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Measure this: ``pushes`` pushes over links made for it, the first one cold."""

    configuration: Configuration
    pushes: int
    phase: Phase
    block: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What came of a request.

    Attributes:
        seconds: of each push, the first one cold. Empty if refused.
        elapsed_s: what the measurement cost altogether, links included.
        busy_s: by stage, median over the later pushes.
        intact: every push was committed and every element arrived.
        refused: why the config or the plan refuses this configuration; empty if it does not.
        error: what went wrong otherwise.
    """

    seconds: tuple[float, ...] = ()
    elapsed_s: float = 0.0
    peak_tmp_bytes: int = 0
    landing_bytes: int = 0
    tasks: int = 0
    busy_s: Mapping[str, float] = field(default_factory=dict)
    intact: bool = False
    refused: str = ""
    error: str = ""

    @property
    def usable(self) -> bool:
        """Whether its times mean anything."""
        return self.intact and not self.refused and not self.error and bool(self.seconds)

    @property
    def warm(self) -> tuple[float, ...]:
        """Seconds without the first, cold push, if there are others."""
        return self.seconds[1:] or self.seconds


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement."""

    request: Request
    sample: Sample

    @property
    def configuration(self) -> Configuration:
        """That was measured."""
        return self.request.configuration

    @property
    def batch(self) -> Batch[Configuration]:
        """For the statistics; only of usable samples."""
        return Batch(key=self.configuration, block=self.request.block, seconds=self.sample.warm)


def spoiled(records: Iterable[Record]) -> dict[Configuration, str]:
    """Configurations that are out, and why: refused, or something else arrived than was sent, or pushes failed twice.

    (Once may be the machine's fault: a process that was stopped for a minute misses its deadline.)
    """
    found: dict[Configuration, str] = {}
    failed: set[Configuration] = set()
    for record in records:
        sample, configuration = record.sample, record.configuration
        if sample.usable:
            continue
        if not sample.error or configuration in failed:
            found.setdefault(configuration, sample.refused or sample.error or "not every element arrived")
        failed.add(configuration)
    return found


def usable(records: Iterable[Record]) -> list[Record]:
    """Measurements that mean something, of configurations that are not out."""
    records = list(records)
    bad = spoiled(records)
    return [record for record in records if record.sample.usable and record.configuration not in bad]


def peaks(records: Iterable[Record]) -> dict[Configuration, int]:
    """Highest temporary bytes that each configuration was seen with."""
    found: dict[Configuration, int] = {}
    for record in records:
        found[record.configuration] = max(found.get(record.configuration, 0), record.sample.peak_tmp_bytes)
    return found


def enough(configuration: Configuration, peak: int) -> int:
    """A watermark from which on a higher one changes nothing, given the peak that was seen under a lower or equal one.

    The plan makes parts smaller than the bucket size only below four buckets (a byte may cost one in the bucket and one in
    packed messages, and two tasks must fit); admission waits only if a task, of at most two buckets, does not fit on top.
    """
    return max(4 * configuration.bucket_bytes, peak + 2 * configuration.bucket_bytes)


def idle_axes(records: Sequence[Record]) -> tuple[str, ...]:
    """Knobs of stages that have nothing to do in any record: their values make no difference."""
    if not records:
        return ()
    idle = []
    for stage in ("h2d", "prepare", "send"):
        share = [record.sample.busy_s.get(stage, 0.0) / statistics.median(record.sample.warm) for record in records]
        if max(share) < 0.01 and records[0].sample.busy_s:
            idle.append(f"{stage}_concurrency")
    return tuple(idle)


def active_axes(space: Space, records: Sequence[Record]) -> tuple[str, ...]:
    """Knobs that are worth searching."""
    idle = idle_axes(records)
    return tuple(axis for axis in AXES if axis not in idle and len(space.axes[axis]) > 1)
