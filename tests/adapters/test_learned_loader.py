"""`LearnedLoader`: boxes of live parameters for what was learned, whole tensors through the engine's loader for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from syncline.adapters.engines.learned_loader import LearnedLoader
from syncline.engine.errors import LoaderError, PlanError
from syncline.engine.loader import Landed, Loader
from syncline.engine.placement import parted
from syncline.scheduler.boxes import Box
from syncline.scheduler.layout import Buffer, Manifest, Piece, Tensor, row_major
from syncline.scheduler.plan import PlanOptions, build_plan

TENSORS = [
    Tensor(name="a", shape=(4, 6), dtype="float32"),
    Tensor(name="b", shape=(4, 6), dtype="float32"),
    Tensor(name="norm", shape=(6,), dtype="float32"),
    Tensor(name="other.rank", shape=(3,), dtype="float32"),
]


class Engine(nn.Module):
    """``ab`` is a fused parameter; ``norm`` is stored plus one; ``other.rank`` is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Parameter(torch.zeros(8, 6))
        self.norm = nn.Parameter(torch.zeros(6))
        self.loads: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self.loads.append(name)
            if name in ("a", "b"):
                self.ab.data.narrow(0, 4 * (name == "b"), 4).copy_(loaded)
            elif name == "norm":
                self.norm.data.copy_(loaded + 1)


def loader_of(engine: Engine, **options) -> tuple[LearnedLoader, Manifest]:
    loader = LearnedLoader(engine, engine.load_weights, TENSORS, **options)
    engine.loads.clear()
    return loader, loader.manifest(rank=0, world_size=1, host="here")


def part(manifest: Manifest, name: str, value: torch.Tensor, start: int = 0, count: int | None = None) -> Landed:
    index = next(i for i, piece in enumerate(manifest.pieces) if manifest.tensors[piece.tensor].name == name)
    box = manifest.pieces[index].box
    count = box.shape[0] if count is None else count
    box = Box(start=(start, *box.start[1:]), shape=(count, *box.shape[1:]))
    return Landed(index, box, value[start : start + count].contiguous())


def test_the_manifest_says_which_goes_how() -> None:
    loader, manifest = loader_of(Engine(), optional=["n*"])
    assert isinstance(loader, Loader)
    assert loader.learned.direct == ("a", "b") and list(loader.learned.through_loader) == ["norm"]
    assert [t.name for t in manifest.tensors] == ["a", "b", "norm", "other.rank"]
    assert [manifest.tensors[p.tensor].name for p in manifest.pieces] == ["a", "b", "norm"]
    assert manifest.uncut == {"norm"} and not manifest.whole_tensors
    assert manifest.optional == {"norm", "other.rank"}
    assert [tensor is None for tensor in loader.buffers()] == [False, True]
    assert loader.manifest(rank=0, world_size=1, host="here") is manifest


def test_parts_are_put_together_and_loaded_once() -> None:
    engine, calls = Engine(), []
    loader, manifest = loader_of(engine, begin=lambda: calls.append("begin"), end=lambda: calls.append("end"))
    place, values = engine.ab.data_ptr(), {t.name: torch.randn(t.shape) for t in TENSORS}
    for _ in range(2):
        loader.begin(1)
        loader.install([part(manifest, "b", values["b"]), part(manifest, "norm", values["norm"], 0, 2)])
        assert engine.loads == []
        loader.install([part(manifest, "a", values["a"]), part(manifest, "norm", values["norm"], 2, 4)])
        assert engine.loads == ["norm"]
        loader.finish(1)
        engine.loads.clear()
    assert torch.equal(engine.ab.data, torch.cat([values["a"], values["b"]]))
    assert torch.equal(engine.norm.data, values["norm"] + 1)
    assert engine.ab.data_ptr() == place and calls == ["begin", "end"] * 2


def test_a_tensor_of_which_a_part_is_missing_is_not_taken_for_loaded() -> None:
    loader, manifest = loader_of(Engine())
    loader.begin(1)
    loader.install([part(manifest, "norm", torch.zeros(6), 0, 2)])
    with pytest.raises(LoaderError, match="only parts have come of what goes through the loader: norm"):
        loader.finish(1)


def test_a_loader_that_moves_parameters_is_refused() -> None:
    """Not one that does so for one tensor (that goes through the loader), but one whose ordinary load leaves them moved."""
    engine = Engine()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        engine.load_weights(weights)
        if not engine.ab.is_meta and any(bool(p.abs().sum()) for p in engine.parameters()):
            engine.ab.data = engine.ab.data.clone()

    with pytest.raises(LoaderError, match="ab was moved by the loader"):
        LearnedLoader(engine, load, TENSORS)


def test_parameters_are_not_pointed_elsewhere() -> None:
    loader, _ = loader_of(Engine())
    with pytest.raises(LoaderError, match="must stay where they are"):
        loader.rebind([])


def test_a_task_is_parted_by_where_it_lands() -> None:
    """What lands in live memory and what the loader takes; a segment is one or the other."""
    loader, manifest = loader_of(Engine())
    source = Manifest(rank=0, world_size=1, host="here", tensors=TENSORS, buffers=manifest_buffers(), pieces=manifest_pieces())
    plan = build_plan([source], [[manifest]], PlanOptions(bucket_bytes=2**20, max_tmp_bytes=2**22))
    (task,) = plan.target_program(0, 0).tasks
    hidden = frozenset(i for i, tensor in enumerate(loader.buffers()) if tensor is None)
    exposed, covered = parted(task, hidden)
    assert exposed is not None and covered is not None
    assert {lg.segment.name for lg in exposed.landings} == {"a", "b"}
    assert [lg.segment.name for lg in covered.landings] == ["norm"]
    assert parted(task, frozenset()) == (task, None)
    both = replace(task.landings[0], dests=(*task.landings[0].dests, covered.landings[0].dests[0]))
    with pytest.raises(PlanError, match="lands in live memory and goes through the loader"):
        parted(replace(task, landings=(both,)), hidden)


def manifest_buffers():
    return [Buffer(name=t.name, nbytes=4 * Box.whole(t.shape).volume) for t in TENSORS]


def manifest_pieces():
    return [
        Piece(tensor=i, box=Box.whole(t.shape), buffer=i, offset=0, strides=row_major(t.shape), dtype=t.dtype)
        for i, t in enumerate(TENSORS)
    ]
