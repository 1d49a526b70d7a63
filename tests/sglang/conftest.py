"""Real SGLang servers on the CPU, and sources that push into them.

A server is a process tree in a session of its own; all of it is killed at the end, and looked for. Servers start slowly, so
each is started once for all tests that fit it. Without sglang only the tests of our own code are collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from aiohttp import web

HERE = Path(__file__).parent
READY_S = 180.0
ANSWER_S = 120.0

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_server_*.py"]

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # so that logits are far apart
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def tiny_config(kind: str) -> Any:
    """The config of a small model of one architecture."""
    import transformers

    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    more: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 16},
        "Qwen3Moe": {**experts, "num_experts": 6, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    }
    return getattr(transformers, f"{kind}Config")(**TINY, **more.get(kind, {}))


def fresh_model(config: Any, seed: int) -> Any:
    """A model of this config with random weights, biases and norms included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # zeros and ones as they come: nobody would miss them
                parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in name else 0.1))
    return model


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """What transformers answers."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(ids)]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in found[0, len(ids) :]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request got."""

    tokens: list[int]
    spans: list[tuple[str, int, int]]
    text: str
    finish: dict[str, Any]
    cached: int


def free_port() -> int:
    """Below those that the kernel gives to whoever asks for any: a server binds it only after half a minute."""
    while True:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """One SGLang server."""

    def __init__(self, model: Path, log: Path, *flags: str, tp: int = 1) -> None:
        self.model = model
        self.tp = tp
        self.log = log
        self.flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.url = ""

    def start(self, *, again: bool = False) -> None:
        """Begin to start. ``again``: at the same address as before."""
        if not again:
            self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--port", port]
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sleep-on-idle"]
        command += ["--tp-size", str(self.tp), "--max-total-tokens", "4096", "--log-level", "info", *self.flags]
        environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE / "stubs")}
        if self.tp == 2:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def ready(self) -> None:
        """Wait until it has warmed up. By what it prints: a receiver may have fenced it since, and then ``/ready`` says no, and
        ``/health``, which makes a token, fails.
        """
        give_up = time.monotonic() + READY_S
        while "The server is fired up and ready to roll" not in self._log_of_this_start():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"the server did not come up\n{self.tail()}")
            await asyncio.sleep(0.2)

    def _log_of_this_start(self) -> str:
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End the whole tree; nothing of it is left."""
        process, self._process = self._process, None
        if process is None:
            return
        tree = (
            [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            if process.poll() is None
            else []
        )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(20)
        _, alive = psutil.wait_procs(tree, timeout=20)
        assert not alive, f"left of the server: {alive}"

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def generate(
        self, prompt: Sequence[int] | str, count: int = 12, *, started: asyncio.Event | None = None, **sampling: Any
    ) -> Answer:
        """One greedy request. ``started`` is set when some tokens have come."""
        body: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        body["sampling_params"] = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **sampling}
        body["stream"] = started is not None
        last: dict[str, Any] = {}
        async with (
            asyncio.timeout(ANSWER_S),
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/generate", json=body) as reply,
        ):
            if started is None:
                last = await reply.json()
            else:
                async for line in reply.content:
                    if line.startswith(b"data: ") and b"[DONE]" not in line:
                        last = _json(line[6:])
                        if len(last.get("output_ids") or []) > 4:
                            started.set()
        if "meta_info" not in last:
            return Answer(tokens=[], spans=[], text="", finish=last, cached=0)
        meta = last["meta_info"]
        spans = [(span["version"], span["start"], span["end"]) for span in meta.get("weight_versions", [])]
        return Answer(
            tokens=last.get("output_ids") or [],
            spans=spans,
            text=last.get("text") or "",
            finish=meta["finish_reason"],
            cached=meta.get("cached_tokens", 0),
        )

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.request(method, f"{self.url}/{path}", json=body) as reply:
            return reply.status, _json(await reply.read())


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start a server: ``start_server(folder, "--flag", …, tp=1)``. It lives as long as the session, if it is not killed."""
    servers: list[Server] = []
    folder = tmp_path_factory.mktemp("servers")

    def start(model: Path, *flags: str, tp: int = 1) -> Server:
        server = Server(model, folder / f"server-{len(servers)}.log", *flags, tp=tp)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint folder of a tiny model, with weights of seed 1."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            fresh_model(tiny_config(kind), 1).save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return make


