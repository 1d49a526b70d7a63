"""Ranks of sharded sources and of tensor-parallel targets: the small engine of ``tests/adapters/tiny_engine.py``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from source_actor import SourceActor
from target_actor import HookedLoader, TargetActor
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.engines.learned_loader import LearnedLoader
from syncline.adapters.engines.tp_layout import Parallel, tp_layout
from syncline.adapters.named_box import BoxTable
from syncline.adapters.trainers import FSDPSource, ModuleSource

_FILE = Path(__file__).parent.parent / "adapters" / "tiny_engine.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("tiny_engine", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_engine"] = module
    spec.loader.exec_module(module)
    return module


tiny_engine = _load()


def checkpoint(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Whole checkpoint tensors. Every element of all of them is another random number of 53 bits: it says where it belongs."""
    source = ModuleSource(tiny_engine.reference(kind, seed), rank=0, world_size=1)
    manifest, buffers = source.manifest(), source.buffers()
    found = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors}
    for piece in manifest.pieces:
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        buffer = buffers[piece.buffer]
        view = buffer.as_strided(piece.box.shape, piece.strides, buffer.storage_offset() + piece.offset)
        found[manifest.tensors[piece.tensor].name][region] = view
    return found


def place(model: Mapping[str, Any]) -> tuple[Any, Parallel]:
    """The config, and where this rank stands."""
    rank, size, ep = dist.get_rank(), dist.get_world_size(), model.get("ep", False)
    parallel = Parallel(tp_rank=rank, tp_size=size, ep_rank=rank if ep else 0, ep_size=size if ep else 1)
    return tiny_engine.config_of(model["kind"]), parallel


class TpSource(SourceActor):
    """A trainer whose weights are sharded: by FSDP2, or by hand as a tensor-parallel trainer does."""

    def do_build(self, model: Mapping[str, Any], layout: str = "fsdp", offload: bool = False) -> None:
        if layout == "fsdp":
            self.model = models.shard(tiny_engine.reference(model["kind"], model["seed"]), "fsdp", offload=offload)
            self.source = FSDPSource(self.model)
            return
        config, parallel = place(model)
        self.model = tiny_engine.TinyEngine(config, parallel.tp_rank, parallel.tp_size, ep=parallel.ep_size > 1)
        self.model.load_weights(iter(checkpoint(model["kind"], model["seed"]).items()))
        self.source = ModuleSource(self.model, names=BoxTable(tp_layout(config, self.model, parallel)))


class Computing(tiny_engine.TinyEngine):  # type: ignore[misc]
    """An engine whose loader computes something from two of the tensors (by a product with one)."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        odd = ("model.norm.weight", "lm_head.weight")
        return super().load_weights((name, tensor * 1 if name in odd else tensor) for name, tensor in weights)


class TpTarget(TargetActor):
    """One rank of a tensor-parallel engine."""

    def do_build(self, model: Mapping[str, Any], how: str = "layout") -> None:  # type: ignore[override]
        config, parallel = place(model)
        kind = Computing if how == "computing" else tiny_engine.TinyEngine
        self._config, self._parallel = config, parallel
        engine = kind(config, parallel.tp_rank, parallel.tp_size, reduce=_reduce, ep=parallel.ep_size > 1)
        self.model, self.learned = engine, ""
        loader: Any
        if how == "layout":
            loader = ModuleLoader(engine, layout=tp_layout(config, engine, parallel))
        else:
            names = ModuleSource(tiny_engine.reference(model["kind"]), rank=0, world_size=1).manifest().tensors
            loader = LearnedLoader(engine, engine.load_weights, names)
            self.learned = str(loader.learned)
        self.loader = HookedLoader(loader, self.points, via_install=False)

    def do_learned(self) -> str:
        return self.learned

    def do_compare(self, model: Mapping[str, Any]) -> list[str]:
        """Parameters that are not, bit by bit, what the engine's own loader makes of the checkpoint; also padding."""
        loaded = tiny_engine.TinyEngine(
            self._config, self._parallel.tp_rank, self._parallel.tp_size, ep=self._parallel.ep_size > 1
        )
        loaded.load_weights(iter(checkpoint(model["kind"], model["seed"]).items()))
        expected: dict[str, torch.Tensor] = loaded.state_dict()
        return [name for name, tensor in self.model.state_dict().items() if not torch.equal(tensor, expected[name])]

    def do_forward_gap(self, model: Mapping[str, Any], ids: Sequence[int]) -> float:
        """Largest difference between the logits of all ranks together and those of the transformers model, over their size."""
        with torch.no_grad(), self.receiver.gate.forward():
            logits = self.model(torch.tensor(list(ids)))
            whole: nn.Module = tiny_engine.reference(model["kind"], model["seed"])
            expected = whole(torch.tensor([list(ids)])).logits[0]
        return float((logits - expected).abs().max() / expected.abs().max())


def _reduce(part: torch.Tensor) -> torch.Tensor:
    total = part.contiguous().clone()
    dist.all_reduce(total)
    return total
