"""What several targets serve, asked of all of them at once: for a front that engines share, and for ``syncline status``.

    states = await fleet.states(["unix:/run/a.sock", "http://127.0.0.1:8000", "http://127.0.0.1:30000"])
    ready = [state.address for state in states if state.serves]
    fleet.common_version(states)        # the one version that all of them serve, or None

An address is a control address (``unix:``, ``tcp://``), or the URL of a server: `syncline serve`, vLLM (which answers with
``VLLM_SERVER_DEV_MODE=1`` only) or SGLang. What a server is, its answers tell:

============== =========================================================== ===============================================
kind           says its version                                            says that it does not serve
============== =========================================================== ===============================================
syncline       ``/status`` of the control plane                            the same
syncline serve ``GET /status``                                             the same
vllm           ``GET /weight_info`` (from 0.27 on)                         ``GET /is_paused``; `UNFINISHED` as version
sglang         ``GET /model_info``                                         ``GET /ready`` (503); `UNFINISHED` as version
============== =========================================================== ===============================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from syncline.engine.address import Address
from syncline.engine.auth import NONCE, Signer
from syncline.engine.control_client import ControlClient
from syncline.engine.errors import AuthError, ConfigError, SynclineError

from .unfinished import UNFINISHED

Kind = Literal["syncline", "syncline serve", "vllm", "sglang", "unknown"]
FleetState = Literal["COMMITTED", "UPDATING", "FENCED", "PAUSED", "UNPUSHED", "UNREACHABLE"]

_PROBES = ("/status", "/weight_info", "/is_paused", "/model_info", "/ready")
_MOST_BYTES = 2**20
_NO_STATUS = "it does not say what it serves: neither syncline serve, nor vLLM with VLLM_SERVER_DEV_MODE=1, nor SGLang"


@dataclass(frozen=True, kw_only=True)
class TargetState:
    """What one target said.

    Attributes:
        address: as it was asked for.
        kind: what answered; ``unknown`` if nothing did, or nothing that we know.
        state: ``COMMITTED`` (serves `version`), ``UPDATING``, ``FENCED``, ``PAUSED`` (an engine that serves nothing now and
            does not say why), ``UNPUSHED`` (it answers with weights that no push has brought: its version is no number, such
            as ``default``), or ``UNREACHABLE``.
        version: a number where it is one; text as the engine says it where it is none; None if it is not known.
        message: why, where that is known.
        seconds: until it had answered.
        details: everything else that it said.
    """

    address: str
    kind: Kind
    state: FleetState
    version: int | str | None
    message: str = ""
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """It answers requests, with `version`, which a push has brought."""
        return self.state == "COMMITTED"


async def states(addresses: Sequence[str], *, secret: str | None = None, timeout_s: float = 5.0) -> list[TargetState]:
    """Ask all of them side by side; the answers in the order of the addresses. Takes ``timeout_s`` seconds at most.

    What is no address is ``UNREACHABLE``, too, and its message says so: the others are asked all the same.

    Args:
        addresses: control addresses and URLs.
        secret: shared secret of those that have one.
        timeout_s: deadline for each, in seconds.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
        return list(await asyncio.gather(*(_state(address, session, secret, timeout_s) for address in addresses)))


def common_version(found: Iterable[TargetState]) -> int | None:
    """The version that all of them serve; None unless all are ``COMMITTED`` on one and the same."""
    versions = {state.version if state.serves else None for state in found}
    version = versions.pop() if len(versions) == 1 else None
    return version if isinstance(version, int) else None


def _check(address: str) -> None:
    if not address.startswith(("http://", "https://")):
        try:
            Address.parse(address)
        except ConfigError:
            raise ConfigError([f"address {address!r} is none of 'unix:/path', 'tcp://host:port', 'http://host:port'"]) from None


