"""Ranks of a target on another host pass buckets on to each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from syncline.scheduler.errors import PlanError
from syncline.scheduler.plan import Plan, PlanOptions, build_plan
from syncline.scheduler.programs import ReceiverId, TargetProgram
from syncline.scheduler.proof import check_target_program


def options(**changes) -> PlanOptions:
    return PlanOptions(**({"bucket_bytes": 4096, "max_tmp_bytes": 1 << 20, "leaf_bytes": 256, "route": "auto"} | changes))


def ways(plan: Plan) -> dict[tuple[int, ReceiverId], ReceiverId | int]:
    """Where each receiver gets each task from, as its own program has it: another receiver, or a source rank."""
    return {
        (task.index, receiver): task.owner if task.via is None else ReceiverId(receiver.target, task.via)
        for receiver in plan.receivers
        for task in plan.target_program(*receiver).tasks
    }


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    world=st.integers(1, 3),
    hosts=st.lists(st.sampled_from(["trainer", "a", "b"]), min_size=1, max_size=5),
    sharded=st.booleans(),
    relays=st.sets(st.integers(0, 1)).map(frozenset),
)
def test_every_receiver_gets_every_bucket_once_and_each_host_once_from_its_owner(
    sim, *, rows, world, hosts, sharded, relays
) -> None:
    tensors = {f"w{i}": ((n, 24), "float32") for i, n in enumerate(rows)}
    sources = [sim.manifest(r, world, host="trainer", tensors=tensors) for r in range(world)]
    whole = [sim.manifest(r, len(hosts), host=host, tensors=tensors) for r, host in enumerate(hosts)]
    second = sim.row_shards(tensors, len(hosts)) if sharded else whole
    plan = build_plan(sources, [whole, second], options(relays=relays))
    manifests = {receiver: [whole, second][receiver.target][receiver.rank] for receiver in plan.receivers}
    got = ways(plan)
    onward: dict[tuple[int, ReceiverId], set[ReceiverId]] = {}
    opening = {}
    for receiver in plan.receivers:
        program = plan.target_program(*receiver)
        check_target_program(program, manifests[receiver])
        assert TargetProgram.from_bytes(program.to_bytes()) == program
        opening[receiver] = next((task.index for task in program.tasks if task.nbytes), None)
        for task in program.tasks:
            onward[task.index, receiver] = {ReceiverId(receiver.target, rank) for rank in task.onward}

    straight = Counter()
    for (task, receiver), way in got.items():
        if isinstance(way, ReceiverId):  # both sides agree; the bucket leaves its owner for that rank, near the other
            assert receiver in onward[task, way]
            assert not isinstance(got[task, way], ReceiverId)
            assert manifests[way].host == manifests[receiver].host != "trainer"
            assert receiver.target in relays
            assert opening[receiver] != task
            assert opening[way] != task
    for (task, receiver), takers in onward.items():
        assert all(got[task, taker] == receiver for taker in takers)

    for rank in range(world):
        for task in plan.source_program(rank).tasks:
            assert set(task.relayed) == {r for r in task.receivers if isinstance(got[task.index, r], ReceiverId)}
            sent = [r for r in task.receivers if r not in task.relayed]
            straight.update({rank: task.nbytes * len(sent)})
            opens = task.index in opening.values()
            for target in relays if task.nbytes and not opens else ():
                there = Counter(manifests[r].host for r in sent if r.target == target)
                assert all(count == 1 for host, count in there.items() if host != "trainer")
    traffic = plan.traffic
    moved = [sum(m.nbytes for task in plan.source_program(r).tasks for m in task.sends) for r in range(world)]
    assert plan.sent == tuple(straight[rank] + moved[rank] for rank in range(world))
    passed = defaultdict(int)
    sizes = {task.index: task.nbytes for r in range(world) for task in plan.source_program(r).tasks}
    for (task, receiver), way in got.items():
        if isinstance(way, ReceiverId):
            passed[plan.receivers.index(way), plan.receivers.index(receiver)] += sizes[task]
    assert dict(zip(zip(*map(list, traffic.passed[:2]), strict=True), traffic.passed.nbytes, strict=True)) == passed


def test_ranks_take_turns(sim) -> None:
    tensors = {f"w{i}": ((64, 64), "float32") for i in range(41)}
    target = [sim.manifest(r, 4, host="engine", tensors=tensors) for r in range(4)]
    plan = build_plan(
        [sim.manifest(host="trainer", tensors=tensors)], [target], options(bucket_bytes=16384, relays=frozenset({0}))
    )
    assert plan.total_tasks == 41
    first, *others = plan.source_program(0).tasks
    assert first.relayed == ()
    direct = Counter(r.rank for task in others for r in task.receivers if r not in task.relayed)
    assert direct == dict.fromkeys(range(4), 10)
    assert plan.sent == ((40 + 4) * 16384,)


def test_it_is_part_of_the_plans_digest_and_off_by_itself(sim) -> None:
    tensors = {f"w{i}": ((64, 64), "float32") for i in range(4)}
    target = [sim.manifest(r, 2, host="engine", tensors=tensors) for r in range(2)]
    plain, relayed = (
        build_plan([sim.manifest(host="trainer", tensors=tensors)], [target], options(**more))
        for more in ({}, {"relays": frozenset({0})})
    )
    assert plain.digest != relayed.digest
    assert not any(task.relayed for task in plain.source_program(0).tasks)


@pytest.mark.parametrize("change", [{"via": 0}, {"onward": (0,)}, {"via": 1, "onward": (1,)}])
def test_a_program_that_passes_on_in_circles_is_refused(sim, change) -> None:
    tensors = {"w": ((64, 64), "float32")}
    target = [sim.manifest(r, 2, host="engine", tensors=tensors) for r in range(2)]
    plan = build_plan([sim.manifest(host="trainer", tensors=tensors)], [target], options())
    program = plan.target_program(0, 0)
    wrong = replace(program, tasks=tuple(replace(task, **change) for task in program.tasks))
    with pytest.raises(PlanError, match="goes on to ranks"):
        check_target_program(wrong, target[0])
