"""Layouts learned from a loader: what a vLLM-like loader does is found out exactly, and what can't be is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn

from syncline.adapters.engines.learned import LearnedLayout, learn_layout
from syncline.adapters.engines.learned_check import check_layout, content
from syncline.adapters.engines.tp_layout import Parallel, tp_layout
from syncline.adapters.named_box import named_box
from syncline.adapters.trainers import ModuleSource
from syncline.engine.errors import LoaderError
from syncline.scheduler.layout import Tensor

CASES = [("llama", 1, False), ("llama", 2, False), ("llama", 8, False), ("llama-tied", 2, False), ("qwen2", 4, False),
         ("qwen3-moe", 2, False), ("qwen3-moe", 2, True), ("mixtral", 4, False), ("mixtral", 2, True)]  # fmt: skip


def tensor(name: str, *shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(name=name, shape=shape, dtype=dtype)


@pytest.mark.parametrize(("kind", "size", "ep"), CASES)
def test_a_loader_like_vllms_is_learned_exactly(tiny_engine, kind: str, size: int, ep: bool) -> None:
    """The same boxes as `tp_layout` makes from the config, without any; nothing is touched meanwhile."""
    tensors = ModuleSource(tiny_engine.reference(kind)).manifest().tensors
    config = tiny_engine.config_of(kind)
    used = set()
    for rank in range(size):
        engine = tiny_engine.TinyEngine(config, rank, size, ep=ep)
        for number, param in enumerate(engine.parameters()):
            param.data.fill_(number + 0.5)
        before = {name: (param.data_ptr(), param.clone()) for name, param in engine.named_parameters()}
        learned = learn_layout(engine, engine.load_weights, tensors)
        check_layout(engine, engine.load_weights, learned)
        for name, param in engine.named_parameters():
            assert param.data_ptr() == before[name][0] and torch.equal(param, before[name][1]), name
        assert not learned.through_loader
        used.update(learned.direct)
        parallel = Parallel(tp_rank=rank, tp_size=size, ep_rank=rank if ep else 0, ep_size=size if ep else 1)
        for name, boxes in tp_layout(config, engine, parallel).items():
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                assert sorted(map(repr, learned.layout[name])) == sorted(map(repr, boxes)), name
    assert used == {t.name for t in tensors}


class Odd(nn.Module):
    """One parameter, loaded in an odd way."""

    def __init__(self, load: Callable[[Odd, str, torch.Tensor], None], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((8, 6), 3.0, dtype=dtype))
        self.plain = nn.Parameter(torch.full((4, 6), 3.0))
        self.scale = nn.Parameter(torch.full((1,), 3.0))
        self.hidden = [torch.zeros(8, 6)]
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "plain":
                self.plain.data.copy_(loaded)
            else:
                self._load(self, name, loaded)


def learn(model: Odd, *tensors: Tensor) -> LearnedLayout:
    """Learn, with a tensor beside that nothing is odd about; and nothing of the module may change."""
    before = {name: (param.data_ptr(), param.clone()) for name, param in model.named_parameters()}
    learned = learn_layout(model, model.load_weights, [tensor("plain", 4, 6), *tensors])
    for name, param in model.named_parameters():
        assert param.data_ptr() == before[name][0] and torch.equal(param, before[name][1]), name
    assert "plain" in learned.direct
    return learned


def transposed(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded.t().contiguous())


def cast_first(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data[:, :].copy_(loaded.to(model.w.dtype).clone())


def by_buffer(model: Odd, name: str, loaded: torch.Tensor) -> None:
    whole = torch.empty(8, 6)
    whole[:3] = loaded[5:]
    whole[3:] = loaded[:5]
    model.w.data.copy_(whole)


def joined(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(torch.cat([loaded[4:], loaded[:4]]))


def interleaved(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded.reshape(4, 2, 6).transpose(0, 1).reshape(8, 6))


def twice(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data[:4].copy_(loaded[:4])
    model.w.data[4:].copy_(loaded[:4])


def filled(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.fill_(0)
    model.w.data[:5].copy_(loaded[:5])


@pytest.mark.parametrize("load", [transposed, cast_first, by_buffer, joined, interleaved, twice, filled])
def test_moved_elements_are_followed(load: Callable[[Odd, str, torch.Tensor], None]) -> None:
    model = Odd(load)
    odd = tensor("odd", *((6, 8) if load is transposed else (8, 6)))
    learned = learn(model, odd)
    assert learned.direct == ("plain", "odd") and not learned.through_loader
    check_layout(model, model.load_weights, learned)


@pytest.mark.parametrize("factor", [1, 2])
def test_a_value_that_is_asked_for_may_be_kept_anywhere(factor: int) -> None:
    """As vLLM's default loader fills parameters of one element: nobody sees where else the number goes."""
    learned = learn(Odd(lambda model, name, loaded: model.scale.data.fill_(factor * loaded.item())), tensor("odd"))
    assert learned.through_loader == {"odd": "the loader asks for a value of odd"}


