"""The gloo communicator: bytes, barriers, aborting, and nothing left behind. Both ranks in one process."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import torch

from syncline.stages.barrier import GroupBarrier
from syncline.stages.communicator import Communicator, Rendezvous, unique_name
from syncline.stages.errors import TransportError

HOST = "127.0.0.1"


@pytest.fixture
def rendezvous():
    rendezvous = Rendezvous.host(HOST, timeout_s=20)
    yield rendezvous
    rendezvous.close()


async def pair(rendezvous, size=2, *, timeout_s=20.0):
    name = unique_name("test")
    return await asyncio.gather(
        *(
            Communicator.create(rendezvous, name=name, rank=rank, size=size, bind_host=HOST, timeout_s=timeout_s)
            for rank in range(size)
        )
    )


async def close(*communicators):
    await asyncio.gather(*(one.close() for one in communicators))


def noise(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


async def done(completion):
    async with asyncio.timeout(20):
        while not completion.poll():
            await asyncio.sleep(0.001)


async def test_bytes_arrive_by_tag_in_both_directions(rendezvous):
    a, b = await pair(rendezvous)
    sent = {tag: noise(nbytes) for tag, nbytes in enumerate([1, 1000, 3_000_000])}
    got = {tag: torch.empty_like(content) for tag, content in sent.items()}
    receiving = [b.recv(got[tag], 0, tag) for tag in reversed(got)]
    sending = [a.send(sent[tag], 1, tag) for tag in sent]
    back, answer = noise(10), torch.empty(10, dtype=torch.uint8)
    both = [b.send(back, 0, 7), a.recv(answer, 1, 7)]
    for signal in (*receiving, *sending, *both):
        await signal
    assert all(torch.equal(sent[tag], got[tag]) for tag in sent)
    assert torch.equal(back, answer)
    await close(a, b)


async def test_several_groups_meet_at_once_through_one_rendezvous(rendezvous):
    groups = await asyncio.gather(*(pair(rendezvous, size) for size in (2, 3, 2)))
    for group in groups:
        barriers = [one.barrier() for one in group]
        await asyncio.gather(*(done(barrier) for barrier in barriers))
        await close(*group)


async def test_a_barrier_waits_for_the_last(rendezvous):
    group = await pair(rendezvous, 3)
    early = [GroupBarrier(one)(0) for one in group[:2]]
    for _ in range(20):
        await asyncio.sleep(0.001)
        assert not any(barrier.poll() for barrier in early)
    late = GroupBarrier(group[2])(0)
    await asyncio.gather(*(done(barrier) for barrier in (*early, late)))
    await close(*group)


async def test_a_single_rank_needs_no_barrier(rendezvous):
    (alone,) = await pair(rendezvous, 1)
    assert alone.barrier() is None
    assert GroupBarrier(None)(3) is None
    await close(alone)


async def test_closing_ends_everything_under_way_at_once(rendezvous):
    a, b = await pair(rendezvous)
    big = noise(32_000_000)
    pending = [a.send(big, 1, 1), a.recv(torch.empty(8, dtype=torch.uint8), 1, 2)]
    barrier = a.barrier()
    while a._to_post.qsize():
        await asyncio.sleep(0.001)
    began = time.monotonic()
    await a.close()
    assert time.monotonic() - began < 5
    for signal in pending:
        with pytest.raises(TransportError, match=r"rank 1"):
            await signal
    with pytest.raises(TransportError, match="barrier of 2 ranks"):
        await done(barrier)
    assert not a.usable
    for signal in (a.send(noise(1), 1, 3), a.recv(noise(1), 1, 3)):
        with pytest.raises(TransportError, match="connect again"):
            await signal
    with pytest.raises(TransportError, match="connect again"):
        a.barrier()
    await close(a, b)


async def test_the_peer_of_a_closed_one_learns_of_it(rendezvous):
    a, b = await pair(rendezvous)
    waiting = b.recv(torch.empty(8, dtype=torch.uint8), 0, 1)
    await a.close()
    with pytest.raises(TransportError):
        async with asyncio.timeout(10):
            await waiting
    assert not b.usable
    await b.close()


async def test_a_deadline_ends_operations_and_the_communicator_with_them(rendezvous):
    a, b, c = await pair(rendezvous, 3)
    a.set_deadline(0.05)
    late = a.recv(torch.empty(8, dtype=torch.uint8), 1, 1)
    a.set_deadline(20)
    other = a.recv(torch.empty(8, dtype=torch.uint8), 2, 1)
    for signal in (late, other):
        with pytest.raises(TransportError):
            async with asyncio.timeout(10):
                await signal
    assert not a.usable
    await close(a, b, c)


async def test_who_does_not_come_is_waited_for_in_vain_but_not_for_ever(rendezvous):
    with pytest.raises(TransportError, match="rank 0 of 2 did not meet the others"):
        await Communicator.create(rendezvous, name="alone", rank=0, size=2, bind_host=HOST, timeout_s=0.3)


async def test_a_rendezvous_that_is_not_there():
    with pytest.raises(TransportError, match="no rendezvous at"):
        await asyncio.to_thread(Rendezvous.join, "127.0.0.1:1", timeout_s=0.3)


def test_the_rendezvous_listens_on_its_host_only(rendezvous):
    port = int(rendezvous.endpoint.rpartition(":")[2])
    listening = [
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if int(line.split()[1].split(":")[1], 16) == port and line.split()[3] == "0A"
    ]
    assert listening
    assert all(address in {"0100007F", "0000000000000000FFFF00000100007F"} for address in listening)


async def test_making_and_closing_leaves_nothing(rendezvous):
    def held():
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    counts = []
    for round_ in range(40):
        a, b = await pair(rendezvous)
        receiving = b.recv(torch.empty(1000, dtype=torch.uint8), 0, 1)
        await a.send(noise(1000), 1, 1)
        await receiving
        if round_ % 2:
            abandoned = a.recv(torch.empty(8, dtype=torch.uint8), 1, 2)
        await close(a, b)
        if round_ % 2:
            with pytest.raises(TransportError):
                await abandoned
        if round_ in {5, 39}:
            counts.append(await settled(held))
    assert counts[1][0] <= counts[0][0]
    assert counts[1][1] <= counts[0][1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("syncline-gloo")]


class LosesSends:
    """A group of gloo's that loses sends, as gloo does when a peer dies as it begins to write: nothing ends their wait."""

    def __init__(self, group):
        self._group = group
        self.found = threading.Event()

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, tensors, peer, tag):
        return self

    def wait(self, timeout):
        self.found.wait(timeout.total_seconds())
        raise RuntimeError("timed out")


async def test_an_operation_that_gloo_has_lost_fails_when_the_communicator_is_closed(rendezvous):
    a, b = await pair(rendezvous)
    a._group = lost = LosesSends(a._group)
    a.set_deadline(3600)
    signals = [a.send(noise(10), 1, 1), a.recv(torch.empty(5, dtype=torch.uint8), 1, 2), a.send(noise(10), 1, 3)]
    async with asyncio.timeout(30):
        await a.abort()
        for signal in signals:
            with pytest.raises(TransportError):
                await signal
    await b.close()
    lost.found.set()
    assert not await settled(lambda: [t.name for t in threading.enumerate() if t.name.startswith("syncline-gloo")])


async def settled(ask):
    """The answer once it stays the same: gloo's own threads take a moment to end."""
    last = None
    while (now := ask()) != last:
        last = now
        await asyncio.sleep(0.05)
    return now