async def _state(address: str, session: aiohttp.ClientSession, secret: str | None, timeout_s: float) -> TargetState:
    began = time.monotonic()
    try:
        _check(address)
        async with asyncio.timeout(timeout_s):
            if address.startswith("http"):
                kind, state, version, message, details = _read(await _Probe(address, session, secret).all())
            else:
                kind, state, version, message, details = await _ask_control(address, secret, timeout_s)
    except TimeoutError:
        kind, state, version, message, details = "unknown", "UNREACHABLE", None, f"no answer within {timeout_s:g} s", {}
    except ConfigError as error:
        kind, state, version, message, details = "unknown", "UNREACHABLE", None, "; ".join(error.problems), {}
    except (SynclineError, aiohttp.ClientError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        kind, state, version, message, details = "unknown", "UNREACHABLE", None, text, {}
    return TargetState(
        address=address,
        kind=kind,
        state=state,
        version=version,
        message=message,
        seconds=time.monotonic() - began,
        details=details,
    )


_Said = tuple[Kind, FleetState, int | str | None, str, Mapping[str, Any]]


async def _ask_control(address: str, secret: str | None, timeout_s: float) -> _Said:
    client = ControlClient(address, secret=secret, timeout_s=timeout_s)
    try:
        status = await client.status()
    finally:
        await client.close()
    details = msgspec.to_builtins(status)
    return "syncline", status.state, status.version, status.message, details


class _Probe:
    """Asks one server everything at once: its answers tell what it is."""

    def __init__(self, url: str, session: aiohttp.ClientSession, secret: str | None) -> None:
        self._url, self._session = url.rstrip("/"), session
        self._signer = Signer(secret) if secret else None

    async def all(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Path -> status and JSON object (empty if it is none)."""
        answers = await asyncio.gather(*(self._get(path) for path in _PROBES))
        return dict(zip(_PROBES, answers, strict=True))

    async def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        headers = self._signer.sign("GET", path, b"") if self._signer else {}
        async with self._session.get(self._url + path, headers=headers, allow_redirects=False) as response:
            body = await response.content.read(_MOST_BYTES)
            if response.status == 401:
                raise AuthError(f"{self._url} takes signed calls only; give the shared secret")
            if self._signer is not None and path == "/status" and response.status == 200:
                self._signer.check_reply(headers[NONCE], response.status, response.headers, body)
            return response.status, _object(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _read(answers: Mapping[str, tuple[int, dict[str, Any]]]) -> _Said:
    """What the answers of one server mean."""
    status, weights, paused = answers["/status"][1], answers["/weight_info"][1], answers["/is_paused"][1]
    model, (ready, _) = answers["/model_info"][1], answers["/ready"]
    if status.get("state") in ("COMMITTED", "UPDATING", "FENCED") and "version" in status:
        return "syncline serve", status["state"], status["version"], "", status
    if "is_paused" in paused or "weight_version" in weights:
        if (unfinished := _unfinished(weights.get("weight_version"))) is not None:
            return "vllm", unfinished[0], None, unfinished[1], weights | paused
        version = _number(weights.get("weight_version"))
        if version is None:
            why = "this release of vLLM does not say which weights it has"
            return "vllm", "PAUSED" if paused.get("is_paused") else "COMMITTED", None, why, weights | paused
        return "vllm", *_serving(version, paused=bool(paused.get("is_paused"))), weights | paused
    if "weight_version" in model:
        said = model["weight_version"]
        if (unfinished := _unfinished(said)) is not None:
            return "sglang", unfinished[0], None, unfinished[1], model
        return "sglang", *_serving(_number(said), paused=ready == 503), model
    return "unknown", "UNREACHABLE", None, _NO_STATUS, {}


def _unfinished(said: object) -> tuple[FleetState, str] | None:
    """Whether a version says that the weights are none, and why."""
    text = str(said)
    if not text.startswith(UNFINISHED):
        return None
    if text == UNFINISHED:
        return "FENCED", "its weights are no whole version; it serves again once a push has committed"
    return "UPDATING", "an update is being written, or who wrote it has died"


def _serving(version: int | str | None, *, paused: bool) -> tuple[FleetState, int | str | None, str]:
    """State, version and message of an engine with whole weights. Pushes name them by number; any other name is its own."""
    if isinstance(version, int):
        return "PAUSED" if paused else "COMMITTED", version, ""
    return "PAUSED" if paused else "UNPUSHED", version, "it holds the weights that it was started with; no push has committed"


def _number(said: object) -> int | str | None:
    """A version as a number, if it is one."""
    text = None if said is None else str(said)
    return int(text) if text is not None and text.isascii() and text.isdigit() else text
