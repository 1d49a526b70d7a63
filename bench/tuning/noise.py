"""Statistics of noisy measurements that drift: what each configuration costs, and whether a difference is one. Pure.

Measurements come in *blocks*: several configurations measured one right after the other. What changes with the hour on a
shared machine changes all of a block, so ``log(time) = configuration + block + noise`` is fitted to everything measured,
robustly: a configuration measured in a bad minute is not taken for a bad configuration. The default is in every block, which
ties the blocks together.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

_LEAST_SIGMA = 0.005  # of log time: no machine repeats itself better than to half a percent
_FEW = 6  # residuals; with fewer the spread inside batches must do
LEAST_BLOCKS = 4
"""With fewer nothing is certain: there is no interval."""
_RIDGE = 0.5  # blocks differ a little, not wildly: one odd figure of the default does not move a block by all of it
_HUBER = 1.5
_MEDIAN_LOSS = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean


@dataclass(frozen=True, kw_only=True)
class Batch(Generic[Key]):
    """Some pushes of one configuration, one right after the other. ``seconds`` are without the first, cold one."""

    key: Key
    block: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Fit(Generic[Key]):
    """What was fitted.

    Attributes:
        seconds: of each key, in a block that is neither good nor bad.
        blocks: how much slower than the mean each block was: 1.1 is a tenth.
        sigma: spread of one batch around the fit, in log time.
    """

    seconds: Mapping[Key, float]
    blocks: Mapping[int, float]
    sigma: float
    _place: Mapping[Key, int]
    _covariance: Floats

    def error(self, a: Key, b: Key) -> float:
        """Standard error of log(seconds of a / seconds of b)."""
        i, j = self._place[a], self._place[b]
        spread = self._covariance[i, i] + self._covariance[j, j] - 2 * self._covariance[i, j]
        return self.sigma * math.sqrt(max(spread, 0.0))

    def worse(self, a: Key, b: Key, z: float) -> bool:
        """Whether ``a`` is slower than ``b`` by more than ``z`` standard errors."""
        return math.log(self.seconds[a] / self.seconds[b]) > z * self.error(a, b)

    @property
    def order(self) -> list[Key]:
        """Fastest first."""
        return sorted(self.seconds, key=lambda key: self.seconds[key])


def fit(batches: Sequence[Batch[Key]]) -> Fit[Key]:
    """Fit configurations and blocks to ``batches`` (at least one), with Huber's weights."""
    keys = list(dict.fromkeys(batch.key for batch in batches))
    blocks = list(dict.fromkeys(batch.block for batch in batches))
    place = {key: i for i, key in enumerate(keys)}
    at = {block: len(keys) + i for i, block in enumerate(blocks)}
    rows = np.arange(len(batches))
    design = np.zeros((len(batches), len(keys) + len(blocks)))
    design[rows, [place[batch.key] for batch in batches]] = 1
    design[rows, [at[batch.block] for batch in batches]] = 1
    y = np.log([batch.median for batch in batches])
    ridge = np.diag([1e-9] * len(keys) + [_RIDGE] * len(blocks))
    weights = np.ones(len(batches))
    solution, sigma, inverse = np.zeros(design.shape[1]), _LEAST_SIGMA, ridge
    counts = Counter(batch.key for batch in batches)
    repeated = np.array([counts[batch.key] for batch in batches])
    inside = _inside(batches)
    for _ in range(6):
        inverse = np.linalg.inv(design.T @ (weights[:, None] * design) + ridge)
        solution = inverse @ (design.T @ (weights * y))
        residual = y - design @ solution
        sigma = max(_LEAST_SIGMA, inside, _scale(residual, repeated))
        weights = np.minimum(1.0, _HUBER * sigma / np.maximum(np.abs(residual), 1e-12))
    level = float(np.mean(solution[len(keys) :]))
    return Fit(
        seconds={key: math.exp(solution[i] + level) for key, i in place.items()},
        blocks={block: math.exp(solution[i] - level) for block, i in at.items()},
        sigma=sigma,
        _place=place,
        _covariance=inverse,
    )


def _inside(batches: Sequence[Batch[Key]]) -> float:
    """Standard error of a batch's median, from how pushes spread inside batches (a robust middle over all of them)."""
    spreads = []
    for batch in batches:
        if len(batch.seconds) > 1:
            logs = [math.log(seconds) for seconds in batch.seconds]
            spreads.append(_deviation(logs) / math.sqrt(len(logs)) * _MEDIAN_LOSS)
    return statistics.median(spreads) if spreads else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _scale(residual: Floats, repeated: NDArray[np.int64]) -> float:
    """Spread of the residuals of what was measured ``repeated`` (more than once), by their median; nothing if they are few."""
    told = np.abs(residual[repeated > 1])
    free = float(np.sum(1 - 1 / repeated[repeated > 1]))
    if free < _FEW:
        return 0.0
    return 1.4826 * float(np.median(told)) * math.sqrt(len(told) / free)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much faster one configuration is than another.

    Attributes:
        gain: share of the other's time that is saved; negative if it is slower.
        low, high: 95% interval of ``gain``, over blocks.
        p: of the Mann-Whitney test on single pushes, each divided by its block's level.
        blocks: in which both were measured.
    """

    gain: float
    low: float
    high: float
    p: float
    blocks: int

    @property
    def within_noise(self) -> bool:
        """True unless the interval and the test both say that there is a difference."""
        return self.low <= 0 <= self.high or self.p > 0.05


def difference(batches: Sequence[Batch[Key]], a: Key, b: Key, *, seed: int = 0) -> Difference:
    """Compare ``a`` with ``b`` over the blocks in which both were measured. Raises `ValueError` if there is none."""
    from scipy import stats

    of_a, of_b = _by_block(batches, a), _by_block(batches, b)
    shared = sorted(of_a.keys() & of_b.keys())
    if not shared:
        raise ValueError("no block in which both were measured")
    ratios = np.array([math.log(float(np.median(of_a[k])) / float(np.median(of_b[k]))) for k in shared])
    low, high = _interval(ratios, seed)
    levels = {k: float(np.median([*of_a[k], *of_b[k]])) for k in shared}
    singles = [np.array([s / levels[k] for k in shared for s in of[k]]) for of in (of_a, of_b)]
    p = float(stats.mannwhitneyu(*singles).pvalue) if a != b else 1.0
    gain = 1 - math.exp(float(np.median(ratios)))
    return Difference(gain=gain, low=1 - math.exp(high), high=1 - math.exp(low), p=p, blocks=len(shared))


def _by_block(batches: Sequence[Batch[Key]], key: Key) -> dict[int, tuple[float, ...]]:
    found: dict[int, tuple[float, ...]] = {}
    for batch in batches:
        if batch.key == key:
            found[batch.block] = (*found.get(batch.block, ()), *batch.seconds)
    return found


def _interval(ratios: Floats, seed: int) -> tuple[float, float]:
    """95% interval of the median of ``ratios`` by the bootstrap; endless with fewer than `LEAST_BLOCKS`."""
    if len(ratios) < LEAST_BLOCKS:
        return -math.inf, math.inf
    if np.ptp(ratios) == 0:  # a simulator: no noise to draw from
        return float(ratios[0]), float(ratios[0])
    from scipy import stats

    found = stats.bootstrap((ratios,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(seed))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
