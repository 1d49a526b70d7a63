"""What a push lost time to, and which knob would help: each finding is checked by playing the push back without it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

from syncline.engine import TransferConfig
from syncline.engine.trace import TargetTrace, Trace

from .playback import play
from .work import Cost, Piece, Work

Cause = Literal["stage", "rank", "watermark", "concurrency", "overhead", "target", "commit", "control"]

STAGES = ("h2d", "prepare", "send")
KNOBS = frozenset(field.name for field in fields(TransferConfig))

_LEAST = 0.05
"""A finding that would gain a smaller part of the push is not worth a word."""
_TINY_S = 1e-9
_SLOW_RANK = 1.5
"""So many times as long as the others do is what a slow rank takes."""
_STEPS_UP = 6
_ROOM = {
    "h2d": "the memory or bus that it reads through is not full already",
    "prepare": "processor cores, or the device, have nothing else to do meanwhile",
    "send": "no link or network card on the way is full already, at the targets either: a trace does not say whether one is",
}
"""What more slots of a stage need, or its work gets slower side by side by as much as there is more of it."""
_FED_TARGET = 0.3
"""A target that has had nothing to do for less than this part of the landing is what its sender waits for."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a push lost time to.

    Attributes:
        cause: its kind.
        what: the stage, rank or target that it concerns; empty where there is none.
        gain_s: seconds that the push would take less without it; of a stage, a commit and the steps before: at half its cost.
        because: it in words.
        advice: what to do; empty if no knob helps.
        knobs: those that ``advice`` names, with the values that it proposes.
    """

    cause: Cause
    what: str
    gain_s: float
    because: str
    advice: str = ""
    knobs: dict[str, int | str]

    def __post_init__(self) -> None:
        unknown = self.knobs.keys() - KNOBS
        if unknown:
            raise ValueError(f"a finding names {sorted(unknown)}, which TransferConfig does not have")


def find(trace: Trace, work: Work) -> list[Finding]:
    """All findings that matter, the most costly first."""
    base = play(work)
    found = [*_stages(trace, work, base), *_ranks(work, base), *_watermark(work, base), *_overhead(work, base)]
    found += [*_targets(trace), *_control(trace)]
    least = max(_LEAST * trace.seconds, _TINY_S)
    return sorted((each for each in found if each.gain_s >= least), key=lambda each: -each.gain_s)


def _stages(trace: Trace, work: Work, base: float) -> Iterator[Finding]:
    """A stage that half its cost would make the push faster; and its slots, if more of them would do so too."""
    for stage in STAGES:
        gain = base - play(work, change=partial(_halved, stage))
        slots = getattr(work.limits, stage)
        wider = base - play(work, limits=replace(work.limits, **{stage: 2 * slots}))
        knob = f"{stage}_concurrency"
        count = sum(stage in task.stages for tasks in work.tasks for task in tasks)
        mean = statistics.fmean([c.own + c.rest for p, c in work.costs.items() if p.stage == stage] or [0.0])
        because = (
            f"{stage} is what the push waits for: {count} times, {_ms(mean)} each; twice as fast, it would save {_ms(gain)}"
        )
        fed = [target.address for target in trace.targets if is_fed(target)] if stage == "send" else []
        yield Finding(
            cause="stage", what=stage, gain_s=gain, knobs={}, because=because,
            advice=f"it waits for {' and '.join(fed)}, which had always something to work on" if fed else "",
        )  # fmt: skip
        yield Finding(
            cause="concurrency", what=stage, gain_s=min(wider, gain) * 0.99,
            because=f"{stage} has {slots} {'slot' if slots == 1 else 'slots'}, and tasks that could start wait for one",
            advice=f"{knob}={2 * slots} would save {_ms(wider)} at most, and only if {_ROOM[stage]}",
            knobs={knob: 2 * slots},
        )  # fmt: skip


def _halved(stage: str, piece: Piece, cost: Cost) -> Cost:
    return cost.scaled(0.5) if piece.stage == stage else cost


def _ranks(work: Work, base: float) -> Iterator[Finding]:
    """A rank whose own work takes longer than that of the others."""
    for rank in range(len(work.tasks)):
        factors = {stage: _slowness(work, stage, rank) for stage in (*STAGES, "barrier")}
        slow = {stage: factor for stage, factor in factors.items() if factor >= _SLOW_RANK}
        if not slow:
            continue

        def as_the_others(piece: Piece, cost: Cost, rank: int = rank, slow: dict[str, float] = slow) -> Cost:
            return cost.scaled(1 / slow[piece.stage]) if piece.rank == rank and piece.stage in slow else cost

        gain = base - play(work, change=as_the_others)
        stages = ", ".join(f"{stage} {factor:.1f} times" for stage, factor in slow.items())
        yield Finding(
            cause="rank", what=str(rank), gain_s=gain,
            because=f"source rank {rank} is slower than the others ({stages} as long), which costs {_ms(gain)}",
            advice=f"look at what else runs on the machine of rank {rank}; no knob mends that", knobs={},
        )  # fmt: skip


def _slowness(work: Work, stage: str, rank: int) -> float:
    """How many times as long as the others ``rank`` takes."""
    factors = [1.0]
    for means in work.paces(stage):
        others = [mean for other, mean in means.items() if other != rank]
        if rank in means and others and statistics.fmean(others) > 0:
            factors.append(means[rank] / statistics.fmean(others))
    return max(factors)


def _watermark(work: Work, base: float) -> Iterator[Finding]:
    """The watermark: how much more of it is worth having."""
    limit = work.limits.max_tmp_bytes
    times = [
        (2**step, base - play(work, limits=replace(work.limits, max_tmp_bytes=limit * 2**step))) for step in range(_STEPS_UP)
    ]
    most = max(gain for _, gain in times)
    enough, gain = next((step, gain) for step, gain in times if gain >= 0.9 * most)
    yield Finding(
        cause="watermark", what="", gain_s=gain,
        because=f"tasks wait for temporary bytes: max_tmp_bytes is {_size(limit)}",
        advice=f"max_tmp_bytes={_size(limit * enough)!r} would save {_ms(gain)}; so may a smaller bucket_bytes",
        knobs={"max_tmp_bytes": limit * enough, "bucket_bytes": "smaller"},
    )  # fmt: skip


def _overhead(work: Work, base: float) -> Iterator[Finding]:
    """What every task costs however small it is."""
    gain = base - play(work, dispatch_s=0.0)
    tasks = max((len(each) for each in work.tasks), default=0)
    yield Finding(
        cause="overhead", what="", gain_s=gain,
        because=f"{tasks} tasks on a rank, and the event loop takes {_ms(work.dispatch_s)} until it starts the next work",
        advice="fewer and larger buckets: raise bucket_bytes (and max_tmp_bytes with it), or keep other work off the loop",
        knobs={"bucket_bytes": "larger", "max_tmp_bytes": "larger"},
    )  # fmt: skip


def _targets(trace: Trace) -> Iterator[Finding]:
    """Targets that others wait for, at the vote or while they take what is sent."""
    took = {t: t.answered - t.asked for t in map(_Key, trace.targets) if t.answered is not None and t.asked is not None}
    if took:
        slowest = max(took, key=lambda each: took[each])
        others = [seconds for each, seconds in took.items() if each is not slowest]
        if others:
            gain = took[slowest] - statistics.median(others)
            yield Finding(
                cause="target", what=slowest.address, gain_s=gain, knobs={"target_timeout_s": "shorter"},
                because=f"target {slowest.address} votes {_ms(gain)} after the others",
                advice="look at that target; target_timeout_s says how long a stalled one is waited for",
            )  # fmt: skip
        paused = slowest.pause_s
        yield Finding(
            cause="commit", what=slowest.address, gain_s=min(paused, took[slowest]) / 2,
            knobs={"landing": "mapped", "in_flight": "keep"},
            because=f"forward passes of {slowest.address} stand still for {_ms(paused)} at the commit",
            advice="on one host landing='mapped' commits without a copy; in_flight='keep' does not wait for requests",
        )  # fmt: skip


class _Key:
    """A target as a key: targets hold lists."""

    def __init__(self, target: TargetTrace) -> None:
        self._target = target
        self.address, self.pause_s = target.address, target.pause_s
        self.asked, self.answered = target.asked, target.answered


def _control(trace: Trace) -> Iterator[Finding]:
    """What happens before the first byte."""
    before = min((rank.piped for rank in trace.details), default=0.0)
    longest = max((step for rank in trace.details for step in rank.steps), key=lambda step: step.end - step.start, default=None)
    if longest is not None:
        silent = [target.address for target in trace.targets if target.error and target.ready is None]
        yield Finding(
            cause="control", what=longest.name, gain_s=before / 2, knobs={"target_timeout_s": "shorter"} if silent else {},
            because=f"{_ms(before)} pass before the pipeline begins, most of them in step {longest.name!r}",
            advice=(
                f"{' and '.join(silent)} never got ready; target_timeout_s says how long such a target is waited for"
                if silent
                else "steps other than enter and start make links or the plan anew: the next push does not have them"
            ),
        )  # fmt: skip


def starving(target: TargetTrace) -> float | None:
    """The part of its landing in which the target had nothing to do, on its busiest rank; None if it does not say."""
    parts = [landing.starved_s / landing.seconds for landing in target.landings if landing.seconds > 0]
    return min(parts) if parts else None


def is_fed(target: TargetTrace) -> bool:
    """Whether the target itself, and not what is sent to it, takes the time."""
    part = starving(target)
    return part is not None and part < _FED_TARGET


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size and nbytes % (size // 16) == 0:
            return f"{nbytes / size:g}{unit}"
    return str(nbytes)
