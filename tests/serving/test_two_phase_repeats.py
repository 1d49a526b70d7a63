"""The two-phase document's calls, repeated or late: a source that got no answer in time asks again."""

from __future__ import annotations

import asyncio

import pytest

from syncline.adapters.engines.two_phase_messages import CompleteUpdate, InitGroup

GROUP = "weight_sync_group"
COMPLETE = "/complete_weights_update", {"group_name": GROUP}
DESTROY = "/destroy_weights_update_group", {"group_name": GROUP}
SAID_AGAIN = {"success": False, "num_buckets_received": 0, "message": "this update is being completed already"}


@pytest.fixture
async def prepared(serve, source_of):
    """``await prepared(sent)``: a server and its source, which has sent so many of its 75 tensors."""

    async def start(sent):
        server = await serve(seed=0)
        source = await source_of(server, seed=1)
        await source.init()
        assert (await source.prepare())[1]["status"] == "ready"
        await source.send(list(source.weights)[:sent])
        return server, source

    return start


async def completed_twice(server):
    """Two calls under way, or answered: the first one has been taken in before the second one is made."""
    calls, under_way = [], server.app.service._tasks
    async with asyncio.timeout(20):
        for count in (1, 2):
            calls.append(asyncio.create_task(server.post(*COMPLETE)))
            while len(under_way) < count and not calls[-1].done():
                await asyncio.sleep(0.005)
    return calls


async def test_a_complete_that_is_repeated_while_tensors_come_does_not_disturb_the_first(prepared):
    server, source = await prepared(40)
    first, second = await completed_twice(server)
    await source.send(list(source.weights)[40:])
    said = {"success": True, "num_buckets_received": 73, "message": "Applied weights from 73 buckets"}
    async with asyncio.timeout(30):
        assert [await first, await second] == [[200, said], [200, SAID_AGAIN]]
    assert await server.serves(1, 2)
    await source.load(0)
    assert (await source.push())[1]["success"]  # the group is still there
    assert await server.serves(0, 3)


@pytest.mark.parametrize("by", ["its own deadline", "destroy"])
async def test_a_repeated_complete_that_waits_in_vain(prepared, by):
    server, source = await prepared(40)
    service = server.app.service
    if by != "destroy":
        service._timeout_s = 0.5  # of complete alone: the broadcasts under way have theirs
    first, second = await completed_twice(server)
    if by == "destroy":
        said = {"success": True, "message": "Succeeded to destroy custom process group."}
        assert await server.post(*DESTROY) == [200, said]
    async with asyncio.timeout(30):
        (status, answer), again = await first, await second
    assert (status, answer["success"]) == (200, False)
    assert answer["message"] == ("its source destroyed the group" if by == "destroy" else "Recv thread timed out")
    assert again == [200, SAID_AGAIN]
    assert not (service._updates or service._groups)
    assert await server.serves(0, 1)
    # a source that comes back is not locked out
    service._timeout_s = 30.0
    await source.peer("leave")
    assert (await source.init())[1]["success"]
    assert (await source.push())[1]["success"]
    assert await server.serves(1, 2)


async def test_a_deadline_that_passes_while_complete_is_taken_in_does_not_end_the_update(prepared):
    server, _ = await prepared(75)
    service = server.app.service
    update = service._updates[GROUP]
    async with asyncio.timeout(20):
        while update._expiry is None:
            await asyncio.sleep(0.005)
    completing = asyncio.create_task(service.complete(CompleteUpdate(group_name=GROUP)))
    while not service._tasks:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # it has begun, and has not got to the push
    assert not update.applying
    update._expire("too late", lambda _: None)
    async with asyncio.timeout(30):
        assert (await completing).success
    assert await server.serves(1, 2)


async def test_of_two_inits_at_once_one_joins(prepared):
    server, _ = await prepared(40)  # both find a group, and an update, to leave first
    service = server.app.service
    nobody = InitGroup(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name=GROUP, backend="gloo")
    calls = {asyncio.create_task(service.init_group(nobody)) for _ in range(2)}
    refused, waiting = await asyncio.wait(calls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert [call.result().message for call in refused] == [f"group {GROUP!r} is being initialized already"]
    await service.close()
    assert [(await call).message for call in waiting] == ["the server is closing"]
