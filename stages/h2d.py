"""Stage ``h2d`` on the CPU: copy what lies in mapped files into temporary memory, on worker threads.

Reading a mapped file may fault page by page from disk: that must not happen on the event loop, nor while `prepare` holds
up other ranks. Tasks that read no mapped file have nothing to do here. (On a GPU this stage copies from pinned host memory
to the device.)
"""

from __future__ import annotations

from collections.abc import Mapping

from .completions import Completion, TaskScope
from .recipes import Recipe
from .task_memory import TaskMemory
from .workers import Workers


class H2DStage:
    """Runs on every source rank.

    Args:
        recipes: what this rank does, by task.
        memory: where staging comes from; released with the task.
        workers: threads that copy.
        scope: where work lives that outlasts a failed push.
    """

    def __init__(self, *, recipes: Mapping[int, Recipe], memory: TaskMemory, workers: Workers, scope: TaskScope) -> None:
        self._recipes = recipes
        self._memory = memory
        self._workers = workers
        self._scope = scope
        self._push = -1

    def begin(self, push: int) -> None:
        """Tasks started from now on belong to ``push``."""
        self._push = push

    def start(self, task: int) -> Completion | None:
        recipe = self._recipes[task]
        if recipe.from_files is None:
            return None
        return self._scope.start(self._copy(self._push, recipe))

    async def _copy(self, push: int, recipe: Recipe) -> None:
        holding = await self._memory.claim((push, recipe.task.index), recipe.task, recipe.layout)
        assert recipe.from_files is not None
        await self._workers.submit(recipe.from_files.run, dst=holding.files())
