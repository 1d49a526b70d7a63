"""What a transformers model calls its parameters in a checkpoint, read off its own conversion table.

transformers 5 keeps parameters in another form than checkpoints (experts packed, modules renamed), and ``save_pretrained``
reverts that with a table of renamings and tensor operations per model class. Rather than copying those tables, we run the
reversal on tensors without data that remember which elements of which parameter they are. What comes out as a strided view
(or a concatenation of such views) is a set of boxes; what does not (a rope permutation, an interleaving) keeps its name.

The table is that of the class, not the one that ``from_pretrained`` leaves on an instance: that one depends on the file that
was loaded, and both sides of a transfer must agree.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from syncline.scheduler.layout import Index

from .modules import members
from .named_box import NamedBox, named_box

_log = logging.getLogger(__name__)


class PretrainedPart(NamedTuple):
    """A transformers model inside a module: the prefix that its canonical names get, and the model."""

    prefix: str
    model: nn.Module
    model_type: str


def pretrained_parts(root: nn.Module, *, clean: Callable[[str], str]) -> list[PretrainedPart]:
    """The outermost transformers models in ``root``. ``clean`` turns a module's path into its prefix without wrappers."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:  # never imported, so nothing can be an instance of it
        return []
    parts: list[PretrainedPart] = []
    paths: list[str] = []
    for path, module in root.named_modules():
        if isinstance(module, base) and not any(path.startswith(f"{outer}.") or not outer for outer in paths):
            paths.append(path)
            model_type = str(getattr(getattr(module, "config", None), "model_type", "") or "")
            parts.append(PretrainedPart(clean(path), module, model_type))
    return parts


def conversion_boxes(model: nn.Module, shapes: Mapping[str, Index]) -> dict[str, list[NamedBox]] | None:
    """Boxes of the parameters that ``save_pretrained`` renames or converts; None where its table cannot be had.

    Args:
        model: the transformers model, possibly wrapped inside (FSDP, activation checkpointing).
        shapes: full shape of each parameter by its name in the model, without wrappers.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        shell = _shell(model)
        # `PrefixChange` says how one particular file was read, not what the class writes.
        conversions = [
            step
            for step in mapping.get_model_conversion_mapping(shell, add_legacy=False)
            if not isinstance(step, loading.PrefixChange)
        ]
        if not conversions:
            return {}
        stand_in = SimpleNamespace(config=shell.config, _weight_conversions=conversions)
        traced = {name: _Traced.parameter(name, shape) for name, shape in shapes.items()}
        saved = loading.revert_weight_conversion(stand_in, traced)
    except Exception:  # noqa: BLE001 (a private interface of another package: whatever changes in it, we do without)
        _log.debug("no conversion table for %s; names stay as they are", type(model).__name__, exc_info=True)
        return None
    return _decode(saved, shapes)


def _shell(model: nn.Module) -> Any:
    """A module tree with the transformers models of ``model`` only, empty, under their own classes and paths.

    The table is looked up by class name and module path, which FSDP (``FSDPLlamaModel``) and wrappers change.
    """
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    root = _empty(model)
    for path, module in model.named_modules():
        if not path or not isinstance(module, base):
            continue
        holder = root
        *parents, last = [part for part in path.split(".") if not part.startswith("_")]
        for name in parents:
            if name not in members(holder).modules:
                holder.add_module(name, nn.Module())
            holder = members(holder).modules[name]
        holder.add_module(last, _empty(module))
    return root


def _empty(model: nn.Module) -> Any:
    kind: Any = next(c for c in type(model).__mro__ if not any(b.__name__ == "FSDPModule" for b in c.__mro__))
    shell = kind.__new__(kind)
    nn.Module.__init__(shell)
    shell.config = model.config
    return shell


class _Part(NamedTuple):
    """A strided view (without data) of a parameter, and where in a traced tensor it lies."""

    param: str
    view: torch.Tensor
    start: Index


class _Traced(torch.Tensor):
    """A tensor without data that knows which elements of which parameters it consists of."""

    parts: tuple[_Part, ...] | None
    """None once an operation was more than viewing, copying, concatenating."""
    origins: frozenset[str]

    @classmethod
    def make(cls, like: torch.Tensor, parts: tuple[_Part, ...] | None, origins: frozenset[str]) -> _Traced:
        """A traced tensor that looks like ``like``."""
        new: Callable[..., _Traced] = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        strides, offset = like.stride(), like.storage_offset()
        traced = new(cls, like.shape, strides=strides, storage_offset=offset, dtype=like.dtype, device="meta")
        traced.parts, traced.origins = parts, origins
        return traced

    @classmethod
    def parameter(cls, name: str, shape: Index) -> _Traced:
        view = torch.empty(shape, device="meta")
        return cls.make(view, (_Part(name, view, (0,) * len(shape)),), frozenset((name,)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if func.is_view and not kwargs and isinstance(first, _Traced) and first.parts is not None and len(first.parts) == 1:
            try:  # nearly all that there is to do, and there is one for every expert's every tensor
                return first.viewed(func(first.parts[0].view, *args[1:]))
            except RuntimeError:  # a view of a copy, where we kept the strides of what was copied
                pass
        kwargs = kwargs or {}
        flat = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, _Traced)]
        origins = frozenset().union(*(a.origins for a in flat))
        plain_args, plain_kwargs = pytree.tree_map_only(_Traced, _plain, (args, kwargs))
        parts = _copied(func, args, kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: cls.make(t, parts, origins), func(*plain_args, **plain_kwargs))

    def viewed(self, views: Any) -> Any:
        """The views (one, or a list) of this tensor's only part."""
        if not isinstance(views, torch.Tensor):
            return [self.viewed(view) for view in views]
        param = (self.parts or ())[0].param
        return self.make(views, (_Part(param, views, (0,) * views.ndim),), self.origins)


