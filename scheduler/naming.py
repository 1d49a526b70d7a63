"""Which names of either side are one canonical tensor, and which have no partner.

Names match exactly, or through aliases (tied weights). Aliases that the source declares hold for every target; those of a
target hold for that target. Several names may come to one source tensor: it travels once and lands wherever it is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .boxes import Index
from .columns import Ints, TensorTable, ints, pad_axes
from .formats import CODES, Fp8Format
from .problems import Problems, listed
from .quantizing import Companion, find_quantized
from .regions import Mask
from .sides import Holder, Sides
from .suggest import fused, renames

Scope = frozenset[str] | None

_SCALES = ("_scale_inv", "_scale", "_scale_2", "_scale_from_checkpoint")
"""Endings by which checkpoints name the scales of a quantized tensor."""
_PACKED = ("_packed", "qweight")
"""Endings by which checkpoints name packed quantized weights."""
_LAYOUT = "say how the target is laid out: ModuleLoader(module, layout=tp_layout(...)), or a learned layout"


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """The source's tensors in the source's order, and what each side calls them.

    Attributes:
        shape: (tensors, depth), padded with 1; ``ndim`` has the number of axes.
        source_index: for each distinct source layout, the canonical tensor of each of its tensors, or -1 (out of scope, or
            not wanted by any target).
        target_index: the same for target layouts, or -1 (nothing is sent for it).
        skipped: for each distinct target layout, its names that are out of scope.
        formats: of the tensors that travel quantized.
        scales: canonical tensor of each one's scales.
    """

    names: tuple[str, ...]
    shape: Ints
    ndim: Ints
    group: Ints
    source_index: tuple[Ints, ...]
    target_index: tuple[Ints, ...]
    skipped: tuple[tuple[str, ...], ...]
    formats: Mapping[int, Fp8Format] = field(default_factory=dict)
    scales: Mapping[int, int] = field(default_factory=dict)


def resolve(sides: Sides, scope: Scope, problems: Problems, *, wire_format: str = "auto") -> Canonical:
    """Match names.

    Reports names without a partner (with renames that would pair them), shapes and groups that differ, ties that the
    source does not have, quantized tensors without their scales, and a plan that shares no name.
    """
    _check_scope(sides, scope, problems)
    roots = _roots(sides, problems)
    table = _SourceTensors(sides, roots, scope, problems)
    quantized = find_quantized(sides.receiving, table.find, table.held(sides), wire_format=wire_format, problems=problems)
    scales = table.derive(quantized, problems)
    lost: dict[str, tuple[Index, str]] = {}
    found = [_match(holder, table, scope, lost, problems) for holder in sides.receiving]
    wanted, asked_for = np.zeros(len(table.names), bool), np.zeros(len(table.names), bool)
    for index, _, named in found:
        wanted[index[index >= 0]] = True
        asked_for[named[named >= 0]] = True
    extra = _unwanted(sides, table, asked_for)
    _report_leftovers(table, lost, extra, shared=bool(asked_for.any()), problems=problems)
    target_index = [index for index, _, _ in found]
    _check_companions(sides, table, target_index, problems)
    return Canonical(
        names=tuple(table.names),
        shape=table.shape,
        ndim=table.ndim,
        group=table.group,
        source_index=tuple(np.where((i >= 0) & wanted[i], i, -1) if len(i) else i for i in table.index),
        target_index=tuple(target_index),
        skipped=tuple(skipped for _, skipped, _ in found),
        formats={weight: companion.format for weight, companion in quantized.items()},
        scales=scales,
    )


def _roots(sides: Sides, problems: Problems) -> Callable[[str], str]:
    """Maps a source name to the name that it stands for."""
    links: dict[str, str] = {}
    for alias, name in sorted(sides.sources[0].aliases) if sides.sources else ():
        if links.setdefault(alias, name) != name:
            problems.add(f"the source declares {alias} an alias of both {links[alias]} and {name}; one name has one content")
    final: dict[str, str] = {}
    for alias, direct in links.items():
        seen, name = [alias], direct
        while name in links and name not in seen:
            seen.append(name)
            name = links[name]
        if name in seen:
            problems.add(f"the source's aliases go in a circle: {' -> '.join([*seen, name])}")
            name = min(seen)
        final[alias] = name
    return lambda name: final.get(name, name)


class _SourceTensors:
    """Canonical tensors as the source's layouts list them, in order of first appearance."""

    def __init__(self, sides: Sides, roots: Callable[[str], str], scope: Scope, problems: Problems) -> None:
        self.roots = roots
        self.holders = sides.sources
        self.place: dict[str, int] = {}
        self.disputed: set[int] = set()
        """Tensors that a tie of some target would lose: reported as that, not as wanted by nobody."""
        tables = [holder.layout.tensors for holder in sides.sources]
        linked = bool(sides.sources) and bool(sides.sources[0].aliases)
        allowed = None if scope is None else _closure(scope, (*sides.sources, *sides.receiving))
        seen: dict[tuple[str, ...], Ints] = {}
        for table in tables:
            if table.names not in seen:
                names = [roots(name) for name in table.names] if linked else table.names
                kept = [name if allowed is None or name in allowed else None for name in names]
                seen[table.names] = ints([-1 if n is None else self.place.setdefault(n, len(self.place)) for n in kept])
        self.index = [seen[table.names] for table in tables]
        self.names = list(self.place)
        self._columns(sides, tables, problems)

    def _columns(self, sides: Sides, tables: list[TensorTable], problems: Problems) -> None:
        count, depth = len(self.names), max((t.shape.shape[1] for t in tables), default=0)
        self.shape, self.ndim = np.ones((count, depth), np.int64), np.full(count, -1)
        self.group = np.zeros(count, np.int64)
        first: dict[int, str] = {}
        for table, index, holder in zip(tables, self.index, sides.sources, strict=True):
            rows = np.flatnonzero(index >= 0)
            at, shape = index[rows], pad_axes(table.shape, depth, 1)[rows]
            new = self.ndim[at] < 0
            for column, values in ((self.shape, shape), (self.ndim, table.ndim[rows]), (self.group, table.group[rows])):
                column[at[new]] = values[new]
            if new.any():
                first |= dict.fromkeys(at[new].tolist(), holder.where)
            odd = (self.shape[at] != shape).any(axis=1) | (self.ndim[at] != table.ndim[rows])
            for i in np.flatnonzero(odd):
                a, b = tuple(self.shape[at[i], : self.ndim[at[i]]].tolist()), table[int(rows[i])].shape
                where = f"{first[int(at[i])]} says {a}, {holder.where} {b}"
                problems.add(f"{self.names[at[i]]}: source ranks disagree about its shape: {where}")
            for i in np.flatnonzero(self.group[at] != table.group[rows]):
                where = f"{first[int(at[i])]} says {self.group[at[i]]}, {holder.where} {table.group[rows[i]]}"
                problems.add(f"{self.names[at[i]]}: source ranks disagree about its mesh group: {where}")

    def shape_of(self, i: int) -> Index:
        return tuple(self.shape[i, : self.ndim[i]].tolist())

    def find(self, name: str) -> int:
        """Canonical tensor by a name that either side has for it, or -1."""
        return self.place.get(self.roots(name), -1)

    def held(self, sides: Sides) -> dict[int, tuple[Index, str]]:
        """Shape and element type of each tensor; empty where no target holds anything quantized."""
        if not any(CODES in holder.layout.tensors.dtypes for holder in sides.receiving):
            return {}
        kinds: dict[int, str] = {}
        for holder, index in zip(sides.sources, self.index, strict=True):
            tensors = holder.layout.tensors
            kinds |= {
                at: tensors.dtypes[code] for at, code in zip(index.tolist(), tensors.dtype.tolist(), strict=True) if at >= 0
            }
        return {at: (self.shape_of(at), kind) for at, kind in kinds.items()}

    def derive(self, quantized: Mapping[int, Companion], problems: Problems) -> dict[int, int]:
        """New tensors, which the source makes of weights: the scales of each weight of ``quantized``."""
        found: dict[int, int] = {}
        for weight, companion in quantized.items():
            taken = [name for name in companion.names if name in self.place]
            if taken:
                problems.add(f"{taken[0]} is a tensor of the source's own, and would hold the scales of {self.names[weight]}")
            at = found[weight] = len(self.names)
            self.names.append(companion.names[0])
            self.place.update(dict.fromkeys(companion.names, at))
        count, depth = len(quantized), self.shape.shape[1]
        shapes = [companion.shape for companion in quantized.values()]
        padded = [(*shape, *(1,) * depth)[:depth] for shape in shapes]
        self.shape = np.vstack([self.shape, np.array(padded, np.int64).reshape(count, depth)])
        self.ndim = np.append(self.ndim, ints([len(shape) for shape in shapes]))
        self.group = np.append(self.group, self.group[ints(list(quantized))])
        self.disputed.update(found.values())
        return found


