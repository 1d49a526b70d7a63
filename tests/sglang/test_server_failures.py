"""Pushes that fail. What the server answers is of one version, or it does not answer; the next push mends it."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch

from syncline.adapters.engines.fleet import states
from syncline.adapters.engines.sglang import SGLangFront, SGLangOptions, SGLangReceiver, SGLangTarget, standin
from syncline.engine import Receiver, RemoteTarget
from syncline.engine.errors import PlanError
from syncline.engine.linking import transports

PROMPT = [3, 17, 29, 71, 5, 90]
SMALL = {"bucket_bytes": "32KiB", "max_tmp_bytes": "1MiB"}
SMALL_OPTIONS = SGLangOptions(bucket_bytes="48KiB", watch_s=0.2)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
async def committed(llama_tp1, kit):
    """A receiver beside the server, which serves version 1; the models of versions 1 and 2."""
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = {version: kit.fresh_model(config, 90 + version) for version in (1, 2)}
    async with SGLangReceiver(llama_tp1.url, options=SMALL_OPTIONS) as receiver:
        first = await kit.trainer(config, RemoteTarget(receiver.address), **SMALL)
        assert (await first.push(1, models[1])).ok
        yield receiver, first, models


async def serves(server, kit, version: int, model) -> None:
    answer = await server.generate(PROMPT, 12)
    assert answer.tokens == kit.greedy(model, PROMPT, 12)
    assert answer.spans == [(str(version), 0, 12)]


async def answers_nothing(server) -> asyncio.Task:
    """A request that waits; returned so that the healing can be seen to answer it."""
    request = asyncio.create_task(server.generate(PROMPT, 12))
    status, info = await server.call("GET", "model_info")
    assert status == 200 and info["weight_version"].startswith("syncline-unfinished")
    done, _ = await asyncio.wait({request}, timeout=1.0)
    assert not done
    return request


async def until(true, what: str, timeout: float = 30.0) -> None:
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_a_killed_source(committed, llama_tp1, kit, landing: str) -> None:
    receiver, first, models = committed
    await first.engine.close()
    source = await kit.ranks(1, kit.tiny_folder("Llama"))
    await source.call("connect", address=receiver.address, landing=landing, push_timeout_s=20, **SMALL)
    await source.arm(0, point="send", nth=4)
    with pytest.raises(Exception, match="has ended"):
        await source.call("push", version=2, model=0)
    await until(lambda: receiver.state != "UPDATING", "the receiver has given up")
    if landing == "staged":
        assert (receiver.state, receiver.version) == ("COMMITTED", 1)
        await serves(llama_tp1, kit, 1, models[1])
    else:
        assert receiver.state == "FENCED"
        waiting = await answers_nothing(llama_tp1)
        (found,) = await states([llama_tp1.url], timeout_s=30)  # a front that knows only the server's URL sees it
        assert (found.kind, found.serves) == ("sglang", False), found
    healing = await kit.trainer(kit.tiny_config("Llama"), RemoteTarget(receiver.address), **SMALL)
    assert (await healing.push(3, models[2])).ok
    await serves(llama_tp1, kit, 3, models[2])
    if landing == "streamed":
        assert (await waiting).tokens == kit.greedy(models[2], PROMPT, 12)


async def test_a_source_killed_with_its_stand_in(llama_tp1, kit) -> None:
    """The stand-in of `SGLangTarget` dies with the source, between two buckets of a commit."""
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    source = await kit.ranks(1, kit.tiny_folder("Llama"))
    await source.call("connect", url=llama_tp1.url, options={"bucket_bytes": "48KiB"}, **SMALL)
    await source.arm(0, point="hand on", nth=3)
    with pytest.raises(Exception, match="has ended"):
        await source.call("push", version=1, model=0)
    waiting = await answers_nothing(llama_tp1)
    target = SGLangTarget(llama_tp1.url)
    healing = await kit.trainer(config, target)
    assert target.standin is not None
    assert target.standin.state == "FENCED"  # the server has said so to the new stand-in
    model = kit.fresh_model(config, 93)
    assert (await healing.push(2, model)).ok
    await serves(llama_tp1, kit, 2, model)
    assert (await waiting).tokens == kit.greedy(model, PROMPT, 12)


class Corrupting:
    """A receiving half that flips a bit in one bucket."""

    def __init__(self, half, nth: int) -> None:
        self._half, self._left = half, nth

    def __getattr__(self, name: str):
        return getattr(self._half, name)

    async def receive(self, task):
        bucket = await self._half.receive(task)
        self._left -= 1
        if self._left == 0:
            bucket = bucket.clone()
            bucket[bucket.numel() // 2] ^= 1
        return bucket


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_a_corrupted_bucket(llama_tp1, kit, monkeypatch, landing: str) -> None:
    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    models = {version: kit.fresh_model(config, 90 + version) for version in (1, 2)}
    makes = 0

    def half_factory(*args, **options):
        nonlocal makes
        makes += 1
        half = transports("127.0.0.1")(*args, **options)
        return Corrupting(half, 7) if makes == 1 else half

    monkeypatch.setattr(standin, "Receiver", functools.partial(Receiver, half_factory=half_factory))
    async with SGLangReceiver(llama_tp1.url, options=SMALL_OPTIONS) as receiver:
        source = await kit.trainer(config, RemoteTarget(receiver.address), landing=landing, **SMALL)
        broken = await source.push(1, models[1])
        assert (broken.ok, type(broken.error).__name__) == (False, "DigestMismatch")
        if landing == "staged":  # the checkpoint's weights go on, as they were
            answer = await llama_tp1.generate(PROMPT, 4)
            assert answer.spans == [("default", 0, 4)]
        else:
            assert receiver.state == "FENCED"
            waiting = await answers_nothing(llama_tp1)
        assert (await source.push(2, models[2])).ok
        await serves(llama_tp1, kit, 2, models[2])
        if landing == "streamed":
            assert (await waiting).tokens == kit.greedy(models[2], PROMPT, 12)


async def test_the_server_refuses_a_bucket(committed, llama_tp1, kit, monkeypatch) -> None:
    """Its loader raises at the third bucket: it is mixed from then on."""
    receiver, source, models = committed
    update, calls = SGLangFront.update_from_distributed, 0

    async def spoiled(front, dialect, *, shapes, **rest):
        nonlocal calls
        calls += 1
        if calls == 3:  # as many bytes, in a shape that no parameter has
            shapes = [(int(torch.Size(shape).numel()),) for shape in shapes]
        await update(front, dialect, shapes=shapes, **rest)

    monkeypatch.setattr(SGLangFront, "update_from_distributed", spoiled)
    broken = await source.push(2, models[2])
    assert (broken.ok, broken.state, type(broken.error).__name__) == (False, "FENCED", "LoaderError")
    assert "partially updated" in str(broken.error)
    waiting = await answers_nothing(llama_tp1)
    assert receiver.state == "FENCED"
    assert (await source.push(3, models[2])).ok
    await serves(llama_tp1, kit, 3, models[2])
    assert (await waiting).tokens == kit.greedy(models[2], PROMPT, 12)


def without(model, *parts: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not any(part in name for part in parts)}


async def test_what_does_not_fit_is_said_before_a_byte_moves(llama_tp1, kit, monkeypatch) -> None:
    """Only q_proj of a fused qkv, a wrong shape, an unknown name, a missing scale: the server never hears of it."""
    from syncline.adapters.trainers import ModuleSource
    from syncline.engine import TransferConfig, TransferEngine

    await kit.released(llama_tp1)
    config = kit.tiny_config("Llama")
    model = kit.fresh_model(config, 99)
    before = await llama_tp1.generate(PROMPT, 12)
    whole = dict(model.state_dict())
    name = "model.layers.1.self_attn.{}.weight"
    quantized = kit.tiny_config("Llama")
    quantized.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    cases = [
        (without(model, "k_proj", "v_proj"), None, [name.format("k_proj"), name.format("v_proj")]),
        ({**whole, "model.norm.weight": torch.zeros(63)}, None, ["model.norm.weight"]),
        ({**whole, "model.layers.0.self_attn.qk_proj.weight": torch.zeros(4)}, None, ["qk_proj"]),
        (whole, quantized, [name.format("q_proj") + "_scale_inv"]),
    ]
    for tensors, served_as, named in cases:
        target = SGLangTarget(llama_tp1.url, SGLangOptions(model=served_as))
        engine = TransferEngine(
            source=ModuleSource(tensors, world_size=1), targets=[target], config=TransferConfig(push_timeout_s=20)
        )
        with pytest.raises(PlanError) as raised:
            await engine.connect()
        await engine.close()
        for part in named:
            assert part in str(raised.value)
    after = await llama_tp1.generate(PROMPT, 12)
    assert (after.tokens, after.spans) == (before.tokens, before.spans)


async def test_a_server_that_was_started_anew(start_server, kit) -> None:
    """Killed after a commit and started again at the same address: it has nothing, says so, and gets the next push."""
    config = kit.tiny_config("Llama")
    flags = ("--skip-tokenizer-init", "--load-format", "dummy")
    server = start_server(kit.tiny_folder("Llama"), *flags)
    await server.ready()
    models = {version: kit.fresh_model(config, 90 + version) for version in (1, 2)}
    async with SGLangReceiver(server.url, options=SMALL_OPTIONS) as receiver:
        assert receiver.state == "FENCED"  # random weights
        source = await kit.trainer(config, RemoteTarget(receiver.address))
        assert (await source.push(1, models[1])).ok
        assert receiver.state == "COMMITTED"
        server.kill()
        lost = await source.push(2, models[2])
        assert not lost.ok
        await until(lambda: receiver.state == "FENCED", "the loss is noticed")
        server.start(again=True)
        await server.ready()
        await until(lambda: receiver.attached, "the new server is found")
        assert (receiver.state, receiver.version) == ("FENCED", None)
        await server.ready()  # fenced, it is up all the same
        waiting = await answers_nothing(server)
        assert (await source.push(2, models[2])).ok  # the same version: it is not believed to be held
        await serves(server, kit, 2, models[2])
        assert (await waiting).tokens == kit.greedy(models[2], PROMPT, 12)
    server.kill()