@pytest.fixture(scope="session")
def llama_tp1(start_server: StartServer, tiny_folder: Callable[[str], Path]) -> Server:
    """A tiny Llama with the weights of its checkpoint, run so that requests are kept in place."""
    flags = ("--skip-tokenizer-init", "--disable-radix-cache", "--disable-overlap-schedule")
    return start_server(tiny_folder("Llama"), *flags)


@pytest.fixture(scope="session")
def qwen2_tp2(start_server: StartServer, tiny_folder: Callable[[str], Path]) -> Server:
    """A tiny Qwen2 (biases) on two ranks, with random weights and with a prefix cache."""
    return start_server(tiny_folder("Qwen2"), "--skip-tokenizer-init", "--load-format", "dummy", tp=2)


class Recorder:
    """Answers every call; some by what a test has put there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path_qs.lstrip("/"), body))
        status, answer = self.answers.get(request.path.lstrip("/"), (200, {"success": True, "message": "Success"}))
        return web.json_response(answer, status=status)


class Scripted(Recorder):
    """Enough of a server for a stand-in to attach to it: it remembers its weights' version.

    ``failing`` says how often a call is refused (500), ``stuck`` which are never answered, ``broken`` which are cut off;
    ``saw`` has the version that it said when a call came last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, int] = {}
        self.stuck: dict[str, asyncio.Event] = {}
        self.broken: set[str] = set()
        self.saw: dict[str, str] = {}

    @property
    def version(self) -> str:
        return str(self.answers["model_info"][1]["weight_version"])

    def paths(self) -> list[str]:
        """What was called since the last look, but for questions."""
        found = [path for path, _ in self.calls if path not in {"model_info", "server_info", "ready", "health"}]
        self.calls.clear()
        return found

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path.lstrip("/")
        self.saw[path] = self.version
        if path in self.stuck:
            self.stuck[path].set()
            await asyncio.Event().wait()
        if path in self.broken:
            self.calls.append((path, None))
            assert request.transport is not None
            request.transport.abort()
        if self.failing.get(path, 0) > 0:
            self.failing[path] -= 1
            self.calls.append((path, None))
            return web.json_response({"message": "not now"}, status=500)
        if path == "update_weight_version":
            version = (await request.json())["new_version"]
            self.answers["model_info"] = (200, {"weight_version": version})
        return await super().handle(request)


@contextlib.asynccontextmanager
async def answering(recorder: Recorder) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield
    await runner.cleanup()


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with answering(recorder):
        yield recorder


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    """A server whose whole weights are version 3, and that can release memory."""
    server = Scripted()
    server.answers["server_info"] = (200, {"version": "0.5.23", "enable_memory_saver": True, "load_format": "auto"})
    server.answers["model_info"] = (200, {"weight_version": "3"})
    async with answering(server):
        yield server


class Trainer:
    """A source of one rank in this process, whose model becomes what a test wants to push."""

    def __init__(self, config: Any, target: Any, **options: Any) -> None:
        from syncline.adapters.trainers import ModuleSource
        from syncline.engine import TransferConfig, TransferEngine

        self.model = fresh_model(config, 0)
        self.target = target
        settings = {"max_tmp_bytes": "16MiB", "push_timeout_s": 120.0, **options}
        self.engine = TransferEngine(
            source=ModuleSource(self.model, world_size=1), targets=[target], config=TransferConfig(**settings)
        )

    async def push(self, version: int, weights: Any, **options: Any) -> Any:
        """Push the weights of another model; returns the target's part of the report."""
        self.model.load_state_dict(weights.state_dict())
        report = await self.engine.push(version, **options)
        return next(iter(report.targets.values()))


