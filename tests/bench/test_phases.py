"""Cold, ramp, warm: the rule, on samples whose phases are known."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings, strategies as st

from syncline.bench.measure.phases import Phases, Quantiles, warm

SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)


def test_ramp_lies_between_cold_and_warm() -> None:
    phases = Phases.of([10.0, 3.0, 2.0, 1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0])
    assert phases == Phases(cold_s=10.0, ramp=2, ramp_s=2.5, warm_from=3, settled=True)


def test_a_late_outlier_is_warm() -> None:
    samples = [5.0, 1.0, 1.0, 1.01, 0.99, 1.0, 4.0, 1.0, 1.0, 1.0]
    assert Phases.of(samples).ramp == 0
    assert max(warm(samples)) == 4.0 and len(warm(samples)) == 9


def test_one_good_sample_does_not_end_the_ramp() -> None:
    assert Phases.of([9.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0]).warm_from == 3


def test_samples_that_begin_faster_are_ramp_too() -> None:
    assert Phases.of([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]).warm_from == 3


def test_what_is_steady_too_late_has_not_settled() -> None:
    samples = [1.0] * 7 + [5.0] * 5
    assert Phases.of(samples) == Phases(cold_s=1.0, ramp=5, ramp_s=1.0, warm_from=6, settled=False)
    assert warm(samples) == samples[6:]


def test_a_single_sample_is_all_there_is() -> None:
    assert Phases.of([2.0]) == Phases(cold_s=2.0, ramp=0, ramp_s=None, warm_from=0, settled=False)
    assert warm([2.0]) == [2.0]


@settings(deadline=None, max_examples=200)
@given(SAMPLES)
def test_every_sample_is_in_one_phase(samples: list[float]) -> None:
    phases = Phases.of(samples)
    if len(samples) > 1:
        assert 1 + phases.ramp + len(warm(samples)) == len(samples)
        assert 1 <= phases.warm_from <= max(1, len(samples) // 2)


@settings(deadline=None, max_examples=100)
@given(SAMPLES)
def test_the_unit_does_not_matter(samples: list[float]) -> None:
    assert Phases.of([sample * 1024 for sample in samples]).warm_from == Phases.of(samples).warm_from


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40))
def test_quantiles_are_those_of_the_standard_library(samples: list[float]) -> None:
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    found = Quantiles.of(samples)
    assert (found.min, found.max) == (min(samples), max(samples))
    assert [found.median, found.p90, found.p99] == pytest.approx([cuts[49], cuts[89], cuts[98]])
