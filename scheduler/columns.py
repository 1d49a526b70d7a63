"""Columnar tables of a layout: tensors, pieces, buffers.

A model of Kimi-K2's shapes has 70,000 tensors and, over its ranks, millions of pieces: one Python object each would cost
more than planning does. So each table holds numpy columns and *reads* as a sequence of small dataclasses.

Columns are read-only ``int64``. Per-axis columns have shape ``(rows, depth)``, where ``depth`` is the largest number of
dimensions in the table; a row with fewer dimensions is padded at the end with start 0, shape 1, stride 0, which changes
neither its elements nor their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from .boxes import Box, Index

Ints = npt.NDArray[np.int64]
Row = TypeVar("Row")


class TableWire(NamedTuple):
    """A table as plain data for msgspec: (type, bytes) of every column, and its tuples of strings."""

    columns: list[tuple[str, bytes]]
    texts: list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A canonical tensor: checkpoint name, full shape, dtype name, and the mesh group its collectives run in."""

    name: str
    shape: Index
    dtype: str
    group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of canonical tensor ``tensor`` (index into the manifest), held in a strided view of ``buffer``.

    ``offset`` and ``strides`` count elements of ``dtype``; ``offset`` is relative to the first element of the local
    tensor that the adapter registered as ``buffer``. Strides may be any non-negative integers (a transposed or sliced view).
    """

    tensor: int
    box: Box
    buffer: int
    offset: int
    strides: Index
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Local memory that pieces refer to. ``kind`` is ``memory``, or ``file`` for a mapped file (``h2d`` copies it out).

    ``nbytes`` is the span from the first byte of the local tensor's first element to the last byte of its last one: for a
    contiguous tensor, its size. On the target side every byte of the span must be written by a piece, except ``padding``
    bytes that are declared to belong to no canonical tensor: vocabulary padding, or the gaps of a strided local tensor.
    """

    name: str
    nbytes: int
    device: str = "cpu"
    kind: str = "memory"
    padding: int = 0


