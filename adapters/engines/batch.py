"""The requests that run, one a row, and the forward passes over them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from syncline.engine.gate import Gate
from syncline.stages.workers import call_in_thread

from .answers import Generation, Signal
from .requests import ForwardFailed
from .runner import ModelRunner
from .sampling import Sampler, choose_all

T = TypeVar("T")
Chosen = list[tuple[int, float | None]]


class LogitsJob:
    """Someone wants the logits of one plain pass over some tokens."""

    def __init__(self, ids: Sequence[int], *, wait: bool) -> None:
        self.ids, self.wait = tuple(ids), wait
        self.result: asyncio.Future[tuple[torch.Tensor, int]] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Batch:
    """Rows and passes. Its methods belong to one task of the event loop; the work itself runs in one thread.

    Row ``i`` here is row ``i`` of the runner's cache. What a pass gave is handed out before `in_pass` is over, so that
    whoever finds the engine at rest finds its answers complete up to the last pass.
    """

    def __init__(self, runner: ModelRunner, gate: Gate, *, eos: Collection[int], signal: Signal) -> None:
        self._runner, self._gate, self._eos, self._signal = runner, gate, frozenset(eos), signal
        self._thread: ThreadPoolExecutor | None = None
        self.rows: list[Generation] = []
        self.in_pass = False
        self.tokens = self.passes = 0

    @property
    def busy(self) -> bool:
        """Some row's request has not ended."""
        return any(not row.done for row in self.rows)

    @property
    def has_ended(self) -> bool:
        """Some row's request has ended: `reap` it before the next `advance`."""
        return any(row.done for row in self.rows)

    @property
    def cache_bytes(self) -> int:
        return self._runner.cache.nbytes

    def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="syncline-generate")

    async def stop(self) -> None:
        """Returns when the thread is gone. Every row's request must have ended."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            await call_in_thread(thread.shutdown, name="syncline-generate-end")
        finally:
            thread.shutdown(wait=False)
        self.rows.clear()
        self._runner.clear()

    async def admit(self, generation: Generation) -> None:
        """A pass over its prompt, into a new row; gives its first token."""
        self.rows.append(generation)
        work = functools.partial(_prefill, self._runner, generation.request.prompt_ids, generation.sampler)
        if not await self._pass(work, functools.partial(self._take, [generation]), [generation.fail]):
            self.rows.remove(generation)

    async def advance(self) -> None:
        """One pass over all rows; gives each its next token."""
        rows = [*self.rows]
        ids, samplers = [row.tokens[-1].id for row in rows], [row.sampler for row in rows]
        work = functools.partial(_decode, self._runner, ids, samplers)
        await self._pass(work, functools.partial(self._take, rows), [row.fail for row in rows])

    async def read(self, job: LogitsJob) -> None:
        """One plain pass for its logits."""

        def give(version: int, logits: torch.Tensor) -> None:
            if not job.result.done():
                job.result.set_result((logits, version))

        work = functools.partial(self._runner.logits, job.ids)
        await self._pass(work, give, [lambda kind, message: job.fail(kind(message))])

    async def reap(self) -> None:
        """Give back the rows of requests that have ended. No forward pass, so it may run while the gate is shut."""
        ended = [index for index, row in enumerate(self.rows) if row.done]
        await self._in_thread(functools.partial(_close_rows, self._runner, ended))
        for index in reversed(ended):
            last = self.rows.pop()
            if index < len(self.rows):
                self.rows[index] = last

    async def _pass(
        self,
        work: Callable[[], T],
        give: Callable[[int, T], None],
        fail: Sequence[Callable[[type[ForwardFailed], str], None]],
    ) -> bool:
        self.in_pass = True
        try:
            version, result = await self._in_thread(functools.partial(_gated, self._gate, work))
            self.passes += 1
            give(version, result)
        except Exception as error:  # noqa: BLE001  # whatever a model raises ends these requests, not the engine
            message = f"the forward pass raised {type(error).__name__}: {error}"
            for tell in fail:
                tell(ForwardFailed, message)
            return False
        finally:
            self.in_pass = False
            self._signal.fire()
        return True

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _take(self, rows: list[Generation], version: int, chosen: Chosen) -> None:
        for row, (token, logprob) in zip(rows, chosen, strict=True):
            if row.done:
                continue
            row.push(token, version, logprob)
            self.tokens += 1
            total = len(row.request.prompt_ids) + len(row.tokens)
            if token in self._eos:
                row.finish("stop")
            elif len(row.tokens) >= row.request.max_new_tokens or total >= self._runner.max_length:
                row.finish("length")


def _gated(gate: Gate, work: Callable[[], T]) -> tuple[int, T]:
    """One forward pass and the version it ran under. The driver starts none while the gate is shut: no waiting here."""
    with gate.forward(timeout_s=0.0) as version:
        return version, work()


def _prefill(runner: ModelRunner, ids: Sequence[int], sampler: Sampler) -> Chosen:
    """Read a prompt; leaves no row behind if that fails."""
    rows = len(runner.cache.lengths)
    try:
        return choose_all([sampler], runner.prefill(ids))
    except Exception:
        _close_rows(runner, range(rows, len(runner.cache.lengths)))
        raise


def _decode(runner: ModelRunner, ids: Sequence[int], samplers: Sequence[Sampler]) -> Chosen:
    return choose_all(samplers, runner.decode(ids))


def _close_rows(runner: ModelRunner, rows: Sequence[int]) -> None:
    for row in reversed(rows):
        runner.close_row(row)
