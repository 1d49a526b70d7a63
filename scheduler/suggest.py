"""Did you mean: pairs names that only the source has with names that only a target wants, and finds fused parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .boxes import Index

_SAMPLE = 200
_ROUNDS = 16
_TALLIED = 500_000
_FUSED: Mapping[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules of engines that join several of the checkpoint's, and what they join."""
_STACKED = frozenset({"w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv", "gate_up_proj", "down_proj"})
"""Parameters of engines that join all experts: ``experts.w2_weight`` for ``experts.0.down_proj.weight`` and so on."""


class Rename(NamedTuple):
    """A change of spelling, and the pairs (source name, target name) that differ in it alone. Empty texts are possible."""

    source_text: str
    target_text: str
    pairs: tuple[tuple[str, str], ...]

    @property
    def advice(self) -> str:
        """What to do, as the end of a sentence."""
        if not self.target_text:
            return f"leave out {self.source_text!r}"
        if not self.source_text:
            return f"put in {self.target_text!r}"
        return f"rename {self.source_text!r} to {self.target_text!r}"


def renames(source: Mapping[str, Index], target: Mapping[str, Index]) -> list[Rename]:
    """The fewest spellings that explain leftovers on both sides.

    Args:
        source: names that no target wants, with shapes.
        target: names that the source has not, with shapes. A pair has equal shapes.
    """
    found: list[Rename] = []
    source, target = dict(source), dict(target)
    while source and target and len(found) < _ROUNDS:
        best = _commonest(source, target)
        if best is None:
            break
        pairs = _pairs(best, source, target)
        if not pairs:
            break
        found.append(Rename(*best, tuple(pairs)))
        for a, b in pairs:
            del source[a], target[b]
    return found


def fused(source: Mapping[str, Index], target: Iterable[str]) -> dict[str, list[str]]:
    """Names of a target that join several of the source's, each with those.

    Args:
        source: names that no target wants.
        target: names that the source has not.
    """
    experts: dict[str, list[str]] = defaultdict(list)
    for name in source:
        head, found, tail = name.partition(".experts.")
        if found and tail.split(".")[0].isdigit():
            experts[f"{head}.experts"].append(name)
    joined = {name: _parts(name, source, experts) for name in target}
    return {name: parts for name, parts in joined.items() if parts}


def _parts(name: str, source: Mapping[str, Index], experts: Mapping[str, list[str]]) -> list[str]:
    words = name.split(".")
    if words[-1] in _STACKED and ".".join(words[:-1]) in experts:
        down = words[-1].startswith(("w2", "down"))
        return [part for part in experts[".".join(words[:-1])] if (".down_proj" in part or ".w2" in part) == down]
    changed = [(i, part) for i, word in enumerate(words) for part in _FUSED.get(word, ())]
    return [other for i, part in changed if (other := ".".join([*words[:i], part, *words[i + 1 :]])) in source]


def _commonest(source: Mapping[str, Index], target: Mapping[str, Index]) -> tuple[str, str] | None:
    """The change of spelling that explains most of a sample of the target's names."""
    heads, tails = _by_words(source)
    votes: Counter[tuple[str, str]] = Counter()
    budget = _TALLIED
    for name in list(target)[:: max(1, len(target) // _SAMPLE)]:
        words = name.split(".")
        alike = {
            *next((heads[key] for n in range(len(words), 0, -1) if (key := tuple(words[:n])) in heads), ()),
            *next((tails[key] for n in range(len(words), 0, -1) if (key := tuple(words[-n:])) in tails), ()),
        }
        budget -= len(alike)
        if budget < 0 and votes:
            break
        changes = (_difference(other, name) for other in sorted(alike) if source[other] == target[name])
        votes.update(change for change in changes if change is not None)
    if not votes:
        return None
    return max(votes, key=lambda change: (votes[change], -len(change[0]) - len(change[1]), change))


def _by_words(names: Iterable[str]) -> tuple[dict[tuple[str, ...], list[str]], dict[tuple[str, ...], list[str]]]:
    """Names by each of their beginnings and endings of whole words."""
    heads: dict[tuple[str, ...], list[str]] = defaultdict(list)
    tails: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        words = tuple(name.split("."))
        for n in range(1, len(words) + 1):
            heads[words[:n]].append(name)
            tails[words[-n:]].append(name)
    return dict(heads), dict(tails)


def _difference(a: str, b: str) -> tuple[str, str] | None:
    """What is left of two names without their common first and last words; None if they have no word in common."""
    first, second = a.split("."), b.split(".")
    shortest = min(len(first), len(second))
    head = next((i for i in range(shortest) if first[i] != second[i]), shortest)
    limit = shortest - head
    tail = next((i for i in range(limit) if first[-1 - i] != second[-1 - i]), limit)
    if head + tail == 0:
        return None
    middle = ".".join(first[head : len(first) - tail]), ".".join(second[head : len(second) - tail])
    return None if any(part.isdigit() for word in middle for part in word.split(".")) else middle


def _pairs(change: tuple[str, str], source: Mapping[str, Index], target: Mapping[str, Index]) -> list[tuple[str, str]]:
    """Source names that become target names of the same shape under ``change``, each used once."""
    pairs, taken = [], set()
    for name, shape in source.items():
        for renamed in _substitutions(name, *change):
            if renamed not in taken and target.get(renamed) == shape and _difference(name, renamed) == change:
                pairs.append((name, renamed))
                taken.add(renamed)
                break
    return pairs


def _substitutions(name: str, old: str, new: str) -> list[str]:
    words, gone, come = name.split("."), old.split(".") if old else [], new.split(".") if new else []
    places = (i for i in range(len(words) + 1 - len(gone)) if words[i : i + len(gone)] == gone)
    return [".".join(words[:i] + come + words[i + len(gone) :]) for i in places]
