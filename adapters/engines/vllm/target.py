"""`VLLMTarget`: a vLLM server, or an ``LLM`` object of this process, as a target of a source."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from syncline.engine.config import TransferConfig
from syncline.engine.errors import ProtocolError, TargetUnreachable
from syncline.engine.targets import LeaderAddress
from syncline.stages.closing import uninterrupted

from ..urls import problem_of, without_userinfo
from .front import Front, is_loopback
from .info import InitInfo
from .rendezvous import Rendezvous

_LOOK_AGAIN_S = 0.02


class VLLMTarget:
    """A vLLM server that was started with ``--weight-transfer-config '{"backend": "syncline"}'``.

    On one host nothing else is needed. Beyond one host the leader rank of the server listens at ``control_port``, and both
    sides share a secret. A server that was started with ``--load-format dummy`` is paused from the first `locate` on, until a
    push has committed.

    Args:
        engine: ``http://host:port`` of the server's own endpoints (``VLLM_SERVER_DEV_MODE=1``); or an ``LLM`` or ``AsyncLLM``
            of this process (see `offline`).
        control_port: port of the server's host at which its leader rank listens; None: one host, nothing listens.
        secret: shared secret; needed with ``control_port`` beyond loopback. It is handed to the server over its url, so
            beyond loopback that has to be ``https``; or else
        secret_file: file on the server's host that holds the secret, which then does not travel.
        worker_url: url of the endpoints as the server's workers reach them; None: the same.
    """

    def __init__(
        self,
        engine: Any,
        *,
        control_port: int | None = None,
        secret: str | None = None,
        secret_file: str | None = None,
        worker_url: str | None = None,
    ) -> None:
        self._url = engine.rstrip("/") if isinstance(engine, str) else ""
        self._object = None if isinstance(engine, str) else engine
        self._control_port, self._secret, self._secret_file = control_port, secret, secret_file
        self._worker_url = worker_url
        self._offline: Any = None
        self._front: Front | None = None

    @property
    def address(self) -> str:
        """Names the target: the server's url, or which object it is."""
        return without_userinfo(self._url) or f"vllm:{type(self._object).__name__}@{id(self._object):x}"

    def problems(self, config: TransferConfig) -> Sequence[str]:
        """The url is none; a landing mode that vLLM cannot have; a secret that is missing or would travel in the clear."""
        problems = self._object_problems() if self._object is not None else self._url_problems(config)
        if config.landing == "mapped":
            problems.append(
                f"target {self.address}: vLLM's parameters cannot be pointed at other memory; choose landing 'staged'"
            )
        return problems

    def _object_problems(self) -> list[str]:
        from .offline import problems_of

        return [f"target {self.address}: {problem}" for problem in problems_of(self._object)]

    def _url_problems(self, config: TransferConfig) -> list[str]:
        if (wrong := problem_of(self._url)) is not None:
            return [f"target {wrong}"]
        problems = []
        if self._worker_url is not None and (wrong := problem_of(self._worker_url)) is not None:
            problems.append(f"target {self._url}: worker_url {wrong}")
        if self._control_port is None and (self._secret or self._secret_file):
            problems.append(
                f"target {self._url}: secret and secret_file are for control_port, which is not set: on one host the server's "
                "leader listens at a socket that only this user reaches"
            )
        if self._control_port is not None and not is_loopback(self._url):
            if not (self._secret or config.secret):
                problems.append(f"target {self._url}: its leader would listen beyond loopback and no secret is set; set secret")
            elif urlsplit(self._url).scheme != "https" and not self._secret_file:
                problems.append(
                    f"target {self._url}: the secret would travel to the server in the clear; use https, or secret_file"
                )
        return problems

    async def locate(self, config: TransferConfig) -> LeaderAddress:
        """Start the receivers in the server's workers, unless they run; say where their leader listens.

        Raises:
            TargetUnreachable: no server is there, or its receivers did not start in time.
            ProtocolError, ConfigError: it is there and cannot be a target; says why.
        """
        timeout_s = 0.9 * config.connect_timeout_s  # whoever asks waits no longer than all of it, and knows less
        try:
            async with asyncio.timeout(timeout_s):
                return await self._locate(config, timeout_s)
        except TimeoutError:
            raise TargetUnreachable(f"the receivers of {self.address} did not start within {timeout_s:.3g} s") from None

    async def _locate(self, config: TransferConfig, timeout_s: float) -> LeaderAddress:
        front = await self._reach(timeout_s)
        known = await front.discover()
        secret = self._secret or config.secret
        info = InitInfo(
            url=self._worker_url or front.url,
            version=known.version,
            control_port=self._control_port or 0,
            host=urlsplit(self._url).hostname or "" if self._control_port else "",
            secret="" if self._secret_file or not self._control_port else secret or "",
            secret_file=self._secret_file or "",
            patience_s=timeout_s,
        )
        if info.control_port:
            await front.init(asdict(info), timeout_s)
            return LeaderAddress(await _listening(info.host, info.control_port), secret)
        return LeaderAddress(await self._meet(front, info, timeout_s))

    async def _reach(self, timeout_s: float) -> Front:
        if self._front is None:
            url = self._url
            if self._object is not None:
                from .offline import Offline

                offline = Offline(self._object)
                try:
                    url = await offline.start()
                except BaseException:
                    await uninterrupted(offline.close())
                    raise
                self._offline = offline
            self._front = Front(url, timeout_s=timeout_s)
        return self._front

    async def _meet(self, front: Front, info: InitInfo, timeout_s: float) -> str:
        """All workers say where they are, in a directory that is then removed."""
        with tempfile.TemporaryDirectory(prefix="syncline-meet-") as folder:
            ranks = await front.world_size()
            await front.init(asdict(info) | {"rendezvous": folder}, timeout_s)
            return await _all_there(Rendezvous(folder), ranks, self.address)

    async def close(self) -> None:
        """End what was started in this process. The receivers in the server stay, ready for the next source."""
        front, self._front = self._front, None
        if front is not None:
            await front.close()
        offline, self._offline = self._offline, None
        if offline is not None:
            await offline.close()


async def _all_there(meeting: Rendezvous, ranks: int, address: str) -> str:
    while True:
        words = [meeting.word(rank) for rank in range(ranks)]
        failed = [f"rank {rank}: {word.failure}" for rank, word in enumerate(words) if word is not None and word.failure]
        if failed:
            raise ProtocolError(f"the receivers of {address} did not start: {'; '.join(failed)}")
        if all(words):
            return meeting.leader()
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _listening(host: str, port: int) -> str:
    """Wait until something listens."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return f"tcp://{host}:{port}"
        await asyncio.sleep(_LOOK_AGAIN_S)
