"""Real vLLM servers, started and ended by the tests, whole process trees; tiny real models; sources in processes of their own.

Nothing of this runs where vLLM is not installed (``nox -s vllm`` installs it).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from torch import nn

from syncline.adapters.engines import VLLMTarget
from syncline.adapters.engines.requests import Span
from syncline.adapters.trainers import ModuleSource
from syncline.engine import PushReport, TransferConfig, TransferEngine
from syncline.engine.control_client import ControlClient
from syncline.engine.messages import Status

HERE = Path(__file__).parent
START_S = 300.0
END_S = 20.0
VOCAB = 256
PROMPTS = [(5, 6, 7), (9, 200, 31, 77, 4), tuple(range(20, 60))]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that logits are far apart
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},  # biases, and one tensor under two names
    "qwen3": {"tie_word_embeddings": False, "head_dim": 32},  # norms of queries and keys
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny model: its folder holds a config and the weights of seed 0."""

    family: str
    folder: Path

    def model(self, seed: int) -> nn.Module:
        """The model with the random weights of a seed."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(self.folder)
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        return model.eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """``tiny(family)``: folders of tiny models, written once."""
    made: dict[str, Tiny] = {}

    def make(family: str) -> Tiny:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.utils import logging

        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            config = CONFIG_MAPPING[family](**_TINY, **_FAMILIES[family])
            kind = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
            config.architectures = [f"{kind}ForCausalLM"]
            config.save_pretrained(folder)
            made[family] = Tiny(family=family, folder=folder)
            logging.disable_progress_bar()
            made[family].model(0).save_pretrained(folder)
        return made[family]

    return make


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a server said to a prompt."""

    status: int
    token_ids: list[int]
    versions: list[Span]
    finish_reason: str
    text: str = ""


class Server:
    """A real vLLM server: ``python -m vllm.entrypoints.openai.api_server`` in a session of its own."""

    def __init__(self, model: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
            "--max-num-seqs", "16", "--enable-scale-out", "--weight-transfer-config", '{"backend": "syncline"}', *arguments,
        ]  # fmt: skip
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=log.parent,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_ready(self) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                if response.status == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"vLLM did not start:\n{self.tail(60)}")

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """Every process of the server's session that is there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """End the whole tree; fail if anything is left."""
        for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            give_up = time.monotonic() + patience_s
            while time.monotonic() < give_up:
                self._process.poll()
                if not self.processes():
                    self._process.wait()
                    return
                time.sleep(0.05)
        raise RuntimeError(f"left of the server: {self.processes()}")

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], count: int, **options: Any) -> Answer:
        """Greedy: token ids in, token ids and the versions that they were computed with out."""
        wanted = {"max_tokens": count, "temperature": 0, "ignore_eos": True, **options}
        body = {"token_ids": list(prompt), "sampling_params": wanted, "stream": False}
        async with session.post(f"{self.url}/inference/v1/generate", json=body) as response:
            text = await response.text()
            if response.status != 200:
                return Answer(status=response.status, token_ids=[], versions=[], finish_reason="error", text=text)
            choice = json.loads(text)["choices"][0]
        versions = [
            Span(version=int(v["version"]) if v["version"].isdigit() else -1, start=v["start"], end=v["end"])
            for v in choice["weight_versions"] or ()
        ]
        return Answer(
            status=200, token_ids=choice["token_ids"] or [], versions=versions, finish_reason=choice["finish_reason"], text=text
        )

    async def greedy(self, prompt: Sequence[int], count: int, timeout_s: float = 60.0) -> Answer:
        """`ask`, on a connection of its own."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
            return await self.ask(session, prompt, count)

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        """One of vLLM's own endpoints."""
        async with aiohttp.ClientSession() as session, session.request(
            method, f"{self.url}/{path}", json=body, params=query
        ) as response:  # fmt: skip
            text = await response.text()
            assert response.status == 200, text
            found: dict[str, Any] = json.loads(text) if text else {}
            return found

    async def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """What one of its endpoints answers, however it does."""
        async with aiohttp.ClientSession() as session, session.request(method, f"{self.url}/{path}", json=body) as response:
            return response.status, await response.text()

    async def gauge(self, name: str) -> float:
        """A figure of its metrics, added up."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    async def is_paused(self) -> bool:
        return bool((await self.call("GET", "is_paused"))["is_paused"])

    async def status(self) -> Status:
        """What its leader rank says."""
        target = VLLMTarget(self.url)
        try:
            client = ControlClient((await target.locate(TransferConfig())).address)
            try:
                return await client.status()
            finally:
                await client.close()
        finally:
            await target.close()

    async def settled(self, timeout_s: float = 30.0) -> Status:
        """Its status once no push is under way."""
        async with asyncio.timeout(timeout_s):
            while (status := await self.status()).state == "UPDATING" or not status.ready:
                await asyncio.sleep(0.1)
            return status

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """A method of every worker that returns a number or nothing (vLLM answers in texts)."""
        found = (await self.call("POST", "collective_rpc", {"method": method, "args": arguments})).get("results", [])
        return [int(text) if text is not None else None for text in found]

    async def says_nothing(self, prompt: Sequence[int] = (5, 6, 7), patience_s: float = 0.7) -> bool:
        """A request gets no answer while the server is fenced (it is given up after a while)."""
        try:
            async with asyncio.timeout(patience_s):
                await self.greedy(prompt, 4)
        except TimeoutError:
            return True
        return False


_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(HERE),  # `faulty`, where a test has faults injected
}


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """What vLLM needs on a CPU."""
    return _ENVIRONMENT


@pytest.fixture(scope="module")
def port() -> int:
    """A port that was free just now."""
    return free_port()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """``servers(model folder, arguments…)``: starts a server and waits until it is ready; all are ended with the module."""
    started: list[Server] = []

    def start(model: Path, *arguments: str, wait: bool = True, **options: Any) -> Server:
        log = tmp_path_factory.mktemp("server") / "log"
        server = Server(model, log, *arguments, **options)
        started.append(server)
        if wait:
            server.until_ready()
        return server

    yield start
    for server in started:
        server.end()


@pytest.fixture(autouse=True)
def servers_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a failure the ends of the servers' logs are shown."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for name in request.fixturenames:
            found = request.node.funcargs.get(name)
            for server in found if isinstance(found, (list, tuple)) else [found]:
                if isinstance(server, Server):
                    print(f"--- the log of {server.url} ends\n{server.tail(80)}")


def expected(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """Transformers' greedy answer, one whole forward pass for each token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="session")
def reference() -> Callable[[nn.Module, Sequence[int], int], list[int]]:
    return expected


