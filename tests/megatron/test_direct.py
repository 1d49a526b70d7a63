"""From Megatron's shards straight into a tensor-parallel engine's, fused as engines fuse them."""

from __future__ import annotations

import pytest

JOBS = {
    "tp2 to tp2": (2, {"tp": 2}, "qwen2"),
    "pp2 to tp2": (2, {"pp": 2}, "qwen2"),
    "tp2 pp2 to tp2": (4, {"tp": 2, "pp": 2}, "qwen3"),
    "ep2 to tp2": (2, {"ep": 2}, "qwen3_moe"),
    "ep2 etp2 tp2 to tp2": (4, {"ep": 2, "tp": 2, "etp": 2}, "qwen3_moe"),
}


@pytest.mark.parametrize("route", ["direct", "gather"])
@pytest.mark.parametrize("job", JOBS)
def test_a_sharded_engine_gets_its_slices(world, job, route):
    ranks, parallel, family = JOBS[job]
    world.job(ranks, parallel, family=family, seed=21)
    listen = [f"unix:{world.folder}/shard-{next(world._count)}.sock" for _ in range(2)]
    address = world.engine.call("serve_shards", family=family, seed=21, listen=listen)
    world.connect(address, route=route)
    report = world.push()
    assert world.engine.call("compare_shards") == []
    # No rank of the engine gets a byte that it does not keep.
    assert report["content"] == world.engine.call("shard_bytes")
    if route == "direct":
        assert report["messages"] == 0  # nothing was gathered anywhere
