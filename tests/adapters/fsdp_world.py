"""One rank of a gloo world that shards stamped models in many ways and checks what `FSDPSource` says of each.

Started by test_fsdp_source.py, one process a rank: ``fsdp_world.py RANK WORLD FOLDER CASE...``. Every element of every
parameter carries a number of its own, so a wrong box, stride or offset shows as a wrong value. Results go to a JSON file.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import FSDPSource, ModuleSource
from syncline.engine.errors import ConfigError
from syncline.engine.loader import Landed
from syncline.engine.source import Source
from syncline.scheduler.errors import PlanError

FOLDER = Path(sys.argv[3])
SPLIT = {f"layers.{i}.{name}": 1 for i in (0, 1) for name in ("up.weight", "up.bias", "down.weight")}  # by both axes


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Rows that divide by no world size, a tied head, buffers of both kinds, a frozen part, a tensor smaller than the world."""

    def __init__(self, width: int = 8, inner: int = 12, vocab: int = 11, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([Block(width, inner), Block(width, inner)])
        self.small = nn.Parameter(torch.zeros(2, width))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.layers[0].up.weight.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.small.sum(0)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stamped(model: nn.Module) -> dict[str, torch.Tensor]:
    """Number all elements; returns the whole tensors by name, as they are now."""
    full, at = {}, 1
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(torch.arange(at, at + tensor.numel()).view(tensor.shape))
            at += tensor.numel()
            full[name] = tensor.detach().clone()
    assert at < 2**24  # exact in float32
    return full


def views(source: ModuleSource):
    """Name, box and local content of every piece."""
    manifest, buffers = source.manifest(), source.buffers()
    assert len(buffers) == len(manifest.buffers)
    for piece in manifest.pieces:
        buffer = buffers[piece.buffer]
        view = buffer.as_strided(piece.box.shape, piece.strides, buffer.storage_offset() + piece.offset)
        yield manifest.tensors[piece.tensor].name, piece.box, view


def check(source: ModuleSource, full: dict[str, torch.Tensor], copies: int | dict[str, int]) -> None:
    """Every piece holds the numbers of its box, and together the ranks hold each element ``copies`` times."""
    manifest = source.manifest()
    assert isinstance(source, Source)
    assert {t.name: t.shape for t in manifest.tensors} == {name: tuple(t.shape) for name, t in full.items()}
    counts = {name: torch.zeros(t.shape, dtype=torch.int32) for name, t in full.items()}
    for name, box, view in views(source):
        region = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
        assert torch.equal(view, full[name][region]), (name, box)
        counts[name][region] += 1
    for name, count in counts.items():
        if source.process_group is not None:
            dist.all_reduce(count, group=source.process_group)
        expected = copies if isinstance(copies, int) else copies.get(name, copies["*"])
        assert (count == expected).all(), (name, expected, count)
    assert source.manifest() is manifest


def member(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def sharded(mesh: DeviceMesh, **options) -> tuple[Net, dict[str, torch.Tensor]]:
    model = Net(**options.pop("net", {}))
    full = stamped(model)
    full.pop("cache")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, full


def case_one_dimension() -> None:
    for ranks in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]):
        mesh = DeviceMesh("cpu", ranks)
        if not member(mesh):
            continue
        model, full = sharded(mesh)
        source = FSDPSource(model)
        assert (source.rank, source.world_size) == (ranks.index(dist.get_rank()), len(ranks))
        check(source, full, {"*": 1, "scale": len(ranks)})
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), full[name]), name
        assert source.manifest().aliases == {"head.weight": "embed.weight"}
        if len(ranks) == 5 and dist.get_rank() == 4:  # 2 rows over 5 ranks
            assert "small" not in {name for name, _, _ in views(source)}


def case_rank_order() -> None:
    for ranks in ([2, 3], [3, 1], [4, 2, 0], [4, 3, 2, 1, 0]):
        mesh = DeviceMesh("cpu", ranks)
        if not member(mesh):
            continue
        model, full = sharded(mesh)
        source = FSDPSource(model)
        assert source.world_size == len(ranks)
        assert source.rank == dist.get_rank(source.process_group)
        assert dist.get_process_group_ranks(source.process_group) == sorted(ranks)
        check(source, full, {"*": 1, "scale": len(ranks)})
        if len(ranks) == 2:
            assert torch.equal(model.layers[0].up.bias.full_tensor(), full["layers.0.up.bias"])


