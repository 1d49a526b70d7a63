"""Is an answer what its versions give? Recomputes it, version by version, on the keys and values that it had.

This is the proof behind ``in_flight="keep"``: a request that went on over an update has the keys and values of the older
version for what was read before, and those of the newer one after. Version spans say which pass ran under which version, so
another process that has the weights of every version can compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import nn

from .requests import Span
from .runner import ModelRunner


class TokenCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One token against what its version gives.

    ``gap``: by how much the likeliest token's logit exceeds this one's; 0 if it is the likeliest.
    """

    index: int
    version: int
    token: int
    expected: int
    gap: float


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """``ok``: every token is what its version gives, within the tolerance. ``problem`` says what is not, in words."""

    ok: bool
    checks: list[TokenCheck]
    worst_gap: float
    problem: str = ""


class Replayer:
    """Checks greedy answers.

    Args:
        model: of the same architecture as the server's; lends its code and whatever buffers are not in a state dict. Not
            changed, and not to be used elsewhere during a `check`.
        weights_of: version -> state dict of ``model`` (one name of each tied tensor is enough).
        tolerance: largest gap between the likeliest token's logit and the answer's. Batches round otherwise than single
            passes: 1e-3 suits float32, 0.25 bfloat16.
        max_length: longest answer, prompt included.
    """

    def __init__(
        self,
        model: nn.Module,
        weights_of: Callable[[int], Mapping[str, torch.Tensor]],
        *,
        tolerance: float = 1e-3,
        max_length: int = 4096,
    ) -> None:
        self._runner = ModelRunner(model, max_rows=1, max_length=max_length, probe=False)
        self._weights_of, self._tolerance = weights_of, tolerance
        self._bound: int | None = None

    def check(self, prompt_ids: Sequence[int], token_ids: Sequence[int], versions: Sequence[Span]) -> ReplayReport:
        """Recompute an answer. Raises what ``weights_of`` raises, and `ValueError` for weights that lack a name."""
        problem = _span_problem(versions, len(token_ids))
        if problem:
            return ReplayReport(ok=False, checks=[], worst_gap=float("inf"), problem=problem)
        checks: list[TokenCheck] = []
        row = self._runner.cache.open_row()
        try:
            for span in versions:
                self._bind(span.version)
                read = [*(prompt_ids if span.start == 0 else ()), *token_ids[max(0, span.start - 1) : span.end - 1]]
                logits = self._runner.extend(row, read)[-(span.end - span.start) :]
                checks += _compare(logits, token_ids[span.start : span.end], span)
        finally:
            self._runner.clear()
        return _report(checks, self._tolerance)

    def _bind(self, version: int) -> None:
        if version != self._bound:
            self._runner.weights = _named_weights(self._runner.model, self._weights_of(version), version)
            self._bound = version


def _named_weights(model: nn.Module, given: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """One tensor for every parameter and persistent buffer; tied ones under their first name only."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    chosen = {same[0]: next((given[name] for name in same if name in given), None) for same in names.values()}
    missing = [name for name, tensor in chosen.items() if tensor is None]
    if missing:
        raise ValueError(f"the weights of version {version} lack {len(missing)} name(s): {', '.join(missing[:10])}")
    return {name: tensor for name, tensor in chosen.items() if tensor is not None}


def _compare(logits: torch.Tensor, token_ids: Sequence[int], span: Span) -> list[TokenCheck]:
    best, expected = logits.max(-1)
    gaps = best - logits.gather(-1, torch.tensor(list(token_ids), device=logits.device)[:, None])[:, 0]
    return [
        TokenCheck(index=span.start + offset, version=span.version, token=token, expected=likeliest, gap=gap)
        for offset, (token, likeliest, gap) in enumerate(zip(token_ids, expected.tolist(), gaps.tolist(), strict=True))
    ]


def _report(checks: list[TokenCheck], tolerance: float) -> ReplayReport:
    wrong = [check for check in checks if not check.gap <= tolerance]  # also true of NaN
    problem = ""
    if wrong:
        first = wrong[0]
        problem = (
            f"{len(wrong)} of {len(checks)} tokens are not what their version gives; the first is token {first.index}: "
            f"{first.token} where version {first.version} gives {first.expected} (gap {first.gap:.3g}, tolerance {tolerance})"
        )
    worst = max((check.gap for check in checks), default=0.0)
    return ReplayReport(ok=not wrong, checks=checks, worst_gap=worst, problem=problem)


def _span_problem(versions: Sequence[Span], tokens: int) -> str:
    edges = [0, *(span.end for span in versions)]
    tiles = all(span.start == edge and span.end > edge for span, edge in zip(versions, edges, strict=False))
    if tiles and edges[-1] == tokens:
        return ""
    shown = ", ".join(f"{span.version}: [{span.start}, {span.end})" for span in versions)
    return f"the version spans do not cover {tokens} tokens once each: {shown or 'none'}"
