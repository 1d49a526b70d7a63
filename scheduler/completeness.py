"""Whether the ranks of a target together take whole tensors.

A rank can't see that a part goes to nobody: two ranks that both describe shard 0 of 2 are each sound. So every tensor of
which a target wants some elements must be wanted whole by its ranks together, unless a side declares it optional.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .columns import Ints, pad_axes
from .naming import Canonical
from .patterns import Interner
from .problems import Problems, listed
from .regions import partition, subtract, volumes
from .rows import Held, Rows
from .sides import Holder, Sides


def check_taken_whole(sides: Sides, canonical: Canonical, wanted: Rows, problems: Problems) -> None:
    """Report tensors of which a target takes a part and lets the rest go to no rank. Each pattern is looked at once."""
    targets = _targets(sides)
    excused = _excused(sides, canonical, targets)
    shapes = pad_axes(canonical.shape, wanted.depth, 1)
    pattern = Interner[tuple[bytes, bytes]]()
    found: list[list[tuple[int, str, str]]] = []
    partial: dict[tuple[int, str, str], list[str]] = {}
    for t in np.unique(wanted.tensor).tolist():
        p = pattern((shapes[t].tobytes(), wanted.key(t)))
        if p == len(found):
            found.append(_partial(wanted.of(t), shapes[t], targets, int(canonical.ndim[t])))
        for short in found[p]:
            if (short[0], t) not in excused:
                partial.setdefault(short, []).append(canonical.names[t])
    for (target, taken, rest), names in partial.items():
        problems.add(
            f"target {target} takes only {taken} of {listed(names)}, {rest} to no rank; do two of its ranks describe the same "
            "shard, or is one missing? Give every rank its own place in the layout, and all ranks to one target; if the part "
            "is meant, declare the name optional on the target"
        )


def _targets(sides: Sides) -> list[tuple[int, ...]]:
    """The targets that have each distinct layout."""
    return [tuple(sorted({sides.receivers[rank].target for rank in holder.ranks})) for holder in sides.receiving]


def _excused(sides: Sides, canonical: Canonical, targets: Sequence[tuple[int, ...]]) -> set[tuple[int, int]]:
    """(target, tensor) of which a part is enough: declared optional by some rank of the target, or of the source."""
    pairs: set[tuple[int, int]] = set()
    everyone = range(len(sides.targets))
    for holder, index in zip(sides.sources, canonical.source_index, strict=True):
        pairs.update((target, t) for t in _optional(holder, index) for target in everyone)
    for holder, index, members in zip(sides.receiving, canonical.target_index, targets, strict=True):
        pairs.update((target, t) for t in _optional(holder, index) for target in members)
    return pairs


def _optional(holder: Holder, index: Ints) -> list[int]:
    """Canonical tensors that a layout declares optional."""
    optional = holder.layout.optional
    if not optional:
        return []
    return [i for name, i in zip(holder.layout.tensors.names, index.tolist(), strict=True) if i >= 0 and name in optional]


def _partial(wanted: Held, shape: Ints, targets: Sequence[tuple[int, ...]], ndim: int) -> list[tuple[int, str, str]]:
    """For each target that takes only a part: the target, what it takes, and a box of the rest, in words."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row, layout in enumerate(wanted.layout.tolist()):
        for target in targets[layout]:
            rows[target].append(row)
    whole = (wanted.hi - wanted.lo == shape).all(axis=1)
    known: dict[tuple[int, ...], tuple[str, str] | None] = {}
    found = []
    for target, mine in rows.items():
        key = tuple(mine)  # replicas of a target want the same rows
        if key not in known:
            known[key] = None if whole[mine].any() else _rest(wanted.lo[mine], wanted.hi[mine], shape, ndim)
        words = known[key]
        if words is not None:
            found.append((target, *words))
    return found


def _rest(lo: Ints, hi: Ints, shape: Ints, ndim: int) -> tuple[str, str] | None:
    cells = partition(lo, hi)
    taken, total = int(volumes(cells.lo, cells.hi).sum()), int(np.prod(shape, dtype=np.int64))
    hole = subtract(np.zeros_like(shape[None]), shape[None], cells.lo, cells.hi) if taken < total else None
    if hole is None:
        return None
    one = len(cells.lo) == 1
    what = _words(cells.lo[0], cells.hi[0], ndim) if one else f"{taken} of {total} elements"
    missing = _words(*hole, ndim)
    verb = "goes" if taken + int(np.prod(hole[1] - hole[0], dtype=np.int64)) == total else "and more go"
    return what, f"of shape {shape[:ndim].tolist()}: {missing} {verb}"


def _words(lo: Ints, hi: Ints, ndim: int) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(lo[:ndim].tolist(), hi[:ndim].tolist(), strict=True))}]"
