"""`NamedBox`: a box of a local parameter that is a box of a canonical tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.scheduler.layout import Index


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedBox:
    """A box of a parameter, and the box of a canonical tensor that it is. Build one with `named_box`.

    Attributes:
        name: the canonical (checkpoint) name; empty for padding.
        shape: the canonical tensor's full shape.
        start: where the box begins in the canonical tensor.
        size: the box's shape, in the order of the canonical tensor's axes.
        local_start: where the box begins in the parameter.
        axes: for each canonical axis the parameter's axis that it runs along; -1 for an axis of size 1 that the parameter
            lacks. Axes of the parameter that are not named have extent 1 in the box.
    """

    name: str
    shape: Index
    start: Index
    size: Index
    local_start: Index
    axes: Index

    @property
    def is_padding(self) -> bool:
        """No canonical tensor has these elements: see `padding_box`."""
        return not self.name

    def under(self, prefix: str) -> NamedBox:
        """The same box of the tensor whose name has ``prefix`` in front."""
        return replace(self, name=prefix + self.name) if prefix and self.name else self

    def local_size(self) -> Index:
        """The box's shape in the order of the parameter's axes."""
        size = [1] * len(self.local_start)
        for axis, extent in zip(self.axes, self.size, strict=True):
            if axis >= 0:
                size[axis] = extent
        return tuple(size)


def named_box(
    name: str,
    shape: Sequence[int],
    *,
    start: Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    local_start: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
) -> NamedBox:
    """A `NamedBox`, by default the whole canonical tensor ``name`` held as a parameter of the same shape.

    For a shard by hand: ``named_box("fc.weight", (8, 4), start=(4, 0), size=(4, 4))`` is a parameter of shape (4, 4) that
    holds the last four rows. Raises `ValueError` where lengths do not match or the box leaves the canonical tensor.
    """
    shape = tuple(shape)
    size = shape if size is None else tuple(size)
    start = (0,) * len(shape) if start is None else tuple(start)
    axes = tuple(range(len(shape))) if axes is None else tuple(axes)
    local_start = (0,) * len(shape) if local_start is None else tuple(local_start)
    if not len(shape) == len(size) == len(start) == len(axes):
        raise ValueError(f"{name}: shape {shape}, start {start}, size {size} and axes {axes} must have one length")
    if any(s < 0 or n < 0 or s + n > full for s, n, full in zip(start, size, shape, strict=True)):
        raise ValueError(f"{name}: box of size {size} at {start} leaves the tensor of shape {shape}")
    used = [axis for axis in axes if axis >= 0]
    if len(set(used)) != len(used) or any(axis >= len(local_start) for axis in used):
        raise ValueError(f"{name}: axes {axes} must name each of the parameter's {len(local_start)} axes at most once")
    return NamedBox(name=name, shape=shape, start=start, size=size, local_start=local_start, axes=axes)


def padding_box(size: Sequence[int], *, local_start: Sequence[int] | None = None) -> NamedBox:
    """A box of a parameter that no canonical tensor has, such as the last rows of a padded vocabulary. Nothing is sent."""
    return named_box("", size, local_start=local_start)


class BoxTable:
    """A name map (`syncline.adapters.names.NameMap`) of boxes that are known: for modules that are sharded by hand.

    ``ModuleSource(model, names=BoxTable(tp_layout(config, model, parallel)))`` is a tensor-parallel trainer's rank.
    """

    def __init__(self, boxes: Mapping[str, NamedBox | Sequence[NamedBox]]) -> None:
        self._boxes = {name: (given,) if isinstance(given, NamedBox) else tuple(given) for name, given in boxes.items()}

    def boxes(self, shapes: Mapping[str, Index]) -> Mapping[str, Sequence[NamedBox]]:
        """The boxes of those parameters that are there."""
        return {name: boxes for name, boxes in self._boxes.items() if name in shapes}