def beside_an_attribute(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded)
    model.kept = loaded * 2


def beside_a_view(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded)
    model.kept = loaded.clone()[1:]


def beside_the_tensor_itself(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded)
    model.kept = loaded


def beside_a_buffer(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded)
    model.cache.copy_(loaded[0])


@pytest.mark.parametrize("load", [beside_an_attribute, beside_a_view, beside_the_tensor_itself, beside_a_buffer])
def test_what_is_kept_beside_the_parameter_goes_through_the_loader(load: Callable[[Odd, str, torch.Tensor], None]) -> None:
    model = Odd(load)
    model.register_buffer("cache", torch.full((6,), 7.0), persistent=False)
    learned = learn(model, tensor("odd", 8, 6))
    reason = "the loader keeps something of it that is no parameter and no persistent buffer"
    assert (learned.direct, learned.through_loader) == (("plain",), {"odd": reason})
    assert not hasattr(model, "kept") and bool((model.cache == 7.0).all())


def memory_of_its_own(model: Odd, name: str, loaded: torch.Tensor) -> None:
    scratch = torch.empty(8, 6)
    scratch[:4].copy_(loaded[:4])
    scratch[4:].copy_(loaded[4:])
    model.w.data.copy_(scratch)


def test_memory_that_the_loader_makes_on_its_way_is_not_kept() -> None:
    assert learn(Odd(memory_of_its_own), tensor("odd", 8, 6)).direct == ("plain", "odd")


def test_the_check_leaves_nothing_behind() -> None:
    def load(model: Odd, name: str, loaded: torch.Tensor) -> None:
        model.w.data.copy_(loaded)
        model.cache.copy_(loaded[0])
        model.largest = float(loaded.max())
        model.new = loaded.clone()

    model = Odd(load)
    model.register_buffer("cache", torch.full((6,), 7.0), persistent=False)
    model.largest = 3.5
    cache = model.cache
    learned = learn(model, tensor("odd", 8, 6))
    check_layout(model, model.load_weights, learned)
    assert model.cache is cache and bool((cache == 7.0).all())
    assert model.largest == 3.5 and not hasattr(model, "new")


def test_one_tensor_in_two_parameters_goes_through_the_loader() -> None:
    def load(model: Odd, name: str, loaded: torch.Tensor) -> None:
        model.w.data.copy_(loaded)
        model.other.data[:4].copy_(loaded[:4])

    model = Odd(load)
    model.other = nn.Parameter(torch.zeros(8, 6))
    learned = learn(model, tensor("odd", 8, 6))
    assert learned.through_loader == {"odd": "the loader copies it to several parameters: other, w"}


def computed(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded + 1)


def in_place(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded)
    model.w.data.mul_(2)


def spoiled(model: Odd, name: str, loaded: torch.Tensor) -> None:
    mine = loaded.clone()
    mine[0] = 0
    model.w.data.copy_(mine)


