"""The store through which gloo's ranks meet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from syncline.stages.errors import TransportError
from syncline.stages.rendezvous import Rendezvous

SOON = timedelta(seconds=0.05)


@pytest.fixture
def host() -> Iterator[Rendezvous]:
    host = Rendezvous.host("127.0.0.1", timeout_s=20)
    yield host
    host.close()


@pytest.fixture
def guest(host: Rendezvous) -> Iterator[Rendezvous]:
    guest = Rendezvous.join(host.endpoint, timeout_s=20)
    yield guest
    guest.close()


def test_a_value_is_waited_for(host: Rendezvous, guest: Rendezvous) -> None:
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(guest.store.get("there")))
    waiting.start()
    host.store.set("other", "x")
    host.store.set("there", bytes(range(256)) * 1000)
    waiting.join(20)
    assert got == [bytes(range(256)) * 1000]
    guest.store.wait(["there", "other"], SOON)
    assert guest.store.get("other") == b"x"


def test_who_does_not_come_is_waited_for_in_vain(guest: Rendezvous) -> None:
    with pytest.raises(RuntimeError, match="nobody came"):
        guest.store.wait(["never"], SOON)
    with pytest.raises(RuntimeError, match="went away"):  # its reply might still come: the connection is of no use
        guest.store.get("never")


def test_strangers_learn_nothing(host: Rendezvous) -> None:
    host.store.set("secret", "x")
    _, _, address = host.endpoint.rpartition("@")
    stranger = Rendezvous.join(f"guess@{address}", timeout_s=20)
    with pytest.raises(RuntimeError, match="went away"):
        stranger.store.get("secret")
    stranger.close()
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as rude:
        rude.sendall(b"\xff" * 100)
        assert rude.recv(1) == b""
    assert host.store.get("secret") == b"x"


def test_the_end_of_the_host_is_noticed(host: Rendezvous, guest: Rendezvous) -> None:
    host.close()
    with pytest.raises(RuntimeError, match="went away"):
        guest.store.get("anything")
    guest.close()
    with pytest.raises(TransportError, match="no rendezvous"):
        Rendezvous.join(guest.endpoint, timeout_s=0.2)


def test_the_last_reference_ends_it() -> None:
    """The fixture that looks for leaked threads shows it."""
    host = Rendezvous.host("127.0.0.1", timeout_s=20)
    host.store.set("a", "b")
    del host
