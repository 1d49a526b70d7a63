"""Membership in groups that torch's own functions make, as either side, and what ends it."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from syncline.adapters.engines.update_group import HostedStore, Place, UpdateGroup
from syncline.engine.errors import ConfigError
from syncline.stages.errors import TransportError

KINDS = {
    "float32": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor(2**40),
    "empty": torch.empty(0, 5),
    "large": torch.arange(3_000_000, dtype=torch.int32),
    "uint8": torch.arange(256, dtype=torch.uint8).repeat(3),
}


@pytest.fixture
async def store():
    hosted = await HostedStore.listen()
    yield hosted
    hosted.close()


async def as_rank_0(store, peer, *, name="weights"):
    place = Place(name=name, host=store.host, port=store.port, rank=0, world_size=2)
    joining = peer("join", group=name, port=store.port, rank=1, world_size=2)
    group, said = await asyncio.gather(UpdateGroup.join(place, timeout_s=30), joining)
    assert said == "joined"
    return group


async def test_as_rank_0_our_bytes_are_their_tensors(peers, store, tmp_path):
    peer = peers()
    group = await as_rank_0(store, peer)
    metas = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in KINDS.values()]
    taking = asyncio.create_task(peer("take", metas=metas, file=str(tmp_path / "taken")))
    for signal in [group.broadcast(tensor) for tensor in KINDS.values()]:
        await signal
    assert await taking == len(KINDS)
    taken = load_file(tmp_path / "taken")
    for number, tensor in enumerate(KINDS.values()):
        assert torch.equal(taken[str(number)], tensor)
    await group.close()


async def test_as_another_rank_their_tensors_are_our_bytes(peers, tmp_path):
    peer, third = peers(), peers()
    save_file({name: tensor.clone() for name, tensor in KINDS.items()}, tmp_path / "sent")
    await peer("load", file=str(tmp_path / "sent"))
    answered = asyncio.Event()
    ports = []

    async def serve(reader, writer):
        """Takes the init call of rank 0, as an engine would."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        ports.append(json.loads(await reader.readexactly(length))["master_port"])
        answered.set()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    hosting = asyncio.create_task(
        peer("host", group="g", world_size=3, https=[["127.0.0.1", server.sockets[0].getsockname()[1]]])
    )
    await answered.wait()
    place = Place(name="g", host="127.0.0.1", port=ports[0], rank=2, world_size=3)
    joining = third("join", group="g", port=ports[0], rank=1, world_size=3)
    group, _, _ = await asyncio.gather(UpdateGroup.join(place, timeout_s=30), joining, hosting)
    metas = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in KINDS.values()]
    others = [peer("send", names=list(KINDS)), third("take", metas=metas, file=str(tmp_path / "taken"))]
    got = [torch.empty_like(tensor) for tensor in KINDS.values()]
    signals = [group.broadcast(tensor) for tensor in got]
    await asyncio.gather(*others)
    for signal, tensor, sent in zip(signals, got, KINDS.values(), strict=True):
        await signal
        assert torch.equal(tensor, sent)
    await group.close()
    server.close()
    await server.wait_closed()


async def test_a_member_that_dies_ends_the_broadcast_at_once(peers, store):
    peer = peers(fresh=True)
    group = await as_rank_0(store, peer)
    signal = group.broadcast(torch.zeros(200_000_000, dtype=torch.uint8))
    later = group.broadcast(torch.zeros(3))
    peer.kill()
    with pytest.raises(TransportError, match="'weights', as rank 0 of 2"):
        await signal
    with pytest.raises(TransportError):
        await later
    assert not group.usable
    with pytest.raises(TransportError, match="make a new one"):
        await group.broadcast(torch.zeros(3))
    await group.close()


@pytest.mark.parametrize("by", ["deadline", "patience", "close"])
async def test_a_broadcast_that_nobody_takes_ends(peers, store, by):
    group = await as_rank_0(store, peers())
    if by == "deadline":
        group.set_deadline(0.2)
    patience = {"patience_s": 0.2} if by == "patience" else {}
    signal = group.broadcast(torch.zeros(200_000_000, dtype=torch.uint8), **patience)
    if by == "close":
        await group.close(timeout_s=30)
    async with asyncio.timeout(30):
        with pytest.raises(TransportError):
            await signal
    await group.close()


async def test_a_second_group_of_the_same_name_on_another_store(peers, store):
    peer = peers()
    group = await as_rank_0(store, peer)
    await group.close()
    await peer("leave")
    again = await HostedStore.listen()
    group = await as_rank_0(again, peer)
    taking = asyncio.create_task(peer("take", metas=[["float32", [3]]], file="/dev/null"))
    await group.broadcast(torch.ones(3))
    await taking
    await group.close()
    again.close()


async def test_nobody_comes(store):
    place = Place(name="weights", host=store.host, port=store.port, rank=0, world_size=2)
    with pytest.raises(TransportError, match=r"rank 0 of 2: the members did not meet within 0.3 s"):
        await UpdateGroup.join(place, timeout_s=0.3)


async def test_no_store_listens(store):
    place = Place(name="weights", host=store.host, port=store.port, rank=1, world_size=2)
    store.close()
    with pytest.raises(TransportError, match="did not meet"):
        await UpdateGroup.join(place, timeout_s=0.3)


async def test_joining_can_be_cancelled(store):
    place = Place(name="weights", host=store.host, port=store.port, rank=0, world_size=2)
    joining = asyncio.create_task(UpdateGroup.join(place, timeout_s=1000))
    await asyncio.sleep(0)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    async with asyncio.timeout(20):  # its thread notices while the store is still there
        while any(thread.name == "syncline-update-group-make" for thread in threading.enumerate()):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ""}, "group_name"),
        ({"port": 0}, "master_port"),
        ({"rank": 2}, "rank 2 of world_size 2"),
        ({"world_size": 1, "rank": 0}, "two members"),
        ({"backend": "mpi"}, "one of gloo, nccl"),
    ],
)
async def test_a_place_that_is_none(change, says):
    fields = {"name": "g", "host": "127.0.0.1", "port": 1, "rank": 1, "world_size": 2} | change
    with pytest.raises(ConfigError, match=says):
        await UpdateGroup.join(Place(**fields), timeout_s=1)


async def test_a_tensor_that_is_not_contiguous_is_refused(peers, store):
    group = await as_rank_0(store, peers())
    with pytest.raises(TransportError, match="contiguous"):
        await group.broadcast(torch.zeros(4, 4).t())
    await group.close()
