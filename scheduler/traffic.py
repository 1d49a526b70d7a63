"""Who sends how many bytes to whom in a push, by pairs of ranks, and how long the busiest link takes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .columns import Ints
from .materialize import Routes
from .regions import expand

Floats = npt.NDArray[np.float64]


class Pairs(NamedTuple):
    """Bytes from source rank ``sender[i]`` to ``taker[i]``; sorted by sender, then taker; each pair once."""

    sender: Ints
    taker: Ints
    nbytes: Ints


@dataclass(frozen=True, kw_only=True)
class Busy:
    """A rank and how long its link takes. ``side`` is ``source`` or ``receiver``, ``rank`` its place there."""

    seconds: float
    side: str
    rank: int
    sends: bool


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All bytes of a push on the wire, with what pads segments to their alignment.

    Attributes:
        delivered: from source ranks to receivers (positions among all receivers of the plan).
        passed: from receivers to receivers of the same target on their host (both are such positions).
        moved: from source ranks to the source ranks that assemble buckets.
        padding: of the delivered bytes, those that belong to no tensor.
        source_hosts, receiver_hosts: equal numbers are one host.
    """

    delivered: Pairs
    passed: Pairs
    moved: Pairs
    padding: int
    source_hosts: Ints
    receiver_hosts: Ints

    @property
    def needed(self) -> int:
        """Bytes without padding that receivers get: what they keep."""
        return int(self.delivered.nbytes.sum() + self.passed.nbytes.sum()) - self.padding

    @property
    def sent(self) -> Ints:
        """Bytes that each source rank sends."""
        world = len(self.source_hosts)
        return _by(self.delivered.sender, self.delivered.nbytes, world) + _by(self.moved.sender, self.moved.nbytes, world)

    @property
    def gathered(self) -> Ints:
        """Bytes that each source rank takes from others."""
        return _by(self.moved.taker, self.moved.nbytes, len(self.source_hosts))

    @property
    def received(self) -> Ints:
        """Bytes that each receiver takes."""
        takers = len(self.receiver_hosts)
        return _by(self.delivered.taker, self.delivered.nbytes, takers) + _by(self.passed.taker, self.passed.nbytes, takers)

    def busiest(self, link: float, host: float) -> list[Busy]:
        """Of those who send, who gather and who receive the busiest one each, if every link works at full rate both ways.

        The first of them needs longest: no push is faster over such links.

        Args:
            link: bytes a second of each rank's link to other hosts, each way.
            host: bytes a second of each rank to ranks of its own host.
        """
        sources, receivers, out, moved = self.source_hosts, self.receiver_hosts, self.delivered, self.moved
        near = np.where(sources[out.sender] == receivers[out.taker], host, link)
        beside = np.where(sources[moved.sender] == sources[moved.taker], host, link)
        give = _seconds(out.sender, out.nbytes, len(sources), rate=near)
        give = give + _seconds(moved.sender, moved.nbytes, len(sources), rate=beside)
        take = _seconds(moved.taker, moved.nbytes, len(sources), rate=beside)
        land = _seconds(out.taker, out.nbytes, len(receivers), rate=near)
        beside_them = np.full(len(self.passed.taker), host)
        land = land + _seconds(self.passed.taker, self.passed.nbytes, len(receivers), rate=beside_them)
        found = [
            Busy(seconds=float(cost.max(initial=0.0)), side=side, rank=int(cost.argmax()) if len(cost) else 0, sends=sends)
            for cost, side, sends in ((give, "source", True), (take, "source", False), (land, "receiver", False))
        ]
        return sorted(found, key=lambda busy: -busy.seconds)


def count(routes: Routes) -> Traffic:
    """Add up the tasks and messages of a plan."""
    tasks, messages, world = routes.tasks, routes.gather.messages, routes.sides.world
    delivered, passed = _relayed(routes) if routes.relaying else _straight(routes)
    copies = _sizes(routes)[tasks.audience]
    payload = np.bincount(routes.segments.task, routes.patterns.units.nbytes[routes.segments.unit], len(tasks.owner))
    hosts = [m.host for m in (*routes.sides.manifests, *(m for ms in routes.sides.targets for m in ms))]
    numbers = np.array([hosts.index(host) for host in hosts], np.int64)
    return Traffic(
        delivered=delivered,
        passed=passed,
        moved=_pairs(messages.rank, tasks.owner[messages.task], messages.nbytes, world),
        padding=int(((tasks.nbytes - payload) * copies).sum()),
        source_hosts=numbers[:world],
        receiver_hosts=numbers[world:],
    )


def _sizes(routes: Routes) -> Ints:
    """Receivers of each audience."""
    return np.array([len(receivers) for receivers in routes.patterns.audiences], np.int64)


def _straight(routes: Routes) -> tuple[Pairs, Pairs]:
    """What is delivered and passed on where nobody passes anything on: by owner and audience, not task by task."""
    tasks, audiences, size = routes.tasks, routes.patterns.audiences, _sizes(routes)
    world, kinds, takers = routes.sides.world, len(audiences), len(routes.sides.receivers)
    total = np.bincount(tasks.owner * kinds + tasks.audience, tasks.nbytes, world * kinds).astype(np.int64)
    key = np.flatnonzero(total)
    row, place = expand(size[key % max(kinds, 1)])
    flat = np.concatenate([np.array(receivers, np.int64) for receivers in audiences] or [np.zeros(0, np.int64)])
    taker = flat[(np.cumsum(size) - size)[key[row] % max(kinds, 1)] + place]
    none = np.zeros(0, np.int64)
    return _pairs(key[row] // max(kinds, 1), taker, total[key][row], takers), Pairs(none, none, none)


def _relayed(routes: Routes) -> tuple[Pairs, Pairs]:
    """What is delivered and passed on, of all tasks."""
    tasks, takers = routes.tasks, len(routes.sides.receivers)
    task, receiver, via = routes.relays.hops(np.arange(len(tasks.owner)))
    out, on = via < 0, via >= 0
    return (
        _pairs(tasks.owner[task[out]], receiver[out], tasks.nbytes[task[out]], takers),
        _pairs(via[on], receiver[on], tasks.nbytes[task[on]], takers),
    )


def _pairs(sender: Ints, taker: Ints, nbytes: Ints, takers: int) -> Pairs:
    key, inverse = np.unique(sender * takers + taker, return_inverse=True)
    return Pairs(key // max(takers, 1), key % max(takers, 1), _by(inverse.reshape(-1), nbytes, len(key)))


def _by(index: Ints, nbytes: Ints, size: int) -> Ints:
    return np.bincount(index, nbytes, size).astype(np.int64)


def _seconds(rank: Ints, nbytes: Ints, ranks: int, *, rate: Floats) -> Floats:
    """Seconds of each rank for its bytes, each lot of them at its rate."""
    return np.bincount(rank, nbytes / rate, ranks).astype(np.float64)