def case_hsdp() -> None:
    for ranks in ([[0, 1], [2, 3]], [[3, 1], [0, 4]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        group = dist.new_group(sorted(itertools.chain(*ranks)))
        if not member(mesh):
            continue
        model, full = sharded(mesh)
        with pytest.raises(ConfigError, match=r"new_group\(\[0, 1, .*\]\)"):
            FSDPSource(model)  # four of five ranks
        source = FSDPSource(model, process_group=group)
        assert source.world_size == 4
        check(source, full, {"*": 2, "scale": 4})


def case_tensor_parallel() -> None:
    for inner in (12, 7, 5, 1):  # 7, 5, 1: neither axis divides
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        group = dist.new_group([0, 1, 2, 3])
        if not member(mesh):
            continue
        model = Net(inner=inner)
        full = stamped(model)
        full.pop("cache")
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        source = FSDPSource(model, process_group=group)
        assert source.world_size == 4
        check(source, full, {"*": 2, "scale": 4, **SPLIT})
        if inner == 12:
            for name, param in model.named_parameters():
                assert torch.equal(param.full_tensor(), full[name]), name


def case_other_axis() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    if member(mesh):
        model, full = sharded(mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.shape[-1] % 4 == 0 else None)
        assert model.layers[1].down.weight.placements == (Shard(1),)
        check(FSDPSource(model), full, {"*": 1, "scale": 4})


def case_cpu_offload() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if member(mesh):
        model, full = sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        check(FSDPSource(model), full, {"*": 1, "scale": 3})


def case_mixed_kinds() -> None:
    """Plain tensors among DTensors: a scalar that FSDP ignores, integer and bool buffers, another float type."""
    mesh = DeviceMesh("cpu", [0, 1])
    if not member(mesh):
        return
    model = Net()
    model.layers[1].to(torch.bfloat16)
    model.gain = nn.Parameter(torch.tensor(0.0))
    model.register_buffer("steps", torch.tensor(7))
    model.register_buffer("mask", torch.tensor([True, False]))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape))
    full = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.gain})
    source = FSDPSource(model)
    check(source, full, {"*": 1, "scale": 2, "gain": 2, "steps": 2, "mask": 2})
    types = {tensor.name: tensor.dtype for tensor in source.manifest().tensors}
    assert (types["layers.1.up.weight"], types["steps"], types["mask"]) == ("bfloat16", "int64", "bool")


