"""Tiny real models, and ways to change their weights."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from syncline.adapters.engines.requests import GenerateRequest

VOCAB = 97
Weights = dict[str, torch.Tensor]

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # so that logits are far apart and greedy answers differ from prompt to prompt
    "bos_token_id": 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
}


def _config(kind: str) -> PreTrainedConfig:
    if kind == "llama":
        return LlamaConfig(**_COMMON)
    if kind == "llama-tied":
        return LlamaConfig(**_COMMON, tie_word_embeddings=True)
    if kind == "qwen3":
        return Qwen3Config(**_COMMON, head_dim=16)
    if kind == "qwen3-sliding":  # the first layer attends to everything, the others to 9 tokens
        return Qwen3Config(**_COMMON, head_dim=16, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    if kind == "qwen3-moe":
        return Qwen3MoeConfig(**_COMMON, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    if kind == "mixtral":
        return MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)
    if kind == "mixtral-sliding":
        return MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    raise KeyError(kind)


@pytest.fixture
def tiny() -> Callable[..., nn.Module]:
    """``tiny(kind, seed, attention)``: a real model of transformers with random weights."""

    def make(kind: str = "llama", seed: int = 0, attention: str = "sdpa") -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(_config(kind), attn_implementation=attention).eval()

    return make


@pytest.fixture
def weights_of() -> Callable[[nn.Module], Weights]:
    """A copy of a model's state dict."""

    def copy(model: nn.Module) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    return copy


@pytest.fixture
def swap() -> Callable[..., None]:
    """``swap(model, weights, rebind)``: as `staged` landing does it (in place), or as `mapped` does it (``param.data``)."""

    def into(model: nn.Module, weights: Weights, *, rebind: bool = False) -> None:
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if rebind:
                    tensor.data = weights[name].clone()
                else:
                    tensor.copy_(weights[name])

    return into


@pytest.fixture
def prompts() -> Callable[..., list[tuple[int, ...]]]:
    """``prompts(count, seed, longest)``: token ids, without the end token."""

    def make(count: int, seed: int = 1, longest: int = 40) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, longest, (count,), generator=generator).tolist()
        return [tuple(torch.randint(6, VOCAB, (size,), generator=generator).tolist()) for size in sizes]

    return make


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """``ask(prompt, new, ...)``: a request."""

    def make(prompt: tuple[int, ...], new: int = 20, **options: object) -> GenerateRequest:
        return GenerateRequest(prompt_ids=tuple(prompt), max_new_tokens=new, **options)

    return make


@pytest.fixture
def alone() -> Callable[..., list[int]]:
    """``alone(model, prompt, new)``: what transformers' own greedy `generate` gives for one prompt."""

    def generate(model: nn.Module, prompt: tuple[int, ...], new: int = 20) -> list[int]:
        return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()

    return generate


class Peer:
    """A process that knows only the two-phase document (`two_phase_peer.py`): ``await peer(command, **arguments)``."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "two_phase_peer.py"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-W", "ignore", str(script)], stdin=pipe, stdout=pipe)

    async def __call__(self, do: str, **command: Any) -> Any:
        return await asyncio.to_thread(self.ask, {"do": do, **command})

    def ask(self, command: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def lasting_peer() -> Iterator[Peer]:
    """One for all tests of a module: it takes seconds to start."""
    peer = Peer()
    yield peer
    peer.kill()


@pytest.fixture
def peers(lasting_peer: Peer) -> Iterator[Callable[..., Peer]]:
    """``peers()``: another `Peer`; ``fresh``: one that the test may kill."""
    free, made = [lasting_peer], []

    def take(*, fresh: bool = False) -> Peer:
        if free and not fresh:
            return free.pop()
        made.append(Peer())
        return made[-1]

    yield take
    for peer in made:
        peer.kill()
    if not free:
        lasting_peer.ask({"do": "leave"})


@pytest.fixture(scope="session")
def two_phase_rig() -> ModuleType:
    """`two_phase_rig.py`: imported here, so that only its tests need a server for ASGI apps."""
    spec = importlib.util.spec_from_file_location("syncline_tests_two_phase_rig", Path(__file__).with_name("two_phase_rig.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def serve(two_phase_rig: ModuleType) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """``await serve(seed, **options)``: a server whose model has the weights of this seed."""
    made = []

    async def start(seed: int = 0, **options: Any) -> Any:
        made.append(two_phase_rig.Server(seed, **options))
        await made[-1].start()
        return made[-1]

    yield start
    for server in made:
        await server.close()


@pytest.fixture
async def serve_app(two_phase_rig: ModuleType) -> AsyncIterator[Callable[[Any], Awaitable[list[Any]]]]:
    """``await serve_app(app)``: serves an ASGI app; host and port."""
    made = []

    async def start(app: Any) -> list[Any]:
        made.append(two_phase_rig.Web(app))
        await made[-1].start()
        http: list[Any] = made[-1].http
        return http

    yield start
    for web in made:
        await web.close()


@pytest.fixture
def source_of(two_phase_rig: ModuleType, peers: Callable[..., Peer], tmp_path: Path) -> Callable[..., Awaitable[Any]]:
    """``await source_of(server, seed)``: a document-only source with the weights of this seed; ``fresh``: to be killed."""

    async def start(server: Any, seed: int = 1, *, fresh: bool = False) -> Any:
        source = two_phase_rig.Source(peers(fresh=fresh), server, tmp_path)
        await source.load(seed)
        return source

    return start
