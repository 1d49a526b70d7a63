"""Hundreds of pushes, a tenth of which fail at a random point: nothing grows, on either side."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

WARM = 50
EVERY = 10
FAILS_AT = 5
SEED = 20
MODEL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG: dict[str, Any] = {"max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB", "push_timeout_s": 30.0, "target_timeout_s": 5.0}
RAISE_IN_TARGET = ["begin", "finish", "fence.vote"]
RAISE_IN_SOURCE = ["manifest", "prepare", "send", "barrier", "step:start", "step:done"]
KILL_TARGET = ["fence.prepare", "fence.vote", "fence.committing"]
GROWTH_BYTES = {"rss": 8 * 2**20, "anonymous": 4 * 2**20}
SPREAD = {"fds": 2, "threads": 1, "shared_maps": 1, "tasks": 2}
"""What may be under way when it is counted."""


class Endurance:
    """A source of two ranks; a target that stays, and one that is killed now and then."""

    def __init__(self, cluster: Any, transport: str, landing: str) -> None:
        self.cluster = cluster
        self.build = {"model": MODEL, "movable": landing == "mapped"}
        self.config = {**CONFIG, "transport": transport, "landing": landing}
        self.choose = random.Random(SEED)
        self.failed: list[str] = []
        self.seen: dict[str, list[dict[str, int]]] = {}

    async def begin(self) -> None:
        self.source, self.stays, self.dies = await asyncio.gather(
            self.cluster.source(2, build={"model": MODEL, "layout": "fsdp"}),
            self.cluster.target("stays", build=self.build),
            self.cluster.target("dies", build=self.build),
        )
        await self.cluster.connect(self.source, [self.stays, self.dies], **self.config)
        self.measured = {"rank 0": self.source.ranks[0], "rank 1": self.source.ranks[1], "target": self.stays.leader}

    async def push(self, version: int, *, fails: bool) -> None:
        point, dies = await self._arm() if fails else ("", False)
        await self.source.become(version)
        reports = await self.source.each("push", version=version)
        ok = all(isinstance(report, dict) and report["ok"] for report in reports)
        assert ok is not fails, (version, point, reports)
        if ok:
            for target in (self.stays, self.dies):
                assert await target.leader.call("serve_once") == {"version": version, "saw": [float(version)]}
            return
        self.failed.append(point)
        if dies:
            await self.dies.leader.ended()
            self.dies.ranks[0] = await self.cluster.worker("target", "again")
            await self.cluster.build_rank(self.dies, 0, self.build)
        await asyncio.gather(*(worker.call("release") for worker in self.measured.values()))

    async def _arm(self) -> tuple[str, bool]:
        """Something will fail in the next push: what, and whether the second target dies of it."""
        kind = self.choose.choice(["raise in target", "raise in source", "kill"])
        if kind == "kill":
            point = self.choose.choice(KILL_TARGET)
            await self.dies.leader.call("arm", point=point, action="kill")
            return point, True
        if kind == "raise in target":
            worker, points = self.stays.leader, RAISE_IN_TARGET
        else:
            worker, points = self.choose.choice(self.source.ranks), RAISE_IN_SOURCE
        point = self.choose.choice(points)
        await worker.call("arm", point=point, action="raise", nth=self.choose.randint(1, 3) if point == "prepare" else 1)
        return point, False

    async def measure(self) -> None:
        for name, worker in self.measured.items():
            self.seen.setdefault(name, []).append(await worker.call("vitals"))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "landing", "pushes"), [("shm", "staged", 500), ("gloo", "streamed", 200), ("shm", "mapped", 200)]
)
async def test_nothing_grows(cluster, transport: str, landing: str, pushes: int) -> None:
    run = Endurance(cluster, transport, landing)
    await run.begin()
    for version in range(1, pushes + 1):
        await run.push(version, fails=version % EVERY == FAILS_AT)
        if version >= WARM and version % EVERY == 0:  # after pushes that went well
            await run.measure()
    assert len(run.failed) == pushes // EVERY
    assert len(set(run.failed)) > 5
    for name, rows in run.seen.items():
        flat(name, rows)
    await run.source.all("close")
    await asyncio.gather(run.stays.leader.call("close"), run.dies.leader.call("close"))


def flat(name: str, rows: list[dict[str, int]]) -> None:
    """Counts stay what they were; memory of the last third is not above that of the first one."""
    for what, spread in SPREAD.items():
        values = [row[what] for row in rows]
        assert max(values[len(values) // 2 :]) <= values[0] + spread, (name, what, values)
    for what, most in GROWTH_BYTES.items():
        values = [row[what] for row in rows]
        third = max(1, len(values) // 3)
        assert min(values[-third:]) - min(values[:third]) <= most, (name, what, values)


@pytest.mark.parametrize("what", [*SPREAD, *GROWTH_BYTES])
def test_growth_would_be_seen(what: str) -> None:
    """The check is able to fail: a leak of one descriptor, or of 64 KiB, a push."""
    row = {"fds": 20, "threads": 6, "shared_maps": 2, "tasks": 5, "rss": 2**28, "anonymous": 2**27}
    rows = [dict(row) for _ in range(45)]
    flat("steady", rows)
    for number, leaking in enumerate(rows):
        leaking[what] += EVERY * number * (2**16 if what in GROWTH_BYTES else 1)
    with pytest.raises(AssertionError):
        flat("leaking", rows)
