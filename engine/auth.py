"""Who may give orders: HMAC-SHA256 over every call and every answer, with a shared secret.

A call is signed over its method, path, time, nonce and body; it is accepted once, and only while its time is within the
replay window of the receiver's clock. The answer is signed over the call's nonce, the status and the body, so that nobody
else can answer. So is every message of a connection that such a call has opened. Signing does not encrypt: what travels can be
read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from .errors import AuthError

TIME = "X-Syncline-Time"
NONCE = "X-Syncline-Nonce"
SIGNATURE = "X-Syncline-Signature"

REPLAY_WINDOW_S = 60.0
_MOST_NONCES = 100_000


class Signer:
    """Signs and checks with one secret.

    Args:
        secret: shared by both sides.
        window_s: how far the clocks of both sides, and the way of a call, may be apart, in seconds.
        clock: seconds since the epoch.
    """

    def __init__(self, secret: str, *, window_s: float = REPLAY_WINDOW_S, clock: Callable[[], float] = time.time) -> None:
        self._key = secret.encode()
        self._window_s = window_s
        self._clock = clock
        self._seen: OrderedDict[str, float] = OrderedDict()

    def sign(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """Headers for a call."""
        stamp, nonce = f"{self._clock():.3f}", secrets.token_hex(16)
        return {TIME: stamp, NONCE: nonce, SIGNATURE: self._mac("call", method, path, stamp, nonce, body)}

    def check(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
        """Check a call; returns its nonce. Raises `AuthError`. A call that was accepted is not accepted again."""
        stamp, nonce = headers.get(TIME, ""), headers.get(NONCE, "")
        self.check_headers(headers)
        if not _same(headers.get(SIGNATURE, ""), self._mac("call", method, path, stamp, nonce, body)):
            raise AuthError("the call's signature is wrong; set the same secret on both sides")
        self._remember(nonce)
        return nonce

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """What can be refused before the body has been read. Raises `AuthError`."""
        if not headers.get(SIGNATURE) or not headers.get(NONCE):
            raise AuthError("the call is not signed, and this address has a secret; set the same one on both sides")
        self._check_age(headers.get(TIME, ""))

    def _check_age(self, stamp: str) -> None:
        try:
            age = self._clock() - float(stamp)
        except ValueError:
            raise AuthError("the call says no time") from None
        if not abs(age) <= self._window_s:
            raise AuthError(
                f"the call is {age:.1f} s old and at most {self._window_s:g} s are accepted: it was replayed, or the clocks of "
                "the two sides differ; synchronise them"
            )

    def sign_reply(self, nonce: str, status: int, body: bytes) -> dict[str, str]:
        """Headers for the answer to the call with ``nonce``."""
        return {SIGNATURE: self._mac("reply", nonce, str(status), body)}

    def check_reply(self, nonce: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Check an answer. Raises `AuthError`."""
        if not _same(headers.get(SIGNATURE, ""), self._mac("reply", nonce, str(status), body)):
            raise AuthError("the answer is not signed with our secret: the other side has another secret, or none")

    def sign_call(self, opened: str, number: int, name: str, body: bytes) -> tuple[str, str]:
        """Time and signature of a call over the connection that the call with nonce ``opened`` has opened."""
        stamp = f"{self._clock():.3f}"
        return stamp, self._mac("frame call", opened, str(number), stamp, name, body)

    def check_call(self, signed: tuple[str, str], opened: str, number: int, name: str, body: bytes) -> None:
        """Check what `sign_call` has signed. Raises `AuthError`. That ``number`` grows is for the caller to see to."""
        stamp, mac = signed
        if not _same(mac, self._mac("frame call", opened, str(number), stamp, name, body)):
            raise AuthError("a call over a watch is not signed with our secret, or not for this connection")
        self._check_age(stamp)

    def sign_answer(self, opened: str, number: int, status: int, body: bytes) -> str:
        """Signature of the answer to call ``number`` of that connection."""
        return self._mac("frame answer", opened, str(number), str(status), body)

    def check_answer(self, mac: str, opened: str, number: int, status: int, body: bytes) -> None:
        """Check what `sign_answer` has signed. Raises `AuthError`."""
        if not _same(mac, self.sign_answer(opened, number, status, body)):
            raise AuthError("an answer over a watch is not signed with our secret: the other side has another secret, or none")

    def _mac(self, *parts: str | bytes) -> str:
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            mac.update(len(data).to_bytes(8, "big"))
            mac.update(data)
        return mac.hexdigest()

    def _remember(self, nonce: str) -> None:
        now = self._clock()
        while self._seen and next(iter(self._seen.values())) < now - 2 * self._window_s:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise AuthError("this call was made before: it is a replay")
        if len(self._seen) >= _MOST_NONCES:
            raise AuthError(f"more than {_MOST_NONCES} calls within {2 * self._window_s:g} s; call less often")
        self._seen[nonce] = now


def _same(one: str, other: str) -> bool:
    """Compared in constant time; `hmac.compare_digest` raises for text that is not ASCII."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())