@pytest.fixture
async def trainer() -> AsyncIterator[Callable[..., Any]]:
    """``await trainer(config, target, **config of the transfer)``: connected; closed at the end."""
    made: list[Trainer] = []

    async def make(config: Any, target: Any, **options: Any) -> Trainer:
        one = Trainer(config, target, **options)
        made.append(one)
        await one.engine.connect()
        return one

    yield make
    for one in made:
        await one.engine.close()


@pytest.fixture
def released() -> Callable[[Server], Any]:
    """``await released(server)``: as if no source had ever been there; its weights are what they are, and it serves."""

    async def release(server: Server) -> None:
        await server.ready()
        await server.call("POST", "end_weight_update", {})
        await server.call("POST", "update_weight_version", {"new_version": "default", "abort_all_requests": False})
        await server.call("POST", "continue_generation", {"torch_empty_cache": False})

    return release


class RemoteError(Exception):
    """What a command raised in a rank."""


class Ranks:
    """The processes of a source: ``ranks.py``, one a rank."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, world_size: int, store: Path, folders: Sequence[Path]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with self.log.open("ab") as log:
            for rank in range(world_size):
                command = [str(HERE / "ranks.py"), str(rank), str(world_size), str(store), *map(str, folders)]
                self.processes.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable,
                        *command,
                        env=environment,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        await asyncio.gather(*(self._answer(rank) for rank in range(world_size)))

    async def call(self, cmd: str, **args: Any) -> Any:
        """The same command on every rank; rank 0's answer. Raises `RemoteError`."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"cmd": cmd, **args}).encode() + b"\n")
        answers = await asyncio.gather(*(self._answer(rank) for rank in range(len(self.processes))))
        return answers[0]

    async def arm(self, rank: int, **args: Any) -> None:
        """One rank will kill itself."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps({"cmd": "kill_at", **args}).encode() + b"\n")
        await self._answer(rank)

    async def _answer(self, rank: int) -> Any:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = await asyncio.wait_for(stdout.readline(), ANSWER_S)
        if not line:
            raise RemoteError(f"rank {rank} has ended\n{self.log.read_text(errors='replace')[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(answer["error"])
        return answer["value"]

    async def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()
            transport: Any = process._transport
            transport.close()


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """``await ranks(2, folder, …)``: a source of so many ranks, killed at the end."""
    made: list[Ranks] = []

    async def start(world_size: int, *folders: Path) -> Ranks:
        one = Ranks(tmp_path / f"ranks-{len(made)}.log")
        made.append(one)
        await one.start(world_size, tmp_path / f"store-{len(made)}", folders)
        return one

    yield start
    for one in made:
        await one.close()


@pytest.fixture(scope="session")
def smollm2_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """SmolLM2-135M with its weights, and with others near them."""
    from syncline.adapters.engines.checkpoints import load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("smollm2")
    model: Any = load_model("smollm2")
    tokenizer: Any = load_tokenizer("smollm2")
    torch.manual_seed(5)
    for name in ("real", "other"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.2)
    return [folder / "real", folder / "other"]


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What tests make models, answers and sources with."""

    tiny_folder: Callable[[str], Path]
    released: Callable[[Server], Any]
    trainer: Callable[..., Any]
    ranks: Callable[..., Any]
    tiny_config: Callable[[str], Any]
    fresh_model: Callable[[Any, int], Any]
    greedy: Callable[[Any, Sequence[int], int], list[int]]


@pytest.fixture
def kit(
    tiny_folder: Callable[[str], Path],
    released: Callable[[Server], Any],
    trainer: Callable[..., Any],
    ranks: Callable[..., Any],
) -> Kit:
    return Kit(
        tiny_folder=tiny_folder,
        released=released,
        trainer=trainer,
        ranks=ranks,
        tiny_config=tiny_config,
        fresh_model=fresh_model,
        greedy=greedy,
    )
