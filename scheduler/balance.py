"""Which source rank owns what: assembles it and sends it.

Bytes sent by a rank are its buckets, once for each receiver, and what it contributes to buckets of others. At first every
rank is booked with what it would contribute if it owned nothing; owning a job then costs a rank the job's bytes for each
receiver, less what it need no longer contribute. Jobs are given out from the most expensive down. Of the ranks that have
most of a job already, the least busy gets it, as long as it stays within the mean of all ranks or no other rank would be
less busy; else the rank that would be. So shards and replicas share the work, and bytes that are local stay local unless
that would overload their holder (``auto``: by more than a tenth of the mean, since a byte that moves is sent once more).
A job stays with its holders for certain if they would have to send as much of it to another owner. Of holders of all of a
job, those on a receiver's host come first, until they are nearly as busy as the mean.

Small things that have to be gathered (``auto``) are given to one rank a bucketful at a time: spread evenly, they would make
every rank wait for messages from every other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .columns import Ints, ints
from .cutting import SMALL
from .options import PlanOptions
from .patterns import PACK_ALIGN, Fragments, Patterns
from .programs import ALIGN
from .regions import Mask, expand
from .sides import Sides

_SLACK = 1.1
"""``auto``: load of a holder, over the mean, from which on its work is given to others."""
_BESIDE = 0.9
"""Load of a holder on a receiver's host, over the mean, up to which it is preferred to others."""


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


def choose_owners(
    patterns: Patterns, job: Ints, instances: Ints, contributor: Ints, *, sides: Sides, options: PlanOptions
) -> Ints:
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
    kinds = _kinds(patterns, job, contributor, sides, options.relays)
    sent = np.array([kind.sent for kind in kinds], np.int64)
    order = np.lexsort((instances, -sent[instances]))
    starts = np.flatnonzero(np.diff(instances[order], prepend=-1)).tolist()
    runs = list(itertools.pairwise([*starts, len(order)]))
    jobs = [kinds[k] for k in instances[order][starts].tolist()]
    counts = np.diff([*starts, len(order)])
    load, firm = (counts @ np.array(duties) for duties in ([j.duty for j in jobs], [j.firm_duty for j in jobs]))
    mean = int(counts @ np.array([j.least for j in jobs])) // len(load)
    desk = _Desk(load, firm, mean, piles=_Piles(options.bucket_bytes, mean), auto=options.route == "auto")
    owner = np.empty(len(instances), np.int64)
    for work, (start, stop) in zip(jobs, runs, strict=True):
        while start < stop:
            owners = desk.give(work, stop - start)
            owner[order[start : start + len(owners)]] = owners
            start += len(owners)  # noqa: PLW2901 - what is given out is over
    return owner


def _kinds(patterns: Patterns, job: Ints, contributor: Ints, sides: Sides, relays: frozenset[int]) -> list[_Job]:
    """All kinds of jobs, in order."""
    units, items, first_unit = patterns.units, patterns.items, job[:-1]
    item = units.item[first_unit]
    receivers = ints([_copies(receivers, sides, relays) for receivers in patterns.audiences])[items.audience[item]]
    sent = np.add.reduceat(_room(units.nbytes, ALIGN), first_unit) * receivers
    beside = _beside(patterns.audiences, sides)[items.audience[item]]
    holding = contributor == np.arange(contributor.shape[1])
    fragments = itertools.pairwise(patterns.fragment_first[job].tolist())
    facts = zip(sent.tolist(), items.held[item].tolist(), (items.why[item] == SMALL).tolist(), items.audience[item].tolist(),
                receivers.tolist(), strict=True)  # fmt: skip
    return [
        _Job(_Fragments(patterns.fragments, slice(*rows), contributor, holding), _Facts(*fact), near)
        for rows, fact, near in zip(fragments, facts, beside, strict=True)
    ]


