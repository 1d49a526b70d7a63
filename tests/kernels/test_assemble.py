"""Buckets by kernels are, bit for bit, what plain torch and the reference make of the same pieces."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from syncline.scheduler.formats import Fp8Format, parse_format
from syncline.scheduler.programs import Leaves
from syncline.stages.kernels import reference
from syncline.stages.kernels.views import Part, Piece, Quantized, View, matrices

FORMATS = ["fp8_e4m3:128x128", "fp8_e4m3:64x64", "fp8_e4m3:channel", "fp8_e4m3:tensor"]
FLOATS = list(reference.FLOATS)
SIZES = [1, 15, 16, 127, 128, 129, 192]
LEAF = 32768
# shrinking takes minutes in the interpreter
QUICK = [Phase.explicit, Phase.reuse, Phase.generate]
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def leaves_of(nbytes: int, uid: int, leaf_nbytes: int = LEAF) -> Leaves:
    return Leaves(item_uid=uid, first=uid % 3, blocks=1, block_nbytes=nbytes, leaf_nbytes=leaf_nbytes)


def aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    room = torch.full((nbytes + 256,), 0xAB, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


class Layout:
    """Parts of a bucket, one behind the other at multiples of 256 bytes, with the content that each must have."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.expected: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0

    def _room(self, nbytes: int) -> int:
        at = self.nbytes
        self.nbytes += -(-nbytes // 256) * 256
        return at

    def add(self, whole: torch.Tensor, pieces: Sequence[Piece], to: torch.dtype | Fp8Format, leaf_nbytes: int = LEAF) -> None:
        """``whole``: the content that the pieces make up."""
        how = to if isinstance(to, Fp8Format) else None
        dtype = torch.float8_e4m3fn if how else to
        if how is None:
            contents = [reference.cast(whole, dtype) if whole.dtype != dtype else whole]
        else:
            contents = list(reference.quantize(whole, how))
        places = [self._room(content.nbytes) for content in contents]
        for place, content in zip(places, contents, strict=True):
            self.expected.append((place, content.contiguous().view(-1).view(torch.uint8).cpu()))
        uid = 2**64 - 1 - len(self.parts)
        quantized = None
        if how is not None:
            quantized = Quantized(how=how, scale_offset=places[1], scale_leaves=leaves_of(contents[1].nbytes, uid // 2))
        shape = (whole.shape[0], whole.shape[1])
        leaves = leaves_of(contents[0].nbytes, uid, leaf_nbytes)
        self.parts.append(
            Part(offset=places[0], shape=shape, dtype=dtype, pieces=tuple(pieces), leaves=leaves, quantized=quantized)
        )

    def check(self, kernels, given: torch.Tensor | None = None) -> None:
        digests = []
        for backend in ("triton", "torch"):
            bucket = aligned(self.nbytes, kernels.device)
            recipe = kernels.assemble.BucketKernels(self.parts, kernels.device, backend=backend)
            digests.append(kernels.assemble.read_digest(kernels.assemble.assemble(bucket, recipe, given=given)))
            untouched = torch.ones(self.nbytes, dtype=torch.bool)
            for place, content in self.expected:
                assert torch.equal(bucket[place : place + len(content)].cpu(), content), backend
                untouched[place : place + len(content)] = False
            assert torch.all(bucket.cpu()[untouched] == 0xAB), "bytes between segments stay as they are"
        assert digests[0] == digests[1]


def values(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 6, (rows, columns), generator=generator))
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype).to(device)


def strided(matrix: torch.Tensor, how: str) -> torch.Tensor:
    """The same content, held with other strides."""
    rows, columns = matrix.shape
    if how == "transposed":
        return matrix.t().contiguous().t()
    if how == "every other column":
        return torch.stack([matrix, matrix * 0], dim=2).view(rows, 2 * columns)[:, ::2]
    if how == "in a wider one":
        return torch.cat([matrix, matrix[:, :3]], dim=1)[:, :columns]
    if how == "in a wider one, lined up":
        return torch.cat([matrix.new_zeros(rows, 16), matrix, matrix.new_zeros(rows, -columns % 16)], dim=1)[
            :, 16 : 16 + columns
        ]
    return matrix


STRIDES = ["plain", "transposed", "every other column", "in a wider one", "in a wider one, lined up"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 192])
def test_quantized_at_edges(kernels, name: str, rows: int) -> None:
    layout = Layout()
    for columns, dtype in ((1, torch.float32), (64, torch.bfloat16), (130, torch.float16)):
        whole = values(rows, columns, dtype, kernels.device, rows + columns)
        layout.add(whole, [Piece(view=View.of(whole))], parse_format(name))
    layout.check(kernels)


