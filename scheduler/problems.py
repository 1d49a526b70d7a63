"""Collects everything that is wrong with a set of manifests, so that one `PlanError` tells all of it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .errors import PlanError

_SPELLED_OUT = 32


class Problems:
    """Problems found while planning, in the order found, each once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: str) -> None:
        """One problem: what, where, value against limit, and the remedy."""
        self._lines[line] = None

    def check(self) -> None:
        """Raise `PlanError` with all problems, if there are any."""
        if self._lines:
            raise PlanError(list(self._lines))


def listed(names: Iterable[str]) -> str:
    """All names, in few words: ``layers.{0-60}.experts.{0-383}.up`` where many differ in their numbers only."""
    rows = list(dict.fromkeys(names))
    if len(rows) <= _SPELLED_OUT:
        return ", ".join(rows)
    families: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for name in rows:
        tokens = re.split(r"(\d+)", name)
        families[tuple(tokens[::2])].append(tuple(tokens[1::2]))
    return f"{len(rows)} names: " + ", ".join(_family(words, numbers) for words, numbers in families.items())


def _family(words: tuple[str, ...], numbers: list[tuple[str, ...]]) -> str:
    slots = [set(column) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, slots)) == len(numbers):  # every combination occurs
        return _spell(words, [_span(sorted(slot, key=lambda n: (int(n), n))) for slot in slots])
    shown = ", ".join(_spell(words, row) for row in numbers[:_SPELLED_OUT])
    rest = len(numbers) - _SPELLED_OUT
    return f"{shown} and {rest} more of {_spell(words, ['*'] * len(slots))}" if rest > 0 else shown


def _spell(words: Sequence[str], numbers: Sequence[str]) -> str:
    return "".join(word + number for word, number in zip(words, (*numbers, ""), strict=True))


def _span(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    runs: list[list[str]] = []
    for value in values:
        if runs and int(value) == int(runs[-1][-1]) + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return "{" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else run[0] for run in runs) + "}"
