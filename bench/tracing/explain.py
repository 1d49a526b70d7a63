"""``syncline bench explain TRACE``: where the time of a push went, and which knob would help."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from syncline.engine.report import busy_seconds
from syncline.engine.trace import STAGES, Trace
from syncline.engine.trace_peers import peer_waits

from .findings import Finding, find, is_fed, starving
from .path import Segment, critical_path
from .playback import play
from .work import Work

_SHOWN = 5
_MOST = 8
"""Ranks, waits and targets that have a line each."""
_FEW = 3
_ALIKE = 0.15


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A push explained.

    Attributes:
        trace: of the push.
        path: its critical path.
        findings: the most costly first.
        played_s: seconds of the push played back unchanged: how well playing back fits it.
    """

    trace: Trace
    path: Sequence[Segment]
    findings: Sequence[Finding]
    played_s: float

    @classmethod
    def of(cls, trace: Trace) -> Explanation:
        """Explain a push."""
        work = Work.of(trace)
        return cls(trace=trace, path=critical_path(trace), findings=find(trace, work), played_s=play(work))

    @property
    def cause(self) -> Finding | None:
        """What cost the most; None: nothing stands out."""
        return self.findings[0] if self.findings else None

    @property
    def shares(self) -> dict[str, float]:
        """What the push waited for -> the part of its time, along the critical path."""
        return _shares((segment.what, segment.seconds) for segment in self.path)

    @property
    def waits(self) -> dict[str, float]:
        """Why tasks waited -> seconds, over all ranks and stages; of tasks that wait in line for one stage only the first."""
        found: defaultdict[str, float] = defaultdict(float)
        for waits in self.trace.waits:
            for wait in waits:
                if wait.cause != "queue":
                    found[wait.cause] += wait.end - wait.start
        for peers in peer_waits(self.trace.details):
            for peer in peers:
                found[f"rank {peer.rank}"] += peer.end - peer.start
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _shares(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for what, seconds in pairs:
        sums[what] += seconds
    whole = sum(sums.values()) or 1.0
    return {what: seconds / whole for what, seconds in sorted(sums.items(), key=lambda item: -item[1])}


def _lines(explanation: Explanation) -> Iterator[str]:
    """The verdict first: what comes after it is what it was made from."""
    trace = explanation.trace
    sizes = f"{_count(len(trace.details), 'source rank')}, {_count(len(trace.targets), 'target')}"
    yield f"push of version {trace.version}: {trace.seconds * 1e3:.1f} ms, {sizes}"
    yield from _outcome(trace)
    yield ""
    yield from _verdict(explanation)
    yield ""
    yield "what it waited for, one thing after the other (critical path):"
    for what, share in explanation.shares.items():
        where = _where(explanation, what) if len(trace.details) > 1 else ""
        yield f"  {share:6.1%}  {share * trace.seconds * 1e3:9.1f} ms  {_WORDS.get(what, what)}{where}"
    yield ""
    yield "how long each stage was busy, by rank (they overlap):"
    yield from _busy(trace)
    if explanation.waits:
        yield ""
        yield "what the first task in line of each stage waited for, summed over stages and ranks:"
        waits = explanation.waits.items()
        yield from _top(f"  {seconds * 1e3:9.1f} ms  {_CAUSES.get(name, name)}" for name, seconds in waits)
    targets = list(_targets(trace))
    if targets:
        yield ""
        yield "what the targets did:"
        yield from _top(targets)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _top(lines: Iterable[str]) -> Iterator[str]:
    """As many as there is a use in reading."""
    every = list(lines)
    yield from every[:_MOST]
    if len(every) > _MOST:
        yield f"  and {len(every) - _MOST} more"


def _outcome(trace: Trace) -> Iterator[str]:
    """How a push ended that did not reach everybody, and how far it came."""
    lost = [target for target in trace.targets if target.error]
    if not lost:
        return
    yield from _top(f"  target {target.address} did not commit: {target.error}" for target in lost)
    sends = sum("send" in row.stages for rank in trace.details for row in rank.tasks)
    sent = sum(span.stage == "send" for spans in trace.ranks for span in spans)
    yield f"  {sent} of {_count(sends, 'task')} went out to the end"


def _where(explanation: Explanation, what: str) -> str:
    """The ranks that have a part in a share of the path; of many the one with the largest."""
    on = dict(_shares((str(s.rank), s.seconds) for s in explanation.path if s.what == what and s.rank >= 0))
    if not on:
        return ""
    if len(on) <= _FEW:
        return f"  on rank{'s' if len(on) > 1 else ''} {', '.join(sorted(on, key=int))}"
    return f"  on {len(on)} ranks, most of it on rank {next(iter(on))}"


def _busy(trace: Trace) -> Iterator[str]:
    """A line for each rank, or, of many, one for each stage."""
    busy = [
        {name: busy_seconds((s.start, s.end) for s in spans if s.stage == name) for name in STAGES} for spans in trace.ranks
    ]
    if len(busy) <= _MOST:
        for rank, stages in enumerate(busy):
            yield f"  rank {rank}:  " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in stages.items())
        return
    for name in STAGES:
        longest = sorted(range(len(busy)), key=lambda rank: -busy[rank][name])
        seconds = [stages[name] for stages in busy]
        most = ", ".join(f"{busy[rank][name] * 1e3:.1f} ms on rank {rank}" for rank in longest[:_FEW])
        yield f"  {name}:  least {min(seconds) * 1e3:.1f} ms, median {statistics.median(seconds) * 1e3:.1f} ms; most {most}"


