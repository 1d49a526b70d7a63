"""Reading a live Megatron model: its parameters, where they hang, and how each is dealt out to ranks.

Megatron's objects are read by attribute; nothing of Megatron is imported here but, where a model does not carry its process
groups, ``parallel_state``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from syncline.engine.errors import ConfigError

from ..modules import entries
from ..names import strip_wrappers

_LAYER = re.compile(r"(?:.*\.)?layers\.\d+")


class Parameter(NamedTuple):
    """A parameter or persistent buffer of one chunk.

    Attributes:
        key: its name in the list of all chunks, without wrappers that come and go.
        path: its name in its chunk, without any wrapper.
        owner: the module in which it hangs.
    """

    key: str
    path: str
    tensor: torch.Tensor
    owner: nn.Module
    chunk: int

    def axis(self, *, expert: bool) -> int | None:
        """The axis along which tensor-parallel ranks hold shards; None: every rank holds all of it."""
        # Transformer Engine marks every linear weight, those that are duplicated on all ranks too.
        if _is_duplicated(self.owner, self.tensor, expert=expert):
            return None
        parallel = getattr(self.tensor, "tensor_model_parallel", None)
        if parallel is None:  # with perform_initialization=False Megatron never marks its weights
            return _sharded_axis(self.owner, self.tensor)
        return int(getattr(self.tensor, "partition_dim", 0)) if parallel else None

    @property
    def stride(self) -> int:
        """In how many rounds the axis is dealt out."""
        return int(getattr(self.tensor, "partition_stride", 1))


def _is_duplicated(owner: nn.Module, tensor: torch.Tensor, *, expert: bool) -> bool:
    """Megatron builds a duplicated linear of Transformer Engine with neither mode nor ranks.

    So it does with experts whose communication it does itself, and those are sharded; and it takes the mode, but not the ranks,
    from linears of shared experts that overlap theirs. Some forks say "duplicated" in words.
    """
    if "duplicated" in (getattr(owner, "parallel_mode", None), getattr(tensor, "parallel_mode", None)):
        return True
    return not expert and getattr(owner, "parallel_mode", "") is None and getattr(owner, "tp_size", 0) == 1


_PARTS = (("output_size_per_partition", 0), ("num_embeddings_per_partition", 0), ("input_size_per_partition", 1))
"""Attributes of Megatron's parallel layers that say how much of an axis of their weight a rank holds."""


def _sharded_axis(owner: nn.Module, tensor: torch.Tensor) -> int | None:
    for name, axis in _PARTS:
        if axis < tensor.ndim and getattr(owner, name, None) == tensor.shape[axis]:
            return axis
    return None


class Place(NamedTuple):
    """A rank in a group, and the group's size."""

    rank: int
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where this rank is in the tensor-parallel, expert-tensor-parallel and expert-parallel groups."""

    tensor: Place
    expert_tensor: Place
    expert: Place

    @property
    def apart(self) -> bool:
        """Whether experts live on other process groups than dense parameters; the same on every rank."""
        return self.expert.ranks > 1 or self.expert_tensor.ranks != self.tensor.ranks


def unwrapped(chunk: nn.Module) -> Any:
    """The model in a chunk that data parallelism and mixed precision may wrap."""
    module: Any = chunk
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def parameters(chunks: nn.ModuleList) -> Iterator[Parameter]:
    """Every parameter and persistent buffer of every chunk."""
    found = list(entries(chunks))
    clean = strip_wrappers(entry.name for entry in found)
    owners = dict(chunks.named_modules(remove_duplicate=False))
    for entry in found:
        chunk, _, path = clean[entry.name].partition(".")
        owner = owners[entry.name.rpartition(".")[0]]
        yield Parameter(clean[entry.name], _clean(path), entry.tensor, owner, int(chunk))


def layer_numbers(chunk: nn.Module) -> dict[str, int]:
    """Which layer of the whole model (from 0) hangs at which path of a chunk: pipeline and virtual stages see to that."""
    numbers: dict[str, int] = {}
    for path, module in chunk.named_modules():
        number, clean = getattr(module, "layer_number", None), _clean(path)
        if isinstance(number, int) and _LAYER.fullmatch(clean):
            numbers[clean] = number - 1  # Megatron counts from 1
    return numbers


def _clean(path: str) -> str:
    """A path in a chunk without what wraps the chunk or anything in it."""
    return strip_wrappers((path,))[path]


def places(model: Any) -> Places:
    """This rank's places: by the process groups that the model carries, else by Megatron's ``parallel_state``.

    Raises:
        ConfigError: neither knows.
    """
    groups = getattr(model, "pg_collection", None)
    tensor, expert_tensor, expert = (getattr(groups, name, None) for name in ("tp", "expt_tp", "ep"))
    if tensor is None or expert_tensor is None or expert is None:
        return _global_places()
    return Places(tensor=_place(tensor), expert_tensor=_place(expert_tensor), expert=_place(expert))


def _place(group: Any) -> Place:
    return Place(int(group.rank()), int(group.size()))


def _global_places() -> Places:
    what = "the model does not carry all of its process groups (tp, expt_tp, ep)"
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise ConfigError([f"{what}, and megatron-core cannot be imported ({error})"]) from error
    state: Any = parallel_state
    if not state.model_parallel_is_initialized():
        raise ConfigError([f"{what}, and parallel_state is not set up: call initialize_model_parallel() first"])
    return Places(
        tensor=_place(state.get_tensor_model_parallel_group()),
        expert_tensor=_place(state.get_expert_tensor_parallel_group()),
        expert=_place(state.get_expert_model_parallel_group()),
    )
