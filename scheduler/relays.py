"""Who passes a bucket on: between hosts it travels once for each host of a target, not once for each rank there.

Of the ranks of a target that get the same buckets, those on one host that is not the owner's take turns: one gets a bucket
from its owner and sends it to the others. The first bucket of every receiver comes from its owner all the same:
with ``streamed`` landing live memory is opened once it has come, and a rank that has not opened its own passes nothing on.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from .columns import Ints, ints
from .packing import Tasks
from .regions import Mask, expand
from .sides import Sides

Audiences = Sequence[tuple[int, ...]]


class Hops(NamedTuple):
    """Rows sorted by task, then by receiver: ``via`` sends task ``task`` to ``receiver``; -1 stands for its owner.

    Receivers are positions among all receivers of the plan.
    """

    task: Ints
    receiver: Ints
    via: Ints


class Relays:
    """Answers for any tasks of a plan how they reach their receivers.

    Args:
        sides: who is on which host.
        audiences: receivers of a task, by audience.
        tasks: of the plan.
        targets: those whose ranks may pass on.
    """

    def __init__(self, sides: Sides, audiences: Audiences, tasks: Tasks, targets: Collection[int]) -> None:
        self._tasks = tasks
        self._size = ints([len(audience) for audience in audiences])
        self._first = np.cumsum(self._size) - self._size
        self._receiver = ints([r for audience in audiences for r in audience])
        self._hosts = sides.host_of_receiver
        self._host_of_owner = sides.host_of_rank
        self._group(sides, audiences, frozenset(targets))
        self._opens = self._first_tasks(len(sides.receivers))
        order = np.argsort(tasks.audience, kind="stable")
        self._turn = np.empty(len(order), np.int64)
        self._turn[order] = expand(np.bincount(tasks.audience, minlength=len(audiences)))[1]

    def hops(self, tasks: Ints) -> Hops:
        """How these tasks (rising) reach each of their receivers."""
        parent, place = expand(self._size[self._tasks.audience[tasks]])
        task = tasks[parent]
        entry = self._first[self._tasks.audience[task]] + place
        receiver = self._receiver[entry]
        turn = self._member[self._group_first[entry] + self._turn[task] % self._group_size[entry]]
        near = self._host_of_owner[self._tasks.owner[task]] == self._hosts[receiver]
        straight = near | (turn == receiver) | self._opens[task] | (self._tasks.nbytes[task] == 0)
        return Hops(task, receiver, np.where(straight, -1, turn))

    def _group(self, sides: Sides, audiences: Audiences, targets: frozenset[int]) -> None:
        """For every entry of every audience: the ranks of its target on its host that are in it, too."""
        hosts = sides.receiver_hosts
        members: list[int] = []
        first, size = np.empty(len(self._receiver), np.int64), np.empty(len(self._receiver), np.int64)
        for at, audience in zip(self._first.tolist(), audiences, strict=True):
            places = sorted(range(len(audience)), key=lambda p: (sides.receivers[audience[p]].target, hosts[audience[p]], p))
            for (target, _), beside in itertools.groupby(
                places, key=lambda p: (sides.receivers[audience[p]].target, hosts[audience[p]])
            ):
                group = list(beside)
                for place in group:
                    passes = target in targets
                    first[at + place] = len(members) if passes else len(members) + group.index(place)
                    size[at + place] = len(group) if passes else 1
                members += [audience[place] for place in group]
        self._member, self._group_first, self._group_size = ints(members), first, size

    def _first_tasks(self, receivers: int) -> Mask:
        """Whether a task is the first that has bytes for one of its receivers."""
        count = len(self._tasks.owner)
        first_of_audience = np.full(len(self._size), count, np.int64)
        filled = np.flatnonzero(self._tasks.nbytes)
        np.minimum.at(first_of_audience, self._tasks.audience[filled], filled)
        first_of_receiver = np.full(receivers, count, np.int64)
        np.minimum.at(first_of_receiver, self._receiver, np.repeat(first_of_audience, self._size))
        opens = np.zeros(count + 1, bool)
        opens[first_of_receiver] = True
        return opens[:count]
