"""Boxes, tables and manifests: what they mean, and that bytes give back what they were made from."""

from __future__ import annotations

import dataclasses
import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from syncline.scheduler.layout import (
    Box,
    Buffer,
    Layout,
    Manifest,
    Piece,
    PieceTable,
    Tensor,
    TensorTable,
    flat_boxes,
    flat_offset,
    row_major,
)

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    start = draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim))
    shape = draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim))
    return Box(start=tuple(start), shape=tuple(shape))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(st.data(), st.integers(0, 3))
def test_box_operations_are_those_of_sets_of_indexes(data, ndim) -> None:
    a, b = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    common = a.intersect(b)
    assert (points(common) if common else set()) == points(a) & points(b)
    assert a.contains(b) == (points(b) <= points(a))
    assert a.volume == len(points(a))


@given(SHAPES, st.data())
def test_flat_ranges_are_few_boxes_in_order(shape, data) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = list(flat_boxes(shape, start, stop))
    index = np.arange(total).reshape(shape)
    seen = [index[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].ravel() for box in found]
    assert np.array_equal(np.concatenate([[], *seen]), np.arange(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert Box.whole(shape).volume == total


def test_flat_helpers() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()
    assert flat_offset((1, 2, 3), (2, 3, 4)) == 23
    with pytest.raises(ValueError, match="not within the 6 elements"):
        flat_boxes((2, 3), 4, 7)


def example(**changes) -> Manifest:
    parts = {
        "rank": 1,
        "world_size": 4,
        "host": "h",
        "tensors": (Tensor(name="a", shape=(4, 6), dtype="float32", group=2), Tensor(name="s", shape=(), dtype="int64")),
        "pieces": (
            Piece(tensor=0, box=Box(start=(2, 0), shape=(2, 6)), buffer=0, offset=3, strides=(1, 2), dtype="bfloat16"),
            Piece(tensor=1, box=Box(start=(), shape=()), buffer=1, offset=0, strides=(), dtype="int64"),
        ),
        "buffers": (Buffer(name="x", nbytes=32, device="cuda:1", padding=4), Buffer(name="y", nbytes=8, kind="file")),
        "aliases": {"b": "a"},
        "optional": {"s"},
        "whole_tensors": True,
        "movable": True,
        "fingerprint": "f",
    }
    return Manifest(**parts | changes)


def test_a_manifest_reads_as_the_rows_it_was_made_of() -> None:
    manifest = example()
    again = example(tensors=tuple(manifest.tensors), pieces=list(manifest.pieces), buffers=manifest.buffers)
    assert again == manifest
    assert manifest.tensors[0] == Tensor(name="a", shape=(4, 6), dtype="float32", group=2)
    assert manifest.pieces[-1] == Piece(tensor=1, box=Box.whole(()), buffer=1, offset=0, strides=(), dtype="int64")
    assert manifest.pieces[:1] == (manifest.pieces[0],)
    assert [b.name for b in manifest.buffers] == ["x", "y"]
    assert (manifest.aliases, manifest.optional) == ({"b": "a"}, {"s"})
    with pytest.raises(IndexError):
        manifest.pieces[2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.rank = 3


def test_bytes_give_back_the_manifest() -> None:
    manifest = example()
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.tensors == manifest.tensors
    assert again.pieces == manifest.pieces
    assert again.buffers == manifest.buffers
    assert again.whole_tensors
    assert again.movable
    empty = Manifest(rank=0, world_size=1, host="")
    assert Manifest.from_bytes(empty.to_bytes()) == empty


def test_equal_layouts_are_one_when_decoded_together() -> None:
    many = [example(rank=rank).to_bytes() for rank in range(4)] + [example(rank=0, optional=()).to_bytes()]
    first, *others, odd = Manifest.all_from_bytes(many)
    assert [m.rank for m in (first, *others)] == [0, 1, 2, 3]
    assert all(m.layout is first.layout for m in others)
    assert odd.layout is not first.layout
    assert odd.tensors is first.tensors


@pytest.mark.parametrize(
    "change", [{"rank": 2}, {"host": "g"}, {"fingerprint": ""}, {"aliases": {}}, {"optional": ()}, {"movable": False}]
)
def test_the_digest_names_identity_and_content(change) -> None:
    assert example(**change).digest != example().digest
    assert example(**change) != example()
    assert hash(example()) == hash(example())
    assert dataclasses.replace(example(), rank=2).layout.digest == example().layout.digest


def test_the_digest_does_not_depend_on_how_columns_were_given() -> None:
    rows = example()
    t, p = rows.tensors, rows.pieces
    wide = TensorTable(
        names=list(t.names), ndim=t.ndim.astype(np.int32), group=t.group,
        dtype=np.array([2, 1]), dtypes=("x", "int64", "float32"), shape=np.hstack([t.shape, np.ones((2, 1), np.int64)]),
    )  # fmt: skip
    assert example(tensors=wide, pieces=p).digest == rows.digest
    assert Manifest(rank=1, world_size=4, host="h", layout=rows.layout, fingerprint="f") == rows


def table(**changes: object) -> PieceTable:
    columns = dict.fromkeys(("tensor", "buffer", "offset", "dtype"), np.zeros(1, np.int64))
    columns |= dict.fromkeys(("start", "shape", "strides"), np.zeros((1, 2), np.int64))
    return PieceTable(**columns | {"ndim": np.array([2]), "dtypes": ("float32",)} | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": np.array([-1])}, "negative offset"),
        ({"start": np.array([[0, -1]])}, "negative start"),
        ({"offset": np.array([0.5])}, "whole numbers"),
        ({"offset": np.zeros(2, np.int64)}, "2 rows, not 1"),
        ({"start": np.zeros((1, 3), np.int64)}, "differ in depth"),
        ({"start": np.zeros(1, np.int64)}, "has 1 dimensions"),
        ({"dtype": np.array([1])}, "beyond dtypes"),
        ({"ndim": np.array([3])}, "more axes than its columns"),
        ({"ndim": np.array([1])}, "beyond a row's ndim must hold"),
    ],
)
def test_malformed_columns_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        table(**change)


def test_pieces_point_into_their_manifest() -> None:
    piece = Piece(tensor=0, box=Box.whole((2,)), buffer=0, offset=0, strides=(1,), dtype="float32")
    tensor, buffer = Tensor(name="a", shape=(2, 3), dtype="float32"), Buffer(name="x", nbytes=8)
    with pytest.raises(ValueError, match="has 1 axes; its tensor a has another number"):
        Manifest(rank=0, world_size=1, host="", tensors=(tensor,), pieces=(piece,), buffers=(buffer,))
    with pytest.raises(ValueError, match="beyond the 0 of its manifest"):
        Manifest(rank=0, world_size=1, host="", pieces=(piece,), buffers=(buffer,))
    with pytest.raises(ValueError, match="same name"):
        Manifest(rank=0, world_size=1, host="", tensors=(tensor, tensor))
    with pytest.raises(ValueError, match="kind is 'memory' or 'file'"):
        Manifest(rank=0, world_size=1, host="", buffers=(Buffer(name="x", nbytes=8, kind="tape"),))
    with pytest.raises(ValueError, match="differ in length"):
        Manifest(rank=0, world_size=1, host="", pieces=(dataclasses.replace(piece, strides=(1, 1)),))


@given(st.binary(max_size=40))
def test_junk_is_not_a_manifest(data) -> None:
    with pytest.raises(ValueError, match="not the bytes of a manifest"):
        Manifest.from_bytes(data)


@given(st.data())
def test_damaged_bytes_are_refused_or_another_valid_manifest(data) -> None:
    good = bytearray(example().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = Manifest.from_bytes(bytes(good))
    except ValueError:
        return
    assert Manifest.from_bytes(decoded.to_bytes()) == decoded
    assert all(isinstance(piece, Piece) for piece in decoded.pieces)


def test_a_column_of_an_unknown_type_is_refused() -> None:
    wire = msgspec.msgpack.decode(example().layout.to_bytes())
    columns, texts = msgspec.msgpack.decode(wire[1])
    columns[0][0] = "|O"
    wire[1] = msgspec.msgpack.encode((columns, texts))
    with pytest.raises(ValueError, match="not the type of a column"):
        Layout.from_bytes(msgspec.msgpack.encode(wire))
