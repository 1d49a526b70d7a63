"""Requests that are being answered when a push commits."""

from __future__ import annotations

import asyncio

import pytest

from syncline.adapters.engines.replay import Replayer
from syncline.adapters.engines.requests import Span
from syncline.adapters.engines.sglang import SGLangFront, SGLangTarget
from syncline.adapters.engines.sglang.front import CacheNotFlushed
from syncline.adapters.engines.sglang.serving import SGLangServing

PROMPT = [3, 17, 29, 71, 5, 90]
TOKENS = 200
TRIES = 5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def spans_of(answer) -> list[Span]:
    return [Span(version=int(version), start=start, end=end) for version, start, end in answer.spans]


async def push_into_a_request(server, source, models, *, caught=lambda answer: len(answer.spans) == 2, **options):
    """A long request, and a push while it runs; returns the answer, the target's part of the report, and the version.

    Odd versions are ``models[1]``, even ones ``models[2]``, which is what is pushed; version 1 is there. On a busy machine the
    request may have been answered before the commit comes: then all of it is done again.
    """
    for version in range(2, 2 * TRIES + 1, 2):
        started = asyncio.Event()
        request = asyncio.create_task(server.generate(PROMPT, TOKENS, started=started))
        await started.wait()
        result = await source.push(version, models[2], **options)
        assert result.ok, result.error
        answer = await request
        if caught(answer):
            return answer, result, version
        assert (await source.push(version + 1, models[1])).ok
    pytest.fail(f"no push in {TRIES} came while a request was being answered")


async def test_kept_in_place(llama_tp1, kit) -> None:
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = {version: kit.fresh_model(config, 30 + version) for version in (1, 2)}
    source = await kit.trainer(config, SGLangTarget(llama_tp1.url), in_flight="keep")
    assert (await source.push(1, models[1])).ok
    answer, _, version = await push_into_a_request(llama_tp1, source, models)

    assert len(answer.tokens) == TOKENS
    first, second = spans_of(answer)
    assert (first.version, second.version, second.end) == (version - 1, version, TOKENS)
    replayer = Replayer(kit.fresh_model(config, 0), lambda number: models[2 - number % 2].state_dict())
    assert replayer.check(PROMPT, answer.tokens, [first, second]).ok
    for shift in (-1, 1):  # and the token is that one: any other is found out
        at = first.end + shift
        moved = [Span(version=version - 1, start=0, end=at), Span(version=version, start=at, end=TOKENS)]
        assert not replayer.check(PROMPT, answer.tokens, moved).ok
    after = await llama_tp1.generate(PROMPT, 16)
    assert after.tokens == kit.greedy(models[2], PROMPT, 16)


@pytest.mark.parametrize("flush", [False, True])
async def test_kept_by_reading_anew(qwen2_tp2, llama_tp1, kit, flush: bool) -> None:
    """What a server does that has a prefix cache; and any, if keys and values are to be dropped (``flush_cache``)."""
    server, kind = (llama_tp1, "Llama") if flush else (qwen2_tp2, "Qwen2")
    await kit.released(server)
    config = kit.tiny_config(kind)
    models = {version: kit.fresh_model(config, 40 + version) for version in (1, 2)}
    source = await kit.trainer(config, SGLangTarget(server.url), in_flight="keep")
    assert (await source.push(1, models[1])).ok
    answer, _, version = await push_into_a_request(server, source, models, flush_cache=flush)

    assert len(answer.tokens) == TOKENS
    first, second = spans_of(answer)
    assert (first.version, second.version, second.end) == (version - 1, version, TOKENS)
    assert answer.tokens[: first.end] == kit.greedy(models[1], PROMPT, first.end)
    read = PROMPT + answer.tokens[: first.end]
    assert answer.tokens[first.end :] == kit.greedy(models[2], read, TOKENS - first.end)
    # What the request has left in the cache was read by the new weights alone: later ones may have it.
    after = await server.generate(PROMPT + answer.tokens[:40], 16)
    assert after.tokens == kit.greedy(models[2], PROMPT + answer.tokens[:40], 16)


