"""Hundreds of pushes, a tenth of which fail at a random point: nothing grows, on either side."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

PUSHES = 500
WARM = 50
EVERY = 10
SEED = 20
MODEL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG: dict[str, Any] = {"max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB", "push_timeout_s": 30.0, "target_timeout_s": 5.0}
TARGET_POINTS = ["begin", "finish", "receive", "fence.vote"]
SOURCE_POINTS = ["manifest", "prepare", "send", "step:start", "step:done"]
GROWTH_BYTES = 16 * 2**20
SPREAD = {"fds": 4, "threads": 2, "shared_maps": 2, "tasks": 4}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "landing"), [("shm", "staged"), ("gloo", "streamed"), ("shm", "mapped")])
async def test_nothing_grows(cluster, transport: str, landing: str) -> None:
    build = {"model": MODEL, "movable": landing == "mapped"}
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": MODEL, "layout": "fsdp"}), cluster.target("a", build=build)
    )
    await cluster.connect(source, [target], transport=transport, landing=landing, **CONFIG)
    workers = {"rank 0": source.ranks[0], "rank 1": source.ranks[1], "target": target.leader}
    choose = random.Random(SEED)
    failed: list[str] = []
    seen: dict[str, list[dict[str, int]]] = {name: [] for name in workers}
    for version in range(1, PUSHES // 3 + 1):
        await source.become(version)
        point = choose.choice(TARGET_POINTS + SOURCE_POINTS) if version % EVERY == 5 else ""
        if point:
            worker = target.leader if point in TARGET_POINTS else choose.choice(source.ranks)
            await worker.call(
                "arm", point=point, action="raise", nth=choose.randint(1, 2) if point in ("receive", "prepare") else 1
            )
        reports = await source.each("push", version=version)
        ok = all(isinstance(report, dict) and report["ok"] for report in reports)
        assert ok == (not point), (point, reports)
        if ok:
            assert await target.leader.call("serve_once") == {"version": version, "saw": [float(version)]}
        else:
            failed.append(point)
            await asyncio.gather(*(worker.call("release") for worker in workers.values()))
        if version >= WARM and version % EVERY == 0:  # after a push that went well
            for name, worker in workers.items():
                seen[name].append(await worker.call("vitals"))
    assert len(failed) >= PUSHES // 3 // EVERY - 1
    for name, rows in seen.items():
        flat(name, rows)
    await source.all("close")
    await target.leader.call("close")


def flat(name: str, rows: list[dict[str, int]]) -> None:
    """Counts come back to what they were; memory of the last third is not above that of the first one."""
    for what, spread in SPREAD.items():
        values = [row[what] for row in rows]
        assert values[-1] <= values[0] + spread, (name, what, values)
    memory = [row["rss"] for row in rows]
    third = max(1, len(memory) // 3)
    assert min(memory[-third:]) - min(memory[:third]) <= GROWTH_BYTES, (name, memory)
