"""For ``--worker-extension-cls faulty.Faulty``: lets a test have a worker's loading raise, at a tensor of its choice.

It is also another way to have the backend registered: by the module that vLLM imports for the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from syncline.adapters.engines.vllm.bracket import Bracket
from syncline.adapters.engines.vllm.plugin import WorkerExtension


class Faulty(WorkerExtension):
    """Methods that the endpoint ``/collective_rpc`` calls."""

    def fail_loading(self, rank: int, at: int, how: str) -> None:
        """On one rank the ``at``-th tensor from now raises (``raise``) or comes in a wrong shape (``shape``). Once."""
        load, left = Bracket.load, at
        if self.rank != rank:  # type: ignore[attr-defined]
            return

        def spoiled(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal left
            for name, tensor in tensors:
                left -= 1
                if left:
                    yield name, tensor
                    continue
                Bracket.load = load  # type: ignore[method-assign]
                if how == "raise":
                    raise RuntimeError("injected while loading")
                yield name, torch.zeros(2, 3, 5)

        Bracket.load = lambda bracket, tensors: load(bracket, spoiled(tensors))  # type: ignore[method-assign]

    def meta_tensors(self) -> int:
        """How many tensors of the model have no memory."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return sum(t.is_meta for t in [*model.parameters(), *model.buffers()])

    def addresses(self) -> int:
        """A number that changes when a parameter moves."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return hash(tuple(t.data_ptr() for t in model.parameters()))
