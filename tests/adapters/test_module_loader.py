"""`ModuleLoader`: any module, in place; ``movable``: pointed at landed memory, ties and views together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3MoeConfig

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.names import NameTable, Rename, named_box
from syncline.adapters.trainers import ModuleSource
from syncline.engine.loader import Landed, Loader
from syncline.scheduler.errors import PlanError

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of(kind: str, seed: int) -> nn.Module:
    config = {
        "llama": LlamaConfig(**TINY),
        "llama-tied": LlamaConfig(**TINY, tie_word_embeddings=True),
        "mixtral": MixtralConfig(**TINY, num_local_experts=3, num_experts_per_tok=2),
        "qwen3_moe-tied": Qwen3MoeConfig(
            **TINY, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12, tie_word_embeddings=True
        ),
    }[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    return model.eval()


def manifest_of(loader: ModuleLoader):
    return loader.manifest(rank=0, world_size=1, host="here")


def canonical(source: ModuleSource) -> dict[str, torch.Tensor]:
    manifest, buffers = source.manifest(), source.buffers()
    found = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors}
    for piece in manifest.pieces:
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        buffer = buffers[piece.buffer]
        view = buffer.as_strided(piece.box.shape, piece.strides, buffer.storage_offset() + piece.offset)
        found[manifest.tensors[piece.tensor].name][region] = view
    return found | {alias: found[name] for alias, name in manifest.aliases.items()}


def landed_for(loader: ModuleLoader, whole: dict[str, torch.Tensor]) -> list[Landed]:
    """Each piece of the loader, cut out of the whole tensors, as the receiver hands it over."""
    manifest = manifest_of(loader)
    parts = []
    for index, piece in enumerate(manifest.pieces):
        tensor = manifest.tensors[piece.tensor]
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        part = whole[tensor.name][region].to(getattr(torch, tensor.dtype), copy=True).contiguous()
        parts.append(Landed(piece=index, box=piece.box, tensor=part))
    return parts


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mixtral", "qwen3_moe-tied"])
@pytest.mark.parametrize("move", [False, True])
def test_a_model_becomes_the_other(kind, move):
    trained, served = model_of(kind, 1), model_of(kind, 2)
    loader = ModuleLoader(served, movable=move)
    assert isinstance(loader, Loader)
    assert not torch.equal(logits(served), logits(trained))
    before, fingerprint = pointers(served), manifest_of(loader).fingerprint
    for scale in (1, 2):  # two updates: the second one must be right too
        with torch.no_grad():
            for param in trained.parameters():
                param.mul_(scale)
        parts = landed_for(loader, canonical(ModuleSource(trained)))
        loader.begin(scale)
        (loader.rebind if move else loader.install)(parts)
        loader.finish(scale)
        assert torch.equal(logits(served), logits(trained))
        assert manifest_of(loader).fingerprint == fingerprint
        landed = {part.tensor.data_ptr() for part in parts}
        for name, pointer in pointers(served).items():
            if move and ".experts." not in name:
                assert pointer in landed
            else:
                assert pointer == before[name]
    if kind.endswith("tied"):
        assert served.lm_head.weight.data_ptr() == served.model.embed_tokens.weight.data_ptr()


def test_buffers_are_live_and_content_is_written_through_them():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("scratch", torch.full((2,), 7.0), persistent=False)
    loader = ModuleLoader(model)
    manifest = manifest_of(loader)
    assert {t.name for t in manifest.tensors} == set(model.state_dict())
    for buffer in loader.buffers():
        buffer.zero_()  # a receiver in streamed or staged landing
    assert all((tensor == 0).all() for tensor in model.state_dict().values())
    assert (model.scratch == 7).all()
    assert manifest_of(loader) is manifest


def test_dtype_is_the_targets():
    trained, served = model_of("llama", 1), model_of("llama", 2).to(torch.bfloat16)
    loader = ModuleLoader(served)
    assert {t.dtype for t in manifest_of(loader).tensors} == {"bfloat16"}
    loader.install(landed_for(loader, canonical(ModuleSource(trained))))
    assert torch.equal(served.lm_head.weight, trained.lm_head.weight.to(torch.bfloat16))


class Shared(nn.Module):
    """Everything that may share a parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3, bias=False)
        self.same = nn.Linear(4, 3, bias=False)
        self.same.weight = self.a.weight
        self.stored = nn.Linear(4, 3, bias=False)
        self.stored.weight.data = self.a.weight.data
        self.turned = self.a.weight.detach().t()
        self.register_buffer("row", self.a.weight.detach()[1, 1:3], persistent=False)
        fused = torch.zeros(4, 2)
        self.left, self.right = nn.Parameter(fused[:2]), nn.Parameter(fused[2:])
        self.words = nn.Parameter(torch.zeros(2, 2))
        self.as_int = self.words.detach().view(torch.int32)
        self.columns = nn.Parameter(torch.zeros(2, 3).t())


