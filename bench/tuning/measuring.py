"""Measures configurations on a bed: the one place of the tuning where something is really pushed."""

from __future__ import annotations

import time
from typing import Any

from syncline.bench.measure.bed import Bed
from syncline.bench.measure.pushes import Pushes

from .records import Request, Sample
from .space import Configuration

_REFUSALS = ("PlanError", "ConfigError")


def knobs_of(configuration: Configuration, timeout_s: float) -> dict[str, Any]:
    """Arguments of `TransferConfig`: the configuration, and deadlines that do not let one stall take the time of all."""
    return {**configuration.knobs(), "push_timeout_s": timeout_s, "target_timeout_s": timeout_s}


async def measure(bed: Bed, request: Request, timeout_s: float = 60.0) -> Sample:
    """Make the pushes that are asked for, each in at most ``timeout_s``.

    What a config or plan is refused for, and failed pushes, are results.

    Raises:
        BenchError: a measured process ended.
    """
    began = time.perf_counter()
    pushes = await bed.push(knobs_of(request.configuration, timeout_s), repeat=request.pushes)
    return sample_of(pushes, time.perf_counter() - began)


def sample_of(pushes: Pushes, elapsed_s: float) -> Sample:
    """What a search is told."""
    errors = "; ".join(dict.fromkeys(pushes.errors))
    refused = pushes.error if pushes.error.startswith(_REFUSALS) else ""
    return Sample(
        seconds=tuple(pushes.seconds),
        elapsed_s=elapsed_s,
        peak_tmp_bytes=pushes.peak_tmp_bytes,
        landing_bytes=pushes.landing_bytes,
        tasks=pushes.tasks,
        busy_s=pushes.busy_s,
        intact=pushes.ok and pushes.intact,
        refused=refused,
        error="" if refused else errors,
    )


async def control(bed: Bed, configuration: Configuration) -> str:
    """Whether a corrupted bucket is noticed on this transport and landing."""
    return await bed.control(configuration.knobs())
