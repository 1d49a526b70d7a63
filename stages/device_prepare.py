"""Stage ``prepare`` on a device: the pieces that the owner lacks come by point-to-point messages, then a few kernels gather,
cast, quantize and digest the bucket, on a stream of the stage's own.

The work's end is an event that is asked for, and nobody waits for the device. What the kernels read and write is held by the
task's memory, which is given back after that end was seen; what they read of the trainer's own is theirs until then, too:
``source_free`` comes from the same ends.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .communicator import PointToPoint
from .completions import Completion, TaskScope
from .device_recipes import DevicePacking, DeviceRecipe
from .kernels.assemble import assemble
from .lanes import HostDigest, HostDigests, Lane
from .prepare import Failures, PrepareStage, post_receives
from .task_memory import Holding, TaskMemory
from .workers import Workers


class DevicePrepareStage(PrepareStage):
    """Runs on every source rank that assembles on a device.

    Args:
        recipes: what this rank does, by task.
        memory: where buckets and messages come from, on the device; released with the task.
        workers: threads that launch.
        scope: where work lives that outlasts a failed push.
        lane: the stage's stream.
        verify: compute digests.
        trace: take down `local_ends`.

    Attributes:
        communicator: among the source ranks, for memory of the device.
    """

    def __init__(
        self,
        *,
        recipes: Mapping[int, DeviceRecipe],
        memory: TaskMemory,
        workers: Workers,
        scope: TaskScope,
        lane: Lane,
        communicator: PointToPoint | None,
        verify: bool,
        trace: bool = False,
    ) -> None:
        super().__init__(
            recipes={}, memory=memory, workers=workers, scope=scope, communicator=communicator, verify=verify, trace=trace
        )
        self._tasks = {index: recipe.task for index, recipe in recipes.items()}
        self._device_recipes = recipes
        self._lane = lane
        self._digest_rows = HostDigests(lane)

    def start(self, task: int) -> Completion:
        recipe = self._device_recipes[task]
        work = self._contribute_there if recipe.kernels is None else self._assemble_there
        return self._scope.start(work(recipe, self._push))

    async def _assemble_there(self, recipe: DeviceRecipe, push: int) -> None:
        task, gather = recipe.task, self.communicator
        holding = await self._memory.claim((push, task.index), task, recipe.layout)
        self._check_current(push, task)
        await self._memory.claim_bucket((push, task.index), task)
        self._check_current(push, task)
        bucket = self._memory.bucket((push, task.index))
        failures = Failures()
        for _, arrival in post_receives(gather, task, holding, bucket):
            await failures.ended(arrival)
        failures.check()
        assert recipe.kernels is not None
        found = 0 if recipe.kernels.idle else await self._run(recipe, bucket, holding)
        if push == self._push:
            self._digests[task.index] = found
            self._ended_here(task.index, push)

    async def _run(self, recipe: DeviceRecipe, bucket: torch.Tensor, holding: Holding) -> int:
        """Launch a task's kernels and wait for their end; the bucket's digest, 0 without digests."""
        digest = self._digest_rows.spare()
        if digest is None:
            digest = await self._workers.submit(self._digest_rows.make)
        launched = self._workers.submit(self._lane.run, self._launch, recipe, bucket, holding, digest)
        await self._lane.after(launched, (recipe, bucket, holding, digest))
        found = digest.value if self._verify else 0
        self._digest_rows.give_back(digest)
        return found

    def _launch(self, recipe: DeviceRecipe, bucket: torch.Tensor, holding: Holding, digest: HostDigest) -> None:
        assert recipe.kernels is not None
        limbs = digest.clear()
        scratch = holding.message(recipe.scratch, recipe.kernels.tmp_nbytes) if recipe.kernels.tmp_nbytes else None
        assemble(bucket, recipe.kernels, given=holding.memory(), limbs=limbs, scratch=scratch)
        holding.launched()
        digest.bring()

    async def _contribute_there(self, recipe: DeviceRecipe, push: int) -> None:
        task, gather = recipe.task, self._gather()
        holding = await self._memory.claim((push, task.index), task, recipe.layout)
        self._check_current(push, task)
        messages = [self._message(packing, number, holding) for number, packing in enumerate(recipe.packings)]
        if any(packing.kernels is not None for packing in recipe.packings):
            launched = self._workers.submit(self._lane.run, self._pack_all, recipe, messages, holding)
            await self._lane.after(launched, (recipe, messages, holding))
        failures = Failures()
        peers = [(packing.message.peer, packing.message.tag) for packing in recipe.packings]
        sent = [gather.send(memory, *peer) for memory, peer in zip(messages, peers, strict=True)]
        self._ended_here(task.index, push)
        for signal in sent:
            await failures.ended(signal)
        failures.check()

    @staticmethod
    def _message(packing: DevicePacking, number: int, holding: Holding) -> torch.Tensor:
        if packing.source is not None:
            return packing.source
        files, nbytes = holding.files(), packing.message.nbytes
        if packing.staged_at >= 0 and files is not None:
            return files[packing.staged_at : packing.staged_at + nbytes]
        return holding.message(number, nbytes)

    @staticmethod
    def _pack_all(recipe: DeviceRecipe, messages: list[torch.Tensor], holding: Holding) -> None:
        for packing, memory in zip(recipe.packings, messages, strict=True):
            if packing.kernels is not None:
                assemble(memory, packing.kernels, given=holding.files())