def _targets(trace: Trace) -> Iterator[str]:
    for target in trace.targets:
        part = starving(target)
        if part is not None:
            taken = "it takes longer than the source" if is_fed(target) else f"it waited for the source {part:.0%} of that"
            longest = max(landing.seconds for landing in target.landings)
            yield f"  target {target.address}: landing {longest * 1e3:.1f} ms ({taken}), commit {target.commit_s * 1e3:.1f} ms"


def _verdict(explanation: Explanation) -> Iterator[str]:
    off = explanation.played_s / explanation.trace.seconds - 1 if explanation.trace.seconds else 0.0
    if not explanation.findings:
        yield "nothing stands out: no single stage, rank, knob or target would make this push 5% faster"
    for number, finding in enumerate(explanation.findings[:_SHOWN], start=1):
        share = finding.gain_s / explanation.trace.seconds
        yield f"{number}. {finding.because} (to gain: {share:.0%} of the push)"
        if finding.advice:
            yield f"   {finding.advice}"
    if abs(off) > _ALIKE:
        yield f"(played back unchanged, the push takes {off:+.0%}: what is said of gains is rough)"


_WORDS = {
    "send": "send: out of the source's ranks and into the targets, whichever of the two holds it up",
    "steps": "getting ready: steps that all ranks and targets take before the first byte",
    "votes": "votes and commits of the targets",
    "loop": "event loops that had not come to it yet",
    "abandoned": "work that was under way when the last target was lost",
}
_CAUSES = {
    "watermark": "the watermark (max_tmp_bytes)",
    "slot": "a slot of the stage (its concurrency)",
    "order": "an earlier task of the plan, which goes first and was not ready",
    "barrier": "the barrier of a group",
    "loop": "the event loop",
}


@dataclass(frozen=True, kw_only=True)
class ExplainArgs:
    """Say in words where the time of a push went, and which knob would help."""

    trace: tyro.conf.Positional[Path]
    """A trace that `PushReport.trace.save`, `syncline demo` or `syncline bench trace` wrote."""


def main(args: ExplainArgs) -> int:
    """Entry point of the command line."""
    print(Explanation.of(Trace.load(args.trace)))
    return 0