def test_rebind_moves_ties_views_and_attributes_together():
    model = Shared()
    loader = ModuleLoader(model, movable=True)
    manifest = manifest_of(loader)
    assert manifest.movable
    assert manifest.aliases == {"same.weight": "a.weight", "stored.weight": "a.weight"}
    whole = {t.name: torch.rand(t.shape) for t in manifest.tensors}
    before = pointers(model)
    parts = landed_for(loader, whole)
    loader.rebind(parts)
    landed = {manifest.tensors[manifest.pieces[p.piece].tensor].name: p.tensor for p in parts}
    assert model.a.weight.data_ptr() == landed["a.weight"].data_ptr()
    for other in (model.same.weight, model.stored.weight, model.a.weight):
        assert torch.equal(other, whole["a.weight"])
    landed["a.weight"][1, 2] = 42.0  # one memory: everybody sees it
    assert [model.a.weight[1, 2], model.stored.weight[1, 2], model.turned[2, 1], model.row[1]] == [42.0] * 4
    # What cannot be moved whole is copied, at its old address.
    for name in ("left", "right", "words", "columns"):
        assert torch.equal(getattr(model, name), whole[name])
        assert getattr(model, name).data_ptr() == before[name]
    assert torch.equal(model.as_int, whole["words"].view(torch.int32))
    assert manifest_of(loader) is manifest
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())