def _match(
    holder: Holder, table: _SourceTensors, scope: Scope, lost: dict[str, tuple[Index, str]], problems: Problems
) -> tuple[Ints, tuple[str, ...], Ints]:
    """Canonical tensor of each tensor of a target layout, or -1; the names that the scope leaves out; and the same by name
    alone, whatever the shapes.
    """
    tensors = holder.layout.tensors
    names = tensors.names
    index = [table.place.get(table.roots(name), -1) for name in names]
    skipped: list[str] = []
    allowed = None if scope is None else _closure(scope, [*table.holders[:1], holder])
    ties = _ties(holder, table, problems)
    for i, name in enumerate(names):
        if allowed is not None and name not in allowed:
            index[i] = -1
            skipped.append(name)
            continue
        index[i] = ties.get(name, index[i])
        if index[i] < 0 and name not in holder.layout.optional:
            lost.setdefault(name, (tensors[i].shape, holder.side))
    named = ints(index)
    return _same_shapes(holder, table, named.copy(), problems), tuple(skipped), named


def _same_shapes(holder: Holder, table: _SourceTensors, index: Ints, problems: Problems) -> Ints:
    tensors = holder.layout.tensors
    depth = max(table.shape.shape[1], tensors.shape.shape[1])
    mine, theirs = pad_axes(tensors.shape, depth, 1), pad_axes(table.shape, depth, 1)
    rows = np.flatnonzero(index >= 0)
    odd = rows[(mine[rows] != theirs[index[rows]]).any(axis=1) | (tensors.ndim[rows] != table.ndim[index[rows]])]
    for row in odd.tolist():
        tensor, at = tensors[row], int(index[row])
        known = table.names[at]
        called = "" if known == tensor.name else f" (there called {known})"
        shapes = f"the source has shape {table.shape_of(at)}{called}, {holder.where} expects {tensor.shape}"
        cure = _sharded(table.shape_of(at), tensor.shape) or "give both sides the checkpoint's shape"
        problems.add(f"{tensor.name}: {shapes}; {cure}")
    index[odd] = -1
    return index


