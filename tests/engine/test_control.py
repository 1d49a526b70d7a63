"""The two ends of the control plane over real sockets: forms, limits, errors, secrets, and who notices whose death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest

from syncline.engine.address import Address
from syncline.engine.auth import NONCE, SIGNATURE, TIME, Signer
from syncline.engine.control_client import ControlClient
from syncline.engine.control_server import ControlServer
from syncline.engine.errors import (
    AuthError,
    BusyError,
    ConfigError,
    ControlError,
    LoaderError,
    PlanError,
    ProtocolError,
    SynclineError,
    TargetUnreachable,
    VersionConflict,
)
from syncline.engine.messages import (
    AbortRequest,
    Ack,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    JoinRequest,
    ManifestReply,
    PrepareReply,
    PrepareRequest,
    RankLinks,
    RankOrder,
    Status,
    VoteReply,
)


class EchoService:
    """Remembers what it was asked; raises what it is told to."""

    def __init__(self):
        self.asked = []
        self.error = None
        self.unwatched = asyncio.Queue()
        self.hold = None
        self.big = False
        self.called = asyncio.Event()

    async def _take(self, request, reply):
        self.asked.append(request)
        self.called.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        return reply

    async def on_status(self):
        status = Status(
            state="COMMITTED", version=3, digest="ab", incarnation="i", rank=0, world_size=1, ready=True, manifest_digest="m"
        )
        return await self._take("status", status)

    async def on_manifest(self):
        manifest = bytes(range(256)) * 20_000 if self.big else b"\x00\xff" * 1000
        return await self._take("manifest", ManifestReply(manifests=[manifest], incarnation="i", manifest_digest="m"))

    async def on_connect(self, request):
        return await self._take(request, Ack())

    async def on_prepare(self, request):
        return await self._take(request, PrepareReply(status="ready", incarnation="i", version=2))

    async def on_complete(self, request):
        return await self._take(request, CompleteReply(success=True, num_buckets_received=7, state="COMMITTED", version=3))

    async def on_abort(self, request):
        return await self._take(request, Ack())

    async def on_join(self, request):
        return await self._take(request, Ack())

    async def on_vote(self, request):
        return await self._take(request, VoteReply(yes=True, rank=1))

    async def on_order(self, request):
        return await self._take(request, Ack(serving=4))

    def on_unwatched(self, peer):
        self.unwatched.put_nowait(peer)


@pytest.fixture(params=["unix", "tcp"])
def listen(request, tmp_path):
    return f"unix:{tmp_path}/s/x.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest.fixture
async def served(listen):
    service = EchoService()
    server = ControlServer(service, listen)
    await server.start()
    client = ControlClient(server.address, timeout_s=10.0)
    yield service, server, client
    await client.close()
    await server.close()


def connect_request(**changes):
    links = RankLinks(rank=0, program=b"\x80program", transport="shm", descriptors={"0": b"\xffd"})
    fields = {
        "target": 0, "plan_digest": "p", "manifest_digest": "m", "source_incarnation": "src", "generation": 1,
        "landing": "staged", "in_flight": "keep", "verify": True, "ranks": [links], "timeout_s": 10.0,
    }  # fmt: skip
    return ConnectRequest(**{**fields, **changes})


async def raw(server, method, path, body=b"", headers=None, **kwargs):
    where = Address.parse(server.address)
    connector = aiohttp.UnixConnector(where.path) if where.path else aiohttp.TCPConnector()
    host = f"{where.host}:{where.port}" if where.host else "localhost"
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://{host}{path}", data=body, headers=headers, **kwargs) as response,
    ):
        return response.status, await response.read(), response.headers


async def test_every_endpoint_carries_its_message_both_ways(served):
    service, _, client = served
    assert (await client.status()).version == 3
    manifest = await client.manifest()
    assert manifest.manifests == [b"\x00\xff" * 1000]
    requests = [
        (client.connect, connect_request(), Ack()),
        (client.prepare, PrepareRequest(num_buckets=2, push_id="p"), PrepareReply(status="ready", incarnation="i", version=2)),
        (
            client.complete,
            CompleteRequest(push_id="p", digests={"0": "ff"}),
            CompleteReply(success=True, num_buckets_received=7, state="COMMITTED", version=3),
        ),
        (client.abort, AbortRequest(push_id="p", reason="ü"), Ack()),
        (client.join, JoinRequest(rank=1, address="a", incarnation="i", serving=3), Ack()),
        (client.vote, CompleteRequest(push_id="p"), VoteReply(yes=True, rank=1)),
        (client.order, RankOrder(push_id="p", order="commit"), Ack(serving=4)),
    ]
    for call, request, reply in requests:
        assert await call(request) == reply
        assert service.asked[-1] == request


async def test_a_plain_two_phase_source_gets_the_fields_it_knows(served):
    _, server, _ = served
    body = {
        "num_buckets": 1,
        "buckets": [{"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}],
        "group_name": "weight_sync_group",
    }
    status, answer, _ = await raw(server, "POST", "/prepare_weights_update", json.dumps(body).encode())
    assert status == 200
    assert {"status", "message"} <= set(json.loads(answer))
    body = {"group_name": "weight_sync_group", "flush_cache": False, "field of a later version": [1]}
    status, answer, _ = await raw(server, "POST", "/complete_weights_update", json.dumps(body).encode())
    assert status == 200
    assert {"success", "num_buckets_received", "message"} <= set(json.loads(answer))


@pytest.mark.parametrize(
    "error",
    [
        VersionConflict("old"),
        BusyError("two at once"),
        ProtocolError("late"),
        PlanError(["first", "second"]),
        LoaderError('boom\nTraceback (most recent call last):\n  File "x.py", line 3'),
    ],
)
async def test_our_errors_arrive_typed_with_their_text(served, error):
    service, _, client = served
    service.error = error
    for call in (client.status(), client.connect(connect_request()), client.order(RankOrder(push_id="p", order="pause"))):
        with pytest.raises(type(error)) as caught:
            await call
        for line in error.problems if isinstance(error, PlanError) else str(error).splitlines():
            assert line in str(caught.value)


async def test_other_errors_arrive_with_the_remote_traceback(served, caplog):
    service, _, client = served
    service.error = ZeroDivisionError("by hand")
    with pytest.raises(ControlError, match="ZeroDivisionError: by hand") as caught:
        await client.status()
    assert "in _take" in str(caught.value)
    assert "test_control.py" in str(caught.value)


async def test_prepare_and_complete_answer_errors_in_their_own_form(served):
    service, server, client = served
    service.error = BusyError("two at once")
    reply = await client.prepare(PrepareRequest(num_buckets=0))
    assert (reply.status, reply.error, reply.message) == ("error", "BusyError", "two at once")
    reply = await client.complete(CompleteRequest())
    assert (reply.success, reply.error, reply.message, reply.num_buckets_received) == (False, "BusyError", "two at once", 0)
    status, answer, _ = await raw(server, "POST", "/prepare_weights_update", b'{"num_buckets": "many"}')
    assert status == 200
    assert msgspec.json.decode(answer, type=PrepareReply).status == "error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"push_id": 3}'])
async def test_malformed_bodies_are_refused_and_harm_nothing(served, body):
    service, server, client = served
    status, answer, _ = await raw(server, "POST", "/abort", body)
    assert status == 400
    assert json.loads(answer)["error"] == "ProtocolError"
    assert not service.asked
    assert (await client.abort(AbortRequest(push_id="p"))).ok


@pytest.mark.parametrize("secret", [None, "s"])
async def test_large_plans_and_manifests(listen, secret):
    service = EchoService()
    server = ControlServer(service, listen, secret=secret)
    await server.start()
    client = ControlClient(server.address, secret=secret, timeout_s=30.0)
    program = bytes(range(256)) * 20_000
    links = [RankLinks(rank=0, program=program, transport="shm", descriptors={})]
    assert (await client.connect(connect_request(ranks=links))).ok
    assert service.asked[0].ranks[0].program == program
    service.big = True
    assert (await client.manifest()).manifests == [program]
    await client.close()
    await server.close()


@pytest.mark.parametrize(
    "sent", [b"", b"POST /abo", b"POST /abort HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"\x00\xff" * 50]
)
async def test_callers_that_hang_up_harm_nobody(served, caplog, sent):
    _, server, client = served
    where = Address.parse(server.address)
    if where.path:
        _, writer = await asyncio.open_unix_connection(where.path)
    else:
        _, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(sent)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await client.status()).version == 3
    assert (await client.abort(AbortRequest(push_id="p"))).ok
    assert not [record for record in caplog.records if record.name.startswith("syncline")]


async def test_too_long_a_body_is_refused(served):
    service, _, client = served
    with pytest.raises(ProtocolError, match="longer than 1048576 bytes"):
        await client.abort(AbortRequest(push_id="p", reason="x" * 2**20))
    assert not service.asked


async def test_unknown_paths_and_methods_are_refused(served):
    _, server, _ = served
    assert (await raw(server, "GET", "/nothing"))[0] == 404
    assert (await raw(server, "GET", "/abort"))[0] == 405


async def test_a_call_without_an_answer_ends_by_its_deadline(served):
    service, server, _ = served
    service.hold = asyncio.Event()
    client = ControlClient(server.address, timeout_s=0.2)
    try:
        with pytest.raises(TargetUnreachable, match=r"no answer within 0.2 s"):
            await client.status()
    finally:
        service.hold.set()
        await client.close()


async def test_nobody_there(tmp_path):
    free = socket.socket()
    free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, nobody answers
    for address in (f"unix:{tmp_path}/none.sock", f"tcp://127.0.0.1:{free.getsockname()[1]}"):
        client = ControlClient(address, timeout_s=5.0)
        with pytest.raises(TargetUnreachable):
            await client.status()
        with pytest.raises(TargetUnreachable):
            await client.watch()
        await client.close()
    free.close()


async def test_something_else_answers():
    async def nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    client = ControlClient(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5.0)
    with pytest.raises(ProtocolError, match="no Status"):
        await client.status()
    await client.close()
    server.close()
    await server.wait_closed()


# addresses


async def test_a_unix_socket_is_private_and_its_directory_too(tmp_path):
    server = ControlServer(EchoService(), f"unix:{tmp_path}/deep/er/x.sock")
    await server.start()
    path = tmp_path / "deep" / "er" / "x.sock"
    assert server.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await server.close()
    assert not path.exists()


async def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path):
    path = tmp_path / "x.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    server = ControlServer(EchoService(), f"unix:{path}")
    await server.start()
    with pytest.raises(ConfigError, match="another process listens there"):
        await ControlServer(EchoService(), f"unix:{path}").start()
    client = ControlClient(server.address)
    assert (await client.status()).version == 3
    await client.close()
    await server.close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "x.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        await ControlServer(EchoService(), f"unix:{path}").start()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:0", "tcp://10.0.0.1:0", "tcp://somewhere.example:0", "tcp://[::]:0"])
def test_beyond_loopback_a_secret_is_needed(listen):
    with pytest.raises(ConfigError, match="secret"):
        ControlServer(EchoService(), listen)
    ControlServer(EchoService(), listen, secret="s")


# secrets


@pytest.fixture
async def guarded(listen):
    service = EchoService()
    server = ControlServer(service, listen, secret="the secret")
    await server.start()
    yield service, server
    await server.close()


async def test_with_the_secret_everything_works(guarded):
    service, server = guarded
    client = ControlClient(server.address, secret="the secret", timeout_s=10.0)
    assert (await client.status()).version == 3
    assert (await client.manifest()).manifests
    assert (await client.connect(connect_request())).ok
    service.error = VersionConflict("old")
    with pytest.raises(VersionConflict):
        await client.abort(AbortRequest(push_id="p"))
    opened = asyncio.Event()
    watch = asyncio.create_task(client.watch(opened.set))
    await opened.wait()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await client.close()


@pytest.mark.parametrize("secret", [None, "another secret"])
async def test_without_the_right_secret_nothing_works(guarded, secret):
    service, server = guarded
    client = ControlClient(server.address, secret=secret, timeout_s=10.0)
    prepare = PrepareRequest(num_buckets=0)
    for call in (client.status(), client.connect(connect_request()), client.prepare(prepare), client.watch()):
        with pytest.raises(AuthError):
            await call
    assert not service.asked
    await client.close()


async def test_a_secret_at_the_caller_alone_is_noticed(served):
    _, server, _ = served
    client = ControlClient(server.address, secret="s", timeout_s=10.0)
    with pytest.raises(AuthError, match="other side"):
        await client.status()
    with pytest.raises(AuthError, match="other side"):
        await client.watch()
    await client.close()


async def test_a_call_is_accepted_once(guarded):
    service, server = guarded
    body = b'{"push_id": "p"}'
    headers = Signer("the secret").sign("POST", "/abort", body)
    assert (await raw(server, "POST", "/abort", body, headers))[0] == 200
    status, answer, _ = await raw(server, "POST", "/abort", body, headers)
    assert status == 401
    assert "replay" in json.loads(answer)["message"]
    assert len(service.asked) == 1


@pytest.mark.parametrize("change", ["body", "path", "method", "time", "nonce", "signature", "no signature"])
async def test_a_changed_call_is_refused(guarded, change):
    service, server = guarded
    method, path, body = "POST", "/abort", b'{"push_id": "p"}'
    headers = Signer("the secret").sign(method, path, body)
    match change:
        case "body":
            body = b'{"push_id": "q"}'
        case "path":
            path = "/order"
        case "method":
            method, path = "GET", "/abort"
            headers = Signer("the secret").sign("GET", path, body)
            method = "POST"
        case "time":
            headers[TIME] = f"{float(headers[TIME]) + 1:.3f}"
        case "nonce":
            headers[NONCE] = "0" * 32
        case "signature":
            headers[SIGNATURE] = "0" * 64
        case "no signature":
            del headers[SIGNATURE]
    status, answer, _ = await raw(server, method, path, body, headers)
    assert status == 401
    assert json.loads(answer)["error"] == "AuthError"
    assert not service.asked


# watches

CHILD = """
import asyncio, sys
sys.path.insert(0, {here!r})
import importlib.util
spec = importlib.util.spec_from_file_location("control_tests", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

async def main():
    server = module.ControlServer(module.EchoService(), sys.argv[1])
    await server.start()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def other_process(tmp_path):
    listen = f"unix:{tmp_path}/x.sock"
    code = CHILD.format(here=str(Path(__file__).parent), file=__file__)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, listen, stdout=asyncio.subprocess.PIPE)
    address = (await process.stdout.readline()).decode().strip()
    yield address, process
    if process.returncode is None:
        process.kill()
    await process.wait()


