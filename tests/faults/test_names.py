"""Faults of names: ties, renames, parts that one side lacks. All are said before a byte moves, all at once, by name."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.engine.errors import PlanError


class LM(nn.Module):
    """An embedding, a layer, a head; the head may be the embedding."""

    def __init__(self, *, tied, seed=0):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape) + 100 * number + 1000 * seed)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
LM_BYTES = 256 + 256 + 4 * 4  # embedding, weight and bias at aligned offsets; the head would make it more


# tied weights


@pytest.mark.parametrize("target_tied", [True, False])
async def test_a_tied_source_sends_the_embedding_once(start_target, connect, kit, target_tied):
    source, model = LM(tied=True), LM(tied=target_tied, seed=1)
    target = await start_target(model)
    pusher = await connect(source, [target])
    report = await pusher.push_well(1)
    assert report.bytes == LM_BYTES
    assert kit.differing(model, dict(source.state_dict())) == []


async def test_a_source_that_has_only_the_embedding_fills_a_tied_head(start_target, connect, kit):
    source = {name: t.detach() for name, t in LM(tied=True).state_dict().items() if name != HEAD}
    model = LM(tied=True, seed=1)
    target = await start_target(model)
    pusher = await connect(source, [target])
    report = await pusher.push_well(1)
    assert report.bytes == LM_BYTES
    assert kit.differing(model, {**source, HEAD: source[EMBED]}) == []
    assert model.lm_head.weight is model.embed_tokens.weight


async def test_a_source_that_has_only_the_head_fills_a_tied_embedding(start_target, connect, kit):
    source = {name: t.detach() for name, t in LM(tied=True).state_dict().items() if name != EMBED}
    model = LM(tied=True, seed=1)
    target = await start_target(model)
    await (await connect(source, [target])).push_well(1)
    assert kit.differing(model, {**source, EMBED: source[HEAD]}) == []


async def test_an_untied_source_cannot_fill_a_tied_target(start_target, engines):
    target = await start_target(LM(tied=True, seed=1))
    with pytest.raises(PlanError) as caught:
        await engines(LM(tied=False), [target]).connect()
    (problem,) = caught.value.problems
    assert EMBED in problem
    assert HEAD in problem
    assert "separate tensors" in problem


async def test_a_head_that_nobody_declares_tied_is_missing_and_the_tie_is_suggested(start_target, engines):
    source = {name: t.detach() for name, t in LM(tied=False).state_dict().items() if name != HEAD}
    target = await start_target(LM(tied=False, seed=1))
    with pytest.raises(PlanError) as caught:
        await engines(source, [target]).connect()
    (problem,) = caught.value.problems
    assert HEAD in problem
    assert f"if it is tied to {EMBED}" in problem


async def test_untied_on_both_sides_stay_apart(start_target, connect, kit):
    source, model = LM(tied=False), LM(tied=False, seed=1)
    target = await start_target(model)
    await (await connect(source, [target])).push_well(1)
    assert kit.differing(model, dict(source.state_dict())) == []
    assert not torch.equal(model.lm_head.weight, model.embed_tokens.weight)


async def test_mapped_moves_tied_parameters_together(start_target, connect, kit):
    source, model = LM(tied=True), LM(tied=True, seed=1)
    target = await start_target(ModuleLoader(model, movable=True))
    pusher = await connect(source, [target], landing="mapped")
    for version in (1, 2):
        with torch.no_grad():
            source.embed_tokens.weight.add_(1)
        await pusher.push_well(version)
        assert kit.differing(model, dict(source.state_dict())) == []
        assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


# coverage


async def untouched(target, model, before, kit, calls):
    """No byte has moved: nothing was linked or prepared, nothing is served, every parameter is as it was."""
    assert kit.differing(model, before) == []
    assert target.leader.state == "FENCED"
    assert not {"/connect", "/prepare_weights_update", "/complete_weights_update"} & set(calls)


async def test_a_frozen_part_that_is_not_sent_is_listed_before_a_byte_moves(start_target, engines, kit, calls):
    """Only trainable parameters are sent; the target has a frozen vision tower besides, whose content differs."""

    class VLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).requires_grad_(False)
            self.language = nn.Linear(4, 4)

    source, model = VLM(), VLM()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    target = await start_target(model)
    trainable = {name: p.detach() for name, p in source.named_parameters() if p.requires_grad}
    with pytest.raises(PlanError) as caught:
        await engines(trainable, [target]).connect()
    text = "\n".join(caught.value.problems)
    for name in ("vision.{0-1}.weight", "vision.{0-1}.bias"):
        assert name in text or all(name.replace("{0-1}", str(i)) in text for i in (0, 1)), text
    assert "missing in the source" in text
    assert "language" not in text
    await untouched(target, model, before, kit, calls)
    pusher = engines(source, [target])
    await pusher.connect()  # all of it
    await pusher.push_well(1)
    assert kit.differing(model, dict(source.state_dict())) == []


async def test_a_part_that_may_be_absent_says_so_and_stays_as_it_was(start_target, connect, kit):
    model = kit.Bag(kit.stamped({"vision.w": (3, 2), "language.w": (2, 2)}))
    before = model.vision.w.clone()
    target = await start_target(ModuleLoader(model, optional=["vision.*"]))
    source = kit.stamped({"language.w": (2, 2)}, first=500)
    await (await connect(source, [target])).push_well(1)
    assert kit.differing(model, {**source, "vision.w": before}) == []


# rename


async def test_one_renamed_prefix_is_one_error_that_lists_both_and_pairs_them(start_target, engines, kit, calls):
    layers = {f"layers.{i}.{part}": (4, 3) for i in range(3) for part in ("q.weight", "k.weight")}
    source = kit.stamped({f"model.language_model.{name}": shape for name, shape in layers.items()} | {"norm": (4,)})
    model = kit.Bag(kit.stamped({f"model.{name}": shape for name, shape in layers.items()} | {"norm": (4,)}))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    target = await start_target(model)
    with pytest.raises(PlanError) as caught:
        await engines(source, [target]).connect()
    (problem,) = caught.value.problems
    assert "leave out 'language_model'" in problem
    for name in layers:
        assert f"model.language_model.{name}" in problem
        assert f"model.{name}" in problem
    await untouched(target, model, before, kit, calls)


async def test_the_suggested_pair_mends_it(start_target, connect, kit):
    from syncline.adapters.names import NameTable, Rename

    source = kit.stamped({"model.language_model.w": (4, 3)})
    model = kit.Bag(kit.poisoned({"model.w": source["model.language_model.w"]}))
    target = await start_target(model)
    table = NameTable([Rename(r"^model\.language_model\.", "model.")])
    await (await connect(ModuleSource(source, world_size=1, names=table), [target])).push_well(1)
    assert kit.same(model.model.w, source["model.language_model.w"])


# order, empty plan


async def test_tensors_are_matched_by_name_whatever_the_order(start_target, connect, kit, transport, landing):
    """Equal shapes throughout: matched by place, every tensor would land in a wrong one without any error."""
    names = [f"layer.{i}.w" for i in (3, 0, 10, 2, 1, 11)]
    source = kit.stamped(dict.fromkeys(names, (5, 3)))
    model = kit.Bag(kit.poisoned({name: source[name] for name in sorted(names)}))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    pusher = await connect(source, [target], transport=transport, landing=landing, bucket_bytes=100)
    await pusher.push_well(1)
    assert kit.differing(model, source) == []


async def test_sides_that_share_no_name_are_refused(start_target, engines, kit, calls):
    model = kit.Bag(kit.stamped({"b.w": (4,)}))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    target = await start_target(model)
    with pytest.raises(PlanError, match="the plan is empty"):
        await engines(kit.stamped({"a.w": (3,)}), [target]).connect()
    await untouched(target, model, before, kit, calls)


async def test_sides_that_hold_nothing_are_refused(start_target, engines, kit):
    target = await start_target(nn.Identity())
    with pytest.raises(PlanError, match="the plan is empty"):
        await engines({}, [target]).connect()


# companion


async def test_a_float8_weight_whose_scale_the_source_lacks_is_refused(start_target, engines, connect, kit, calls):
    tensors = kit.stamped({"x.weight": ((8, 4), torch.float8_e4m3fn), "x.weight_scale_inv": (1, 1), "y": (2,)})
    model = kit.Bag(kit.poisoned(tensors))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    target = await start_target(ModuleLoader(model, optional=["*scale_inv"]))  # the loader would not mind
    source = {name: t for name, t in tensors.items() if name != "x.weight_scale_inv"}
    with pytest.raises(PlanError, match=r"x\.weight: .*without its scale x\.weight_scale_inv"):
        await engines(source, [target]).connect()
    await untouched(target, model, before, kit, calls)
    await (await connect(tensors, [target])).push_well(1)
    assert kit.differing(model, tensors) == []


# all at once


def crooked(kit):
    """A source of two ranks and two targets with eight problems of as many kinds: sources, models, and words for each."""
    whole = kit.stamped({
        "fine": (4, 2), "hole": (4, 2), "old.q": (3, 2), "old.k": (3, 2), "spare": (5,), "shape": (2, 3),
        "count": ((4,), torch.int32), "fp8": ((4, 2), torch.float8_e4m3fn),
    })  # fmt: skip
    sources = kit.row_shards(whole, 2)
    sources[1].held["hole"] = [(kit.box_of(whole["hole"], (slice(3, 4),)), whole["hole"][3:4].clone())]
    first = {name: t for name, t in whole.items() if name not in ("old.q", "old.k", "spare", "shape", "fp8")}
    first |= kit.stamped({"new.q": (3, 2), "new.k": (3, 2), "shape": (3, 2), "frozen": (7, 7)})
    second = {**first, "count": torch.zeros(4), "fp8": torch.zeros(4, 2), "frozen2": torch.zeros(9)}
    words = [
        "hole: no source rank holds the box start (2, 0) shape (1, 2)", "rename 'old' to 'new'", "spare",
        "shape: the source has", "frozen", "frozen2", "count: the source has int32, target 1 expects float32",
        "fp8: the source has float8_e4m3fn",
    ]  # fmt: skip
    return sources, [kit.Bag(kit.poisoned(first)), kit.Bag(kit.poisoned(second))], words


async def test_every_problem_comes_at_once_by_name_on_every_rank_before_a_byte_moves(start_target, engines, kit, calls):
    sources, models, words = crooked(kit)
    before = [{name: t.clone() for name, t in model.state_dict().items()} for model in models]
    targets = [await start_target(model) for model in models]
    pusher = engines(sources, targets)
    results = await asyncio.gather(*(engine.connect() for engine in pusher.engines), return_exceptions=True)
    assert [type(result) for result in results] == [PlanError, PlanError], results
    assert results[0].problems == results[1].problems
    text = str(results[0])
    assert "no byte was moved" in text
    for word in words:
        assert word in text, text
    for target, model, content in zip(targets, models, before, strict=True):
        await untouched(target, model, content, kit, calls)


async def test_problems_of_the_transport_come_with_those_of_the_plan(start_target, engines, kit):
    class Elsewhere(ModuleLoader):
        def manifest(self, *, rank, world_size, host):
            return super().manifest(rank=rank, world_size=world_size, host="another host")

    tensors = kit.stamped({"a": (3,), "b": (3, 2)})
    target = await start_target(Elsewhere(kit.Bag(kit.poisoned(tensors))))
    with pytest.raises(PlanError) as caught:
        await engines({"a": tensors["a"]}, [target], transport="shm").connect()
    assert len(caught.value.problems) == 2
    assert "'shm' needs source and target on one" in caught.value.problems[0]
    assert "missing in the source, expected by target 0: b" in caught.value.problems[1]


async def test_problems_of_all_source_ranks_come_together(start_target, engines, kit):
    """Each rank finds out for itself what it cannot send; nobody learns only of the fastest one's."""
    whole = kit.stamped({"a": (4, 2)})
    sources = kit.row_shards(whole, 3)

    def refuse(rank):
        def manifest():
            raise PlanError([f"layer.{rank} is packed", "shared is a FakeTensor"])

        return manifest

    for rank in (0, 2):
        sources[rank].manifest = refuse(rank)
    target = await start_target(kit.Bag(kit.poisoned(whole)))
    pusher = engines(sources, [target])
    results = await asyncio.gather(*(engine.connect() for engine in pusher.engines), return_exceptions=True)
    assert [type(result) for result in results] == [PlanError] * 3, results
    for result in results:
        assert sorted(result.problems) == [
            "source rank 0, 2: shared is a FakeTensor", "source rank 0: layer.0 is packed", "source rank 2: layer.2 is packed",
        ]  # fmt: skip


