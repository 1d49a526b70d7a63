"""Stage ``h2d`` to a device: what a task needs of the host's memory goes to staging memory there, on a stream of its own.

Page-locked memory is read by the device where it is. Everything else is copied, by several threads, to page-locked memory of a
pool that was allocated once, and each piece goes on from there as soon as it is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .buffers import Buffer, BufferPool, aligned
from .completions import Completion, Signal, TaskScope, all_of
from .device_recipes import DeviceRecipe, Upload, chunks
from .lanes import Lane
from .task_memory import TaskMemory
from .workers import Workers


def pool_nbytes(recipes: Mapping[int, DeviceRecipe]) -> int:
    """Page-locked memory for what is not page-locked itself: for two of the largest tasks, so that one is filled meanwhile."""
    sizes = sorted(aligned(_pooled_nbytes(recipe)) for recipe in recipes.values())
    return sum(sizes[-2:])


def _pooled_nbytes(recipe: DeviceRecipe) -> int:
    """From the beginning of staging to the last byte that goes through the pool: it is laid out as staging is."""
    return max((upload.at + upload.nbytes for upload in recipe.uploads if not upload.locked), default=0)


class DeviceH2DStage:
    """Runs on every source rank that assembles on a device.

    Args:
        recipes: what this rank does, by task.
        memory: where staging comes from, on the device; released with the task.
        workers: threads that copy and launch.
        scope: where work lives that outlasts a failed push.
        lane: the stage's stream.
        pool: page-locked memory of `pool_nbytes`.

    Attributes:
        locked_nbytes, pooled_nbytes: bytes of this push that were read where they are, and that went through the pool.
    """

    def __init__(
        self,
        *,
        recipes: Mapping[int, DeviceRecipe],
        memory: TaskMemory,
        workers: Workers,
        scope: TaskScope,
        lane: Lane,
        pool: BufferPool,
    ) -> None:
        self._recipes = recipes
        self._memory = memory
        self._workers = workers
        self._scope = scope
        self._lane = lane
        self._pool = pool
        self._locked = {index: [u for u in recipe.uploads if u.locked] for index, recipe in recipes.items()}
        self._pageable = {index: chunks([u for u in recipe.uploads if not u.locked]) for index, recipe in recipes.items()}
        self._push = -1
        self.locked_nbytes = self.pooled_nbytes = 0

    def begin(self, push: int) -> None:
        """Tasks started from now on belong to ``push``."""
        self._push = push
        self.locked_nbytes = self.pooled_nbytes = 0

    def start(self, task: int) -> Completion | None:
        recipe = self._recipes[task]
        return self._scope.start(self._copy(self._push, recipe)) if recipe.uploads else None

    async def _copy(self, push: int, recipe: DeviceRecipe) -> None:
        index = recipe.task.index
        holding = await self._memory.claim((push, index), recipe.task, recipe.layout)
        staging = holding.files()
        assert staging is not None
        locked, pageable = self._locked[index], self._pageable[index]
        buffer: Buffer | None = await self._pool.acquire(_pooled_nbytes(recipe)) if pageable else None
        jobs: list[Signal[None]] = []
        if locked:
            jobs.append(self._workers.submit(self._lane.run, _read, locked, staging))
        if buffer is not None:
            jobs += [self._workers.submit(self._lane.run, _stage, piece, buffer.memory, staging) for piece in pageable]
        done = self._lane.after(all_of(jobs), (recipe, staging, buffer))
        if buffer is not None:
            done.subscribe(buffer.release)
        await done
        if push == self._push:
            self.locked_nbytes += sum(upload.nbytes for upload in locked)
            self.pooled_nbytes += sum(upload.nbytes for upload in pageable)


def _read(uploads: Sequence[Upload], staging: torch.Tensor) -> None:
    for upload in uploads:
        upload.target(staging).copy_(upload.source, non_blocking=True)


def _stage(piece: Upload, pinned: torch.Tensor, staging: torch.Tensor) -> None:
    between = piece.target(pinned)
    between.copy_(piece.source)
    piece.target(staging).copy_(between, non_blocking=True)
