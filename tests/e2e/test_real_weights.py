"""SmolLM2-135M, sharded over real FSDP2 ranks, pushed into targets that start from random weights."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("2 ranks", "5 ranks", "HSDP 2x2", "FSDPxTP 2x2"),
    "offload": (False, True),
    "targets": ("one", "two", "two-rank"),
    "transport": ("shm", "gloo"),
    "landing": ("staged", "streamed", "mapped"),
}
LAYOUTS = {"2 ranks": (2, "fsdp"), "5 ranks": (5, "fsdp"), "HSDP 2x2": (4, "hsdp"), "FSDPxTP 2x2": (4, "fsdp_tp")}


class Run(NamedTuple):
    layout: str
    offload: bool
    targets: str
    transport: str
    landing: str


# A covering array: every pair of choices that can go together is in one of these runs (tested below).
RUNS = (
    Run("2 ranks", False, "one", "shm", "staged"),
    Run("2 ranks", True, "two", "shm", "mapped"),
    Run("2 ranks", True, "two-rank", "gloo", "streamed"),
    Run("5 ranks", True, "one", "shm", "mapped"),
    Run("5 ranks", False, "two", "shm", "streamed"),
    Run("5 ranks", False, "two-rank", "gloo", "staged"),
    Run("HSDP 2x2", True, "one", "shm", "streamed"),
    Run("HSDP 2x2", True, "two", "gloo", "staged"),
    Run("HSDP 2x2", False, "two-rank", "shm", "mapped"),
    Run("FSDPxTP 2x2", False, "one", "gloo", "streamed"),
    Run("FSDPxTP 2x2", True, "two", "shm", "mapped"),
    Run("FSDPxTP 2x2", True, "two-rank", "shm", "staged"),
)


def possible(run: Run) -> bool:
    return not (run.landing == "mapped" and run.transport == "gloo")


def pairs(run: Run) -> set[Any]:
    return set(itertools.combinations(run._asdict().items(), 2))


def test_the_runs_cover_every_pair_of_choices_that_can_go_together() -> None:
    assert Run._fields == tuple(CHOICES)
    wanted = set().union(*(pairs(run) for run in map(Run._make, itertools.product(*CHOICES.values())) if possible(run)))
    covered = set().union(*map(pairs, RUNS))
    assert len(RUNS) <= 12
    assert all(map(possible, RUNS))
    assert wanted - covered == set()
    for left_out in RUNS:  # and this test is able to fail
        assert wanted - set().union(*(pairs(run) for run in RUNS if run != left_out))


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one also converts the checkpoint
@pytest.mark.parametrize("run", RUNS, ids=lambda run: ", ".join([*run[:1], *(["offload"] if run.offload else []), *run[2:]]))
async def test_real_weights_arrive(cluster, smollm2, run: Run) -> None:
    target_ranks = 2 if run.targets == "two-rank" else 1
    build = {
        "model": {"kind": "folder", "folder": str(smollm2.random)},
        "tensor_parallel": target_ranks == 2,
        "movable": run.landing == "mapped",
    }
    names = ["a", "b"] if run.targets == "two" else ["a"]
    ranks, layout = LAYOUTS[run.layout]
    source, *targets = await asyncio.gather(
        cluster.source(
            ranks, build={"model": {"kind": "folder", "folder": str(smollm2.real)}, "layout": layout, "offload": run.offload}
        ),
        *(cluster.target(n, ranks=target_ranks, build=build, initial_version=0, group=target_ranks == 2) for n in names),
    )
    for target in targets:
        assert await next_token(target, smollm2) != smollm2.answer
    before = [await rank.call("addresses") for target in targets for rank in target.ranks]

    await cluster.connect(source, targets, transport=run.transport, landing=run.landing, max_tmp_bytes="64MiB")
    report = await source.push(1)

    assert report["ok"], report["text"]
    assert report["peak_tmp_bytes"] <= 2**26
    for target in targets:
        assert report["targets"][target.address]["state"] == "COMMITTED"
        assert await target.state() == {"state": "COMMITTED", "version": 1}
        assert await next_token(target, smollm2) == smollm2.answer
        await assert_logits_equal(cluster, target, smollm2)
    after = [await rank.call("addresses") for target in targets for rank in target.ranks]
    assert (after == before) == (run.landing != "mapped")
    await source.all("close")


async def next_token(target: Any, smollm2: Any) -> int:
    """What the target says after the prompt; its ranks compute together."""
    answers = await asyncio.gather(
        *(w.call("greedy", ids=smollm2.prompt, count=1, gated=rank == 0) for rank, w in enumerate(target.ranks))
    )
    assert all(answer == answers[0] for answer in answers)
    return answers[0][0]


async def assert_logits_equal(cluster: Any, target: Any, smollm2: Any) -> None:
    """The target's logits are those of transformers with the real weights, to the bit.

    Two ranks add in another order than one: there, the weights that they hold together are given to transformers.
    """
    expected = load_file(smollm2.logits)["logits"]
    assert expected.shape == (len(smollm2.prompt), 49152)
    out = cluster.folder / f"logits-{target.name}.safetensors"
    if len(target.ranks) == 1:
        assert await target.leader.call("logits", ids=smollm2.prompt, out=str(out)) == 1
    else:
        weights = [cluster.folder / f"weights-{rank}.safetensors" for rank in range(len(target.ranks))]
        await asyncio.gather(*(w.call("save_weights", out=str(f)) for w, f in zip(target.ranks, weights, strict=True)))
        worker = await cluster.worker("target", "transformers")
        await worker.call(
            "reference_of_weights", folder=str(smollm2.random), weights=str(weights[0]), ids=smollm2.prompt, out=str(out)
        )
        first, second = map(load_file, weights)
        assert all(torch.equal(first[name], second[name]) for name in first)
    got = load_file(out)["logits"]
    assert got.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(got, expected)
