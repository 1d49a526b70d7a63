"""What a document-only source may get wrong in its content, and what the app does with what the target says."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.engines.server import GenerationServer
from syncline.adapters.engines.two_phase_app import TwoPhaseApp
from syncline.adapters.engines.two_phase_messages import CompleteUpdate, InitGroup
from syncline.adapters.engines.two_phase_service import TwoPhaseService
from syncline.adapters.named_box import named_box
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ClosedError

GROUP = "weight_sync_group"
NORM = "model.layers.3.input_layernorm.weight"


@pytest.mark.parametrize(
    ("announced", "says"),
    [
        ({"dtypes": ["bfloat16"]}, "more bytes came than the 64 that were announced"),
        ({"dtypes": ["float64"]}, "fewer bytes came than the 256 that were announced"),
    ],
)
async def test_another_size_than_announced_is_an_error_and_no_crash(two_phase_rig, serve, source_of, announced, says):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    buckets = two_phase_rig.buckets_of(source.weights)
    (norm,) = [bucket for bucket in buckets if NORM in bucket["names"]]
    norm |= announced
    assert (await source.prepare(buckets))[1]["status"] == "ready"  # the types are castable: it is a lie, not a misfit
    await source.send(list(source.weights)[: list(source.weights).index(NORM) + 1])
    status, answer = await source.complete()
    assert (status, answer["success"]) == (200, False)
    assert f"{NORM} (bucket {buckets.index(norm)}): {says}" in answer["message"]
    assert await server.serves(0, 1)
    await source.peer("leave")
    await source.init()
    assert (await source.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_tensors_in_another_order_than_announced_are_noticed(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    await source.prepare()
    sending = asyncio.create_task(source.send(list(reversed(source.weights))))
    _, answer = await server.post("/complete_weights_update", {"group_name": GROUP})
    assert not answer["success"]
    await asyncio.gather(sending, return_exceptions=True)
    assert await server.serves(0, 1)


async def test_a_source_in_another_type_is_cast_as_planned(two_phase_rig, serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.load(1, dtype=torch.bfloat16)
    await source.init()
    assert (await source.push())[1]["success"]
    for name, tensor in server.model.state_dict().items():
        assert torch.equal(tensor, two_phase_rig.model_of(1).state_dict()[name].to(torch.bfloat16).float())


async def test_tied_weights_come_once(two_phase_rig, serve, source_of):
    server = await serve(seed=0, tied=True)
    source = await source_of(server, seed=1)
    await source.load(1, tied=True)
    assert "lm_head.weight" not in source.weights
    await source.init()
    assert (await source.push())[1]["success"]
    assert await server.serves(1, 2)


@pytest.mark.parametrize("flush", [False, True])
async def test_flush_cache_reaches_the_engine(serve, source_of, flush):
    server = await serve(seed=0, flushing=True)
    source = await source_of(server, seed=1)
    await source.init()
    await source.prepare()
    await source.send()
    assert (await source.complete(flush_cache=flush))[1]["success"]
    assert server.engine.flushed == ([2] if flush else [])


class Clumsy(ModuleLoader):
    """Fails at the end of its first load, when the live parameters have been written."""

    failed = False

    def finish(self, version):
        super().finish(version)
        if not self.failed:
            self.failed = True
            raise OSError("by the test")


async def test_a_loader_that_fails_is_said_and_the_next_push_heals(serve, source_of):
    server = await serve(seed=0, loader=Clumsy)
    source = await source_of(server, seed=1)
    await source.init()
    status, answer = await source.push()
    assert (status, answer["success"], answer["num_buckets_received"]) == (200, False, 73)
    assert "LoaderError" in answer["message"]
    assert "by the test" in answer["message"]
    assert "FENCED" in answer["message"]
    assert server.receiver.state == "FENCED"
    await source.load(2)
    assert (await source.push())[1]["success"]
    assert await server.serves(2, 3)


async def test_both_kinds_of_source_take_turns(two_phase_rig, serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    ours = two_phase_rig.model_of(2)
    config = TransferConfig(trace=False)
    target = RemoteTarget(server.receiver.address)
    async with TransferEngine(source=ModuleSource(ours, world_size=1), targets=[target], config=config) as engine:
        assert (await source.push())[1]["success"]
        assert await server.serves(1, 2)
        report = await engine.push(7)
        if not report.ok:  # the other source's links are in place: this attempt says so, the next one links anew
            report = await engine.push(7)
        assert report.ok
        assert await server.serves(2, 7)
        assert (await source.push())[1]["success"]
        assert await server.serves(1, 8)


async def test_a_prepare_of_ours_is_answered_by_the_target_itself(serve):
    server = await serve(seed=0)
    ours = {"num_buckets": 3, "version": 2, "plan_digest": "d", "push_id": "p"}
    status, answer = await server.post("/prepare_weights_update", ours)
    assert (status, answer["status"], answer["error"]) == (200, "error", "ProtocolError")
    assert "not linked" in answer["message"]
    status, answer = await server.post("/complete_weights_update", ours)
    assert (status, answer["success"]) == (200, False)
    assert "never prepared" in answer["message"]
    assert {"state", "version"} <= set(answer)


async def test_with_a_secret_nothing_of_ours_passes_unsigned(serve, source_of):
    server = await serve(seed=0, secret="open sesame")
    ours = {"num_buckets": 3, "version": 2, "plan_digest": "d", "push_id": "p"}
    _, answer = await server.post("/prepare_weights_update", ours)
    assert answer["error"] == "AuthError"
    source = await source_of(server, seed=1)
    await source.init()
    assert (await source.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_one_source_into_two_engines_by_one_group(two_phase_rig, serve, source_of):
    servers = [await serve(seed=0), await serve(seed=0)]
    source = await source_of(servers[0], seed=1)
    https = [server.http for server in servers]
    answers = await source.peer("host", group=GROUP, world_size=3, https=https)
    assert [status for status, _ in answers] == [200, 200]
    body = {"num_buckets": 73, "buckets": two_phase_rig.buckets_of(source.weights), "group_name": GROUP}
    for server in servers:
        assert (await server.post("/prepare_weights_update", body))[1]["status"] == "ready"
    await source.send()
    for server in servers:
        assert (await server.post("/complete_weights_update", {"group_name": GROUP}))[1]["success"]
        assert await server.serves(1, 2)


async def test_another_app_behind_it_gets_everything_else(serve):
    async def inner(scope, receive, send):
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": f'{{"inner": "{scope["path"]}"}}'.encode()})

    server = await serve(seed=0, inner=inner)
    assert await server.post("/generate", {}) == [200, {"inner": "/generate"}]
    assert (await server.post("/complete_weights_update", {"group_name": GROUP}))[1]["success"] is False


@pytest.mark.parametrize("root", ["", "/weights"])
async def test_mounted_under_a_prefix(serve, root):
    server = await serve(seed=0)
    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"group_name": "g"}'}

    async def send(message):
        sent.append(message)

    path = root + "/complete_weights_update"
    await server.app({"type": "http", "method": "POST", "path": path, "root_path": root}, receive, send)
    assert sent[0]["status"] == 200
    assert b"Process group not initialized" in sent[1]["body"]


async def test_what_is_not_there_and_what_is_not_asked_so(serve):
    server = await serve(seed=0)
    assert (await server.post("/nothing", {}))[0] == 404
    assert (await server.post("/prepare_weights_update", None, method="GET"))[0] == 405


async def test_the_generation_server_takes_updates_of_the_document(two_phase_rig, serve, source_of):
    """The same protocol at the URL of `syncline serve`, whose server is another one."""
    hosted = await serve(seed=0)
    server = GenerationServer(
        hosted.engine, None, receiver=hosted.receiver, two_phase=TwoPhaseService(lambda: hosted.receiver.address)
    )
    async with server:
        source = await source_of(hosted, seed=1)
        source.http = ["127.0.0.1", int(server.url.rpartition(":")[2])]
        assert (await source.init())[1]["success"]
        assert (await source.push())[1] == {
            "success": True, "num_buckets_received": 73, "message": "Applied weights from 73 buckets",
        }  # fmt: skip
        assert await hosted.serves(1, 2)
        assert (await source.complete())[1]["message"] == "no update was prepared"


async def test_into_a_target_of_several_ranks(peers, serve_app, tmp_path):
    """The document's source sends whole tensors; each rank gets its slices, and all commit or none."""
    shapes = {"weight": (8, 6), "bias": (8,)}
    halves = [nn.Linear(6, 4), nn.Linear(6, 4)]
    receivers = []
    for rank, half in enumerate(halves):
        layout = {
            name: named_box(name, shape, start=(4 * rank, *[0] * (len(shape) - 1)), size=(4, *shape[1:]))
            for name, shape in shapes.items()
        }
        receiver = Receiver(
            loader=ModuleLoader(half, layout=layout), listen="tcp://127.0.0.1:0", rank=rank, world_size=2,
            leader=receivers[0].address if rank else None, initial_version=3,
        )  # fmt: skip
        await receiver.start()
        receivers.append(receiver)
    await receivers[1].joined()
    http = await serve_app(TwoPhaseApp(receivers[0].address))
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(whole, tmp_path / "whole")
    peer = peers()
    await peer("load", file=str(tmp_path / "whole"))
    await peer("host", group=GROUP, world_size=2, https=[http])
    bucket = {"names": list(shapes), "dtypes": ["float32"] * 2, "shapes": list(shapes.values())}
    body = {"num_buckets": 1, "buckets": [bucket], "group_name": GROUP}
    assert (await peer("post", http=http, path="/prepare_weights_update", body=body))[1]["status"] == "ready"
    await peer("send", names=list(shapes))
    answer = (await peer("post", http=http, path="/complete_weights_update", body={"group_name": GROUP}))[1]
    assert answer == {"success": True, "num_buckets_received": 1, "message": "Applied weights from 1 buckets"}
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([half.state_dict()[name] for half in halves]), tensor)
    assert [(receiver.state, receiver.version) for receiver in receivers] == [("COMMITTED", 4)] * 2
    for receiver in reversed(receivers):
        await receiver.close()


async def test_closing_ends_what_waits(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    await source.prepare()
    service = server.app.service
    completing = asyncio.create_task(service.complete(CompleteUpdate(group_name=GROUP)))
    alone = InitGroup(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo")
    joining = asyncio.create_task(service.init_group(alone))
    async with asyncio.timeout(20):
        while len(service._tasks) < 2:
            await asyncio.sleep(0)
        await service.close()
        assert (await completing).message == "the server is closing"
        assert not (await joining).success
    assert await server.serves(0, 1)
    with pytest.raises(ClosedError):
        await service.complete(CompleteUpdate(group_name=GROUP))
    assert (await server.post("/complete_weights_update", {"group_name": GROUP}))[0] == 503
