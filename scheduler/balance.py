"""Which source rank owns what: assembles it and sends it.

Bytes sent by a rank are its buckets, once for each receiver, and what it contributes to buckets of others. Jobs are given
out from the most expensive down. Each goes to the rank with which the busiest rank that it touches is least busy; among
those to the one that has most of it already; among those to the least busy. So shards and replicas share the work, and
bytes that are local stay local unless that would overload their holder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import Ints
from .patterns import Patterns

_CONSIDERED = 8
"""Ranks that are looked at for a job: so many of the least busy, and so many of those that have most of it."""


def contributors(holder_sets: Sequence[tuple[int, ...]], host: Ints) -> Ints:
    """Who contributes a fragment: (holder sets, ranks), for each set and owner the rank that sends it to the owner.

    An owner that holds the fragment takes its own. Else a holder on its host, or any: holders share the owners among
    them in blocks, which for the usual order of ranks means the owner's own replica.
    """
    world = len(host)
    owners = np.arange(world)
    table = np.empty((len(holder_sets), world), np.int64)
    for row, ranks in enumerate(holder_sets):
        holders = np.array(ranks)
        table[row] = holders[owners * len(holders) // world]
        for name in np.unique(host[holders]):
            near, here = holders[host[holders] == name], np.flatnonzero(host == name)
            table[row, here] = near[np.arange(len(here)) * len(near) // len(here)]
        table[row, holders] = holders
    return table


def choose_owners(patterns: Patterns, job: Ints, instances: Ints, contributor: Ints) -> tuple[Ints, Ints]:
    """An owner for every job of every tensor.

    Args:
        job: first unit of each kind of job, in order, and their number at the end: a job is a unit, or all units of an item.
        instances: kind of each job there is to give out.
        contributor: see `contributors`.

    Returns:
        Owner of each instance, and bytes sent by each rank.
    """
    units, items = patterns.units, patterns.items
    audience = np.array([len(receivers) for receivers in patterns.audiences], np.int64)
    first_unit = job[:-1]
    nbytes = np.add.reduceat(units.nbytes, first_unit) if len(first_unit) else units.nbytes
    sent = nbytes * audience[items.audience[units.item[first_unit]]]
    fragments = patterns.fragment_first[job]
    load = np.zeros(contributor.shape[1], np.int64)
    owner = np.empty(len(instances), np.int64)
    order = np.lexsort((instances, -sent[instances]))
    kinds = instances[order]
    starts = np.flatnonzero(np.diff(kinds, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True):
        kind = int(kinds[start])
        work = _Job(patterns, slice(fragments[kind], fragments[kind + 1]), int(sent[kind]), contributor)
        if items.cut[units.item[first_unit[kind]]]:
            work.keep_to_holders()
        for place in order[start:stop].tolist():
            owner[place] = work.give(load)
    return owner, load


class _Job:
    """A kind of job: for each rank, what it would cost whom if that rank owned it."""

    def __init__(self, patterns: Patterns, fragments: slice, sent: int, contributor: Ints) -> None:
        sets, inverse = np.unique(patterns.fragments.holders[fragments], return_inverse=True)
        nbytes = np.bincount(inverse.reshape(-1), patterns.fragments.nbytes[fragments]).astype(np.int64)
        ranks = np.arange(contributor.shape[1])
        self._sender = contributor[sets]
        self._away = np.where(self._sender == ranks, 0, nbytes[:, None])
        self._gather = self._away.sum(axis=0)
        self._sent = sent
        self._nearest = np.flatnonzero(self._gather == self._gather.min())
        self._others = len(self._nearest) < len(ranks)

    def keep_to_holders(self) -> None:
        """Only ranks that have most of the job already may own it."""
        self._others = False

    def give(self, load: Ints) -> int:
        """Choose the owner and book what everyone sends."""
        ranks = self._candidates(load)
        peak = load[ranks] + self._sent
        if self._others or self._gather[ranks[0]]:
            peak = np.maximum(peak, (load[self._sender[:, ranks]] + self._away[:, ranks]).max(axis=0))
        owner = ranks[np.lexsort((load[ranks], self._gather[ranks], peak))[0]]
        load[owner] += self._sent
        np.add.at(load, self._sender[:, owner], self._away[:, owner])
        return int(owner)

    def _candidates(self, load: Ints) -> Ints:
        near = _least(load, self._nearest)
        return np.concatenate([near, _least(load, np.arange(len(load)))]) if self._others else near


def _least(load: Ints, ranks: Ints) -> Ints:
    """Some of ``ranks`` with the least load. A stable sort, so that every machine finds the same."""
    return ranks if len(ranks) <= _CONSIDERED else ranks[np.argsort(load[ranks], kind="stable")[:_CONSIDERED]]
