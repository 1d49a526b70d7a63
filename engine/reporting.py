"""From what the ranks and targets said (`Outcome`) to what the user reads (`PushReport`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from syncline.scheduler.routing import Routing

from .errors import error_from_wire
from .messages import State
from .report import PushReport, StageReport, TargetReport
from .steps import Done, Outcome, TargetOutcome
from .trace import STAGES, Span, Trace


def build_report(outcome: Outcome, addresses: Sequence[str], *, routing: Routing, trace: bool) -> PushReport:
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
        trace=Trace(version=outcome.version, ranks=_aligned(ranks)) if trace else None,
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


def _aligned(ranks: Sequence[Done]) -> list[list[Span]]:
    """The ranks' spans on one time axis that begins with the first rank's start, by wall clock."""
    began = min((done.started_at for done in ranks), default=0.0)
    return [
        [
            Span(span.stage, span.task, span.start + done.started_at - began, span.end + done.started_at - began)
            for span in done.spans
        ]
        for done in ranks
    ]
