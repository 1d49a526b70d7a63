"""Which part of a tensor this rank holds, from a DTensor's mesh and placements. All private torch interfaces are in here.

`held_boxes` is pure arithmetic on sizes. FSDP2 with tensor parallelism shards one axis twice, the right mesh axis first,
and writes that as ``(_StridedShard(0, split_factor=2), Shard(0))``: the split factor says how many shards the axes further
right had made before. We recover the order of splitting from it and chunk in that order, because reading the placements
from left to right gives other rows when sizes don't divide.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from syncline.scheduler.layout import Index

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement


class HeldBox(NamedTuple):
    """A box of the whole tensor that the local tensor holds, and where it begins in the local tensor."""

    start: Index
    shape: Index
    local_start: Index


class Local(NamedTuple):
    """A parameter as this rank holds it: its full shape, the local tensor, and the boxes that the local tensor holds."""

    shape: Index
    tensor: torch.Tensor
    boxes: tuple[HeldBox, ...]


_Run = tuple[int, int]
"""Consecutive indices of one axis: first, count."""


class _Split(NamedTuple):
    """One mesh axis that shards a tensor axis: number of shards, ours, and the split factor (1: a plain `Shard`)."""

    shards: int
    mine: int
    factor: int


def whole(shape: Sequence[int]) -> HeldBox:
    """The box of a rank that holds everything."""
    zeros = (0,) * len(shape)
    return HeldBox(zeros, tuple(shape), zeros)


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Importing DTensor takes as long as importing torch. Where nobody has done it, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # None, too, while another thread imports it
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> Local:
    """What this rank holds of a parameter, plain or DTensor. Raises `ValueError` for placements that have no boxes."""
    if not _is_dtensor(tensor):
        return Local(tuple(tensor.shape), tensor, (whole(tensor.shape),))
    from torch.distributed.tensor import Replicate

    local: torch.Tensor = local_tensor(tensor)
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:  # this rank is not in the mesh
        return Local(tuple(tensor.shape), local, ())
    # Not the coordinate: where a mesh lists ranks out of order, collectives (and FSDP2) go by the rank in the group.
    coordinate = tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))
    if sum(not isinstance(p, Replicate) for p in tensor.placements) > 1 and not _is_grid(mesh.mesh):
        raise ValueError(
            f"its mesh {mesh.mesh.tolist()} lists ranks in an order that the collectives of its axes do not follow together; "
            "list them in increasing order along every axis"
        )
    boxes = held_boxes(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)
    count = sum(math.prod(box.shape) for box in boxes)
    if count != local.numel():
        raise ValueError(
            f"placements {tensor.placements} of shape {tuple(tensor.shape)} on mesh {tuple(mesh.shape)} give {count} elements "
            f"at coordinate {coordinate}, but the local tensor of shape {tuple(local.shape)} has {local.numel()}"
        )
    return Local(tuple(tensor.shape), local, boxes)


def _is_grid(ranks: torch.Tensor) -> bool:
    """Whether the places that ranks have in the (sorted) groups of each mesh axis are all different, as coordinates are."""
    places = [ranks.argsort(axis).argsort(axis).flatten() for axis in range(ranks.ndim)]
    return len({tuple(place) for place in torch.stack(places, dim=1).tolist()}) == ranks.numel()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor object that holds a DTensor's local elements; a plain tensor itself."""
    if _is_dtensor(tensor):
        local: torch.Tensor = tensor._local_tensor  # noqa: SLF001 (to_local() makes a new autograd node each time)
        return local
    return tensor


