"""How the next token is chosen from logits: greedily, or by one uniform number for each token.

Sampling inverts the cumulative distribution over tokens in order of their probability, at a number drawn from the
request's own generator: the i-th token always uses the i-th number, so an answer depends on nothing but its prompt, its
seed and the weights, never on what else is in the batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from .requests import GenerateRequest


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self._temperature, self._top_p, self._logprobs = request.temperature, request.top_p, request.logprobs
        self.seed: int | None = None
        self._generator: torch.Generator | None = None
        if request.temperature > 0:
            self.seed = secrets.randbits(62) if request.seed is None else request.seed
            self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def greedy(self) -> bool:
        """Takes the likeliest token and wants no log probabilities."""
        return self._generator is None and not self._logprobs

    def choose(self, logits: torch.Tensor) -> tuple[int, float | None]:
        """The next token and its log probability, if that was asked for. ``logits``: float32, (vocab,)."""
        token = int(logits.argmax()) if self._generator is None else self._draw(logits)
        logprob = float(logits.log_softmax(-1)[token]) if self._logprobs else None
        return token, logprob

    def _draw(self, logits: torch.Tensor) -> int:
        point = torch.rand((), generator=self._generator, dtype=torch.float64)
        scaled = logits.cpu().double()
        scaled = (scaled - scaled.max()) / self._temperature
        ordered, order = scaled.softmax(-1).sort(descending=True, stable=True)
        reach = ordered.cumsum(-1)
        kept = max(1, int((reach - ordered < self._top_p).sum()))
        chosen = torch.searchsorted(reach[:kept], point * reach[kept - 1], right=True)
        return int(order[min(int(chosen), kept - 1)])


def choose_all(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[tuple[int, float | None]]:
    """The next token of every request of a batch. ``logits``: float32, (requests, vocab)."""
    if all(sampler.greedy for sampler in samplers):
        return [(token, None) for token in logits.argmax(-1).tolist()]
    return [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]
