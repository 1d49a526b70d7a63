"""What a plan asks of each rank, task by task, in bytes: the plan's columns added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from syncline.scheduler.columns import Ints
from syncline.scheduler.plan import Plan


class Share:
    """One task as one source rank sees it. Bytes are wire bytes.

    Attributes:
        nbytes: of the bucket.
        tmp_bytes: temporary, on this rank.
        own: what this rank puts in of its own, in ``pieces`` copies.
        takes, gives: messages from and to other source ranks, as (peer, bytes).
        receivers: places among the plan's receivers; empty unless this rank owns the task.
    """

    __slots__ = ("files", "gives", "group", "index", "nbytes", "own", "owner", "pieces", "receivers", "takes", "tmp_bytes")

    def __init__(
        self, index: int, group: int, nbytes: int, *, tmp_bytes: int, files: int, own: int, pieces: int, owner: bool,
        receivers: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.index = index
        self.group = group
        self.nbytes = nbytes
        self.tmp_bytes = tmp_bytes
        self.files = files
        self.own = own
        self.pieces = pieces
        self.owner = owner
        self.receivers = receivers
        self.takes: list[tuple[int, int]] = []
        self.gives: list[tuple[int, int]] = []


@dataclass(frozen=True, kw_only=True)
class Load:
    """A whole plan.

    Attributes:
        sources: for each source rank its shares in plan order.
        receivers: for each receiver the tasks that it takes, in plan order.
        nbytes, segments: of each task.
        source_hosts, receiver_hosts: equal numbers are one host.
        target_of: target of each receiver.
        groups: mesh groups in order.
    """

    sources: Sequence[Sequence[Share]]
    receivers: Sequence[Sequence[int]]
    nbytes: Sequence[int]
    segments: Sequence[int]
    source_hosts: Sequence[int]
    receiver_hosts: Sequence[int]
    target_of: Sequence[int]
    groups: tuple[int, ...]


def load_of(plan: Plan) -> Load:
    """Add up a plan."""
    routes = plan.routes
    tasks, shares, messages = routes.tasks, routes.gather.shares, routes.gather.messages
    own, pieces = _contributed(plan)
    segments = np.diff(tasks.first)
    audiences = routes.patterns.audiences
    ranks: list[list[Share]] = [[] for _ in range(plan.world_size)]
    known: dict[tuple[int, int], Share] = {}
    owner, audience = tasks.owner.tolist(), tasks.audience.tolist()
    columns = _lists(shares.task, shares.rank, shares.tmp_bytes, shares.file_bytes, own, pieces)
    nbytes, group = tasks.nbytes.tolist(), tasks.group.tolist()
    for task, rank, tmp, files, mine, count in zip(*columns, strict=True):
        owns = owner[task] == rank
        share = Share(
            task, group[task], nbytes[task], tmp_bytes=tmp, files=files, own=mine, pieces=count, owner=owns,
            receivers=tuple(audiences[audience[task]]) if owns else (),
        )  # fmt: skip
        ranks[rank].append(share)
        known[task, rank] = share
    for task, rank, size in zip(*_lists(messages.task, messages.rank, messages.nbytes), strict=True):
        known[task, rank].gives.append((owner[task], size))
        known[task, owner[task]].takes.append((rank, size))
    traffic = plan.traffic
    return Load(
        sources=ranks,
        receivers=_taken(audiences, tasks.audience, len(plan.receivers)),
        nbytes=nbytes,
        segments=segments.tolist(),
        source_hosts=traffic.source_hosts.tolist(),
        receiver_hosts=traffic.receiver_hosts.tolist(),
        target_of=[receiver.target for receiver in plan.receivers],
        groups=plan.groups,
    )


def _contributed(plan: Plan) -> tuple[Ints, Ints]:
    """For each share: bytes that the rank puts in, and in how many pieces."""
    routes, world = plan.routes, plan.world_size
    shares, rows, patterns = routes.gather.shares, routes.gather.contributions, routes.patterns
    keys = shares.task * world + shares.rank
    place = np.searchsorted(keys, routes.segments.task[rows.segment] * world + rows.rank)
    nbytes = patterns.fragments.nbytes[patterns.holds.fragment[rows.hold]]
    size = len(keys)
    return np.bincount(place, nbytes, size).astype(np.int64), np.bincount(place, minlength=size)


def _taken(audiences: Sequence[Sequence[int]], audience: Ints, receivers: int) -> list[list[int]]:
    """Tasks of each receiver."""
    found: list[list[Ints]] = [[] for _ in range(receivers)]
    order = np.argsort(audience, kind="stable")
    stops = np.searchsorted(audience[order], np.arange(len(audiences) + 1))
    for number, members in enumerate(audiences):
        rows = order[stops[number] : stops[number + 1]]
        for receiver in members:
            found[receiver].append(rows)
    return [np.sort(np.concatenate(rows)).tolist() if rows else [] for rows in found]


def _lists(*columns: Any) -> list[list[Any]]:
    return [column.tolist() for column in columns]
