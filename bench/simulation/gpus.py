"""A cluster of accelerators: streams, copy engines and links, each of which serves one after the other."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence

from .hardware import Gpus
from .legs import Leg, Line, Then, carry
from .load import Load, Share
from .world import Slowness, Terms


class GpuWorld:
    """Implements `World`.

    Links: each rank has NVLink to the ranks of its host, and its share of a network card to all others, both ways apart.
    A receiver posts buckets in plan order, as over two-sided transports: two at a time into a ring (``streamed``), or
    four into landing memory (``staged``).
    """

    polled = True
    acknowledged = False
    instant = False
    landers = 2
    ring: int | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, load: Load, hardware: Gpus, terms: Terms) -> None:
        self._loop, self._load, self._hardware, self._terms = loop, load, hardware, terms
        self._slow = Slowness(terms.disturbance)
        streamed = terms.landing == "streamed"
        self.window: int | None = 2 if streamed else 4
        self.frees = "landing" if streamed else "arrival"
        self._lines: dict[str, list[Line]] = defaultdict(list)
        sources, receivers = range(len(load.sources)), range(len(load.receivers))
        self._python = [self._line("python", f"source rank {r}", 1.0) for r in sources]
        self._pcie = [self._line("h2d", f"PCIe of source rank {r}", hardware.h2d) for r in sources]
        self._stream = [self._line("kernel", f"GPU of source rank {r}", hardware.kernel) for r in sources]
        self._out = self._links("source rank", "out of", load.source_hosts)
        self._back = self._links("source rank", "into", load.source_hosts)
        self._into = self._links("receiver", "into", load.receiver_hosts)
        self._landing = [self._line("install", f"GPU of receiver {r}", hardware.copy) for r in receivers]
        self._received = [0.0] * len(load.receivers)

    def _line(self, kind: str, where: str, rate: float) -> Line:
        line = Line(self._loop, kind, where, rate)
        self._lines[kind].append(line)
        return line

    def _links(self, side: str, way: str, hosts: Sequence[int]) -> list[tuple[Line, Line]]:
        """NVLink and network card of each rank, one way."""
        cards: dict[tuple[int, int], Line] = {}
        seen: dict[int, int] = defaultdict(int)
        found = []
        for rank, host in enumerate(hosts):
            card = host, seen[host] // self._hardware.ranks_per_nic
            seen[host] += 1
            if card not in cards:
                cards[card] = self._line(f"nic {way.partition(' ')[0]}", f"NIC {way} {side} {rank}", self._hardware.nic)
            near = self._line(f"nvlink {way.partition(' ')[0]}", f"NVLink {way} {side} {rank}", self._hardware.nvlink)
            found.append((near, cards[card]))
        return found

    def h2d(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        line = self._pcie[rank]
        nbytes = share.files or share.own
        line.run(self._slow.of(rank) * (self._hardware.launch_s + nbytes / line.rate), share.index, after, then)

    def _kernel(self, rank: int, nbytes: float, task: int, after: Leg | None, then: Then) -> None:
        line, hardware = self._stream[rank], self._hardware
        seconds = self._slow.of(rank) * (hardware.launch_s + nbytes / line.rate)
        self._python[rank].run(hardware.task_s, task, after, lambda leg: line.run(seconds, task, leg, then))

    def pack(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        self._kernel(rank, 2 * share.own, share.index, after, then)

    def message(self, rank: int, owner: int, nbytes: int, *, task: int, after: Leg | None, then: Then) -> None:
        near = self._load.source_hosts[rank] == self._load.source_hosts[owner]
        out, into = self._out[rank][not near], self._back[owner][not near]
        self._carry(out, into, rank, nbytes, near=near, task=task, after=after, then=then)

    def early(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        if share.takes:
            then(after or _nothing(self._loop))
        else:
            self.late(rank, share, after, then)

    def late(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        """One kernel for everything, once it is there."""
        taken = sum(nbytes for _, nbytes in share.takes)
        self._kernel(rank, share.own + taken + share.nbytes, share.index, after, then)

    def deliver(self, rank: int, receiver: int, share: Share, after: Leg | None, then: Then) -> None:
        near = self._load.source_hosts[rank] == self._load.receiver_hosts[receiver]
        out, into = self._out[rank][not near], self._into[receiver][not near]
        self._carry(out, into, rank, share.nbytes, near=near, task=share.index, after=after, then=then)

    def _carry(
        self, out: Line, into: Line, rank: int, nbytes: int, *, near: bool, task: int, after: Leg | None, then: Then
    ) -> None:
        latency = self._hardware.launch_s + (self._hardware.local_s if near else self._hardware.wire_s)
        carry(
            out, into, nbytes, latency_s=latency, slow=self._slow.of(rank), task=task, after=after,
            then=then,
        )  # fmt: skip

    def land(self, receiver: int, task: int, after: Leg | None, then: Then) -> None:
        nbytes = self._load.nbytes[task]
        self._received[receiver] += nbytes
        seconds = self._hardware.launch_s
        if self._terms.landing == "streamed":
            seconds += 2 * nbytes / self._hardware.copy
        if self._terms.verify:
            seconds += nbytes / self._hardware.digest
        self._landing[receiver].run(seconds, task, after, then)

    def commit(self, receiver: int, after: Leg | None, then: Then) -> None:
        staged = self._terms.landing == "staged"
        seconds = 2 * self._received[receiver] / self._hardware.copy if staged else 0.0
        self._landing[receiver].run(self._hardware.launch_s + seconds, -1, after, then)

    def barrier_s(self) -> float:
        return self._hardware.round_s * math.ceil(math.log2(max(2, len(self._load.sources))))

    def control_s(self) -> tuple[float, float]:
        return self._hardware.begin_s, self._hardware.end_s

    def used(self) -> dict[str, float]:
        return {kind: max(line.busy_s for line in lines) for kind, lines in self._lines.items()}


def _nothing(loop: asyncio.AbstractEventLoop) -> Leg:
    return Leg("begin", "", -1, start=loop.time(), end=loop.time(), after=None)
