"""Calls of a push over the connection that watches: what HTTP would answer, as long as it stands, and signed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from syncline.engine.address import Address
from syncline.engine.auth import Signer
from syncline.engine.control_client import ControlClient
from syncline.engine.control_server import ControlServer
from syncline.engine.control_watch import _MOST_AT_ONCE, MOST_CALL_BYTES, PROTOCOL, AnswerFrame, CallFrame
from syncline.engine.errors import (
    AuthError,
    BusyError,
    ClosedError,
    LoaderError,
    PlanError,
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


_tests = _control_tests()
EchoService, connect_request, other_process = _tests.EchoService, _tests.connect_request, _tests.other_process
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
    """A bare connection that watches: service, socket, what makes calls for it, and the nonce that opened it."""
    service = EchoService()
    server = ControlServer(service, f"unix:{tmp_path}/x.sock", secret=secret)
    await server.start()
    signer = Signer(secret or "none")
    headers = signer.sign("GET", "/watch", b"") if secret else {}
    nonce = headers.get("X-Syncline-Nonce", "")

    def frame(number, name, body=b"{}", *, signed=None):
        signed = signer.sign_call(nonce, number, name, body) if signed is None else signed
        return msgspec.msgpack.encode(CallFrame(number, name, body, signed))

    connector = aiohttp.UnixConnector(Address.parse(server.address).path)
    async with aiohttp.ClientSession(connector=connector) as session:
        socket = await session.ws_connect("http://localhost/watch", headers=headers, protocols=(PROTOCOL,))
        yield service, socket, frame, nonce
        await socket.close()
    await server.close()


ORDER = msgspec.json.encode(ASKED["order"])


async def answer(socket):
    async with asyncio.timeout(PATIENCE_S):
        message = await socket.receive()
    return msgspec.msgpack.decode(message.data, type=AnswerFrame) if message.type is aiohttp.WSMsgType.BINARY else message.type


@pytest.mark.parametrize("wrong", ["garbage", "other form", "repeated", "older", "other endpoint", "no endpoint"])
async def test_what_is_no_call_ends_the_watch_and_does_nothing(line, wrong):
    service, socket, frame, _ = line
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
    service, socket, frame, _ = line
    await socket.send_bytes(frame(1, "order", b'{"push_id": 3}'))
    refused = await answer(socket)
    assert refused.status == 400
    assert b"ProtocolError" in refused.body
    assert not service.asked


FORGED = [
    "no signature", "no time", "no text", "other secret", "other number", "other name", "other body", "other connection", "old",
]  # fmt: skip


@pytest.mark.parametrize("secret", ["s"], indirect=True)
@pytest.mark.parametrize("forged", FORGED)
async def test_a_call_that_is_not_signed_for_this_connection_and_time_is_not_made(line, forged):
    service, socket, frame, nonce = line
    signer, other, late = Signer("s"), Signer("other"), Signer("s", clock=lambda: time.time() - 3600)
    stamp, mac = signer.sign_call(nonce, 1, "order", ORDER)
    signed = {
        "no signature": ("", ""), "no time": ("", mac), "no text": (stamp, "é€"),
        "other secret": other.sign_call(nonce, 1, "order", ORDER), "other number": signer.sign_call(nonce, 2, "order", ORDER),
        "other name": signer.sign_call(nonce, 1, "vote", ORDER), "other body": signer.sign_call(nonce, 1, "order", b"{}"),
        "other connection": signer.sign_call("00" * 16, 1, "order", ORDER), "old": late.sign_call(nonce, 1, "order", ORDER),
    }  # fmt: skip
    await socket.send_bytes(frame(1, "order", ORDER, signed=signed[forged]))
    assert await answer(socket) is aiohttp.WSMsgType.CLOSE
    assert not service.asked


@pytest.mark.parametrize("forged", ["no signature", "no text", "other secret", "other number", "other status"])
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
                    "no signature": "", "no text": "é", "other secret": Signer("t").sign_answer(nonce, number, 200, b"{}"),
                    "other number": signer.sign_answer(nonce, number + 1, 200, b"{}"),
                    "other status": signer.sign_answer(nonce, number, 500, b"{}"),
                }  # fmt: skip
                await socket.send_bytes(msgspec.msgpack.encode(AnswerFrame(number, 200, b"{}", macs[forged])))
        return socket

    app = web.Application()
    app.router.add_get("/watch", watch)
    async with stand_in(app, tmp_path, secret="s") as client:
        with pytest.raises(AuthError, match="not signed with our secret"):
            await client.order(ASKED["order"])


async def test_calls_of_a_new_link_do_not_go_over_the_watch_of_the_one_before(served):
    """It may be another process's by now. One without a name pins the process that it was opened to."""
    _, server, client, by_http = served
    await client.connect(connect_request())
    assert (await client.prepare(ASKED["prepare"])).status == "ready"
    assert by_http == ["connect"], "its watch has no name"
    other = ControlClient(server.address, secret=client._signer and "s", timeout_s=PATIENCE_S)
    await other.connect(connect_request())
    watch = await watching(other)
    await other.connect(connect_request())
    by_http.clear()
    await other.vote(ASKED["vote"])
    await other.connect(connect_request(generation=2))
    await other.order(ASKED["order"])
    assert by_http == ["connect", "order"]
    await other.close()
    await asyncio.gather(watch, return_exceptions=True)


