"""`GenerationEngine`: answers concurrent requests with a transformers causal LM, and holds still while its weights change.

One asyncio task decides, one worker thread computes. A turn is: read one logits job, admit one waiting request (a pass
over its prompt), then one pass that gives every running request its next token. Between two passes is a *step boundary*:
there requests join and leave, and there an update finds the engine at rest.

A pass runs inside the `Gate`, under exactly one version. `pause` shuts the gate, `resume` opens it under a new version.
What happens to running requests at a pause: ``keep`` holds them where they are, and they go on with the new weights on the
keys and values they have; ``drain`` runs them to their end first; ``abort`` ends them with `RequestAborted`. Requests that
come meanwhile wait in the queue, which is bounded in length and in time. While the engine is *fenced* (no version) they
are refused, unless they ask to wait. No keys or values outlive their request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal, Self

import msgspec
import torch
from torch import nn

from syncline.engine.errors import ClosedError
from syncline.engine.gate import Gate
from syncline.engine.messages import InFlight
from syncline.stages.device_marks import DeviceMarks

from .answers import Generation, Signal
from .batch import Batch, LogitsJob
from .requests import (
    Answer,
    GenerateRequest,
    QueueFull,
    RequestAborted,
    RequestInvalid,
    RequestTimeout,
    TargetFenced,
    prompt_problems,
)
from .runner import ModelRunner

EngineState = Literal["SERVING", "HELD", "UPDATING", "FENCED", "CLOSED"]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does now, and what it has done since its start."""

    state: EngineState
    version: int | None
    running: int
    waiting: int
    answered: int
    failed: int
    tokens: int
    passes: int
    cache_bytes: int


