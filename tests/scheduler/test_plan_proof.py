"""A receiver sees for itself that its program is right: every damage to one is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Box
from syncline.scheduler.plan import PlanOptions, build_plan
from syncline.scheduler.programs import TargetProgram
from syncline.scheduler.proof import check_target_program

TENSORS = {"a": ((40, 16), "float32"), "b": ((16,), "float32"), "c": ((5, 16), "float32")}
OPTIONS = PlanOptions(bucket_bytes=1000, max_tmp_bytes=1 << 16, leaf_bytes=512)


@pytest.fixture
def case(sim):
    manifest = sim.manifest(tensors=TENSORS)
    return build_plan(sim.row_shards(TENSORS, 2), [[manifest]], OPTIONS).target_program(0, 0), manifest


def test_a_sound_program_passes_and_survives_the_wire(case) -> None:
    program, manifest = case
    check_target_program(program, manifest)
    again = TargetProgram.from_bytes(program.to_bytes())
    assert again == program
    check_target_program(again, manifest)
    with pytest.raises(ValueError, match="not the bytes of a target program"):
        TargetProgram.from_bytes(program.to_bytes()[:-1])
    with pytest.raises(ValueError, match="not the bytes of a target program"):
        TargetProgram.from_bytes(b"\x80")


def first_landing(program: TargetProgram, **changes) -> TargetProgram:
    task = program.tasks[0]
    landing = replace(task.landings[0], **changes)
    return replace(program, tasks=(replace(task, landings=(landing, *task.landings[1:])), *program.tasks[1:]))


def first_segment(program: TargetProgram, **changes) -> TargetProgram:
    return first_landing(program, segment=replace(program.tasks[0].landings[0].segment, **changes))


def first_task(program: TargetProgram, **changes) -> TargetProgram:
    return replace(program, tasks=(replace(program.tasks[0], **changes), *program.tasks[1:]))


def moved(program: TargetProgram) -> TargetProgram:
    (dest,) = program.tasks[0].landings[0].dests
    return first_landing(program, dests=(dest._replace(offset=dest.offset + 1),))


DAMAGES = {
    "a task is missing": (lambda p: replace(p, tasks=p.tasks[1:]), "leaves elements unwritten of a"),
    "a task comes twice": (lambda p: replace(p, tasks=(p.tasks[0], *p.tasks)), "not in plan order"),
    "tasks are swapped": (lambda p: replace(p, tasks=p.tasks[::-1]), "not in plan order"),
    "a region is shifted": (moved, "does not land in its place"),
    "a piece is unknown": (lambda p: first_landing(p, pieces=(7,)), "the manifest has 3"),
    "another piece": (lambda p: first_landing(p, pieces=(2,)), "does not land in its place"),
    "no piece": (lambda p: first_landing(p, pieces=(), dests=()), "lands in 0 pieces"),
    "a box twice": (lambda p: first_segment(p, box=Box(start=(8, 0), shape=(8, 16))), "unwritten|same elements"),
    "another type": (lambda p: first_segment(p, dtype="int32"), "does not land in its place"),
    "leaves too short": (
        lambda p: first_segment(p, leaves=replace(p.tasks[0].landings[0].segment.leaves, blocks=9)),
        "leaves do not cover it",
    ),
    "outside the bucket": (lambda p: first_segment(p, offset=1 << 20), "beyond"),
    "outside landing space": (lambda p: replace(p, landing_nbytes=100), "buckets in landing space"),
    "outside the owner's space": (lambda p: first_task(p, shared_offset=1 << 40), "beyond the landing space of its owner"),
    "a negative offset": (lambda p: first_task(p, landing_offset=-256), "buckets in landing space"),
    "on another bucket": (lambda p: first_task(p, landing_offset=p.tasks[1].landing_offset), "buckets in landing space"),
    "beyond the largest bucket": (lambda p: replace(p, bucket_nbytes=10), "buckets have at most 10"),
    "for another rank": (lambda p: replace(p, receiver=p.receiver._replace(rank=3)), "is for rank 3"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_program_is_refused(case, damage) -> None:
    program, manifest = case
    change, message = DAMAGES[damage]
    with pytest.raises(PlanError, match=message):
        check_target_program(change(program), manifest)


def test_only_names_that_are_excused_may_stay_unwritten(sim, case) -> None:
    program, manifest = case
    more = TENSORS | {"inv_freq": ((8,), "float32")}
    with pytest.raises(PlanError, match="leaves elements unwritten of inv_freq"):
        check_target_program(program, sim.manifest(tensors=more))
    check_target_program(program, sim.manifest(tensors=more, optional={"inv_freq"}))
    check_target_program(replace(program, skipped=("inv_freq",)), sim.manifest(tensors=more))
    half = replace(program, tasks=program.tasks[1:])
    with pytest.raises(PlanError, match="unwritten of a"):
        check_target_program(half, sim.manifest(tensors=TENSORS, optional={"a"}))
    del manifest


def test_a_receiver_does_not_write_memory_twice_whatever_the_program_says(sim, case) -> None:
    program, manifest = case
    pieces = [replace(p, buffer=0, offset=0) if p.tensor == 1 else p for p in manifest.pieces]
    broken = sim.manifest(tensors=TENSORS)
    broken = type(broken)(rank=0, world_size=1, host="t", layout=broken.layout, pieces=pieces)
    with pytest.raises(PlanError, match="written twice"):
        check_target_program(program, broken)
