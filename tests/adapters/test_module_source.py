"""`ModuleSource`: what a module or dict offers, and when it counts as changed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from syncline.adapters.names import NameTable, Rename
from syncline.adapters.trainers import ModuleSource
from syncline.engine.errors import ConfigError
from syncline.engine.host import host_id
from syncline.engine.source import Source
from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Manifest


def content(source: ModuleSource) -> dict[str, torch.Tensor]:
    """Canonical tensors, put together from the pieces; every element written exactly once."""
    manifest, buffers = source.manifest(), source.buffers()
    found = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors}
    count = {t.name: torch.zeros(t.shape, dtype=torch.int) for t in manifest.tensors}
    for piece in manifest.pieces:
        name = manifest.tensors[piece.tensor].name
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        buffer = buffers[piece.buffer]
        found[name][region] = buffer.as_strided(piece.box.shape, piece.strides, buffer.storage_offset() + piece.offset)
        count[name][region] += 1
    assert all((c == 1).all() for c in count.values())
    return found


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6).view(2, 3).t())
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.inner[0].weight.requires_grad_(False)


def test_a_module_offers_its_state_dict():
    model = Toy()
    source = ModuleSource(model)
    assert isinstance(source, Source)
    wanted = model.state_dict()
    wanted.pop("head.weight")
    found = content(source)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    manifest = source.manifest()
    assert manifest.aliases == {"head.weight": "embed.weight"}
    assert (manifest.rank, manifest.world_size, manifest.host) == (0, 1, host_id())
    assert [b.data_ptr() for b in source.buffers()] == [t.data_ptr() for t in wanted.values()]
    assert not any(buffer.requires_grad for buffer in source.buffers())
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_dict_of_tensors_of_all_kinds():
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "plain": base.clone(),
        "transposed": base.t(),
        "sliced": base[:, 1:4],
        "stepped": base[::2, ::3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "eight": torch.ones(3).to(torch.float8_e4m3fn).view(torch.uint8),
        "complex": torch.ones(2, dtype=torch.complex64),
        "again": base.t(),
    }
    source = ModuleSource(tensors)
    found = content(source)
    assert source.manifest().aliases == {"again": "transposed"}
    for name, tensor in tensors.items():
        assert torch.equal(found["transposed" if name == "again" else name], tensor), name
    sizes = {buffer.name: buffer.nbytes for buffer in source.manifest().buffers}
    assert sizes["plain"] == 96
    assert sizes["sliced"] == 4 * (3 * 6 + 2 + 1)  # from its first to its last element
    assert sizes["expanded"] == 4 * 2
    assert "empty" not in sizes


def test_ties_by_object_by_storage_and_by_module():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight.data = self.a.weight.data
            self.c = self.a
            self.d = nn.Parameter(self.a.weight.detach().t())  # the same memory, other content: no tie

    source = ModuleSource(Tied())
    assert source.manifest().aliases == {"b.weight": "a.weight", "c.weight": "a.weight"}
    assert [t.name for t in source.manifest().tensors] == ["d", "a.weight"]


def test_mapped_files_are_said_to_be_files(tmp_path):
    save_file({"w": torch.arange(2000.0)}, tmp_path / "w.safetensors")
    mapped = load_file(tmp_path / "w.safetensors")["w"]
    (tmp_path / "raw").write_bytes(bytes(4096))
    raw = torch.from_numpy(np.memmap(tmp_path / "raw", dtype=np.float32, mode="r+"))
    shared = torch.ones(2000).share_memory_()
    source = ModuleSource({"mapped": mapped, "raw": raw, "plain": torch.ones(2000), "shared": shared})
    kinds = {buffer.name: buffer.kind for buffer in source.manifest().buffers}
    assert kinds == {"mapped": "file", "raw": "file", "plain": "memory", "shared": "memory"}


def test_meta_tensors_are_kept_for_planning_to_refuse():
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    source = ModuleSource(model)
    assert {(buffer.name, buffer.device) for buffer in source.manifest().buffers} == {("weight", "meta"), ("bias", "meta")}
    assert source.manifest() is source.manifest()


def test_everything_that_cannot_travel_is_listed_at_once():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    tensors = {
        "fine": torch.ones(2),
        "text": "not a tensor",
        "sparse": torch.eye(2).to_sparse(),
        "lazy": nn.UninitializedParameter(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "fake": fake,
    }
    with pytest.raises(PlanError) as caught:
        ModuleSource(tensors).manifest()
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["text", "sparse", "lazy", "conjugate", "fake"]


def test_two_parameters_with_one_name_are_refused():
    table = NameTable([Rename(r"^b$", "a"), Rename(r"^d$", "c")])
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(3)}
    with pytest.raises(PlanError, match=r"b .* and a .* both map to a") as caught:
        ModuleSource(tensors, names=table).manifest()
    assert len(caught.value.problems) == 2


def test_optional_names_and_patterns():
    source = ModuleSource(Toy(), optional=("inner.1.*", "table", "absent"))
    norm = {f"inner.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert source.manifest().optional == norm | {"table"}


def step(model: nn.Module) -> None:
    torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def test_steps_in_place_are_no_change():
    model = Toy()
    source = ModuleSource(model)
    manifest = source.manifest()
    model.head(model.inner(model.embed(torch.arange(5)))).sum().backward()
    step(model)
    assert source.manifest() is manifest
    assert torch.equal(content(source)["embed.weight"], model.embed.weight)


def replace_data(model: Toy) -> None:
    model.embed.weight.data = model.embed.weight.data.clone()


def replace_parameter(model: Toy) -> None:
    model.inner[0].bias = nn.Parameter(model.inner[0].bias.detach().clone())


def replace_buffer(model: Toy) -> None:
    model.table = model.table.clone()


def reshape_in_place(model: Toy) -> None:
    model.inner[0].weight.data = model.inner[0].weight.data.view(2, 8)


def transpose_in_place(model: Toy) -> None:
    model.inner[0].weight.data = model.inner[0].weight.data.t()


def retype_in_place(model: Toy) -> None:
    model.inner[0].bias.data = model.inner[0].bias.data.view(torch.int32).view(torch.float32).view(torch.bfloat16)[:4]


def add_parameter(model: Toy) -> None:
    model.gain = nn.Parameter(torch.ones(1))


def add_buffer(model: Toy) -> None:
    model.inner.register_buffer("count", torch.zeros(1))


def add_module(model: Toy) -> None:
    model.inner.append(nn.Linear(4, 4))


def swap_module(model: Toy) -> None:
    model.inner[0] = nn.Linear(4, 4)


def drop_parameter(model: Toy) -> None:
    model.inner[0].bias = None


def untie(model: Toy) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


CHANGES = (
    replace_data,
    replace_parameter,
    replace_buffer,
    reshape_in_place,
    transpose_in_place,
    add_parameter,
    add_buffer,
    add_module,
    swap_module,
    drop_parameter,
    untie,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_seen(change):
    model = Toy()
    source = ModuleSource(model)
    before = source.manifest()
    change(model)
    after = source.manifest()
    assert after is not before
    assert after.fingerprint != before.fingerprint
    wanted = model.state_dict()
    for name, tensor in content(source).items():
        assert torch.equal(tensor, wanted[name]), name
    assert source.manifest() is after


def test_a_type_that_changes_at_the_same_address_is_seen():
    model = nn.Linear(2, 2)
    source = ModuleSource(model)
    before = source.manifest()
    model.bias.data = model.bias.data.view(torch.int32).view(torch.float32)
    assert source.manifest() is before  # nothing changed
    tensors = {"w": torch.zeros(4)}
    source = ModuleSource(tensors)
    before = source.manifest()
    tensors["w"] = tensors["w"].view(torch.int32)
    assert source.manifest().tensors[0].dtype == "int32"
    tensors["new"] = torch.ones(1)
    assert len(source.manifest().tensors) == 2


def test_an_unchanged_manifest_costs_a_few_calls_a_tensor():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(500)))
    source = ModuleSource(model)
    manifest = source.manifest()
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        again = source.manifest()
    finally:
        sys.setprofile(None)
    assert again is manifest
    assert calls < 6 * 1000  # building it takes about 170 a tensor


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2 does not exist"),
        ({"rank": -1}, "rank -1"),
        ({"world_size": 0}, "world_size 0"),
        ({"rank": 0, "world_size": 2}, r"not initialized and no process_group"),
    ],
)
def test_places_that_do_not_exist(place, message):
    with pytest.raises(ConfigError, match=message):
        ModuleSource({"w": torch.ones(1)}, **place)


def test_no_bigger_job_means_one_rank():
    source = ModuleSource({"w": torch.ones(1)}, rank=0, world_size=1)
    assert (source.rank, source.world_size, source.process_group) == (0, 1, None)
    assert len(source.buffers()) == 1
