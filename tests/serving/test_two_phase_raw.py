"""The two-phase document against the ASGI app under a real server: raw HTTP and torch's own broadcasts, nothing else.

The source is a process of its own that imports nothing of syncline (`two_phase_peer.py`). The target is a model of
transformers that answers requests while it is updated (`two_phase_rig.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from syncline.adapters.engines.replay import Replayer

GROUP = "weight_sync_group"


async def test_73_buckets_by_the_document(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    assert await server.serves(0, 1)
    assert await source.init() == [200, {"success": True, "message": "Succeeded to initialize custom process group."}]
    assert await source.prepare() == [200, {"status": "ready", "message": "Started recv loop for 73 buckets"}]
    await source.send()
    assert await server.serves(0, 1)  # nothing changes before complete
    assert server.receiver.state == "COMMITTED"
    answer = await source.complete()
    assert answer == [200, {"success": True, "num_buckets_received": 73, "message": "Applied weights from 73 buckets"}]
    assert await server.serves(1, 2)
    # and again, over the same group
    for seed, version in ((0, 3), (1, 4)):
        await source.load(seed)
        assert (await source.push())[1]["success"]
        assert await server.serves(seed, version)
    left = [200, {"success": True, "message": "Succeeded to destroy custom process group."}]
    assert await source.post("/destroy_weights_update_group", {"group_name": GROUP}) == left
    assert await source.prepare() == [200, {"status": "error", "message": "Process group not initialized"}]


# what is wrong before a byte moves


def _edit(**changes):
    def edit(buckets):
        buckets[3] |= changes

    return edit


def _renamed(buckets):
    buckets[5]["names"][0] = "model.layers.0.nonsense.weight"


def _reshaped(buckets):
    buckets[0]["shapes"][0] = [97, 31]


def _missing(buckets):
    del buckets[70:]


def _twice(buckets):
    buckets.append(dict(buckets[0]))


@pytest.mark.parametrize(
    "case",
    [
        (_edit(), {"num_buckets": 72}, "num_buckets is 72, and 73 buckets are described"),
        (_edit(dtypes=[]), {}, "bucket 3: 1 names, 0 dtypes, 1 shapes"),
        (_edit(shapes=[[1], [2]]), {}, "bucket 3: 1 names, 1 dtypes, 2 shapes"),
        (_edit(dtypes=["float31"]), {}, "dtype 'float31' is none that torch knows"),
        (_edit(dtypes=["complex128"]), {}, "dtype 'complex128' cannot travel"),
        (_edit(shapes=[[-1, 3]]), {}, "negative"),
        (_renamed, {}, "model.layers.0.nonsense.weight"),
        (_reshaped, {}, "model.embed_tokens.weight"),
        (_missing, {}, "lm_head.weight"),
        (_twice, {}, "model.embed_tokens.weight: announced 2 times"),
        (list.clear, {}, "no bucket is described"),
        (_edit(), {"group_name": "another"}, "Process group not initialized"),
    ],
)
async def test_what_does_not_fit_is_said_before_a_byte_moves(two_phase_rig, serve, source_of, case):
    edit, changes, says = case
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    buckets = two_phase_rig.buckets_of(source.weights)
    edit(buckets)
    status, answer = await source.prepare(buckets, **changes)
    assert (status, set(answer), answer["status"]) == (200, {"status", "message"}, "error")
    assert says in answer["message"]
    assert (await source.complete())[1] == {"success": False, "num_buckets_received": 0, "message": "no update was prepared"}
    assert await server.serves(0, 1)
    assert (await source.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_all_problems_are_said_at_once(two_phase_rig, serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    buckets = two_phase_rig.buckets_of(source.weights)
    _missing(buckets)
    _reshaped(buckets)
    message = (await source.prepare(buckets))[1]["message"]
    assert all(name in message for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"))


async def test_calls_that_come_too_early(serve):
    server = await serve()
    body = {"num_buckets": 0, "buckets": [], "group_name": GROUP}
    said = {"status": "error", "message": "Process group not initialized"}
    assert await server.post("/prepare_weights_update", body) == [200, said]
    said = {"success": False, "num_buckets_received": 0, "message": "Process group not initialized"}
    assert await server.post("/complete_weights_update", {"group_name": GROUP}) == [200, said]
    said = {"success": False, "message": "Process group not initialized"}
    assert await server.post("/destroy_weights_update_group", {"group_name": GROUP}) == [400, said]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/prepare_weights_update", {"num_buckets": 1}),
        ("/prepare_weights_update", {"num_buckets": 1, "buckets": [], "group_name": 3}),
        ("/prepare_weights_update", {"num_buckets": 1, "buckets": [{"names": "a", "dtypes": [], "shapes": []}]}),
        ("/complete_weights_update", {}),
        ("/complete_weights_update", {"group_name": GROUP, "flush_cache": "maybe"}),
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}),
        ("/destroy_weights_update_group", []),
    ],
)
async def test_bodies_that_are_none(serve, path, body):
    server = await serve()
    status, answer = await server.post(path, body)
    assert status == 422
    assert path in answer["message"]
    assert answer.get("status", "error") == "error"
    assert not answer.get("success", False)
    status, answer = await server.post(path, None, data=b"{")
    assert status == 422


async def test_a_group_that_cannot_be_made(serve):
    server = await serve(group_timeout_s=0.3)
    place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": GROUP}
    status, answer = await server.post("/init_weights_update_group", place | {"backend": "gloo"})
    assert (status, answer["success"]) == (400, False)
    assert "did not meet within 0.3 s" in answer["message"]
    status, answer = await server.post("/init_weights_update_group", place | {"world_size": 1})
    assert status == 400
    assert "rank 1 of world_size 1" in answer["message"]
    assert "no CUDA device" in answer["message"]  # nccl is the default, as in SGLang


# one at a time


async def test_a_second_prepare_while_one_runs_is_refused(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    await source.prepare()
    await source.send(list(source.weights)[:40])
    status, answer = await source.prepare()
    assert (status, answer["status"]) == (200, "error")
    assert "is under way" in answer["message"]
    await source.send(list(source.weights)[40:])
    assert (await source.complete())[1]["num_buckets_received"] == 73
    assert await server.serves(1, 2)


async def test_while_an_update_is_applied_everything_else_waits_for_its_end(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    await source.prepare()
    await source.send()
    async with server.receiver.gate.forward():  # the commit waits for this forward pass
        completing = asyncio.create_task(server.post("/complete_weights_update", {"group_name": GROUP}))
        async with asyncio.timeout(20):
            while server.receiver.state != "UPDATING":
                await asyncio.sleep(0.005)
        _, again = await server.post("/complete_weights_update", {"group_name": GROUP})
        assert (again["success"], again["message"]) == (False, "this update is being completed already")
        assert "under way" in (await source.prepare())[1]["message"]
        status, left = await server.post("/destroy_weights_update_group", {"group_name": GROUP})
        assert (status, left["success"]) == (400, False)
        assert "being applied" in left["message"]
    assert (await completing)[1]["success"]
    assert await server.serves(1, 2)


async def test_a_caller_that_goes_away_does_not_stop_its_complete(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    await source.prepare()
    await source.send()
    async with server.receiver.gate.forward():
        completing = asyncio.create_task(server.post("/complete_weights_update", {"group_name": GROUP}))
        async with asyncio.timeout(20):
            while server.receiver.state != "UPDATING":
                await asyncio.sleep(0.005)
        completing.cancel()
    async with asyncio.timeout(20):
        while server.receiver.state == "UPDATING":
            await asyncio.sleep(0.005)
    assert await server.serves(1, 2)


# sources that crash


@pytest.mark.parametrize("sent", [0, 1, 30, 74], ids=lambda sent: f"{sent} of 75 sent")
async def test_a_source_that_crashes_between_prepare_and_complete(serve, source_of, sent):
    server = await serve(seed=0)
    source = await source_of(server, seed=1, fresh=True)
    await source.init()
    await source.prepare()
    await source.send(list(source.weights)[:sent])
    source.peer.kill()
    status, answer = await server.post("/complete_weights_update", {"group_name": GROUP})
    assert (status, answer["success"]) == (200, False)
    assert answer["num_buckets_received"] == len([b for b in range(73) if 75 * (b + 1) // 73 <= sent])
    assert "did not come" in answer["message"]
    assert await server.serves(0, 1)
    # the group is gone, and can be made again
    assert (await server.post("/prepare_weights_update", {"num_buckets": 0, "buckets": [], "group_name": GROUP}))[1] == {
        "status": "error",
        "message": "Process group not initialized",
    }
    again = await source_of(server, seed=1)
    assert (await again.init())[1]["success"]
    assert (await again.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_a_source_that_crashes_after_its_last_broadcast_is_given_up_by_the_deadline(serve, source_of):
    server = await serve(seed=0, timeout_s=1.0)
    source = await source_of(server, seed=1, fresh=True)
    await source.init()
    assert (await source.prepare())[1]["status"] == "ready"
    await source.send()
    source.peer.kill()
    async with asyncio.timeout(20):
        while server.app.service._groups:
            await asyncio.sleep(0.01)
    _, answer = await server.post("/complete_weights_update", {"group_name": GROUP})
    assert (answer["success"], answer["num_buckets_received"]) == (False, 73)
    assert "did not complete its update within 1 s" in answer["message"]
    assert await server.serves(0, 1)


async def test_a_source_that_comes_back_at_once_is_not_locked_out(serve, source_of):
    server = await serve(seed=0)
    source = await source_of(server, seed=2, fresh=True)
    await source.init()
    await source.prepare()
    await source.send()
    source.peer.kill()
    again = await source_of(server, seed=1)
    assert (await again.init())[1]["success"]
    assert (await again.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_a_source_that_is_stopped_in_the_middle_is_given_up_by_the_deadline(serve, source_of):
    server = await serve(seed=0, timeout_s=1.0)
    source = await source_of(server, seed=1, fresh=True)
    await source.init()
    await source.prepare()
    await source.send(list(source.weights)[:30])
    async with asyncio.timeout(20):  # what it handed over has left its process
        while server.app.service._updates[GROUP].buckets_received < 29:
            await asyncio.sleep(0.005)
    os.kill(source.peer.process.pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        _, answer = await server.post("/complete_weights_update", {"group_name": GROUP})
    assert (answer["success"], answer["num_buckets_received"]) == (False, 30)
    assert await server.serves(0, 1)
    source.peer.kill()
    again = await source_of(server, seed=1)
    await again.init()
    assert (await again.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_no_answer_is_mixed_while_updates_come(two_phase_rig, serve, source_of, ask, prompts):
    """Requests run all the while and are kept over every commit; what each token's version is, is true."""
    server = await serve(seed=0)
    source = await source_of(server, seed=1)
    await source.init()
    weights = [dict(two_phase_rig.model_of(seed).state_dict()) for seed in (0, 1)]
    answers, stop = [], asyncio.Event()

    async def keep_asking(prompt):
        while not stop.is_set():
            answers.append((prompt, await server.engine.generate(ask(prompt, 40))))

    async with asyncio.TaskGroup() as group:
        for prompt in prompts(4):
            group.create_task(keep_asking(prompt))
        for version in range(2, 8):
            await source.load((version + 1) % 2)
            assert (await source.push())[1]["success"]
            assert server.engine.version == version
        stop.set()
    replayer = Replayer(two_phase_rig.model_of(0), lambda version: weights[(version + 1) % 2])
    reports = [replayer.check(prompt, answer.token_ids, answer.versions) for prompt, answer in answers]
    assert [report.problem for report in reports if not report.ok] == []
    assert sum(len(answer.versions) > 1 for _, answer in answers) >= 3  # kept over a commit