BLOCKS = ["fp8_e4m3:128x128", "fp8_e4m3:128x128:pow2", "fp8_e4m3:64x64", "fp8_e4m3:256x16"]


@pytest.mark.parametrize(
    ("rows", "columns", "leaf_rows"), [(1, 1024, 32), (127, 1024, 1000), (128, 2048, 64), (129, 1024, 32), (192, 2048, 128)]
)
def test_wide_blocks_are_quantized_and_hashed_in_one_pass(kernels, rows: int, columns: int, leaf_rows: int) -> None:
    layout = Layout()
    for name, dtype in zip(BLOCKS, (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16), strict=True):
        whole = values(rows, columns, dtype, kernels.device, rows + columns)
        layout.add(whole, [Piece(view=View.of(whole))], parse_format(name), leaf_rows * columns)
    assert all(kernels.tables.strips_of(part) for part in layout.parts)
    layout.check(kernels)


@given(data=st.data())
@settings(max_examples=5, phases=QUICK)
def test_any_matrices_in_strips(interpreted, data) -> None:
    """Beside others in the same bucket, held in wider ones, with leaves of any number of rows."""
    layout = Layout()
    for number in range(data.draw(st.integers(1, 2))):
        rows, columns = data.draw(st.integers(1, 260)), data.draw(st.sampled_from([1024, 2048, 3072]))
        dtype, leaf_rows = data.draw(st.sampled_from(FLOATS)), data.draw(st.integers(1, 300))
        whole = values(rows, columns, dtype, interpreted.device, number)
        view = View.of(strided(whole, data.draw(st.sampled_from([STRIDES[0], STRIDES[-1]]))))
        layout.add(whole, [Piece(view=view)], parse_format(data.draw(st.sampled_from(BLOCKS))), leaf_rows * columns)
        assert interpreted.tables.strips_of(layout.parts[-1])
        other = values(3, 40, dtype, interpreted.device, number)
        layout.add(other, [Piece(view=View.of(other))], data.draw(st.sampled_from([torch.bfloat16, parse_format(FORMATS[0])])))
    layout.check(interpreted)


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), -0.0])
def test_strips_with_groups_that_are_not_finite_and_zeros(kernels, poison: float) -> None:
    whole = torch.zeros(130, 2048, device=kernels.device)
    whole[129, 1] = whole[0, 2047] = poison
    whole[3, 139] = 1e-30
    layout = Layout()
    layout.add(whole, [Piece(view=View.of(whole))], parse_format(BLOCKS[0]))
    assert kernels.tables.strips_of(layout.parts[0])
    layout.check(kernels)


@pytest.mark.parametrize(("fewest", "by_strips"), [(5, True), (6, False)])
def test_few_strips_are_two_launches(kernels, monkeypatch, fewest: int, by_strips: bool) -> None:
    """A bucket of 2 and 3 strips."""
    monkeypatch.setattr(kernels.assemble, "FEWEST_STRIPS", fewest)
    layout = Layout()
    for rows in (129, 300):
        whole = values(rows, 1024, torch.bfloat16, kernels.device, rows)
        layout.add(whole, [Piece(view=View.of(whole))], parse_format(BLOCKS[0]))
    found = kernels.assemble.tables_of(layout.parts, verify=True)
    assert [strips.count for strips in found.strips.values()] == ([5] if by_strips else [])
    assert not kernels.assemble.tables_of(layout.parts, verify=False).strips, "without digests there is nothing to hash"
    layout.check(kernels)


def test_what_does_not_go_by_strips(kernels) -> None:
    whole, how = values(32, 1024, torch.bfloat16, kernels.device, 1), parse_format(BLOCKS[0])
    halves = [Piece(view=View.of(whole[:16])), Piece(view=View.of(whole[16:]), row=16)]
    layout = Layout()
    layout.add(whole, halves, how)
    layout.add(whole, [Piece(view=View.of(strided(whole, "transposed")))], how)
    layout.add(whole, [Piece(view=View.of(whole))], how, 3000)
    layout.add(whole, [Piece(view=View.of(whole))], parse_format("fp8_e4m3:channel"))
    layout.add(whole, [Piece(view=View.of(whole))], parse_format("fp8_e4m3:32x32"))
    narrow = whole[:, :640].contiguous()
    layout.add(narrow, [Piece(view=View.of(narrow))], how)
    assert not any(kernels.tables.strips_of(part) for part in layout.parts)
    layout.check(kernels)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_casts(kernels, source: torch.dtype, to: torch.dtype) -> None:
    layout = Layout()
    for rows, columns, strides in (
        (1, 5000, "plain"),
        (33, 48, "transposed"),
        (7, 160, "in a wider one, lined up"),
        (5, 3, "plain"),
    ):
        whole = values(rows, columns, source, kernels.device, columns)
        layout.add(whole, [Piece(view=View.of(strided(whole, strides)))], to)
    layout.check(kernels)


