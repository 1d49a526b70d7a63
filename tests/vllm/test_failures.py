"""A push that fails in the middle never leaves a real server (TP2) answering from mixed weights, and the next push heals it.

Old version or fenced, as the landing mode says; the server says so itself, and while it is fenced it answers nothing.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from syncline.adapters.engines import VLLMTarget
from syncline.adapters.engines.fleet import states
from syncline.engine.errors import LoaderError, ProtocolError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LANDINGS = ["staged", "streamed"]
SMALL = {"bucket_bytes": 100_000, "push_timeout_s": 20.0}


@pytest.fixture(scope="module")
def served(servers, tiny):
    """A server of two ranks; both have the backend registered by the worker extension, which can also make loads fail."""
    model = tiny("qwen3")
    arguments = ["--load-format", "dummy", "--skip-tokenizer-init", "--tensor-parallel-size", "2"]
    server = servers(model.folder, *arguments, "--worker-extension-cls", "faulty.Faulty")
    return model, server


class Life:
    """The server's versions, each of them with the weights of its own seed."""

    def __init__(self, served, source, well, arrived) -> None:
        self.model, self.server = served
        self._source, self._well, self._arrived = source, well, arrived
        self.addresses: list[int] = []

    async def push_well(self) -> int:
        """A whole push arrives, with other weights than those before, whatever the server holds."""
        version = ((await self.server.settled()).version or 0) + 10
        engine = await self._source(self.model.model(version), self.server, **SMALL)
        self._well(await engine.push(version))
        await engine.close()
        await self.holds(version)
        assert await self.server.rpc("meta_tensors") == [0, 0]
        return version

    async def holds(self, version: int) -> None:
        await self._arrived(self.server, self.model.model(version), version, 12)

    async def is_fenced(self) -> None:
        status = await self.server.settled()
        assert status.state == "FENCED" and status.message
        assert await self.server.is_paused()
        (found,) = await states([self.server.url], timeout_s=20)
        assert (found.kind, found.state, found.version) == ("vllm", "FENCED", None), found
        assert await self.server.says_nothing()
        code, text = await self.server.refused("POST", "resume")  # whoever asks
        assert code == 500 and "syncline has fenced this engine" in text
        assert await self.server.is_paused()
        assert await self.server.says_nothing()

    async def after(self, landing: str, version: int) -> None:
        """What the failed push has left: the old version (staged), or nothing (streamed)."""
        if landing == "staged":
            await self.server.settled()
            await self.holds(version)
        else:
            await self.is_fenced()


@pytest.fixture
def life(served, source, well, arrived) -> Life:
    return Life(served, source, well, arrived)


async def test_pushes_arrive_on_both_ranks(life) -> None:
    status = await life.server.status()
    assert (status.state, status.world_size) == ("FENCED", 2)
    await life.push_well()
    addresses = await life.server.rpc("addresses")
    await life.push_well()
    assert await life.server.rpc("addresses") == addresses


@pytest.mark.parametrize("landing", LANDINGS)
async def test_killed_source(life, source_ranks, landing) -> None:
    version = await life.push_well()
    source = source_ranks(1)
    await source.call("load", model=str(life.model.folder), seed=7)
    await source.call("connect", urls=[life.server.url], config={**SMALL, "landing": landing})
    await source.call("arm", what="kill", at=4)
    with pytest.raises(ConnectionError):
        await source.call("push", version=version + 1)
    await life.after(landing, version)
    await life.push_well()


@pytest.mark.parametrize("landing", LANDINGS)
async def test_a_stopped_source_keeps_the_server_paused_until_its_deadline_only(life, source_ranks, landing) -> None:
    version = await life.push_well()
    source = source_ranks(1)
    await source.call("load", model=str(life.model.folder), seed=7)
    await source.call("connect", urls=[life.server.url], config={**SMALL, "push_timeout_s": 6.0, "landing": landing})
    await source.call("arm", what="stop", at=4)
    pushing = asyncio.create_task(source.call("push", version=version + 1))
    if landing == "streamed":
        async with asyncio.timeout(30):
            while not await life.server.is_paused():
                await asyncio.sleep(0.02)
    async with asyncio.timeout(6.0 + 9.0):  # the deadline, and the grace that docs/engines.md states
        while (await life.server.status()).state == "UPDATING":
            await asyncio.sleep(0.05)
    await life.after(landing, version)
    source.ranks[0].process.send_signal(signal.SIGKILL)
    with pytest.raises(ConnectionError):
        await pushing
    await life.push_well()


