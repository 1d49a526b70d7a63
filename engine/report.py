"""What a push says about itself: `PushReport`, by stage and by target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from syncline.scheduler.routing import Routing

from .errors import SynclineError
from .messages import State
from .trace import Trace


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage over all ranks of the source.

    Attributes:
        busy_s: seconds during which at least one task was in this stage, on the rank where that took longest.
        tasks: times that a task went through the stage, over all ranks.
    """

    busy_s: float
    tasks: int


@dataclass(frozen=True, kw_only=True)
class TargetReport:
    """What became of one target.

    Attributes:
        ok: it serves this push's version.
        state, version: what it answered last; None if it gave no answer.
        error: why not, typed; None if ok.
        already: it held this version with this content before, and nothing was applied twice.
        landing_bytes: spare memory that it holds for landing.
        commit_s, pause_s: seconds of the commit, and seconds during which forward passes stood still.
    """

    ok: bool
    state: State | None
    version: int | None
    error: SynclineError | None = None
    already: bool = False
    landing_bytes: int = 0
    commit_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """The result of one push, the same on every rank of the source.

    Attributes:
        ok: every target serves this version.
        version: the version pushed.
        digest: digest of the content that the version names (hex), empty when digests are off.
        targets: address -> what became of it.
        seconds: from the call to the result, on rank 0.
        source_free_s: seconds until no task read the source's memory any more, on the slowest rank.
        bytes: bytes sent to targets, over all ranks (a bucket in shared memory counts once for each receiver).
        tasks: tasks of the plan.
        routing: what of the plan goes straight from the ranks that hold it, what is gathered, and why.
        peak_tmp_bytes: highest temporary bytes of tasks in flight, on the rank where it was highest.
        landing_bytes: spare memory for landing, over source and targets (shared memory counted once).
        stages: ``h2d``, ``prepare``, ``send``, ``barrier`` -> what they did.
        trace: timeline of every task and stage; None when tracing is off.
    """

    ok: bool
    version: int
    digest: str
    targets: Mapping[str, TargetReport]
    seconds: float
    source_free_s: float
    bytes: int
    tasks: int
    peak_tmp_bytes: int
    landing_bytes: int
    stages: Mapping[str, StageReport]
    routing: Routing = field(default_factory=Routing)
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def overlap(self) -> float:
        """Sum of the stages' busy seconds over the seconds of the push: above 1, stages ran side by side."""
        busy = sum(stage.busy_s for stage in self.stages.values())
        return busy / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0
        lines = [
            (
                f"push of version {self.version}: {'ok' if self.ok else 'FAILED'} in {self.seconds * 1e3:.1f} ms, "
                f"{_mib(self.bytes)} in {self.tasks} tasks ({rate:.2f} GB/s), overlap {self.overlap:.2f}"
            ),
            f"  temporary bytes: peak {_mib(self.peak_tmp_bytes)}; landing memory {_mib(self.landing_bytes)}",
            f"  {self.routing}",
            "  stages: " + ", ".join(f"{name} {stage.busy_s * 1e3:.1f} ms" for name, stage in self.stages.items()),
        ]
        for address, target in self.targets.items():
            known = target.state is not None
            what = f"{target.state} version {target.version}" if known else "gave no answer: its state is not known"
            what += " (held it before)" if target.already else ""
            lines.append(f"  {address}: {what}" + (f"; {type(target.error).__name__}: {target.error}" if target.error else ""))
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``(start, end)`` intervals, in their unit."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
