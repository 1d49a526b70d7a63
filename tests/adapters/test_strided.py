"""Strided copies as boxes: whatever views a copy is between, its boxes copy the same elements to the same places."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from syncline.adapters.engines.strided import MOST_BOXES, Base, BoxPair, Transfer, box_pairs


def pairs_of(whole: torch.Tensor, view: torch.Tensor, param: torch.Tensor, into: torch.Tensor) -> list[BoxPair] | None:
    transfer = Transfer.between(
        view.shape, src=(view.storage_offset(), view.stride()), dst=(into.storage_offset(), into.stride())
    )
    return box_pairs(transfer, Base.of(whole.shape), Base(tuple(param.shape), param.stride(), param.storage_offset()))


def carry_out(pairs: list[BoxPair], whole: torch.Tensor, param: torch.Tensor) -> None:
    for pair in pairs:
        part = whole[tuple(slice(a, b) for a, b in zip(pair.src.start, pair.src.stop, strict=True))]
        place = param[tuple(slice(a, b) for a, b in zip(pair.dst.start, pair.dst.stop, strict=True))]
        kept = sorted((axis, at) for at, axis in enumerate(pair.axes) if axis >= 0)
        spare = [at for at, axis in enumerate(pair.axes) if axis < 0]
        place.copy_(part.permute([at for _, at in kept] + spare).reshape(place.shape))


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Whatever a loader may make of a tensor without copying it."""
    for _ in range(draw(st.integers(0, 4))):
        if tensor.dim() == 0:
            break
        axis = draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[axis]
        match draw(st.sampled_from(["narrow", "transpose", "select", "view", "step", "flatten"])):
            case "narrow":
                count = draw(st.integers(1, size))
                tensor = tensor.narrow(axis, draw(st.integers(0, size - count)), count)
            case "transpose":
                tensor = tensor.transpose(axis, draw(st.integers(0, tensor.dim() - 1)))
            case "select":
                tensor = tensor.select(axis, draw(st.integers(0, size - 1)))
            case "step":
                tensor = tensor[:: draw(st.integers(1, 3))]
            case "view" if size % 2 == 0:
                tensor = tensor.unflatten(axis, (2, size // 2))
            case "flatten" if tensor.is_contiguous():
                tensor = tensor.view(-1)
    return tensor


@st.composite
def places(draw: st.DrawFn, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter, and a view of it of ``shape``."""
    spare = [draw(st.integers(0, 2)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    param = torch.full([shape[axis] + spare[axis] for axis in order], -1)
    into = param.permute([order.index(axis) for axis in range(len(shape))])
    for axis, size in enumerate(shape):
        into = into.narrow(axis, draw(st.integers(0, spare[axis])), size)
    if draw(st.booleans()) and param.dim() > 1:
        param = param.view(-1, param.shape[-1])
    return param, into


@given(st.data())
@settings(deadline=None, max_examples=1500)
def test_boxes_copy_what_the_copy_copies(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    view = data.draw(views(whole))
    param, into = data.draw(places(view.shape))
    pairs = pairs_of(whole, view, param, into)
    assert pairs is not None
    result = torch.full_like(param, -1)
    carry_out(pairs, whole, result)
    into.copy_(view)
    assert torch.equal(result, param)


def test_whole_rows_stay_one_box() -> None:
    whole, param = torch.zeros(64, 32, 16), torch.zeros(8, 64, 512)
    (pair,) = pairs_of(whole, whole[4:60, 8:24], whole, whole[4:60, 8:24]) or ()
    assert (pair.src.start, pair.src.shape, pair.axes) == ((4, 8, 0), (56, 16, 16), (0, 1, 2))
    view = torch.zeros(512, 64)
    (pair,) = pairs_of(view, view.T, param, param[3]) or ()
    assert (pair.src.shape, pair.dst.start, pair.dst.shape, pair.axes) == ((512, 64), (3, 0, 0), (1, 64, 512), (2, 1))


def test_what_is_no_set_of_boxes() -> None:
    whole, param = torch.zeros(4), torch.zeros(3, 4)
    assert pairs_of(whole, whole.expand(3, 4), param, param) is None  # elements read more than once
    many = torch.zeros(4 * MOST_BOXES)
    assert pairs_of(many, many[::2], many, many[: 2 * MOST_BOXES]) is None
    assert pairs_of(whole[:0], whole[:0], param[:0, 0], param[:0, 0]) == []
