"""Over HTTP: answers, streams, refusals, operators, clients that go away."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import numpy as np
import pytest
import torch

from syncline.adapters.engines.byte_tokenizer import ByteTokenizer
from syncline.adapters.engines.generation import GenerationEngine
from syncline.adapters.engines.http_errors import secret_guard
from syncline.adapters.engines.replay import Replayer
from syncline.adapters.engines.requests import Span
from syncline.adapters.engines.server import GenerationServer
from syncline.engine.auth import NONCE, Signer
from syncline.engine.errors import ClosedError, ConfigError


@pytest.fixture
async def serve(tiny):
    """``await serve(...)``: an engine and a client session whose base is the server in front of it."""
    stack = []

    async def start(model=None, *, tokenizer=None, receiver=None, guard=None, version=1, **options):
        engine = GenerationEngine(model or tiny(), version=version, eos_ids=(), **options)
        server = GenerationServer(engine, tokenizer, receiver=receiver, guard=guard)
        await engine.start()
        await server.start()
        client = aiohttp.ClientSession(server.url)
        stack.extend([client, server, engine])
        return engine, client

    yield start
    for thing in stack:
        await thing.close()


async def post(client, path, **body):
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def events(response):
    """Server-sent events as (name, data)."""
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def until(engine, holds):
    async with asyncio.timeout(20):
        await engine._signal.until(lambda: holds(engine.status()))


async def test_generate_by_ids(serve, tiny, alone):
    _, client = await serve()
    model = tiny()
    model.generation_config.eos_token_id = None
    status, reply = await post(client, "/generate", prompt_ids=[9, 8, 7], max_new_tokens=6)
    assert status == 200
    assert reply == {
        "text": "",
        "token_ids": alone(model, (9, 8, 7), 6),
        "versions": [{"version": 1, "start": 0, "end": 6}],
        "finish_reason": "length",
        "prompt_tokens": 3,
        "seed": None,
        "logprobs": None,
    }


async def test_generate_by_text_with_seed_and_logprobs(serve):
    _, client = await serve(tokenizer=ByteTokenizer())
    asked = {"prompt": "\t\n\f", "max_new_tokens": 6, "temperature": 1.5, "seed": 3, "logprobs": True}
    _, reply = await post(client, "/generate", **asked)
    _, again = await post(client, "/generate", **asked)
    assert reply == again
    assert reply["prompt_tokens"] == 3
    assert reply["text"] == bytes(reply["token_ids"]).decode()
    assert (reply["seed"], len(reply["logprobs"])) == (3, 6)


async def test_streams_end_with_the_whole_answer(serve):
    _, client = await serve(tokenizer=ByteTokenizer())
    _, whole = await post(client, "/generate", prompt_ids=[9, 8, 7], max_new_tokens=12)
    async with client.post("/generate", json={"prompt_ids": [9, 8, 7], "max_new_tokens": 12, "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        got = [event async for event in events(response)]
    assert [name for name, _ in got] == ["token"] * 12 + ["done"]
    assert [data["token_id"] for _, data in got[:-1]] == whole["token_ids"]
    assert [(data["position"], data["version"]) for _, data in got[:-1]] == [(i, 1) for i in range(12)]
    assert "".join(data["text"] for _, data in got[:-1]) == whole["text"]
    assert got[-1][1] == whole


async def test_an_aborted_stream_ends_with_a_typed_error(serve):
    engine, client = await serve()
    async with client.post("/generate", json={"prompt_ids": [9], "max_new_tokens": 120, "stream": True}) as response:
        stream = events(response)
        await anext(stream)
        await engine.pause("abort")
        got = [event async for event in stream]
    name, data = got[-1]
    assert (name, data["error"], data["retryable"]) == ("error", "RequestAborted", True)
    assert len(data["token_ids"]) == len(got)
    assert data["versions"] == [{"version": 1, "start": 0, "end": len(got)}]


async def test_an_aborted_answer_carries_its_tokens(serve):
    engine, client = await serve()
    asking = asyncio.create_task(post(client, "/generate", prompt_ids=[9], max_new_tokens=120))
    await until(engine, lambda status: status.tokens > 3)
    await engine.pause("abort")
    status, reply = await asking
    assert (status, reply["error"], reply["retryable"]) == (503, "RequestAborted", True)
    assert len(reply["token_ids"]) == reply["versions"][0]["end"] > 3


async def test_logits_are_bitwise_those_of_the_model(serve, tiny):
    _, client = await serve(version=6)
    with torch.no_grad():
        expected = tiny()(torch.tensor([[9, 8, 7]])).logits[0]
    status, reply = await post(client, "/logits", prompt_ids=[9, 8, 7])
    assert (status, reply["version"], reply["shape"]) == (200, 6, [3, 97])
    assert torch.equal(torch.tensor(reply["logits"]), expected)
    async with client.post("/logits", json={"prompt_ids": [9, 8, 7], "format": "raw"}) as response:
        assert (response.headers["X-Syncline-Version"], response.headers["X-Syncline-Shape"]) == ("6", "3,97")
        raw = np.frombuffer(await response.read(), dtype="<f4").reshape(3, 97)
    assert np.array_equal(raw, expected.numpy())


@pytest.mark.parametrize("path", ["/generate", "/logits"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "give one of prompt"),
        ({"prompt": "a", "prompt_ids": [1]}, "give one of prompt"),
        ({"prompt": "a"}, "without a tokenizer"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [97]}, "outside the vocabulary"),
        ({"prompt_ids": ["a"]}, "Expected `int`"),
        ({"prompt_ids": [1], "max_tokens": 3}, "unknown field"),
    ],
)
async def test_wrong_bodies_are_refused(serve, path, body, says):
    _, client = await serve()
    status, reply = await post(client, path, **body)
    assert (status, reply["retryable"]) == (400, False)
    assert says in reply["message"]


async def test_a_body_that_is_no_json_is_refused(serve):
    _, client = await serve()
    async with client.post("/generate", data=b"{") as response:
        assert response.status == 400


async def test_fenced_until_the_first_commit(serve):
    engine, client = await serve(version=None)
    async with client.post("/generate", json={"prompt_ids": [9]}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert (await response.json())["error"] == "TargetFenced"
    assert (await post(client, "/logits", prompt_ids=[9]))[0] == 503
    async with client.get("/version") as response:
        assert await response.json() == {"version": None, "state": "FENCED"}
    patient = asyncio.create_task(post(client, "/generate", prompt_ids=[9], max_new_tokens=2, wait=True))
    await until(engine, lambda status: status.waiting == 1)
    await engine.resume(3)
    status, reply = await patient
    assert (status, reply["versions"]) == (200, [{"version": 3, "start": 0, "end": 2}])


async def probe(client, path):
    async with client.get(path) as response:
        return response.status, (await response.json())["state"]


async def test_alive_and_ready_are_two_questions(serve):
    engine, client = await serve(version=None)
    assert await probe(client, "/health") == (200, "FENCED")  # restarting it would not help
    assert await probe(client, "/ready") == (503, "FENCED")
    await engine.resume(3)
    assert (await probe(client, "/health"), await probe(client, "/ready")) == ((200, "SERVING"), (200, "SERVING"))
    await engine.pause("keep")
    assert await probe(client, "/ready") == (200, "UPDATING")  # what comes waits for the end of the update
    await engine.resume(4)
    await post(client, "/pause")
    assert (await probe(client, "/health"), await probe(client, "/ready")) == ((200, "HELD"), (503, "HELD"))
    await post(client, "/resume")
    await engine.fence("by the test")
    async with client.get("/ready") as response:
        assert (response.status, await response.json()) == (503, {"ready": False, "state": "FENCED", "version": None})
    await engine.close()
    assert (await probe(client, "/health"), await probe(client, "/ready")) == ((503, "CLOSED"), (503, "CLOSED"))


async def test_a_full_queue_and_a_late_answer(serve):
    engine, client = await serve(max_waiting=1)
    assert (await post(client, "/pause"))[0] == 200
    waiting = asyncio.create_task(post(client, "/generate", prompt_ids=[9], max_new_tokens=2, timeout_s=0.3))
    await until(engine, lambda status: status.waiting == 1)
    assert (await post(client, "/generate", prompt_ids=[9]))[0] == 429
    assert (await waiting)[0] == 504


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_operators_pause_and_resume(serve, mode):
    engine, client = await serve()
    asking = asyncio.create_task(post(client, "/generate", prompt_ids=[9], max_new_tokens=60))
    await until(engine, lambda status: status.tokens > 3)
    _, paused = await post(client, "/pause", mode=mode)
    assert (paused["state"], paused["running"]) == ("HELD", 1 if mode == "keep" else 0)
    async with client.get("/health") as response:
        assert await response.json() == {"ok": True, "state": "HELD"}
    assert (await post(client, "/resume"))[1]["state"] == "SERVING"
    assert (await asking)[0] == (503 if mode == "abort" else 200)


async def test_a_drain_that_takes_too_long_says_so(serve):
    engine, client = await serve()
    asking = asyncio.create_task(post(client, "/generate", prompt_ids=[9], max_new_tokens=127))
    await until(engine, lambda status: status.tokens > 1)
    status, reply = await post(client, "/pause", mode="drain", timeout_s=1e-6)
    assert (status, reply["error"]) == (504, "RequestTimeout")
    assert (await asking)[0] == 200


async def test_status_names_the_receiver(serve):
    class Hosted:
        address, state, version = "unix:/run/x.sock", "UPDATING", 1

    _, client = await serve(receiver=Hosted())
    await post(client, "/generate", prompt_ids=[9], max_new_tokens=2)
    async with client.get("/status") as response:
        reply = await response.json()
    assert (reply["receiver"], reply["state"], reply["version"]) == ("unix:/run/x.sock", "UPDATING", 1)
    assert (reply["answered"], reply["engine"]["tokens"], reply["engine"]["state"]) == (1, 2, "SERVING")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_place(serve, stream):
    engine, client = await serve(max_batch=1, max_length=128)
    body = {"prompt_ids": [9], "max_new_tokens": 120, "stream": stream}
    if stream:
        async with client.post("/generate", json=body) as response:
            await anext(events(response))
            response.close()
    else:
        asking = asyncio.create_task(post(client, "/generate", **body))
        await until(engine, lambda status: status.tokens > 1)
        asking.cancel()
    await until(engine, lambda status: status.failed == 1 and status.running == 0)
    assert engine.status().tokens < 120
    assert (await post(client, "/generate", prompt_ids=[9], max_new_tokens=2))[0] == 200


async def test_eight_clients_during_twenty_updates(serve, tiny, weights_of, swap, prompts):
    """No answer mixes versions without saying so, and what it says is true, for streams and whole answers."""
    model = tiny("llama-tied")
    sets = [weights_of(tiny("llama-tied", seed=1)), weights_of(tiny("llama-tied", seed=2))]
    swap(model, sets[1])
    engine, client = await serve(model, max_batch=5)
    answers, stop = [], asyncio.Event()

    async def ask(prompt, stream):
        while not stop.is_set():
            body = {"prompt_ids": prompt, "max_new_tokens": 20, "stream": stream}
            async with client.post("/generate", json=body) as response:
                assert response.status == 200
                if not stream:
                    answers.append((prompt, await response.json()))
                    continue
                got = [event async for event in events(response)]
            assert [data["token_id"] for _, data in got[:-1]] == got[-1][1]["token_ids"]
            said = [v["version"] for v in got[-1][1]["versions"] for _ in range(v["start"], v["end"])]
            assert [data["version"] for _, data in got[:-1]] == said
            answers.append((prompt, got[-1][1]))

    async with asyncio.TaskGroup() as group:
        for number, prompt in enumerate(prompts(8)):
            group.create_task(ask(list(prompt), number % 2 == 0))
        for version in range(2, 22):
            before = engine.status().answered
            await until(engine, lambda status, before=before: status.answered >= before + 4)
            await engine.pause(("keep", "drain")[version % 4 == 0])
            await asyncio.to_thread(swap, model, sets[version % 2], rebind=version % 3 == 0)
            await engine.resume(version)
        stop.set()
    replayer = Replayer(tiny("llama-tied"), lambda version: sets[version % 2])
    reports = []
    for prompt, answer in answers:
        reports.append(replayer.check(prompt, answer["token_ids"], [Span(**span) for span in answer["versions"]]))
    assert [report.problem for report in reports if not report.ok] == []
    assert len(answers) >= 80
    assert sum(len(answer["versions"]) > 1 for _, answer in answers) >= 15


async def test_with_a_secret_every_call_and_every_answer_is_signed(serve):
    _, client = await serve(guard=secret_guard("open sesame"))
    body = json.dumps({"prompt_ids": [9], "max_new_tokens": 2}).encode()
    signer = Signer("open sesame")
    headers = signer.sign("POST", "/generate", body)
    async with client.post("/generate", data=body, headers=headers) as response:
        assert response.status == 200
        signer.check_reply(headers[NONCE], 200, response.headers, await response.read())
    for wrong in ({}, headers, Signer("sesame").sign("POST", "/generate", body), signer.sign("POST", "/logits", body)):
        async with client.post("/generate", data=body, headers=wrong) as response:
            assert (response.status, (await response.json())["error"]) == (401, "AuthError")
    headers = signer.sign("GET", "/version", b"")
    async with client.get("/version", headers=headers) as response:
        assert response.status == 200


async def test_a_port_in_use_is_said(tiny):
    engine = GenerationEngine(tiny())
    async with GenerationServer(engine, None) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen"):
            await GenerationServer(engine, None, port=port).start()


async def test_beyond_loopback_needs_a_secret(tiny):
    engine = GenerationEngine(tiny())
    with pytest.raises(ConfigError, match="beyond loopback"):
        GenerationServer(engine, None, host="0.0.0.0")
    with pytest.raises(ClosedError, match="start"):
        _ = GenerationServer(engine, None).url
