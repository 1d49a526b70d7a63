"""From what the ranks and targets said (`Outcome`) to what the user reads (`PushReport`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from syncline.scheduler.routing import Routing

from .config import TransferConfig
from .errors import error_from_wire
from .messages import State
from .report import PushReport, StageReport, TargetReport
from .steps import Outcome, TargetOutcome
from .trace import STAGES, RankTrace, TargetTrace, Trace
from .trace_clock import Offset
from .trace_log import RankLog, TargetLog

_NOTHING = RankLog(began=0.0, piped=0.0, done=0.0)


def build_report(outcome: Outcome, addresses: Sequence[str], *, routing: Routing, config: TransferConfig) -> PushReport:
    """The report of a push; the same on every rank."""
    targets = {address: _target(target) for address, target in zip(addresses, outcome.targets, strict=True)}
    ranks = outcome.ranks
    return PushReport(
        ok=all(target.ok for target in targets.values()),
        version=outcome.version,
        digest=outcome.digest,
        targets=targets,
        seconds=outcome.seconds,
        source_free_s=max((done.source_free_s for done in ranks), default=0.0),
        bytes=sum(done.bytes for done in ranks),
        tasks=outcome.tasks,
        routing=routing,
        peak_tmp_bytes=max((done.peak_tmp_bytes for done in ranks), default=0),
        landing_bytes=sum(done.landing_bytes for done in ranks) + sum(target.landing_bytes for target in targets.values()),
        stages={
            stage: StageReport(
                busy_s=max((done.busy_s.get(stage, 0.0) for done in ranks), default=0.0),
                tasks=sum(done.tasks.get(stage, 0) for done in ranks),
            )
            for stage in STAGES
        },
        trace=_trace(outcome, addresses, config) if config.trace and ranks else None,
    )


def _target(outcome: TargetOutcome) -> TargetReport:
    return TargetReport(
        ok=outcome.ok,
        state=cast("State | None", outcome.state),
        version=outcome.version,
        error=error_from_wire(outcome.error, outcome.message) if outcome.error else None,
        already=outcome.already,
        landing_bytes=outcome.landing_bytes,
        commit_s=outcome.commit_s,
        pause_s=outcome.pause_s,
    )


def _trace(outcome: Outcome, addresses: Sequence[str], config: TransferConfig) -> Trace:
    """All ranks and targets on one time axis that begins with the first rank's call."""
    offsets = dict(enumerate(outcome.offsets))
    logs = [(done.log or _NOTHING, offsets.get(rank, Offset())) for rank, done in enumerate(outcome.ranks)]
    origin = min(log.began + offset.seconds for log, offset in logs)
    return Trace(
        version=outcome.version,
        details=[RankTrace.of(log, offset.seconds - origin, offset.error_s) for log, offset in logs],
        targets=[
            TargetTrace.of(address, target.log or TargetLog(), -origin, _why(target))
            for address, target in zip(addresses, outcome.targets, strict=True)
        ],
        voting=(outcome.voting[0] - origin, outcome.voting[1] - origin),
        knobs=_knobs(config),
        origin=origin,
    )


def _why(target: TargetOutcome) -> str:
    """Why a target did not commit, in words; empty if it did."""
    return f"{target.error}: {target.message}" if target.error else ""


def _knobs(config: TransferConfig) -> dict[str, int | str]:
    names = ("h2d_concurrency", "prepare_concurrency", "send_concurrency", "workers", "landing", "transport", "route")
    sizes = {"max_tmp_bytes": config.watermark, "bucket_bytes": config.bucket}
    return {**sizes, **{name: getattr(config, name) for name in names}}
