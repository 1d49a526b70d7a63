"""A simulated push as a trace: the same file as a real push writes, for the same viewers and for ``bench explain``."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.engine.trace import RankTrace, Span, TargetTrace, TaskRow, Trace

from .load import Share
from .ranks import spec_of
from .simulate import Prediction, Scenario


def trace_of(scenario: Scenario, prediction: Prediction) -> Trace:
    """Times are virtual seconds since the push was called."""
    _, load = scenario.plans.of(scenario.options)
    config = scenario.config
    knobs: dict[str, int | str] = {
        "max_tmp_bytes": config.watermark,
        "bucket_bytes": config.bucket,
        "h2d_concurrency": config.h2d_concurrency,
        "prepare_concurrency": config.prepare_concurrency,
        "send_concurrency": config.send_concurrency,
        "landing": config.landing,
        "hardware": scenario.hardware.name,
    }
    details = [
        RankTrace(
            spans=[Span(span.stage, span.index, span.start, span.end) for span in outcome.spans],
            tasks=_rows(shares, load.target_of, offloaded=scenario.offloaded),
            groups=load.groups,
            piped=outcome.started,
            done=max((span.end for span in outcome.spans), default=outcome.started),
        )
        for shares, outcome in zip(load.sources, prediction.outcomes, strict=True)
    ]
    sent = max(rank.done for rank in details)
    targets = [
        TargetTrace(
            address=f"target {target}",
            ready=details[0].piped,
            asked=sent,
            answered=prediction.seconds,
            commit_s=prediction.commit_s,
        )
        for target in sorted(set(load.target_of))
    ]
    return Trace(version=1, details=details, targets=targets, voting=(sent, prediction.seconds), knobs=knobs)


def _rows(shares: Sequence[Share], targets: Sequence[int], *, offloaded: bool) -> list[TaskRow]:
    specs = (spec_of(share, targets, offloaded=offloaded) for share in shares)
    return [
        TaskRow(spec.index, spec.group, spec.tmp_bytes, share.nbytes, spec.stages)
        for spec, share in zip(specs, shares, strict=True)
    ]
