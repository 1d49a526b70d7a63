"""Tiny real models of several families, TP1 and TP2, staged and streamed: a server says what it was sent."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from syncline.adapters.engines.fleet import states
from syncline.adapters.trainers import ModuleSource
from syncline.scheduler.errors import PlanError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FAMILIES = {
    "qwen2": ["--no-enable-prefix-caching"],
    "qwen3_moe": [],  # with prefix caching
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, servers, tiny):
    model = tiny(request.param)
    # Started with the endpoint plugin where it may be: see `test_a_server_with_random_weights_is_fenced`.
    environment = {"VLLM_PLUGINS": "syncline"} if request.param == "qwen2" else {}
    arguments = ["--load-format", "dummy", "--skip-tokenizer-init", *FAMILIES[request.param]]
    server = servers(model.folder, *arguments, environment=environment)
    yield model, server
    server.end()


async def test_a_server_with_random_weights_is_fenced(served) -> None:
    """From its first second with ``VLLM_PLUGINS=syncline``, else from when a source has found it."""
    model, server = served
    if model.family == "qwen2":
        assert await server.is_paused()
    else:
        assert not await server.is_paused()
        assert (await server.greedy((5, 6, 7), 4)).status == 200
    status = await server.status()
    assert (status.state, status.version) == ("FENCED", None)
    assert await server.is_paused()
    assert await server.says_nothing()
    (found,) = await states([server.url], timeout_s=30)
    assert (found.kind, found.state, found.serves) == ("vllm", "FENCED", False)


async def test_pushes_arrive(served, source, arrived, well) -> None:
    model, server = served
    first, second = model.model(1), model.model(2)
    version = (await server.status()).version or 0
    for landing in ("staged", "streamed", "staged"):
        for held in (first, second):
            version += 1
            engine = await source(held, server, landing=landing, bucket_bytes=100_000)
            report = well(await engine.push(version))
            assert report.tasks > 3
            await engine.close()
            await arrived(server, held, version)


def canonical(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    source = ModuleSource(model)
    manifest, buffers = source.manifest(), source.buffers()
    for piece in manifest.pieces:
        tensor = buffers[piece.buffer].as_strided(piece.box.shape, piece.strides, piece.offset)
        found[manifest.tensors[piece.tensor].name] = tensor.clone()
    return found


async def test_a_source_that_lacks_tensors_is_refused_before_a_byte_moves(served, source, well) -> None:
    """vLLM's own finalizing would take what came of a fused parameter and leave the rest as it was, without a word."""
    model, server = served
    engine = await source(model.model(3), server)
    before = ((await server.status()).version or 0) + 1
    well(await engine.push(before))
    answer = await server.greedy((5, 6, 7), 8)
    whole = canonical(model.model(1))
    only_q = {name: tensor for name, tensor in whole.items() if "k_proj" not in name and "v_proj" not in name}
    wrong = {name: tensor[:-1] if name.endswith("o_proj.weight") else tensor for name, tensor in whole.items()}
    more = {**whole, "model.layers.0.mlp.extra.weight": torch.zeros(4)}
    for weights, named in ((only_q, "k_proj"), (wrong, "o_proj"), (more, "extra")):
        with pytest.raises(PlanError, match=named):
            await source(weights, server)
    assert (await server.status()).version == before
    assert (await server.greedy((5, 6, 7), 8)).token_ids == answer.token_ids


async def test_no_answer_uses_keys_and_values_of_older_weights(served, source, reference, well) -> None:
    """With prefix caching: what was cached is dropped at a commit, and a request in flight is computed anew from its tokens."""
    model, server = served
    caching = model.family == "qwen3_moe"
    first, second = model.model(4), model.model(5)
    version = ((await server.status()).version or 0) + 1
    prompt = [3 + i * 7 % 250 for i in range(150)]  # longer than a block
    held = {name: tensor.clone() for name, tensor in canonical(first).items()}
    engine = await source(held, server)
    well(await engine.push(version))
    before = await hits(server)
    for _ in range(2):
        assert (await server.greedy(prompt, 6)).token_ids == reference(first, prompt, 6)
    assert (await hits(server) > before) == caching

    running = asyncio.create_task(server.greedy(prompt, 100))
    while not (running.done() or await server.gauge("vllm:num_requests_running")):  # a quick machine is done before
        await asyncio.sleep(0.01)
    for name, tensor in canonical(second).items():
        held[name].copy_(tensor)
    well(await engine.push(version + 1))
    assert (await server.greedy(prompt, 6)).token_ids == reference(second, prompt, 6)
    kept = await running
    assert (kept.finish_reason, len(kept.token_ids)) == ("length", 100)
    if caching and len(kept.versions) > 1:
        end = kept.versions[0].end
        assert kept.token_ids[:end] == reference(first, prompt, end)
        assert kept.token_ids[end:] == reference(second, [*prompt, *kept.token_ids[:end]], 100 - end)
    assert (await server.greedy(prompt, 6)).token_ids == reference(second, prompt, 6)


async def hits(server) -> float:
    return await server.gauge("vllm:prefix_cache_hits_total")
