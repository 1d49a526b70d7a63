"""The critical path of a simulated push: legs followed back from its end, each to what it waited for last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .legs import Leg


@dataclass(frozen=True, kw_only=True)
class Step:
    """A leg of the path: ``what`` was done ``where`` for ``task`` (-1: for none), and ``why`` it had not begun before."""

    what: str
    where: str
    task: int
    start: float
    end: float
    why: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The path from the push's beginning to its end, in this order, without a gap."""

    steps: Sequence[Step]

    @property
    def by_what(self) -> Mapping[str, float]:
        """Seconds of the path by what was done, the longest first."""
        return _sums((step.what, step.seconds) for step in self.steps)

    @property
    def by_where(self) -> Mapping[str, float]:
        """Seconds of the path by where it was done, the longest first."""
        return _sums((step.where, step.seconds) for step in self.steps)

    @property
    def by_why(self) -> Mapping[str, int]:
        """How often something on the path had to wait for its turn, by reason (tasks left out)."""
        found: dict[str, int] = defaultdict(int)
        for step in self.steps:
            if step.why:
                found["its line is taken" if step.why.startswith("behind") else step.why] += 1
        return dict(sorted(found.items(), key=lambda row: -row[1]))


def critical_path(last: Leg) -> CriticalPath:
    """Follow ``last`` back."""
    steps: list[Step] = []
    leg: Leg | None = last
    until = last.end
    while leg is not None:
        end = min(leg.end, until)
        start = min(leg.start, end)
        if leg.end - leg.start > 0 or leg.why:
            steps.append(Step(what=leg.what, where=leg.where, task=leg.task, start=start, end=end, why=leg.why))
        until, leg = start, leg.after
    steps.reverse()
    return CriticalPath(steps=_joined(steps))


def _joined(steps: list[Step]) -> list[Step]:
    """What is left between two steps (latency of messages) belongs to the later one."""
    found: list[Step] = []
    for step in steps:
        start = found[-1].end if found else 0.0
        found.append(Step(what=step.what, where=step.where, task=step.task, start=start, end=step.end, why=step.why))
    return found


def _sums(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for key, seconds in rows:
        found[key] += seconds
    return dict(sorted(found.items(), key=lambda row: -row[1]))