async def watching(client):
    opened = asyncio.Event()
    watch = asyncio.create_task(client.watch(opened.set))
    async with asyncio.timeout(20):
        await asyncio.wait({asyncio.create_task(opened.wait()), watch}, return_when=asyncio.FIRST_COMPLETED)
    assert opened.is_set()
    return watch


async def test_a_watch_ends_at_once_when_the_process_dies(other_process):
    address, process = other_process
    client = ControlClient(address, heartbeat_s=1000.0, patience_s=1000.0)
    watch = await watching(client)
    process.kill()
    async with asyncio.timeout(20):
        assert "ended" in await watch
    await client.close()


async def test_a_watch_ends_by_heartbeat_when_the_process_is_stopped(other_process):
    address, process = other_process
    client = ControlClient(address, heartbeat_s=0.05, patience_s=0.5)
    watch = await watching(client)
    os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        assert "no sign of life" in await watch
    os.kill(process.pid, signal.SIGCONT)
    await client.close()


async def test_a_watch_survives_a_loop_of_our_own_that_was_blocked(other_process):
    address, _ = other_process
    client = ControlClient(address, heartbeat_s=0.01, patience_s=0.2)
    watch = await watching(client)
    for _ in range(5):
        time.sleep(0.3)  # longer than patience: what came meanwhile is read before it is missed
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert (await client.status()).version == 3
    assert not watch.done()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await client.close()


