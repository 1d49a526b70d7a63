"""Buckets taken apart by kernels: what lands, wherever and with whatever gaps, and the digest of what has landed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from syncline.scheduler.programs import Leaves
from syncline.stages.digest import digest_view
from syncline.stages.kernels.land import Landed

LEAF = 2**16
# shrinking takes minutes in the interpreter
QUICK = [Phase.explicit, Phase.reuse, Phase.generate]


def leaves_of(nbytes: int, uid: int) -> Leaves:
    return Leaves(item_uid=uid, first=3, blocks=1, block_nbytes=nbytes, leaf_nbytes=LEAF)


def aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    room = torch.randint(0, 256, (nbytes + 256,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)).to(device)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


def place(shape: tuple[int, ...], dtype: torch.dtype, how: str, device: torch.device) -> torch.Tensor:
    if how == "transposed":
        return torch.zeros(tuple(reversed(shape)), dtype=dtype, device=device).permute(*reversed(range(len(shape))))
    if how == "with gaps":
        return torch.zeros((*shape[:-1], shape[-1] + 3), dtype=dtype, device=device)[..., : shape[-1]]
    if how == "a slice of rows":
        return torch.zeros((shape[0] + 2, *shape[1:]), dtype=dtype, device=device)[1:-1]
    return torch.zeros(shape, dtype=dtype, device=device)


PLACES = ["plain", "transposed", "with gaps", "a slice of rows"]


def check(kernels, landings: list[Landed], nbytes: int) -> None:
    """Out of a bucket, and every other segment from elsewhere; with digests, and only copied."""
    bucket = aligned(nbytes, kernels.device)
    check_copies(kernels, landings, bucket)
    for backend in ("triton", "torch"):
        clear(landings)
        recipe = kernels.land.LandingKernels(landings, kernels.device, backend=backend)
        digest, same = kernels.land.read_landed(kernels.land.land(bucket, recipe))
        expected = 0
        for landing in landings:
            for tensor in landing.places:
                content = bucket[landing.offset : landing.offset + tensor.nbytes]
                assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), content), backend
            expected += digest_view(landing.places[0].cpu(), landing.leaves)
        assert digest == expected % 2**128, backend
        assert same


def clear(landings: list[Landed]) -> None:
    for landing in landings:
        for tensor in landing.places:
            tensor.zero_()


def check_copies(kernels, landings: list[Landed], bucket: torch.Tensor) -> None:
    """Without digests, and with some segments read from elsewhere: then the bucket has nothing of them."""
    mixed, rest = [], bucket.clone()
    for number, one in enumerate(landings):
        content = slice(one.offset, one.offset + (one.places[0].nbytes if one.places else 0))
        elsewhere = bucket[content].clone() if number % 2 == 0 else None
        mixed.append(dataclasses.replace(one, elsewhere=elsewhere))
        if elsewhere is not None:
            rest[content] = 0x5A
    room = aligned(bucket.numel(), kernels.device)
    room.copy_(rest)
    for verify in (True, False):
        clear(landings)
        recipe = kernels.land.LandingKernels(mixed, kernels.device, verify=verify, backend="triton")
        digest, same = kernels.land.read_landed(kernels.land.land(room, recipe))
        for one in landings:
            for tensor in one.places:
                content = bucket[one.offset : one.offset + tensor.nbytes]
                assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), content), verify
        expected = sum(digest_view(one.places[0].cpu(), one.leaves) for one in landings) if verify else 0
        assert (digest, same) == (expected % 2**128, True)


@given(data=st.data())
@settings(max_examples=8, phases=QUICK)
def test_anything_lands_anywhere(interpreted, data) -> None:
    landings, end = [], 0
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]))
        places = tuple(
            place(shape, dtype, how, interpreted.device)
            for how in data.draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=2))
        )
        landings.append(Landed(offset=end, places=places, leaves=leaves_of(places[0].nbytes, 2**64 - number)))
        end += -(-places[0].nbytes // 256) * 256
    check(interpreted, landings, end)


@pytest.mark.parametrize("how", PLACES)
def test_each_kind_of_place(kernels, how: str) -> None:
    tensor = place((70, 130), torch.bfloat16, how, kernels.device)
    other = place((70, 130), torch.bfloat16, "plain", kernels.device)
    check(kernels, [Landed(offset=256, places=(tensor, other), leaves=leaves_of(70 * 130 * 2, 5))], 256 + 70 * 130 * 2)


def test_nothing_lands_for_nothing(kernels) -> None:
    empty = torch.zeros(0, 5, device=kernels.device)
    check(
        kernels,
        [Landed(offset=0, places=(empty,), leaves=leaves_of(0, 1)), Landed(offset=0, places=(), leaves=leaves_of(0, 1))][:1],
        256,
    )


def test_a_tied_tensor_that_differs_is_noticed(kernels) -> None:
    limbs = torch.tensor([[1, 0, 0, 0], [5, 0, 0, 0], [5, 0, 0, 1]])
    assert kernels.land.read_landed(limbs) == (1, False)
