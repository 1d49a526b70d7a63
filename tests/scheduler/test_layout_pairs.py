"""Pairs of a trainer's and an engine's layout: what lands is what plain torch cuts, and a sharded model runs on it.

A wrong split that agrees with itself passes any comparison of bytes. So the second half runs a tensor-parallel forward
pass over the landed shards, and shows for each kind of layout bug who notices it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from syncline.scheduler.errors import PlanError
from syncline.scheduler.plan import Plan, PlanOptions, build_plan
from syncline.scheduler.proof import check_target_program


def _load(name: str):
    """A module beside this one: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(f"syncline_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pairs, execution = _load("layout_pairs"), _load("layout_execution")
Engine, FSDP, Megatron, Model = pairs.Engine, pairs.FSDP, pairs.Megatron, pairs.Model


class Pair:
    """A source and targets with memory of their own, and what the targets should hold in the end."""

    def __init__(
        self, model, source, engines, full, *, source_bug="", target_bug="", consistent_bug="", **manifest_parts
    ) -> None:
        self.model, self.engines, self.full = model, engines, full
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.tied else {}
        held = [source.memory(model, rank, full) for rank in range(source.world)]
        self.sources = [
            pairs.manifest(
                model, source.pieces(model, r, source_bug), held[r], rank=r, world=source.world, host=f"t{r // 4}", aliases=tied
            )
            for r in range(source.world)
        ]
        self.held = [[flat(tensor) for tensor in memory.values()] for memory in held]
        told = target_bug or consistent_bug
        self.wanted = [[e.memory(model, r, full, consistent_bug) for r in range(e.tp)] for e in engines]
        self.targets = [
            [
                pairs.manifest(model, e.pieces(model, r, told), wanted[r], rank=r, world=e.tp, host=f"e{t}", **manifest_parts)
                for r in range(e.tp)
            ]
            for t, (e, wanted) in enumerate(zip(engines, self.wanted, strict=True))
        ]
        self.landed = [[{n: torch.full_like(w, torch.nan) for n, w in rank.items()} for rank in ranks] for ranks in self.wanted]

    def push(self, options: PlanOptions) -> Plan:
        plan = build_plan(self.sources, self.targets, options)
        memory = [[[flat(tensor) for tensor in rank.values()] for rank in ranks] for ranks in self.landed]
        self.moved = execution.execute(plan, self.held, memory)
        return plan

    def differences(self) -> list[str]:
        """Buffers whose bytes are not what the reference has."""
        return [
            f"target {t} rank {r}: {name}"
            for t, (ranks, references) in enumerate(zip(self.landed, self.wanted, strict=True))
            for r, (got, want) in enumerate(zip(ranks, references, strict=True))
            for name in want
            if not np.array_equal(got[name].numpy(), want[name].numpy(), equal_nan=True)
        ]

    def forwards_agree(self) -> bool:
        """Whether each target, run on what it holds, gives the logits of the whole weights."""
        tokens = torch.arange(self.model.vocab).repeat(2)[: self.model.vocab + 3]
        right = execution.unsharded(self.model, self.full, tokens)
        with torch.no_grad():
            return all(
                torch.allclose(execution.tensor_parallel(self.model, engine, ranks, tokens), right, rtol=1e-8, atol=1e-10)
                for engine, ranks in zip(self.engines, self.landed, strict=True)
            )


def flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().reshape(-1)


@st.composite
def drawn(draw: st.DrawFn, trainer: str, *, moe: bool):
    model = draw(pairs.models(moe=moe))
    return model, draw(getattr(pairs, trainer)(model)), draw(pairs.engines(model))


OPTIONS = st.builds(
    PlanOptions,
    bucket_bytes=st.sampled_from([1 << 20, 200, 64]),
    max_tmp_bytes=st.just(1 << 20),
    leaf_bytes=st.sampled_from([8, 32, 262144]),
    route=st.sampled_from(["auto", "gather", "direct"]),
    landing=st.sampled_from(["staged", "staged", "streamed"]),
    shared_landing=st.booleans(),
)


pytestmark = pytest.mark.timeout(300)  # minutes of a busy machine's time
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def check_pair(case, options) -> None:
    model, source, engine = case
    pair = Pair(model, source, [engine], model.stamped())
    plan = pair.push(options)
    assert pair.differences() == []
    if options.route == "direct":
        assert not pair.moved
        assert not plan.routing.gathered_tensors


# Four times 500 pairs. Route, sizes and landing are drawn with them.


@pytest.mark.slow
@settings(max_examples=500, **PATIENT)
@given(case=drawn("fsdp", moe=False), options=OPTIONS)
def test_fsdp_shards_of_a_dense_model_land_as_plain_torch_cuts(case, options) -> None:
    check_pair(case, options)


@pytest.mark.slow
@settings(max_examples=500, **PATIENT)
@given(case=drawn("fsdp", moe=True), options=OPTIONS)
def test_fsdp_shards_of_experts_land_as_plain_torch_cuts(case, options) -> None:
    check_pair(case, options)


@pytest.mark.slow
@settings(max_examples=500, **PATIENT)
@given(case=drawn("megatron", moe=False), options=OPTIONS)
def test_megatron_shards_of_a_dense_model_land_as_plain_torch_cuts(case, options) -> None:
    check_pair(case, options)


@pytest.mark.slow
@settings(max_examples=500, **PATIENT)
@given(case=drawn("megatron", moe=True), options=OPTIONS)
def test_megatron_shards_of_experts_land_as_plain_torch_cuts(case, options) -> None:
    check_pair(case, options)


CASES = st.sampled_from(["fsdp", "megatron"]).flatmap(
    lambda trainer: st.booleans().flatmap(lambda moe: drawn(trainer, moe=moe))
)


@settings(max_examples=100, **PATIENT)
@given(case=CASES, second=st.booleans(), options=OPTIONS, seed=st.integers(0, 1000))
def test_a_sharded_forward_pass_over_what_has_landed_equals_the_unsharded_one(case, second, options, seed) -> None:
    model, source, engine = case
    pair = Pair(model, source, [engine, Engine()] if second else [engine], model.random(seed))
    plan = pair.push(options)
    assert pair.forwards_agree()
    for receiver in plan.receivers:
        check_target_program(plan.target_program(*receiver), pair.targets[receiver.target][receiver.rank])


# ------------------------------------------------------------------------------------------------------ seeded layout bugs

DENSE = Model(heads=8, groups=4, head_dim=2, hidden=6, ffn=8, vocab=11, bias=True)
SPARSE = Model(heads=8, groups=4, head_dim=2, hidden=6, ffn=8, vocab=11, experts=4)
WIDE = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 22, route="auto")


