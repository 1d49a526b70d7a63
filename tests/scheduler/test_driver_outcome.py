from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from syncline.scheduler.outcome import SPAN_NAMES, PushLog, Span, Spans

INTERVALS = st.lists(st.tuples(st.sampled_from(SPAN_NAMES), st.integers(0, 30), st.integers(1, 20)), max_size=25)


@settings(deadline=None, max_examples=200)
@given(INTERVALS, st.integers(0, 60))
def test_busy_time_is_the_union_of_the_intervals(intervals, looked_at: int) -> None:
    """Against a count of the whole seconds in which something was in flight. Not all is over when the log is read."""
    log = PushLog(1, 0.0)
    moments = [(start, 1, place) for place, (_, start, _) in enumerate(intervals)]
    moments += [(start + length, 0, place) for place, (_, start, length) in enumerate(intervals)]
    ended = []
    for now, begins, place in sorted(moments):
        if now > looked_at:
            break
        stage, start, _ = intervals[place]
        if begins:
            log.took_off(stage, now)
        else:
            log.landed(stage, place, start, now)
            ended.append(Span(stage, place, start, now))
    outcome = log.outcome(looked_at, 7)
    for stage in SPAN_NAMES:
        seconds = {s for name, start, length in intervals if name == stage for s in range(start, start + length)}
        assert outcome.busy_s[stage] == sum(second < looked_at for second in seconds)
    assert list(outcome.spans) == ended


def test_spans_are_a_sequence_that_others_can_keep() -> None:
    spans = Spans()
    rows = [Span("send", 3, 0.5, 1.25), Span("barrier", 0, 1.0, 2.0), Span("h2d", 70_000, 2.0, 2.0)]
    for row in rows:
        spans.add(row.stage, row.index, row.start, row.end)
    kept = spans.copy()
    spans.add("send", 4, 3.0, 4.0)
    assert (list(kept), len(kept), kept[-1], kept[1:]) == (rows, 3, rows[2], rows[1:])
    assert kept != spans
    assert list(kept) == spans[:3]
    with pytest.raises(IndexError):
        kept[3]
