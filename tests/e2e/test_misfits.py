"""Targets of real processes that come back with another model, and a source of two ranks that goes on with the others."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

MODEL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG = {"max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB", "push_timeout_s": 20.0, "target_timeout_s": 5.0}


async def come_back(cluster: Any, target: Any, model: dict[str, Any]) -> None:
    """All ranks of the target die, and start anew with this model."""
    for worker in target.ranks:
        worker.kill()
        assert await worker.ended() == -signal.SIGKILL
    for rank in range(len(target.ranks)):
        target.ranks[rank] = await cluster.worker("target", f"{target.name}-{rank}-again")
        await cluster.build_rank(target, rank, {"model": model})

    async def is_ready() -> bool:
        return (await target.leader.call("status"))["ready"]

    await cluster.until(is_ready, f"{target.name} is whole")


async def test_a_target_with_another_model_does_not_hold_up_the_others(cluster) -> None:
    source, one, two = await asyncio.gather(
        cluster.source(2, build={"model": MODEL, "layout": "fsdp"}),
        cluster.target("one", build={"model": MODEL}),
        cluster.target("two", ranks=2, build={"model": MODEL}),
    )
    await cluster.connect(source, [one, two], **CONFIG)
    await source.become(1)
    assert (await source.push(1))["ok"]
    await come_back(cluster, two, MODEL | {"rows": 96})
    for version in (2, 3):
        await source.become(version)
        report = await source.push(version)
        assert report["targets"][one.address]["ok"], report["text"]
        misfit = report["targets"][two.address]
        assert not misfit["ok"]
        assert "PlanError" in misfit["error"], report["text"]
        assert "came back with other tensors" in misfit["message"]
        assert await one.leader.call("versions") == [float(version)]
        assert await two.state() == {"state": "FENCED", "version": None}
    await come_back(cluster, two, MODEL)
    await source.become(4)
    report = await source.push(4)
    assert report["ok"], report["text"]
    for target in (one, two):
        assert await target.state() == {"state": "COMMITTED", "version": 4}
        for worker in target.ranks:
            assert await worker.call("versions") == [4.0]
    await source.all("close")
    await asyncio.gather(*(rank.call("close") for target in (one, two) for rank in target.ranks))
