"""Which of a row's samples are cold, ramp and warm, and the quantiles of the warm ones.

The rule: the first sample is *cold*. Noise is three standard deviations of the last half of the samples, told from the median
absolute deviation (so that single outliers do not widen it), and at least 5% of their median. *Warm* begins at the first later
sample that, like the one after it, lies within noise of that median; what lies between is *ramp*. Samples that stray after that
stay warm: they are what the high quantiles are for. Where warm would begin in the last half, the row has not settled: it says
so, and its last half counts as warm.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

_SIGMAS = 3.0
_LEAST_NOISE = 0.05
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of seconds. Between two samples they are interpolated: of fewer than 100, p99 leans on the largest."""

    min: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Quantiles of at least one sample."""
        p50, p90, p99 = (float(value) for value in np.quantile(samples, (0.5, 0.9, 0.99)))
        return cls(min=min(samples), median=p50, p90=p90, p99=p99, max=max(samples))


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """How samples that were taken one after the other fall into phases.

    Attributes:
        cold_s: the first sample.
        ramp: how many samples after it were not warm yet; ``ramp_s``: their median, None if there are none.
        warm_from: index of the first warm sample.
        settled: False if the samples were not steady before the last half of them.
    """

    cold_s: float
    ramp: int
    ramp_s: float | None
    warm_from: int
    settled: bool

    @classmethod
    def of(cls, samples: Sequence[float]) -> Phases:
        """Phases of at least one sample; a single one is both cold and all that there is."""
        if len(samples) < 2:
            return cls(cold_s=samples[0], ramp=0, ramp_s=None, warm_from=0, settled=False)
        begin = _settles(np.asarray(samples, dtype=float))
        half = max(1, len(samples) // 2)
        warm_from = half if begin is None else begin
        ramp = samples[1:warm_from]
        median = float(np.median(ramp)) if ramp else None
        return cls(cold_s=samples[0], ramp=len(ramp), ramp_s=median, warm_from=warm_from, settled=begin is not None)


def _settles(samples: np.ndarray) -> int | None:
    """Index from which on samples are warm; None if that is not before the last half."""
    half = max(1, len(samples) // 2)
    last = samples[half:]
    middle = np.median(last)
    noise = max(_SIGMAS * _MAD_TO_SIGMA * np.median(np.abs(last - middle)), _LEAST_NOISE * middle)
    near = np.abs(samples - middle) <= noise
    for index in range(1, half + 1):
        if near[index : index + 2].all():
            return index
    return None


def warm(samples: Sequence[float]) -> list[float]:
    """The warm ones."""
    return list(samples[Phases.of(samples).warm_from :])
