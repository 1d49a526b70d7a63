"""What servers serve, asked over their own endpoints: `syncline serve` for real, others by what they are known to answer."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from syncline.adapters.engines.fleet import common_version, states
from syncline.adapters.engines.generation import GenerationEngine
from syncline.adapters.engines.http_errors import secret_guard
from syncline.adapters.engines.module import ModuleLoader
from syncline.adapters.engines.server import GenerationServer
from syncline.engine import Receiver


@pytest.fixture
async def generation(tiny):
    """``await generation(version, secret)``: URL and control address of a real server."""
    stack = []

    async def start(version=1, secret=None):
        model = tiny()
        engine = GenerationEngine(model, version=version, eos_ids=())
        receiver = Receiver(
            loader=ModuleLoader(model), listen="tcp://127.0.0.1:0", serving=engine, initial_version=version, secret=secret
        )
        server = GenerationServer(engine, None, receiver=receiver, guard=secret and secret_guard(secret))
        for one in (engine, receiver, server):
            await one.start()
            stack.append(one)
        return server.url, receiver.address

    yield start
    for one in reversed(stack):
        await one.close()


@pytest.fixture
async def answering():
    """``await answering({path: (status, object)})``: a server that answers so, and nothing else."""
    runners = []

    async def start(answers):
        async def answer(request):
            status, body = answers[request.path]
            return web.json_response(body, status=status)

        app = web.Application()
        app.add_routes([web.get(path, answer) for path in answers])
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_syncline_serve_by_its_url_and_by_its_control_address(generation):
    url, control = await generation(version=4)
    by_url, by_control = await states([url, control])
    assert (by_url.kind, by_url.state, by_url.version, by_url.serves) == ("syncline serve", "COMMITTED", 4, True)
    assert (by_control.kind, by_control.state, by_control.version) == ("syncline", "COMMITTED", 4)
    assert by_url.details["engine"]["state"] == "SERVING"
    assert common_version([by_url, by_control]) == 4


async def test_what_is_fenced_serves_nothing(generation):
    found = await states([*await generation(version=None), *await generation(version=4)])
    assert [(one.state, one.version) for one in found] == [("FENCED", None)] * 2 + [("COMMITTED", 4)] * 2
    assert common_version(found) is None
    assert common_version(found[2:]) == 4


async def test_with_a_secret(generation):
    addresses = await generation(version=4, secret="open sesame")
    assert common_version(await states(addresses, secret="open sesame")) == 4
    for wrong in (None, "sesame"):
        for one in await states(addresses, secret=wrong):
            assert (one.state, "AuthError" in one.message) == ("UNREACHABLE", True)


VLLM = {"/weight_info": (200, {"weight_version": "3"}), "/is_paused": (200, {"is_paused": False})}
SGLANG = {"/model_info": (200, {"weight_version": "3"}), "/ready": (200, {})}


@pytest.mark.parametrize(
    ("answers", "kind", "state", "version"),
    [
        (VLLM, "vllm", "COMMITTED", 3),
        (VLLM | {"/is_paused": (200, {"is_paused": True})}, "vllm", "PAUSED", 3),
        (VLLM | {"/weight_info": (200, {"weight_version": "default"})}, "vllm", "UNPUSHED", "default"),
        ({"/is_paused": (200, {"is_paused": False})}, "vllm", "COMMITTED", None),
        (VLLM | {"/weight_info": (200, {"weight_version": "syncline-unfinished"})}, "vllm", "FENCED", None),
        (VLLM | {"/weight_info": (200, {"weight_version": "syncline-unfinished@update"})}, "vllm", "UPDATING", None),
        (SGLANG, "sglang", "COMMITTED", 3),
        (SGLANG | {"/model_info": (200, {"weight_version": "default"})}, "sglang", "UNPUSHED", "default"),
        (SGLANG | {"/model_info": (200, {"weight_version": "v3"})}, "sglang", "UNPUSHED", "v3"),
        (SGLANG | {"/ready": (503, {})}, "sglang", "PAUSED", 3),
        ({"/model_info": SGLANG["/model_info"]}, "sglang", "COMMITTED", 3),
        (SGLANG | {"/model_info": (200, {"weight_version": "syncline-unfinished"})}, "sglang", "FENCED", None),
        (SGLANG | {"/model_info": (200, {"weight_version": "syncline-unfinished@me.1"})}, "sglang", "UPDATING", None),
        ({}, "unknown", "UNREACHABLE", None),
        ({"/status": (200, ["no object"])}, "unknown", "UNREACHABLE", None),
    ],
)
async def test_servers_by_what_they_answer(answering, answers, kind, state, version):
    (found,) = await states([await answering(answers)])
    assert (found.kind, found.state, found.version) == (kind, state, version)


async def test_weights_that_nobody_pushed_are_no_version_in_common(answering):
    unpushed = VLLM | {"/weight_info": (200, {"weight_version": "default"})}
    found = await states([await answering(unpushed), await answering(unpushed)])
    assert [(one.state, one.serves) for one in found] == [("UNPUSHED", False)] * 2
    assert all("no push has committed" in one.message for one in found)
    assert common_version(found) is None
    assert common_version(found[:1]) is None


async def test_all_are_asked_at_once_and_the_silent_ones_end_by_the_deadline(generation):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    silent_ones = [f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}"] * 10
    url, control = await generation(version=4)
    async with asyncio.timeout(15):  # twenty deadlines one after the other would be 20 s
        found = await states([*silent_ones, url, control], timeout_s=1.0)
    assert {(one.state, one.version) for one in found[:20]} == {("UNREACHABLE", None)}
    assert all("no answer within 1 s" in one.message for one in found[:20])
    assert common_version(found[20:]) == 4
    server.close()
    await server.wait_closed()


async def test_addresses_that_are_none_keep_nobody_from_being_asked(generation):
    url, _ = await generation(version=4)
    one, *others = await states([url, "h:1", "unix:relative"])
    assert (one.state, one.version) == ("COMMITTED", 4)
    assert [other.state for other in others] == ["UNREACHABLE"] * 2
    assert all("is none of" in other.message for other in others)


async def test_nobody_asked():
    assert await states([]) == []
    assert common_version([]) is None
