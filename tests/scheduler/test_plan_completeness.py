"""What the ranks of a target take must be whole tensors together: a part that goes to no rank is told by name."""

from __future__ import annotations

from unittest import mock

import pytest

from syncline.bench.layouts import Model
from syncline.bench.models import Architecture
from syncline.bench.splits import Engine
from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Box, Manifest
from syncline.scheduler.plan import Plan, PlanOptions, build_plan

OPTIONS = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 22)
NAMES = [f"layers.{i}.{m}.weight" for i in range(4) for m in ("q_proj", "up_proj")]
FULL = dict.fromkeys(NAMES, ((8, 4), "float32")) | {"norm": ((8,), "float32")}
SPARSE = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=2, head_dim=8, intermediate=128, vocab=512, experts=8, expert_intermediate=32
)


def shards(sim, *places: int, of: int = 2, **parts) -> list[Manifest]:
    """A target whose ranks take these row shards of everything but the norm."""
    rows = 8 // of
    held = [
        {n: ((8, 4), "float32", 0, [Box(start=(rows * p, 0), shape=(rows, 4))]) for n in NAMES} | {"norm": FULL["norm"]}
        for p in places
    ]
    return [sim.manifest(rank, len(places), tensors=tensors, **parts) for rank, tensors in enumerate(held)]


def plan(sim, *targets: list[Manifest], **parts) -> Plan:
    return build_plan([sim.manifest(tensors=FULL, **parts)], list(targets), OPTIONS)


def problems(sim, *targets: list[Manifest], **parts) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        plan(sim, *targets, **parts)
    return tuple(caught.value.problems)


@pytest.mark.parametrize(
    ("places", "taken", "rest"),
    [((0, 0), "0:4", "4:8"), ((1, 1), "4:8", "0:4"), ((0,), "0:4", "4:8")],
    ids=["rank 0 twice", "rank 1 twice", "one of two"],
)
def test_ranks_that_leave_a_shard_to_nobody_are_refused_with_every_name(sim, places, taken, rest) -> None:
    (told,) = problems(sim, shards(sim, *places))
    assert told.startswith(f"target 0 takes only [{taken}, 0:4] of ")
    assert f"of shape [8, 4]: [{rest}, 0:4] goes to no rank; do two of its ranks describe the same shard" in told
    assert all(name in told for name in NAMES)
    assert "norm" not in told


def test_the_right_shards_in_any_order_and_replicas_of_them_are_accepted(sim) -> None:
    for places in ((0, 1), (1, 0), (0, 0, 1, 1), (1, 0, 1)):
        plan(sim, shards(sim, *places))


def test_the_check_is_what_refuses_them(sim) -> None:
    """Everything else is content with the wrong ranks."""
    with mock.patch("syncline.scheduler.plan.check_taken_whole"):
        assert plan(sim, shards(sim, 0, 0)).target_program(0, 1).tasks


def test_several_parts_that_nobody_takes_are_counted(sim) -> None:
    (told,) = problems(sim, shards(sim, 0, 2, of=4))
    assert told.startswith("target 0 takes only 16 of 32 elements of ")
    assert "of shape [8, 4]: [2:4, 0:4] and more go to no rank" in told


@pytest.mark.parametrize("side", ["target", "source"])
def test_a_part_that_is_declared_optional_is_accepted(sim, side) -> None:
    declared = {"optional": set(NAMES)}
    plan(sim, shards(sim, 0, 0, **(declared if side == "target" else {})), **(declared if side == "source" else {}))
    (told,) = problems(sim, shards(sim, 0, 0, optional=set(NAMES[1:])))
    assert f"of {NAMES[0]}, of shape" in told


def test_targets_are_judged_one_by_one(sim) -> None:
    """The other target takes the other half, or all of it, or is wrong in the same way: it makes up for nothing."""
    whole = [sim.manifest(tensors=FULL)]
    (told,) = problems(sim, whole, shards(sim, 0, 0))
    assert told.startswith("target 1 takes only")
    assert [t[:19] for t in problems(sim, shards(sim, 0, 0), shards(sim, 1, 1))] == [f"target {t} takes only" for t in (0, 1)]
    assert len(problems(sim, shards(sim, 0, 0), shards(sim, 0, 0))) == 2
    excused = shards(sim, 0, 0, optional=set(NAMES))
    assert len(problems(sim, excused, shards(sim, 0, 0))) == 1


def test_tied_names_make_a_whole_together(sim) -> None:
    halves = [Box(start=(4 * i, 0), shape=(4, 4)) for i in range(2)]
    tensors = {n: ((8, 4), "float32", 0, [box]) for n, box in zip(("embed", "head"), halves, strict=True)}
    source = sim.manifest(tensors={"embed": ((8, 4), "float32")}, aliases={"head": "embed"})
    build_plan([source], [[sim.manifest(tensors=tensors)]], OPTIONS)


def test_experts_of_all_ranks_make_a_whole_and_a_doubled_rank_does_not() -> None:
    model = Model.of(SPARSE)
    source = Engine(tp=1).manifests(model, "s", 1)
    ranks = Engine(tp=2, dp=2, ep=4).manifests(model, "e", 8)
    build_plan(source, [ranks], OPTIONS)
    tensor = Engine(tp=2).manifests(model, "e", 8)
    wrong = [tensor[0], Manifest(rank=1, world_size=2, host="e", layout=tensor[0].layout)]
    with pytest.raises(PlanError) as caught:
        build_plan(source, [wrong], OPTIONS)
    told = str(caught.value)
    for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "embed_tokens.weight", "down_proj.weight"):
        assert name in told
    assert "layernorm" not in told