def replaced(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w = nn.Parameter(loaded.t().contiguous().t())


def repointed(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data = loaded


def looked_at(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded if loaded.abs().max() > 1 else -loaded)


def by_numpy(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(torch.from_numpy(np.ascontiguousarray(loaded.numpy())))


def kept(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.hidden[0].copy_(loaded)


def narrowed(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded.to(torch.bfloat16))


def expanded(model: Odd, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded[:1].expand(8, 6))


def refused(model: Odd, name: str, loaded: torch.Tensor) -> None:
    raise KeyError(f"{name} is not known")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (computed, r"computes w from it"),
        (in_place, r"changes w after loading it"),
        (spoiled, r"computes w from it"),
        (replaced, r"replaces w"),
        (repointed, r"raised RuntimeError: .*incompatible tensor type"),
        (looked_at, r"asks for a value"),
        (by_numpy, r"raised (TypeError|RuntimeError)"),
        (kept, r"keeps something of it"),
        (narrowed, r"converts it"),
        (expanded, r"no set of boxes"),
        (refused, r"raised KeyError: .odd.0 is not known"),
    ],
)
def test_what_the_loader_computes_is_named(load: Callable[[Odd, str, torch.Tensor], None], reason: str) -> None:
    learned = learn(Odd(load), tensor("odd.0", 8, 6))
    assert list(learned.through_loader) == ["odd.0"]
    assert re.search(reason, learned.through_loader["odd.0"])
    assert all(box.is_padding for box in learned.layout["w"])
    assert "odd.0" in str(learned) and learned.through_loader["odd.0"] in str(learned)


def test_what_shares_a_computed_parameter_goes_along() -> None:
    """A part that is computed may depend on the order in which the loader writes: all of that parameter is left to it."""

    def load(model: Odd, name: str, loaded: torch.Tensor) -> None:
        model.w.data[:4].copy_(loaded) if name == "a" else model.w.data[4:].copy_(loaded * 2)

    learned = learn(Odd(load), tensor("a", 4, 6), tensor("b", 4, 6))
    assert set(learned.through_loader) == {"a", "b"}
    assert learned.untouched == ("scale",)


def test_parts_that_overlap_are_left_to_the_loader() -> None:
    def load(model: Odd, name: str, loaded: torch.Tensor) -> None:
        model.w.data[:5].copy_(loaded) if name == "a" else model.w.data[3:].copy_(loaded)

    learned = learn(Odd(load), tensor("a", 5, 6), tensor("b", 5, 6))
    assert set(learned.through_loader) == {"a", "b"} and "twice" in learned.through_loader["a"]


def test_a_loader_that_fails_on_everything() -> None:
    def broken(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AttributeError("'Parameter' object has no attribute 'weight_loader'")

    learned = learn_layout(nn.Linear(2, 3), broken, [tensor("weight", 3, 2), tensor("bias", 3)])
    assert not learned.direct
    assert set(learned.through_loader) == {"weight", "bias"}
    assert "has no attribute 'weight_loader'" in learned.through_loader["bias"]


def test_a_wrong_layout_is_caught(tiny_engine) -> None:
    """The proof can fail: gate and up swapped, and an o_proj of another rank, are what the loader does not do."""
    tensors = ModuleSource(tiny_engine.reference("llama")).manifest().tensors
    config = tiny_engine.config_of("llama")
    engine, other = (tiny_engine.TinyEngine(config, rank, 2) for rank in range(2))
    before = {name: param.clone() for name, param in engine.named_parameters()}
    learned, theirs = learn_layout(engine, engine.load_weights, tensors), learn_layout(other, other.load_weights, tensors)
    gate, up = learned.layout["model.layers.0.mlp.gate_up_proj.weight"]
    swapped = {
        "model.layers.0.mlp.gate_up_proj.weight": [
            named_box(box.name, box.shape, start=box.start, size=box.size, local_start=place.local_start)
            for box, place in ((gate, up), (up, gate))
        ]
    }
    name = "model.layers.1.self_attn.o_proj.weight"
    for wrong in (swapped, {name: theirs.layout[name]}):
        faulty = LearnedLayout(
            tensors=learned.tensors, layout={**learned.layout, **wrong}, direct=learned.direct, through_loader={}, unused=(),
            untouched=(),
        )  # fmt: skip
        with pytest.raises(LoaderError, match=f"{next(iter(wrong))} holds something else than what was learned"):
            check_layout(engine, engine.load_weights, faulty)
    assert all(torch.equal(param, before[name]) for name, param in engine.named_parameters())


def test_made_up_content_tells_tensors_and_seeds_apart() -> None:
    one, two = (content(tensor(name, 64, 64), 0) for name in ("a", "b"))
    assert not torch.equal(one, two) and not torch.equal(one, content(tensor("a", 64, 64), 1))
    assert torch.equal(one.bfloat16().float(), one)