def _plain(traced: _Traced) -> torch.Tensor:
    """A meta tensor of the same shape."""
    return torch.empty(traced.shape, device="meta")


def _copied(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[_Part, ...] | None:
    """The parts of what an operation returns that copies or joins; None for every other."""
    aten = torch.ops.aten
    name = func.overloadpacket
    if name in (aten.clone, aten.detach, aten.alias, aten.contiguous):
        parts: tuple[_Part, ...] | None = args[0].parts
        return parts
    if name in (aten.cat, aten.stack):
        dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
        return _joined(args[0] if name is aten.cat else [tensor.unsqueeze(dim) for tensor in args[0]], dim)
    return None


def _joined(tensors: list[_Traced], dim: int) -> tuple[_Part, ...] | None:
    parts: list[_Part] = []
    offset = 0
    for tensor in tensors:
        axis = dim % max(tensor.ndim, 1)
        if tensor.parts is None:
            return None
        for part in tensor.parts:
            start = list(part.start)
            start[axis] += offset
            parts.append(part._replace(start=tuple(start)))
        offset += tensor.shape[axis]
    return tuple(parts)


class _Grid(NamedTuple):
    """A contiguous parameter: its shape, its strides, and which axis (longer than 1) has which stride."""

    shape: Index
    strides: Index
    axis_of: dict[int, int]

    @classmethod
    def of(cls, shape: Index) -> _Grid:
        strides = torch.empty(shape, device="meta").stride()
        axis_of = {stride: axis for axis, (stride, extent) in enumerate(zip(strides, shape, strict=True)) if extent > 1}
        return cls(shape, strides, axis_of)


def _decode(saved: Mapping[str, Any], shapes: Mapping[str, Index]) -> dict[str, list[NamedBox]]:
    """Boxes by parameter; parameters that are not boxes all through, and those joined with them, are left out."""
    grids = {name: _Grid.of(shape) for name, shape in shapes.items()}
    canonical = {name: (tensor, _tensor_boxes(name, tensor, grids)) for name, tensor in saved.items()}
    dropped: set[str] = set()
    while True:
        boxes: dict[str, list[NamedBox]] = {}
        for tensor, found in canonical.values():
            if found is not None and not tensor.origins & dropped:
                for param, box in found:
                    boxes.setdefault(param, []).append(box)
        lost = {p for p in shapes if p not in dropped and _held(boxes.get(p, ())) != math.prod(shapes[p])}
        if not lost:
            return {param: found for param, found in boxes.items() if not _is_own(param, shapes[param], found)}
        dropped |= lost


def _tensor_boxes(name: str, tensor: _Traced, grids: Mapping[str, _Grid]) -> list[tuple[str, NamedBox]] | None:
    if tensor.parts is None:
        return None
    boxes = []
    for part in tensor.parts:
        box = _part_box(name, tuple(tensor.shape), part, grids[part.param])
        if box is None:
            return None
        boxes.append((part.param, box))
    return boxes


def _part_box(name: str, shape: Index, part: _Part, grid: _Grid) -> NamedBox | None:
    """The box that a strided view of a contiguous parameter is, or None if it is not one."""
    size = tuple(part.view.shape)
    axes = [grid.axis_of.get(s) if n > 1 else -1 for n, s in zip(size, part.view.stride(), strict=True)]
    found = [axis for axis in axes if axis is not None]
    inner = [axis for axis in found if axis >= 0]
    if len(found) != len(axes) or len(set(inner)) != len(inner):
        return None
    local_start, rest = [], int(part.view.storage_offset())
    for stride in grid.strides:
        local_start.append(rest // stride if stride else 0)
        rest -= local_start[-1] * stride
    if any(local_start[axis] + n > grid.shape[axis] for axis, n in zip(found, size, strict=True) if axis >= 0):
        return None
    return named_box(name, shape, start=part.start, size=size, local_start=local_start, axes=found)


def _held(boxes: Iterator[NamedBox] | Any) -> int:
    return sum(math.prod(box.size) for box in boxes)


def _is_own(param: str, shape: Index, boxes: list[NamedBox]) -> bool:
    return len(boxes) == 1 and boxes[0].name == param and boxes[0].shape == shape
