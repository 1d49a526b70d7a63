"""Boxes, strided pieces and manifests: one algebra for every layout of the field.

A *canonical tensor* is a parameter or buffer under its Hugging Face checkpoint name with its full shape. A *box* is an
axis-aligned region of it. A *piece* is a box together with the strided view in which some rank holds it. A *manifest* is
everything that one rank holds (source) or must receive (target).

A manifest is a rank's identity and its `Layout`. Replicas have equal layouts; planning works once on each distinct one.
Both are immutable and named by a digest over their content. Small manifests are written as tuples of dataclasses, large
ones from numpy columns (`syncline.scheduler.columns`); both read the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from .boxes import Box, Index, flat_boxes, flat_offset, row_major
from .columns import AnyTable, Buffer, BufferTable, Piece, PieceTable, TableWire, Tensor, TensorTable, decode, encode

__all__ = [
    "Box",
    "Buffer",
    "BufferTable",
    "Index",
    "Layout",
    "Manifest",
    "Piece",
    "PieceTable",
    "Tensor",
    "TensorTable",
    "flat_boxes",
    "flat_offset",
    "row_major",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """What a rank holds, without who it is: the part of a manifest that replicas share.

    Attributes:
        tensors, pieces, buffers: columns that read as sequences of `Tensor`, `Piece`, `Buffer`.
        aliases: other names of tensors: alias -> name. Both name the same content (tied weights).
        optional: names that the other side need not have (a target keeps what it holds) or want (a source).
        whole_tensors: this target's loader transforms whole boxes: they are never cut at the source's shards.
        uncut: names of which that holds, where it does not hold of all.
        movable: this target's parameters may be pointed at other memory (``mapped``).

    Raises:
        ValueError: a piece points beyond the tables, or has another number of axes than its tensor.
    """

    tensors: TensorTable = field(default_factory=lambda: TensorTable.of(()))
    pieces: PieceTable = field(default_factory=lambda: PieceTable.of(()))
    buffers: BufferTable = field(default_factory=lambda: BufferTable.of(()))
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    whole_tensors: bool = False
    movable: bool = False
    uncut: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "aliases", dict(self.aliases))
        object.__setattr__(self, "optional", frozenset(self.optional))
        object.__setattr__(self, "uncut", frozenset(self.uncut))
        pieces = self.pieces
        if not len(pieces):
            return
        for column, table in (("tensor", self.tensors), ("buffer", self.buffers)):
            values = getattr(pieces, column)
            if values.min() < 0 or values.max() >= len(table):
                raise ValueError(f"a piece points at {column} {values.max()}, beyond the {len(table)} of its manifest")
        wrong = np.flatnonzero(self.tensors.ndim[pieces.tensor] != pieces.ndim)
        if len(wrong):
            name = self.tensors.names[pieces.tensor[wrong[0]]]
            raise ValueError(f"piece {wrong[0]} has {pieces.ndim[wrong[0]]} axes; its tensor {name} has another number")

    @cached_property
    def digest(self) -> str:
        """Hex digest of the content. Equal layouts have equal digests, however they were built."""
        return xxhash.xxh3_128_hexdigest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """One msgpack document; columns are raw little-endian bytes, each in its narrowest type."""
        wire = _LayoutWire(
            tensors=msgspec.msgpack.encode(encode(self.tensors)),
            pieces=msgspec.msgpack.encode(encode(self.pieces)),
            buffers=msgspec.msgpack.encode(encode(self.buffers)),
            aliases=sorted(self.aliases.items()),
            optional=sorted(self.optional),
            whole_tensors=self.whole_tensors,
            movable=self.movable,
            uncut=sorted(self.uncut),
        )
        return msgspec.msgpack.encode(wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """The inverse of `to_bytes`. Raises `ValueError` for anything that `to_bytes` does not write."""
        return _Decoder().layout(data)


@dataclass(frozen=True, kw_only=True, init=False, eq=False)
class Manifest:
    """All pieces that one rank holds (source) or must receive (target): who it is, and its `Layout`.

    ``Manifest(rank=…, world_size=…, host=…, tensors=…, pieces=…, buffers=…, aliases=…, optional=…, whole_tensors=…,
    movable=…, uncut=…, fingerprint=…)`` builds the layout from small tuples or tables; ``Manifest(…, layout=layout)`` shares
    one. With both, the parts that are given replace those of ``layout``.

    Attributes:
        rank, world_size: place in the source, or in its target.
        host: ranks with equal hosts can share memory.
        layout: what the rank holds.
        fingerprint: changes when memory was reallocated although the layout stayed the same.
    """

    rank: int
    world_size: int
    host: str
    layout: Layout
    fingerprint: str = ""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        host: str,
        fingerprint: str = "",
        layout: Layout | None = None,
        tensors: Iterable[Tensor] | None = None,
        pieces: Iterable[Piece] | None = None,
        buffers: Iterable[Buffer] | None = None,
        aliases: Mapping[str, str] | None = None,
        optional: Iterable[str] | None = None,
        whole_tensors: bool | None = None,
        movable: bool | None = None,
        uncut: Iterable[str] | None = None,
    ) -> None:
        parts = {
            "tensors": tensors if tensors is None or isinstance(tensors, TensorTable) else TensorTable.of(tensors),
            "pieces": pieces if pieces is None or isinstance(pieces, PieceTable) else PieceTable.of(pieces),
            "buffers": buffers if buffers is None or isinstance(buffers, BufferTable) else BufferTable.of(buffers),
            "aliases": aliases,
            "optional": optional if optional is None else frozenset(optional),
            "whole_tensors": whole_tensors,
            "movable": movable,
            "uncut": uncut if uncut is None else frozenset(uncut),
        }
        given = {name: value for name, value in parts.items() if value is not None}
        base = {name: getattr(layout, name) for name in parts} if layout is not None else {}
        settled: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "host": host,
            "fingerprint": fingerprint,
            "layout": layout if layout is not None and not given else Layout(**{**base, **given}),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @property
    def tensors(self) -> TensorTable:
        return self.layout.tensors

    @property
    def pieces(self) -> PieceTable:
        return self.layout.pieces

    @property
    def buffers(self) -> BufferTable:
        return self.layout.buffers

    @property
    def aliases(self) -> Mapping[str, str]:
        return self.layout.aliases

    @property
    def optional(self) -> frozenset[str]:
        return self.layout.optional

    @property
    def whole_tensors(self) -> bool:
        return self.layout.whole_tensors

    @property
    def movable(self) -> bool:
        return self.layout.movable

    @property
    def uncut(self) -> frozenset[str]:
        return self.layout.uncut

    @cached_property
    def digest(self) -> str:
        """Hex digest of identity, fingerprint and layout."""
        identity = (self.rank, self.world_size, self.host, self.fingerprint, self.layout.digest)
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(identity))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Manifest) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_bytes(self) -> bytes:
        """One msgpack document."""
        wire = _ManifestWire(
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            fingerprint=self.fingerprint,
            layout=self.layout.to_bytes(),
        )
        return msgspec.msgpack.encode(wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The inverse of `to_bytes`. Raises `ValueError` for anything that `to_bytes` does not write."""
        return cls.all_from_bytes([data])[0]

    @classmethod
    def all_from_bytes(cls, many: Iterable[bytes]) -> list[Manifest]:
        """Manifests of many ranks. Equal layouts and equal tables of tensors are decoded once and shared."""
        decoder = _Decoder()
        return [decoder.manifest(data) for data in many]


