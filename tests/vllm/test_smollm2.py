"""SmolLM2-135M's real weights from two FSDP2 ranks into a server that starts with random ones; and requests in flight.

Without prefix caching, so that requests that are kept go on with the keys and values that they have: what came before a commit
is of the old version, what comes after of the new one, and a replay with transformers finds every token.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from syncline.adapters.engines.checkpoints import load_model, load_tokenizer
from syncline.adapters.engines.replay import Replayer
from syncline.adapters.engines.requests import Span

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = "The capital of France is"
LONG = 200
TRIES = 5


class Smol(NamedTuple):
    folder: str
    model: nn.Module
    other: dict[str, torch.Tensor]
    tokenizer: Any
    prompt: list[int]

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Odd versions are the real weights, even ones others: every norm scaled."""
        return self.model.state_dict() if version % 2 else self.other


@pytest.fixture(scope="module")
def smol(tmp_path_factory) -> Smol:
    """transformers' model in float32, in memory of its own; and a folder for vLLM with its config and tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    model = load_model("smollm2", dtype=torch.float32)
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer is not None
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)  # read by the source's ranks: converting the package's file takes each of them much longer
    tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    other = {name: t * 0.9 if "layernorm" in name else t.clone() for name, t in model.state_dict().items()}
    return Smol(str(folder), model, other, tokenizer, list(tokenizer(QUESTION)["input_ids"]))  # type: ignore[operator]


@pytest.fixture(scope="module")
def server(servers, smol):
    arguments = ["--load-format", "dummy", "--no-enable-prefix-caching", "--max-model-len", "512"]
    return servers(Path(smol.folder), *arguments)


async def test_the_answer_becomes_paris(server, smol, source_ranks) -> None:
    """And then 20 pushes, of two weights in turn, each of them checked."""
    before = await server.greedy(smol.prompt, 1)
    assert smol.tokenizer.decode(before.token_ids) != " Paris"

    source = source_ranks(2)
    await source.call("load", model=smol.folder)
    await source.call("connect", urls=[server.url], config={"bucket_bytes": "16MiB"})
    assert (await server.status()).state == "FENCED" and await server.says_nothing(smol.prompt)
    report = await source.call("push", version=1)
    assert report["ok"], report["text"]
    assert report["tasks"] > 8

    answer = await server.greedy(smol.prompt, 24)
    assert smol.tokenizer.decode(answer.token_ids[:1]) == " Paris"
    assert answer.token_ids == greedy(smol.model, smol.weights(1), smol.prompt, 24)

    texts = {version: greedy(smol.model, smol.weights(version), smol.prompt, 16) for version in (0, 1)}
    assert texts[0] != texts[1]
    for version in range(2, 22):
        await source.call("scale_norms", factor=0.9 if version % 2 == 0 else 1 / 0.9)
        report = await source.call("push", version=version)
        assert report["ok"], report["text"]
        answer = await server.greedy(smol.prompt, 16)
        assert answer.token_ids == texts[version % 2]
        assert [span.version for span in answer.versions] == [version]
    await source.call("close")


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_a_request_in_flight_is_kept(server, smol, source, well, landing) -> None:
    held = copy.deepcopy(smol.model)
    engine = await source(held, server, in_flight="keep", landing=landing)
    version = await first_push(server, engine, held, smol, well) - 1
    answer = None
    for _ in range(TRIES):  # on a busy machine the request may end before the commit comes
        version += 1
        running = asyncio.create_task(server.greedy(smol.prompt, LONG, timeout_s=120))
        await until_running(server, 10)
        held.load_state_dict(smol.weights(version + 1))
        well(await engine.push(version + 1))
        answer = await running
        if len(answer.versions) == 2:
            break
    assert answer is not None

    assert (answer.status, answer.finish_reason, len(answer.token_ids)) == (200, "length", LONG)
    first, second = answer.versions
    assert (first.version, second.version) == (version, version + 1)
    assert 0 < first.end == second.start < second.end == LONG  # the token from which on the version is another one
    replayer = Replayer(smol.model, smol.weights, tolerance=2e-3, max_length=512)
    found = replayer.check(smol.prompt, answer.token_ids, answer.versions)
    assert found.ok, found.problem
    alone = [Span(version=version + 1, start=0, end=LONG)]  # and the check is able to fail
    assert not replayer.check(smol.prompt, answer.token_ids, alone).ok


async def test_a_request_in_flight_is_aborted_and_can_be_sent_again(server, smol, source, well) -> None:
    held = copy.deepcopy(smol.model)
    engine = await source(held, server, in_flight="abort")
    version = await first_push(server, engine, held, smol, well)
    running = asyncio.create_task(server.greedy(smol.prompt, LONG, timeout_s=120))
    await until_running(server, 5)
    held.load_state_dict(smol.weights(version + 1))
    well(await engine.push(version + 1))
    answer = await running
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) < LONG
    assert {span.version for span in answer.versions} <= {version}
    again = await server.greedy(smol.prompt, 12)
    assert (again.finish_reason, [span.version for span in again.versions]) == ("length", [version + 1])
    assert again.token_ids == greedy(smol.model, smol.weights(version + 1), smol.prompt, 12)


async def test_a_push_that_drains_waits_for_requests_in_flight(server, smol, source, well) -> None:
    held = copy.deepcopy(smol.model)
    engine = await source(held, server, in_flight="drain")
    version = await first_push(server, engine, held, smol, well)
    running = asyncio.create_task(server.greedy(smol.prompt, 100, timeout_s=120))
    await until_running(server, 3)
    held.load_state_dict(smol.weights(version + 1))
    well(await engine.push(version + 1))
    answer = await running
    assert [(span.version, span.end) for span in answer.versions] == [(version, 100)]


async def first_push(server, engine, held, smol, well) -> int:
    """The server serves a version whose weights `Smol.weights` knows."""
    version = ((await server.settled()).version or 0) + 1
    held.load_state_dict(smol.weights(version))
    well(await engine.push(version))
    return version


async def until_running(server, tokens: int) -> None:
    """A request has been given so many tokens at least."""
    before = await server.gauge("vllm:generation_tokens_total")
    async with asyncio.timeout(60):
        while await server.gauge("vllm:generation_tokens_total") < before + tokens:
            await asyncio.sleep(0.02)


def greedy(model: nn.Module, weights: dict[str, torch.Tensor], prompt: list[int], count: int) -> list[int]:
    """Transformers' own greedy answer."""
    weights = {name: weights[name] for name, _ in model.named_parameters()}  # one name of what is tied
    with torch.inference_mode():
        past, ids, found = None, torch.tensor([prompt]), []
        for _ in range(count):
            out = torch.func.functional_call(
                model, weights, kwargs={"input_ids": ids, "past_key_values": past, "use_cache": True}, tie_weights=True
            )
            past, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            found.append(int(ids))
    return found
