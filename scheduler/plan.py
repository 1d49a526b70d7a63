"""The plan: which rank sends which boxes of which tensor, in which task, in which order, to which target.

`build_plan` is a pure function of the manifests and the options. It proves, before a byte moves, that every element of
every target buffer in scope is written exactly once, from an element that some source rank holds, in a type that may be
cast, within the watermark, and that each target's ranks together take whole tensors; whatever fails is one `PlanError`
that lists all problems.

Phases, each in a module of its own:

1. `sides`: sort the ranks, keep equal layouts once;
2. `naming`: match names, aliases, scope;
3. `coverage`: prove each manifest sound: memory written once, types, devices;
4. `completeness`: prove that no part of a tensor goes to no rank of a target that takes some of it;
5. `geometry`: box algebra per pattern of tensors: what is sent, by whom it can be, and that nothing is missing;
6. `balance`: owners;
7. `packing`: buckets, their order, landing space;
8. `gathering`: messages to the owners, temporary bytes, the watermark.

The result is columns. `materialize` draws the program of a single rank from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from .balance import choose_owners, contributors
from .columns import Ints
from .completeness import check_taken_whole
from .coverage import check_dtypes, check_pieces
from .explain import Explanation, explain
from .formats import names_module
from .gathering import check_watermark, gather
from .geometry import survey
from .layout import Manifest
from .materialize import Routes, source_program, target_program
from .naming import Canonical, resolve
from .options import PlanOptions
from .packing import Placed, pack
from .patterns import Patterns
from .problems import Problems, listed
from .programs import ReceiverId, SourceProgram, TargetProgram
from .regions import Mask
from .routing import Routing, size, summarize
from .rows import Rows, in_file, in_host, tabulate, uncut
from .sides import Sides, meet
from .traffic import Traffic, count

__all__ = ["Plan", "PlanOptions", "TaskSummary", "build_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSummary:
    """A task of the plan. ``tmp_bytes`` is the most that it needs on one rank."""

    index: int
    group: int
    owner: int
    nbytes: int
    tmp_bytes: int
    receivers: tuple[ReceiverId, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A plan. Made by `build_plan`; equal on every rank that makes it from the same manifests and options.

    Attributes:
        options: what it was made with.
        manifest_digests: of the source's ranks, then of each target's, in order of rank.
    """

    options: PlanOptions
    manifest_digests: tuple[tuple[str, ...], ...]
    routes: Routes

    @cached_property
    def digest(self) -> str:
        """Hex digest over the manifests, the options and everything that was planned."""
        facts = (self.manifest_digests, self.options.key(), self.routes.names, self.routes.patterns.formats)
        state = xxhash.xxh3_128(msgspec.msgpack.encode(facts))
        for column in _columns(self.routes):
            state.update(column.tobytes())
        return state.hexdigest()

    @property
    def digest_kind(self) -> str:
        """How receivers digest what they get, for example ``xxh3_128:262144``; ``none`` without verification."""
        return self.options.digest_kind

    @property
    def world_size(self) -> int:
        """Source ranks."""
        return self.routes.sides.world

    @property
    def receivers(self) -> tuple[ReceiverId, ...]:
        """Every rank of every target."""
        return self.routes.sides.receivers

    @property
    def groups(self) -> tuple[int, ...]:
        """Mesh groups in order."""
        return tuple(np.unique(self.routes.tasks.group).tolist())

    @property
    def total_tasks(self) -> int:
        return len(self.routes.tasks.owner)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, each counted once."""
        return int(self.routes.tasks.nbytes.sum())

    @property
    def peak_task_tmp_bytes(self) -> int:
        """The most temporary bytes that one task needs on one rank."""
        return int(self.routes.gather.shares.tmp_bytes.max(initial=0))

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each source rank sends: buckets, once for each receiver that gets them from it, and messages to owners."""
        return tuple(self.traffic.sent.tolist())

    @property
    def balance(self) -> float:
        """Bytes sent by the busiest rank over the mean of all ranks; 1 if nothing is sent."""
        mean = sum(self.sent) / max(1, len(self.sent))
        return max(self.sent, default=0) / mean if mean else 1.0

    @cached_property
    def routing(self) -> Routing:
        """What goes straight from the ranks that hold it, what is gathered, and why."""
        return summarize(self.routes)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes by pairs of ranks."""
        return count(self.routes)

    def explain(self, name: str) -> Explanation:
        """What is done with tensor ``name``, part by part. Raises `KeyError` for a name that the plan does not move."""
        return explain(self.routes, name)

    @cached_property
    def tasks(self) -> tuple[TaskSummary, ...]:
        """All tasks in plan order."""
        routes, tasks, shares = self.routes, self.routes.tasks, self.routes.gather.shares
        need = np.zeros(self.total_tasks, np.int64)
        np.maximum.at(need, shares.task, shares.tmp_bytes)
        names = [routes.names[t] for t in routes.segments.tensor.tolist()]
        first = tasks.first.tolist()
        return tuple(
            TaskSummary(
                index=i,
                group=int(tasks.group[i]),
                owner=int(tasks.owner[i]),
                nbytes=int(tasks.nbytes[i]),
                tmp_bytes=int(need[i]),
                receivers=tuple(self.receivers[r] for r in routes.patterns.audiences[tasks.audience[i]]),
                names=tuple(dict.fromkeys(names[first[i] : first[i + 1]])),
            )
            for i in range(self.total_tasks)
        )

    def source_program(self, rank: int) -> SourceProgram:
        """What source rank ``rank`` does for a push. Raises `IndexError` for a rank that the source has not."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"source rank {rank} of {self.world_size}")
        return source_program(self.routes, rank, self.digest)

    def target_program(self, target: int, rank: int) -> TargetProgram:
        """What one receiver takes in a push. Raises `IndexError` for a receiver that the plan has not."""
        receiver = ReceiverId(target, rank)
        if receiver not in self.receivers:
            raise IndexError(f"the plan has no {receiver}")
        return target_program(self.routes, self.receivers.index(receiver), self.digest, self.digest_kind)

    def describe(self) -> str:
        """A few lines for people."""
        tensors = len(np.unique(self.routes.segments.tensor))
        lines = [
            f"plan {self.digest}",
            f"{tensors} tensors in {self.total_tasks} tasks of {len(self.groups)} mesh group(s), {size(self.nbytes)}",
            f"{self.world_size} source ranks, {len(self.routes.sides.targets)} targets, {len(self.receivers)} receivers",
            str(self.routing),
            f"bytes sent per rank: max/mean {self.balance:.3f}, max {size(max(self.sent, default=0))}",
            f"largest task: {size(self.peak_task_tmp_bytes)} of the watermark {size(self.options.max_tmp_bytes)}",
        ]
        return "\n".join(lines)


