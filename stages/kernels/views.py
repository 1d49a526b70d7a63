"""What kernels read and write, described on the host: strided matrices, and parts of a bucket that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from syncline.scheduler.formats import Fp8Format
from syncline.scheduler.programs import Leaves

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A strided matrix.

    Attributes:
        base: the tensor whose storage it lies in, kept alive; None if it lies in memory that is given at each run.
        offset: from the first element of ``base`` (or the first byte of the memory given) to its first, in elements.
        shape: rows and columns.
        strides: in elements.
        dtype: of its elements.
    """

    base: torch.Tensor | None
    offset: int
    shape: Pair
    strides: Pair
    dtype: torch.dtype

    @classmethod
    def of(cls, matrix: torch.Tensor) -> View:
        """All of a tensor of two axes, or of one (as a row)."""
        if matrix.dim() == 1:
            matrix = matrix.unsqueeze(0)
        (rows, columns), (down, across) = matrix.shape, matrix.stride()
        return cls(base=matrix.detach(), offset=0, shape=(rows, columns), strides=(down, across), dtype=matrix.dtype)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def place(self) -> tuple[int, bool]:
        """Address of the first element, and whether it counts from the memory given at each run."""
        if self.base is None:
            return self.offset * self.itemsize, True
        return self.base.data_ptr() + self.offset * self.itemsize, False

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps."""
        (rows, columns), (down, across) = self.shape, self.strides
        return (across == 1 or columns <= 1) and (down == columns or rows <= 1)

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def part(self, rows: slice, columns: slice) -> View:
        """Some rows and columns; both slices have a start and a stop."""
        offset = self.offset + rows.start * self.strides[0] + columns.start * self.strides[1]
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return View(base=self.base, offset=offset, shape=shape, strides=self.strides, dtype=self.dtype)

    def flat(self) -> View:
        """A contiguous matrix as one row."""
        count = self.shape[0] * self.shape[1]
        return View(base=self.base, offset=self.offset, shape=(1, count), strides=(count, 1), dtype=self.dtype)

    def cut(self, start: int, stop: int) -> View:
        """Bytes ``start`` to ``stop`` of a contiguous matrix, as a row of bytes."""
        at = self.offset * self.itemsize + start
        base = None if self.base is None else self.base.as_strided((self.base.numel(),), (1,)).view(torch.uint8)
        return View(base=base, offset=at, shape=(1, stop - start), strides=(stop - start, 1), dtype=torch.uint8)

    def tensor(self, given: torch.Tensor | None) -> torch.Tensor:
        """The matrix. ``given``: the memory of this run (1-d uint8), where it lies in such."""
        if self.base is not None:
            return self.base.as_strided(self.shape, self.strides, self.base.storage_offset() + self.offset)
        if given is None:
            raise ValueError("this matrix lies in memory that is given at each run, and none was given")
        elements = given[: given.numel() // self.itemsize * self.itemsize].view(self.dtype)
        return elements.as_strided(self.shape, self.strides, elements.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A matrix, and where its first element lies in the part that it belongs to."""

    view: View
    row: int = 0
    column: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A part that travels as codes.

    Attributes:
        how: the format. Groups are counted from the part's first element, so a part begins where a group does.
        scale_offset: where in the bucket the part's scales lie (float32, row-major), in bytes.
        scale_leaves: their digest leaves.
    """

    how: Fp8Format
    scale_offset: int
    scale_leaves: Leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A segment of a bucket and the pieces that it is made of.

    Attributes:
        offset: where in the bucket it begins, in bytes; aligned to 256 by the plan.
        shape: rows and columns. Tensors of other ranks are given as matrices, see `matrices`.
        dtype: wire dtype.
        pieces: cover it, each element once.
        leaves: digest leaves.
        quantized: if it travels as codes. Its dtype is float8_e4m3fn then.
    """

    offset: int
    shape: Pair
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    leaves: Leaves
    quantized: Quantized | None = None

    def place(self, piece: Piece) -> View:
        """Where in the bucket a piece goes."""
        width = self.shape[1]
        offset = self.offset // self.dtype.itemsize + piece.row * width + piece.column
        return View(base=None, offset=offset, shape=piece.view.shape, strides=(width, 1), dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A segment of a bucket that is copied or cast, of any rank: matrices and where in the bucket each goes.

    Attributes:
        offset: where in the bucket it begins, in bytes.
        nbytes: its length.
        moves: what is read and, relative to the bucket, written. What they don't cover has come into the bucket already.
        leaves: digest leaves.
    """

    offset: int
    nbytes: int
    moves: tuple[tuple[View, View], ...]
    leaves: Leaves

    @property
    def content(self) -> View:
        """All of it, as a row of bytes of the bucket."""
        return View(base=None, offset=self.offset, shape=(1, self.nbytes), strides=(self.nbytes, 1), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hashed:
    """A segment that is sent from where it lies, and only digested: its bytes there (1-d uint8, contiguous)."""

    content: torch.Tensor
    leaves: Leaves


def matrices(
    shape: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> Iterator[tuple[Pair, tuple[int, Pair], tuple[int, Pair]]]:
    """A strided copy of any rank as copies of matrices.

    Axes that lie one behind the other on both sides are merged; what is left beyond two axes is counted through.

    Args:
        shape: of both sides.
        one: strides of one side, in elements.
        other: strides of the other side.

    Yields:
        A matrix's shape, and for each side the offset of its first element and its strides.
    """
    if 0 in shape:
        return
    axes = _merged(shape, one, other)
    while len(axes) < 2:
        axes.insert(0, (1, 0, 0))
    *outer, rows, columns = axes
    for index in product(*(range(size) for size, _, _ in outer)):
        first = sum(i * step for i, (_, step, _) in zip(index, outer, strict=True))
        second = sum(i * step for i, (_, _, step) in zip(index, outer, strict=True))
        yield (rows[0], columns[0]), (first, (rows[1], columns[1])), (second, (rows[2], columns[2]))


def _merged(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int]]:
    axes: list[tuple[int, int, int]] = []
    for size, a, b in zip(shape, one, other, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * a and axes[-1][2] == size * b:
            axes[-1] = (axes[-1][0] * size, a, b)
        else:
            axes.append((size, a, b))
    return axes
