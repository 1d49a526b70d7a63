"""The demo's load: clients that send requests one after the other, all the time, and keep every answer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

PROMPTS = (
    "The capital of France is",
    "A list is",
    "The statement",
    "If the object",
    "Once upon a time",
    "Python is",
    "This function returns",
    "In the beginning",
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: what was asked, what came, and the versions that produced it, token by token."""

    server: int
    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    versions: list[dict[str, int]]
    seconds: float


@dataclass(kw_only=True)
class Clients:
    """All clients of all servers.

    Attributes:
        answers: every whole answer so far.
        refused: requests that a server refused because it was fenced or down.
    """

    new_tokens: int
    tokenizer: Any
    answers: list[Answer] = field(default_factory=list)
    refused: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def add(self, server: Any, count: int) -> None:
        """Let ``count`` clients send requests to a server until the end."""
        for number in range(count):
            dice = random.Random(number)  # noqa: S311 - which prompt comes next, not a secret
            self._tasks.append(asyncio.create_task(self._ask_for_ever(server, dice)))

    async def quiesce(self) -> None:
        """No new requests; wait for the answers under way."""
        self._stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_for_ever(self, server: Any, dice: random.Random) -> None:
        while not self._stop.is_set():
            prompt = dice.choice(PROMPTS)
            try:
                self.answers.append(await self._ask(server, prompt))
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                self.refused += 1
                await asyncio.sleep(0.1)

    async def _ask(self, server: Any, prompt: str) -> Answer:
        assert self._session is not None
        began = asyncio.get_running_loop().time()
        prompt_ids = list(self.tokenizer.encode(prompt))
        said = await server.ask(self._session, prompt_ids, self.new_tokens)
        return Answer(
            server=server.number,
            prompt=prompt,
            prompt_ids=prompt_ids,
            token_ids=said.token_ids,
            text=said.text or str(self.tokenizer.decode(said.token_ids)),
            versions=said.versions,
            seconds=asyncio.get_running_loop().time() - began,
        )
