"""The proof of an answer is strict: it finds a wrong token, a wrong version and wrong borders."""

from __future__ import annotations

import pytest

from syncline.adapters.engines.replay import Replayer
from syncline.adapters.engines.requests import Span, spans_of


def span(version: int, start: int, end: int) -> Span:
    return Span(version=version, start=start, end=end)


def test_spans_are_runs():
    assert spans_of([]) == []
    assert spans_of([3, 3, 4, 3]) == [span(3, 0, 2), span(4, 2, 3), span(3, 3, 4)]


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-sliding", "mixtral"])
def test_answers_of_generate_pass(tiny, weights_of, alone, prompts, kind):
    model, server = tiny(kind, seed=1), tiny(kind, seed=2)
    replayer = Replayer(model, {7: weights_of(server)}.__getitem__)
    for prompt in prompts(3):
        token_ids = alone(server, prompt)
        report = replayer.check(prompt, token_ids, [span(7, 0, len(token_ids))])
        assert report.ok, report.problem
        assert [check.expected for check in report.checks] == token_ids
        assert report.worst_gap == 0.0
    own = weights_of(model)
    assert all(own[name].equal(tensor) for name, tensor in weights_of(tiny(kind, seed=1)).items())  # not changed


def test_a_wrong_token_is_found(tiny, weights_of, alone):
    model = tiny()
    token_ids = alone(model, (9, 8, 7))
    token_ids[4] = token_ids[4] + 1 if token_ids[4] < 96 else 6
    report = Replayer(model, {1: weights_of(model)}.__getitem__).check((9, 8, 7), token_ids, [span(1, 0, len(token_ids))])
    assert not report.ok
    assert "token 4" in report.problem
    assert not report.checks[4].gap <= 1e-3


def test_the_tolerance_is_on_the_logit_gap(tiny, weights_of, alone):
    model = tiny()
    token_ids = alone(model, (9, 8, 7))
    token_ids[-1] = (token_ids[-1] + 1) % 97
    weights = {1: weights_of(model)}.__getitem__
    gap = Replayer(model, weights).check((9, 8, 7), token_ids, [span(1, 0, len(token_ids))]).worst_gap
    assert gap > 0
    assert Replayer(model, weights, tolerance=gap * 1.01).check((9, 8, 7), token_ids, [span(1, 0, len(token_ids))]).ok


@pytest.mark.parametrize(
    "spans",
    [[], [span(1, 0, 4)], [span(1, 0, 6)], [span(1, 1, 5)], [span(1, 0, 3), span(1, 4, 5)], [span(1, 0, 0), span(1, 0, 5)]],
)
def test_spans_that_do_not_cover_the_answer_are_a_problem(tiny, weights_of, spans):
    model = tiny()
    report = Replayer(model, {1: weights_of(model)}.__getitem__).check((9, 8), [6, 7, 8, 9, 10], spans)
    assert not report.ok
    assert "do not cover 5 tokens" in report.problem


def test_weights_that_lack_a_name_are_refused(tiny, weights_of):
    model = tiny()
    weights = weights_of(model)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match="version 1 lack 1 name"):
        Replayer(model, {1: weights}.__getitem__).check((9, 8), [6], [span(1, 0, 1)])


def test_one_name_of_a_tied_tensor_is_enough(tiny, weights_of, alone):
    model = tiny("llama-tied")
    weights = weights_of(model)
    del weights["model.embed_tokens.weight"]  # lm_head.weight is left
    token_ids = alone(model, (9, 8, 7))
    assert (
        Replayer(tiny("llama-tied", seed=5), {1: weights}.__getitem__)
        .check((9, 8, 7), token_ids, [span(1, 0, len(token_ids))])
        .ok
    )