@pytest.fixture
async def source() -> AsyncIterator[Callable[..., Any]]:
    """``await source(weights, targets…, config options)``: a connected engine of one rank in this process."""
    engines: list[TransferEngine] = []

    async def connect(weights: Any, *targets: Any, **options: Any) -> TransferEngine:
        where = [VLLMTarget(target.url) if isinstance(target, Server) else target for target in targets]
        engine = TransferEngine(source=ModuleSource(weights), targets=where, config=TransferConfig(**options))
        engines.append(engine)
        await engine.connect()
        return engine

    yield connect
    for engine in engines:
        await engine.close()


class SourceRank:
    """One rank of a source in a process of its own: `source_rank.py`."""

    def __init__(self, log: Path, rank: int, ranks: int, store: Path) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "source_rank.py"), str(rank), str(ranks), str(store)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    async def call(self, command: str, timeout_s: float = 300.0, **arguments: Any) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self._call, command, arguments), timeout_s)

    def _call(self, command: str, arguments: dict[str, Any]) -> Any:
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise ConnectionError(f"the source rank is gone ({process.wait()}):\n{self.log.read_text()[-2000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Source:
    """All ranks of a source; every call goes to all of them side by side."""

    def __init__(self, ranks: list[SourceRank]) -> None:
        self.ranks = ranks

    async def call(self, command: str, **arguments: Any) -> Any:
        """The answer of rank 0."""
        return (await asyncio.gather(*(rank.call(command, **arguments) for rank in self.ranks)))[0]


@pytest.fixture
def source_ranks(tmp_path: Path) -> Iterator[Callable[[int], Source]]:
    """``source_ranks(2)``: processes that hold one model, sharded with FSDP2 over them."""
    started: list[SourceRank] = []

    def start(count: int) -> Source:
        number = len(started)
        ranks = [SourceRank(tmp_path / f"rank-{number}-{r}.log", r, count, tmp_path / f"store-{number}") for r in range(count)]
        started.extend(ranks)
        return Source(ranks)

    yield start
    for rank in started:
        rank.end()


@pytest.fixture(scope="session")
def arrived() -> Callable[..., Any]:
    """``await arrived(server, model, version)``: the server answers as transformers does, and says which version it holds."""

    async def check(server: Server, model: nn.Module, version: int, count: int = 24, *, status: bool = True) -> None:
        if status:
            said = await server.status()
            assert (said.state, said.version) == ("COMMITTED", version)
        assert (await server.call("GET", "weight_info"))["weight_version"] == str(version)
        for prompt in PROMPTS:
            answer = await server.greedy(prompt, count)
            assert answer.token_ids == expected(model, prompt, count)
            assert answer.versions == [Span(version=version, start=0, end=count)]

    return check


def ok(report: PushReport) -> PushReport:
    assert report.ok, str(report)
    return report


@pytest.fixture(scope="session")
def well() -> Callable[[PushReport], PushReport]:
    """The report, which has to be one of success."""
    return ok
