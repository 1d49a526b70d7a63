"""Boxes, strided pieces and manifests: one algebra for every layout of the field.

A *canonical tensor* is a parameter or buffer under its Hugging Face checkpoint name with its full shape. A *box* is an
axis-aligned region of it. A *piece* is a box together with the strided view in which some rank holds it. A *manifest* is
everything that one rank holds (source) or must receive (target).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Index = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """An axis-aligned region: ``start[d] <= i[d] < start[d] + shape[d]``. A 0-d tensor is the box ``((), ())``."""

    start: Index
    shape: Index


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
    """Local memory that pieces refer to. ``kind`` is ``memory``, or ``file`` for a mapped file (``h2d`` copies it out)."""

    name: str
    nbytes: int
    device: str = "cpu"
    kind: str = "memory"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All pieces that one rank holds (source) or must receive (target)."""

    rank: int
    world_size: int
    host: str
    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    buffers: tuple[Buffer, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    whole_tensors: bool = False
    movable: bool = False
    fingerprint: str = ""