# device


class Manifested(ModuleLoader):
    """Says of its buffers that they lie on another device."""

    def __init__(self, model, device):
        super().__init__(model)
        self.device = device

    def manifest(self, *, rank, world_size, host):
        known = super().manifest(rank=rank, world_size=world_size, host=host)
        buffers = tuple(dataclasses.replace(buffer, device=self.device) for buffer in known.buffers)
        return type(known)(
            rank=rank,
            world_size=world_size,
            host=host,
            tensors=tuple(known.tensors),
            pieces=tuple(known.pieces),
            buffers=buffers,
        )


async def test_tensors_on_a_device_that_no_stage_reaches_are_refused_by_name(start_target, engines, kit, calls):
    """With everything else that is wrong, and not only when the first of them is touched."""
    whole = kit.stamped({"a": (4, 2), "b": (4,), "c": (4,)})
    model = kit.Bag(kit.poisoned({**whole, "missing": whole["b"]}))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sources = kit.row_shards(whole, 2)
    sources[1].devices = {"a": "xpu:1", "b": "xpu:1"}
    target = await start_target(Manifested(model, "xpu:0"))
    pusher = engines(sources, [target])
    results = await asyncio.gather(*(engine.connect() for engine in pusher.engines), return_exceptions=True)
    assert [type(result) for result in results] == [PlanError, PlanError]
    text = str(results[0])
    assert "source rank 1 holds a, b on xpu:1; weights are moved in memory of the host and of CUDA devices only" in text
    assert "target 0 rank 0 holds a, b, c, missing on xpu:0" in text
    assert "missing in the source" in text
    await untouched(target, model, before, kit, calls)


@pytest.mark.parametrize("side", ["source", "target"])
async def test_the_meta_device_has_no_content(start_target, engines, kit, side):
    whole = kit.stamped({"a": (4, 2), "b": (4,)})
    meta = {name: tensor.to("meta") for name, tensor in whole.items()}
    target = await start_target(kit.Bag(meta if side == "target" else kit.poisoned(whole)))
    with pytest.raises(PlanError, match="a, b is on the meta device, where it has no content"):
        await engines(meta if side == "source" else whole, [target]).connect()
