"""Pushes between real processes, in every mode: each element arrives in its place, on every rank, push after push."""

from __future__ import annotations

import asyncio

import pytest

MODEL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG = {"max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB"}
MODES = [("shm", "staged"), ("shm", "streamed"), ("shm", "mapped"), ("gloo", "staged"), ("gloo", "streamed")]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("transport", "landing"), MODES)
async def test_every_element_arrives(cluster, transport: str, landing: str, ranks: int) -> None:
    build = {"model": MODEL, "movable": landing == "mapped"}
    source, one, two = await asyncio.gather(
        cluster.source(ranks, build={"model": MODEL, "layout": "fsdp"}),
        cluster.target("one", build=build),
        cluster.target("two", ranks=2, build=build),
    )
    workers = [*one.ranks, *two.ranks]
    before = [await worker.call("addresses") for worker in workers]
    await cluster.connect(source, [one, two], transport=transport, landing=landing, **CONFIG)
    for version in (1, 2, 3):
        await source.become(version)
        for worker in workers if landing != "mapped" else ():  # there it would be the shared memory that is written
            await worker.call("poison")
        report = await source.push(version)
        assert report["ok"], report["text"]
        assert 0 < report["peak_tmp_bytes"] <= 256 * 1024 or landing != "streamed"
        for target in (one, two):
            assert await target.state() == {"state": "COMMITTED", "version": version}
        assert [await worker.call("versions") for worker in workers] == [[float(version)]] * 3
    after = [await worker.call("addresses") for worker in workers]
    assert (before == after) == (landing != "mapped")
    await source.all("close")
    await asyncio.gather(*(worker.call("close") for worker in workers))


async def test_a_synchronous_trainer(cluster) -> None:
    """`connect_blocking` and `push_blocking`, from a thread without a loop."""
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": MODEL, "layout": "fsdp"}), cluster.target("one", build={"model": MODEL})
    )
    await cluster.connect(source, [target], blocking=True, **CONFIG)
    threads = [vitals["threads"] for vitals in await source.all("vitals")]
    for version in (1, 2):
        await source.become(version)
        report = await source.push(version, blocking=True)
        assert report["ok"], report["text"]
        assert await target.leader.call("versions") == [float(version)]
    await source.all("close", blocking=True)
    assert all(now["threads"] < before for now, before in zip(await source.all("vitals"), threads, strict=True))
