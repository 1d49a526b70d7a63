"""One host without accelerators: all processes share its cores and its memory bus."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import Literal

from .fluid import Demand, Fluid, Pool
from .hardware import Cores, Work
from .legs import Leg, Then
from .load import Load, Share
from .world import Slowness, Terms

_RECEIVER_WORKERS = 2
_POSTED = {"staged": 4, "streamed": 8}
"""Buckets that gloo's receiving half has posted at a time, where large segments go straight to where they are to be."""


class HostWorld:
    """Implements `World` for the transports ``shm`` and ``gloo``.

    A source rank is a process with an event loop and ``workers`` threads; a receiver has a loop and two threads. Over
    ``shm`` a bucket is copied (and digested) into shared memory, and receivers are told. Over ``gloo`` segments are
    digested where they lie, and go through the loopback, one message after the other for each pair of processes.
    """

    polled = False

    def __init__(
        self, loop: asyncio.AbstractEventLoop, load: Load, hardware: Cores, terms: Terms, *, transport: Literal["shm", "gloo"],
        ring: int | None = None,
    ) -> None:  # fmt: skip
        self._loop, self._load, self._hardware, self._terms = loop, load, hardware, terms
        self._slow = Slowness(terms.disturbance)
        self._shm = transport == "shm"
        self._host = Fluid(loop, hardware.cores)
        streamed = terms.landing == "streamed"
        self.window = None if self._shm else _POSTED["streamed" if streamed else "staged"]
        self.frees = "arrival"
        self.acknowledged = self._shm and streamed
        self.instant = self._shm and not streamed
        self.landers = _RECEIVER_WORKERS
        self.ring = ring if self._shm and streamed else None
        sources, receivers = range(len(load.sources)), range(len(load.receivers))
        self._loops = [self._pool(1, f"loop of source rank {r}") for r in sources]
        self._workers = [self._pool(terms.workers, f"workers of source rank {r}") for r in sources]
        self._landing_loops = [self._pool(1, f"loop of receiver {r}") for r in receivers]
        self._landing = [self._pool(_RECEIVER_WORKERS, f"workers of receiver {r}") for r in receivers]
        self._links: dict[tuple[str, int, int], Pool] = {}
        self._received: dict[int, int] = defaultdict(int)

    def _pool(self, threads: int, where: str) -> Pool:
        return Pool(self._loop, self._host, threads, where)

    def _work(
        self,
        pool: Pool,
        work: Work,
        nbytes: float,
        pieces: int,
        what: str,
        *,
        rank: int,
        task: int,
        after: Leg | None,
        then: Then,
    ) -> None:
        seconds = self._slow.of(rank) * (nbytes * work.s_per_byte + pieces * self._hardware.piece_s)
        pool.run(seconds, Demand(work.cores, work.bus), what, task=task, after=after, then=then)

    def _python(self, pool: Pool, seconds: float, task: int, after: Leg | None, then: Then) -> None:
        pool.run(seconds, Demand(), "python", task=task, after=after, then=then)

    def h2d(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        self._work(
            self._workers[rank], self._hardware.copy, share.files, 1, "h2d", rank=rank, task=share.index, after=after, then=then
        )

    def pack(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        def packed(leg: Leg) -> None:
            self._work(
                self._workers[rank], self._hardware.copy, share.own, share.pieces, "pack", rank=rank, task=share.index,
                after=leg, then=then,
            )  # fmt: skip

        self._python(self._loops[rank], self._hardware.task_s, share.index, after, packed)

    def message(self, rank: int, owner: int, nbytes: int, *, task: int, after: Leg | None, then: Then) -> None:
        self._send(("gather", rank, owner), nbytes, task=task, after=after, then=then)

    def _send(self, ends: tuple[str, int, int], nbytes: int, *, task: int, after: Leg | None, then: Then) -> None:
        """Through the loopback: one message after the other for each pair of ``ends``. Its latency takes no cores."""
        kind, rank, peer = ends
        if ends not in self._links:
            self._links[ends] = self._pool(1, f"loopback from source rank {rank} to {kind} {peer}")
        link, work = self._links[ends], self._hardware.loopback

        def begin() -> None:
            self._work(link, work, nbytes, 0, "loopback", rank=rank, task=task, after=after, then=then)

        self._loop.call_later(self._hardware.loopback_s, begin)

    def early(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        """Copy and digest what this rank has itself. What gloo can send from where it lies is only digested."""
        hardware, verify = self._hardware, self._terms.verify
        complete = not share.takes
        work = hardware.copy
        if self._shm:
            work = hardware.copy_digest if verify and complete else hardware.copy
        elif complete:
            work = hardware.digest if verify else Work(s_per_byte=0.0)

        def filled(leg: Leg) -> None:
            self._work(
                self._workers[rank], work, share.own, share.pieces, "prepare", rank=rank, task=share.index, after=leg, then=then
            )

        self._python(self._loops[rank], hardware.task_s, share.index, after, filled)

    def late(self, rank: int, share: Share, after: Leg | None, then: Then) -> None:
        """Unpack what has come, and digest all of it."""
        hardware = self._hardware
        taken = sum(nbytes for _, nbytes in share.takes)

        def unpacked(leg: Leg) -> None:
            nbytes = share.nbytes if self._terms.verify else 0
            self._work(
                self._workers[rank], hardware.digest, nbytes, 0, "digest", rank=rank, task=share.index, after=leg, then=then
            )

        self._work(
            self._workers[rank], hardware.copy, taken, len(share.takes), "unpack", rank=rank, task=share.index, after=after,
            then=unpacked,
        )  # fmt: skip

    def deliver(self, rank: int, receiver: int, share: Share, after: Leg | None, then: Then) -> None:
        if self._shm:
            leg = Leg("notify", f"source rank {rank}", share.index, start=self._loop.time(), end=0.0, after=after)
            leg.end = leg.start + self._hardware.notify_s
            self._loop.call_at(leg.end, then, leg)
        else:
            self._send(("receiver", rank, receiver), share.nbytes, task=share.index, after=after, then=then)

    def land(self, receiver: int, task: int, after: Leg | None, then: Then) -> None:
        nbytes, hardware = self._load.nbytes[task], self._hardware
        self._received[receiver] += nbytes
        work = Work(s_per_byte=0.0)
        if self._terms.landing == "streamed" and self._shm:
            work = hardware.copy_digest if self._terms.verify else hardware.copy
        elif self._terms.verify:
            work = hardware.digest

        def landed(leg: Leg) -> None:
            self._work(
                self._landing[receiver],
                work,
                nbytes,
                self._load.segments[task],
                "land",
                rank=-1,
                task=task,
                after=leg,
                then=then,
            )

        self._python(self._landing_loops[receiver], hardware.land_s, task, after, landed)

    def commit(self, receiver: int, after: Leg | None, then: Then) -> None:
        """``staged``: each worker copies its half of everything."""
        threads = _RECEIVER_WORKERS
        nbytes = self._received[receiver] / threads if self._terms.landing == "staged" else 0
        left = threads

        def one(leg: Leg) -> None:
            nonlocal left
            left -= 1
            if not left:
                then(leg)

        for _ in range(threads):
            self._work(
                self._landing[receiver], self._hardware.copy, nbytes, 0, "commit", rank=-1, task=-1, after=after, then=one
            )

    def barrier_s(self) -> float:
        return self._hardware.round_s * math.ceil(math.log2(max(2, len(self._load.sources))))

    def control_s(self) -> tuple[float, float]:
        targets, sources = len(set(self._load.target_of)), len(self._load.sources)
        more = (targets - 1) * self._hardware.target_s + (sources - 1) * self._hardware.source_s
        return self._hardware.begin_s + more / 2, self._hardware.end_s + more / 2

    def used(self) -> dict[str, float]:
        cores, bus = self._host.busy
        return {"cores": cores / self._hardware.cores, "memory bus": bus}
