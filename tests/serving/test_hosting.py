"""Engine, receiver and server of one process, with real pushes under load."""

from __future__ import annotations

import asyncio
from typing import Self

import aiohttp
import pytest

from syncline.adapters.engines.byte_tokenizer import ByteTokenizer
from syncline.adapters.engines.hosting import HostedEngine, HostOptions
from syncline.adapters.engines.replay import Replayer
from syncline.adapters.engines.requests import Span
from syncline.adapters.trainers import ModuleSource
from syncline.engine import RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ConfigError

PUSHES = 8


@pytest.fixture
def folder(tmp_path, tiny):
    """A checkpoint folder without weights, its tokenizer that of bytes."""
    config = tiny("llama-tied").config
    config.eos_token_id = None
    config.save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    return tmp_path


class Load:
    """Clients that ask without a pause."""

    def __init__(self, url: str) -> None:
        self._client = aiohttp.ClientSession(url)
        self._stop = asyncio.Event()
        self._moved = asyncio.Condition()
        self.answers: list[tuple[list[int], dict]] = []
        self.errors: list[dict] = []

    async def ask(self, prompt: list[int], new: int) -> None:
        while not self._stop.is_set():
            body = {"prompt_ids": prompt, "max_new_tokens": new, "wait": True}
            async with self._client.post("/generate", json=body) as response:
                reply = await response.json()
            if response.status == 200:
                self.answers.append((prompt, reply))
            else:
                self.errors.append(reply)
            async with self._moved:
                self._moved.notify_all()

    async def more(self, answers: int) -> None:
        """Return when there are so many answers more."""
        goal = len(self.answers) + answers
        async with asyncio.timeout(30), self._moved:
            await self._moved.wait_for(lambda: len(self.answers) >= goal)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    def stop(self) -> None:
        self._stop.set()


@pytest.mark.parametrize(
    "way", ["staged shm keep", "mapped shm keep", "streamed shm keep", "staged gloo drain", "staged shm abort"]
)
async def test_every_answer_during_pushes_is_what_its_versions_give(folder, tiny, weights_of, way):
    landing, transport, in_flight = way.split()
    trainer = tiny("llama-tied")
    sets = [weights_of(tiny("llama-tied", seed=seed)) for seed in (1, 2)]
    options = HostOptions(
        model=str(folder), random_weights=7, listen=f"unix:{folder}/control.sock", movable=landing == "mapped", max_batch=4
    )
    config = TransferConfig(landing=landing, transport=transport, in_flight=in_flight, max_tmp_bytes="64KiB")
    async with HostedEngine(options) as hosted, Load(hosted.addresses["http"]) as load:
        target = hosted.addresses["control"]
        engine = TransferEngine(source=ModuleSource(trainer), targets=[RemoteTarget(target)], config=config)
        await engine.connect()
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(load.ask([9 + number, 8, 7], 15 + 3 * number))
            for version in range(1, PUSHES + 1):
                trainer.load_state_dict(sets[version % 2])
                report = await engine.push(version=version)
                assert report.ok, report
                await load.more(2)
            load.stop()
        await engine.close()
    replayer = Replayer(trainer, lambda version: sets[version % 2])
    for prompt, answer in load.answers:
        report = replayer.check(prompt, answer["token_ids"], [Span(**span) for span in answer["versions"]])
        assert report.ok, report.problem
    mixed = [answer for _, answer in load.answers if len(answer["versions"]) > 1]
    assert bool(mixed) == (in_flight == "keep")
    assert {error["error"] for error in load.errors} == ({"RequestAborted"} if in_flight == "abort" else set())


async def test_it_serves_nothing_before_the_first_push(folder):
    options = HostOptions(model=str(folder), random_weights=7)
    async with HostedEngine(options) as hosted, aiohttp.ClientSession(hosted.addresses["http"]) as client:
        assert hosted.addresses["control"].startswith("tcp://127.0.0.1:")
        async with client.post("/generate", json={"prompt_ids": [9]}) as response:
            assert (response.status, (await response.json())["error"]) == (503, "TargetFenced")
        async with client.get("/status") as response:
            status = await response.json()
    assert (status["state"], status["engine"]["state"], status["version"]) == ("FENCED", "FENCED", None)


async def test_what_cannot_start_leaves_nothing_behind(folder):
    unusable = folder / "file"
    unusable.touch()
    with pytest.raises(ConfigError, match="no socket lies there"):
        await HostedEngine(HostOptions(model=str(folder), random_weights=1, listen=f"unix:{unusable}")).__aenter__()
    with pytest.raises(ConfigError, match="beyond loopback"):
        await HostedEngine(HostOptions(model=str(folder), random_weights=1, http=("0.0.0.0", 0))).__aenter__()