def _copies(audience: Sequence[int], sides: Sides, relays: frozenset[int]) -> int:
    """How often a bucket is sent by its owner: once for each receiver, or once for each host whose ranks pass it on.

    A host with source ranks is taken for the owner's own: owners are chosen there.
    """
    sent: set[tuple[int, str | int]] = set()
    for place in audience:
        target, passes = sides.receivers[place].target, sides.host_of_receiver[place] < 0
        sent.add((target, sides.receiver_hosts[place] if passes and target in relays else place))
    return len(sent)


class _Desk:
    """Gives jobs to ranks and keeps the books.

    Args:
        load: bytes that each rank has to send as things stand; at first, all its duties.
        firm: the same without what replicas could take over: all that is certain as long as jobs are given out.
        mean: bytes that each rank would send if all sent the same.
    """

    def __init__(self, load: Ints, firm: Ints, mean: int, *, piles: _Piles, auto: bool) -> None:
        self._load, self._firm, self._mean, self._piles, self._auto = load, firm, mean, piles, auto
        self._fair = int(mean * _SLACK) if auto else mean

    def give(self, work: _Job, count: int) -> Ints:
        """Owners for up to ``count`` of these jobs."""
        before = self._load.copy()
        cap = None if work.rooted else self._fair
        owners = work.give_beside(self._load, self._firm, count, int(self._mean * _BESIDE))
        if not len(owners):
            piled = self._auto and work.small
            owners = self._piles.give(work, self._load, count, cap) if piled else work.give(self._load, count, cap)
        self._firm += self._load - before + (work.duty - work.firm_duty) * len(owners)
        return owners


def _beside(audiences: Sequence[tuple[int, ...]], sides: Sides) -> Ints:
    """(audiences, ranks): how many receivers of an audience are on a source rank's host."""
    hosts = int(sides.host_of_rank.max(initial=-1)) + 1
    counts = np.zeros((len(audiences), hosts + 1), np.int64)  # the last column is of hosts without a source rank
    for row, receivers in enumerate(audiences):
        np.add.at(counts[row], sides.host_of_receiver[list(receivers)], 1)
    return counts[:, sides.host_of_rank]


