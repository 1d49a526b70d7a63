"""Receivers in vLLM's workers as one engine after another connects to the same object. Workers are threads here.

Nothing is served. With a real ``LLM``: `test_offline.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from syncline.adapters.engines.checkpoint_manifest import CheckpointTensors
from syncline.adapters.engines.vllm.info import InitInfo
from syncline.adapters.engines.vllm.rendezvous import Rendezvous
from syncline.engine.control_client import ControlClient
from syncline.engine.messages import Status
from syncline.scheduler.layout import Tensor

pytestmark = pytest.mark.timeout(90)


@asynccontextmanager
async def front() -> AsyncIterator[tuple[str, list[str]]]:
    """An object's endpoints: a url, and what was asked there."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path.removeprefix("/"))
        return web.json_response({})

    folder = Path(tempfile.mkdtemp())
    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, f"{folder}/front").start()
    try:
        yield f"unix:{folder}/front", asked
    finally:
        await runner.cleanup()
        shutil.rmtree(folder)


class Workers:
    """The workers of one object, each with its backend."""

    def __init__(self, world_size: int, load_format: str = "auto") -> None:
        self.backends = [self._backend(rank, world_size, load_format) for rank in range(world_size)]

    @staticmethod
    def _backend(rank: int, world_size: int, load_format: str) -> Any:
        with warnings.catch_warnings(action="ignore"):  # of vLLM's imports
            from syncline.adapters.engines.vllm.backend import SynclineWeightTransferEngine

        settings = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, world_size=world_size),
            load_config=SimpleNamespace(load_format=load_format),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            model_config=SimpleNamespace(),
        )
        backend = SynclineWeightTransferEngine(SimpleNamespace(), settings, None, None)
        backend._wanted = CheckpointTensors(tensors=(Tensor(name="a", shape=(4, 2), dtype="float32"),), aliases={})
        return backend

    async def connect(self, url: str, *, ranks: int | None = None) -> Status | str:
        """What the leader says once all ranks are there, or why they are not."""
        backends = self.backends[:ranks]
        with tempfile.TemporaryDirectory() as folder:
            info = InitInfo(url=url, version="0.32.0", rendezvous=folder, patience_s=60)
            await asyncio.gather(*(asyncio.to_thread(backend.init_transfer_engine, info) for backend in backends))
            meeting = Rendezvous(folder)
            async with asyncio.timeout(20):
                while not all(words := [meeting.word(rank) for rank in range(len(backends))]):
                    await asyncio.sleep(0.02)
            if failures := {word.failure for word in words if word is not None} - {""}:
                return failures.pop()
            client = ControlClient(meeting.leader(), secret=None, timeout_s=10)
            try:
                async with asyncio.timeout(20):
                    while not (status := await client.status()).ready:
                        await asyncio.sleep(0.05)
                return status
            finally:
                await client.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(*request.param)
    yield made
    closing = [threading.Thread(target=backend.shutdown) for backend in made.backends]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


@pytest.mark.parametrize("workers", [(1,), (2,)], indirect=True)
async def test_the_next_engine_finds_what_is_held(workers) -> None:
    async with front() as (url, _):
        first = await workers.connect(url)
        assert (first.state, first.version) == ("COMMITTED", 0)
        again = await workers.connect(url)
        assert again.incarnation == first.incarnation
    for _ in range(2):
        async with front() as (url, asked):
            following = await workers.connect(url)
            assert (following.state, following.version, following.ready) == ("COMMITTED", 0, True)
            assert following.incarnation != first.incarnation
            assert "update_weight_version" in asked  # the leader speaks to the front that there is


@pytest.mark.parametrize("workers", [(1, "dummy"), (2, "dummy")], indirect=True)
async def test_what_is_fenced_stays_so(workers) -> None:
    for _ in range(2):
        async with front() as (url, asked):
            status = await workers.connect(url)
            assert (status.state, status.version) == ("FENCED", None)
            assert "pause" in asked and "resume" not in asked


@pytest.mark.parametrize("workers", [(1,), (2,)], indirect=True)
async def test_two_engines_at_once(workers) -> None:
    async with front() as (url, _):
        first = await workers.connect(url)
        async with front() as (other, _):
            assert "close() that one first" in await workers.connect(other)
        assert (await workers.connect(url)).incarnation == first.incarnation
    async with front() as (other, _):
        assert (await workers.connect(other)).version == 0


@pytest.mark.parametrize("workers", [(2,)], indirect=True)
async def test_a_rank_that_still_looks_for_its_leader_ends_at_once(workers) -> None:
    async with front() as (url, _):
        info = InitInfo(url=url, version="0.32.0", rendezvous=tempfile.mkdtemp(), patience_s=60)
        await asyncio.to_thread(workers.backends[1].init_transfer_engine, info)
        await asyncio.sleep(0.3)
    async with front() as (url, _):
        assert (await workers.connect(url)).version == 0


@pytest.mark.parametrize("workers", [(1,)], indirect=True)
async def test_the_next_engine_knows_the_digest(workers) -> None:
    (backend,) = workers.backends
    async with front() as (url, _):
        await workers.connect(url)
        await asyncio.to_thread(backend.shutdown)
        assert backend._agent.digest == ""
        backend._agent._held = (0, "ab" * 16)  # as a push would have left it
        assert (await workers.connect(url)).digest == "ab" * 16
    async with front() as (url, _):
        assert (await workers.connect(url)).digest == "ab" * 16


@pytest.mark.parametrize("workers", [(1,)], indirect=True)
async def test_receivers_of_a_server_are_not_taken(workers) -> None:
    async with front() as (url, _):
        assert (await workers.connect(url)).version == 0
    assert "shutdown_weight_transfer_engine" in await workers.connect("http://127.0.0.1:9")


def media(**its: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"language_model_only": False, "mm_processor_cache_type": "lru", **its})


@pytest.mark.parametrize("workers", [(1,)], indirect=True)
@pytest.mark.parametrize(
    ("its", "caching", "v2", "no_keep"),
    [
        (None, True, False, ""),
        (media(language_model_only=True), True, False, ""),
        (media(), False, False, ""),
        (media(), True, True, ""),
        (media(), True, False, "--no-enable-prefix-caching"),
        (media(mm_processor_cache_type="shm"), False, True, "--mm-processor-cache-type lru"),
    ],
)
def test_what_a_worker_knows_of_images_and_the_like(workers, its, caching, v2, no_keep) -> None:
    (backend,) = workers.backends
    backend._settings.model_config.multimodal_config = its
    backend._settings.cache_config.enable_prefix_caching = caching
    backend._settings.use_v2_model_runner = v2
    place = backend._place()
    assert place.media is (its is not None and not its.language_model_only)
    assert bool(place.no_keep) is bool(no_keep) and no_keep in place.no_keep