class Table(Sequence[Row]):
    """Columns that read as a sequence of dataclasses. Slices are tuples; equal tables have equal rows."""

    flat: ClassVar[tuple[str, ...]] = ()
    """Columns with one number a row."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Columns with one number an axis."""
    texts: ClassVar[tuple[str, ...]] = ()
    """Tuples of strings: a name for each row, or what a column of codes points into."""

    __hash__ = None  # type: ignore[assignment]

    def _row(self, i: int) -> Row:
        raise NotImplementedError

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, i: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(i, slice):
            return tuple(self._row(j) for j in range(*i.indices(len(self))))
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self._row(i % len(self))

    def __iter__(self) -> Iterator[Row]:
        return (self._row(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Table, tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} rows>"


AnyTable = TypeVar("AnyTable", bound=Table[Any])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TensorTable(Table[Tensor]):
    """Tensors as columns: ``names``; ``shape`` (rows, depth); ``ndim``; ``dtype`` as indexes into ``dtypes``; ``group``."""

    flat = ("ndim", "group", "dtype")
    axes = ("shape",)
    texts = ("names", "dtypes")

    names: tuple[str, ...]
    shape: Ints
    ndim: Ints
    dtype: Ints
    dtypes: tuple[str, ...]
    group: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        _settle(self, len(self.names))
        _settle_codes(self, "dtype", "dtypes")
        _require(len(set(self.names)) == len(self.names), "two tensors of one manifest have the same name")
        _settle_padding(self, shape=1)
        _require(bool((self.shape >= 0).all()), "a tensor has a negative dimension")

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> TensorTable:
        """Columns of small dataclasses."""
        rows = list(tensors)
        dtype, dtypes = intern(t.dtype for t in rows)
        return cls(
            names=tuple(t.name for t in rows),
            shape=_axes([t.shape for t in rows], pad=1),
            ndim=ints([len(t.shape) for t in rows]),
            dtype=dtype,
            dtypes=dtypes,
            group=ints([t.group for t in rows]),
        )

    def __len__(self) -> int:
        return len(self.names)

    def _row(self, i: int) -> Tensor:
        shape = tuple(self.shape[i, : self.ndim[i]].tolist())
        return Tensor(name=self.names[i], shape=shape, dtype=self.dtypes[self.dtype[i]], group=int(self.group[i]))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PieceTable(Table[Piece]):
    """Pieces as columns; ``start``, ``shape`` and ``strides`` are (rows, depth), ``dtype`` indexes into ``dtypes``."""

    flat = ("tensor", "ndim", "buffer", "offset", "dtype")
    axes = ("start", "shape", "strides")
    texts = ("dtypes",)

    tensor: Ints
    ndim: Ints
    start: Ints
    shape: Ints
    buffer: Ints
    offset: Ints
    strides: Ints
    dtype: Ints
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        _settle(self, len(self.tensor))
        _settle_codes(self, "dtype", "dtypes")
        _settle_padding(self, start=0, shape=1, strides=0)
        for name in ("start", "shape", "strides", "offset"):
            _require(bool((getattr(self, name) >= 0).all()), f"a piece has a negative {name}")

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> PieceTable:
        """Columns of small dataclasses. Raises `ValueError` where box and strides differ in their number of axes."""
        rows = list(pieces)
        for p in rows:
            _require(len(p.box.start) == len(p.box.shape) == len(p.strides), f"box and strides of {p} differ in length")
        dtype, dtypes = intern(p.dtype for p in rows)
        return cls(
            tensor=ints([p.tensor for p in rows]),
            ndim=ints([len(p.strides) for p in rows]),
            start=_axes([p.box.start for p in rows], pad=0),
            shape=_axes([p.box.shape for p in rows], pad=1),
            buffer=ints([p.buffer for p in rows]),
            offset=ints([p.offset for p in rows]),
            strides=_axes([p.strides for p in rows], pad=0),
            dtype=dtype,
            dtypes=dtypes,
        )

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, i: int) -> Box:
        """The box of piece ``i``."""
        n = self.ndim[i]
        return Box(start=tuple(self.start[i, :n].tolist()), shape=tuple(self.shape[i, :n].tolist()))

    def _row(self, i: int) -> Piece:
        return Piece(
            tensor=int(self.tensor[i]),
            box=self.box(i),
            buffer=int(self.buffer[i]),
            offset=int(self.offset[i]),
            strides=tuple(self.strides[i, : self.ndim[i]].tolist()),
            dtype=self.dtypes[self.dtype[i]],
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BufferTable(Table[Buffer]):
    """Buffers as columns; ``device`` and ``kind`` are indexes into ``devices`` and ``kinds``."""

    flat = ("nbytes", "padding", "device", "kind")
    texts = ("names", "devices", "kinds")

    names: tuple[str, ...]
    nbytes: Ints
    device: Ints
    devices: tuple[str, ...]
    kind: Ints
    kinds: tuple[str, ...]
    padding: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        _settle(self, len(self.names))
        _settle_codes(self, "device", "devices")
        _settle_codes(self, "kind", "kinds")
        _require(set(self.kinds) <= {"memory", "file"}, f"a buffer's kind is 'memory' or 'file', not one of {self.kinds}")
        for name in ("nbytes", "padding"):
            _require(bool((getattr(self, name) >= 0).all()), f"a buffer has a negative {name}")

    @classmethod
    def of(cls, buffers: Iterable[Buffer]) -> BufferTable:
        """Columns of small dataclasses."""
        rows = list(buffers)
        device, devices = intern(b.device for b in rows)
        kind, kinds = intern(b.kind for b in rows)
        return cls(
            names=tuple(b.name for b in rows),
            nbytes=ints([b.nbytes for b in rows]),
            device=device,
            devices=devices,
            kind=kind,
            kinds=kinds,
            padding=ints([b.padding for b in rows]),
        )

    def __len__(self) -> int:
        return len(self.names)

    def _row(self, i: int) -> Buffer:
        return Buffer(
            name=self.names[i],
            nbytes=int(self.nbytes[i]),
            device=self.devices[self.device[i]],
            kind=self.kinds[self.kind[i]],
            padding=int(self.padding[i]),
        )


def encode(table: Table[Any]) -> TableWire:
    """A table as plain data: raw little-endian columns, each in its narrowest type, and strings."""
    columns = [_pack(getattr(table, name)) for name in (*table.flat, *table.axes)]
    return TableWire(columns, [getattr(table, name) for name in table.texts])


def decode(kind: type[AnyTable], wire: TableWire) -> AnyTable:
    """The inverse of `encode`. Raises `ValueError` for anything that `encode` does not write."""
    columns, texts = wire
    names = (*kind.flat, *kind.axes)
    _require(len(columns) == len(names) and len(texts) == len(kind.texts), f"a {kind.__name__} with wrong columns")
    values: dict[str, Any] = {name: _unpack(*column) for name, column in zip(names, columns, strict=True)}
    rows = len(values[kind.flat[0]])
    for name in kind.axes:
        array = values[name]
        _require(len(array) % rows == 0 if rows else not len(array), f"column {name} does not divide into {rows} rows")
        values[name] = array.reshape(rows, len(array) // rows if rows else 0)
    return kind(**values, **dict(zip(kind.texts, texts, strict=True)))


_TYPES = ("<i1", "<i2", "<i4", "<i8")


def _pack(column: Ints) -> tuple[str, bytes]:
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    kind = next(k for k in _TYPES if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return kind, column.astype(kind).tobytes()


def _unpack(kind: str, data: bytes) -> Ints:
    _require(kind in _TYPES, f"{kind!r} is not the type of a column")
    return np.frombuffer(data, kind).astype(np.int64)


def ints(values: Sequence[int] | npt.NDArray[Any]) -> Ints:
    """An ``int64`` array. Raises `ValueError` for what is not whole numbers."""
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"a column holds {array.dtype} where whole numbers belong")
    return array.astype(np.int64, copy=False)


def intern(values: Iterable[str]) -> tuple[Ints, tuple[str, ...]]:
    """Strings as indexes into the sorted tuple of distinct ones."""
    rows = list(values)
    distinct = tuple(sorted(set(rows)))
    code = {value: i for i, value in enumerate(distinct)}
    return ints([code[value] for value in rows]), distinct


def pad_axes(array: Ints, depth: int, value: int) -> Ints:
    """``array`` (rows, d) with ``value`` in as many more axes as it takes to be (rows, depth)."""
    missing = depth - array.shape[1]
    return array if missing <= 0 else np.pad(array, ((0, 0), (0, missing)), constant_values=value)


def _axes(rows: Sequence[Index], *, pad: int) -> Ints:
    depth = max(map(len, rows), default=0)
    return ints(np.array([(*row, *(pad,) * (depth - len(row))) for row in rows])).reshape(len(rows), depth)


def _settle(table: Table[Any], rows: int) -> None:
    """Bring columns to one form (int64, contiguous, read-only, one length, one depth)."""
    depths = set()
    for name in (*table.flat, *table.axes):
        column = ints(getattr(table, name))
        _require(column.ndim == (2 if name in table.axes else 1), f"column {name} has {column.ndim} dimensions")
        _require(len(column) == rows, f"column {name} has {len(column)} rows, not {rows}")
        if name in table.axes:
            depths.add(column.shape[1])
        object.__setattr__(table, name, _frozen(column))
    _require(len(depths) <= 1, f"columns {', '.join(table.axes)} differ in depth")


def _frozen(column: Ints) -> Ints:
    column = np.ascontiguousarray(column).view()
    column.flags.writeable = False
    return column


def _settle_codes(table: Any, column: str, names: str) -> None:
    codes, known = getattr(table, column), tuple(getattr(table, names))
    _require(not len(codes) or 0 <= codes.min() <= codes.max() < len(known), f"column {column} points beyond {names}")
    if len(codes) or known:  # one form whatever the caller's order: sorted names, and only those that occur
        used = sorted({known[c] for c in np.unique(codes)})
        recode = ints([used.index(name) if name in used else 0 for name in known])
        if tuple(used) != known:
            object.__setattr__(table, column, _frozen(recode[codes]))
        known = tuple(used)
    object.__setattr__(table, names, known)


def _settle_padding(table: Any, **columns: int) -> None:
    depth = next(getattr(table, name).shape[1] for name in columns)
    low, used = (int(table.ndim.min()), int(table.ndim.max())) if len(table) else (0, 0)
    _require(low >= 0 and used <= depth, "a row has more axes than its columns")
    unused = np.arange(depth) >= table.ndim[:, None]
    for name, value in columns.items():
        column = getattr(table, name)
        _require(bool((column[unused] == value).all()), f"axes beyond a row's ndim must hold {value} in column {name}")
        if used < depth:  # one depth whatever the caller allowed for
            object.__setattr__(table, name, _frozen(column[:, :used]))


def _require(true: bool, message: str) -> None:
    if not true:
        raise ValueError(message)