def build_plan(sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]], options: PlanOptions) -> Plan:
    """Plan a push.

    Args:
        sources: manifests of all source ranks, in any order.
        targets: manifests of all ranks of each target, in any order; targets are numbered in the order given.
        options: sizes, route, landing, scope.

    Raises:
        PlanError: the manifests do not fit together; it lists every problem found.
    """
    problems = Problems()
    sides = meet(sources, targets, problems)
    canonical = resolve(sides, options.scope, problems, wire_format=options.wire_format)
    _check_movable(sides, options, problems)
    _check_left_out(canonical, options, problems)
    sound = check_pieces(sides, canonical, problems)
    held, wanted = _tables(sides, canonical, sound, options, problems)
    check_taken_whole(sides, canonical, wanted, problems)
    patterns = survey(sides, canonical, held, wanted, options=options, problems=problems)
    contributor = contributors(patterns.holder_sets, sides.host_of_rank)
    placed = _place(canonical, patterns, contributor, sides, options)
    tasks, segments, landing_nbytes = pack(placed, patterns, options, sides.world)
    gathered = gather(tasks, segments, patterns, contributor=contributor, sides=sides, options=options)
    check_watermark(gathered.shares, segments, canonical.names, options, problems)
    problems.check()
    routes = Routes(
        sides=sides,
        names=canonical.names,
        ndim=canonical.ndim,
        shape=canonical.shape,
        held=held.places,
        wanted=wanted.places,
        patterns=patterns,
        tasks=tasks,
        segments=segments,
        gather=gathered,
        landing_nbytes=landing_nbytes,
        skipped=canonical.skipped,
        relaying=options.relays,
    )
    digests = tuple(tuple(m.digest for m in manifests) for manifests in (sides.manifests, *sides.targets))
    return Plan(options=options, manifest_digests=digests, routes=routes)


def _check_movable(sides: Sides, options: PlanOptions, problems: Problems) -> None:
    for holder in sides.receiving if options.landing == "mapped" else ():
        if len(holder.layout.pieces) and not holder.layout.movable:
            problems.add(
                f"landing 'mapped' points parameters at shared memory, but {holder.where} does not declare its parameters "
                "movable; use a loader with movable=True, or landing 'staged' or 'streamed'"
            )


