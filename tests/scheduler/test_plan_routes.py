"""What goes straight from shard to shard, what is gathered, and what a plan says about it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from syncline.scheduler.layout import Box, Manifest
from syncline.scheduler.plan import Plan, PlanOptions, build_plan

LEAF = 4096
OPTIONS = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 23, leaf_bytes=LEAF, route="auto")


def column_shards(sim, tensors: dict, world: int) -> list[Manifest]:
    """Ranks that hold columns: no run of rows is held by one of them, however a tensor is split."""
    held = [
        {
            name: (shape, dtype, 0, [Box(start=(0, shape[1] // world * r), shape=(shape[0], shape[1] // world))])
            for name, (shape, dtype) in tensors.items()
        }
        for r in range(world)
    ]
    return [sim.manifest(rank, world, tensors=tensors) for rank, tensors in enumerate(held)]


def messages(plan: Plan) -> list[tuple[int, int, int]]:
    """(contributor, owner, bytes) of every message, from the programs."""
    return [
        (rank, task.owner, m.nbytes)
        for rank in range(plan.world_size)
        for task in plan.source_program(rank).tasks
        for m in task.sends
    ]


def owners(plan: Plan, name: str) -> dict[Box, int]:
    """Who sends which box of a tensor."""
    return {part.box: part.owner for part in plan.explain(name).parts}


def test_large_tensors_are_cut_at_the_shards_and_small_ones_are_gathered(sim) -> None:
    tensors = {"large": ((64, 64), "float32"), "small": ((64, 4), "float32")}
    plan = build_plan(column_shards(sim, tensors, 4), [[sim.manifest(tensors=tensors)]], OPTIONS)
    boxes = [Box(start=(0, 16 * r), shape=(64, 16)) for r in range(4)]
    assert owners(plan, "large") == {box: r for r, box in enumerate(boxes)}
    routing = plan.routing
    assert (routing.direct_tensors, routing.direct_nbytes) == (1, 64 * 64 * 4)
    assert (routing.gathered_tensors, routing.gathered_nbytes) == (1, 64 * 4 * 4)
    assert routing.why["small"].names == "small"
    assert routing.moved_nbytes == sum(n for _, _, n in messages(plan)) == 3 * 64 * 4
    assert len(messages(plan)) == routing.messages == 3
    assert "its parts are small: 1" in str(routing)


def test_a_part_of_a_leaf_is_worth_a_cut_and_a_smaller_one_is_not(sim) -> None:
    for rows, cut in ((LEAF // 4 - 1, False), (LEAF // 4, True)):
        tensors = {"w": ((rows, 4), "float32")}  # one column for each of four shards
        plan = build_plan(column_shards(sim, tensors, 4), [[sim.manifest(tensors=tensors)]], OPTIONS)
        assert bool(messages(plan)) != cut
        assert {box.shape[1] for box in owners(plan, "w")} == {1 if cut else 4}


def test_what_one_rank_holds_is_never_cut_however_it_holds_it(sim) -> None:
    """Groups of query heads: several pieces on one rank."""
    groups = [Box(start=(4 * g, 0), shape=(4, 64)) for g in range(8)]
    whole = [sim.manifest(tensors={"q": ((32, 64), "float32", 0, groups)})]
    halves = [sim.manifest(r, 2, tensors={"q": ((32, 64), "float32", 0, groups[4 * r : 4 * r + 4])}) for r in range(2)]
    target = [sim.manifest(tensors={"q": ((32, 64), "float32")})]
    two = {Box(start=(0, 0), shape=(16, 64)): 0, Box(start=(16, 0), shape=(16, 64)): 1}
    for route in ("auto", "direct"):
        options = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 23, leaf_bytes=LEAF, route=route)
        assert owners(build_plan(halves, [target], options), "q") == two
        assert owners(build_plan(halves, [halves], options), "q").keys() == set(groups)
        assert owners(build_plan(whole, [target], options), "q") == {Box(start=(0, 0), shape=(32, 64)): 0}


@pytest.mark.parametrize(
    ("parts", "options", "why"),
    [
        ({"whole_tensors": True}, {}, "whole"),
        ({"uncut": {"w"}}, {}, "whole"),
        ({}, {"route": "gather"}, "route"),
        ({"movable": True}, {"landing": "mapped"}, "mapped"),
    ],
)
def test_why_a_tensor_is_gathered(sim, parts, options, why) -> None:
    tensors = {"w": ((64, 64), "float32"), "v": ((64, 64), "float32")}
    options = {"bucket_bytes": 1 << 20, "max_tmp_bytes": 1 << 23, "leaf_bytes": LEAF, "route": "auto"} | options
    plan = build_plan(column_shards(sim, tensors, 2), [[sim.manifest(tensors=tensors, **parts)]], PlanOptions(**options))
    assert set(plan.routing.why) == {why}
    gathered = {"w"} if "uncut" in parts else {"w", "v"}
    assert {name for name in tensors if any(part.why for part in plan.explain(name).parts)} == gathered
    assert plan.routing.direct_tensors == 2 - len(gathered)


def test_uncut_names_survive_the_wire_and_change_the_digest(sim) -> None:
    tensors = {"w": ((8, 8), "float32")}
    plain, fixed = sim.manifest(tensors=tensors), sim.manifest(tensors=tensors, uncut={"w"})
    assert Manifest.from_bytes(fixed.to_bytes()).uncut == {"w"}
    assert plain.digest != fixed.digest


def test_targets_are_served_each_in_its_own_way(sim) -> None:
    """One takes whole tensors, one slices: the second gets them from the shards all the same."""
    tensors = {"w": ((64, 64), "float32")}
    halves = [Box(start=(32 * r, 0), shape=(32, 64)) for r in range(2)]
    sliced = [sim.manifest(r, 2, tensors={"w": ((64, 64), "float32", 0, [halves[r]])}) for r in range(2)]
    whole = [sim.manifest(tensors=tensors, whole_tensors=True)]
    plan = build_plan(column_shards(sim, tensors, 2), [whole, sliced], OPTIONS)
    parts = plan.explain("w").parts
    assert {p.why for p in parts if p.receivers == ((0, 0),)} == {"whole"}
    straight = {(p.box.start, p.box.shape, p.owner, p.why) for p in parts if (0, 0) not in p.receivers}
    assert straight == {((32 * r, 32 * c), (32, 32), c, None) for r in range(2) for c in range(2)}


def test_the_cut_of_a_target_does_not_depend_on_other_targets(sim) -> None:
    """Its digest names what it holds: it must stay the same when others come and go."""
    tensors = {"w": ((64, 64), "float32"), "n": ((64,), "float32")}
    halves = [Box(start=(0, 32 * r), shape=(64, 32)) for r in range(2)]
    sliced = [sim.manifest(r, 2, tensors={"w": ((64, 64), "float32", 0, [halves[r]])}, optional={"n"}) for r in range(2)]
    sources, full = sim.row_shards(tensors, 4), [sim.manifest(tensors=tensors)]

    def items(plan: Plan, target: int) -> set[tuple[str, int]]:
        program = plan.target_program(target, 0)
        return {(x.segment.name, x.segment.leaves.item_uid) for task in program.tasks for x in task.landings}

    alone, beside = build_plan(sources, [full], OPTIONS), build_plan(sources, [full, sliced, full], OPTIONS)
    assert items(alone, 0) == items(beside, 0) == items(beside, 2)


def test_a_holder_that_would_send_far_more_than_others_is_spared_unless_it_spares_nothing(sim) -> None:
    """A pipeline stage with three quarters of the weights: with several targets others send for it, with one they can't."""
    tensors = {f"w{i}": ((64, 64), "float32") for i in range(40)}
    split = [dict(list(tensors.items())[:30]), dict(list(tensors.items())[30:])]
    sources = [sim.manifest(r, 2, tensors=split[r]) for r in range(2)]
    one = build_plan(sources, [[sim.manifest(tensors=tensors)]], OPTIONS)
    assert one.sent == (30 * 16384, 10 * 16384)
    assert not one.routing.gathered_tensors
    four = build_plan(sources, [[sim.manifest(tensors=tensors)]] * 4, OPTIONS)
    assert four.balance < 1.2
    assert set(four.routing.why) == {"balance"}
    pinned = build_plan(sources, [[sim.manifest(tensors=tensors)]] * 4, PlanOptions(
        bucket_bytes=1 << 20, max_tmp_bytes=1 << 23, leaf_bytes=LEAF, route="direct"))  # fmt: skip
    assert pinned.sent == (4 * 30 * 16384, 4 * 10 * 16384)


