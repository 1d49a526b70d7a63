"""Stage ``prepare`` on the CPU: the pieces that the owner lacks come by point-to-point messages, the bucket is assembled,
cast and digested.

A task's prepare is done when nothing reads source storage for it any more: on the owner when the bucket is complete, on a
contributor when its messages have left. (Segments that are lent to the send are read until that has ended.) It is never given
up half way: whatever was started is waited for, also after an error, because until then memory is in use.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Collection, Mapping

import torch

from syncline.scheduler.outcome import Moments
from syncline.scheduler.programs import ReceiverId, SourceTask

from .assembly import Assembly, direct_range
from .communicator import PointToPoint
from .completions import Completion, Signal, TaskScope
from .digest import add_digests
from .errors import TransportError
from .recipes import Packing, Recipe
from .task_memory import Holding, TaskMemory
from .workers import Workers


class PrepareStage:
    """Runs on every source rank, for the tasks that it owns or contributes to.

    Args:
        recipes: what this rank does, by task.
        memory: where buckets and messages come from; released with the task.
        workers: threads that copy, cast and digest.
        scope: where work lives that outlasts a failed push.
        verify: compute digests.
        lends: tasks whose large segments are sent straight from the rank's own memory (`Assembly.lent`).
        trace: take down `local_ends`.

    Attributes:
        local_ends: task -> when this rank's own part of it was done (seconds of `time.perf_counter`), whatever others still had
            to do; of this push.
        communicator: among the source ranks; None for a single one. Replaced by the engine after an error.
    """

    def __init__(
        self,
        *,
        recipes: Mapping[int, Recipe],
        memory: TaskMemory,
        workers: Workers,
        scope: TaskScope,
        communicator: PointToPoint | None,
        verify: bool,
        lends: Collection[int] = (),
        trace: bool = False,
    ) -> None:
        self.communicator = communicator
        self._recipes = recipes
        self._tasks = {index: recipe.task for index, recipe in recipes.items()}
        self._memory = memory
        self._workers = workers
        self._scope = scope
        self._verify = verify
        self._lends = frozenset(lends)
        self._trace = trace
        self.local_ends = Moments()
        self._push = -1
        self._digests: dict[int, int] = {}

    def begin(self, push: int) -> None:
        """Tasks started from now on belong to ``push``; digests start from zero."""
        self._push = push
        self._digests = {}
        self.local_ends = Moments()

    def start(self, task: int) -> Completion:
        recipe = self._recipes[task]
        if recipe.assembly is not None:
            return self._scope.start(self._assemble(recipe, recipe.assembly, self._push))
        return self._scope.start(self._contribute(recipe, self._push))

    def digests(self) -> dict[ReceiverId, int]:
        """What this rank has assembled for each receiver in this push: its part of the receiver's content digest."""
        sums: defaultdict[ReceiverId, list[int]] = defaultdict(list)
        for index, digest in self._digests.items():
            for receiver in self._tasks[index].receivers:
                sums[receiver].append(digest)
        return {receiver: add_digests(parts) for receiver, parts in sums.items()}

    def content_digest(self) -> int:
        """Everything that this rank has assembled in this push, whoever receives it."""
        return add_digests(self._digests.values())

    async def _assemble(self, recipe: Recipe, assembly: Assembly, push: int) -> None:
        task, gather = recipe.task, self.communicator
        holding = await self._memory.claim((push, task.index), task, recipe.layout)
        self._check_current(push, task)
        await self._memory.claim_bucket((push, task.index), task)
        self._check_current(push, task)
        bucket = self._memory.bucket((push, task.index))
        arrivals = post_receives(gather, task, holding, bucket)
        lend = task.index in self._lends
        filled: Signal[int] = Signal()
        if assembly.has_to_fill(verify=self._verify, lend=lend):
            filled = self._workers.submit(assembly.fill, bucket, holding.files(), verify=self._verify, lend=lend)
        else:  # a thread would only have to be woken up
            filled.set(0)
        if self._trace:
            filled.subscribe(lambda: self._ended_here(task.index, push))
        failures = Failures()
        jobs: list[Awaitable[object]] = [filled]
        for number, (memory, arrival) in enumerate(arrivals):
            if await failures.ended(arrival) and not task.receives[number].direct:
                jobs.append(self._workers.submit(assembly.unpack, number, memory, bucket))
        for job in jobs:
            await failures.ended(job)
        failures.check()
        rest = 0
        if assembly.has_to_finish(verify=self._verify):
            rest = await self._workers.submit(assembly.finish, bucket, holding.memory(), verify=self._verify)
        if push == self._push:
            self._digests[task.index] = add_digests((filled.result, rest))

    async def _contribute(self, recipe: Recipe, push: int) -> None:
        task, gather = recipe.task, self._gather()
        holding = await self._memory.claim((push, task.index), task, recipe.layout)
        packed = [self._pack(packing, number, holding) for number, packing in enumerate(recipe.packings)]
        failures = Failures()
        sent = []
        for packing, (memory, signal) in zip(recipe.packings, packed, strict=True):
            if signal is None or await failures.ended(signal):
                sent.append(gather.send(memory, packing.message.peer, packing.message.tag))
        self._ended_here(task.index, push)
        for signal in sent:
            await failures.ended(signal)
        failures.check()

    def _ended_here(self, task: int, push: int) -> None:
        if self._trace and push == self._push:
            self.local_ends.add(task, time.perf_counter())

    def _pack(self, packing: Packing, number: int, holding: Holding) -> tuple[torch.Tensor, Signal[None] | None]:
        message = packing.message
        if packing.source is not None:
            return packing.source, None
        files = holding.files()
        if packing.staged_at >= 0 and files is not None:
            return files[packing.staged_at : packing.staged_at + message.nbytes], None
        memory = holding.message(number, message.nbytes)
        return memory, self._workers.submit(packing.run, memory, files)

    def _gather(self) -> PointToPoint:
        return _needed(self.communicator)

    def _check_current(self, push: int, task: SourceTask) -> None:
        """A task that waited for memory until its push was over must not use what belongs to the next one."""
        if push != self._push:
            raise TransportError(f"task {task.index}: its push ended before there was memory for it")


def _needed(gather: PointToPoint | None) -> PointToPoint:
    if gather is None:
        raise TransportError("this rank has messages to exchange with other source ranks, and no communicator")
    return gather


def post_receives(
    gather: PointToPoint | None, task: SourceTask, holding: Holding, bucket: torch.Tensor
) -> list[tuple[torch.Tensor, Signal[None]]]:
    """Ask for all messages of a task: where each comes to, and its arrival."""
    posted = []
    for number, message in enumerate(task.receives):
        if message.direct:
            start, nbytes = direct_range(message, sends=False)
            memory = bucket[start : start + nbytes]
        else:
            memory = holding.message(number, message.nbytes)
        posted.append((memory, _needed(gather).recv(memory, message.peer, message.tag)))
    return posted


class Failures:
    """The first error among things that are all waited for."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    async def ended(self, started: Awaitable[object]) -> bool:
        """Wait for ``started`` to end. True if it ended well."""
        try:
            await started
        except Exception as error:  # noqa: BLE001 - raised by `check`, when everything has ended
            self._first = self._first or error
            return False
        return True

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._first is not None:
            raise self._first
