"""Large segments over gloo: out of the trainer's memory, into live parameters, without a copy on either side."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

MODEL = {"kind": "stamp", "tensors": 4, "width": 512, "rows": 2048}  # shards of up to 2 MiB
SIZES = {"max_tmp_bytes": "16MiB", "bucket_bytes": "4MiB", "transport": "gloo", "route": "direct"}
LIMITS = {"push_timeout_s": 15.0, "target_timeout_s": 4.0, "connect_timeout_s": 40.0}


async def make(cluster: Any, *, ranks: int = 2, **config: Any) -> tuple[Any, Any]:
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": MODEL, "layout": "fsdp"}), cluster.target("one", ranks=ranks, build={"model": MODEL})
    )
    await cluster.connect(source, [target], **{**SIZES, **LIMITS, **config})
    return source, target


async def versions(target: Any) -> list[list[float]]:
    return [await worker.call("versions") for worker in target.ranks]


@pytest.mark.parametrize("landing", ["streamed", "staged"])
@pytest.mark.parametrize("verify", [True, False])
async def test_every_element_arrives(cluster: Any, landing: str, verify: bool) -> None:
    source, target = await make(cluster, landing=landing, verify=verify)
    before = [await worker.call("addresses") for worker in target.ranks]
    for version in (1, 2, 3):
        await source.become(version)
        for worker in target.ranks:
            await worker.call("poison")
        report = await source.push(version)
        assert report["ok"], report["text"]
        assert await versions(target) == [[float(version)]] * 2
    assert [await worker.call("addresses") for worker in target.ranks] == before
    await source.all("close")


@pytest.mark.parametrize("landing", ["streamed", "staged"])
async def test_the_source_is_free_only_when_its_memory_was_sent(cluster: Any, landing: str) -> None:
    """The trainer steps at once when it may: then every byte of the old weights has left."""
    source, target = await make(cluster, landing=landing)
    for version in (1, 2, 3, 4):
        await source.become(version)
        for report in await source.all("push_and_step", version=version):
            assert report["ok"], report["text"]
        assert await versions(target) == [[float(version)]] * 2
    await source.all("close")


async def test_nothing_is_written_before_the_first_byte(cluster: Any) -> None:
    """A push that fails before it sends anything leaves the old version serving, also where data would land in place."""
    source, target = await make(cluster, landing="streamed")
    await source.become(1)
    assert (await source.push(1))["ok"]
    await source.ranks[0].call("arm", point="prepare", action="raise")
    await source.ranks[1].call("arm", point="prepare", action="raise")
    await source.become(2)
    assert all(isinstance(answer, Exception) for answer in await source.each("push", version=2))
    await cluster.until(lambda: target_is(target, "COMMITTED", 1), "the target serves version 1")
    assert await versions(target) == [[1.0]] * 2
    await source.all("release")  # one rank may have heard of the other's failure before its own
    assert (await source.push(3))["ok"] is True  # the content is that of version 2
    assert await versions(target) == [[2.0]] * 2
    await source.all("close")


async def target_is(target: Any, state: str, version: int) -> bool:
    return await target.state() == {"state": state, "version": version}


@pytest.mark.parametrize("point", ["begin", "finish"])
async def test_a_loader_that_raises_is_told_and_fences(cluster: Any, point: str) -> None:
    source, target = await make(cluster, landing="streamed")
    await target.ranks[1].call("arm", point=point, action="raise")
    await source.become(1)
    report = await source.push(1)
    (result,) = report["targets"].values()
    assert not report["ok"] and "LoaderError" in result["error"], report["text"]
    assert (await target.state())["state"] == "FENCED"
    await source.become(2)
    report = await source.push(2)
    assert report["ok"], report["text"]
    assert await versions(target) == [[2.0]] * 2
    await source.all("close")


async def test_a_source_that_dies_in_the_middle_leaves_a_fence(cluster: Any) -> None:
    """What is under way into live memory ends with the link; the target serves nothing."""
    source, target = await make(cluster, landing="streamed", bucket_bytes="1MiB", max_tmp_bytes="4MiB", send_concurrency=1)
    await source.become(1)
    assert (await source.push(1))["ok"]
    await source.ranks[1].call("arm", point="send", action="kill", nth=2)
    await source.become(2)
    answers = await source.each("push", version=2)
    assert all(isinstance(answer, Exception) for answer in answers)
    await cluster.until(lambda: fenced(target), "the target is fenced")
    for worker in target.ranks:
        await worker.call("poison")
    seen = await versions(target)
    await asyncio.sleep(0.2)  # nothing may come late
    assert await versions(target) == seen == [[-1.0]] * 2


async def fenced(target: Any) -> bool:
    return (await target.state())["state"] == "FENCED"


@pytest.mark.parametrize("action", ["stop", "kill"])
async def test_a_target_that_goes_away_gives_the_source_back(cluster: Any, action: str) -> None:
    """Memory that is lent to a send that never ends is free again once the target was given up; the others commit."""
    source, target = await make(cluster, landing="streamed")
    other = await cluster.target("two", build={"model": MODEL})
    await source.all("close")
    await cluster.connect(source, [target, other], **{**SIZES, **LIMITS, "landing": "streamed"})
    await target.ranks[1].call("arm", point="receive", action=action, nth=2)
    await source.become(1)
    reports = await source.all("push_and_step", version=1)
    gone, kept = (reports[0]["targets"][address] for address in source.addresses)
    assert not gone["ok"] and "TargetLost" in gone["error"], reports[0]["text"]
    assert kept["ok"], reports[0]["text"]
    assert await versions(other) == [[1.0]]
