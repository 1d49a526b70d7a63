"""Shard to shard: tensor-parallel targets get their boxes straight from the ranks that hold them, into place."""

from __future__ import annotations

import asyncio

import pytest

IDS = [3, 11, 36, 7, 20]
SMALL = {"max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB"}
CASES = [
    ("llama", "fsdp", "2", "layout", "gloo", "staged"),
    ("llama", "tp", "2", "layout", "shm", "streamed"),
    ("llama", "tp", "4", "learned", "gloo", "streamed"),  # more ranks than KV heads
    ("qwen3-moe", "fsdp", "2", "learned", "shm", "staged"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
async def test_boxes_go_from_shard_to_shard(cluster, case: tuple[str, ...]) -> None:
    """Nothing is gathered; every parameter is what the engine's own loader makes of the checkpoint; so are the logits."""
    kind, layout, ranks, how, transport, landing = case
    size = int(ranks)
    model = {"kind": kind, "seed": 1, "ep": kind == "qwen3-moe"}
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": {**model, "ep": False}, "layout": layout}, role="tp_source"),
        cluster.target("tp", ranks=size, build={"model": model, "how": how}, group=True, role="tp_target"),
    )
    before = [await worker.call("addresses") for worker in target.ranks]
    await cluster.connect(source, [target], transport=transport, landing=landing, route="direct", **SMALL)
    for version in (1, 2):
        report = await source.push(version)
        assert report["ok"], report["text"]
        assert report["routing"] == {"messages": 0, "moved": 0, "gathered": 0, "direct": report["routing"]["direct"]}
        assert [await worker.call("compare", model=model) for worker in target.ranks] == [[]] * size
    assert [await worker.call("addresses") for worker in target.ranks] == before
    gaps = await asyncio.gather(*(worker.call("forward_gap", model=model, ids=IDS) for worker in target.ranks))
    assert max(gaps) < 1e-5, gaps
    await source.all("close")
    await asyncio.gather(*(worker.call("close") for worker in target.ranks))


@pytest.mark.parametrize(("transport", "landing"), [("gloo", "staged"), ("shm", "streamed")])
async def test_what_the_engine_computes_goes_through_its_loader(cluster, transport: str, landing: str) -> None:
    """A part of the tensors is loaded by the engine's own loader, the others land directly, and the report tells them apart."""
    model = {"kind": "llama", "seed": 3}
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": model, "layout": "fsdp"}, role="tp_source"),
        cluster.target("tp", ranks=2, build={"model": model, "how": "computing"}, group=True, role="tp_target"),
    )
    said = await target.leader.call("learned")
    assert "19 of 21 tensors land directly, 2 go through the loader" in said
    assert "through the loader: model.norm.weight: the loader computes model.norm.weight from it" in said
    await cluster.connect(source, [target], transport=transport, landing=landing, route="direct", **SMALL)
    for version in (1, 2):
        report = await source.push(version)
        assert report["ok"], report["text"]
        assert report["routing"]["direct"] == 19 and report["routing"]["gathered"] == 2, report["text"]
        assert [await worker.call("compare", model=model) for worker in target.ranks] == [[], []]
    gaps = await asyncio.gather(*(worker.call("forward_gap", model=model, ids=IDS) for worker in target.ranks))
    assert max(gaps) < 1e-5, gaps
    await source.all("close")