@given(data=st.data())
@settings(max_examples=12, phases=QUICK)
def test_any_pieces_of_any_parts(interpreted, data) -> None:
    """Tensors cut into a grid of pieces, each held with other strides, some of them in memory that is given at the run."""
    layout = Layout()
    room, end = aligned(1 << 20, interpreted.device), 0
    for number in range(data.draw(st.integers(1, 3))):
        rows, columns = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(SIZES))
        dtype = data.draw(st.sampled_from(FLOATS))
        whole = values(rows, columns, dtype, interpreted.device, number)
        pieces = []
        for top, bottom in cuts(data, rows):
            for left, right in cuts(data, columns):
                part = whole[top:bottom, left:right]
                if data.draw(st.booleans()):
                    nbytes = part.numel() * part.element_size()
                    view = View(
                        base=None,
                        offset=end // part.element_size(),
                        shape=tuple(part.shape),
                        strides=(right - left, 1),
                        dtype=dtype,
                    )
                    view.tensor(room).copy_(part)
                    end += -(-nbytes // 8) * 8
                else:
                    view = View.of(strided(part, data.draw(st.sampled_from(STRIDES))))
                pieces.append(Piece(view=view, row=top, column=left))
        name = data.draw(st.sampled_from([*FORMATS, *FLOATS]))
        how = parse_format(name + data.draw(st.sampled_from(["", ":pow2"]))) if isinstance(name, str) else name
        layout.add(whole, data.draw(st.permutations(pieces)), how)
    layout.check(interpreted, given=room)


def cuts(data, size: int) -> list[tuple[int, int]]:
    at = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=1))})
    return list(pairwise(at))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), -0.0])
def test_groups_that_are_not_finite_and_zeros(kernels, name: str, poison: float) -> None:
    whole = torch.zeros(70, 140, device=kernels.device)
    whole[69, 1] = poison
    whole[3, 139] = 1e-30
    cut = [Piece(view=View.of(whole[:40])), Piece(view=View.of(whole[40:]), row=40)]
    for pieces in ([Piece(view=View.of(whole))], cut):
        layout = Layout()
        layout.add(whole, pieces, parse_format(name))
        layout.check(kernels)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float16, torch.complex64, torch.float8_e4m3fn])
def test_bits_travel_as_they_are(kernels, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (24, 37 * dtype.itemsize), dtype=torch.uint8).to(kernels.device)
    if dtype != torch.bool:
        raw = raw * 255  # NaNs with all bits set, where there are such
    whole = raw.view(dtype)
    layout = Layout()
    layout.expected.append((layout._room(whole.nbytes), raw.view(-1).cpu()))
    halves = (Piece(view=View.of(whole[:, :20])), Piece(view=View.of(whole[:, 20:]), column=20))
    layout.parts.append(Part(offset=0, shape=(24, 37), dtype=dtype, pieces=halves, leaves=leaves_of(whole.nbytes, 3)))
    layout.check(kernels)


def test_empty_parts_and_empty_pieces(kernels) -> None:
    layout = Layout()
    nothing = torch.zeros(0, 16, device=kernels.device)
    layout.add(nothing, [], torch.bfloat16)
    whole = values(3, 16, torch.float32, kernels.device, 1)
    layout.add(whole, [Piece(view=View.of(nothing)), Piece(view=View.of(whole))], torch.float32)
    layout.add(whole, [Piece(view=View.of(whole)), Piece(view=View.of(nothing), row=3)], parse_format(FORMATS[0]))
    layout.check(kernels)


def test_nothing_at_all(kernels) -> None:
    recipe = kernels.assemble.BucketKernels([], kernels.device, backend="triton")
    limbs = kernels.assemble.assemble(aligned(0, kernels.device), recipe)
    assert kernels.assemble.read_digest(limbs) == 0