def _check_left_out(canonical: Canonical, options: PlanOptions, problems: Problems) -> None:
    """Report weights that targets hold quantized although their modules are not to be converted."""
    left_out = [
        canonical.names[t]
        for t in sorted(canonical.formats)
        if any(names_module(pattern, canonical.names[t].removesuffix(".weight")) for pattern in options.modules_to_not_convert)
    ]
    if left_out:
        problems.add(
            f"{listed(left_out)}: a target holds it as FP8, and modules_to_not_convert leaves it as it is: hold it unquantized "
            "there, or take it off the list"
        )


def _tables(sides: Sides, canonical: Canonical, sound: Mask, options: PlanOptions, problems: Problems) -> tuple[Rows, Rows]:
    """Pieces of both sides, of those tensors that have no problem so far."""
    held, wanted = _tabulated(sides, canonical, sound, options)
    castable = check_dtypes(sides, canonical, held, wanted, problems)
    return (held, wanted) if castable.all() else _tabulated(sides, canonical, sound & castable, options)


def _tabulated(sides: Sides, canonical: Canonical, sound: Mask, options: PlanOptions) -> tuple[Rows, Rows]:
    count, depth = len(canonical.names), max(1, canonical.shape.shape[1])
    kept = np.append(np.where(sound, np.arange(count), -1), -1)  # the last one is what index -1 finds
    source, target = ([kept[index] for index in side] for side in (canonical.source_index, canonical.target_index))
    held = tabulate(sides.sources, source, count, depth, marks=in_host if options.stage_host else in_file)
    return held, tabulate(sides.receiving, target, count, depth, marks=uncut)


def _place(canonical: Canonical, patterns: Patterns, contributor: Ints, sides: Sides, options: PlanOptions) -> Placed:
    """Units of all tensors with their owners: of each part its own, or one for all parts where landing is ``mapped``."""
    derived = np.zeros(len(canonical.names), bool)
    derived[list(canonical.scales.values())] = True
    tensors = np.flatnonzero((patterns.pattern_of >= 0) & ~derived)
    pattern = patterns.pattern_of[tensors]
    counts = patterns.unit_first[pattern + 1] - patterns.unit_first[pattern]
    tensor = np.repeat(tensors, counts)
    unit = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts - patterns.unit_first[pattern], counts)
    units = patterns.units
    item = units.item[unit]
    count = len(patterns.items.nbytes)
    if options.landing == "mapped":
        job_first = np.searchsorted(units.item, np.arange(count + 1))
        head = np.flatnonzero(units.offset[unit] == 0)
        owner = np.repeat(
            choose_owners(patterns, job_first, item[head], contributor, sides=sides, options=options), units.parts[unit[head]]
        )
    else:
        owner = choose_owners(patterns, np.arange(len(units.item) + 1), unit, contributor, sides=sides, options=options)
    chain = np.where((units.parts[unit] > 1) & (patterns.items.format[item] == 0), tensor * count + item, -1)
    placed = Placed(tensor, unit, owner, canonical.group[tensor], chain, np.zeros(len(unit), bool))
    return _with_scales(placed, canonical, patterns) if canonical.scales else placed


def _with_scales(placed: Placed, canonical: Canonical, patterns: Patterns) -> Placed:
    """Right behind every quantized unit the unit of its scales."""
    quantized = patterns.quantized
    rows = np.flatnonzero(quantized[placed.unit])
    scales = np.array([canonical.scales[t] for t in placed.tensor[rows].tolist()], np.int64)
    pattern = patterns.pattern_of[scales]
    before: Ints = np.cumsum(quantized) - quantized
    nth: Ints = before[placed.unit[rows]] - before[patterns.unit_first[pattern - 1]]
    mine = Placed(
        scales, patterns.unit_first[pattern] + nth, placed.owner[rows], placed.group[rows], placed.chain[rows],
        np.ones(len(rows), bool),
    )  # fmt: skip
    order = np.argsort(np.concatenate([2 * np.arange(len(placed.unit)), 2 * rows + 1]), kind="stable")
    return Placed(*(np.concatenate(pair)[order] for pair in zip(placed, mine, strict=True)))


def _columns(routes: Routes) -> Iterable[npt.NDArray[Any]]:
    """Everything that was planned; the order is part of the digest."""
    p, g = routes.patterns, routes.gather
    for table in (p.items, p.units, p.fragments, p.holds, p.wants):
        yield from cast("Sequence[npt.NDArray[Any]]", table)
    for facts in (routes.tasks, routes.segments, g.contributions, g.messages, g.shares):
        yield from cast("Sequence[npt.NDArray[Any]]", facts)
    yield routes.landing_nbytes