def seeded(bug: str, **where: str) -> Pair:
    model = SPARSE if bug == "experts permuted" else DENSE
    source = Megatron(tp=2, ep=2 if model.experts else 1, pad=4)
    return Pair(model, source, [Engine(tp=2, pad=4)], model.random(7), **where)


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "experts"])
def test_without_a_bug_nothing_is_found(model) -> None:
    pair = Pair(model, Megatron(tp=2, pad=4), [Engine(tp=2, pad=4), Engine(tp=4, fused=False, up_first=True)], model.random(7))
    pair.push(WIDE)
    assert pair.differences() == []
    assert pair.forwards_agree()


@pytest.mark.parametrize("bug", pairs.BUGS)
def test_a_source_that_says_it_wrongly_is_found(bug) -> None:
    pair = seeded(bug, source_bug=bug)
    if bug == "padding kept":
        with pytest.raises(PlanError, match=r"model\.embed_tokens\.weight"):
            pair.push(WIDE)
        return
    pair.push(WIDE)
    assert pair.differences()
    assert not pair.forwards_agree()


@pytest.mark.parametrize("bug", pairs.BUGS)
def test_a_target_that_says_it_wrongly_is_found(bug) -> None:
    pair = seeded(bug, target_bug=bug)
    pair.push(WIDE)
    assert pair.differences()
    assert not pair.forwards_agree()


@pytest.mark.parametrize("bug", pairs.BUGS)
def test_a_wrong_split_that_agrees_with_itself_is_found_by_the_forward_pass_alone(bug) -> None:
    pair = seeded(bug, consistent_bug=bug)
    pair.push(WIDE)
    assert pair.differences() == []
    assert not pair.forwards_agree()
