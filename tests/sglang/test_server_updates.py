"""Pushes into a real server: every version's answers are transformers' own, token for token."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from syncline.adapters.engines.fleet import states
from syncline.adapters.engines.sglang import SGLangOptions, SGLangReceiver, SGLangTarget
from syncline.engine import RemoteTarget
from syncline.engine.errors import ConfigError, TargetUnreachable, VersionConflict

PROMPT = [3, 17, 29, 71, 5, 90]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_alternating_pushes(llama_tp1, kit) -> None:
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = [kit.fresh_model(config, seed) for seed in (11, 12)]
    wanted = [kit.greedy(model, PROMPT, 16) for model in models]
    assert wanted[0] != wanted[1]
    source = await kit.trainer(config, SGLangTarget(llama_tp1.url))
    for version in range(1, 21):
        result = await source.push(version, models[version % 2])
        assert (result.ok, result.state, result.version) == (True, "COMMITTED", version), result.error
        answer = await llama_tp1.generate(PROMPT, 16)
        assert answer.tokens == wanted[version % 2]
        assert answer.spans == [(str(version), 0, 16)]
    (found,) = await states([llama_tp1.url], timeout_s=30)
    assert (found.kind, found.state, found.version) == ("sglang", "COMMITTED", 20)


@pytest.mark.parametrize("landing", ["staged", "streamed"])
@pytest.mark.parametrize("transport", ["distributed", "disk", "tensor"])
async def test_ways_and_landings(qwen2_tp2, kit, transport: str, landing: str) -> None:
    await kit.released(qwen2_tp2)
    config = kit.tiny_config("Qwen2")
    options = SGLangOptions(transport=transport, bucket_bytes="40KiB")
    source = await kit.trainer(config, SGLangTarget(qwen2_tp2.url, options), landing=landing, bucket_bytes="32KiB")
    for version, seed in ((1, 21), (2, 22), (3, 21)):
        model = kit.fresh_model(config, seed)
        result = await source.push(version, model)
        assert result.ok, result.error
        answer = await qwen2_tp2.generate(PROMPT, 12)
        assert answer.tokens == kit.greedy(model, PROMPT, 12)
        assert answer.cached == 0  # nothing that older weights have read


async def test_another_trainer_finds_what_the_server_holds(llama_tp1, kit) -> None:
    """A stand-in that comes later reads the version off the server; nothing of it is taken for the same without proof."""
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = {version: kit.fresh_model(config, 120 + version) for version in (7, 8)}
    first = await kit.trainer(config, SGLangTarget(llama_tp1.url))
    assert (await first.push(7, models[7])).ok
    await first.engine.close()
    target = SGLangTarget(llama_tp1.url)
    second = await kit.trainer(config, target)
    assert target.standin is not None
    assert (target.standin.state, target.standin.version) == ("COMMITTED", 7)
    assert (await llama_tp1.generate(PROMPT, 12)).tokens == kit.greedy(models[7], PROMPT, 12)
    with pytest.raises(VersionConflict, match="push the new content under a higher version"):
        await second.push(7, models[8])
    assert (await second.push(8, models[8])).ok
    answer = await llama_tp1.generate(PROMPT, 12)
    assert (answer.tokens, answer.spans) == (kit.greedy(models[8], PROMPT, 12), [("8", 0, 12)])


async def test_memory_that_cannot_be_released(llama_tp1, kit) -> None:
    await kit.released(llama_tp1)
    async with SGLangReceiver(llama_tp1.url) as receiver:
        with pytest.raises(ConfigError, match="enable-memory-saver"):
            await receiver.release_memory(["weights"])
        with pytest.raises(ConfigError, match="'kv_cache' is not released"):
            await receiver.resume_memory(["kv_cache"])
        assert receiver.state == "COMMITTED"
    assert (await llama_tp1.generate(PROMPT, 4)).spans == [("default", 0, 4)]


async def test_nothing_answers(kit) -> None:
    target = SGLangTarget("http://127.0.0.1:9")
    with pytest.raises(TargetUnreachable, match="is the server up"):
        await kit.trainer(kit.tiny_config("Llama"), target)


async def test_a_stand_in_of_its_own_process(llama_tp1, kit, tmp_path) -> None:
    """``syncline serve-sglang`` beside the server; when it ends, the server goes on with what it has."""
    await kit.released(llama_tp1)
    ready = tmp_path / "ready.json"
    command = ["-m", "syncline.bench.cli", "serve-sglang", llama_tp1.url, "--ready-file", str(ready)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(120):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        config = kit.tiny_config("Llama")
        model = kit.fresh_model(config, 130)
        source = await kit.trainer(config, RemoteTarget(json.loads(ready.read_text())["control"]))
        assert (await source.push(1, model)).ok
        assert (await llama_tp1.generate(PROMPT, 12)).tokens == kit.greedy(model, PROMPT, 12)
        await source.engine.close()
    finally:
        process.terminate()
        await process.wait()
    assert not ready.exists()
    answer = await llama_tp1.generate(PROMPT, 12)
    assert (answer.tokens, answer.spans) == (kit.greedy(model, PROMPT, 12), [("1", 0, 12)])