def test_unmap_gives_own_memory_back():
    model = nn.Linear(3, 2)
    loader = ModuleLoader(model, movable=True)
    parts = landed_for(loader, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    loader.rebind(parts)
    manifest = manifest_of(loader)
    loader.unmap()
    parts[0].tensor.zero_()
    assert (model.weight == 1).all()
    assert manifest_of(loader) is manifest
    assert [buffer.data_ptr() for buffer in loader.buffers()] == [model.weight.data_ptr(), model.bias.data_ptr()]


def test_install_after_rebind_leaves_the_landed_memory_alone():
    """Landed memory is shared with other receivers: a later copy in place must not go there."""
    model = nn.Linear(3, 2)
    loader = ModuleLoader(model, movable=True)
    first = landed_for(loader, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    loader.rebind(first)
    loader.install(landed_for(loader, {"weight": torch.full((2, 3), 2.0), "bias": torch.full((2,), 2.0)})[:1])
    assert (first[0].tensor == 1).all()
    assert (model.weight == 2).all()
    assert model.bias.data_ptr() == first[1].tensor.data_ptr()


def test_parts_of_a_piece():
    model = nn.Linear(3, 4)
    loader = ModuleLoader(model, movable=True)
    manifest = manifest_of(loader)
    old = model.weight.detach().clone()
    box = type(manifest.pieces[0].box)(start=(1, 1), shape=(2, 2))
    loader.rebind([Landed(piece=0, box=box, tensor=torch.full((2, 2), 9.0))])  # not whole: copied
    old[1:3, 1:3] = 9
    assert torch.equal(model.weight, old)


def test_rebind_needs_movable():
    with pytest.raises(ValueError, match="movable=True"):
        ModuleLoader(nn.Linear(2, 2)).rebind([])


def test_reallocated_memory_changes_the_fingerprint():
    model = nn.Linear(2, 2)
    loader = ModuleLoader(model, movable=True)
    before = manifest_of(loader).fingerprint
    model.weight.data = model.weight.data.clone()
    after = manifest_of(loader).fingerprint
    assert after != before
    loader.rebind(landed_for(loader, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}))
    assert manifest_of(loader).fingerprint == after
    model.bias.data = model.bias.data.clone()  # not our doing
    assert manifest_of(loader).fingerprint != after


def test_a_linear_sharded_by_hand():
    """Two ranks of a target: rows of the first, columns of the second, and a fused gate and up."""
    whole = {"up.weight": torch.rand(8, 4), "down.weight": torch.rand(4, 8), "gate.weight": torch.rand(8, 4)}
    for rank in (0, 1):
        model = nn.Module()
        model.fused = nn.Linear(4, 8, bias=False)  # [gate; up], four rows each
        model.down = nn.Linear(4, 4, bias=False)
        rows = {"shape": (8, 4), "start": (4 * rank, 0), "size": (4, 4)}
        layout = {
            "fused.weight": [named_box("gate.weight", **rows), named_box("up.weight", **rows, local_start=(4, 0))],
            "down.weight": named_box("down.weight", (4, 8), start=(0, 4 * rank), size=(4, 4)),
        }
        loader = ModuleLoader(model, layout=layout)
        loader.install(landed_for(loader, whole))
        mine = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(model.fused.weight, torch.cat([whole["gate.weight"][mine], whole["up.weight"][mine]]))
        assert torch.equal(model.down.weight, whole["down.weight"][:, mine])


def test_layouts_that_do_not_fit():
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="parameters that the module does not have: wieght"):
        manifest_of(ModuleLoader(model, layout={"wieght": named_box("weight", (4, 4))}))
    with pytest.raises(ValueError, match="leaves the parameter of shape"):
        manifest_of(ModuleLoader(model, layout={"weight": named_box("weight", (8, 4))}))


def test_names_optional_and_on_update():
    seen = []
    model = nn.Linear(2, 2)
    loader = ModuleLoader(model, names=NameTable([Rename("^", "model.")]), optional=("*.bias",), on_update=seen.append)
    manifest = manifest_of(loader)
    assert [t.name for t in manifest.tensors] == ["model.weight", "model.bias"]
    assert manifest.optional == {"model.bias"}
    loader.finish(7)
    assert seen == [7]


def test_memory_that_cannot_be_written_is_refused(tmp_path):
    import mmap

    (tmp_path / "raw").write_bytes(bytes(64))
    with (tmp_path / "raw").open("rb") as file, mmap.mmap(file.fileno(), 64, prot=mmap.PROT_READ) as raw:
        model = nn.Module()
        with pytest.warns(UserWarning, match="not writable"):
            model.mapped = nn.Parameter(torch.frombuffer(raw, dtype=torch.float32))
        model.register_buffer("expanded", torch.ones(1).expand(3))
        with pytest.raises(PlanError) as caught:
            manifest_of(ModuleLoader(model))
        assert [problem.split(" ")[0] for problem in caught.value.problems] == ["mapped", "expanded"]
        del model


def test_inference_tensors():
    with torch.inference_mode():
        model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    loader = ModuleLoader(model, movable=True)
    whole = {t.name: torch.rand(t.shape) for t in manifest_of(loader).tensors}
    loader.install(landed_for(loader, whole))
    assert torch.equal(model.model.norm.weight, whole["model.norm.weight"])
    loader.rebind(landed_for(loader, whole))
    loader.buffers()[0].mul_(2)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            hidden = model.model(torch.arange(3)[None]).last_hidden_state
            assert torch.equal(model.lm_head(hidden), hidden @ whole["lm_head.weight"].T)
            assert torch.equal(model.model.embed_tokens.weight, whole["model.embed_tokens.weight"] * 2)