def _sharded(whole: Index, part: Index) -> str | None:
    """What to do where ``part`` looks like a shard: ``whole`` cut into equal parts along one axis."""
    cut = [(a, b) for a, b in zip(whole, part, strict=False) if a != b]
    if len(whole) != len(part) or len(cut) != 1 or not 0 < cut[0][1] < cut[0][0] or cut[0][0] % cut[0][1]:
        return None
    return f"if that is one of {cut[0][0] // cut[0][1]} shards, {_LAYOUT}; else give both sides the checkpoint's shape"


def _ties(holder: Holder, table: _SourceTensors, problems: Problems) -> dict[str, int]:
    """Names of this layout that a target's own aliases bring to a source tensor."""
    if not holder.layout.aliases and not holder.aliases:
        return {}
    found: dict[str, int] = {}
    for family in families(holder.aliases):
        held = sorted({table.place[root] for root in map(table.roots, family) if root in table.place})
        if len(held) > 1:
            table.disputed.update(held)
            separate = " and ".join(table.names[i] for i in held)
            problems.add(
                f"{holder.side} ties {', '.join(sorted(family))}, but the source holds {separate} as separate tensors: one "
                "of them would be lost; declare the alias on the source too if they are equal, or untie the target"
            )
        elif held:
            found.update(dict.fromkeys(family, held[0]))
    return found


