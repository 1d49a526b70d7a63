"""Answers are exact: batched with others, each request gets what it would get alone."""

from __future__ import annotations

import asyncio

import pytest
import torch

from syncline.adapters.engines.generation import GenerationEngine
from syncline.adapters.engines.requests import GenerateRequest, RequestInvalid, UnsupportedModel
from syncline.adapters.engines.runner import ModelRunner
from syncline.adapters.engines.sampling import Sampler

KINDS = ["llama", "llama-tied", "qwen3", "qwen3-sliding", "qwen3-moe", "mixtral", "mixtral-sliding"]


@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_answers_equal_generate_alone(tiny, prompts, ask, alone, kind):
    model = tiny(kind)
    asked = prompts(9)
    async with GenerationEngine(model, max_batch=4, version=1) as engine:
        answers = await asyncio.gather(*[engine.generate(ask(prompt)) for prompt in asked])
    assert [answer.token_ids for answer in answers] == [alone(model, prompt) for prompt in asked]


async def test_greedy_answers_equal_generate_alone_with_eager_attention(tiny, prompts, ask, alone):
    model = tiny("qwen3-sliding", attention="eager")
    asked = prompts(5)
    async with GenerationEngine(model, max_batch=4, version=1) as engine:
        answers = await asyncio.gather(*[engine.generate(ask(prompt)) for prompt in asked])
    assert [answer.token_ids for answer in answers] == [alone(model, prompt) for prompt in asked]


async def test_a_request_joins_while_others_run(tiny, prompts, ask, alone):
    model = tiny("qwen3")
    asked = prompts(5)
    async with GenerationEngine(model, max_batch=5, eos_ids=(), version=1) as engine:
        running = []
        for prompt in asked:  # the next one comes when the one before has some tokens
            running.append(engine.submit(ask(prompt, 30)))
            for _ in range(4):
                await anext(running[-1])
        answers = [await generation.answer() for generation in running]
        passes = engine.status().passes
    model.generation_config.eos_token_id = None
    assert [answer.token_ids for answer in answers] == [alone(model, prompt, 30) for prompt in asked]
    assert passes < 5 * 30  # they did share passes


async def test_bfloat16_batches_stay_close(tiny, prompts, ask):
    model = tiny("llama").to(torch.bfloat16)
    async with GenerationEngine(model, version=1) as engine:
        answers = await asyncio.gather(*[engine.generate(ask(prompt, 5, logprobs=True)) for prompt in prompts(4)])
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers)


async def test_ends_at_the_end_token_and_keeps_it(tiny, prompts, ask, alone):
    model = tiny("llama")
    asked = prompts(12)
    async with GenerationEngine(model, version=1) as engine:
        answers = await asyncio.gather(*[engine.generate(ask(prompt, 30)) for prompt in asked])
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped
    assert all(answer.token_ids.count(5) == 1 and answer.token_ids[-1] == 5 for answer in stopped)


async def test_ends_at_the_longest_context(tiny, ask, alone):
    model = tiny("llama")
    prompt = tuple(range(6, 66))
    async with GenerationEngine(model, max_length=70, eos_ids=(), version=1) as engine:
        answer = await engine.generate(ask(prompt, 50))
    model.generation_config.eos_token_id = None
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 10)
    assert answer.token_ids == alone(model, prompt, 10)


async def test_sampling_depends_on_its_seed_and_not_on_the_batch(tiny, prompts, ask):
    model = tiny("llama")
    asked = prompts(6)
    options = {"temperature": 0.9, "top_p": 0.95}

    async def answers(together: bool) -> list[list[int]]:
        async with GenerationEngine(model, max_batch=6, eos_ids=(), version=1) as engine:
            work = [engine.generate(ask(prompt, 15, seed=seed, **options)) for seed, prompt in enumerate(asked)]
            got = await asyncio.gather(*work) if together else [await one for one in work]
        assert [answer.seed for answer in got] == list(range(6))
        return [answer.token_ids for answer in got]

    first, second = await answers(together=True), await answers(together=False)
    assert first == second


