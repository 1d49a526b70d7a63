"""Calls of a push over the connection that watches: what HTTP would answer, as long as it stands, and signed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from syncline.engine.address import Address
from syncline.engine.auth import Signer
from syncline.engine.control_client import ControlClient
from syncline.engine.control_server import ControlServer
from syncline.engine.control_watch import MOST_CALL_BYTES, PROTOCOL, AnswerFrame, CallFrame
from syncline.engine.errors import (
    AuthError,
    BusyError,
    LoaderError,
    PlanError,
    ProtocolError,
    TargetUnreachable,
    VersionConflict,
)
from syncline.engine.messages import CompleteRequest, PrepareRequest, RankOrder

PATIENCE_S = 20.0


def _control_tests():
    spec = importlib.util.spec_from_file_location("control_tests", Path(__file__).with_name("test_control.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["control_tests"] = module
    spec.loader.exec_module(module)
    return module


EchoService = _control_tests().EchoService
ASKED = {
    "prepare": PrepareRequest(num_buckets=3, version=1, push_id="p"),
    "complete": CompleteRequest(version=1, push_id="p"),
    "vote": CompleteRequest(version=1, push_id="p", digests={"1": "ab"}),
    "order": RankOrder(push_id="p", incarnation="i", order="commit", version=1),
}
ENDPOINTS = {"prepare": "prepare_weights_update", "complete": "complete_weights_update", "vote": "vote", "order": "order"}


@pytest.fixture(params=[None, "s"], ids=["open", "secret"])
def secret(request):
    return request.param


@pytest.fixture
async def served(tmp_path, secret, monkeypatch):
    """``(service, server, client, by_http)``, watched by the client; the names of what was asked by HTTP since."""
    service = EchoService()
    server = ControlServer(service, f"unix:{tmp_path}/x.sock", secret=secret)
    by_http, post = [], server._post
    monkeypatch.setattr(server, "_post", lambda request, body: (by_http.append(request.path[1:]), post(request, body))[1])
    await server.start()
    client = ControlClient(server.address, secret=secret, timeout_s=PATIENCE_S, heartbeat_s=0.05, patience_s=PATIENCE_S)
    watch = await watching(client)
    yield service, server, client, by_http
    await client.close()
    await asyncio.gather(watch, return_exceptions=True)
    await server.close()


async def watching(client):
    opened = asyncio.Event()
    watch = asyncio.create_task(client.watch(opened.set))
    async with asyncio.timeout(PATIENCE_S):
        await opened.wait()
    return watch


@pytest.mark.parametrize("call", ASKED)
async def test_a_call_of_a_push_goes_over_the_watch_and_gets_the_same_answer(served, call):
    service, server, client, by_http = served
    over_watch = await getattr(client, call)(ASKED[call])
    assert by_http == []
    plain = ControlClient(server.address, secret=client._signer and "s", timeout_s=PATIENCE_S)
    assert await getattr(plain, call)(ASKED[call]) == over_watch
    assert by_http == [ENDPOINTS[call]]
    assert service.asked == [ASKED[call]] * 2
    await plain.close()


@pytest.mark.parametrize("call", ASKED)
@pytest.mark.parametrize(
    "error", [BusyError("b"), VersionConflict("v"), PlanError(["x", "y"]), LoaderError("l"), KeyError("k")]
)
async def test_errors_come_as_they_do_by_http(served, call, error):
    service, server, client, by_http = served
    service.error = error
    plain = ControlClient(server.address, secret=client._signer and "s", timeout_s=PATIENCE_S)
    (over_watch, by_request) = await asyncio.gather(
        *(getattr(one, call)(ASKED[call]) for one in (client, plain)), return_exceptions=True
    )
    assert by_http == [ENDPOINTS[call]]
    assert type(over_watch) is type(by_request)
    assert str(over_watch).partition("Traceback")[0] == str(by_request).partition("Traceback")[0]
    assert type(error).__name__ in repr(over_watch) or "ControlError" in repr(over_watch)
    await plain.close()


async def test_calls_side_by_side_are_answered_as_they_end_and_the_echo_goes_on(served):
    service, _, client, _ = served
    holds = [asyncio.Event() for _ in range(3)]
    turn = itertools.count()

    async def on_order(request):
        await holds[next(turn)].wait()
        return await service._take(request, await EchoService.on_order(EchoService(), request))

    service.on_order = on_order
    calls = [asyncio.create_task(client.order(ASKED["order"])) for _ in holds]
    async with asyncio.timeout(PATIENCE_S):
        while client._line.calls_under_way < 3:
            await asyncio.sleep(0)
        client._line.heard.clear()
        await client._line.heard.wait()  # a heartbeat while three calls are under way
        for place in (2, 0, 1):
            holds[place].set()
            await asyncio.wait({calls[place]})
    assert client.calls_under_way == 1, "the watch"
    assert [call.result().serving for call in calls] == [4, 4, 4]


async def test_a_call_ends_at_once_with_its_watch(served):
    service, server, client, by_http = served
    service.hold = asyncio.Event()
    call = asyncio.create_task(client.complete(ASKED["complete"]))
    async with asyncio.timeout(PATIENCE_S):
        await service.called.wait()
        await server.drop_watches(None)
        with pytest.raises(TargetUnreachable, match="complete_weights_update"):
            await call
    service.hold.set()
    assert by_http == []
    assert (await client.vote(ASKED["vote"])).yes, "by HTTP, for nobody watches now"
    assert by_http == ["vote"]


async def test_a_late_answer_is_nobodys(served):
    service, _, client, _ = served
    service.hold = asyncio.Event()
    with pytest.raises(TargetUnreachable, match="no answer within"):
        await client._call_over(client._line, "vote", msgspec.json.encode(ASKED["vote"]), object, 0.05)
    service.hold.set()
    assert (await client.order(ASKED["order"])).serving == 4


async def test_a_large_body_goes_by_http(served):
    service, _, client, by_http = served
    digests = {str(n): "ab" * 50 for n in range(MOST_CALL_BYTES // 100)}
    request = PrepareRequest(num_buckets=1, version=1, push_id="p", digests=digests)
    assert (await client.prepare(request)).status == "ready"
    assert by_http == ["prepare_weights_update"]
    assert service.asked == [request]


async def test_closing_the_server_lets_calls_end(served):
    service, server, client, _ = served
    service.hold = asyncio.Event()
    calls = [asyncio.create_task(client.vote(ASKED["vote"])), asyncio.create_task(client.order(ASKED["order"]))]
    async with asyncio.timeout(PATIENCE_S):
        while len(service.asked) < 2:
            await asyncio.sleep(0)
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        service.hold.set()
        assert (await calls[0]).yes
        assert (await calls[1]).serving == 4
        await closing
    assert not server._calls


async def test_closing_the_server_does_not_wait_for_calls_that_hang(served):
    service, server, client, _ = served
    service.hold = asyncio.Event()
    call = asyncio.create_task(client.vote(ASKED["vote"]))
    async with asyncio.timeout(PATIENCE_S):
        await service.called.wait()
        await server.close()
        with pytest.raises(TargetUnreachable):
            await call
    assert not server._calls


async def test_one_that_takes_no_calls_is_called_by_http(tmp_path):
    """A watch that only echoes, as it was before."""
    asked = []

    async def watch(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    async def vote(request):
        asked.append(await request.json())
        return web.json_response({"yes": True, "rank": 1})

    app = web.Application()
    app.router.add_get("/watch", watch)
    app.router.add_post("/vote", vote)
    async with stand_in(app, tmp_path) as client:
        assert (await client.vote(ASKED["vote"])).yes
    assert len(asked) == 1


@contextlib.asynccontextmanager
async def stand_in(app, tmp_path, secret=None):
    """A client that watches what ``app`` serves."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, f"{tmp_path}/x.sock").start()
    client = ControlClient(f"unix:{tmp_path}/x.sock", secret=secret, timeout_s=PATIENCE_S)
    watch = await watching(client)
    yield client
    await client.close()
    await asyncio.gather(watch, return_exceptions=True)
    await runner.cleanup()