def same_locals(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether each DTensor still has the local tensor that it is paired with. About 0.1 us a pair."""
    return all(cast("DTensor", owner)._local_tensor is local for owner, local in pairs)  # noqa: SLF001 (as above)


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The device mesh of a DTensor; None for a plain tensor."""
    return tensor.device_mesh if _is_dtensor(tensor) else None


def mesh_ranks(tensor: torch.Tensor) -> frozenset[int]:
    """Global ranks among which a DTensor is spread; empty for a plain tensor."""
    mesh = mesh_of(tensor)
    return frozenset() if mesh is None else frozenset(mesh.mesh.flatten().tolist())


def held_boxes(
    shape: Index, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Iterable[Placement]
) -> tuple[HeldBox, ...]:
    """Boxes of a tensor of full ``shape`` that the rank at ``coordinate`` of a mesh holds; none if it holds nothing.

    Raises `ValueError` for a placement that does not place whole values, such as ``Partial``.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: list[list[_Split]] = [[] for _ in shape]
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, (_StridedShard, Shard)):
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            splits[placement.dim].append(_Split(count, index, int(factor)))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"placement {placement!r} holds no final values; redistribute to Shard or Replicate before a push")
    runs = [_axis_runs(extent, axis_splits) for extent, axis_splits in zip(shape, splits, strict=True)]
    boxes = []
    for combination in itertools.product(*(_with_offsets(axis) for axis in runs)):
        start, extent, local = (tuple(part[i] for part in combination) for i in range(3))
        boxes.append(HeldBox(start, extent, local))
    return tuple(box for box in boxes if 0 not in box.shape or 0 in shape)


def _with_offsets(runs: list[_Run]) -> list[tuple[int, int, int]]:
    offsets = itertools.accumulate((count for _, count in runs), initial=0)
    return [(first, count, offset) for (first, count), offset in zip(runs, offsets, strict=False)]


def _axis_runs(extent: int, splits: list[_Split]) -> list[_Run]:
    """Indices of one axis that the local tensor holds, in its order."""
    order = _application_order(splits)
    if order is not None:
        runs = [(0, extent)]
        for split in order:
            runs = _chunk(runs, split.shards, split.mine)
        return runs
    runs = [(0, extent)]
    for split in splits:
        total = sum(count for _, count in runs)
        blocks = [_take(runs, *_chunk_range(total, split.factor, block)) for block in range(split.factor)]
        runs = [run for block in blocks for run in _chunk(block, split.shards, split.mine)]
    return runs


def _application_order(splits: list[_Split]) -> list[_Split] | None:
    """The order in which the mesh axes (given left to right) split the axis; None if the split factors name no order."""
    order: list[_Split] = []
    for split in reversed(splits):
        sizes = itertools.accumulate((done.shards for done in order), lambda a, b: a * b, initial=1)
        position = next((i for i, size in enumerate(sizes) if size == split.factor), None)
        if position is None:
            return None
        order.insert(position, split)
    return order


def _chunk_range(total: int, count: int, index: int) -> _Run:
    """``torch.chunk``: chunks of ceil(total / count), the last ones shorter or empty."""
    size = -(-total // count)
    first = min(index * size, total)
    return first, min(size, total - first)


def _chunk(runs: list[_Run], count: int, index: int) -> list[_Run]:
    return _take(runs, *_chunk_range(sum(n for _, n in runs), count, index))


def _take(runs: list[_Run], first: int, count: int) -> list[_Run]:
    """Elements ``first .. first + count`` of the concatenation of ``runs``."""
    taken = []
    for run_first, run_count in runs:
        low, high = max(first, 0), min(first + count, run_count)
        if high > low:
            taken.append((run_first + low, high - low))
        first -= run_count
    return taken


def reshard(model: nn.Module) -> list[str]:
    """Put FSDP2's sharded parameters back into the modules that still show gathered ones; names of modules that refuse.

    A root whose last forward pass had no backward pass stays gathered. ``FSDPModule.reshard()`` frees the gathered copy (the
    next forward or backward pass gathers again), but does nothing inside a forward pass, and must not run inside a backward.
    """
    if (kind := getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)) is None:  # as for `_is_dtensor`
        return []
    refused = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            groups = _param_groups(module)
            if any(_busy(group) for group in groups):
                refused.append(name or type(module).__name__)
            elif not groups or not all(getattr(group, "is_sharded", False) for group in groups):
                module.reshard()
    return refused


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()  # noqa: SLF001 (nothing public says whether a module is gathered)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13
        groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) is not None else []
    return list(groups)


def _busy(group: Any) -> bool:
    state = getattr(group, "_training_state", None)
    return state is not None and state.name != "IDLE"
