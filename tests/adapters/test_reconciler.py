"""A server is brought to the state that is wanted, however often it refuses, and whoever gives up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from syncline.adapters.engines import reconciler as reconciler_module
from syncline.adapters.engines.reconciler import Reconciler
from syncline.engine.errors import LoaderError

LOG = logging.getLogger("syncline.test")


class Server:
    """Refuses as often as it is told to, or is silent until it is let go; notes what it was asked."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.asked: list[str] = []
        self.asked_once = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    def do(self, what: str):
        async def act() -> None:
            self.asked.append(what)
            self.asked_once.set()
            await self.answers.wait()
            if self.refusals:
                self.refusals -= 1
                raise LoaderError("not now")
            self.asked.append(f"{what} done")

        return act


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "_AGAIN_S", 0)


@pytest.fixture
async def reconciler() -> AsyncIterator[Reconciler]:
    made = Reconciler("the server", LOG)
    yield made
    await made.close()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_what_is_refused_is_asked_for_again(reconciler, caplog) -> None:
    server = Server(refusals=2)
    with caplog.at_level(logging.WARNING, "syncline.test"):
        await reconciler.reach("resume", server.do("resume"))
    assert server.asked == ["resume"] * 3 + ["resume done"]
    assert caplog.messages == ["the server did not resume: not now; trying again"] * 2


async def test_the_first_attempt_alone_is_waited_for(reconciler, monkeypatch) -> None:
    monkeypatch.setattr(reconciler_module, "_AGAIN_S", 3600)
    server = Server(refusals=1)
    await reconciler.reach("resume", server.do("resume"), wait=False)
    assert server.asked == ["resume"]


async def test_it_goes_on_where_the_first_attempt_alone_was_waited_for(reconciler) -> None:
    server = Server(refusals=3)
    await reconciler.reach("resume", server.do("resume"), wait=False)
    await until(lambda: "resume done" in server.asked)
    assert server.asked.count("resume") == 4


async def test_it_goes_on_when_its_caller_gives_up(reconciler) -> None:
    server = Server(refusals=1)
    server.answers.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await reconciler.reach("pause", server.do("pause"))
    await server.asked_once.wait()
    server.answers.set()
    await until(lambda: "pause done" in server.asked)


async def test_another_state_ends_the_attempts_at_the_one_before(reconciler) -> None:
    server = Server(refusals=1)
    server.answers.clear()
    resuming = asyncio.create_task(reconciler.reach("resume", server.do("resume")))
    await server.asked_once.wait()
    fencing = asyncio.create_task(reconciler.reach("pause", server.do("pause")))
    await asyncio.sleep(0)
    server.answers.set()
    async with asyncio.timeout(10):
        await asyncio.gather(resuming, fencing)
    # The refused attempt was under way; none came after it, and the two never spoke to the server at once.
    assert server.asked == ["resume", "pause", "pause done"]


async def test_superseded_before_its_turn_it_is_not_attempted(reconciler) -> None:
    server = Server()
    async with reconciler.turn:
        waiting = asyncio.create_task(reconciler.reach("resume", server.do("resume")))
        await asyncio.sleep(0)
        reconciler.supersede()
    async with asyncio.timeout(10):
        await waiting
    assert server.asked == []


@pytest.mark.parametrize("wait", [True, False])
async def test_a_bug_is_no_refusal(reconciler, wait) -> None:
    async def act() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await reconciler.reach("resume", act, wait=wait)


async def test_closing_ends_the_attempts(monkeypatch) -> None:
    monkeypatch.setattr(reconciler_module, "_AGAIN_S", 3600)
    made, server = Reconciler("the server", LOG), Server(refusals=1)
    await made.reach("resume", server.do("resume"), wait=False)
    before = asyncio.all_tasks()
    await made.close()
    assert len(asyncio.all_tasks()) == len(before) - 1
    assert server.asked == ["resume"]


async def test_closing_with_patience_lets_an_attempt_succeed() -> None:
    made, server = Reconciler("the server", LOG), Server(refusals=5)
    await made.reach("resume", server.do("resume"), wait=False)
    await made.close(patience_s=10)
    assert server.asked[-1] == "resume done"
