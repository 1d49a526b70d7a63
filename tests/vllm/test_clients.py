"""Eight clients ask two vLLM replicas all the while, through 30 pushes: no answer is of mixed weights, and none is lost.

Each version has weights of its own. An answer that went on over a commit has the keys and values of the older version for what
came before it; a replay with transformers, version by version, finds every token.
"""

from __future__ import annotations

import asyncio
import itertools

import aiohttp
import pytest
import torch

from syncline.adapters.engines.fleet import common_version, states
from syncline.adapters.engines.replay import Replayer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PUSHES, CLIENTS = 30, 8


@pytest.fixture(scope="module")
def replicas(servers, tiny):
    model = tiny("qwen2")
    arguments = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    started = [servers(model.folder, *arguments, wait=False) for _ in range(2)]
    for server in started:
        server.until_ready()
    return model, started


async def test_no_answer_is_mixed_and_none_is_lost(replicas, source, well) -> None:
    tiny, servers = replicas
    model = tiny.model(0)
    weights = {version: tiny.model(version).state_dict() for version in range(1, PUSHES + 2)}
    held = tiny.model(0)
    engine = await source(held, *servers, in_flight="keep")

    async def push(version: int) -> None:
        held.load_state_dict(weights[version])
        report = well(await engine.push(version))
        assert {target.version for target in report.targets.values()} == {version}

    await push(1)
    over, answers = asyncio.Event(), []

    async def client(number: int) -> None:
        dice = torch.Generator().manual_seed(number)
        # a connection each: the server closes one that idles for 5 s, which a request may meet on a busy machine
        alone, limit = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=alone, timeout=limit) as session:
            for turn in itertools.count(number):
                if over.is_set():
                    return
                size = int(torch.randint(1, 40, (), generator=dice))
                prompt = torch.randint(3, 256, (size,), generator=dice).tolist()
                answers.append((prompt, await servers[turn % 2].ask(session, prompt, 40)))

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        for version in range(2, PUSHES + 2):
            await push(version)
            before = len(answers)
            async with asyncio.timeout(60):
                while len(answers) < before + 2:
                    await asyncio.sleep(0.005)
        over.set()

    found = await states([server.url for server in servers], timeout_s=30)
    assert [(state.kind, state.serves) for state in found] == [("vllm", True)] * 2, found
    assert common_version(found) == PUSHES + 1
    assert {answer.status for _, answer in answers} == {200}
    assert {(answer.finish_reason, len(answer.token_ids)) for _, answer in answers} == {("length", 40)}
    served = {span.version for _, answer in answers for span in answer.versions}
    assert len(served & set(range(1, PUSHES + 2))) > PUSHES * 2 // 3 and min(served) >= 1
    assert sum(len(answer.versions) > 1 for _, answer in answers) > 3  # went on over a commit
    replayer = Replayer(model, lambda version: weights[version], tolerance=2e-3, max_length=128)
    for prompt, answer in sorted(answers, key=lambda pair: [span.version for span in pair[1].versions]):
        found = replayer.check(prompt, answer.token_ids, answer.versions)
        assert found.ok, found.problem