@settings(deadline=None, max_examples=40)
@given(
    route=st.sampled_from(["auto", "gather", "direct"]),
    world=st.integers(1, 6),
    ranks=st.integers(1, 3),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    hosts=st.integers(1, 2),
)
def test_traffic_is_what_programs_send_and_take(sim, *, route, world, ranks, rows, hosts) -> None:
    tensors = {f"w{i}": ((n, 24), "float32") for i, n in enumerate(rows)}
    sources = sim.row_shards(tensors, world, hosts=min(hosts, world))
    targets = [[sim.manifest(r, ranks, tensors=tensors) for r in range(ranks)], sim.row_shards(tensors, ranks)]
    options = PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20, leaf_bytes=256, route=route)
    plan = build_plan(sources, targets, options)
    sent, taken = Counter(), Counter()
    for rank in range(world):
        for task in plan.source_program(rank).tasks:
            for receiver in task.receivers:
                sent[rank, plan.receivers.index(receiver)] += task.nbytes
    for receiver in plan.receivers:
        taken[plan.receivers.index(receiver)] = sum(task.nbytes for task in plan.target_program(*receiver).tasks)
    traffic = plan.traffic
    assert dict(zip(zip(*map(list, traffic.delivered[:2]), strict=True), traffic.delivered.nbytes, strict=True)) == sent
    moved = Counter()
    for a, b, n in messages(plan):
        moved[a, b] += n
    assert dict(zip(zip(*map(list, traffic.moved[:2]), strict=True), traffic.moved.nbytes, strict=True)) == moved
    assert traffic.received.tolist() == [taken[i] for i in range(len(plan.receivers))]
    assert tuple(traffic.sent.tolist()) == plan.sent
    needed = sum(n * 24 * 4 for n in rows) * (ranks + 1)
    assert traffic.needed == plan.routing.direct_nbytes + plan.routing.gathered_nbytes == needed


