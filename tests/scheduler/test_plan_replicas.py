"""Replicas of trainers' real layouts share the load: at most 1.2 times the mean, and from the owner's own host."""

from __future__ import annotations

from itertools import pairwise

import pytest

from syncline.bench.layouts import Model, fsdp
from syncline.bench.models import Architecture
from syncline.bench.splits import Engine, Megatron
from syncline.scheduler.layout import Manifest
from syncline.scheduler.plan import PlanOptions, build_plan

DENSE = Model.of(Architecture(
    layers=4, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=1024, vocab=1000, qk_norm=True
))  # fmt: skip
SPARSE = Model.of(Architecture(
    layers=4, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=1024, vocab=500, experts=8, expert_intermediate=256
))  # fmt: skip


def options(route: str) -> PlanOptions:
    return PlanOptions(bucket_bytes=1 << 18, max_tmp_bytes=1 << 22, leaf_bytes=4096, route=route)


def needed(targets) -> int:
    """Bytes of all pieces of all targets' ranks."""
    return sum(int(m.pieces.shape.prod(axis=1).sum()) * 2 for target in targets for m in target)


@pytest.mark.parametrize("route", ["auto", "gather", "direct"])
@pytest.mark.parametrize(
    ("model", "split"),
    [
        (DENSE, Megatron(tp=2, dp=4)),
        (DENSE, Megatron(tp=2, pp=2, dp=2)),
        (SPARSE, Megatron(tp=2, dp=2, ep=2)),
        (SPARSE, Megatron(tp=2, dp=4, ep=4, etp=2)),
        (SPARSE, Megatron(tp=1, pp=2, dp=4, ep=4)),
    ],
)
@pytest.mark.parametrize("engine", [Engine(tp=2), Engine(tp=4), Engine(tp=8, fused=False)], ids=lambda e: f"tp{e.tp}")
def test_data_parallel_ranks_of_megatron_share_the_load(route, model, split, engine) -> None:
    """KV heads are replicated in targets of more than two ranks: one box for several receivers."""
    targets = [engine.manifests(model, f"e{t}-", 8) for t in range(2)]
    plan = build_plan(split.manifests(model, 4), targets, options(route))
    assert plan.balance <= 1.2
    assert plan.traffic.needed == needed(targets)
    if route == "direct":
        assert not plan.routing.moved_nbytes


@pytest.mark.parametrize("route", ["auto", "gather", "direct"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_of_hsdp_share_the_load(route, replicas) -> None:
    targets = [Engine(tp=4).manifests(DENSE, "e", 8)]
    plan = build_plan(fsdp(DENSE, shards=8 // replicas, replicas=replicas), targets, options(route))
    assert plan.balance <= 1.2
    assert plan.traffic.needed == needed(targets)


def test_more_replicas_send_less_each() -> None:
    target = [Engine(tp=2).manifests(DENSE, "e", 8)]
    most = [max(build_plan(Megatron(tp=2, dp=dp).manifests(DENSE, 2), target, options("auto")).sent) for dp in (1, 2, 4)]
    for fewer, more in pairwise(most):
        assert more < 0.6 * fewer


def test_what_is_gathered_comes_from_the_same_host_where_a_replica_is_there() -> None:
    sources = Megatron(tp=2, pp=1, dp=4).manifests(DENSE, 2)  # each data-parallel replica on a host of its own
    plan = build_plan(sources, [Engine().manifests(DENSE, "e", 8)], options("gather"))
    moved = plan.traffic.moved
    assert len(moved.nbytes)
    assert (moved.sender // 2 == moved.taker // 2).all()


def test_a_key_value_head_that_several_ranks_hold_travels_in_one_bucket_to_all_of_them() -> None:
    plan = build_plan(Megatron(tp=2).manifests(DENSE, 8), [Engine(tp=8).manifests(DENSE, "e", 8)], options("auto"))
    (first, second) = sorted(plan.explain("model.layers.0.self_attn.k_proj.weight").parts, key=lambda part: part.box.start)
    assert [r.rank for r in first.receivers] == [0, 1, 2, 3]
    assert [r.rank for r in second.receivers] == [4, 5, 6, 7]
    assert (first.owner, second.owner) == (0, 1)


@pytest.mark.parametrize("route", ["auto", "gather", "direct"])
def test_a_replica_on_a_receivers_host_sends_to_it_as_long_as_that_is_fair(route) -> None:
    sources = Megatron(dp=2).manifests(DENSE, 1)  # each replica on a host of its own
    halves, quarters = (Engine(tp=tp).manifests(DENSE, "trainer", 8) for tp in (2, 4))  # both on host trainer0
    moved = [Manifest(rank=m.rank, world_size=m.world_size, host="trainer1", layout=m.layout) for m in quarters]
    traffic = build_plan(sources, [halves, moved], options(route)).traffic
    beside = traffic.source_hosts[traffic.delivered.sender] == traffic.receiver_hosts[traffic.delivered.taker]
    assert traffic.delivered.nbytes[beside].sum() > 0.8 * traffic.needed
    crowded = build_plan(sources, [halves], options(route))  # all receivers beside one replica: the other helps
    assert crowded.balance <= 1.2
