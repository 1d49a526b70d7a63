"""Routes of FSDP shards to whole modules: cut at the shards where that is worth it, gathered where it is not or must be."""

from __future__ import annotations

import asyncio

import pytest

# Tensors of several sizes: the largest have shards above the size of a leaf, from which on `auto` cuts.
LARGE = {"kind": "stamp", "tensors": 4, "width": 256, "rows": 1028}
SMALL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG = {"max_tmp_bytes": "8MiB", "bucket_bytes": "512KiB"}


@pytest.mark.parametrize(
    ("transport", "landing", "route", "model", "reasons"),
    [
        ("shm", "staged", "auto", LARGE, "its parts are small"),
        ("gloo", "streamed", "auto", LARGE, "its parts are small"),
        ("shm", "streamed", "gather", LARGE, "route is 'gather'"),
        ("shm", "mapped", "auto", LARGE, "landing is 'mapped'"),
        ("gloo", "staged", "auto", SMALL, "its parts are small"),
        ("gloo", "staged", "direct", LARGE, ""),
        ("shm", "streamed", "direct", SMALL, ""),
    ],
)
async def test_each_route_moves_every_element(cluster, *, transport, landing, route, model, reasons) -> None:
    build = {"model": model, "movable": landing == "mapped"}
    source, one, two = await asyncio.gather(
        cluster.source(3, build={"model": model, "layout": "fsdp"}),
        cluster.target("one", build=build),
        cluster.target("two", ranks=2, build=build),
    )
    workers = [*one.ranks, *two.ranks]
    await cluster.connect(source, [one, two], transport=transport, landing=landing, route=route, **CONFIG)
    for version in (1, 2, 2):  # the same version again: digests of what was cut are compared, nothing is sent
        await source.become(version)
        report = await source.push(version)
        assert report["ok"], report["text"]
        routing = report["routing"]
        assert bool(routing["gathered"]) == bool(routing["moved"]) == bool(routing["messages"]) == bool(reasons)
        assert (reasons or "nothing is gathered") in report["text"]
        if model is LARGE and route == "auto" and landing != "mapped":
            assert routing["direct"] >= 2, report["text"]
        assert [await worker.call("versions") for worker in workers] == [[float(version)]] * 3
    await source.all("close")
    await asyncio.gather(*(worker.call("close") for worker in workers))
