"""Proof of a learned layout: an ordinary load of made-up content leaves in memory what the layout says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import nn

from syncline.engine.errors import LoaderError
from syncline.scheduler.layout import Tensor

from ..modules import entries
from ..named_box import NamedBox
from .aside import Aside
from .learned import LearnedLayout, LoadWeights

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_layout(model: nn.Module, load_weights: LoadWeights, learned: LearnedLayout, *, seed: int = 0) -> None:
    """Load made-up content through the loader, compare every box bit by bit, and put back what was there.

    Needs memory for a copy of the rank's parameters, and for one checkpoint tensor at a time. Buffers that are not persistent
    and plain attributes of modules (numbers, text, tensors), which a loader may fill too, are put back as well.

    Raises:
        LoaderError: what the loader leaves in memory is not what was learned; names the parameters. Or it moved parameters.
    """
    live = {entry.name: entry.tensor for entry in entries(model) if not entry.tensor.is_meta}
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    saved = {name: tensor.detach().clone() for name, tensor in live.items()}
    made = {tensor.name: tensor for tensor in learned.tensors}
    aside = Aside(model)
    try:
        with torch.no_grad():
            load_weights(_made_up(learned.tensors, seed))
        wrong = [name for name, boxes in learned.layout.items() if not _agrees(live[name].detach(), boxes, made, seed)]
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])
            aside.restore()
    moved = [name for name, tensor in live.items() if tensor.data_ptr() != places[name]]
    if wrong or moved:
        what = [f"{name} holds something else than what was learned" for name in wrong]
        what += [f"{name} was moved by the loader" for name in moved]
        raise LoaderError(f"the learned layout is not the loader's: {'; '.join(what)}")


def content(tensor: Tensor, seed: int) -> torch.Tensor:
    """Content that depends on name, place and ``seed``; exact in every floating-point type of 16 bits or more."""
    dtype = getattr(torch, tensor.dtype)
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(tensor.name.encode(), seed=seed) % 2**63)
    if dtype.is_floating_point:
        whole = torch.randint(-128, 129, tensor.shape, generator=generator)
        return whole.to(torch.float32).div(128).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, tensor.shape, generator=generator).to(dtype)


def _agrees(tensor: torch.Tensor, boxes: Sequence[NamedBox], made: dict[str, Tensor], seed: int) -> bool:
    cache: dict[str, torch.Tensor] = {}
    for box in boxes:
        if box.is_padding:
            continue
        if box.name not in cache:
            cache = {box.name: content(made[box.name], seed)}
        start, size = box.local_start, box.local_size()
        here = tensor[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
        if not torch.equal(_bits(here.cpu()), _bits(_as_local(cache[box.name], box, here.dtype))):
            return False
    return True


def _as_local(whole: torch.Tensor, box: NamedBox, dtype: torch.dtype) -> torch.Tensor:
    """A box of a checkpoint tensor in the shape that it has in the parameter."""
    part = whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))].to(dtype)
    kept = sorted((axis, place) for place, axis in enumerate(box.axes) if axis >= 0)
    spare = [place for place, axis in enumerate(box.axes) if axis < 0]
    return part.permute([place for _, place in kept] + spare).reshape(box.local_size())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_RAW[tensor.element_size()])


def _made_up(tensors: Sequence[Tensor], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Content for every tensor, one at a time."""
    for tensor in tensors:
        yield tensor.name, content(tensor, seed)