# what others may send


@pytest.fixture
async def line(tmp_path, secret):
    """A bare connection that watches: service, socket, and what signs calls on it."""
    service = EchoService()
    server = ControlServer(service, f"unix:{tmp_path}/x.sock", secret=secret)
    await server.start()
    signer = Signer(secret or "none")
    headers = signer.sign("GET", "/watch", b"") if secret else {}
    nonce = headers.get("X-Syncline-Nonce", "")

    def frame(number, name, body=b"{}", *, mac=None):
        signed = signer.sign_frame(nonce, "call", str(number), name, body) if mac is None else mac
        return msgspec.msgpack.encode(CallFrame(number, name, body, signed))

    connector = aiohttp.UnixConnector(Address.parse(server.address).path)
    async with aiohttp.ClientSession(connector=connector) as session:
        socket = await session.ws_connect("http://localhost/watch", headers=headers, protocols=(PROTOCOL,))
        yield service, socket, frame
        await socket.close()
    await server.close()


ORDER = msgspec.json.encode(ASKED["order"])


async def answer(socket):
    async with asyncio.timeout(PATIENCE_S):
        message = await socket.receive()
    return msgspec.msgpack.decode(message.data, type=AnswerFrame) if message.type is aiohttp.WSMsgType.BINARY else message.type


