"""Real pushes between real processes, each with one fault in it: `explain` names the fault."""

from __future__ import annotations

import pytest

from syncline.bench.tracing.explain import Explanation
from syncline.bench.tracing.path import critical_path


def cause_of(traced) -> tuple[str, str, str]:
    explanation = Explanation.of(traced.trace)
    assert explanation.cause is not None, str(explanation)
    return explanation.cause.cause, explanation.cause.what, str(explanation)


@pytest.mark.parametrize("stage", ["prepare", "send"])
async def test_a_slow_stage_is_named(tracing, stage: str) -> None:
    traced = await tracing.push(faults=[{"stage": stage, "rank": None, "before_s": 0.02}])
    cause, what, text = cause_of(traced)
    assert (cause, what) == ("stage", stage), text
    assert f"{stage}_concurrency=4" in text
    other = {"prepare": "send", "send": "prepare"}[stage]
    shares = Explanation.of(traced.trace).shares
    assert shares[stage] > 0.5 and shares[stage] > 3 * shares.get(other, 0.0), text


@pytest.mark.parametrize("when", ["before_s", "after_s"])
async def test_a_slow_rank_is_named(tracing, when: str) -> None:
    traced = await tracing.push(ranks=2, faults=[{"stage": "prepare", "rank": 1, when: 0.03}], route="gather")
    cause, what, text = cause_of(traced)
    assert (cause, what) == ("rank", "1"), text
    assert Explanation.of(traced.trace).waits.get("rank 1", 0.0) > 0 or when == "after_s", text


async def test_a_watermark_that_is_too_small_is_named(tracing) -> None:
    """One bucket at a time: two stages that could overlap do not."""
    slow = [{"stage": stage, "rank": None, "before_s": 0.015} for stage in ("prepare", "send")]
    traced = await tracing.push(faults=slow, max_tmp_bytes="16KiB", bucket_bytes="16KiB")
    cause, _, text = cause_of(traced)
    assert cause == "watermark", text
    assert "max_tmp_bytes='64KiB'" in text, text  # four buckets: two in each stage


async def test_one_that_is_large_enough_is_not(tracing) -> None:
    slow = [{"stage": stage, "rank": None, "before_s": 0.015} for stage in ("prepare", "send")]
    traced = await tracing.push(faults=slow, max_tmp_bytes="256KiB", bucket_bytes="16KiB")
    assert "watermark" not in [finding.cause for finding in Explanation.of(traced.trace).findings]


async def test_clocks_with_origins_of_their_own_are_aligned(tracing) -> None:
    """Rank 1's clock is a day off. A barrier is left by everybody after the last one has entered, on any clock."""
    traced = await tracing.push(ranks=2, skews=[0.0, 86_400.0], faults=[{"stage": "prepare", "rank": 1, "after_s": 0.02}])
    zero, one = traced.trace.details
    assert abs(one.began) < 30 and abs(one.done) < 30  # seconds, of a push that takes less than one
    assert zero.clock_error_s == 0.0 < one.clock_error_s < 0.5
    (entered,) = [span.start for span in one.spans if span.stage == "barrier"]
    (left,) = [span.end for span in zero.spans if span.stage == "barrier"]
    assert left >= entered - one.clock_error_s
    assert sum(segment.seconds for segment in critical_path(traced.trace)) == pytest.approx(traced.trace.seconds)
