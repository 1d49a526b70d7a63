"""Experts live on other process groups than dense parameters: their tasks form a mesh group, with a barrier in between."""

from __future__ import annotations

import pytest

LATE_S = 0.3


def groups_of(report):
    """Mesh group -> whether each of its tensors belongs to a routed expert."""
    found = {}
    for task in report["tasks"]:
        found.setdefault(task["group"], []).extend(".mlp.experts." in name for name in task["names"])
    return found


def test_experts_come_in_a_group_of_their_own_after_the_dense_one(world):
    world.job(4, {"ep": 2, "tp": 2, "etp": 1}, family="deepseek_v3", seed=1)
    world.connect(world.serve(), bucket_bytes="32KiB")
    world.ranks[1].call("late", seconds=LATE_S)
    report = world.push()
    world.pushed_exactly()
    found = groups_of(report)
    assert list(found) == [0, 1]  # one after the other in plan order
    assert not any(found[0])  # shared experts, router and its bias are dense
    assert all(found[1])
    assert all(set(manifest["groups"].values()) == {0, 1} for manifest in world.all("manifest"))
    check_barriers(report)


def check_barriers(report):
    """On every rank: all of group 0 prepared, its barrier, then group 1; and none left the barrier before all had come."""
    group = [task["group"] for task in report["tasks"]]
    entered, left = {0: [], 1: []}, {0: [], 1: []}
    for spans in report["spans"]:
        prepared = {0: [0.0], 1: [0.0]}
        began = {0: [], 1: []}
        for stage, task, start, end in spans:
            if stage == "prepare":
                began[group[task]].append(start)
                prepared[group[task]].append(end)
            elif stage == "barrier":
                entered[task].append(start)
                left[task].append(end)
        assert max(prepared[0]) <= entered[0][-1]
        assert left[0][-1] <= min(began[1], default=left[0][-1])
    assert [len(entered[0]), len(entered[1])] == [4, 4]  # each rank went through each once
    assert max(entered[0]) >= LATE_S  # the rank that was late
    # Between ranks no order is known within what their clocks may be off by.
    at_latest = [moment + error for moment, error in zip(left[0], report["clock_errors"], strict=True)]
    at_earliest = [moment - error for moment, error in zip(entered[0], report["clock_errors"], strict=True)]
    assert min(at_latest) >= max(at_earliest)


@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    [("qwen2", 2, {"tp": 2}), ("qwen3_moe", 2, {"tp": 2, "etp": 2}), ("qwen3_moe", 2, {"pp": 2})],
    ids=["dense", "experts sharded as the rest", "experts on the same ranks"],
)
def test_one_group_where_nothing_lives_apart(world, family, ranks, parallel):
    world.job(ranks, parallel, family=family, seed=2)
    world.connect(world.serve())
    report = world.push()
    world.pushed_exactly()
    assert list(groups_of(report)) == [0]
