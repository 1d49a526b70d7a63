"""The NCCL communicator and its one thread, over what stands for NCCL (`standins`): real threads and a real rendezvous."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch

from syncline.stages.communicator import Rendezvous
from syncline.stages.errors import TransportError
from syncline.stages.nccl_communicator import Issuer, NcclCommunicator

CPU = torch.device("cpu")


@pytest.fixture
def fabric(standins):
    return standins.Fabric()


@pytest.fixture
def meet(fabric):
    """``await meet(size)``: all ranks of a communicator, each with an issuer of its own unless they are given."""
    names, rendezvous = iter("abcdef"), Rendezvous.host("127.0.0.1", timeout_s=10)

    async def make(size, issuers=None, *, timeout_s=10.0, ranks=None, label="test", **options):
        issuers = issuers or [Issuer(fabric.runtime()) for _ in range(size)]
        name = next(names)
        return await asyncio.gather(
            *(
                NcclCommunicator.create(
                    rendezvous, issuer=issuers[rank], name=name, label=label, rank=rank, size=size, timeout_s=timeout_s,
                    device=CPU, **options,
                )
                for rank in (range(size) if ranks is None else ranks)
            )
        )  # fmt: skip

    yield make
    rendezvous.close()


def filled(number, count=10):
    return torch.full((count,), number, dtype=torch.uint8)


async def test_bytes_go_both_ways_and_the_thread_ends_with_the_last(meet):
    one, other = await meet(2)
    memory = [filled(0), filled(0), filled(0)]
    await asyncio.gather(
        *(one.send(filled(3), 1, 0), one.recv(memory[0], 1, 0), other.recv(memory[1], 0, 0), other.send(filled(4), 0, 0))
    )
    await asyncio.gather(one.send_all([filled(5), filled(6)], 1, 1), other.recv_all([memory[1], memory[2]], 0, 1))
    assert [int(m[0]) for m in memory] == [4, 5, 6]
    assert any(thread.name == "syncline-nccl" for thread in threading.enumerate())
    await asyncio.gather(one.close(), other.close())
    assert not one.usable
    with pytest.raises(TransportError, match="closed"):
        await one.send(filled(1), 1, 9)


async def test_whatever_the_thread_fails_with_nobody_waits_for_it(meet, monkeypatch):
    one, other = await meet(2)
    issuer = one._issuer

    def bug(*_args):
        raise KeyError("by the test")

    with monkeypatch.context() as patch:
        patch.setattr(issuer.runtime, "group", bug)
        with pytest.raises(TransportError, match="by the test"):
            await asyncio.wait_for(one.send(filled(1), 1, 0), 10)
        await asyncio.wait_for(one.close(), 10)
    await other.close()
    again, peer = await meet(2, [issuer, other._issuer])
    memory = filled(0)
    await asyncio.gather(again.send(filled(2), 1, 0), peer.recv(memory, 0, 0))
    assert int(memory[0]) == 2
    await asyncio.gather(again.close(), peer.close())


async def test_every_communicator_of_a_thread_that_failed_says_so_at_once(meet, fabric, monkeypatch):
    """Nobody is left to a deadline, whatever it was that failed."""
    issuers = [Issuer(fabric.runtime()) for _ in range(2)]
    pairs = [await meet(2, issuers, label=label) for label in ("a", "b")]
    (one, _), (beside, _) = pairs
    waiting = beside.recv(filled(0), 1, 0)

    def bug(*_args):
        raise KeyError("by the test")

    with monkeypatch.context() as patch:
        patch.setattr(issuers[0].runtime, "group", bug)
        for signal in (one.send(filled(1), 1, 0), waiting, beside.send(filled(1), 1, 0)):
            with pytest.raises(TransportError, match="by the test"):
                await asyncio.wait_for(signal, 10)
    assert not one.usable
    assert not beside.usable
    await asyncio.gather(*(each.close() for pair in pairs for each in pair))


async def test_an_abort_that_fails_is_an_end_all_the_same(meet, monkeypatch, caplog):
    """On a device that is lost the abort raises, too."""
    one, other = await meet(2)
    waiting = one.recv(filled(0), 1, 0)

    def lost(_communicator):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(one._issuer.runtime, "abort", lost)
    await asyncio.wait_for(one.abort(), 10)
    with pytest.raises(TransportError, match="closed"):
        await asyncio.wait_for(waiting, 10)
    assert "the device is lost" in caplog.text
    await other.close()


@pytest.fixture
def no_thread(monkeypatch):
    """``with no_thread(name):`` no thread of that name can be started."""
    started = threading.Thread.start

    @contextlib.contextmanager
    def without(name):
        def start(thread):
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            started(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            yield

    return without


async def test_what_cannot_be_aborted_by_a_thread_of_its_own_ends_too(meet, no_thread):
    one, other = await meet(2)
    waiting = one.recv(filled(0), 1, 0)
    with no_thread("syncline-nccl-abort"):
        await asyncio.wait_for(one.abort(), 10)
    with pytest.raises(TransportError, match="closed"):
        await asyncio.wait_for(waiting, 10)
    await other.close()


async def test_a_thread_that_could_not_be_had_is_asked_for_again(meet, fabric, no_thread):
    issuers = [Issuer(fabric.runtime()) for _ in range(2)]
    with no_thread("syncline-nccl"), pytest.raises(RuntimeError, match="new thread"):
        issuers[0].expect([])
    one, other = await meet(2, issuers, timeout_s=5.0)
    await asyncio.gather(one.close(), other.close())


async def test_one_thread_makes_the_calls_of_all_communicators(meet, fabric):
    issuers = [Issuer(fabric.runtime()) for _ in range(2)]
    pairs = [await meet(2, issuers, label=label) for label in ("a", "b")]
    memory = [filled(0), filled(0)]
    for number, (one, other) in enumerate(pairs):
        await asyncio.gather(one.send(filled(number + 1), 1, 0), other.recv(memory[number], 0, 0))
    assert [int(m[0]) for m in memory] == [1, 2]
    assert len([thread for thread in threading.enumerate() if thread.name == "syncline-nccl"]) == 2
    await asyncio.gather(*(one.close() for pair in pairs for one in pair))


async def test_a_stalled_peer_costs_its_communicator_and_nothing_else(meet, fabric):
    one, other = await meet(2)
    fabric.stalled.add((one._link.unique_id, 1))
    one.set_deadline(0.2)
    async with asyncio.timeout(10):
        with pytest.raises(TransportError, match="in time"):
            await one.send(filled(1), 1, 0)
    assert not one.usable
    await other.close()
    again, fresh = await meet(2)
    memory = filled(0)
    await asyncio.gather(again.send(filled(9), 1, 0), fresh.recv(memory, 0, 0))
    assert int(memory[0]) == 9
    await asyncio.gather(again.close(), fresh.close())


async def test_closing_ends_what_is_under_way_here_and_there(meet):
    one, other = await meet(2)
    waiting, there = one.recv(filled(0), 1, 0), other.send(filled(0, 4), 0, 7)
    await one.close()
    for signal in (waiting, there):
        with pytest.raises(TransportError):
            await signal
    await other.close()


async def test_those_who_do_not_come_are_named_in_time(meet, fabric):
    with pytest.raises(TransportError, match="rank 0 of 2 did not meet"):
        await meet(2, timeout_s=0.3, ranks=[0])
    assert next(fabric.numbers) == 1, "NCCL would wait for rank 1 without end, with a thread and sockets"
    with pytest.raises(TransportError, match="did not meet"):
        await meet(2, timeout_s=0.3, ranks=[1])


async def test_who_is_cancelled_while_others_come_makes_no_identity(fabric):
    """NCCL would await those whom it is for, without end; and the thread that waits for them ends at once."""
    rendezvous = Rendezvous.host("127.0.0.1", timeout_s=600)

    def create(rank):
        return NcclCommunicator.create(
            rendezvous, issuer=Issuer(fabric.runtime()), name="n", label="test", rank=rank, size=2, timeout_s=600, device=CPU
        )

    async with asyncio.timeout(60):
        first = asyncio.create_task(create(0))
        while not any(thread.name == "syncline-nccl-meet" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        while any(thread.name == "syncline-nccl-meet" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        second = asyncio.create_task(create(1))  # comes late
        store = Rendezvous.join(rendezvous.endpoint, timeout_s=60)
        await asyncio.to_thread(store.store.wait, ["n 1"])
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
    assert next(fabric.numbers) == 1
    store.close()
    rendezvous.close()


async def test_three_ranks_one_way(meet):
    source, *takers = await meet(3, one_way=True)
    memory = [filled(0), filled(0)]
    await asyncio.gather(
        *(source.send(filled(8), rank, 0) for rank in (1, 2)), *(t.recv(m, 0, 0) for t, m in zip(takers, memory, strict=True))
    )
    assert [int(m[0]) for m in memory] == [8, 8]
    await asyncio.gather(*(one.close() for one in (source, *takers)))