def families(aliases: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Names that aliases connect."""
    family: dict[str, set[str]] = {}
    for pair in sorted(aliases):
        merged = set().union(*(family.get(name, {name}) for name in pair))
        family.update(dict.fromkeys(merged, merged))
    return list({id(names): names for names in family.values()}.values())


def _closure(scope: frozenset[str], holders: Iterable[Holder]) -> frozenset[str]:
    """Names in scope, and what they are aliases of and have as aliases."""
    aliases = frozenset(pair for holder in holders for pair in holder.aliases)
    return scope.union(*(names for names in families(aliases) if names & scope))


def _check_scope(sides: Sides, scope: Scope, problems: Problems) -> None:
    if scope is None:
        return
    known = {name for h in (*sides.sources, *sides.receiving) for name in (*h.layout.tensors.names, *sum(h.aliases, ()))}
    unknown = sorted(scope - known)
    if unknown:
        problems.add(f"the scope names tensors that neither side has: {listed(unknown)}")


def _unwanted(sides: Sides, table: _SourceTensors, wanted: Mask) -> dict[str, Index]:
    """Source tensors that no target takes and that are not declared optional."""
    optional = frozenset().union(*(holder.layout.optional for holder in sides.sources))
    excused = {table.roots(name) for name in optional}
    unwanted = (i for i in np.flatnonzero(~wanted).tolist() if i not in table.disputed)
    return {table.names[i]: table.shape_of(i) for i in unwanted if table.names[i] not in excused}


def _report_leftovers(
    table: _SourceTensors,
    lost: Mapping[str, tuple[Index, str]],
    extra: Mapping[str, Index],
    *,
    shared: bool,
    problems: Problems,
) -> None:
    if not shared:
        problems.add("the plan is empty: source and targets share no tensor name")
    lacking, spare = dict(lost), dict(extra)
    _report_fused(lacking, spare, problems)
    for rename in renames(spare, {name: shape for name, (shape, _) in lacking.items()}):
        here, there = [a for a, _ in rename.pairs], [b for _, b in rename.pairs]
        problems.add(
            f"the source has {listed(here)}, which no target wants, and the target expects {listed(there)}, which the source "
            f"has not: did you mean to {rename.advice} in the source's name table ({here[0]} -> {there[0]})?"
        )
        for a, b in rename.pairs:
            del spare[a], lacking[b]
    for name in [name for name in lacking if name.endswith(_PACKED)]:
        problems.add(f"{name}: {lacking.pop(name)[1]} holds it in packed quantized form, which no rule of this plan makes")
    by_place: dict[str, list[str]] = {}
    for name, (_, where) in lacking.items():
        by_place.setdefault(where, []).append(name)
    for where, names in by_place.items():
        problems.add(f"missing in the source, expected by {where}: {listed(names)}; {_remedy(names, lost, table)}")
    if spare:
        problems.add(
            f"no target wants what the source has under {listed(spare)}; rename it, declare it optional on the source, or "
            "leave it out of the scope"
        )


def _report_fused(lacking: dict[str, tuple[Index, str]], spare: dict[str, Index], problems: Problems) -> None:
    """Report parameters that join several tensors of the source, and take both out of what is left over."""
    by_place: dict[str, tuple[list[str], dict[str, None]]] = {}
    for name, parts in fused(spare, lacking).items():
        joined, split = by_place.setdefault(lacking.pop(name)[1], ([], {}))
        joined.append(name)
        split.update(dict.fromkeys(parts))
    for where, (joined, split) in by_place.items():
        problems.add(
            f"{where} expects {listed(joined)}, of which the source has the parts: {listed(split)}; the parameters are fused, "
            f"and no name table parts them: {_LAYOUT}"
        )
        for part in split:
            spare.pop(part, None)


def _remedy(names: list[str], lost: Mapping[str, tuple[Index, str]], table: _SourceTensors) -> str:
    advice = "send all tensors, not only trainable ones, or declare the name optional on the target to keep what it holds"
    if len(names) == 1:
        shape = lost[names[0]][0]
        depth = table.shape.shape[1]
        row = np.array((*shape, *(1,) * (depth - len(shape)))[:depth])
        alike = np.flatnonzero((table.ndim == len(shape)) & (table.shape == row).all(axis=1))
        if len(alike) == 1:
            return f"if it is tied to {table.names[alike[0]]}, which has its shape, declare it an alias; else {advice}"
    return advice


def _check_companions(sides: Sides, table: _SourceTensors, index: list[Ints], problems: Problems) -> None:
    """A quantized tensor travels with its scales or not at all."""
    if not any(d.startswith("float8") for holder in sides.receiving for d in holder.layout.tensors.dtypes):
        return
    known = set(table.names).union(*(holder.layout.tensors.names for holder in sides.receiving))
    sent: dict[int, set[str]] = defaultdict(set)
    quantized: dict[str, set[int]] = defaultdict(set)
    for holder, at in zip(sides.receiving, index, strict=True):
        tensors = holder.layout.tensors
        arriving = [
            (name, tensors.dtypes[code]) for name, code, i in zip(tensors.names, tensors.dtype, at, strict=True) if i >= 0
        ]
        targets = {sides.receivers[rank].target for rank in holder.ranks}
        for target in targets:
            sent[target].update(name for name, _ in arriving)
        for name, dtype in arriving:
            if dtype.startswith("float8"):
                quantized[name] |= targets
    for name, targets in quantized.items():
        for scale in (name + ending for ending in _SCALES if name + ending in known):
            for target in sorted(targets):
                if scale not in sent[target]:
                    problems.add(f"{name}: target {target} would get it without its scale {scale}: send both, or neither")
