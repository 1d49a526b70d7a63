"""`TwoPhaseTarget`: a syncline source pushes into a server that was written from the two-phase document alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from syncline.adapters.engines.two_phase_target import TwoPhaseTarget
from syncline.adapters.trainers import ModuleSource
from syncline.engine import RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ConfigError, LoaderError, PlanError, TargetUnreachable

ENGINE = Path(__file__).parent / "two_phase_engine.py"


class Engine:
    """The server, in a process of its own."""

    def __init__(self, weights, port=0):
        command = [sys.executable, "-W", "ignore", str(ENGINE), str(weights), str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        line = self.process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError("the server did not start")
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}"

    def ask(self, path, **body):
        request = urllib.request.Request(f"{self.url}/{path}", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def kill(self):
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


def weights_of(seed, shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}


SHAPES = {
    "a": ((40, 30), "float32"),
    "b": ((7,), "bfloat16"),
    "c": ((3, 500, 9), "float32"),
    "empty": ((0, 4), "float32"),
    "scalar": ((), "float32"),
    **{f"many.{i}": ((5, i), "bfloat16") for i in range(1, 30)},
}


@pytest.fixture
def engines(tmp_path):
    made = []

    def start(shapes=SHAPES, *, port=0):
        save_file(weights_of(0, shapes), tmp_path / "zero")
        made.append(Engine(tmp_path / "zero", port))
        return made[-1]

    yield start
    for engine in made:
        engine.kill()


@pytest.fixture
def holds(tmp_path):
    """What the server has is what this seed gives; returns what else it says."""

    async def check(engine, seed, shapes=SHAPES):
        said = await asyncio.to_thread(engine.ask, "save", file=str(tmp_path / "now"))
        found = load_file(tmp_path / "now")
        expected = weights_of(seed, shapes)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return said

    return check


class Source(TransferEngine):
    """A source whose weights are those of a seed."""

    def __init__(self, target, seed=1, shapes=SHAPES, **config):
        self.weights, self.shapes = weights_of(seed, shapes), shapes
        source = ModuleSource(self.weights, world_size=1)
        config = TransferConfig(**{"trace": False, "push_timeout_s": 20.0} | config)
        super().__init__(source=source, targets=[target], config=config)

    def become(self, seed):
        for name, tensor in weights_of(seed, self.shapes).items():
            self.weights[name].copy_(tensor)


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_a_push_into_a_server_of_the_document(engines, holds, landing):
    engine = engines()
    async with Source(TwoPhaseTarget(engine.url, model=SHAPES), landing=landing) as source:
        assert (await source.push(1)).ok
        said = await holds(engine, 1)
        names = [name for bucket in said["buckets"] for name in bucket["names"]]
        assert sorted(names) == sorted(SHAPES)
        source.become(2)
        assert (await source.push(2)).ok
        assert (await holds(engine, 2))["flushed"] == 0


async def test_tensors_that_travel_in_parts_are_whole_again(engines, holds):
    shapes = {"large": ((1000, 600), "float32"), "b": ((3,), "float32"), "deep": ((3, 300, 700), "float32")}
    engine = engines(shapes)
    target = TwoPhaseTarget(engine.url, model=shapes, flush_cache=True)
    async with Source(target, shapes=shapes, bucket_bytes="300KiB", max_tmp_bytes="2MiB") as source:
        report = await source.push(1)
        assert report.ok
        assert report.tasks > 10
        assert (await holds(engine, 1, shapes))["flushed"] == 1


async def test_names_from_a_checkpoint_folder(engines, tmp_path):
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_config(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    engine = engines({name: (tuple(tensor.shape), "bfloat16") for name, tensor in state.items()})
    target = TwoPhaseTarget(engine.url, model=str(tmp_path / "model"), dtype=torch.bfloat16)
    source = TransferEngine(source=ModuleSource(model, world_size=1), targets=[target], config=TransferConfig(trace=False))
    async with source:
        assert (await source.push(1)).ok
    await asyncio.to_thread(engine.ask, "save", file=str(tmp_path / "now"))
    found = load_file(tmp_path / "now")
    assert all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in state.items())


async def test_what_does_not_fit_is_said_at_connect(engines):
    engine = engines()
    wanted = SHAPES | {"another": ((2,), "float32"), "a": ((40, 31), "float32")}
    with pytest.raises(PlanError) as caught:
        await Source(TwoPhaseTarget(engine.url, model=wanted)).connect()
    assert "another" in str(caught.value)
    assert "a:" in str(caught.value)


@pytest.mark.parametrize(
    ("behaviour", "says", "changed"),
    [
        ({"refuse": "out of memory"}, "refused to prepare an update: out of memory", False),
        ({"fail": "no such layer"}, "did not apply the update: no such layer", False),
        ({"count": 1}, "says that it applied 1 buckets", True),
    ],
)
async def test_a_server_that_refuses_is_fenced_for_us_and_healed_by_the_next_push(engines, holds, behaviour, says, changed):
    engine = engines()
    async with Source(TwoPhaseTarget(engine.url, model=SHAPES)) as source:
        await asyncio.to_thread(engine.ask, "be", **behaviour)
        report = await source.push(1)
        target = report.targets[engine.url]
        assert (report.ok, target.state) == (False, "FENCED")
        assert isinstance(target.error, LoaderError)
        assert says in str(target.error)
        await holds(engine, 1 if changed else 0)
        await asyncio.to_thread(engine.ask, "be")
        source.become(2)
        report = await source.push(2)
        assert report.ok
        assert report.targets[engine.url].state == "COMMITTED"
        await holds(engine, 2)


@pytest.mark.parametrize("behaviour", [{"die_after": 0}, {"die_after": 1}, {"die_in_complete": True}])
async def test_a_server_that_dies_is_reported_and_its_successor_gets_the_next_push(engines, holds, behaviour):
    engine = engines()
    target = TwoPhaseTarget(engine.url, model=SHAPES, timeout_s=10)
    async with Source(target, bucket_bytes="4KiB", max_tmp_bytes="1MiB") as source:
        await asyncio.to_thread(engine.ask, "be", **behaviour)
        report = await source.push(1)
        assert not report.ok
        assert report.targets[engine.url].state == "FENCED"
        engine.kill()
        assert not (await source.push(2)).ok
        successor = engines(port=engine.port)
        source.become(2)
        assert (await source.push(3)).ok
        await holds(successor, 2)


async def test_a_server_that_restarted_between_pushes_meets_anew(engines, holds):
    engine = engines()
    async with Source(TwoPhaseTarget(engine.url, model=SHAPES)) as source:
        assert (await source.push(1)).ok
        engine.kill()
        successor = engines(port=engine.port)
        assert (await source.push(2)).ok
        await holds(successor, 1)


async def test_nobody_there():
    with pytest.raises(TargetUnreachable, match="is the server there"):
        await Source(TwoPhaseTarget("http://127.0.0.1:1", model=SHAPES, timeout_s=2)).connect()


@pytest.mark.parametrize(
    ("url", "options", "config", "says"),
    [
        ("127.0.0.1:30000", {}, {}, "no url of a server"),
        ("http://h:1", {"members": 0}, {}, "members is 0"),
        ("http://h:1", {"timeout_s": 0}, {}, "timeout_s is 0"),
        ("http://h:1", {}, {"landing": "mapped"}, "use landing 'staged'"),
        ("http://h:1", {"model": {"a": ((2,), "float31")}}, {}, "dtype 'float31'"),
    ],
)
def test_what_is_wrong_with_a_target(url, options, config, says):
    with pytest.raises(ConfigError, match=says):
        Source(TwoPhaseTarget(url, **{"model": SHAPES} | options), **config)


async def test_from_two_ranks_of_fsdp(engines, tmp_path):
    torch.manual_seed(3)  # as the ranks' third version
    last = nn.Sequential(nn.Linear(40, 301), nn.ReLU(), nn.Linear(301, 17, bias=False)).state_dict()
    engine = engines({name: (tuple(tensor.shape), "bfloat16") for name, tensor in last.items()})
    script = Path(__file__).parent / "two_phase_rank.py"
    pipe = asyncio.subprocess.PIPE
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "ignore",
            str(script),
            str(rank),
            str(tmp_path / "store"),
            engine.url,
            stdout=pipe,
            stderr=pipe,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = await asyncio.wait_for(rank.communicate(), 90)
        assert (rank.returncode, out) == (0, b'{"ok": true}\n'), err.decode()[-3000:]
    await asyncio.to_thread(engine.ask, "save", file=str(tmp_path / "now"))
    found = load_file(tmp_path / "now")
    assert all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in last.items())


async def test_into_our_own_app(serve, two_phase_rig):
    """Both of our halves, which know of each other only what the document says."""
    server = await serve(seed=0)
    model = two_phase_rig.model_of(1)
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in model.state_dict().items()}
    url = "http://{}:{}".format(*server.http)
    targets = [TwoPhaseTarget(url, model=shapes)]
    config = TransferConfig(trace=False)
    async with TransferEngine(source=ModuleSource(model, world_size=1), targets=targets, config=config) as engine:
        assert (await engine.push(1)).ok
        assert await server.serves(1, 2)


def test_it_is_a_target():
    from syncline.engine.targets import Target

    assert isinstance(TwoPhaseTarget("http://h:1", model=SHAPES), Target)
    assert isinstance(RemoteTarget("unix:/x"), Target)