def test_the_critical_rank_is_the_one_whose_link_takes_longest(sim) -> None:
    tensors = {"w": ((64, 64), "float32")}
    sources = [sim.manifest(0, 1, tensors=tensors, host="a")]
    near, far = ([sim.manifest(tensors=tensors, host=host)] for host in ("a", "b"))
    plan = build_plan(sources, [near, far, far], OPTIONS)
    worst, *_ = plan.traffic.busiest(link=1e6, host=1e9)
    assert (worst.side, worst.rank, worst.sends) == ("source", 0, True)
    assert worst.seconds == pytest.approx(2 * 16384 / 1e6 + 16384 / 1e9)
    tp = sim.row_shards(tensors, 4)
    worst, second, none = build_plan(tp, [far], OPTIONS).traffic.busiest(link=1e6, host=1e6)
    assert (worst.side, worst.rank) == ("receiver", 0)
    assert worst.seconds == pytest.approx(16384 / 1e6)
    assert (second.side, second.seconds) == ("source", pytest.approx(4096 / 1e6))
    assert none.seconds == 0


def test_many_small_tensors_cost_no_more_tasks_or_messages_than_gathered_ones(sim) -> None:
    tensors = {f"t{i}": ((64, 3), "float32") for i in range(2000)} | {"w": ((512, 512), "float32")}
    plans = {
        route: build_plan(sim.row_shards(tensors, 4), [[sim.manifest(tensors=tensors)]], PlanOptions(
            bucket_bytes=1 << 20, max_tmp_bytes=8 << 20, route=route))
        for route in ("gather", "auto", "direct")
    }  # fmt: skip
    segments = {route: len(plan.routes.segments.task) for route, plan in plans.items()}
    assert plans["auto"].total_tasks <= plans["gather"].total_tasks
    assert plans["auto"].routing.messages <= plans["gather"].routing.messages
    assert segments["auto"] <= segments["gather"] + 4
    assert segments["direct"] > 4 * 2000
    assert plans["auto"].routing.moved_nbytes <= plans["gather"].routing.moved_nbytes


def test_small_things_are_gathered_in_few_buckets_of_their_own(sim) -> None:
    """Every other bucket is sent without waiting for anybody."""
    tensors = {f"{name}{i}": ((256, n), "float32") for i in range(60) for name, n in (("w", 256), ("n", 4))}
    options = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 23, leaf_bytes=1 << 16, route="auto")
    plan = build_plan(column_shards(sim, tensors, 4), [[sim.manifest(tensors=tensors)]] * 2, options)
    gathering = {task.index for rank in range(4) for task in plan.source_program(rank).tasks if task.receives}
    kinds = {task.index: {name[0] for name in task.names} for task in plan.tasks}
    assert {index for index, kind in kinds.items() if kind == {"n"}} == gathering
    assert {index for index, kind in kinds.items() if kind == {"w"}} == kinds.keys() - gathering
    assert len(gathering) == 1  # all 240 KiB of them
    assert plan.routing.messages == 3
    assert plan.balance <= 1.1


def test_a_name_that_the_plan_does_not_move_is_not_explained(sim) -> None:
    tensors = {"w": ((8, 8), "float32"), "spare": ((4,), "float32")}
    sources = [sim.manifest(tensors=tensors, optional={"spare"})]
    plan = build_plan(sources, [[sim.manifest(tensors={"w": tensors["w"]})]], OPTIONS)
    for name in ("spare", "unheard of"):
        with pytest.raises(KeyError):
            plan.explain(name)


def test_the_report_counts_tensors_that_are_direct_in_part(sim) -> None:
    wide, norm = ((64, 64), "float32"), ((8,), "float32")
    boxes = [manifest.pieces.box(0) for manifest in sim.row_shards({"wide": wide}, 3)]
    sources = [sim.manifest(r, 3, tensors={"wide": (*wide, 0, [box])}) for r, box in enumerate(boxes)]
    sources[0] = sim.manifest(0, 3, tensors={"wide": (*wide, 0, boxes[:1]), "norm": norm})
    target = [sim.manifest(tensors={"wide": wide, "norm": norm})]
    for nbytes, partly in ((1 << 20, False), (LEAF, True)):  # in parts of 16 rows, of which some lie within a shard of 22
        routing = build_plan(
            sources, [target], PlanOptions(bucket_bytes=nbytes, max_tmp_bytes=1 << 22, leaf_bytes=nbytes)
        ).routing
        assert (routing.direct_tensors, routing.partly_direct_tensors, routing.gathered_tensors) == (1, partly, 1)
        assert ("1 whole tensors, parts of 1 tensors (one rank holds them whole); gathered: " in str(routing)) == partly
        assert routing.direct_in_words.startswith("32 bytes: 1 whole tensors (one") != partly
