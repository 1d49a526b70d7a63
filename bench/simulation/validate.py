"""Predicted beside measured: configurations of real pushes on this machine, none of which the cost model has seen."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from syncline.bench.measure.bed import Setup, bed

from .hardware import Cores
from .local import scenario_of
from .simulate import simulate

_MIB = 2**20
_LARGE, _SMALL = 409_600_000, 102_400_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: a bed, and knobs."""

    setup: Setup
    config: Mapping[str, Any]

    def __str__(self) -> str:
        config = dict(self.config)
        words = [f"{config.pop('transport')} {config.pop('landing')}", str(self.setup)]
        words.append(f"{self.setup.moved_bytes / 1e6:.0f} MB")
        return ", ".join([*words, *(f"{name}={value}" for name, value in config.items())])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case: seconds predicted, and measured (median, least, most of ``n`` warm pushes)."""

    case: str
    predicted_s: float
    median_s: float
    least_s: float
    most_s: float
    n: int
    intact: bool

    @property
    def error(self) -> float:
        """Of the prediction, relative to the median that was measured."""
        return self.predicted_s / self.median_s - 1


def cases() -> tuple[Case, ...]:
    """Transports, landing modes, routes, receivers, bucket sizes, totals, with digests and without."""
    one, two = Setup(nbytes=_LARGE, movable=True), Setup(nbytes=_LARGE, movable=True, targets=2)
    small = Setup(nbytes=_SMALL, movable=True)
    shards = Setup(source="fsdp", source_ranks=2, nbytes=_LARGE)
    fan = Setup(source="fsdp", source_ranks=2, nbytes=_LARGE, targets=2)
    slices = Setup(source="tp", source_ranks=2, target_ranks=2, nbytes=_LARGE)
    return (
        _case(one, "shm", "mapped"),
        _case(one, "shm", "staged"),
        _case(one, "shm", "streamed"),
        _case(one, "shm", "staged", bucket_bytes=8 * _MIB),
        _case(one, "shm", "mapped", verify=False),
        _case(one, "gloo", "streamed"),
        _case(two, "shm", "mapped"),
        _case(two, "shm", "staged"),
        _case(two, "shm", "streamed", bucket_bytes=16 * _MIB),
        _case(small, "shm", "mapped"),
        _case(small, "gloo", "staged"),
        _case(shards, "gloo", "staged", route="direct"),
        _case(shards, "gloo", "staged", route="gather"),
        _case(shards, "gloo", "streamed", verify=False, bucket_bytes=16 * _MIB),
        _case(fan, "gloo", "staged"),
        _case(slices, "gloo", "staged"),
    )


def _case(setup: Setup, transport: str, landing: str, **more: Any) -> Case:
    return Case(setup=setup, config={"transport": transport, "landing": landing, **more})


async def measure(
    chosen: Sequence[Case], *, repeat: int, tell: Callable[[str], None] = lambda _text: None
) -> dict[str, tuple[list[float], bool]]:
    """Seconds of the warm pushes of each case, and whether every element arrived. Cases of one bed follow each other."""
    found: dict[str, tuple[list[float], bool]] = {}
    for setup in dict.fromkeys(case.setup for case in chosen):
        async with bed(setup) as here:
            for case in (case for case in chosen if case.setup == setup):
                tell(str(case))
                pushes = await here.push(case.config, repeat=repeat + 2)
                found[str(case)] = pushes.seconds[2:], pushes.ok and pushes.intact
    return found


def compare(chosen: Sequence[Case], measured: Mapping[str, tuple[list[float], bool]], hardware: Cores) -> list[Row]:
    """Predict each case and set it beside what was measured."""
    rows = []
    for case in chosen:
        seconds, intact = measured[str(case)]
        rows.append(
            Row(
                case=str(case),
                predicted_s=simulate(scenario_of(case.setup, case.config, hardware)).seconds,
                median_s=statistics.median(seconds),
                least_s=min(seconds),
                most_s=max(seconds),
                n=len(seconds),
                intact=intact,
            )
        )
    return rows