class GenerationEngine:
    """Continuous batching over one model. Implements `syncline.engine.loader.Serving`.

    In float32 the greedy answer to a prompt is that of ``model.generate`` for that prompt alone, token for token, whatever
    else is in the batch (up to ties within rounding). All methods belong to the event loop that called `start`.

    Args:
        model: causal LM of transformers. Its weights may change, in place or by ``param.data``, only while paused.
        max_batch: most requests that run at once.
        max_length: most tokens of a request, prompt included; None takes the model's longest context, at most 4096.
        max_waiting: most requests that wait.
        timeout_s: longest time that a request goes without a token, waiting included, in seconds.
        eos_ids: tokens that end an answer; None takes those of the model's generation config.
        version: of the weights at the start; None is fenced.

    Raises:
        UnsupportedModel: the model cannot be served exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int = 8,
        max_length: int | None = None,
        max_waiting: int = 256,
        timeout_s: float = 60.0,
        eos_ids: Collection[int] | None = None,
        version: int | None = None,
    ) -> None:
        longest = int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 4096)
        self.max_length = min(longest, max_length or 4096)
        runner = ModelRunner(model, max_rows=max_batch, max_length=self.max_length)
        self._vocab, self._max_batch, self._max_waiting, self._timeout_s = runner.vocab, max_batch, max_waiting, timeout_s
        self._gate = Gate(version=version, mark=DeviceMarks())  # a pass is over when the device has done it
        self._version = version
        self._signal = Signal()
        self._batch = Batch(runner, self._gate, eos=_eos_of(model) if eos_ids is None else eos_ids, signal=self._signal)
        self._holds: dict[Literal["update", "operator"], InFlight] = {}
        self._fence_reason = "no version has been pushed yet"
        self._waiting: deque[Generation] = deque()
        self._jobs: deque[LogitsJob] = deque()
        self._timers: dict[Generation, asyncio.TimerHandle] = {}
        self._closed = True
        self._driver: asyncio.Task[None] | None = None
        self._answered = self._failed = 0

    # ---- life

    async def start(self) -> None:
        """Begin to serve on the running event loop."""
        if self._driver is None:
            self._closed = False
            self._batch.start()
            self._driver = asyncio.create_task(self._drive(), name="syncline-generate")

    async def close(self) -> None:
        """End every request with `RequestAborted`; returns once the pass that runs has ended and the thread is gone."""
        self._end_all("the engine is closing")
        if self._driver is not None:
            driver, self._driver = self._driver, None
            await asyncio.wait([driver])
            await self._batch.stop()
            driver.result()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ---- requests

    def submit(self, request: GenerateRequest) -> Generation:
        """Take a request; its tokens come out of what is returned.

        Raises:
            RequestInvalid, TargetFenced, QueueFull: refused at once.
            ClosedError: the engine is not started, or closed.
        """
        self._check(request.problems(vocab=self._vocab, max_length=self.max_length), request.wait)
        generation = Generation(request, on_end=self._ended)
        self._waiting.append(generation)
        self._watch(generation, asyncio.get_running_loop().time(), 0)
        self._signal.fire()
        return generation

    async def generate(self, request: GenerateRequest) -> Answer:
        """The whole answer. Cancelling this frees the request's place."""
        return await self.submit(request).answer()

    async def logits(
        self, ids: Sequence[int], *, wait: bool = False, timeout_s: float | None = None
    ) -> tuple[torch.Tensor, int]:
        """Logits after every token by one plain pass, float32 (tokens, vocab), and the version of that pass."""
        self._check(prompt_problems(ids, vocab=self._vocab, max_length=self.max_length), wait)
        job = LogitsJob(ids, wait=wait)
        self._jobs.append(job)
        self._signal.fire()
        seconds = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await job.result
        except TimeoutError as error:
            raise RequestTimeout(f"no logits for {seconds} s: {self._why()}") from error
        finally:
            if job in self._jobs:
                self._jobs.remove(job)

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state,
            version=self.version,
            running=sum(not row.done for row in self._batch.rows),
            waiting=len(self._waiting) + len(self._jobs),
            answered=self._answered,
            failed=self._failed,
            tokens=self._batch.tokens,
            passes=self._batch.passes,
            cache_bytes=self._batch.cache_bytes,
        )

    @property
    def version(self) -> int | None:
        """What passes run under; None while fenced."""
        return self._version

    @property
    def state(self) -> EngineState:
        if self._closed:
            return "CLOSED"
        if self.version is None:
            return "FENCED"
        return "UPDATING" if "update" in self._holds else "HELD" if self._holds else "SERVING"

    # ---- Serving: what an update needs

    async def pause(self, in_flight: InFlight) -> None:
        """Returns once no forward pass runs and none will start. Cancelled, it leaves the engine paused: `resume` it.

        If an operator holds running requests back, there is nothing to drain: they are kept.
        """
        self._holds["update"] = in_flight
        await self._settle(in_flight, "a weight update began")
        await self._gate.pause(in_flight)

    async def resume(self, version: int) -> None:
        """Let forward passes run again, all on ``version``."""
        await self._gate.resume(version)
        self._version = version
        self._holds.pop("update", None)
        self._signal.fire()

    async def fence(self, reason: str) -> None:
        """The weights are no version's: end what runs, refuse what comes, until the next `resume`."""
        await self.pause("abort")
        await self._gate.fence(reason)
        self._version, self._fence_reason = None, reason
        for generation in [*self._waiting]:
            if not generation.request.wait:
                generation.fail(TargetFenced, self._fenced())
        for job in self._jobs:
            if not job.wait:
                job.fail(TargetFenced(self._fenced()))

    # ---- what an operator may do, apart from updates

    async def hold(self, in_flight: InFlight) -> None:
        """As `pause`, until `release`. Updates may come meanwhile; they do not end the hold."""
        self._holds["operator"] = in_flight
        await self._settle(in_flight, "an operator paused the engine")

    async def release(self) -> None:
        """End the operator's hold. An update or a fence stays what it is."""
        self._holds.pop("operator", None)
        self._signal.fire()

    async def _settle(self, in_flight: InFlight, reason: str) -> None:
        self._signal.fire()
        if in_flight == "drain":
            await self._signal.until(lambda: not self._batch.in_pass and not (self._may_run() and self._batch.busy))
            return
        await self._signal.until(lambda: not self._batch.in_pass)
        if in_flight == "abort":
            for row in self._batch.rows:
                row.fail(RequestAborted, f"{reason}; ask again")

    # ---- the driver

    async def _drive(self) -> None:
        try:
            while not self._closed:
                await self._signal.until(self._has_work)
                await self._turn()
        finally:
            self._end_all("the engine has stopped")

    async def _turn(self) -> None:
        batch = self._batch
        if batch.has_ended:
            await batch.reap()
        if self._may_start() and self._jobs:
            await batch.read(self._jobs.popleft())
        if self._may_start() and self._waiting and len(batch.rows) < self._max_batch:
            await batch.admit(self._waiting.popleft())
        if self._may_run() and batch.rows and not batch.has_ended:
            await batch.advance()

    def _has_work(self) -> bool:
        if self._closed or self._batch.has_ended:
            return True
        return (self._may_run() and bool(self._batch.rows)) or (self._may_start() and bool(self._jobs or self._waiting))

    def _may_start(self) -> bool:
        return self._gate.version is not None and not self._holds and not self._closed

    def _may_run(self) -> bool:
        return self._gate.version is not None and not self._closed and all(mode == "drain" for mode in self._holds.values())

    # ---- small things

    def _check(self, problems: list[str], wait: bool) -> None:
        if self._closed:
            raise ClosedError("the generation engine is not running; call start() first")
        if problems:
            raise RequestInvalid("; ".join(problems))
        if self.version is None and not wait:
            raise TargetFenced(self._fenced())
        waiting = len(self._waiting) + len(self._jobs)
        if waiting >= self._max_waiting:
            raise QueueFull(f"{waiting} requests wait already (max_waiting is {self._max_waiting}); ask again later")

    def _watch(self, generation: Generation, since: float, seen: int) -> None:
        """Ask again when the request's time is up; it fails if it has got no token meanwhile."""
        loop = asyncio.get_running_loop()
        limit = generation.request.timeout_s or self._timeout_s
        if len(generation.tokens) > seen:
            since, seen = loop.time(), len(generation.tokens)
        if loop.time() - since >= limit:
            generation.fail(RequestTimeout, f"no token for {limit} s: {self._why()}")
        else:
            self._timers[generation] = loop.call_at(since + limit, self._watch, generation, since, seen)

    def _ended(self, generation: Generation) -> None:
        if (timer := self._timers.pop(generation, None)) is not None:
            timer.cancel()
        if generation in self._waiting:
            self._waiting.remove(generation)
        if generation.error is None:
            self._answered += 1
        else:
            self._failed += 1
        self._signal.fire()

    def _end_all(self, reason: str) -> None:
        """Refuse what comes; end all that is there."""
        self._closed = True
        for generation in [*self._batch.rows, *self._waiting]:
            generation.fail(RequestAborted, reason)
        for job in self._jobs:
            job.fail(RequestAborted(reason))
        self._signal.fire()

    def _why(self) -> str:
        rows = len(self._batch.rows)
        return f"the engine is {self.state}, {len(self._waiting)} wait, {rows} run; raise timeout_s or ask again"

    def _fenced(self) -> str:
        return f"fenced, nothing is served until a push commits: {self._fence_reason}; ask again, or with wait=true"


def _eos_of(model: Any) -> list[int]:
    config = getattr(model, "generation_config", None) or model.config
    eos = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