@pytest.mark.parametrize("landing", LANDINGS)
async def test_a_pause_of_others_is_left_alone(life, source, well, landing) -> None:
    """An operator's pause lasts until the operator resumes; so does one that somebody else tries to end during a push."""
    version = await life.push_well()
    await life.server.call("POST", "pause", mode="keep")
    engine = await source(life.model.model(version + 1), life.server, landing=landing, **SMALL)
    well(await engine.push(version + 1))
    assert await life.server.is_paused()
    (found,) = await states([life.server.url], timeout_s=20)
    assert (found.state, found.version) == ("PAUSED", version + 1)
    await life.server.call("POST", "resume")
    await life.holds(version + 1)
    await engine.close()
    await life.push_well()
    assert not await life.server.is_paused()


@pytest.mark.parametrize("delay_ms", [1, 60])
async def test_source_killed_while_the_server_commits(life, source_ranks, delay_ms) -> None:
    """The server decides alone: it holds one of the two versions, whole, or none."""
    version = await life.push_well()
    source = source_ranks(1)
    await source.call("load", model=str(life.model.folder), seed=version + 1)
    await source.call("connect", urls=[life.server.url], config=SMALL)
    await source.call("arm", what="kill at commit", at=delay_ms)
    with pytest.raises(ConnectionError):
        await source.call("push", version=version + 1)
    status = await life.server.settled()
    if status.state == "FENCED":
        await life.is_fenced()
    else:
        assert status.version in {version, version + 1}
        await life.holds(status.version)
    await life.push_well()


@pytest.mark.parametrize("landing", LANDINGS)
async def test_corrupted_bucket(life, source_ranks, landing) -> None:
    version = await life.push_well()
    source = source_ranks(1)
    await source.call("load", model=str(life.model.folder), seed=7)
    await source.call("connect", urls=[life.server.url], config={**SMALL, "landing": landing})
    await source.call("arm", what="corrupt", at=3)
    report = await source.call("push", version=version + 1)
    target = report["targets"][life.server.url]
    assert (report["ok"], target["error"]) == (False, "DigestMismatch")
    await life.after(landing, version)
    await source.call("close")
    await life.push_well()


@pytest.mark.parametrize("landing", LANDINGS)
@pytest.mark.parametrize("fault", [(0, 1, "raise"), (1, 12, "raise"), (0, 9, "shape"), (1, 17, "shape")])
async def test_loading_fails_on_one_rank(life, source, landing, fault) -> None:
    """vLLM's own update leaves layers without weights then; whoever asked it next would get an exception, or worse."""
    version = await life.push_well()
    await life.server.rpc("fail_loading", *fault)
    engine = await source(life.model.model(7), life.server, landing=landing, **SMALL)
    report = await engine.push(version + 1)
    error = report.targets[life.server.url].error
    assert isinstance(error, LoaderError)
    assert fault[2] == "shape" or "injected while loading" in str(error)
    await life.is_fenced()
    assert await life.server.rpc("meta_tensors") == [0, 0]
    await engine.close()
    await life.push_well()


async def test_the_same_source_goes_on_after_a_failure(life, source, well) -> None:
    """Nobody connects anew: the engine that saw the failure pushes the next version itself."""
    version = await life.push_well()
    await life.server.rpc("fail_loading", 1, 5, "raise")
    engine = await source(life.model.model(version + 2), life.server, **SMALL)
    assert not (await engine.push(version + 1)).ok
    well(await engine.push(version + 2))
    await life.holds(version + 2)


async def test_receivers_are_started_anew_at_a_port_and_take_pushes_by_gloo(life, source, well, arrived, port) -> None:
    """As servers beyond one host have it. What is served stays so all the while."""
    version = await life.push_well()
    with pytest.raises(ProtocolError, match="shutdown_weight_transfer_engine"):
        await source(
            life.model.model(1), VLLMTarget(life.server.url, worker_url=life.server.url.replace("127.0.0.1", "localhost"))
        )
    await life.server.call("POST", "shutdown_weight_transfer_engine")
    assert (await life.server.greedy((5, 6, 7), 4)).versions[0].version == version
    for landing in LANDINGS:
        version += 1
        target = VLLMTarget(life.server.url, control_port=port, secret="between us")
        engine = await source(life.model.model(version), target, transport="gloo", landing=landing, **SMALL)
        well(await engine.push(version))
        await engine.close()
        await arrived(life.server, life.model.model(version), version, 12, status=False)
    await life.server.call("POST", "shutdown_weight_transfer_engine")
    await life.holds(version)
    await life.push_well()
