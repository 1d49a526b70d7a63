"""SmolLM2-135M from two FSDP2 ranks into a server that starts with random weights."""

from __future__ import annotations

import asyncio

import pytest

from syncline.adapters.engines.checkpoints import load_model, load_tokenizer

QUESTION = "The capital of France is"
QUESTIONS = (QUESTION, "Once upon a time there was", "def fibonacci(n):")
TOKENS = 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def smollm2_server(start_server, smollm2_folders):
    server = start_server(smollm2_folders[0], "--load-format", "dummy")
    yield server
    server.kill()


async def test_real_weights_arrive_twenty_times(smollm2_server, smollm2_folders, kit) -> None:
    server = smollm2_server
    source, _ = await asyncio.gather(kit.ranks(2, *smollm2_folders), server.ready())
    tokenizer = load_tokenizer(smollm2_folders[0])
    prompts = [tokenizer.encode(question) for question in QUESTIONS]
    wanted = []
    for folder in smollm2_folders:
        model = load_model(folder)
        wanted.append([kit.greedy(model, prompt, TOKENS) for prompt in prompts])
        del model
    assert tokenizer.decode(wanted[0][0][:1]) == " Paris"
    assert wanted[0] != wanted[1]

    before = await server.generate(QUESTION, 1)
    assert before.text != " Paris"
    await source.call("connect", url=server.url, push_timeout_s=120)
    for version in range(1, 21):
        report = await source.call("push", version=version, model=(version - 1) % 2)
        assert report["ok"], report
        expected = wanted[(version - 1) % 2]
        if version <= 2:
            answers = await asyncio.gather(*(server.generate(prompt, TOKENS) for prompt in prompts))
            assert [answer.tokens for answer in answers] == expected
            assert {answer.spans[0] for answer in answers} == {(str(version), 0, TOKENS)}
        answer = await server.generate(QUESTION, 8)
        assert answer.tokens == expected[0][:8]
        assert answer.spans == [(str(version), 0, 8)]
        if version % 2:
            assert answer.text.startswith(" Paris")
    await source.call("close")
