"""Watching an engine's loader: which elements of which checkpoint tensor it copies into which of its parameters.

The loader is given meta tensors, which have shapes and strides and no content. Every operation that it does with them is
seen before it is carried out. Views need no help; copies, casts and concatenations are remembered with where their elements
come from; whatever else is computed from a checkpoint tensor is *tainted* by it. Writes into live memory are taken down and
not carried out, so that nothing changes.

What can't be followed raises `Untraceable`: the loader asks for a value, or leaves torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from syncline.scheduler.boxes import Box, row_major

from .strided import Base, Transfer, aligned

_aten = torch.ops.aten
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})  # noqa: SLF001 - its name
_SCALAR = _aten._local_scalar_dense.default  # noqa: SLF001 - its name


class Untraceable(Exception):
    """The loader does something with a checkpoint tensor that leaves no trace. The message says what."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Elements of a checkpoint tensor: a transfer from it (flat, row-major) to somewhere; the types it went through."""

    name: str
    transfer: Transfer
    casts: tuple[torch.dtype, ...] = ()


@dataclass(kw_only=True)
class Write:
    """What the loader wrote into live memory.

    Attributes:
        storage: of the live memory.
        base: the view that was written, in elements of its type from the storage's first.
        sources: where all of it comes from; None: it is a constant, or computed from ``tainted``.
        tainted: checkpoint tensors that it was computed from.
        dtype: type of the view.
    """

    storage: int
    base: Base
    sources: list[Source] | None
    tainted: frozenset[str]
    dtype: torch.dtype


class _Tile(NamedTuple):
    """A box of a temporary tensor, and the view that was written there."""

    box: Box
    storage: int
    offset: int
    strides: tuple[int, ...]


@dataclass
class _Memory:
    """What is known of a storage that is not live.

    ``feed``: it is a checkpoint tensor's own. Else ``tiles`` are boxes of ``base`` that came from other storages. ``tainted``:
    something in it was computed from these checkpoint tensors. ``scratch``: it was there before the loader ran.
    """

    base: Base
    dtype: torch.dtype
    feed: str = ""
    tiles: list[_Tile] = field(default_factory=list)
    tainted: frozenset[str] = frozenset()
    scratch: bool = False


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, as long as that is alive."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public one


