"""The demo's generation servers: syncline's own, and real engines. Each is started, asked, killed and ended the same way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp

from syncline.engine import RemoteTarget, Target

from .demo_model import model_dtype
from .endings import tied
from .sglang_server import SGLangServer, missing as missing_sglang
from .vllm_server import VLLMServer, missing

Engine = Literal["syncline", "vllm", "sglang"]

_START_S = 120.0
_END_S = 10.0
_LOOK_AGAIN_S = 0.05


class Said(NamedTuple):
    """What a server answered: tokens, their text where the server has a tokenizer, and version spans."""

    token_ids: list[int]
    text: str
    versions: list[dict[str, int]]


class Server(Protocol):
    """One generation server.

    Attributes:
        number: its place among the demo's servers.
        target: what the trainers push to; see `target_of`.
        has_logits: it answers ``/logits`` at ``http``.
    """

    number: int
    target: str
    http: str
    has_logits: bool

    async def start(self) -> None:
        """Start it, or start it again, with random weights; returns when it takes requests."""
        ...

    async def ask(self, session: aiohttp.ClientSession, prompt_ids: list[int], count: int) -> Said:
        """Greedy. Raises `aiohttp.ClientError` if it does not answer."""
        ...

    async def kill(self) -> None:
        """SIGKILL, and nothing else."""
        ...

    async def stop(self) -> None:
        """End every process of it. Idempotent."""
        ...


def problem(engine: Engine) -> str:
    """Why an engine cannot be had here; empty if it can."""
    return {"vllm": missing, "sglang": missing_sglang}.get(engine, str)()


def make_server(engine: Engine, number: int, demo: Any) -> Server:
    """Server ``number`` of a demo."""
    kinds: dict[Engine, Callable[[int, Any], Server]] = {"vllm": VLLM, "sglang": SGLang, "syncline": Own}
    return kinds[engine](number, demo)


def target_of(engine: Engine, address: str) -> Target:
    """The target that trainers push to."""
    if engine == "vllm":
        from syncline.adapters.engines import VLLMTarget

        return VLLMTarget(address)
    if engine == "sglang":
        from syncline.adapters.engines.sglang import SGLangTarget

        return SGLangTarget(address)
    return RemoteTarget(address)


class Own:
    """``syncline serve``. Its first start serves its random weights as version 0; later ones nothing until up to date."""

    has_logits = True

    def __init__(self, number: int, demo: Any) -> None:
        self.number = number
        self.target = f"unix:{demo.work}/target-{number}.sock"
        self.http = ""
        self._demo = demo
        self._starts = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        args, work = self._demo.args, self._demo.work
        self._starts += 1
        ready = work / f"server-{self.number}-{self._starts}.json"
        log = (work / f"server-{self.number}-{self._starts}.log").open("w")
        command = [sys.executable, "-m", "syncline.bench.cli", "serve", "--model", self._demo.model]
        command += ["--random-weights", str(args.seed + 1), "--http", "127.0.0.1:0", "--listen", self.target]
        command += ["--ready-file", str(ready), "--threads", "1"]
        command += ["--dtype", str(model_dtype(self._demo.model)).removeprefix("torch.")]
        command += ["--initial-version", "0"] if self._starts == 1 else []
        command += ["--movable"] if args.landing == "mapped" else []
        self._process = await asyncio.create_subprocess_exec(*tied(command), stdout=log, stderr=log, start_new_session=True)
        log.close()
        async with asyncio.timeout(_START_S):
            while not ready.exists():
                if self._process.returncode is not None:
                    raise RuntimeError(f"server {self.number} did not start:\n{tail(Path(log.name))}")
                await asyncio.sleep(_LOOK_AGAIN_S)
        self.http = json.loads(ready.read_text())["http"]

    async def ask(self, session: aiohttp.ClientSession, prompt_ids: list[int], count: int) -> Said:
        body = {"prompt_ids": prompt_ids, "max_new_tokens": count, "temperature": 0.0}
        async with session.post(f"{self.http}/generate", json=body) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        return Said(answer["token_ids"], answer["text"], answer["versions"])

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None:
            await end([self._process])


class VLLM:
    """A real vLLM server, paused until it holds a version. It has no prefix cache, so that requests that are kept go on with
    their keys and values, which is what the proof computes.
    """

    has_logits = False

    def __init__(self, number: int, demo: Any) -> None:
        self.number = number
        self.target = self.http = ""
        self._demo = demo
        self._starts = 0
        self._server: VLLMServer | None = None

    async def start(self) -> None:
        self._starts += 1
        dtype = str(model_dtype(self._demo.model)).removeprefix("torch.")
        arguments = ["--load-format", "dummy", "--dtype", dtype, "--max-model-len", "512", "--max-num-seqs", "16"]
        arguments += ["--no-enable-prefix-caching", "--skip-tokenizer-init"]
        log = self._demo.work / f"server-{self.number}-{self._starts}.log"
        port = int(self.target.rpartition(":")[2]) if self.target else None
        self._server = VLLMServer(self._demo.model_folder(), log, arguments, port=port)
        await self._server.start()
        self.target = self.http = self._server.url

    async def ask(self, session: aiohttp.ClientSession, prompt_ids: list[int], count: int) -> Said:
        sampling = {"max_tokens": count, "temperature": 0, "stop_token_ids": self._demo.stop_ids()}
        body = {"token_ids": prompt_ids, "sampling_params": sampling, "stream": False}
        async with session.post(f"{self.http}/inference/v1/generate", json=body) as reply:
            reply.raise_for_status()
            choice = (await reply.json())["choices"][0]
        if choice["finish_reason"] == "abort":
            raise aiohttp.ClientPayloadError("the server aborted this request")
        versions = [{**span, "version": int(span["version"])} for span in choice["weight_versions"]]
        return Said(choice["token_ids"], "", versions)

    async def kill(self) -> None:
        assert self._server is not None
        await self._server.kill()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


class SGLang:
    """A real SGLang server, paused until it holds a version. Run so that requests are kept with their keys and values, which is
    what the proof computes.
    """

    has_logits = False

    def __init__(self, number: int, demo: Any) -> None:
        self.number = number
        self.target = self.http = ""
        self._demo = demo
        self._starts = 0
        self._server: SGLangServer | None = None

    async def start(self) -> None:
        self._starts += 1
        dtype = str(model_dtype(self._demo.model)).removeprefix("torch.")
        arguments = ["--load-format", "dummy", "--dtype", dtype, "--skip-tokenizer-init", "--max-total-tokens", "8192"]
        arguments += ["--disable-radix-cache", "--disable-overlap-schedule"]
        log = self._demo.work / f"server-{self.number}-{self._starts}.log"
        port = int(self.target.rpartition(":")[2]) if self.target else None
        self._server = SGLangServer(self._demo.model_folder(), log, arguments, port=port)
        await self._server.start()
        self.target = self.http = self._server.url

    async def ask(self, session: aiohttp.ClientSession, prompt_ids: list[int], count: int) -> Said:
        sampling = {"max_new_tokens": count, "temperature": 0, "stop_token_ids": self._demo.stop_ids()}
        async with session.post(f"{self.http}/generate", json={"input_ids": prompt_ids, "sampling_params": sampling}) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise aiohttp.ClientPayloadError("the server aborted this request")
        versions = [{**span, "version": int(span["version"])} for span in meta["weight_versions"]]
        return Said(answer["output_ids"], "", versions)

    async def kill(self) -> None:
        assert self._server is not None
        await self._server.kill()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


async def end(processes: list[asyncio.subprocess.Process]) -> None:
    """End processes, each with its whole group."""
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def tail(path: Path, lines: int = 25) -> str:
    """The end of a log."""
    return "\n".join(path.read_text().splitlines()[-lines:])
