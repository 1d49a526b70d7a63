"""Manifests from shapes alone, of any size: no memory is allocated for weights. FSDP here, the others in `splits`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from syncline.scheduler.dtypes import itemsize
from syncline.scheduler.layout import BufferTable, Layout, Manifest, PieceTable, TensorTable

from .models import Architecture, Parameter, parameters

_Ints = npt.NDArray[np.int64]
_DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's parameters, and its tensors as one table that layouts share."""

    shape: Architecture
    rows: tuple[Parameter, ...]
    table: TensorTable

    @classmethod
    def of(cls, shape: Architecture) -> Model:
        rows = tuple(parameters(shape))
        return cls(shape=shape, rows=rows, table=tensor_table(rows, shape.dtype))

    @cached_property
    def _by_expert(self) -> Mapping[int, Sequence[int]]:
        """Rows of each expert; -1: of none."""
        found: dict[int, list[int]] = {}
        for index, parameter in enumerate(self.rows):
            found.setdefault(parameter.expert, []).append(index)
        return found

    def rows_with(self, experts: Iterable[int]) -> list[int]:
        """Rows that a rank with these experts may hold, in order: theirs, and all that are of no expert."""
        return sorted(itertools.chain.from_iterable(self._by_expert.get(expert, ()) for expert in (-1, *experts)))

    @property
    def aliases(self) -> dict[str, str]:
        """What a tied model calls its output layer."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.shape.tied else {}


def tensor_table(rows: Sequence[Parameter], dtype: str, *, expert_group: int = 0) -> TensorTable:
    """The canonical tensors of some parameters, of type ``dtype`` unless they say; experts in mesh group ``expert_group``."""
    dtypes = tuple(dict.fromkeys([dtype, *(p.dtype or dtype for p in rows)]))
    return TensorTable(
        names=tuple(p.name for p in rows),
        shape=np.array([(*p.shape, *(1,) * (_DEPTH - len(p.shape))) for p in rows], np.int64).reshape(len(rows), _DEPTH),
        ndim=np.array([len(p.shape) for p in rows], np.int64),
        dtype=np.array([dtypes.index(p.dtype or dtype) for p in rows], np.int64),
        dtypes=dtypes,
        group=np.array([expert_group if p.expert >= 0 else 0 for p in rows], np.int64),
    )


# ------------------------------------------------------------------------------------------------- FSDP and whole models


def fsdp(model: Model, *, shards: int, replicas: int = 1, ranks_per_host: int = 8) -> list[Manifest]:
    """Rows of every tensor cut over ``shards`` ranks, the whole ``replicas`` times; ranks of a replica are consecutive."""
    layouts = [_boxed(model, *_rows_of(model.table.shape, shard, shards)) for shard in range(shards)]
    return manifests_of([layouts[rank % shards] for rank in range(shards * replicas)], "trainer", ranks_per_host)


def whole_layout(model: Model) -> Layout:
    """A rank that holds everything."""
    return _boxed(model, np.zeros_like(model.table.shape), model.table.shape)


def _rows_of(shape: _Ints, rank: int, ranks: int) -> tuple[_Ints, _Ints]:
    """Equal blocks of rows, the last ones shorter or empty (as ``torch.chunk`` cuts)."""
    start, size = np.zeros_like(shape), shape.copy()
    block = -(-shape[:, 0] // ranks)
    start[:, 0] = np.minimum(block * rank, shape[:, 0])
    size[:, 0] = np.minimum(block, shape[:, 0] - start[:, 0])
    return start, size


def _boxed(model: Model, start: _Ints, shape: _Ints) -> Layout:
    """A rank that holds one box of each tensor, each contiguous in a buffer of its own. Empty boxes are left out."""
    table = model.table
    kept = np.flatnonzero((shape > 0).all(axis=1))
    start, shape, ndim, dtype = start[kept], shape[kept], table.ndim[kept], table.dtype[kept]
    strides = np.stack([np.where(ndim > 1, shape[:, 1], 1), np.where(ndim > 1, 1, 0)], axis=1)
    zeros = np.zeros(len(kept), np.int64)
    return Layout(
        tensors=table,
        pieces=PieceTable(
            tensor=kept, ndim=ndim, start=start, shape=shape, buffer=np.arange(len(kept)), offset=zeros,
            strides=strides, dtype=dtype, dtypes=table.dtypes,
        ),
        buffers=BufferTable(
            names=table.names if len(kept) == len(table) else tuple(table.names[i] for i in kept.tolist()),
            nbytes=shape.prod(axis=1) * np.array([itemsize(kind) for kind in table.dtypes])[dtype],
            device=zeros, devices=("cpu",), kind=zeros,
            kinds=("memory",), padding=zeros,
        ),
        aliases=model.aliases,
    )  # fmt: skip


def manifests_of(layouts: Sequence[Layout], host: str, ranks_per_host: int) -> list[Manifest]:
    """A rank for each layout, ``ranks_per_host`` of them on each of the hosts ``<host>0``, ``<host>1`` and so on."""
    return [
        Manifest(rank=rank, world_size=len(layouts), host=f"{host}{rank // ranks_per_host}", layout=layout)
        for rank, layout in enumerate(layouts)
    ]


# ------------------------------------------------------------------------------------------------ a rank, piece by piece


class Draft:
    """A rank in the making, piece by piece. A buffer is as long as its last piece reaches, or as it is told to be."""

    def __init__(self, model: Model, *, expert_group: int = 0) -> None:
        self._model, self._expert_group = model, expert_group
        self._tensors: dict[int, int] = {}
        self._buffers: dict[str, int] = {}
        self._sizes: list[int] = []
        self._held: list[int] = []
        self._itemsizes: list[int] = []
        self._pieces: list[tuple[int, ...]] = []

    def put(self, buffer: str, index: int, start: tuple[int, int], shape: tuple[int, int], offset: int = 0) -> int:
        """A box of parameter ``index``, row-major from ``offset`` on. Returns where it ends."""
        place = self._buffers.setdefault(buffer, len(self._sizes))
        if place == len(self._sizes):
            self._sizes.append(0)
            self._held.append(0)
            self._itemsizes.append(itemsize(self._model.rows[index].dtype or self._model.shape.dtype))
        count = shape[0] * shape[1]
        if count:
            ndim = len(self._model.rows[index].shape)
            strides = (shape[1], 1) if ndim > 1 else (1, 0)
            tensor = self._tensors.setdefault(index, len(self._tensors))
            self._pieces.append((tensor, ndim, place, offset, *start, *shape, *strides))
        self._sizes[place] = max(self._sizes[place], offset + count)
        self._held[place] += count
        return offset + count

    def rows(self, buffer: str, index: int, rows: range, offset: int = 0) -> int:
        return self.put(buffer, index, (rows.start, 0), (len(rows), self._width(index)), offset)

    def columns(self, buffer: str, index: int, columns: range, offset: int = 0) -> int:
        return self.put(buffer, index, (0, columns.start), (self._model.rows[index].shape[0], len(columns)), offset)

    def whole(self, buffer: str, index: int, offset: int = 0) -> int:
        return self.rows(buffer, index, range(self._model.rows[index].shape[0]), offset)

    def vocabulary(self, buffer: str, index: int, rows: range) -> None:
        """Vocabulary rows of which those beyond the end are padding."""
        size = self._model.shape.vocab
        self.rows(buffer, index, range(min(rows.start, size), min(rows.stop, size)))
        self._sizes[self._buffers[buffer]] = len(rows) * self._model.shape.hidden

    def _width(self, index: int) -> int:
        shape = self._model.rows[index].shape
        return shape[1] if len(shape) > 1 else 1

    def layout(self) -> Layout:
        rows = [self._model.rows[index] for index in self._tensors]
        cols = np.array(self._pieces, np.int64).reshape(len(self._pieces), 10).T
        zeros = np.zeros(len(self._sizes), np.int64)
        size = np.array(self._itemsizes, np.int64)
        nbytes = np.array(self._sizes, np.int64) * size
        tensors = tensor_table(rows, self._model.shape.dtype, expert_group=self._expert_group)
        return Layout(
            tensors=tensors,
            pieces=PieceTable(
                tensor=cols[0], ndim=cols[1], buffer=cols[2], offset=cols[3], start=cols[4:6].T, shape=cols[6:8].T,
                strides=cols[8:10].T, dtype=tensors.dtype[cols[0]], dtypes=tensors.dtypes,
            ),
            buffers=BufferTable(
                names=tuple(self._buffers), nbytes=nbytes, device=zeros, devices=("cpu",), kind=zeros, kinds=("memory",),
                padding=nbytes - np.array(self._held, np.int64) * size,
            ),
            aliases=self._model.aliases,
        )  # fmt: skip


def part(size: int, parts: int, index: int) -> range:
    """Block ``index`` of equal blocks."""
    return range(size // parts * index, size // parts * (index + 1))


def share_equal(keys: Sequence[Hashable], make: Callable[[int], Layout]) -> list[Layout]:
    """A layout for each rank; ranks with equal keys share one."""
    known: dict[Hashable, Layout] = {}
    layouts = []
    for rank, key in enumerate(keys):
        if key not in known:
            known[key] = make(rank)
        layouts.append(known[key])
    return layouts


def sibling(name: str, fused: str) -> str:
    """Name of a fused parameter: ``….gate_proj.weight`` -> ``….<fused>.weight``."""
    *head, _, kind = name.split(".")
    return ".".join([*head, fused, kind])


def indivisible(split: object, sizes: dict[str, list[tuple[str, int]]]) -> list[str]:
    """Which sizes a split's numbers of ranks do not divide."""
    return [
        f"{knob} = {getattr(split, knob)} does not divide {name} = {size}"
        for knob, rows in sizes.items()
        for name, size in rows
        if size % getattr(split, knob)
    ]