class LoadTrace(TorchDispatchMode):
    """A dispatch mode under which a loader runs.

    Args:
        live: the engine's tensors. Nothing is written to them while the mode is on.

    Attributes:
        writes: what was written to live memory, in order.
    """

    def __init__(self, live: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.writes: list[Write] = []
        self._live = {storage_of(tensor) for tensor in live}
        self._known: dict[int, _Memory] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no identity is used twice
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def lost(self) -> frozenset[str]:
        """Checkpoint tensors of which the engine keeps something in memory that is not among its live tensors.

        Asked after the loader has returned: what it made on its way and still holds, it keeps.
        """
        kept = {int(s._cdata) for s in self._alive if torch._C._storage_Use_Count(s._cdata) > 1}  # noqa: SLF001 - torch has no public one
        memories = [memory for storage, memory in self._known.items() if memory.scratch or storage in kept]
        return frozenset().union(*map(self._feeds, memories))

    def feed(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A stand-in for checkpoint tensor ``name``, to be given to the loader."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self._learn(tensor, _Memory(Base.of(like.shape), like.dtype, feed=name))
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        written = _written(func, args, kwargs)
        if written:
            return self._mutate(func, args, kwargs, inputs, written)
        followed = [tensor for tensor in inputs if storage_of(tensor) in self._known]
        if func.is_view:
            return func(*args, **kwargs)
        if not followed:
            return self._noted(func(*args, **kwargs))
        if func is _SCALAR:  # it may keep the number anywhere
            raise Untraceable(f"the loader asks for a value of {', '.join(sorted(self._names(followed)))}")
        return self._compute(func, args, kwargs, inputs)

    # results of operations

    def _compute(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """Carry out an operation on tensors without content, and remember what its results are."""
        if func in _COPIES and self._is_followed(inputs[0]):
            return self._copied(inputs[0], kwargs)
        names = self._names(inputs)
        try:
            result = func(*tree_map(_on_meta, args), **{k: _on_meta(v) for k, v in kwargs.items() if k != "device"})
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise Untraceable(f"{func} of {', '.join(sorted(names))}: {error}") from error
        outputs, _ = tree_flatten(result)
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise Untraceable(f"{func} asks for values of {', '.join(sorted(names))}")
        for output in outputs:
            if storage_of(output) not in self._known and output.is_meta:
                memory = _Memory(Base.of(output.shape), output.dtype, tainted=names)
                if func is _aten.cat.default:
                    memory = self._joined(output, *args, **kwargs) or memory
                self._learn(output, memory)
        return result

    def _copied(self, source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """A clone or cast: row-major memory of its own, made of one tile."""
        dtype = kwargs.get("dtype") or source.dtype
        result = torch.empty(source.shape, dtype=dtype, device="meta")
        memory = _Memory(Base.of(source.shape), dtype)
        memory.tiles.append(_tile(Box.whole(source.shape), source))
        self._learn(result, memory)
        return result

    def _joined(self, output: torch.Tensor, parts: list[torch.Tensor], dim: int = 0) -> _Memory | None:
        """A concatenation: one tile a part. None if not all parts are known."""
        if not all(self._is_followed(part) and part.dtype == output.dtype for part in parts):
            return None
        memory, at = _Memory(Base.of(output.shape), output.dtype), 0
        dim %= output.dim()
        for part in parts:
            start = tuple(at if axis == dim else 0 for axis in range(output.dim()))
            memory.tiles.append(_tile(Box(start=start, shape=tuple(part.shape)), part))
            at += part.shape[dim]
        return memory

    def _noted(self, result: Any) -> Any:
        """The loader's own memory: what it makes while it runs, as long as it is there."""
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = storage_of(tensor)
                self._made[storage] = weakref.ref(tensor, partial(self._gone, storage))
        return result

    def _gone(self, storage: int, _tensor: object) -> None:
        self._made.pop(storage, None)

    # writes

    def _mutate(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        places = [storage_of(tensor) for tensor in written]
        sources = [t for t in inputs if all(t is not w for w in written)]
        if not any(place in self._live or place in self._known for place in places) and not self._names(sources):
            return func(*args, **kwargs)
        plain = func is _aten.copy_.default
        for tensor in written:
            origin = sources[0] if sources and (plain or (func is _aten.fill_.Tensor and tensor.numel() == 1)) else None
            self._write(tensor, origin, names=self._names(sources))
        return None if func._schema.returns == [] else written[0] if len(written) == 1 else tuple(written)  # noqa: SLF001

    def _write(self, to: torch.Tensor, origin: torch.Tensor | None, *, names: frozenset[str]) -> None:
        if storage_of(to) not in self._live:
            self._write_temporary(to, origin, names)
            return
        base = Base(tuple(to.shape), to.stride(), int(to.storage_offset()))
        sources = None if origin is None else self._resolve(origin.expand(to.shape), base)
        tainted = names if sources is None else frozenset[str]()
        self.writes.append(Write(storage=storage_of(to), base=base, sources=sources, tainted=tainted, dtype=to.dtype))

    def _write_temporary(self, to: torch.Tensor, origin: torch.Tensor | None, names: frozenset[str]) -> None:
        memory = self._known.get(storage_of(to)) or self._temporary(to, names)
        target = Transfer.between(to.shape, src=(int(to.storage_offset()), to.stride()), dst=(0, row_major(to.shape)))
        boxes = aligned(target.joined(), memory.base) if to.dtype == memory.dtype else None
        box = boxes[0].box if boxes is not None and len(boxes) == 1 else None
        fits = box is not None and box.shape == tuple(to.shape) and not memory.feed
        if box is None or not fits or origin is None or not self._is_followed(origin) or origin.shape != to.shape:
            memory.tainted |= names | self._feeds(memory)
            return
        if any(box.intersect(other.box) is not None for other in memory.tiles):
            memory.tainted |= names | self._feeds(memory)
        memory.tiles.append(_tile(box, origin))

    def _temporary(self, to: torch.Tensor, names: frozenset[str]) -> _Memory:
        """Memory of the loader's own that a checkpoint tensor is written to."""
        whole = to if to._base is None else to._base  # noqa: SLF001 - the tensor that ``to`` is a view of
        made = whole.is_meta or storage_of(whole) in self._made
        memory = _Memory(Base.of(whole.shape), whole.dtype, scratch=not made)
        if not whole.is_contiguous() or whole.storage_offset():
            memory.tainted = names
        self._learn(whole, memory)
        return memory

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is known, in elements of its type."""
        memory = self._known.get(storage_of(tensor))
        return memory is not None and memory.dtype == tensor.dtype

    # where elements come from

    def _resolve(self, view: torch.Tensor, to: Base) -> list[Source] | None:
        """Every element of a view, traced back to checkpoint tensors; None if some can't be."""
        if not self._is_followed(view):
            return None
        transfer = Transfer.between(view.shape, src=(int(view.storage_offset()), view.stride()), dst=(to.offset, to.strides))
        found = list(self._trace(storage_of(view), transfer, ()))
        if any(source is None for source in found):
            return None
        sources = [source for source in found if source is not None]
        return sources if sum(source.transfer.volume for source in sources) == view.numel() else None

    def _trace(self, storage: int, transfer: Transfer, casts: tuple[torch.dtype, ...]) -> Iterator[Source | None]:
        memory = self._known.get(storage)
        if memory is None or memory.tainted:
            yield None
        elif memory.feed:
            yield Source(name=memory.feed, transfer=transfer, casts=casts)
        else:
            parts = aligned(transfer.joined(), memory.base)
            if parts is None:
                yield None
            for part in parts or ():
                for tile in memory.tiles:
                    common = part.box.intersect(tile.box)
                    if common is not None:
                        inner = _through(part.transfer, part.box, part.axes, common=common, tile=tile)
                        yield from self._trace(tile.storage, inner, (memory.dtype, *casts))

    def _feeds(self, memory: _Memory) -> frozenset[str]:
        """Checkpoint tensors that have anything to do with a memory."""
        below = (self._known[tile.storage] for tile in memory.tiles if tile.storage in self._known)
        own = frozenset({memory.feed}) if memory.feed else frozenset[str]()
        return memory.tainted.union(own, *(self._feeds(other) for other in below))

    def _names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        known = (self._known.get(storage_of(tensor)) for tensor in tensors)
        return frozenset().union(*(self._feeds(memory) for memory in known if memory is not None))

    def _learn(self, tensor: torch.Tensor, memory: _Memory) -> None:
        self._alive.append(tensor.untyped_storage())
        self._known[storage_of(tensor)] = memory


def _tile(box: Box, view: torch.Tensor) -> _Tile:
    return _Tile(box, storage_of(view), int(view.storage_offset()), view.stride())


def _through(transfer: Transfer, box: Box, axes: tuple[int, ...], *, common: Box, tile: _Tile) -> Transfer:
    """The part of a transfer out of ``box`` that a tile has, as a transfer out of the tile's own memory."""
    src = tile.offset + sum((c - t) * s for c, t, s in zip(common.start, tile.box.start, tile.strides, strict=True))
    dst, spans = transfer.dst, []
    for span, axis in zip(transfer.spans, axes, strict=True):
        dst += (common.start[axis] - box.start[axis]) * span.dst
        if common.shape[axis] > 1:
            spans.append(span._replace(steps=common.shape[axis], src=tile.strides[axis]))
    return Transfer(spans=tuple(spans), src=src, dst=dst)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_on_meta(item) for item in value] if isinstance(value, list) else value


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that an operation changes."""
    schema = func._schema  # noqa: SLF001 - torch's own way to ask
    if not schema.is_mutable:
        return []
    found = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_flatten(value)[0] if isinstance(tensor, torch.Tensor)]
    return found