def _room(nbytes: Ints, align: int) -> Ints:
    """Bytes with the padding that they travel with."""
    return -(-nbytes // align) * align


class _Piles:
    """Small jobs of one audience go to one owner until it has a bucket full of them, or a small part of its load."""

    def __init__(self, bucket_bytes: int, mean: int) -> None:
        self._bucket_bytes, self._most = bucket_bytes, mean // 16
        self._open: dict[int, tuple[int, int]] = {}

    def give(self, work: _Job, load: Ints, count: int, cap: int | None) -> Ints:
        """Owners for up to ``count`` jobs, booked."""
        owner, room = self._open.get(work.audience, (-1, 0))
        fitting = min(count, room // work.sent)
        if not fitting:
            owners = work.give(load, 1, cap)
            room = min(self._bucket_bytes * work.receivers, self._most)
            self._open[work.audience] = int(owners[0]), max(0, room - work.sent)
            return owners
        self._open[work.audience] = owner, room - fitting * work.sent
        return work.give_to(owner, load, fitting)


class _Facts(NamedTuple):
    """Of a kind of job: bytes sent to all its receivers, whether holders must own it, whether it is small, for whom it is."""

    sent: int
    held: bool
    small: bool
    audience: int
    receivers: int


class _Fragments(NamedTuple):
    """Fragments ``rows`` of a kind of job; who contributes each to whom, and who holds it: (holder sets, ranks)."""

    table: Fragments
    rows: slice
    contributor: Ints
    holding: Mask


class _Job:
    """A kind of job: for each rank, what it would cost whom if that rank owned it.

    Attributes:
        duty: bytes that each rank would contribute if it never were the owner; replicas share them.
        firm_duty: of that, what no replica can take over.
        least: bytes that must be sent at least, by all ranks together.
        sent: bytes that its owner sends to the receivers, all copies together.
        rooted: holders must own it, or another owner would spare those who have most of the job nothing.
        small: it is small, and no rank has all of it.
        audience, receivers: for whom it is, and how many they are.
    """

    def __init__(self, parts: _Fragments, facts: _Facts, beside: Ints) -> None:
        self._sets, inverse = np.unique(parts.table.holders[parts.rows], return_inverse=True)
        self._nbytes = np.bincount(inverse.reshape(-1), _room(parts.table.nbytes[parts.rows], PACK_ALIGN)).astype(np.int64)
        self._contributor, self.sent = parts.contributor, facts.sent
        self.audience, self.receivers = facts.audience, facts.receivers
        holders = parts.holding[self._sets]
        self.duty = (self._nbytes // holders.sum(axis=1)) @ holders
        self.firm_duty = np.where(holders.sum(axis=1) == 1, self._nbytes, 0) @ holders
        self._gather = self._nbytes.sum() - self._nbytes @ holders
        self._near = np.flatnonzero(self._gather == self._gather.min())
        self._whole = not self._gather[self._near[0]]
        self.small = facts.small and not self._whole
        most = beside[self._near].max()
        self._beside = self._near[beside[self._near] == most] if self._whole else self._near[:0]
        if len(self._beside) == len(self._near):
            self._beside = self._near[:0]  # one is as good as the other
        self.least = self.sent + int(self._gather.min())
        self.rooted = facts.held or self.sent <= int(self._nbytes @ holders[:, self._near[0]])

    def give(self, load: Ints, count: int, cap: int | None) -> Ints:
        """Choose owners for up to ``count`` jobs and book what everyone sends.

        Args:
            cap: load up to which ranks that have most of the job are taken although others are less busy; None if others
                must not own it.
        """
        if self._whole:
            owners = self._levelled(load, count, self._near)
            after = load[self._near] - self.duty[self._near] * count
            after += self.sent * np.bincount(np.searchsorted(self._near, owners), minlength=len(self._near))
            if cap is None or after.max() <= cap:
                load -= self.duty * count
                load[self._near] = after
                return owners
        cost = load - self.duty + self.sent
        near = self._near[np.argsort(cost[self._near], kind="stable")]
        if cap is not None:
            near = near[cost[near] <= max(cap, int(cost.min()))]
        if not len(near):
            return self._book(load, np.lexsort((self._gather, cost))[:1])
        turn = cost[near] <= cost[near[0]] + self.sent  # until the first of them would be the least busy again
        return self._book(load, near[turn][:count])

    def give_beside(self, load: Ints, firm: Ints, count: int, cap: int) -> Ints:
        """Choose owners for as many jobs as holders on a receiver's host take up to ``cap``, at most ``count``; book them.

        Args:
            firm: load without what replicas could take over, which is all that is certain as long as jobs are given out.
        """
        count = min(count, int(np.maximum(0, (cap - firm[self._beside]) // self.sent).sum()))
        if not count:
            return self._beside[:0]
        owners = self._levelled(firm, count, self._beside)
        load -= self.duty * count
        load += self.sent * np.bincount(owners, minlength=len(load))
        return owners

    def _levelled(self, load: Ints, count: int, near: Ints) -> Ints:
        """Owners for ``count`` jobs among the ranks that have all of it, each time the least busy of them."""
        at = load[near]
        rising = np.sort(at)
        level = (np.cumsum(rising) + count * self.sent) / np.arange(1, len(at) + 1)
        level = level[np.flatnonzero(level <= np.append(rising[1:], np.inf))[0]]  # up to which all jobs together fill them
        rank, place = expand(np.maximum(0, (level - at) // self.sent + 1).astype(np.int64))
        return near[rank[np.lexsort((rank, at[rank] + place * self.sent))[:count]]]

    def give_to(self, owner: int, load: Ints, count: int) -> Ints:
        """Book ``count`` jobs for one owner."""
        load -= self.duty * count
        load[owner] += self.sent * count
        sender = self._contributor[self._sets, owner]
        np.add.at(load, sender, np.where(sender == owner, 0, self._nbytes * count))
        return np.full(count, owner)

    def _book(self, load: Ints, owners: Ints) -> Ints:
        load -= self.duty * len(owners)
        load[owners] += self.sent
        sender = self._contributor[self._sets[:, None], owners]
        np.add.at(load, sender, np.where(sender == owners, 0, self._nbytes[:, None]))
        return owners
