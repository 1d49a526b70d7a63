"""Calls vLLM's own endpoints: a server's, or those that `offline` offers for an ``LLM`` object.

Used by `VLLMTarget` (version, init) and, in the leader rank's worker, by `serving` (everything else).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from syncline.engine.errors import ControlError, ProtocolError, TargetUnreachable
from syncline.engine.messages import InFlight

from .versions import Interfaces, interfaces

_MODES: dict[InFlight, Literal["wait", "abort", "keep"]] = {"drain": "wait", "abort": "abort", "keep": "keep"}
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, without which vLLM does not offer its weight update endpoints"
_NO_BACKEND = """start it with --weight-transfer-config '{"backend": "syncline"}', without which its workers take no pushes"""
_SHOWN = 2000


class Front:
    """vLLM's endpoints. Made anywhere, used on one event loop.

    Args:
        url: ``http://host:port``, ``https://…`` or ``unix:/path``.
        timeout_s: deadline of calls that are answered at once, in seconds.
        known: interfaces of this vLLM, if `discover` is not going to be called.

    Every call raises `TargetUnreachable` (no answer), or `ProtocolError` (an answer that says why not).
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, known: Interfaces | None = None) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._known = known
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://vllm" if self._socket else url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def discover(self) -> Interfaces:
        """Ask which release it is. Raises `ConfigError` for one that is not known."""
        if self._known is None:
            said = (await self._call("GET", "version")).get("version")
            if not isinstance(said, str):
                raise ProtocolError(f"{self.url} is no vLLM server: it names no version at /version; is the url right?")
            self._known = interfaces(said)
        return self._known

    async def init(self, info: dict[str, Any], timeout_s: float) -> None:
        """Have every worker start its receiver."""
        await self._call("POST", "init_weight_transfer_engine", {"init_info": info}, timeout_s=timeout_s)

    async def world_size(self) -> int:
        """Workers in all: TP x PP x DP."""
        answer = await self._call("GET", "get_world_size")
        return int(answer["world_size"])

    async def pause(self, in_flight: InFlight, *, clear_cache: bool, timeout_s: float | None = None) -> None:
        """Returns once no forward pass runs and none will start. ``clear_cache``: drop keys and values of older weights."""
        query = {"mode": _MODES[in_flight], "clear_cache": "true" if clear_cache else "false"}
        await self._call("POST", "pause", query=query, timeout_s=timeout_s)

    async def is_paused(self) -> bool | None:
        """Whether anybody has paused it; None: it does not say."""
        try:
            said = (await self._call("GET", "is_paused")).get("is_paused")
        except ProtocolError:
            return None
        return None if said is None else bool(said)

    async def resume(self) -> None:
        await self._call("POST", "resume")

    async def reset_prefix_cache(self) -> None:
        """Drop every cached key and value; requests under way are computed anew from their tokens.

        Raises:
            ProtocolError: vLLM did not do it.
        """
        answer = await self._call("POST", "reset_prefix_cache", query={"reset_running_requests": "true"})
        if answer.get("success") is False:
            raise ProtocolError(
                f"vLLM at {self.url} did not drop its prefix cache, which holds keys and values of older weights"
            )

    async def start(self) -> None:
        """Begin an update. None may be open: vLLM's workers would raise."""
        await self._call("POST", "start_weight_update", self._interfaces.start_body)

    async def update(self, push: str) -> None:
        """Send every worker's main thread to the receiver's loader. Returns when the push is over; has no deadline here."""
        await self._call("POST", "update_weights", {"update_info": {"push": push}}, timeout_s=float("inf"))

    async def finish(self, version: int | None) -> None:
        """End the update; name the version that is served from now on, if there is one."""
        named = version is not None and self._interfaces.finish_takes_version
        await self._call("POST", "finish_weight_update", {"weight_version": str(version)} if named else {})

    @property
    def names_at_finish(self) -> bool:
        """`finish` names the version, too."""
        return self._interfaces.finish_takes_version

    async def name_version(self, version: int | str) -> None:
        """Name the version that is served, or that none is, where vLLM can be told (0.27 and later)."""
        if self._interfaces.finish_takes_version:
            await self._call("POST", "update_weight_version", {"new_version": str(version)})

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _interfaces(self) -> Interfaces:
        assert self._known is not None, "discover() comes first"
        return self._known

    async def _call(
        self, method: str, path: str, body: Any = None, *, query: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        limit = aiohttp.ClientTimeout(total=None if timeout_s == float("inf") else timeout_s, sock_connect=self._timeout_s)
        try:
            async with self._open().request(
                method, f"{self._base}/{path}", json=body, params=query, timeout=limit, allow_redirects=False
            ) as response:
                text = await response.text(errors="replace")
                if response.status == 200:
                    return _as_object(text)
        except TimeoutError:
            raise TargetUnreachable(f"vLLM at {self.url} did not answer {path} within {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TargetUnreachable(
                f"vLLM at {self.url} does not answer {path}: {str(error) or type(error).__name__}; is it up?"
            ) from error
        raise self._refusal(path, response.status, text)

    def _refusal(self, path: str, status: int, text: str) -> ControlError:
        if status in (404, 405):
            return ProtocolError(f"vLLM at {self.url} has no endpoint /{path}: {_DEV_MODE}")
        if "weight transfer not configured" in text.lower() or "weight_transfer_config" in text:
            return ProtocolError(f"vLLM at {self.url} has no weight transfer backend: {_NO_BACKEND}")
        return ProtocolError(f"vLLM at {self.url} answered /{path} with {status}: {text[:_SHOWN]}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._socket) if self._socket else None
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


def _as_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def is_loopback(url: str) -> bool:
    """Whether a url is a unix socket or names this host's loopback interface."""
    return url.startswith("unix:") or urlsplit(url).hostname in {"localhost", "127.0.0.1", "::1"}


async def quietly(work: asyncio.Task[None]) -> BaseException | None:
    """Wait for a task, whatever becomes of it."""
    await asyncio.wait({work})
    return None if work.cancelled() else work.exception()
