"""Learning what an engine holds from the engine's own weight loader.

`learn_layout` runs the loader once on tensors without content and takes down what it copies where (`tracing`). What comes out
as boxes is described for direct pushes: it lands in the live parameters, sliced and fused as the loader does it, and the
loader is not called. What does not (the loader computes something from it) is named with the reason, and goes through the
loader. No specification of the engine is needed, and none can be out of date.

Nothing is written while learning. `check_layout` then proves the result: an ordinary load of made-up content has to leave in
memory what the boxes say, bit by bit; the content that was there before is put back.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from syncline.scheduler.boxes import Box
from syncline.scheduler.layout import Tensor

from ..modules import entries
from ..named_box import NamedBox, named_box, padding_box
from .aside import Aside
from .strided import Base, Transfer, box_pairs
from .tracing import LoadTrace, Source, Untraceable, Write, storage_of

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""An engine's loader: takes checkpoint tensors by name. May be called with a part of them."""

_MOST_ATTEMPTS = 32
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class LearnedLayout:
    """What `learn_layout` found on one rank.

    Attributes:
        tensors: the checkpoint's tensors.
        layout: boxes by parameter, for every parameter of the engine; what is not received directly is padding.
        direct: tensors of which boxes land directly in live parameters.
        through_loader: tensors that have to go through the loader, with the reason.
        unused: tensors that the loader takes nothing from on this rank (experts of other ranks, tied names).
        untouched: parameters that the loader writes nothing into.
    """

    tensors: tuple[Tensor, ...]
    layout: Mapping[str, tuple[NamedBox, ...]]
    direct: tuple[str, ...]
    through_loader: Mapping[str, str]
    unused: tuple[str, ...]
    untouched: tuple[str, ...]

    def __str__(self) -> str:
        count = f"{len(self.direct)} of {len(self.tensors)} tensors land directly"
        lines = [f"{count}, {len(self.through_loader)} go through the loader, {len(self.unused)} are not used on this rank"]
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for name, reason in self.through_loader.items():
            by_reason[reason].append(name)
        lines += [f"  through the loader: {_listed(names)}: {reason}" for reason, names in by_reason.items()]
        if self.untouched:
            lines.append(f"  the loader writes nothing into: {_listed(self.untouched)}")
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def learn_layout(model: nn.Module, load_weights: LoadWeights, tensors: Iterable[Tensor]) -> LearnedLayout:
    """Run the loader on tensors without content, and find out where each element of each goes.

    Args:
        model: the rank's live module. Its content and its addresses stay as they are.
        load_weights: the engine's loader, as it loads a checkpoint into ``model``.
        tensors: what a checkpoint holds: names, full shapes, types (for example `CheckpointTensors.tensors`).

    Returns:
        Where everything goes. A tensor on which the loader fails goes through the loader, with all that are named like it; if
        it fails on too many, all do.
    """
    catalog = tuple(tensors)
    refused: dict[str, str] = {}
    reason = ""
    for _ in range(_MOST_ATTEMPTS):
        attempt = _Attempt(model, load_weights, [tensor for tensor in catalog if tensor.name not in refused])
        failure = attempt.run()
        if failure is None:
            return _Findings(attempt, refused).layout(catalog)
        name, reason = failure
        kind = _kind(name)  # tensors of all layers are alike: what fails for one fails for the others
        refused |= {tensor.name: reason for tensor in catalog if not name or _kind(tensor.name) == kind}
        if len(refused) == len(catalog):
            break
    rest = {tensor.name: f"the loader cannot be watched ({reason})" for tensor in catalog}
    return _Findings(_Attempt(model, load_weights, ()), {**rest, **refused}).layout(catalog)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