async def test_the_server_says_when_the_last_watch_of_a_peer_has_ended(served):
    service, server, _ = served
    first, second = ControlClient(server.address), ControlClient(server.address)
    for client in (first, second):
        await client.connect(connect_request(source_incarnation="the source"))
    watches = [await watching(first), await watching(second)]
    await first.close()
    assert "ended" in await watches[0]
    await second.status()
    assert service.unwatched.empty()
    await second.close()
    async with asyncio.timeout(20):
        assert await service.unwatched.get() == "the source/1"
        await watches[1]


async def test_the_server_can_end_a_watch(served):
    service, server, client = served
    await client.join(JoinRequest(rank=1, address="a", incarnation="rank 1"))
    watch = await watching(client)
    await server.drop_watches("another")
    assert not watch.done()
    await server.drop_watches("rank 1")
    async with asyncio.timeout(20):
        assert "ended" in await watch
        assert await service.unwatched.get() == "rank 1"


async def test_closing_the_server_ends_watches_and_calls(listen):
    service = EchoService()
    server = ControlServer(service, listen)
    await server.start()
    client = ControlClient(server.address, timeout_s=30.0)
    watch = await watching(client)
    service.hold = asyncio.Event()
    call = asyncio.create_task(client.status())
    async with asyncio.timeout(20):
        await service.called.wait()
        await server.close()
        assert "ended" in await watch
        with pytest.raises(SynclineError):
            await call
    assert service.unwatched.empty()
    await client.close()