def case_wrapped() -> None:
    """Compiled, checkpoint-wrapped, inside another module: names as of the bare model."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = DeviceMesh("cpu", [0, 1])
    if not member(mesh):
        return
    model = Net()
    full = stamped(model)
    full.pop("cache")
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
        model.layers[i].compile(backend="eager")
    compiled = torch.compile(fully_shard(model, mesh=mesh), backend="eager")
    assert any("_orig_mod" in name and "_checkpoint_wrapped_module" in name for name, _ in compiled.named_modules())
    check(FSDPSource(compiled), full, {"*": 1, "scale": 2})


def case_gathered_root() -> None:
    """A forward pass without backward leaves the root gathered; a push then must neither read that nor harm training."""
    mesh = DeviceMesh("cpu", [0, 1])
    if not member(mesh):
        return
    model, full = sharded(mesh)
    tokens = torch.arange(6).view(2, 3)
    source = FSDPSource(model)
    manifest = source.manifest()
    with torch.no_grad():
        model(tokens)
    assert not isinstance(model.embed.weight, DTensor)
    assert source.manifest() is manifest
    assert isinstance(model.embed.weight, DTensor)
    with torch.no_grad():
        model(tokens)
    check(FSDPSource(model), full, {"*": 1, "scale": 2})

    model(tokens).square().mean().backward()
    expected = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss = model(tokens).square().mean()
    source.manifest()  # between forward and backward
    loss.backward()
    for grad, param in zip(expected, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)


def case_inside_a_pass() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if not member(mesh):
        return
    model, _ = sharded(mesh)
    source = FSDPSource(model)
    source.manifest()
    seen = []

    def hook(*_: object) -> None:
        try:
            source.manifest()
        except PlanError as error:
            seen.append(str(error))

    model.layers[0].up.register_forward_hook(hook)
    model(torch.arange(4))
    assert len(seen) == 1
    assert "inside a forward or backward pass" in seen[0]
    assert "layers.0" in seen[0]


def case_changes() -> None:
    """Steps in place are no change; another address, shape, object or module is, whichever rank sees it."""
    mesh = DeviceMesh("cpu", [0, 1])
    if not member(mesh):
        return
    model, full = sharded(mesh)
    source = FSDPSource(model)
    manifest, pointers = source.manifest(), [b.data_ptr() for b in source.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    assert source.manifest() is manifest
    assert [b.data_ptr() for b in source.buffers()] == pointers
    trained = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    check(source, {**trained, "scale": full["scale"]}, {"*": 1, "scale": 2})

    model.to(torch.float64)
    changed = source.manifest()
    assert changed.fingerprint != manifest.fingerprint
    assert {t.dtype for t in changed.tensors} == {"float64"}
    model.scale = torch.ones(3, dtype=torch.float64)
    assert source.manifest().fingerprint != changed.fingerprint
    model.layers[1] = fully_shard(Block(8, 4).double(), mesh=mesh)
    assert {t.name: t.shape for t in source.manifest().tensors}["layers.1.up.weight"] == (4, 8)


def case_placements() -> None:
    """DTensors that no trainer makes this way: nested shards of one axis, either axis, uneven."""
    group = dist.new_group([0, 1, 2, 3])
    nested = ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Shard(1)])
    for ranks, shapes in (([[0, 1], [2, 3]], [(7, 5), (1, 3), (8, 4), (3, 2)]), ([[3, 1], [2, 0]], [(8, 4), (4, 8)])):
        mesh = DeviceMesh("cpu", ranks)
        for shape in shapes if member(mesh) else ():
            full = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
            for placements in nested:
                tensor = distribute_tensor(full, mesh, placements)
                source = ModuleSource({"w": tensor}, process_group=group)
                check(source, {"w": full}, 2 if Replicate() in placements else 1)
    tangled = DeviceMesh("cpu", [[2, 0], [1, 3]])  # torch itself scatters wrong content on it
    if not member(mesh):
        return
    with pytest.raises(PlanError, match="lists ranks in an order"):
        ModuleSource({"w": distribute_tensor(torch.ones(4, 4), tangled, [Shard(0), Shard(0)])}, world_size=1).manifest()
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial(), Replicate()], run_check=False)
    other = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Partial()], run_check=False)
    with pytest.raises(PlanError, match="Partial") as caught:
        ModuleSource({"w": partial, "fine": torch.ones(2), "v": other}, world_size=1).manifest()
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["w", "v"]


def case_default_group() -> None:
    """Replicated modules in an initialized job: every rank holds everything."""
    torch.manual_seed(0)
    model = Net()
    full = stamped(model)
    full.pop("cache")
    source = ModuleSource(model)
    assert (source.rank, source.world_size) == (dist.get_rank(), dist.get_world_size())
    assert source.process_group is dist.group.WORLD
    check(source, full, dist.get_world_size())
    alone = ModuleSource(model, world_size=1)
    assert (alone.rank, alone.world_size, alone.process_group) == (0, 1, None)


def case_loader() -> None:
    """A target whose linears are tensor-parallel DTensors: each rank receives its slices, in place."""
    mesh = DeviceMesh("cpu", [0, 1])
    reference = Net(inner=7)
    full = stamped(reference)
    target = Net(inner=7)
    for layer in target.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    loader = ModuleLoader(target)
    manifest = loader.manifest(rank=dist.get_rank(), world_size=2, host="here")
    pointers = [buffer.data_ptr() for buffer in loader.buffers()]
    assert not torch.equal(target.layers[0].up.weight.full_tensor(), full["layers.0.up.weight"])
    landed = []
    for index, piece in enumerate(manifest.pieces):
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        content = full[manifest.tensors[piece.tensor].name][region].contiguous()
        landed.append(Landed(piece=index, box=piece.box, tensor=content))
    loader.install(landed)
    for name, param in target.named_parameters():
        assert torch.equal(param.full_tensor() if isinstance(param, DTensor) else param, full[name]), name
    assert [buffer.data_ptr() for buffer in loader.buffers()] == pointers
    rows = {manifest.tensors[piece.tensor].name: piece.box.shape[0] for piece in manifest.pieces}
    assert rows["layers.0.up.weight"] == (4, 3)[dist.get_rank()]
    check(ModuleSource(target), {k: v for k, v in full.items() if k != "cache"}, {"*": 2, **SPLIT})

    movable = ModuleLoader(target, movable=True)
    manifest = movable.manifest(rank=dist.get_rank(), world_size=2, host="here")
    movable.rebind([part._replace(tensor=part.tensor * 2) for part in landed])
    for name, param in target.named_parameters():
        assert torch.equal(param.full_tensor() if isinstance(param, DTensor) else param, full[name] * 2), name
    assert not {buffer.data_ptr() for buffer in movable.buffers()} & set(pointers)
    assert movable.manifest(rank=dist.get_rank(), world_size=2, host="here") is manifest


def case_transformers() -> None:
    """A mixture of experts of transformers under FSDP: canonical names, shapes and content are those of the checkpoint."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    for folder in sorted(FOLDER.glob("checkpoint-*")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        source = FSDPSource(model)
        check(source, load_file(folder / "model.safetensors"), 1)
        if model.config.tie_word_embeddings:
            assert source.manifest().aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def main() -> None:
    rank, world, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    faulthandler.dump_traceback_later(80, exit=True)  # a hang ends, and says where
    torch.set_num_threads(1)
    limit = timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", rank=rank, world_size=world, timeout=limit)
    results = {}
    for case in cases:
        try:
            globals()[f"case_{case}"]()
            results[case] = ""
        except Exception:  # noqa: BLE001 (reported to the test)
            results[case] = traceback.format_exc()
            break  # the other ranks may be waiting for this one
        dist.barrier()
    (FOLDER / f"result-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