class _Attempt:
    """One run of the loader under a trace."""

    def __init__(self, model: nn.Module, load_weights: LoadWeights, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.live = _Live(model)
        self.trace = LoadTrace(self.live.tensors)
        self.lost: frozenset[str] = frozenset()
        self._aside = Aside(model)
        self._load = load_weights
        self._current = ""

    def run(self) -> tuple[str, str] | None:
        """None if all went well; else the tensor that the loader took last (empty: none), and what happened."""
        problem = ""
        try:
            with torch.no_grad(), self.trace:
                self._load(self._feeds())
        except Untraceable as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - an engine's loader raises what it likes
            problem = f"the loader raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            self.lost = self.trace.lost()
            self.live.restore()
            with torch.no_grad():
                self._aside.restore()
        return (self._current, problem) if problem else None

    def _feeds(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.tensors:
            self._current = tensor.name
            like = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            yield tensor.name, self.trace.feed(tensor.name, like)


class _Live:
    """The tensors of a module as they were: objects, memory. Puts back what a loader has moved."""

    def __init__(self, model: nn.Module) -> None:
        self.entries = [entry for entry in entries(model) if not entry.tensor.is_meta]
        self._data = [entry.tensor.data for entry in self.entries]
        self.tensors = self._data
        self.moved: set[str] = set()

    def restore(self) -> None:
        """Point everything at its own memory again; `moved` are those for which that was needed."""
        for entry, data in zip(self.entries, self._data, strict=True):
            there = entry.container.get(entry.key)
            if there is entry.tensor and there.data_ptr() == data.data_ptr() and not there.is_meta:
                continue
            self.moved.add(entry.name)
            entry.tensor.data = data
            if isinstance(entry.container, dict):
                entry.container[entry.key] = entry.tensor


@dataclass
class _Target:
    """A parameter's memory, with everything that was written into it."""

    names: list[str]
    tensor: torch.Tensor
    boxes: dict[Box, NamedBox] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """Checkpoint tensors that something was computed from that was written here, with the reason."""
    constants: list[Box] = field(default_factory=list)

    @property
    def base(self) -> Base:
        return Base(tuple(self.tensor.shape), self.tensor.stride(), int(self.tensor.storage_offset()))


class _Findings:
    """Turns the writes of a trace into a layout."""

    def __init__(self, attempt: _Attempt, refused: Mapping[str, str]) -> None:
        self._shapes = {tensor.name: tensor for tensor in attempt.tensors}
        self._reasons = dict(refused)
        self._targets = _targets(attempt.live)
        self._by_storage: defaultdict[int, list[_Target]] = defaultdict(list)
        for target in self._targets:
            self._by_storage[storage_of(target.tensor)].append(target)
        self._written: set[str] = set()
        for write in attempt.trace.writes:
            self._enter(write)
        self._moved(attempt.live.moved)
        self._shared()
        self._spread()
        for name in sorted(attempt.lost):
            self._reasons.setdefault(name, "the loader keeps something of it that is no parameter and no persistent buffer")

    def layout(self, catalog: Sequence[Tensor]) -> LearnedLayout:
        layout = {name: self._boxes(target) for target in self._targets for name in target.names}
        direct = {box.name for boxes in layout.values() for box in boxes if not box.is_padding}
        return LearnedLayout(
            tensors=tuple(catalog),
            layout=layout,
            direct=tuple(tensor.name for tensor in catalog if tensor.name in direct),
            through_loader={tensor.name: self._reasons[tensor.name] for tensor in catalog if tensor.name in self._reasons},
            unused=tuple(t.name for t in catalog if t.name not in direct and t.name not in self._reasons),
            untouched=tuple(t.names[0] for t in self._targets if not (t.boxes or t.computed or t.constants)),
        )

    def _enter(self, write: Write) -> None:
        if 0 in write.base.shape:
            return
        target = self._target_of(write)
        reads = {source.name for source in write.sources or ()} | write.tainted
        self._written |= reads
        if target is None:
            self._reasons |= dict.fromkeys(reads, "the loader writes it across the bounds of parameters")
            return
        if write.sources is not None:
            problem = self._take(target, write, write.sources)
            if not problem:
                return
        elif write.tainted:
            problem = f"the loader computes {target.names[0]} from it"
        else:
            self._constant(target, write)
            return
        target.computed |= dict.fromkeys(reads, problem)

    def _take(self, target: _Target, write: Write, sources: Sequence[Source]) -> str:
        """Enter exact copies; what prevents it, in words."""
        found: list[tuple[Box, NamedBox]] = []
        for source in sources:
            tensor = self._shapes[source.name]
            allowed = {getattr(torch, tensor.dtype), write.dtype}
            if write.dtype != target.tensor.dtype or not allowed.issuperset(source.casts):
                return f"the loader converts it on the way to {target.names[0]}"
            pairs = box_pairs(source.transfer, Base.of(tensor.shape), target.base)
            if pairs is None:
                return f"what the loader takes of it for {target.names[0]} is no set of boxes"
            for pair in pairs:
                box = named_box(
                    source.name, tensor.shape, start=pair.src.start, size=pair.src.shape, local_start=pair.dst.start,
                    axes=pair.axes,
                )  # fmt: skip
                found.append((pair.dst, box))
        for place, box in found:
            target.boxes[place] = box  # the last one to write a place counts
        return ""

    def _constant(self, target: _Target, write: Write) -> None:
        """Something that depends on no checkpoint tensor: padding, unless it comes on top of what was loaded."""
        rows = Base.of(write.base.shape)
        flat = Transfer.between(rows.shape, src=(write.base.offset, write.base.strides), dst=(0, rows.strides))
        pairs = box_pairs(flat, target.base, rows)
        places = [Box.whole(target.tensor.shape)] if pairs is None else [pair.src for pair in pairs]
        target.constants += places
        for place, box in target.boxes.items():
            if any(place.intersect(other) is not None for other in places):
                target.computed[box.name] = f"the loader changes {target.names[0]} after loading it"

    def _target_of(self, write: Write) -> _Target | None:
        last = sum((n - 1) * stride for n, stride in zip(write.base.shape, write.base.strides, strict=True))
        for target in self._by_storage[write.storage]:
            first, shape, strides = target.tensor.storage_offset(), target.tensor.shape, target.tensor.stride()
            end = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            if first <= write.base.offset and write.base.offset + last <= end:
                return target
        return None

    def _moved(self, moved: set[str]) -> None:
        """Parameters that the loader put other memory into: nothing is known of what went there."""
        silent = [name for name in self._shapes if name not in self._written]
        for target in self._targets if moved else ():
            if moved.isdisjoint(target.names):
                continue
            reason = f"the loader replaces {target.names[0]}"
            touched = {box.name for box in target.boxes.values()}
            target.computed |= dict.fromkeys([*touched, *silent], reason)

    def _shared(self) -> None:
        """A layout names one place for each element: what the loader copies to several parameters goes through it."""
        homes: defaultdict[str, list[tuple[Box, _Target]]] = defaultdict(list)
        for target in self._targets:
            for box in target.boxes.values():
                homes[box.name].append((Box(start=box.start, shape=box.size), target))
        for name, places in homes.items():
            if len({id(target) for _, target in places}) > 1 and _overlap([box for box, _ in places]):
                names = ", ".join(sorted({target.names[0] for _, target in places}))
                self._reasons.setdefault(name, f"the loader copies it to several parameters: {names}")

    def _spread(self) -> None:
        """What goes through the loader does so as a whole, and takes along all that shares a computed parameter."""
        for target in self._targets:
            if target.computed or _overlap(list(target.boxes)):
                reason = next(iter(target.computed.values()), f"the loader writes parts of {target.names[0]} twice")
                names = {box.name for box in target.boxes.values()}
                for name in sorted(names | target.computed.keys()):
                    self._reasons.setdefault(name, target.computed.get(name, reason))

    def _boxes(self, target: _Target) -> tuple[NamedBox, ...]:
        """What lands directly, in order of place, and the rest as padding."""
        ordered = sorted(target.boxes.items(), key=lambda item: item[0].start)
        direct = {place: box for place, box in ordered if box.name not in self._reasons}
        rest = _without(Box.whole(target.tensor.shape), list(direct))
        return (*direct.values(), *(padding_box(hole.shape, local_start=hole.start) for hole in rest))


def _targets(live: _Live) -> list[_Target]:
    """Live tensors, each memory once."""
    found: dict[Any, _Target] = {}
    for entry, data in zip(live.entries, live.tensors, strict=True):
        key = (storage_of(data), data.storage_offset(), data.shape, data.stride(), data.dtype)
        found.setdefault(key if data.numel() else entry.name, _Target(names=[], tensor=data)).names.append(entry.name)
    return list(found.values())


def _overlap(boxes: list[Box]) -> bool:
    """Whether two of these boxes share an element. Sorted by their first axis, only neighbours are looked at."""
    open_: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.start):
        open_ = [other for other in open_ if not box.start or other.stop[0] > box.start[0]]
        if any(box.intersect(other) is not None for other in open_):
            return True
        open_.append(box)
    return False


def _without(whole: Box, boxes: Sequence[Box]) -> list[Box]:
    """The rest of ``whole``, as disjoint boxes, when ``boxes`` (disjoint, inside it) are taken away."""
    if sum(box.volume for box in boxes) == whole.volume:
        return []
    rest = [whole]
    for box in boxes:
        rest = [piece for part in rest for piece in _difference(part, box)]
    return rest


def _difference(part: Box, box: Box) -> Iterator[Box]:
    """``part`` without ``box``."""
    common = part.intersect(box)
    if common is None:
        yield part
        return
    start, stop = list(part.start), list(part.stop)
    for axis in range(part.ndim):
        for low, high in ((start[axis], common.start[axis]), (common.stop[axis], stop[axis])):
            if low < high:
                first, last = list(start), list(stop)
                first[axis], last[axis] = low, high
                yield Box(start=tuple(first), shape=tuple(b - a for a, b in zip(first, last, strict=True)))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
