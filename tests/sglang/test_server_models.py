"""Architectures whose checkpoints differ: norms on queries and keys, experts."""

from __future__ import annotations

import pytest

from syncline.adapters.engines.sglang import SGLangTarget

PROMPT = [3, 17, 29, 71, 5, 90]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3Moe", "Mixtral"])
def served(request, start_server, tiny_folder):
    """A server with random weights of one architecture, alone in its time."""
    server = start_server(tiny_folder(request.param), "--skip-tokenizer-init", "--load-format", "dummy")
    yield request.param, server
    server.kill()


async def test_alternating_pushes(served, kit) -> None:
    kind, server = served
    await server.ready()
    config = kit.tiny_config(kind)
    models = [kit.fresh_model(config, seed) for seed in (81, 82)]
    source = await kit.trainer(config, SGLangTarget(server.url))
    for version in range(1, 5):
        result = await source.push(version, models[version % 2])
        assert result.ok, result.error
        answer = await server.generate(PROMPT, 12)
        assert answer.tokens == kit.greedy(models[version % 2], PROMPT, 12)
