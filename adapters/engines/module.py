"""`ModuleLoader`: loads received weights into any ``nn.Module``, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from syncline.engine.loader import Landed
from syncline.scheduler.layout import Index, Manifest

from ..holdings import Holdings
from ..named_box import NamedBox
from ..names import NameMap
from .movable import Movable, movable_buffers

Layout = Mapping[str, NamedBox | Sequence[NamedBox]]


class _LayoutMap:
    """A user's explicit layout, before any other name map."""

    def __init__(self, layout: Layout, names: NameMap | None) -> None:
        self._layout, self._names = layout, names

    def boxes(self, shapes: Mapping[str, Index]) -> dict[str, Sequence[NamedBox]]:
        found: dict[str, Sequence[NamedBox]] = dict(self._names.boxes(shapes)) if self._names is not None else {}
        unknown = sorted(set(self._layout) - set(shapes))
        if unknown:
            raise ValueError(f"layout names parameters that the module does not have: {', '.join(unknown)}")
        for name, boxes in self._layout.items():
            found[name] = _checked(name, shapes[name], (boxes,) if isinstance(boxes, NamedBox) else tuple(boxes))
        return found


def _checked(name: str, shape: Index, boxes: Sequence[NamedBox]) -> Sequence[NamedBox]:
    for box in boxes:
        size = box.local_size()
        if len(size) != len(shape) or any(s + n > full for s, n, full in zip(box.local_start, size, shape, strict=True)):
            raise ValueError(f"layout of {name}: box of size {size} at {box.local_start} leaves the parameter of shape {shape}")
    for padding in (box for box in boxes if box.is_padding):
        if any(box is not padding and _meet(box, padding) for box in boxes):
            raise ValueError(f"layout of {name}: its padding at {padding.local_start} overlaps what it holds")
    return boxes


def _meet(a: NamedBox, b: NamedBox) -> bool:
    """Whether two boxes share an element of their parameter."""
    places = zip(a.local_start, a.local_size(), b.local_start, b.local_size(), strict=True)
    return all(max(s, t) < min(s + n, t + m) for s, n, t, m in places)


class ModuleLoader:
    """A target's weights in a live ``nn.Module`` (a `syncline.engine.loader.Loader`).

    Everything in the module's ``state_dict`` is received: parameters (tied ones once) and persistent buffers; non-persistent
    buffers stay as they are. Content is written in place, so that addresses never change. With ``movable=True`` and landing
    ``mapped`` the parameters are pointed at the received memory instead (addresses change at every push, so nothing may
    keep them: no captured graphs); parameters that are not received as one contiguous piece are still copied in place.

    Args:
        model: the module. DTensor parameters (tensor parallelism) receive the slices that this rank holds.
        movable: parameters may be pointed at other memory.
        names: a `NameMap` (such as a `NameTable`) for parameters that are named otherwise in checkpoints.
        layout: for modules sharded by hand: what each plain parameter holds, by its name in the module without wrappers;
            boxes are made with `named_box`, and with `padding_box` for what no tensor has (`tp_layout` makes them for
            tensor-parallel modules). Parameters that are not listed hold all of themselves.
        optional: canonical names or patterns with ``*`` that the source may lack; they keep their content.
        on_update: called with the version after all content is in place, under pause: recompute what derives from weights.

    Raises:
        PlanError: (from `manifest`) tensors that cannot be loaded into; lists all of them.
        ValueError: (from `manifest`) a layout that does not fit the module.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        movable: bool = False,
        names: NameMap | None = None,
        layout: Layout | None = None,
        optional: Iterable[str] = (),
        on_update: Callable[[int | None], None] | None = None,
    ) -> None:
        self._model = model
        self._movable = movable
        self._names: NameMap | None = _LayoutMap(layout, names) if layout else names
        self._optional = tuple(optional)
        self._on_update = on_update
        self._holdings: Holdings | None = None
        self._manifest: Manifest | None = None
        self._movers: dict[int, Movable] = {}
        self._mapped: dict[int, torch.Tensor] = {}

    def manifest(self, *, rank: int, world_size: int, host: str) -> Manifest:
        """What this rank must receive. The fingerprint changes when live memory was reallocated, but not by `rebind`."""
        holdings = self._current()
        place = (rank, world_size, host)
        if self._manifest is None or (self._manifest.rank, self._manifest.world_size, self._manifest.host) != place:
            self._manifest = holdings.manifest(
                rank=rank, world_size=world_size, host=host, optional=self._optional, movable=self._movable
            )
        return self._manifest

    def buffers(self) -> Sequence[torch.Tensor]:
        """Live tensors in the order of the manifest's buffers. Only `rebind` and `unmap` replace them."""
        return self._current().locals

    def begin(self, version: int | None) -> None:
        """Nothing to prepare."""

    def install(self, landed: Sequence[Landed]) -> None:
        """Copy parts into the live parameters. A parameter that `rebind` moved gets memory of its own first."""
        holdings = self._current()
        self._own({holdings.pieces[part.piece].buffer for part in landed})
        with torch.no_grad():
            for part in landed:
                self._write(holdings, part)

    def rebind(self, landed: Sequence[Landed]) -> None:
        """Point whole contiguous parameters at the landed tensors (tied and aliased views with them); copy the others.

        The landed tensors are kept alive until the next `rebind` or `unmap` has replaced them.
        """
        if not self._movable:
            raise ValueError("ModuleLoader(movable=False): its parameters must stay; landing 'mapped' needs movable=True")
        holdings = self._current()
        copied, moved = [], []
        for part in landed:
            buffer = holdings.pieces[part.piece].buffer
            if buffer in self._movers and self._movers[buffer].accepts(part):
                self._movers[buffer].point(part.tensor)
                self._mapped[buffer] = part.tensor
                moved.append(buffer)
            else:
                copied.append(part)
        holdings.moved(moved)
        self.install(copied)

    def unmap(self) -> None:
        """Give every parameter that `rebind` moved memory of its own, and let go of the landed memory."""
        self._own(set(self._mapped))

    def finish(self, version: int | None) -> None:
        """Call ``on_update``."""
        if self._on_update is not None:
            self._on_update(version)

    def _current(self) -> Holdings:
        if self._holdings is None or not self._holdings.unchanged():
            self._holdings = Holdings(self._model, names=self._names, target=True)
            self._movers = movable_buffers(self._model, self._holdings) if self._movable else {}
            self._mapped, self._manifest = {}, None
        return self._holdings

    def _own(self, buffers: set[int]) -> None:
        """Give these buffers memory of their own where they are mapped."""
        mapped = [buffer for buffer in buffers if buffer in self._mapped]
        for buffer in mapped:
            self._movers[buffer].point(self._mapped[buffer].clone())
            del self._mapped[buffer]
        if mapped and self._holdings is not None:
            self._holdings.moved(mapped)

    @staticmethod
    def _write(holdings: Holdings, part: Landed) -> None:
        piece = holdings.pieces[part.piece]
        buffer = holdings.locals[piece.buffer]
        inside = zip(part.box.start, piece.box.start, piece.strides, strict=True)
        offset = buffer.storage_offset() + piece.offset + sum((at - start) * stride for at, start, stride in inside)
        buffer.as_strided(part.box.shape, piece.strides, offset).copy_(part.tensor)
