"""What changed between two sets of rows, beyond noise. Pure.

For rows of one name, setup and knobs on one machine, the warm samples of both sides are put to a two-sided Mann-Whitney U test
(no distribution is assumed, and a few slow pushes decide nothing); the p-values of all rows are corrected together (Holm). A
row is *faster* or *slower* if its corrected p-value is below ``alpha``, the medians differ by at least ``least``, and, where a
side was measured in several runs, by more than the runs of one side differ among themselves: samples of one run are not
independent, and that is what the test alone would not see. All else is *within noise*, but where no difference could have
shown, however large, with so few samples beside so many rows: that is *too few*. Floors are corrected among themselves.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from .errors import BenchError
from .rows import Row, Skipped

Verdict = Literal["faster", "slower", "within noise", "broken", "mended", "not comparable", "too few", "only in A", "only in B"]

ALPHA = 0.05
LEAST = 0.03
_FEW = 4
"""Samples of a side, at least: with 4 and 4 the smallest possible p-value is 0.029."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One row's verdict on B against A.

    Attributes:
        ratio: B's median over A's: above 1, B is slower.
        superiority: how likely a sample of B takes longer than one of A (0.5: neither).
        p, p_holm: of the test, alone and corrected for all rows that are corrected together.
        spread: largest ratio of medians between runs of one side; 1 if each side is one run.
        why: in words, where there is something to say.
    """

    row: str
    verdict: Verdict
    a_median: float | None = None
    b_median: float | None = None
    n_a: int = 0
    n_b: int = 0
    ratio: float | None = None
    superiority: float | None = None
    p: float | None = None
    p_holm: float | None = None
    spread: float = 1.0
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """All runs of a row on one side."""

    runs: Sequence[Row]

    @property
    def samples(self) -> list[float]:
        return [sample for run in self.runs for sample in run.warm]

    @property
    def spread(self) -> float:
        medians = [run.seconds.median for run in self.runs]
        return max(medians) / min(medians)

    @property
    def is_broken(self) -> bool:
        return any(run.integrity is False or run.control not in {None, "caught"} for run in self.runs)


def compare(
    a: Iterable[Row | Skipped], b: Iterable[Row | Skipped], *, alpha: float = ALPHA, least: float = LEAST, across: bool = False
) -> list[Comparison]:
    """Compare all rows, in the order in which they are found.

    Args:
        alpha: chance of calling any row of none changed that the correction leaves.
        least: smallest difference of medians that counts, as a part of A's.
        across: compare rows of different machines, setups or knobs as well, and say so.

    Raises:
        BenchError: ``alpha`` is not between 0 and 1, or ``least`` is no finite number from 0.
    """
    if not 0 < alpha < 1:
        raise BenchError(f"alpha is {alpha}; it must lie between 0 and 1: the chance of calling any row changed if none is")
    if not 0 <= least < math.inf:
        raise BenchError(f"least is {least}; it must be a finite number from 0: a part of A's median, as 0.03")
    sides_a, sides_b = _by_name(a), _by_name(b)
    found = []
    for name in dict.fromkeys((*sides_a, *sides_b)):
        if name in sides_a and name in sides_b:
            found.append(_test(name, sides_a[name], sides_b[name], across=across))
        else:
            n_a, n_b = (len(side[name].samples) if name in side else 0 for side in (sides_a, sides_b))
            found.append(Comparison(row=name, verdict="only in A" if name in sides_a else "only in B", n_a=n_a, n_b=n_b))
    floors = {name for name, side in sides_a.items() if side.runs[0].kind == "floor"}
    judged: dict[str, Comparison] = {}
    for family in ([one for one in found if one.row in floors], [one for one in found if one.row not in floors]):
        tested = [one.p for one in family if one.p is not None]
        corrected = iter(holm(tested))
        for one in family:
            p_holm = next(corrected) if one.p is not None else None
            judged[one.row] = _judge(one, p_holm, alpha, least, len(tested))
    return [judged[one.row] for one in found]


def regressions(found: Sequence[Comparison]) -> list[str]:
    """Why B does not pass as at least as good as A, a line each; none if it does.

    Not only rows that are slower or broken: also those of A that B lacks, has too few samples of, or has measured otherwise,
    and that nothing at all was compared. Rows that A has too few samples of, or lacks, say nothing.
    """
    bad = ("slower", "broken", "only in A", "not comparable")
    why = [f"{one.row}: {one.verdict}" for one in found if one.verdict in bad or (one.verdict == "too few" and one.n_a >= _FEW)]
    if not why and all(one.verdict in {"too few", "only in B"} for one in found):
        why.append("no row could be compared")
    return why


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected so that the chance of any false positive among them stays what it is of one (Holm, 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, reach = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        reach = max(reach, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = reach
    return corrected


def _by_name(rows: Iterable[Row | Skipped]) -> dict[str, _Side]:
    runs: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Row):
            runs[row.row].append(row)
    return {name: _Side(runs=found) for name, found in runs.items()}


def _test(name: str, a: _Side, b: _Side, *, across: bool) -> Comparison:
    samples_a, samples_b = a.samples, b.samples
    n_a, n_b = len(samples_a), len(samples_b)
    if b.is_broken != a.is_broken:
        verdict: Verdict = "broken" if b.is_broken else "mended"
        return Comparison(row=name, verdict=verdict, n_a=n_a, n_b=n_b, why="integrity or its control")
    differs = _differences([*a.runs, *b.runs])
    why = f"differ in {'; '.join(differs)}" if differs else ""
    if differs and not across:
        return Comparison(row=name, verdict="not comparable", n_a=n_a, n_b=n_b, why=why)
    if min(n_a, n_b) < _FEW:
        few = f"{n_a} and {n_b} warm samples; at least {_FEW} each are needed"
        return Comparison(row=name, verdict="too few", n_a=n_a, n_b=n_b, why=f"{why}; {few}" if why else few)
    from scipy.stats import mannwhitneyu

    statistic, p = mannwhitneyu(samples_b, samples_a, alternative="two-sided")
    medians = statistics.median(samples_a), statistics.median(samples_b)
    return Comparison(
        row=name, verdict="within noise", a_median=medians[0], b_median=medians[1], n_a=n_a, n_b=n_b,
        ratio=medians[1] / medians[0], superiority=float(statistic) / (n_a * n_b), p=float(p),
        spread=max(a.spread, b.spread), why=why,
    )  # fmt: skip


def _judge(one: Comparison, p_holm: float | None, alpha: float, least: float, tested: int) -> Comparison:
    """``tested``: rows that are corrected together."""
    if p_holm is None or one.ratio is None:
        return one
    change = abs(math.log(one.ratio))
    verdict: Verdict = "within noise"
    why = one.why
    if p_holm < alpha and change >= math.log1p(least):
        if change > math.log(one.spread):
            verdict = "slower" if one.ratio > 1 else "faster"
        else:
            remark = f"runs of one side differ by {100 * (one.spread - 1):.0f}% among themselves"
            why = f"{why}; {remark}" if why else remark
    elif p_holm >= alpha and tested * _least_p(one.n_a, one.n_b) >= alpha:
        verdict = "too few"
        few = f"{one.n_a} and {one.n_b} warm samples cannot show any difference beside {tested - 1} rows more"
        why = f"{why}; {few}" if why else few
    return msgspec.structs.replace(one, verdict=verdict, p_holm=p_holm, why=why)


def _least_p(n_a: int, n_b: int) -> float:
    """The p-value of sides that do not overlap at all: one of two orders, of all that there are."""
    return 2 / math.comb(n_a + n_b, n_a)


def _differences(runs: Sequence[Row]) -> list[str]:
    """What rows must share to be compared, and do not."""
    found = []
    for what, values in (
        ("bytes", [run.bytes for run in runs]),
        ("cpu", [run.machine.cpu for run in runs]),
        ("cores", [run.machine.cores for run in runs]),
        ("memory", [run.machine.memory_bytes >> 28 for run in runs]),
        ("gpu", [run.machine.gpu for run in runs]),
    ):
        found += _different(what, values)
    for what in ("integrity", "control"):
        found += _different(what, ["not looked at" if getattr(run, what) is None else "looked at" for run in runs])
    for what, tables in (("knob", [run.knobs or {} for run in runs]), ("setup", [run.setup or {} for run in runs])):
        found += _different_tables(what, tables)
    return found


def _different_tables(what: str, tables: Sequence[Mapping[str, object]]) -> list[str]:
    """Only keys that all have: a knob that is new has its default where it was not there yet."""
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    return list(itertools.chain.from_iterable(_different(f"{what} {key}", [t[key] for t in tables]) for key in shared))


def _different(what: str, values: Sequence[object]) -> list[str]:
    distinct = list(dict.fromkeys(str(value) for value in values))
    return [f"{what} ({' and '.join(distinct)})"] if len(distinct) > 1 else []
