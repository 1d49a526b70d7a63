"""XXH3-128 by kernels is the CPU's XXH3-128, for every length, alignment, seed and geometry of leaves."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from syncline.scheduler.programs import Leaves
from syncline.stages.digest import bytes_of, digest_bytes
from syncline.stages.kernels.views import Part, Piece, View

LEAF = 4096
# shrinking takes minutes in the interpreter
QUICK = [Phase.explicit, Phase.reuse, Phase.generate]


def one(nbytes: int, *, uid: int = 7, leaf: int = 2**20, blocks: int = 1, first: int = 0) -> Leaves:
    return Leaves(item_uid=uid, first=first, blocks=blocks, block_nbytes=nbytes // blocks, leaf_nbytes=leaf)


def memory(nbytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Bytes at an address that is aligned to 256, with random content."""
    room = torch.randint(0, 256, (nbytes + 512,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).to(device)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


def digest_where_it_lies(kernels, content: torch.Tensor, pieces: list[tuple[int, Leaves]]) -> int:
    """Digest of parts of a bucket by kernels, without writing anything."""
    tables = kernels.tables.Tables()
    for offset, leaves in pieces:
        nbytes = leaves.blocks * leaves.block_nbytes
        tables.add_leaves(View(base=None, offset=offset, shape=(1, nbytes), strides=(nbytes, 1), dtype=torch.uint8), leaves)
    limbs = torch.zeros(4, dtype=torch.int64, device=content.device)
    kernels.launches.Program(tables, content.device).run(0, content.data_ptr(), limbs)
    return kernels.assemble.read_digest(limbs)


def expected(content: torch.Tensor, pieces: list[tuple[int, Leaves]]) -> int:
    data = bytes_of(content.cpu())
    return sum(digest_bytes(data[at : at + n.blocks * n.block_nbytes], n) for at, n in pieces) % 2**128


def test_every_short_length(kernels) -> None:
    """All lengths from 1 to 240, at all alignments; a wrong one shows because the right ones add up to something else."""
    rng = random.Random(1)
    at, pieces = 0, []
    for nbytes in range(1, 241):
        pieces.append((at, one(nbytes, uid=rng.getrandbits(64))))
        at += nbytes
    content = memory(at, kernels.device)
    assert digest_where_it_lies(kernels, content, pieces) == expected(content, pieces)


@pytest.mark.parametrize("nbytes", [3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 256, 1024, 1025, 1088, 2048, 33000])
@pytest.mark.parametrize("offset", [0, 5, 8])
def test_each_way_by_itself(kernels, nbytes: int, offset: int) -> None:
    pieces = [(offset, one(nbytes, uid=2**64 - 3))]
    content = memory(nbytes + offset, kernels.device)
    assert digest_where_it_lies(kernels, content, pieces) == expected(content, pieces)


def test_long_lengths_around_stripes_and_blocks(kernels) -> None:
    at, pieces = 0, []
    for nbytes in [*range(241, 330, 11), *range(1020, 1030), 1087, 1089, 2047, 2049, 4096, 5000, 33 * 1024]:
        pieces.append((at, one(nbytes, uid=nbytes << 50)))
        at += -(-nbytes // 16) * 16
    content = memory(at, kernels.device)
    assert digest_where_it_lies(kernels, content, pieces) == expected(content, pieces)


@given(
    blocks=st.integers(1, 4),
    block=st.integers(1, 3000),
    leaf=st.sampled_from([64, 250, 256, 1000, 4096]),
    first=st.sampled_from([0, 5, 2**64 - 2]),
    offset=st.integers(0, 20),
)
@settings(max_examples=8, phases=QUICK)
def test_any_geometry(interpreted, *, blocks: int, block: int, leaf: int, first: int, offset: int) -> None:
    pieces = [(offset, one(blocks * block, uid=2**63 + 11, leaf=leaf, blocks=blocks, first=first))]
    content = memory(blocks * block + offset, interpreted.device, seed=block)
    assert digest_where_it_lies(interpreted, content, pieces) == expected(content, pieces)


@pytest.mark.parametrize("change", ["leaves", "words", "shift", "flip", "zeros"])
def test_changes_are_noticed(kernels, change: str) -> None:
    """The sum does not depend on the order of leaves' digests; it must depend on the order of everything in the content."""
    pieces = [(0, one(4 * LEAF, leaf=LEAF))]
    content = memory(4 * LEAF, kernels.device)
    if change == "zeros":
        content[LEAF:] = 0
    before = digest_where_it_lies(kernels, content, pieces)
    changed = content.clone()
    if change == "leaves":
        changed[:LEAF], changed[LEAF : 2 * LEAF] = content[LEAF : 2 * LEAF], content[:LEAF]
    elif change == "words":
        changed[:8], changed[64:72] = content[64:72], content[:8]
    elif change == "shift":
        changed[1:] = content[:-1]
    elif change == "flip":
        changed[3 * LEAF + 77] ^= 16
    else:
        pieces = [(0, one(3 * LEAF, leaf=LEAF))]
    assert digest_where_it_lies(kernels, changed, pieces) != before
    assert digest_where_it_lies(kernels, changed, pieces) == expected(changed, pieces)


@pytest.mark.parametrize("nbytes", [100, 1000, 3 * LEAF + 52, 40 * 1024])
@pytest.mark.parametrize("misaligned", [0, 4])
def test_copied_and_hashed_in_one_pass(kernels, nbytes: int, misaligned: int) -> None:
    source = memory(nbytes + misaligned, kernels.device, seed=nbytes)[misaligned:]
    part = Part(
        offset=256, shape=(1, nbytes), dtype=torch.uint8, pieces=(Piece(view=View.of(source)),), leaves=one(nbytes, leaf=LEAF)
    )
    assert kernels.tables.can_copy_by_leaves(part.pieces[0].view, part.place(part.pieces[0]), part.leaves)
    bucket = memory(nbytes + 512, kernels.device, seed=1)
    before = bucket.clone()
    recipe = kernels.assemble.BucketKernels([part], kernels.device, backend="triton")
    digest = kernels.assemble.read_digest(kernels.assemble.assemble(bucket, recipe))
    assert torch.equal(bucket[256 : 256 + nbytes], source)
    assert torch.equal(bucket[:256], before[:256])
    assert torch.equal(bucket[256 + nbytes :], before[256 + nbytes :])
    assert digest == expected(source, [(0, part.leaves)])


@pytest.mark.parametrize(
    ("rows", "width", "gap"), [(2, 16, 16), (9, 48, 16), (5, 4096, 32), (3, 33 * 1024 + 16, 64), (70, 1008, 16)]
)
@pytest.mark.parametrize("leaf", [1024, LEAF, 10 * 1024 + 16])
def test_rows_with_gaps_are_copied_and_hashed_in_one_pass(kernels, rows: int, width: int, gap: int, leaf: int) -> None:
    """Leaves begin in the middle of rows, rows in the middle of leaves."""
    room = memory(rows * (width + gap), kernels.device, seed=rows)
    source = room.view(rows, width + gap)[:, :width]
    nbytes = rows * width
    part = Part(
        offset=256, shape=(rows, width), dtype=torch.uint8, pieces=(Piece(view=View.of(source)),), leaves=one(nbytes, leaf=leaf)
    )
    view = part.pieces[0].view
    long = all(min(leaf, nbytes - at) > 240 for at in range(0, nbytes, leaf))
    assert kernels.tables.can_copy_by_leaves(view, part.place(part.pieces[0]), part.leaves) == long
    bucket = memory(nbytes + 512, kernels.device, seed=1)
    before = bucket.clone()
    recipe = kernels.assemble.BucketKernels([part], kernels.device, backend="triton")
    digest = kernels.assemble.read_digest(kernels.assemble.assemble(bucket, recipe))
    assert torch.equal(bucket[256 : 256 + nbytes].view(rows, width), source)
    assert torch.equal(bucket[:256], before[:256])
    assert torch.equal(bucket[256 + nbytes :], before[256 + nbytes :])
    assert digest == expected(source.contiguous().view(-1), [(0, part.leaves)])


def test_rows_that_begin_between_multiples_of_16_bytes_are_copied_first(kernels) -> None:
    for width, gap, start in ((1000, 16, 0), (1008, 8, 0), (1008, 16, 8)):
        room = memory(8 * (width + gap) + start, kernels.device)[start:]
        view = View.of(room.view(8, width + gap)[:, :width])
        write = View(base=None, offset=0, shape=(8, width), strides=(width, 1), dtype=torch.uint8)
        assert not kernels.tables.can_copy_by_leaves(view, write, one(8 * width))
