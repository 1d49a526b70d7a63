"""Who sends how much, in which order, with how much temporary memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from syncline.scheduler.layout import Box
from syncline.scheduler.plan import PlanOptions, build_plan

MODEL = {"embed.weight": ((1000, 64), "float32"), "norm.weight": ((64,), "float32")} | {
    f"layers.{i}.{name}.weight": (shape, "float32")
    for i in range(12)
    for name, shape in (("q", (64, 64)), ("up", (160, 64)), ("down", (64, 160)), ("norm", (64,)))
}
OPTIONS = PlanOptions(bucket_bytes=32768, max_tmp_bytes=1 << 20, leaf_bytes=4096)


def sent(plan) -> Counter[int]:
    """Bytes that each rank sends, from its own program."""
    total: Counter[int] = Counter()
    for rank in range(plan.world_size):
        total[rank] = 0
        for task in plan.source_program(rank).tasks:
            total[rank] += task.nbytes * len(task.receivers) + sum(m.nbytes for m in task.sends)
    return total


def imbalance(plan) -> float:
    loads = list(sent(plan).values())
    return max(loads) / (sum(loads) / len(loads))


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (4, 1), (5, 1), (8, 2), (6, 6), (16, 2)])
def test_all_ranks_send_about_the_same(sim, world, replicas, copies) -> None:
    sources = sim.row_shards(MODEL, world, replicas=replicas)
    targets = [[sim.manifest(tensors=MODEL)] for _ in range(copies)]
    plan = build_plan(sources, targets, OPTIONS)
    assert imbalance(plan) <= 1.2
    assert plan.sent == tuple(sent(plan)[rank] for rank in range(world))


def test_one_large_tensor_is_shared_out(sim) -> None:
    tensors = MODEL | {"embed.weight": ((20_000, 64), "float32")}
    options = PlanOptions(bucket_bytes=16 << 20, max_tmp_bytes=64 << 20, leaf_bytes=4096)
    plan = build_plan(sim.row_shards(tensors, 6), [[sim.manifest(tensors=tensors)]] * 2, options)
    assert imbalance(plan) <= 1.05


@pytest.mark.parametrize("landing", ["staged", "mapped"])
def test_ranks_that_hold_nothing_share_the_work(sim, landing) -> None:
    tensors = {name: facts for name, facts in MODEL.items() if facts[0] != (1000, 64)}
    sources = [sim.manifest(rank, 4, tensors=tensors if rank < 2 else {}) for rank in range(4)]
    options = PlanOptions(bucket_bytes=32768, max_tmp_bytes=1 << 20, leaf_bytes=4096, landing=landing)
    plan = build_plan(sources, [[sim.manifest(tensors=tensors, movable=True)] for _ in range(6)], options)
    assert imbalance(plan) <= 1.25  # the holders contribute what the others send
    assert all(sent(plan).values())


def test_bytes_stay_where_they_are_when_that_is_balanced(sim) -> None:
    whole = {f"w{i}": ((16, 16), "float32") for i in range(40)}
    replicas = build_plan([sim.manifest(r, 4, tensors=whole) for r in range(4)], [[sim.manifest(tensors=whole)]], OPTIONS)
    assert not any(task.receives for r in range(4) for task in replicas.source_program(r).tasks)
    pipeline = [sim.manifest(r, 4, tensors=dict(list(whole.items())[r * 10 : r * 10 + 10])) for r in range(4)]
    stages = build_plan(pipeline, [[sim.manifest(tensors=whole)]] * 3, OPTIONS)
    assert not any(task.receives for r in range(4) for task in stages.source_program(r).tasks)
    assert imbalance(stages) == 1.0


def test_parts_of_an_oversize_tensor_are_sent_by_those_who_hold_them(sim) -> None:
    tensors = {f"w{i}": ((64, 256), "float32") for i in range(8)}
    options = PlanOptions(bucket_bytes=16384, max_tmp_bytes=1 << 20, leaf_bytes=4096)
    for copies in (1, 3):
        plan = build_plan(sim.row_shards(tensors, 4), [[sim.manifest(tensors=tensors)]] * copies, options)
        assert plan.total_tasks == 32
        assert not any(task.receives for r in range(4) for task in plan.source_program(r).tasks)
        assert imbalance(plan) == 1.0


def test_replicas_contribute_to_their_own(sim) -> None:
    tensors = {f"w{i}": ((8, 16), "float32") for i in range(32)}
    plan = build_plan(sim.row_shards(tensors, 8, replicas=2, hosts=2), [[sim.manifest(tensors=tensors)]], OPTIONS)
    for rank in range(8):
        for task in plan.source_program(rank).tasks:
            assert {m.peer // 4 for m in task.receives} <= {rank // 4}
            assert all(m.peer // 4 == rank // 4 for m in task.sends)


def test_a_slice_goes_only_to_those_who_need_it(sim) -> None:
    halves = [Box(start=(0, 0), shape=(8, 8)), Box(start=(8, 0), shape=(8, 8))]
    tensors = {"w": ((16, 8), "float32"), "n": ((4,), "float32")}
    target = [sim.manifest(r, 2, tensors={"w": (*tensors["w"], 0, [halves[r]]), "n": tensors["n"]}) for r in range(2)]
    plan = build_plan([sim.manifest(tensors=tensors)], [target, target], OPTIONS)
    audiences = {task.names: {tuple(t.receivers) for t in plan.tasks if t.names == task.names} for task in plan.tasks}
    assert audiences["w",] == {((0, 0), (1, 0)), ((0, 1), (1, 1))}
    assert audiences["n",] == {((0, 0), (0, 1), (1, 0), (1, 1))}
    assert plan.nbytes == 16 * 8 * 4 + 16


def test_the_direct_route_gathers_nothing_unless_a_target_needs_whole_tensors(sim) -> None:
    sources = sim.row_shards({"w": ((16, 8), "float32")}, 4)
    options = PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20, route="direct")
    loose, strict = (sim.manifest(tensors={"w": ((16, 8), "float32")}, whole_tensors=whole) for whole in (False, True))
    plan = build_plan(sources, [[loose]], options)
    assert not any(task.receives for r in range(4) for task in plan.source_program(r).tasks)
    assert {task.owner for task in plan.tasks} == {0, 1, 2, 3}
    plan = build_plan(sources, [[strict]], options)
    assert any(task.receives for r in range(4) for task in plan.source_program(r).tasks)


def test_groups_follow_each_other_and_owners_take_turns(sim) -> None:
    tensors = {f"w{i}": ((8, 64), "float32", i % 3) for i in range(60)}
    options = PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20)
    plan = build_plan([sim.manifest(r, 4, tensors=tensors) for r in range(4)], [[sim.manifest(tensors=tensors)]], options)
    assert plan.groups == (0, 1, 2)
    groups = [task.group for task in plan.tasks]
    assert groups == sorted(groups)
    for group in range(3):
        owners = [task.owner for task in plan.tasks if task.group == group]
        assert owners[:8] == [0, 1, 2, 3, 0, 1, 2, 3]
        assert max(Counter(owners).values()) - min(Counter(owners).values()) <= 1
    for rank in range(4):
        program = plan.source_program(rank)
        assert program.groups == (0, 1, 2)
        assert program.total_tasks == plan.total_tasks
        assert [t.index for t in program.tasks] == sorted(t.index for t in program.tasks)


def test_many_small_tensors_share_buckets(sim) -> None:
    tensors = {f"t{i}": ((3,), "float32") for i in range(5000)}
    options = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=8 << 20)
    plan = build_plan(sim.row_shards(tensors, 4), [[sim.manifest(tensors=tensors)]], options)
    assert plan.total_tasks <= 8
    for rank in range(4):
        for task in plan.source_program(rank).tasks:
            assert len(task.receives) <= 3  # one packed message a contributor
    assert imbalance(plan) <= 1.2


def test_large_contiguous_fragments_travel_unpacked(sim) -> None:
    tensors = {"big": ((64, 1024), "float32"), "small": ((64, 16), "float32"), "cast": ((64, 1024), "float32")}
    wanted = tensors | {"cast": ((64, 1024), "float16")}
    options = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=8 << 20)
    plan = build_plan(sim.row_shards(tensors, 2), [[sim.manifest(tensors=wanted)]], options)
    messages = [m for r in range(2) for task in plan.source_program(r).tasks for m in task.receives]
    direct = [m for m in messages if m.direct]
    assert [len(m.copies) for m in direct] == [1] * len(direct)
    assert {m.nbytes for m in direct} == {32 * 1024 * 4}
    assert len({m.tag for m in messages}) == len(messages)


def test_copies_out_of_mapped_files_are_accounted(sim) -> None:
    tensors = {"w": ((32, 32), "float32")}
    source = sim.manifest(tensors=tensors, kind="file")
    plan = build_plan([source], [[sim.manifest(tensors={"w": ((32, 32), "float16")})]], OPTIONS)
    (task,) = plan.source_program(0).tasks
    assert task.file_bytes == 4096
    assert task.tmp_bytes == 4096 + 2048


def own_tmp_bytes(task, rank: int, in_landing: bool) -> int:
    """What a rank holds for a task, from its program."""
    bucket = task.nbytes if task.owner == rank and not in_landing else 0
    packed = sum(m.nbytes for m in (*task.receives, *task.sends) if not m.direct)
    return bucket + packed + task.file_bytes


SIZES = st.fixed_dictionaries(
    {
        "world": st.integers(1, 4),
        "watermark": st.integers(6000, 200_000),
        "bucket": st.integers(1, 200_000),
        "leaf": st.sampled_from([64, 256, 1024]),
        "held": st.sampled_from(["float32", "float64"]),
        "wire": st.sampled_from(["float32", "float16"]),
        "kind": st.sampled_from(["memory", "file"]),
        "in_landing": st.booleans(),
    }
)


@settings(deadline=None, max_examples=60)
@given(size=SIZES)
def test_no_task_needs_more_than_the_watermark_and_two_fit(sim, size) -> None:
    world, watermark, in_landing = size["world"], size["watermark"], size["in_landing"]
    shapes = {"big": (300, 50), "row": (7000,), "deep": (3, 40, 11)} | {f"n{i}": (40,) for i in range(30)}
    sources = sim.row_shards({n: (shape, size["held"]) for n, shape in shapes.items()}, world, kind=size["kind"])
    target = sim.manifest(tensors={n: (shape, size["wire"]) for n, shape in shapes.items()})
    options = PlanOptions(
        bucket_bytes=size["bucket"], max_tmp_bytes=watermark, leaf_bytes=size["leaf"], shared_landing=in_landing
    )
    plan = build_plan(sources, [[target]] * 2, options)
    cast = np.dtype(size["held"]).itemsize // np.dtype(size["wire"]).itemsize
    smallest, padding = size["leaf"] * (2 + cast), 16 * (world + 1)
    for rank in range(world):
        for task in plan.source_program(rank).tasks:
            assert task.tmp_bytes == own_tmp_bytes(task, rank, in_landing)
            assert task.tmp_bytes <= watermark
            assert task.tmp_bytes <= max(watermark // 2, smallest) + padding
            assert task.nbytes <= max(size["bucket"], size["leaf"])


def test_a_tensor_of_one_and_a_half_watermarks_is_split(sim) -> None:
    tensors = {"w": ((1536, 1024), "float32")}
    options = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=4 << 20)
    plan = build_plan(sim.row_shards(tensors, 2), [[sim.manifest(tensors=tensors)]], options)
    assert plan.total_tasks == 8  # two owners, four parts each, so that both send all the time
    assert plan.peak_task_tmp_bytes <= 2 << 20


def test_mapped_landing_keeps_a_tensor_with_one_owner_in_one_run(sim) -> None:
    tensors = {f"w{i}": ((50, 100), "float32") for i in range(6)}
    options = PlanOptions(bucket_bytes=5000, max_tmp_bytes=1 << 20, leaf_bytes=1200, landing="mapped")
    plan = build_plan(sim.row_shards(tensors, 3), [[sim.manifest(tensors=tensors, movable=True)]], options)
    places: dict[str, list[tuple[int, int, int]]] = {}
    for task in plan.target_program(0, 0).tasks:
        for landing in task.landings:
            places.setdefault(landing.segment.name, []).append((task.owner, landing.shared_offset, landing.segment.nbytes))
    for runs in places.values():
        assert len({owner for owner, _, _ in runs}) == 1
        assert len(runs) > 1
        at = runs[0][1]
        assert at % 256 == 0
        for _, offset, nbytes in runs:
            assert offset == at
            at += nbytes
    assert imbalance(plan) <= 1.2


def test_a_plan_tells_what_it_is(sim) -> None:
    plan = build_plan(sim.row_shards(MODEL, 2), [[sim.manifest(tensors=MODEL)]], OPTIONS)
    text = plan.describe()
    assert plan.digest in text
    assert "2 source ranks, 1 targets, 1 receivers" in text
    assert plan.digest_kind == "xxh3_128:4096"
    with pytest.raises(IndexError, match="source rank 2 of 2"):
        plan.source_program(2)
    with pytest.raises(IndexError, match="no ReceiverId"):
        plan.target_program(0, 1)


def test_the_digest_tells_apart_what_differs(sim) -> None:
    sources, target = sim.row_shards(MODEL, 2), sim.manifest(tensors=MODEL)
    moved = sim.manifest(tensors=MODEL, fingerprint="reallocated")
    plans = [
        build_plan(sources, [[target]], OPTIONS),
        build_plan(sources, [[moved]], OPTIONS),
        build_plan(sources, [[target], [target]], OPTIONS),
        build_plan(sources, [[target]], PlanOptions(bucket_bytes=32768, max_tmp_bytes=1 << 20, leaf_bytes=4096, verify=False)),
    ]
    assert len({plan.digest for plan in plans}) == 4
    assert plans[-1].digest_kind == "none"