@pytest.mark.parametrize("wrong", ["garbage", "other form", "repeated", "older", "other endpoint", "no endpoint"])
async def test_what_is_no_call_ends_the_watch_and_does_nothing(line, wrong):
    service, socket, frame = line
    await socket.send_bytes(frame(5, "order", ORDER))
    assert (await answer(socket)).status == 200
    sent = {
        "garbage": b"\xc1\xff", "other form": msgspec.msgpack.encode({"a": 1}), "repeated": frame(5, "order", ORDER),
        "older": frame(4, "order", ORDER), "other endpoint": frame(6, "connect"), "no endpoint": frame(6, "../order"),
    }  # fmt: skip
    await socket.send_bytes(sent[wrong])
    assert await answer(socket) is aiohttp.WSMsgType.CLOSE
    assert len(service.asked) == 1


async def test_a_body_that_is_no_request_is_answered(line):
    service, socket, frame = line
    await socket.send_bytes(frame(1, "order", b'{"push_id": 3}'))
    refused = await answer(socket)
    assert refused.status == 400
    assert b"ProtocolError" in refused.body
    assert not service.asked


@pytest.mark.parametrize("secret", ["s"], indirect=True)
@pytest.mark.parametrize(
    "forged", ["no signature", "other secret", "other number", "other name", "other body", "other connection"]
)
async def test_a_call_that_is_not_signed_for_this_connection_is_not_made(line, forged):
    service, socket, frame = line
    other, nonce = Signer("other"), "00" * 16
    macs = {
        "no signature": "", "other secret": other.sign_frame(nonce, "call", "1", "order", ORDER),
        "other number": msgspec.msgpack.decode(frame(2, "order", ORDER), type=CallFrame).mac,
        "other name": msgspec.msgpack.decode(frame(1, "vote", ORDER), type=CallFrame).mac,
        "other body": msgspec.msgpack.decode(frame(1, "order", b"{}"), type=CallFrame).mac,
        "other connection": Signer("s").sign_frame(nonce, "call", "1", "order", ORDER),
    }  # fmt: skip
    await socket.send_bytes(frame(1, "order", ORDER, mac=macs[forged]))
    assert await answer(socket) is aiohttp.WSMsgType.CLOSE
    assert not service.asked


@pytest.mark.parametrize("forged", ["no signature", "other secret", "other number", "other status"])
async def test_an_answer_that_is_not_signed_is_not_taken(tmp_path, forged):
    async def watch(request):
        signer = Signer("s")
        nonce = signer.check("GET", "/watch", request.headers, b"")
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        socket.headers.update(signer.sign_reply(nonce, 101, b""))
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                number = msgspec.msgpack.decode(message.data, type=CallFrame).number
                macs = {
                    "no signature": "", "other secret": Signer("t").sign_frame(nonce, "answer", str(number), "200", b"{}"),
                    "other number": signer.sign_frame(nonce, "answer", str(number + 1), "200", b"{}"),
                    "other status": signer.sign_frame(nonce, "answer", str(number), "500", b"{}"),
                }  # fmt: skip
                await socket.send_bytes(msgspec.msgpack.encode(AnswerFrame(number, 200, b"{}", macs[forged])))
        return socket

    app = web.Application()
    app.router.add_get("/watch", watch)
    async with stand_in(app, tmp_path, secret="s") as client:
        with pytest.raises(AuthError, match="not signed with our secret"):
            await client.order(ASKED["order"])


async def test_the_first_calls_of_a_new_link_do_not_go_over_the_watch_before_it(served):
    """It may be another process's by now."""
    service, _, client, by_http = served
    with pytest.raises(ProtocolError):
        service.error = ProtocolError("not this one")
        await client.connect(_control_tests().connect_request())
    service.error = None
    assert (await client.prepare(ASKED["prepare"])).status == "ready"
    assert by_http == ["connect", "prepare_weights_update"]
