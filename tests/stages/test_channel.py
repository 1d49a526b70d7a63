"""The control channel: order, back pressure, descriptors, and how each side learns that the other is gone."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from syncline.stages.errors import TransportError
from syncline.stages.transports.channel import Channel, Kind, Message


class End:
    """One end, and what it heard."""

    def __init__(self, sock):
        self.heard, self.closed = [], []
        self.channel = Channel(sock, on_message=self.heard.append, on_closed=self.closed.append)


@pytest.fixture
async def ends():
    pair = [End(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield pair
    for end in pair:
        end.channel.close()


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


async def test_messages_arrive_in_order_with_every_field(ends):
    a, b = ends
    sent = [Message(Kind.BUCKET, task, 2**64 - 1, task * 3, 2**63 + task) for task in range(5)]
    for message in sent:
        a.channel.send(message)
    await until(lambda: len(b.heard) == 5)
    assert b.heard == sent


async def test_a_peer_that_does_not_listen_holds_nobody_up(ends):
    a, b = ends
    loop = asyncio.get_running_loop()
    loop.remove_reader(b.channel._sock.fileno())
    for task in range(5000):
        a.channel.send(Message(Kind.BUCKET, task))
    assert a.channel._queue
    loop.add_reader(b.channel._sock.fileno(), b.channel._readable)
    await until(lambda: len(b.heard) == 5000)
    assert [message.task for message in b.heard] == list(range(5000))
    assert not a.channel._queue


async def test_descriptors_travel_and_are_closed_on_the_way(ends):
    a, b = ends
    before = open_descriptors()
    read, write = os.pipe()
    a.channel.send(Message(Kind.MAP, fds=(write,)))
    await until(lambda: b.heard)
    (arrived,) = b.heard[0].fds
    assert not os.get_inheritable(arrived)
    os.write(arrived, b"x")
    os.close(arrived)
    assert os.read(read, 9) == b"x"
    assert os.read(read, 9) == b""  # the other end was closed where it was sent from
    os.close(read)
    assert open_descriptors() == before


async def test_what_is_queued_on_a_channel_that_closes_is_not_leaked(ends):
    a, b = ends
    before = open_descriptors()
    asyncio.get_running_loop().remove_reader(b.channel._sock.fileno())
    for _ in range(600):
        a.channel.send(Message(Kind.MAP, fds=(os.open("/dev/null", os.O_RDONLY),)))
    assert a.channel._queue
    a.channel.close()
    a.channel.send(Message(Kind.MAP, fds=(os.open("/dev/null", os.O_RDONLY),)))
    b.channel.close()
    assert open_descriptors() <= before


async def test_shutting_down_is_seen_at_once_even_before_the_loop_turns(ends):
    a, b = ends
    b.channel.check()
    a.channel.close()
    with pytest.raises(TransportError):
        b.channel.check()
    await until(lambda: b.closed)
    assert len(b.closed) == 1
    assert not b.channel.is_open
    assert a.closed == []
    with pytest.raises(TransportError):
        a.channel.check()


async def test_a_descriptor_that_was_inherited_elsewhere_does_not_keep_it_open(ends):
    a, b = ends
    inherited = os.dup(a.channel._sock.fileno())
    a.channel.close()
    with pytest.raises(TransportError):
        b.channel.check()
    os.close(inherited)


async def test_sending_to_a_dead_peer_tells_the_owner_once(ends):
    a, b = ends
    b.channel.close()
    for _ in range(3):
        a.channel.send(Message(Kind.ACK))
    assert a.closed == []  # not from inside `send`
    await until(lambda: a.closed)
    assert len(a.closed) == 1


async def test_other_peoples_messages_close_the_channel():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = End(ours)
    theirs.send(b"GET / HTTP/1.1")
    await until(lambda: end.closed)
    assert end.heard == []
    theirs.close()


async def test_a_kind_that_is_not_known_closes_the_channel():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = End(ours)
    theirs.send(bytes([200]) + bytes(31))
    await until(lambda: end.closed)
    theirs.close()
