"""SGLang's endpoints, as calls: `SGLangFront`. One call is one HTTP request; no state is kept here."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp

from syncline.engine.errors import AuthError, ConfigError, LoaderError, ProtocolError, TargetUnreachable

from ..urls import problem_of
from .versions import Dialect, dialect_of

T = TypeVar("T")

PauseMode = Literal["abort", "retract", "in_place"]
Selector = Literal["target", "draft", "all"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
"""How SGLang says that an update succeeded and the flush after it did not. It answers that the update failed."""

_NO_SGLANG = "is this an SGLang server, of a version that syncline knows?"
_DRAIN_S = 3600.0
_AT_ONCE_S = 3.0


class CacheNotFlushed(LoaderError):
    """The new weights are in place, with keys and values of the old ones in the cache: requests are running or queued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What a server says about itself.

    Attributes:
        dialect: by its version.
        model_path: checkpoint folder or hub name that it was started with.
        load_format: ``dummy`` means random weights.
        dtype: of its weights, ``auto`` if the checkpoint decides.
        device: ``cpu`` or ``cuda`` or another.
        tp_size, dp_size, pp_size: how it is parallel.
        radix_cache: keys and values of a prefix are kept for the next request that shares it.
        overlap: the next forward pass is started before the last one's tokens are looked at.
        memory_saver: memory can be released and resumed.
        weight_cache: it shares its weights with other engines, so they must not change.
        stored_cache: keys and values go to a store outside the process, where no flush reaches them; its name.
        multimodal: it takes images or audio, of which it keeps embeddings that no flush reaches.
        life: changes when the server is started anew.
    """

    dialect: Dialect
    model_path: str
    load_format: str
    dtype: str
    device: str
    tp_size: int
    dp_size: int
    pp_size: int
    radix_cache: bool
    overlap: bool
    memory_saver: bool
    weight_cache: bool
    stored_cache: str = ""
    multimodal: bool = False
    life: str

    @property
    def keeps_in_place(self) -> bool:
        """Requests can be kept with their keys and values over an update, and what comes after is still exact.

        With a prefix cache, SGLang hands the old keys and values of a kept request to later ones with the same prefix. With
        overlap, a forward pass may still run on the device when the scheduler has paused, and its token is counted to the
        new version.
        """
        return not (self.radix_cache or self.overlap)

    def problems(self) -> list[str]:
        """Why its weights cannot be updated over HTTP."""
        problems = []
        if self.dp_size != 1:
            problems.append(f"the server has dp_size {self.dp_size}; SGLang takes updates with 1 only: run replicas instead")
        if self.pp_size != 1:
            problems.append(f"the server has pp_size {self.pp_size}; its stages would take the same rank: use tp_size")
        if self.weight_cache:
            problems.append("the server shares its weights (--weight-cache-mode); restart it with --weight-cache-mode off")
        if self.stored_cache:
            problems.append(
                f"the server stores keys and values in {self.stored_cache}, where those of old weights outlive a push; start "
                "it without --hicache-storage-backend and --enable-lmcache"
            )
        if self.multimodal:
            problems.append(
                "the server's model takes images or audio, and SGLang serves embeddings of old weights after a push"
            )
        return problems


class SGLangFront:
    """Calls one SGLang server. Made anywhere; used on one event loop; every call has a deadline.

    Every call raises `TargetUnreachable` (no answer), `AuthError`, `ProtocolError` (not such a server), or `LoaderError` with
    what the server said.

    Args:
        url: ``http://host:port``.
        api_key: sent as a bearer token; the server's ``--admin-api-key``, or its ``--api-key``.
        timeout_s: deadline of a call that carries none of its own, in seconds.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        if (wrong := problem_of(url)) is not None:
            raise ConfigError([wrong])
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def info(self) -> ServerInfo:
        """What the server is. Raises `ConfigError` for a version that is not supported."""
        model = await self._get("model_info")  # only SGLang says it there; others may think about /server_info for long
        server = await self._get("server_info")
        if not isinstance(server.get("version"), str):
            raise ProtocolError(f"{self.url}/server_info names no version: {_NO_SGLANG}")
        return ServerInfo(
            dialect=dialect_of(server["version"]),
            model_path=str(server.get("model_path", "")),
            load_format=str(server.get("load_format", "auto")),
            dtype=str(server.get("dtype", "auto")),
            device=str(server.get("device", "")),
            tp_size=int(server.get("tp_size", 1)),
            dp_size=int(server.get("dp_size", 1)),
            pp_size=int(server.get("pp_size", 1)),
            radix_cache=not server.get("disable_radix_cache", False),
            overlap=not server.get("disable_overlap_schedule", False),
            memory_saver=bool(server.get("enable_memory_saver", False)),
            weight_cache=server.get("weight_cache_mode", "off") != "off",
            stored_cache="LMCache" if server.get("enable_lmcache") else str(server.get("hicache_storage_backend") or ""),
            multimodal=bool(model.get("has_image_understanding") or model.get("has_audio_understanding")),
            life=_life(server),
        )

    async def is_starting(self) -> bool:
        """It answers, but is still warming up: paused now, it would never come up.

        Where that cannot be told from a pause, a token is asked for, as health checks do.
        """
        status, _ = await self._call("GET", "ready", None, self._timeout_s)  # not in older versions
        if status == 200:
            return False
        try:
            status, _ = await self._call("GET", "health", None, _AT_ONCE_S)
        except TargetUnreachable:
            return False  # it tries to make the token
        return status == 503

    async def recover(self) -> None:
        """Have a server that thinks itself ill look again (where it says so)."""
        status, _ = await self._call("GET", "ready", None, self._timeout_s)
        if status == 503:
            await self._call("GET", "health", None, self._timeout_s)

    async def is_alive(self) -> bool:
        """Whether the server's scheduler answers soon, not only the process that takes in calls."""
        try:
            status, _ = await self._call("GET", "server_info", None, _AT_ONCE_S)
        except TargetUnreachable:
            return False
        return status == 200

    async def weight_version(self) -> str:
        """The version that it says its weights have."""
        return str((await self._get("model_info")).get("weight_version", ""))

    async def set_weight_version(self, version: str) -> None:
        """Say which version its weights have. Returns once its scheduler has taken in every call made before."""
        await self._post("update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def pause(self, mode: PauseMode, timeout_s: float | None = None) -> None:
        """Stop generation. With ``abort`` every request ends; with ``retract`` they wait, to be read anew; ``in_place`` keeps
        their keys and values. Never ``abort`` a server that is paused otherwise: it would wait for ever for its requests.
        """
        await self._post("pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, dialect: Dialect) -> None:
        """Let generation go on."""
        await self._post("continue_generation", {"torch_empty_cache": False} if dialect.continue_keeps_memory else {})

    async def abort_all(self) -> None:
        """End every request that has reached the scheduler, with an error."""
        await self._post("abort_request", {"rid": "", "abort_all": True})

    async def drain(self, dialect: Dialect) -> None:
        """Wait until every request that runs now has ended; those that come meanwhile wait.

        There is no endpoint for that. But ending a session that is not open waits for the same lock, and then only says so.
        """
        if not dialect.sessions:
            raise LoaderError(f"SGLang {dialect.version} has no way to drain; use in_flight 'abort' or 'keep'")
        await self._post("end_weight_update", {}, _DRAIN_S, refusal_is_fine=True)

    async def flush_cache(self, dialect: Dialect, wait_s: float = 0.0) -> bool:
        """Drop all cached keys and values. False if it was refused, as it is while requests run.

        Args:
            wait_s: wait so long for the last requests to end. SGLang then also waits for those that wait for a resume.
        """
        path = f"flush_cache?timeout={wait_s:g}" if dialect.flush_waits and wait_s else "flush_cache"
        status, _ = await self._call("POST", path, None, wait_s + self._timeout_s)
        return status == 200

    async def begin(self, dialect: Dialect, selector: Selector) -> None:
        """Open a session for updates, where the version has them. One that was left open is ended first."""
        if not dialect.sessions:
            return
        body = {"selector": selector} if dialect.selector else {}
        status, reply = await self._call("POST", "begin_weight_update", body, self._timeout_s)
        if status != 200 and "already open" in _message(reply):
            await self._post("end_weight_update", {})
            status, reply = await self._call("POST", "begin_weight_update", body, self._timeout_s)
        if status != 200:
            raise self._refused("begin_weight_update", status, reply)

    async def end(self, dialect: Dialect, *, if_open: bool = False) -> None:
        """End the session: the server finishes what it derives from weights. ``if_open``: that there is none is fine."""
        if dialect.sessions:
            await self._post("end_weight_update", {}, refusal_is_fine=if_open)

    async def init_group(self, *, host: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Have all its ranks join a process group as ranks 1 and up. Rank 0 has to join at the same time."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._post("init_weights_update_group", body, timeout_s)

    async def destroy_group(self, name: str) -> None:
        """Have all its ranks leave a group."""
        await self._post("destroy_weights_update_group", {"group_name": name})

    async def update_from_distributed(
        self,
        dialect: Dialect,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: str | None,
        selector: Selector,
        timeout_s: float,
        flush_cache: bool = False,
    ) -> None:
        """Take one broadcast of the group as a bucket of tensors, and load them.

        Raises:
            CacheNotFlushed: they are loaded, and ``flush_cache`` was refused.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        await self._update("update_weights_from_distributed", body, dialect, selector, timeout_s)

    async def update_from_disk(self, *, folder: str, version: str | None, timeout_s: float, flush_cache: bool = False) -> None:
        """Load a checkpoint folder that the server can read. From then on the server names that folder as its model."""
        body = {"model_path": folder, "load_format": "auto", "flush_cache": flush_cache, "weight_version": version}
        await self._post("update_weights_from_disk", body, timeout_s)

    async def update_from_tensor(
        self, dialect: Dialect, *, payloads: Sequence[str], version: str | None, selector: Selector, timeout_s: float
    ) -> None:
        """Load tensors in shared memory: for each rank of the server a pickle in base64 that says where they lie."""
        body = {"serialized_named_tensors": list(payloads), "flush_cache": False, "weight_version": version}
        await self._update("update_weights_from_tensor", body, dialect, selector, timeout_s)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give memory back. The server has to be idle, or paused with nothing running."""
        await self._post("release_memory_occupation", {"tags": list(tags)}, 300.0)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again. Only what was released: a tag too many kills the server."""
        await self._post("resume_memory_occupation", {"tags": list(tags)}, 300.0)

    async def checksums(self, selector: Selector = "all") -> list[dict[str, str]]:
        """For each rank: parameter -> checksum of what it holds (0.5.21 and later)."""
        status, reply = await self._call("POST", "weights_checker", {"action": "checksum", "selector": selector}, 300.0)
        if status != 200 or not isinstance(reply, dict):
            raise self._refused("weights_checker", status, reply)
        found = reply.get("payload") or reply.get("ranks") or []
        return [dict(rank["checksums"]) for rank in found]

    async def close(self) -> None:
        """Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _update(self, path: str, body: dict[str, Any], dialect: Dialect, selector: Selector, timeout_s: float) -> None:
        if dialect.selector:
            body["selector"] = selector
        await self._post(path, body, timeout_s)

    async def _get(self, path: str) -> dict[str, Any]:
        status, reply = await self._call("GET", path, None, self._timeout_s)
        if status == 200 and not isinstance(reply, dict):
            raise ProtocolError(f"{self.url}/{path} answered what is no JSON object: {_NO_SGLANG}")
        if status != 200:
            raise self._refused(path, status, reply)
        return dict(reply)

    async def _post(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None = None, *, refusal_is_fine: bool = False
    ) -> None:
        status, reply = await self._call("POST", path, body, timeout_s or self._timeout_s)
        refused = status != 200 or (isinstance(reply, dict) and reply.get("success") is False)
        if refused and NOT_FLUSHED in _message(reply):
            raise CacheNotFlushed(f"{self.url}: {_message(reply)}")
        if refused and not (refusal_is_fine and status == 400):
            raise self._refused(path, status, reply)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> tuple[int, Any]:
        if self._session is None:
            # The server closes idle connections after a few seconds, and a call on one that it just closed cannot be repeated.
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(force_close=True))
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    f"{self.url}/{path}",
                    json=body,
                    timeout=aiohttp.ClientTimeout(total=None),
                    allow_redirects=False,
                ) as response,
            ):
                text = await response.text(errors="replace")
        except TimeoutError:
            raise TargetUnreachable(f"{self.url}/{path}: no answer within {timeout_s:g} s; is the server stuck?") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TargetUnreachable(f"{self.url}/{path}: {str(error) or type(error).__name__}; is the server up?") from error
        return response.status, _parsed(text)

    def _refused(self, path: str, status: int, reply: Any) -> AuthError | ProtocolError | LoaderError:
        text = f"{self.url}/{path} answered {status}: {_message(reply)}"
        if status in (401, 403):
            return AuthError(f"{text}; give the server's key as api_key")
        if status in (404, 405, 422) or 300 <= status < 400:
            return ProtocolError(f"{text}; {_NO_SGLANG}")
        return LoaderError(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(reply: Any) -> str:
    if isinstance(reply, dict):
        found = reply.get("message") or reply.get("error") or reply.get("detail") or reply
        return str(found)[:2000]
    return str(reply).strip()[:2000]


def _life(server: Mapping[str, Any]) -> str:
    """Times of its start, to the nanosecond: no two lives have the same. Empty where a version does not say them."""
    started = server.get("startup_time")
    return hashlib.sha256(json.dumps(started, sort_keys=True).encode()).hexdigest()[:16] if started else ""