def test_digests_add_up_over_buckets_and_can_be_left_out(kernels) -> None:
    whole = values(20, 30, torch.bfloat16, kernels.device, 1)
    layout = Layout()
    layout.add(whole, [Piece(view=View.of(whole))], parse_format(FORMATS[0]))
    recipe = kernels.assemble.BucketKernels(layout.parts, kernels.device, backend="triton")
    bucket = aligned(layout.nbytes, kernels.device)
    limbs = kernels.assemble.assemble(bucket, recipe)
    once = kernels.assemble.read_digest(limbs)
    assert kernels.assemble.assemble(bucket, recipe, limbs=limbs) is limbs
    assert kernels.assemble.read_digest(limbs) == 2 * once % 2**128
    silent = kernels.assemble.BucketKernels(layout.parts, kernels.device, backend="triton", verify=False)
    assert kernels.assemble.read_digest(kernels.assemble.assemble(bucket, silent)) == 0
    assert silent.tmp_nbytes < recipe.tmp_nbytes


def test_what_cannot_be_built_is_refused(interpreted) -> None:
    assemble = interpreted.assemble
    whole = torch.zeros(4, 4)
    double = Part(
        offset=0, shape=(4, 4), dtype=torch.float16, pieces=(Piece(view=View.of(whole.double())),), leaves=leaves_of(32, 1)
    )
    with pytest.raises(ValueError, match="float64"):
        assemble.BucketKernels([double], interpreted.device, backend="triton")
    odd = Quantized(how=Fp8Format(grouping="block", block=(100, 100)), scale_offset=256, scale_leaves=leaves_of(4, 1))
    part = Part(
        offset=0,
        shape=(4, 4),
        dtype=torch.float8_e4m3fn,
        pieces=(Piece(view=View.of(whole)),),
        leaves=leaves_of(16, 1),
        quantized=odd,
    )
    with pytest.raises(ValueError, match="100x100"):
        assemble.BucketKernels([part], interpreted.device, backend="triton")
    recipe = assemble.BucketKernels([], interpreted.device, backend="triton")
    with pytest.raises(ValueError, match="256"):
        assemble.assemble(aligned(512, interpreted.device)[1:], recipe)
    with pytest.raises(ValueError, match="uint8"):
        assemble.assemble(torch.zeros(4), recipe)


def test_without_triton_or_a_gpu_torch_serves() -> None:
    from syncline.stages.kernels import assemble

    whole = values(20, 30, torch.bfloat16, torch.device("cpu"), 1)
    layout = Layout()
    layout.add(whole, [Piece(view=View.of(whole))], parse_format(FORMATS[0]))
    recipe = assemble.BucketKernels(layout.parts, torch.device("cpu"))
    assert recipe.program is None
    bucket = aligned(layout.nbytes, torch.device("cpu"))
    assemble.assemble(bucket, recipe)
    for place, content in layout.expected:
        assert torch.equal(bucket[place : place + len(content)], content)
    if not INTERPRET:
        with pytest.raises(ValueError, match="backend='triton'"):
            assemble.BucketKernels(layout.parts, torch.device("cpu"), backend="triton")


@given(
    shape=st.lists(st.integers(1, 4), max_size=5),
    orders=st.tuples(st.permutations(range(5)), st.permutations(range(5))),
    wide=st.integers(0, 4),
)
@settings(max_examples=60)
def test_copies_of_any_rank_are_copies_of_matrices(shape: list[int], orders, wide: int) -> None:
    """Against torch: both sides are views of stamped memory, in any order of axes, one of them with gaps."""
    rank = len(shape)
    sides = []
    for order, gap in zip(orders, (0, wide), strict=True):
        axes = [axis for axis in order if axis < rank]
        strides, step = [0] * rank, 1
        for axis in reversed(axes):
            strides[axis] = step
            step *= shape[axis] + gap
        sides.append((strides, step))
    (one, room), (other, space) = sides
    source = torch.arange(room)
    dest = torch.full((space,), -1)
    expected = dest.clone()
    expected.as_strided(shape, other).copy_(source.as_strided(shape, one))
    count = 0
    for size, (start, steps), (to, to_steps) in matrices(shape, one, other):
        dest.as_strided(size, to_steps, to).copy_(source.as_strided(size, steps, start))
        count += math.prod(size)
    assert torch.equal(dest, expected)
    assert count == math.prod(shape)
