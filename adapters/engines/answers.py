"""`Generation`: one request on its way to an answer. `Signal`: how waiters learn that something moved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from .requests import Answer, FinishReason, GenerateRequest, RequestCancelled, RequestError, Span, Token, spans_of
from .sampling import Sampler


class Signal:
    """Wakes everybody who waits. Used on one event loop."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()``; it is asked again each time the signal fires. The caller sets the deadline."""
        while not holds():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class Generation(AsyncIterator[Token]):
    """A request on its way: ``async for token in generation``, or ``await generation.answer()``.

    Leaving an ``async with`` block, or `cancel`, frees its place in the batch. Used on the engine's event loop.
    """

    def __init__(self, request: GenerateRequest, *, on_end: Callable[[Generation], None]) -> None:
        self.request = request
        self.sampler = Sampler(request)
        self.tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None
        self._on_end = on_end
        self._signal = Signal()
        self._given = 0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def versions(self) -> list[Span]:
        """Which versions gave the tokens so far."""
        return spans_of([token.version for token in self.tokens])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        await self._signal.until(lambda: self.done or self._given < len(self.tokens))
        if self._given < len(self.tokens):
            self._given += 1
            return self.tokens[self._given - 1]
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def answer(self) -> Answer:
        """The whole answer, once it is there. Cancels the request if the caller is cancelled.

        Raises:
            RequestError: it failed; carries the tokens so far.
        """
        try:
            await self._signal.until(lambda: self.done)
        finally:
            self.cancel()
        if self.error is not None or self.finish_reason is None:
            raise self.error or RequestCancelled("cancelled")
        return Answer(
            token_ids=self.token_ids,
            versions=self.versions,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt_ids),
            seed=self.sampler.seed,
            logprobs=[token.logprob or 0.0 for token in self.tokens] if self.request.logprobs else None,
        )

    def cancel(self) -> None:
        """Give up; nothing happens if it has ended."""
        self.fail(RequestCancelled, "the one who asked has gone")

    def push(self, token_id: int, version: int, logprob: float | None) -> None:
        """The engine adds a token."""
        self.tokens.append(Token(len(self.tokens), token_id, version, logprob))
        self._signal.fire()

    def finish(self, reason: FinishReason) -> None:
        """The engine ends it."""
        self._end(reason, None)

    def fail(self, kind: type[RequestError], message: str) -> None:
        """The engine ends it with an error, which gets the tokens so far."""
        if not self.done:
            self._end(None, kind(message, token_ids=self.token_ids, versions=self.versions))

    def _end(self, reason: FinishReason | None, error: RequestError | None) -> None:
        self.finish_reason, self.error = reason, error
        self._signal.fire()
        self._on_end(self)