async def test_a_drawn_seed_repeats_the_answer(tiny, ask):
    async with GenerationEngine(tiny(), eos_ids=(), version=1) as engine:
        first = await engine.generate(ask((9, 8, 7), temperature=2.0))
        again = await engine.generate(ask((9, 8, 7), temperature=2.0, seed=first.seed))
        other = await engine.generate(ask((9, 8, 7), temperature=2.0))
    assert first.token_ids == again.token_ids != other.token_ids
    assert first.seed != other.seed


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_samples_follow_the_distribution(temperature, top_p):
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0])
    sampler = Sampler(GenerateRequest(prompt_ids=(1,), temperature=temperature, top_p=top_p, seed=7))
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[sampler.choose(logits)[0]] += 1
    expected = (logits / temperature).softmax(-1)
    if top_p < 1:
        order = expected.argsort(descending=True).tolist()
        kept, mass = set(), 0.0
        for token in order:
            kept.add(token)
            mass += float(expected[token])
            if mass >= top_p:
                break
        expected = torch.tensor([float(value) if token in kept else 0.0 for token, value in enumerate(expected)])
        expected /= expected.sum()
    assert torch.allclose(counts / 4000, expected, atol=0.03)
    assert torch.equal(counts > 0, expected > 1e-3)


async def test_logprobs_are_those_of_a_plain_pass(tiny, prompts, ask):
    model = tiny("qwen3")
    prompt = prompts(1)[0]
    async with GenerationEngine(model, eos_ids=(), version=1) as engine:
        answer = await engine.generate(ask(prompt, 12, logprobs=True))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0].log_softmax(-1)
    expected = [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer.token_ids)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def test_logits_are_bitwise_those_of_the_model(tiny):
    model = tiny("qwen3-moe")
    async with GenerationEngine(model, version=4) as engine:
        logits, version = await engine.logits((9, 8, 7, 6))
    with torch.inference_mode():
        expected = model(torch.tensor([[9, 8, 7, 6]]), use_cache=False).logits[0]
    assert version == 4
    assert torch.equal(logits, expected)


async def test_no_keys_and_values_outlive_their_request(tiny, prompts, ask):
    async with GenerationEngine(tiny(), max_batch=4, eos_ids=(), version=1) as engine:
        running = [engine.submit(ask(prompt, 8)) for prompt in prompts(4)]
        await anext(running[0])
        assert engine.status().cache_bytes > 0
        for generation in running:
            await generation.answer()
        await engine.logits((6,))  # a turn later
        status = engine.status()
    assert (status.running, status.waiting, status.cache_bytes, status.answered, status.tokens) == (0, 0, 0, 4, 32)


def test_rows_that_leave_do_not_touch_those_that_stay(tiny, prompts):
    model = tiny("llama")
    runner = ModelRunner(model, max_rows=4, max_length=128)
    asked = prompts(4)
    texts = [[*prompt, int(runner.prefill(prompt).argmax())] for prompt in asked]
    rows = [0, 1, 2, 3]
    for leaving in (1, 0, None, None):
        logits = runner.decode([texts[row][-1] for row in rows])
        for row, line in zip(rows, logits, strict=True):
            expected = runner.logits(texts[row])[-1]
            assert torch.allclose(line, expected, atol=1e-4)
            texts[row].append(int(line.argmax()))
        if leaving is not None:  # the last row takes the place of the one that leaves
            runner.close_row(leaving)
            rows[leaving] = rows[-1]
            rows.pop()


def test_what_a_broken_version_left_behind_does_not_spread(tiny):
    """NaN times a weight of zero is NaN: what lies beyond a row's end must be finite."""
    runner = ModelRunner(tiny("llama"), max_rows=2, max_length=64)
    runner.prefill(list(range(6, 46)))
    runner.prefill(list(range(6, 36)))
    for layer in runner.cache._layers:
        for store in layer.stores:
            store[1] = float("nan")
    runner.close_row(1)
    runner.prefill([9])
    logits = runner.decode([10, 11])
    assert torch.allclose(logits[1], runner.logits([9, 11])[-1], atol=1e-4)


def test_a_model_that_ignores_its_masks_is_refused(tiny):
    model = tiny("llama")
    forward = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, attention_mask=None, **kwargs)
    with pytest.raises(UnsupportedModel, match="differs from a plain pass"):
        ModelRunner(model, max_rows=2, max_length=64)


def test_layers_with_other_state_are_refused(tiny):
    model = tiny("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        GenerationEngine(model)


async def test_a_wrong_request_lists_every_problem(tiny, ask):
    async with GenerationEngine(tiny(), max_length=16, version=1) as engine:
        with pytest.raises(RequestInvalid) as caught:
            engine.submit(ask((1,) * 20 + (97, -1), 0, temperature=-1.0, top_p=0.0, seed=-3, timeout_s=0.0))
        with pytest.raises(RequestInvalid, match="empty"):
            await engine.logits(())
    for part in ("22 tokens", "[97, -1]", "max_new_tokens", "temperature", "top_p", "seed", "timeout_s"):
        assert part in str(caught.value)
