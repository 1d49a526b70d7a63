"""Control addresses as text, and the signatures of calls and answers."""

from __future__ import annotations

import pytest

from syncline.engine.address import Address
from syncline.engine.auth import Signer
from syncline.engine.errors import AuthError, ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "unix:",
        "unix:relative/path",
        "tcp://",
        "tcp://host",
        "tcp://host:99999",
        "tcp://h:1/path",
        "http://h:1",
        "unix:/" + "x" * 200,
    ],
)
def test_malformed_addresses(text):
    with pytest.raises(ConfigError):
        Address.parse(text)


@pytest.mark.parametrize("text", ["unix:/run/x.sock", "tcp://127.0.0.1:80", "tcp://[::1]:0", "tcp://host.name:1"])
def test_addresses_are_written_as_they_are_read(text):
    assert str(Address.parse(text)) == text


def test_unix_url_form():
    assert str(Address.parse("unix:///run/x.sock")) == "unix:/run/x.sock"


@pytest.mark.parametrize("shift", [-61.0, 61.0, float("nan"), float("inf")])
def test_only_calls_of_now_are_accepted(shift):
    now = 1000.0
    caller = Signer("s", clock=lambda: now + shift)
    with pytest.raises(AuthError):
        Signer("s", clock=lambda: now).check("POST", "/x", caller.sign("POST", "/x", b""), b"")


def test_nonces_are_forgotten_only_when_their_time_is_out():
    now = [1000.0]
    signer = Signer("s", clock=lambda: now[0], window_s=60.0)
    early = Signer("s", clock=lambda: now[0] + 59.0).sign("POST", "/x", b"")  # a caller whose clock is ahead
    signer.check("POST", "/x", early, b"")
    now[0] += 118.0
    signer.check("POST", "/x", signer.sign("POST", "/x", b""), b"")
    with pytest.raises(AuthError, match="replay"):
        signer.check("POST", "/x", early, b"")


def test_the_answer_is_bound_to_the_call():
    signer = Signer("s")
    headers = signer.sign_reply("nonce", 200, b"yes")
    signer.check_reply("nonce", 200, headers, b"yes")
    for nonce, status, body in (("other", 200, b"yes"), ("nonce", 503, b"yes"), ("nonce", 200, b"no")):
        with pytest.raises(AuthError):
            signer.check_reply(nonce, status, headers, body)