async def test_the_prefix_cache_is_dropped(qwen2_tp2, kit) -> None:
    await kit.released(qwen2_tp2)
    config = kit.tiny_config("Qwen2")
    models = {version: kit.fresh_model(config, 50 + version) for version in (1, 2)}
    source = await kit.trainer(config, SGLangTarget(qwen2_tp2.url))
    long = [(7 * i) % 120 + 4 for i in range(64)]
    assert (await source.push(1, models[1])).ok
    assert (await qwen2_tp2.generate(long, 8)).cached == 0
    assert (await qwen2_tp2.generate(long, 8)).cached > 0  # there is a cache
    assert (await source.push(2, models[2])).ok
    answer = await qwen2_tp2.generate(long, 8)
    assert (answer.cached, answer.tokens) == (0, kit.greedy(models[2], long, 8))


async def test_aborted(llama_tp1, kit) -> None:
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = {version: kit.fresh_model(config, 60 + version) for version in (1, 2)}
    source = await kit.trainer(config, SGLangTarget(llama_tp1.url), in_flight="abort")
    assert (await source.push(1, models[1])).ok
    answer, _, version = await push_into_a_request(
        llama_tp1, source, models, caught=lambda answer: answer.finish["type"] == "abort"
    )

    assert "abort" in answer.finish["message"].lower()
    assert len(answer.tokens) < TOKENS
    assert answer.tokens == kit.greedy(models[1], PROMPT, len(answer.tokens))
    again = await llama_tp1.generate(PROMPT, 16)
    assert again.tokens == kit.greedy(models[2], PROMPT, 16)
    assert again.spans == [(str(version), 0, 16)]


async def test_drained(llama_tp1, kit) -> None:
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = {version: kit.fresh_model(config, 70 + version) for version in (1, 2)}
    source = await kit.trainer(config, SGLangTarget(llama_tp1.url), in_flight="drain")
    assert (await source.push(1, models[1])).ok
    answer, _, version = await push_into_a_request(llama_tp1, source, models, caught=lambda _: True)
    assert answer.spans == [(str(version - 1), 0, TOKENS)]
    assert answer.tokens == kit.greedy(models[1], PROMPT, TOKENS)
    assert (await llama_tp1.generate(PROMPT, 16)).tokens == kit.greedy(models[2], PROMPT, 16)


async def test_a_refused_flush_is_not_ignored(qwen2_tp2, kit, monkeypatch) -> None:
    """SGLang says that an update failed when only the flush after it was refused: new weights, and an old cache."""
    await kit.released(qwen2_tp2)
    config = kit.tiny_config("Qwen2")
    models = {version: kit.fresh_model(config, 110 + version) for version in (1, 2)}
    source = await kit.trainer(config, SGLangTarget(qwen2_tp2.url))
    assert (await source.push(1, models[1])).ok
    long = [(7 * i) % 120 + 4 for i in range(64)]
    assert (await qwen2_tp2.generate(long, 8)).spans == [("1", 0, 8)]

    update, refused = SGLangFront.update_from_distributed, []

    async def flushing(front, dialect, *, version, **rest):
        try:
            await update(front, dialect, version=version, **{**rest, "flush_cache": version is not None})
        except CacheNotFlushed as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(SGLangFront, "update_from_distributed", flushing)
    monkeypatch.setattr(SGLangServing, "_mode", lambda *_: "in_place")  # although this server has a prefix cache
    answer, result, version = await push_into_a_request(qwen2_tp2, source, models, caught=lambda _: bool(refused))
    assert "cache was not flushed" in refused[0]
    assert (result.state, result.version) == ("COMMITTED", version)
    status, info = await qwen2_tp2.call("GET", "model_info")
    assert (status, info["weight_version"]) == (200, str(version))
    assert len(answer.tokens) == TOKENS
    again = await qwen2_tp2.generate(long, 8)
    assert (again.cached, again.tokens) == (0, kit.greedy(models[2], long, 8))
