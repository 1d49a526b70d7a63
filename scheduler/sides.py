"""The two sides of a plan: who holds which layout. Equal layouts are kept once.

First phase of planning. The order in which manifests are given does not matter: each side is sorted by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .columns import Ints, ints
from .layout import Layout, Manifest
from .problems import Problems
from .programs import ReceiverId


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A distinct layout of a side and the ranks that have it, lowest first.

    Attributes:
        ranks: source ranks; on the target side, positions of receivers among all receivers.
        aliases: what the names of this layout may stand for: declared by any rank of this source, or of this target.
        side: ``the source``, or which target.
        where: the first rank that has it, in words.
    """

    layout: Layout
    ranks: tuple[int, ...]
    aliases: frozenset[tuple[str, str]]
    side: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Sources and targets by distinct layout.

    Attributes:
        manifests: the source's, by rank.
        targets: each target's manifests, by rank.
        receivers: every rank of every target, in order.
    """

    manifests: tuple[Manifest, ...]
    targets: tuple[tuple[Manifest, ...], ...]
    sources: tuple[Holder, ...]
    receiving: tuple[Holder, ...]
    receivers: tuple[ReceiverId, ...]

    @property
    def world(self) -> int:
        return len(self.manifests)

    @cached_property
    def layout_of_rank(self) -> Ints:
        """Index into ``sources`` of every source rank."""
        return _owner_of(self.sources, self.world)

    @cached_property
    def layout_of_receiver(self) -> Ints:
        """Index into ``receiving`` of every receiver."""
        return _owner_of(self.receiving, len(self.receivers))

    @cached_property
    def host_of_rank(self) -> Ints:
        """Source ranks with equal numbers are on one host."""
        return ints([self._hosts[m.host] for m in self.manifests])

    @cached_property
    def host_of_receiver(self) -> Ints:
        """The same number as of the source ranks on its host, or -1 where there is none."""
        return ints([self._hosts.get(m.host, -1) for manifests in self.targets for m in manifests])

    @cached_property
    def receiver_hosts(self) -> tuple[str, ...]:
        """The host of every receiver, by name."""
        return tuple(m.host for manifests in self.targets for m in manifests)

    @cached_property
    def _hosts(self) -> dict[str, int]:
        return {host: number for number, host in enumerate(dict.fromkeys(m.host for m in self.manifests))}


def meet(sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]], problems: Problems) -> Sides:
    """Sort and group manifests. Reports wrong rank sets, no source, no target, and targets without ranks."""
    if not sources:
        problems.add("there is no source rank: give the manifest of every rank of the trainer")
    if not targets:
        problems.add("there is no target: give the manifests of at least one target")
    by_rank = _sorted(sources, "the source", problems)
    by_target = tuple(_sorted(manifests, f"target {t}", problems) for t, manifests in enumerate(targets))
    for t, manifests in enumerate(by_target):
        if not manifests:
            problems.add(f"target {t} is an empty group: it has no ranks; give the manifest of every rank, or leave it out")
    return Sides(
        manifests=by_rank,
        targets=by_target,
        sources=_distinct([("the source", by_rank)]),
        receiving=_distinct([(f"target {t}", manifests) for t, manifests in enumerate(by_target)]),
        receivers=tuple(ReceiverId(t, m.rank) for t, ms in enumerate(by_target) for m in ms),
    )


def _sorted(manifests: Iterable[Manifest], side: str, problems: Problems) -> tuple[Manifest, ...]:
    rows = tuple(sorted(manifests, key=lambda m: (m.rank, m.digest)))
    ranks = [m.rank for m in rows]
    size = len(rows)
    doubled = sorted({r for r in ranks if ranks.count(r) > 1}) if len(set(ranks)) < size else []
    if doubled:
        problems.add(f"{side}: rank {_words(doubled)} is given more than once; every rank gives one manifest")
    sizes = sorted({m.world_size for m in rows})
    if len(sizes) > 1:
        problems.add(f"{side}: its ranks disagree about their number: world_size is {_words(sizes)}")
    if rows:
        missing = sorted(set(range(max(sizes))) - set(ranks))
        beyond = sorted({r for r in ranks if not 0 <= r < max(sizes)})
        if missing:
            problems.add(
                f"{side}: rank {_words(missing)} of world_size {max(sizes)} is missing; give the manifest of every rank"
            )
        if beyond:
            problems.add(f"{side}: rank {_words(beyond)} is not within world_size {max(sizes)}")
    return rows


def _words(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return shown if len(numbers) <= 16 else f"{shown} and {len(numbers) - 16} more"


def _aliases(manifests: Iterable[Manifest]) -> frozenset[tuple[str, str]]:
    return frozenset(pair for m in manifests if m.aliases for pair in m.aliases.items())


def _distinct(groups: Iterable[tuple[str, Sequence[Manifest]]]) -> tuple[Holder, ...]:
    """Holders of the distinct layouts of some groups of ranks. Ranks are counted through all groups."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], list[tuple[int, str, Manifest]]] = {}
    count = 0
    for side, manifests in groups:
        aliases = _aliases(manifests)
        for manifest in manifests:
            found.setdefault((manifest.layout.digest, aliases), []).append((count, side, manifest))
            count += 1
    return tuple(
        Holder(
            layout=members[0][2].layout,
            ranks=tuple(place for place, _, _ in members),
            aliases=key[1],
            side=members[0][1],
            where=f"{members[0][1]} rank {members[0][2].rank}".removeprefix("the "),
        )
        for key, members in found.items()
    )


def _owner_of(holders: Sequence[Holder], count: int) -> Ints:
    index = np.zeros(count, np.int64)
    for i, holder in enumerate(holders):
        index[list(holder.ranks)] = i
    return index