class _LayoutWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    tensors: bytes
    pieces: bytes
    buffers: bytes
    aliases: list[tuple[str, str]]
    optional: list[str]
    whole_tensors: bool
    movable: bool
    uncut: list[str]


class _ManifestWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    rank: int
    world_size: int
    host: str
    fingerprint: str
    layout: bytes


_Wire = TypeVar("_Wire")


class _Decoder:
    """Decodes manifests; what has equal bytes is decoded once and shared."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], Any] = {}

    def manifest(self, data: bytes) -> Manifest:
        wire = _decode(data, _ManifestWire)
        layout = self._once(Layout, wire.layout, lambda: self.layout(wire.layout))
        return Manifest(rank=wire.rank, world_size=wire.world_size, host=wire.host, fingerprint=wire.fingerprint, layout=layout)

    def layout(self, data: bytes) -> Layout:
        wire = _decode(data, _LayoutWire)
        return Layout(
            tensors=self._table(TensorTable, wire.tensors),
            pieces=self._table(PieceTable, wire.pieces),
            buffers=self._table(BufferTable, wire.buffers),
            aliases=dict(wire.aliases),
            optional=frozenset(wire.optional),
            whole_tensors=wire.whole_tensors,
            movable=wire.movable,
            uncut=frozenset(wire.uncut),
        )

    def _table(self, kind: type[AnyTable], data: bytes) -> AnyTable:
        return self._once(kind, data, lambda: decode(kind, _decode(data, TableWire)))

    def _once(self, kind: type[_Wire], data: bytes, make: Callable[[], _Wire]) -> _Wire:
        key = kind, xxhash.xxh3_128_hexdigest(data)
        if key not in self._known:
            self._known[key] = make()
        found: _Wire = self._known[key]
        return found


def _decode(data: bytes, kind: type[_Wire]) -> _Wire:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"not the bytes of a manifest: {error}") from error
