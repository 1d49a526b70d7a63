"""An ``LLM`` object's front, with a stand-in for the object: who may add requests, and when a pause holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.adapters.engines.vllm import offline
from syncline.adapters.engines.vllm.front import Front
from syncline.adapters.engines.vllm.offline import Offline
from syncline.adapters.engines.vllm.versions import interfaces
from syncline.engine.errors import NotServing, ProtocolError


class Engine:
    """As vLLM's ``LLMEngine``: a request is counted at the end of ``add_request`` only."""

    def __init__(self, *, multimodal: bool = False) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1), model_config=SimpleNamespace(is_multimodal_model=multimodal)
        )
        self.unfinished: list[str] = []
        self.dropped: list[str] = []
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def add_request(self, name: str) -> str:
        self.inside.set()
        assert self.go_on.wait(20)
        if name == "bad":
            raise ValueError(name)
        self.unfinished.append(name)
        return name

    def has_unfinished_requests(self) -> bool:
        return bool(self.unfinished)

    def reset_encoder_cache(self) -> None:
        self.dropped.append("encoder")


class Llm:
    def __init__(self, **options: Any) -> None:
        self.llm_engine = Engine(**options)

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        self.called = (method, kwargs)

    def reset_prefix_cache(self) -> bool:
        self.llm_engine.dropped.append("prefix")
        return True

    def reset_mm_cache(self) -> None:
        self.llm_engine.dropped.append("mm")


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_release", lambda: "0.32.0")


@asynccontextmanager
async def fronted(llm: Llm) -> AsyncIterator[Front]:
    its = Offline(llm)
    front = Front(await its.start(), known=interfaces("0.32.0"))
    try:
        yield front
    finally:
        await front.close()
        await its.close()
        await its.close()  # may be closed again


def add(llm: Llm, name: str) -> str:
    answer: str = llm.llm_engine.add_request(name)
    llm.llm_engine.unfinished.remove(name)
    return answer


async def test_an_object_that_was_left_fenced_serves_again_after_a_push_of_the_next_engine() -> None:
    llm = Llm()
    async with fronted(llm) as first:
        await first.pause("abort", clear_cache=False)
    with pytest.raises(NotServing):
        add(llm, "left fenced")
    async with fronted(llm) as second:
        with pytest.raises(NotServing):
            add(llm, "still fenced")
        await second.pause("keep", clear_cache=False)
        await second.resume()
        assert add(llm, "a") == "a"
    assert add(llm, "b") == "b"
    assert llm.llm_engine.add_request.__self__ is llm.llm_engine  # as it was found


async def test_an_engine_that_leaves_takes_no_guard_away_from_another() -> None:
    llm = Llm()
    async with fronted(llm) as first:
        async with fronted(llm):
            pass
        await first.pause("abort", clear_cache=False)
        with pytest.raises(NotServing):
            add(llm, "fenced")
        await first.resume()
    assert llm.llm_engine.add_request.__self__ is llm.llm_engine


async def test_a_request_that_is_being_added_is_under_way() -> None:
    llm = Llm()
    engine = llm.llm_engine
    async with fronted(llm) as front:
        engine.go_on.clear()
        adding = asyncio.create_task(asyncio.to_thread(engine.add_request, "a"))
        await asyncio.to_thread(engine.inside.wait, 20)
        with pytest.raises(ProtocolError, match="BusyError"):
            await front.pause("keep", clear_cache=False)

        draining = asyncio.create_task(front.pause("drain", clear_cache=False))
        await asyncio.wait({draining}, timeout=0.3)
        assert not draining.done()
        with pytest.raises(NotServing):
            engine.add_request("b")
        engine.go_on.set()
        assert await adding == "a"
        await asyncio.sleep(0.1)
        assert not draining.done()  # it is counted by now
        engine.unfinished.clear()
        await draining
        await front.resume()

        with pytest.raises(ValueError, match="bad"):
            add(llm, "bad")
        await front.pause("abort", clear_cache=False)  # it is under way no more
        await front.resume()


async def test_a_pause_that_finds_requests_leaves_a_fence_as_it_was() -> None:
    llm = Llm()
    async with fronted(llm) as front:
        llm.llm_engine.unfinished.append("a")
        with pytest.raises(ProtocolError, match="BusyError"):
            await front.pause("abort", clear_cache=False)
        assert add(llm, "b") == "b"
        llm.llm_engine.unfinished.clear()
        await front.pause("abort", clear_cache=False)
        llm.llm_engine.unfinished.append("a")
        with pytest.raises(ProtocolError, match="BusyError"):
            await front.pause("abort", clear_cache=False)
        with pytest.raises(NotServing):
            add(llm, "b")
        await front.resume()


async def test_workers_are_told_that_an_llm_idles_under_a_pause() -> None:
    llm = Llm()
    async with fronted(llm) as front:
        await front.init({"url": front.url, "version": "0.32.0"}, 10)
    assert llm.called == (
        "init_weight_transfer_engine", {"init_info": {"url": front.url, "version": "0.32.0", "idles": True}}
    )  # fmt: skip


@pytest.mark.parametrize(("multimodal", "dropped"), [(False, ["prefix"]), (True, ["prefix", "mm", "encoder"])])
async def test_what_old_encoders_computed_goes_too(multimodal, dropped) -> None:
    llm = Llm(multimodal=multimodal)
    async with fronted(llm) as front:
        await front.pause("keep", clear_cache=False)
        assert llm.llm_engine.dropped == []
        await front.pause("keep", clear_cache=True)
        assert llm.llm_engine.dropped == dropped
        await front.resume()
