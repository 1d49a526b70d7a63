"""Forward passes of a transformers causal LM over a changing set of requests. Plain, synchronous, one thread.

`ModelRunner` knows nothing of versions, queues or sampling: it maps token ids to logits. A prompt is read by one pass of
its own; after that all requests advance together, one token a pass. It keeps no reference to any parameter, so weights
may be overwritten in place, or `param.data` pointed elsewhere, between two passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from .kvcache import RowCache
from .requests import UnsupportedModel

Masks = torch.Tensor | dict[str, torch.Tensor]

_PROBE_TOKENS = 7
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_PROBE_TOLERANCE_LOW = 0.2
"""For bfloat16 and float16, where a router may choose another expert for a token by rounding alone."""


class ModelRunner:
    """Prefill, decode and plain logits.

    Args:
        model: causal LM with `forward(input_ids, attention_mask, position_ids, <cache>, use_cache)`. Put into eval mode.
        max_rows: most requests at once.
        max_length: most tokens of a request, prompt included.
        probe: compare cached passes with a plain one first, so that a model whose attention works otherwise is refused.

    Raises:
        UnsupportedModel: the model keeps other state than keys and values, or its cached passes differ from plain ones.
    """

    def __init__(self, model: nn.Module, *, max_rows: int, max_length: int, probe: bool = True) -> None:
        self.model = cast(Any, model.eval())
        config = self.model.config.get_text_config(decoder=True)
        self.vocab = int(config.vocab_size)
        self.max_rows, self.max_length = max_rows, max_length
        self._kinds = _layer_kinds(config)
        self._window = int(config.sliding_window) if "sliding_attention" in self._kinds else 0
        self._additive = _takes_additive_masks(config)
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._can_keep_last = "logits_to_keep" in parameters
        self.cache = RowCache(layers=int(config.num_hidden_layers), max_rows=max_rows, max_length=max_length)
        self.weights: dict[str, torch.Tensor] | None = None
        """Use these, by name, instead of the model's own (which must then not be in use elsewhere). None: its own."""
        if probe:
            self._probe()

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Read a prompt into a new row, the last one. Returns the logits of the next token: float32, (1, vocab)."""
        return self._read(self.cache.open_row(), ids, keep=1)

    @torch.no_grad()
    def extend(self, row: int, ids: Sequence[int]) -> torch.Tensor:
        """Read more tokens into a row. Returns the logits after each of them: float32, (tokens, vocab)."""
        return self._read(row, ids, keep=len(ids))

    @torch.no_grad()
    def decode(self, ids: Sequence[int]) -> torch.Tensor:
        """One token more for every row, in the order of the rows. Returns the next logits: float32, (rows, vocab)."""
        positions = self.cache.extend_rows(self.device)[:, None]
        logits = self._forward(torch.tensor(list(ids), device=self.device)[:, None], positions, max(self.cache.lengths), 1)
        return logits[:, -1].float()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after every token, by one plain pass without any cache: float32, (tokens, vocab)."""
        logits = self._call(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False)
        return logits[0].float()

    @torch.no_grad()
    def close_row(self, row: int) -> None:
        """Forget row ``row``; the last row, if it is another one, takes its number."""
        self.cache.close_row(row)

    def clear(self) -> None:
        """Forget every row."""
        self.cache.clear()

    def _read(self, row: int, ids: Sequence[int], keep: int) -> torch.Tensor:
        where = self.cache.extend_row(row, len(ids))
        positions = torch.arange(where.start, where.stop, device=self.device)[None]
        logits = self._forward(torch.tensor([list(ids)], device=self.device), positions, where.stop, keep)
        return logits[0, -keep:].float()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, length: int, keep: int) -> torch.Tensor:
        arguments: dict[str, Any] = {self._cache_name: self.cache}
        if self._can_keep_last:
            arguments["logits_to_keep"] = keep
        masks = self._masks(positions, length)
        return self._call(input_ids=ids, attention_mask=masks, position_ids=positions, use_cache=True, **arguments)

    def _call(self, **arguments: Any) -> torch.Tensor:
        if self.weights is None:
            output = self.model(**arguments)
        else:
            output = functional_call(self.model, self.weights, kwargs=arguments)
        logits: torch.Tensor = output.logits
        return logits

    def _masks(self, positions: torch.Tensor, length: int) -> Masks:
        """Who may look at whom: (rows, 1, new tokens, length). By kind of layer if the model has several."""
        back = positions[:, None, :, None] - torch.arange(length, device=positions.device)
        masks = {}
        for kind in self._kinds:
            mask = back >= 0
            if kind == "sliding_attention":
                mask = mask & (back < self._window)
            masks[kind] = self._as_model_wants(mask)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_model_wants(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._additive:
            return mask
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)

    @torch.no_grad()
    def _probe(self) -> None:
        """A long and a short request together, against plain passes over each."""
        tokens = min(_PROBE_TOKENS, self.max_length - 1)
        ids = [(7 * index + 3) % self.vocab for index in range(tokens + 1)]
        short = ids[: max(1, tokens // 2)]
        pair = self.max_rows > 1
        got = [self.prefill(ids[:-1])[0], *([self.prefill(short)[0]] if pair else [])]
        steps = self.decode([ids[-1], 1 % self.vocab] if pair else [ids[-1]])
        self.clear()
        plain = self.logits(ids)
        want = [plain[-2], *([self.logits(short)[-1]] if pair else []), plain[-1]]
        got.append(steps[0])
        if pair:
            got.append(steps[1])
            want.append(self.logits([*short, 1 % self.vocab])[-1])
        tolerance = _PROBE_TOLERANCE.get(self.model.dtype, _PROBE_TOLERANCE_LOW)
        for index, (left, right) in enumerate(zip(got, want, strict=True)):
            error = float((left - right).norm() / right.norm())
            if error > tolerance:  # not a number if the weights are not: then nothing can be said
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: pass {index} of a batch with cached keys and values differs from a plain "
                    f"pass by {error:.3g} of its norm (tolerance {tolerance}); this model's attention does not take the masks "
                    "and positions it is given, so answers would be wrong"
                )


def _layer_kinds(config: Any) -> list[str]:
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if not kinds:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    strange = [kind for kind in kinds if kind not in {"full_attention", "sliding_attention"}]
    if strange:
        raise UnsupportedModel(
            f"the model has layers of kind {', '.join(strange)}; only full_attention and sliding_attention layers, which "
            "keep nothing but keys and values, can be served"
        )
    return kinds


def _takes_additive_masks(config: Any) -> bool:
    kind = getattr(config, "_attn_implementation", None) or "eager"
    if kind not in {"eager", "sdpa"}:
        raise UnsupportedModel(f"attention {kind!r} takes no explicit masks; load the model with 'sdpa' or 'eager'")
    return bool(kind == "eager")
