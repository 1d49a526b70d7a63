"""Several sources, each with a stand-in of its own, and one server: they take turns or are refused, and never interleave."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import psutil
import pytest

from syncline.adapters.engines.fleet import states
from syncline.adapters.engines.sglang import SGLangOptions, SGLangTarget
from syncline.engine.errors import BusyError, SynclineError, TargetLost, VersionConflict

PROMPT = [3, 17, 29, 71, 5, 90]
SMALL = {"bucket_bytes": "32KiB", "max_tmp_bytes": "1MiB"}
OPTIONS = SGLangOptions(bucket_bytes="48KiB")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def outcome(source, version: int, model) -> str:
    """What a push comes to: ``ok``, or the error's class."""
    try:
        result = await source.push(version, model)
    except SynclineError as error:
        return type(error).__name__
    return "ok" if result.ok else type(result.error).__name__


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_two_sources_at_once(llama_tp1, kit, landing: str) -> None:
    """Both push at the same time, again and again: every answer is whole, every version's weights are its source's own."""
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = [kit.fresh_model(config, 150 + number) for number in range(2)]
    wanted = [kit.greedy(model, PROMPT, 12) for model in models]
    sources = [await kit.trainer(config, SGLangTarget(llama_tp1.url, OPTIONS), landing=landing, **SMALL) for _ in models]
    answers, stop = [], asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            answers.append(await llama_tp1.generate(PROMPT, 12))

    clients = [asyncio.create_task(client()) for _ in range(2)]
    said: list[str] = []
    committed: dict[str, int] = {}
    for turn in range(8):
        versions = [4 * turn + 1, 4 * turn + 2]
        found = await asyncio.gather(*(outcome(sources[at], versions[at], models[at]) for at in range(2)))
        committed |= {str(versions[at]): at for at in range(2) if found[at] == "ok"}
        for at in [at for at in range(2) if found[at] != "ok"]:  # alone it may; at first it may find what the other one left
            for _ in range(3):
                found.append(await outcome(sources[at], version := 4 * turn + 3 + at, models[at]))
                if found[-1] == "ok":
                    committed[str(version)] = at
                    break
        said += found
        answer = await llama_tp1.generate(PROMPT, 12)
        latest = answer.spans[-1][0]
        if committed:
            assert latest == max(committed, key=int)  # what was said to be served is, and versions only rise
            assert answer.tokens == wanted[committed[latest]]
    stop.set()
    await asyncio.gather(*clients)
    assert len(committed) >= 8 and len(set(committed.values())) == 2, said
    refusals = {BusyError.__name__, TargetLost.__name__, VersionConflict.__name__}
    assert set(said) - {"ok"} <= refusals, said
    assert set(said) & refusals, said
    whole = [a for a in answers if len({version for version, *_ in a.spans}) == 1 and a.finish.get("type") == "length"]
    assert whole
    for answer in whole:
        version = answer.spans[0][0]
        if version != "default":
            assert answer.tokens == wanted[committed[version]], version


async def test_a_source_that_pushes_less_than_another_has(llama_tp1, kit) -> None:
    """What another one has committed meanwhile is what counts."""
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = [kit.fresh_model(config, 160 + number) for number in range(2)]
    sources = [await kit.trainer(config, SGLangTarget(llama_tp1.url, OPTIONS)) for _ in models]
    assert await outcome(sources[0], 20, models[0]) == "ok"
    assert await outcome(sources[1], 15, models[1]) in ("TargetLost", "VersionConflict")
    assert await outcome(sources[1], 15, models[1]) == "VersionConflict"
    assert await outcome(sources[1], 20, models[1]) == "VersionConflict"
    assert (await llama_tp1.generate(PROMPT, 12)).tokens == kit.greedy(models[0], PROMPT, 12)
    assert await outcome(sources[1], 21, models[1]) == "ok"
    answer = await llama_tp1.generate(PROMPT, 12)
    assert (answer.tokens, answer.spans) == (kit.greedy(models[1], PROMPT, 12), [("21", 0, 12)])


async def test_a_stopped_source_keeps_others_out_and_a_killed_one_does_not(llama_tp1, kit) -> None:
    """It stops between two buckets of its commit, and may go on any time; the kernel tells when it cannot any more."""
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    model = kit.fresh_model(config, 170)
    other = await kit.trainer(config, SGLangTarget(llama_tp1.url, OPTIONS))
    source = await kit.ranks(1, kit.tiny_folder("Llama"))
    await source.call("connect", url=llama_tp1.url, options={"bucket_bytes": "48KiB"}, **SMALL)
    await source.arm(0, point="hand on", nth=3, signal=int(signal.SIGSTOP))
    pushing = asyncio.create_task(source.call("push", version=1, model=0))
    # not before it has got there: killed while it makes the group, it would leave the server waiting for it
    async with asyncio.timeout(60):
        while psutil.Process(source.processes[0].pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.05)
    assert (await states([llama_tp1.url], timeout_s=20))[0].state == "UPDATING"
    with pytest.raises(SynclineError, match="another source"):
        result = await other.push(2, model)
        raise result.error
    (found,) = await states([llama_tp1.url], timeout_s=20)
    assert (found.state, found.version) == ("UPDATING", None)
    source.processes[0].kill()
    with contextlib.suppress(Exception):
        await pushing
    async with asyncio.timeout(60):
        while (said := await outcome(other, 2, model)) != "ok":
            assert said in ("TargetLost", "BusyError")
            await asyncio.sleep(0.2)
    answer = await llama_tp1.generate(PROMPT, 12)
    assert (answer.tokens, answer.spans) == (kit.greedy(model, PROMPT, 12), [("2", 0, 12)])
