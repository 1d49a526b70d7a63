"""An SGLang server in a session of its own, for the demo: started, waited for, and ended with all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import torch

from .endings import tied
from .vllm_server import free_port, group_is_there

_START_S = 600.0
_END_S = 20.0
_LOOK_AGAIN_S = 0.1
_NEEDED = {"sglang": "SGLang", "torchvision": "torchvision, which it imports,", "sgl_kernel": "sgl_kernel, which it imports,"}


def missing() -> str:
    """Why there can be none here; empty if there can."""
    lacking = [text for name, text in _NEEDED.items() if importlib.util.find_spec(name) is None]
    if not lacking:
        return ""
    return f"{lacking[0]} is not installed here (on a CPU empty ones will do: PYTHONPATH=tests/sglang/stubs in the checkout)"


class SGLangServer:
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
        """Start it, wait until it is up, and pause it. Raises `RuntimeError` with the end of its log if it does not come up."""
        port = self._port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self._model, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--sleep-on-idle", *self._arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if not torch.cuda.is_available():
            command += ["--device", "cpu", "--attention-backend", "torch_native"]
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        with self._log.open("w") as out:
            self._process = await asyncio.create_subprocess_exec(
                *tied(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment,
            )
        async with asyncio.timeout(_START_S):
            await self._until_ready()
        await self._pause()

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
        raise RuntimeError("SGLang did not start:\n" + "\n".join(text.splitlines()[-40:]))

    async def _pause(self) -> None:
        """As its stand-in does at the first contact, which comes later: until then it would answer with random weights."""
        from syncline.adapters.engines.sglang import SGLangFront
        from syncline.adapters.engines.sglang.serving import UNFINISHED

        front = SGLangFront(self.url)
        try:
            await front.pause("retract")
            await front.set_weight_version(UNFINISHED)
        finally:
            await front.close()

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
