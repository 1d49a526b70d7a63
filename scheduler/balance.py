"""Which source rank owns what: assembles it and sends it.

Bytes sent by a rank are its buckets, once for each receiver, and what it contributes to buckets of others. At first every
rank is booked with what it would contribute if it owned nothing; owning a job then costs a rank the job's bytes for each
receiver, less what it need no longer contribute. Jobs are given out from the most expensive down. Of the ranks that have
most of a job already, the least busy gets it, as long as it stays within the mean of all ranks or no other rank would be
less busy; else the rank that would be. So shards and replicas share the work, and bytes that are local stay local unless
that would overload their holder.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from .columns import Ints
from .patterns import PACK_ALIGN, Fragments, Patterns
from .programs import ALIGN
from .regions import Mask


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


def choose_owners(patterns: Patterns, job: Ints, instances: Ints, contributor: Ints) -> Ints:
    """An owner for every job of every tensor.

    Args:
        job: first unit of each kind of job, in order, and their number at the end: a job is a unit, or all units of an item.
        instances: kind of each job there is to give out.
        contributor: see `contributors`.

    Returns:
        Owner of each instance.
    """
    if not len(instances):
        return instances
    units, items = patterns.units, patterns.items
    audience = np.array([len(receivers) for receivers in patterns.audiences], np.int64)
    first_unit, fragments = job[:-1], patterns.fragment_first[job].tolist()
    sent = np.add.reduceat(_room(units.nbytes, ALIGN), first_unit) * audience[items.audience[units.item[first_unit]]]
    order = np.lexsort((instances, -sent[instances]))
    kinds = instances[order]
    starts = np.flatnonzero(np.diff(kinds, prepend=-1)).tolist()
    runs = list(itertools.pairwise([*starts, len(kinds)]))
    cut = items.cut[units.item[first_unit]]
    holding = contributor == np.arange(contributor.shape[1])
    jobs = [
        _Job(patterns.fragments, slice(*fragments[k : k + 2]), int(sent[k]), contributor, holding)
        for k in kinds[starts].tolist()
    ]
    load = np.sum([job.duty * (stop - start) for job, (start, stop) in zip(jobs, runs, strict=True)], axis=0)
    total = sum(job.least * (stop - start) for job, (start, stop) in zip(jobs, runs, strict=True))
    owner = np.empty(len(instances), np.int64)
    for work, (start, stop) in zip(jobs, runs, strict=True):
        given = start
        cap = None if cut[kinds[start]] else total // len(load)
        while given < stop:
            owners = work.give(load, stop - given, cap)
            owner[order[given : given + len(owners)]] = owners
            given += len(owners)
    return owner


def _room(nbytes: Ints, align: int) -> Ints:
    """Bytes with the padding that they travel with."""
    return -(-nbytes // align) * align


class _Job:
    """A kind of job: for each rank, what it would cost whom if that rank owned it.

    Attributes:
        duty: bytes that each rank would contribute if it never were the owner; replicas share them.
        least: bytes that must be sent at least, by all ranks together.
    """

    def __init__(self, fragments: Fragments, rows: slice, sent: int, contributor: Ints, holding: Mask) -> None:
        self._sets, inverse = np.unique(fragments.holders[rows], return_inverse=True)
        self._nbytes = np.bincount(inverse.reshape(-1), _room(fragments.nbytes[rows], PACK_ALIGN)).astype(np.int64)
        self._contributor, self._sent = contributor, sent
        holders = holding[self._sets]
        self.duty = (self._nbytes // holders.sum(axis=1)) @ holders
        self._gather = self._nbytes.sum() - self._nbytes @ holders
        self._near = np.flatnonzero(self._gather == self._gather.min())
        self.least = sent + int(self._gather.min())

    def give(self, load: Ints, count: int, cap: int | None) -> Ints:
        """Choose owners for up to ``count`` jobs and book what everyone sends.

        Args:
            cap: load up to which ranks that have most of the job are taken although others are less busy; None if others
                must not own it.
        """
        cost = load - self.duty + self._sent
        near = self._near[np.argsort(cost[self._near], kind="stable")]
        if cap is not None:
            near = near[cost[near] <= max(cap, int(cost.min()))]
        if not len(near):
            return self._book(load, np.lexsort((self._gather, cost))[:1])
        turn = cost[near] <= cost[near[0]] + self._sent  # until the first of them would be the least busy again
        return self._book(load, near[turn][:count])

    def _book(self, load: Ints, owners: Ints) -> Ints:
        load -= self.duty * len(owners)
        load[owners] += self._sent
        sender = self._contributor[self._sets[:, None], owners]
        np.add.at(load, sender, np.where(sender == owners, 0, self._nbytes[:, None]))
        return owners