async def test_a_target_of_several_ranks_is_led_over_watches(targets, monkeypatch):
    """What pauses, commits and resumes its ranks holds up requests."""
    by_http, over_watch = [], []

    def noting(noted, method, what):
        return lambda self, first, body: (noted.append(what(first)), method(self, first, body))[1]

    monkeypatch.setattr(ControlServer, "_post", noting(by_http, ControlServer._post, lambda request: request.path))
    monkeypatch.setattr(ControlServer, "_over_watch", noting(over_watch, ControlServer._over_watch, str))
    target = await targets(world=2)
    for version in (1, 2):
        by_http.clear()
        over_watch.clear()
        await target.push(version)
        assert over_watch == ["prepare_weights_update", "vote", "order", "order", "order"], "to rank 1"
        assert by_http == ["/prepare_weights_update", "/complete_weights_update"], "to rank 0, which nobody watches here"


async def test_a_closed_client_calls_nobody(served):
    service, _, client, _ = served
    await client.close()
    with pytest.raises(ClosedError):
        await client.order(ASKED["order"])
    assert not service.asked


async def test_no_more_than_a_few_calls_at_once(served):
    service, _, client, _ = served
    service.hold = asyncio.Event()
    calls = [asyncio.create_task(client.vote(ASKED["vote"])) for _ in range(_MOST_AT_ONCE + 1)]
    async with asyncio.timeout(PATIENCE_S):
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in ended} == {TargetUnreachable}
    assert len(service.asked) == _MOST_AT_ONCE
    service.hold.set()


async def test_calls_to_a_stopped_process_end_with_its_watch_whatever_is_in_its_socket(other_process):
    address, process = other_process
    client = ControlClient(address, heartbeat_s=0.05, patience_s=1.0)
    watch = await watching(client)
    os.kill(process.pid, signal.SIGSTOP)
    request = CompleteRequest(version=1, push_id="p" * (MOST_CALL_BYTES - 500), timeout_s=300.0)
    calls = [asyncio.create_task(client.vote(request)) for _ in range(20)]
    given_up = asyncio.create_task(client.vote(request))
    for _ in range(10):
        await asyncio.sleep(0)
    given_up.cancel()  # must not take the others with it
    async with asyncio.timeout(PATIENCE_S):
        assert "no sign of life" in await watch
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in ended} == {TargetUnreachable}
    await client.close()


async def test_closing_the_server_is_bounded_whatever_a_call_does_when_it_is_called_off(served):
    service, server, client, _ = served
    going_on = asyncio.Event()

    async def on_vote(request):
        try:
            await service._take(request, None)
        except asyncio.CancelledError:
            await going_on.wait()
            raise

    service.on_vote, service.hold = on_vote, asyncio.Event()
    call = asyncio.create_task(client.vote(ASKED["vote"]))
    async with asyncio.timeout(PATIENCE_S):
        await service.called.wait()
        await server.close()
        await asyncio.gather(call, return_exceptions=True)
    going_on.set()


async def test_a_server_that_closes_begins_nothing(served):
    service, server, client, _ = served
    server._closing = True
    with pytest.raises(ClosedError):
        await client.order(ASKED["order"])
    late = ControlClient(server.address, secret=client._signer and "s", timeout_s=PATIENCE_S)
    with pytest.raises(AuthError, match="refused to be watched"):
        await late.watch()
    assert not service.asked
    await late.close()


@pytest.mark.parametrize("path", ["/status", "/order", "/watch"])
async def test_web_pages_are_refused(tmp_path, path):
    """A browser lets any page call what listens on its reader's machine, and says where the page is from."""
    service = EchoService()
    server = ControlServer(service, "tcp://127.0.0.1:0")
    await server.start()
    where = f"http{server.address.removeprefix('tcp')}{path}"
    async with aiohttp.ClientSession() as session:
        for headers, status in (({"Origin": "https://example.org"}, 401), ({}, 101 if path == "/watch" else 200)):
            if path == "/watch":
                headers |= {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
                headers |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
            async with session.request("POST" if path == "/order" else "GET", where, headers=headers, data=ORDER) as response:
                assert response.status == status
            assert len(service.asked) == (status == 200)
    await server.close()
