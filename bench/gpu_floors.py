"""What one device can do, and what each kernel makes of it, measured in this process by CUDA events and checked.

A rate counts bytes that are read plus bytes that are written in device memory; that of ``host to device`` counts each once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from syncline.scheduler.formats import parse_format
from syncline.scheduler.programs import Leaves
from syncline.stages.digest import digest_view
from syncline.stages.kernels import plain
from syncline.stages.kernels.assemble import BucketKernels, assemble, read_digest
from syncline.stages.kernels.land import Landed, LandingKernels, land, read_landed
from syncline.stages.kernels.launches import LIMBS
from syncline.stages.kernels.reference import cast
from syncline.stages.kernels.views import Moved, Part, Piece, Quantized, View

from .gpu_peer import FORMAT

LEAF_NBYTES = 262_144
H2D = "host to device, pinned"
D2D = "device to device"
ONE_COPY = "one copy of what is pushed"
LAUNCH = "launch"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Something that was repeated.

    Attributes:
        seconds: of each time, by the device's clock.
        nbytes: that it reads and writes each time.
        right: its result was compared with the reference and equal; None where there is none.
    """

    name: str
    seconds: tuple[float, ...]
    nbytes: int
    right: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much: matrices of ``rows`` x ``columns``; ``big`` bytes for floors; each repeated ``repeat`` times."""

    rows: int = 65_536
    columns: int = 8_192
    big: int = 1 << 30
    repeat: int = 20


def device_times(work: Callable[[], object], repeat: int, device: torch.device) -> tuple[float, ...]:
    """Seconds of each of ``repeat`` calls, after two that are not counted; on the CPU by the host's clock."""
    for _ in range(2):
        work()
    if device.type != "cuda":
        return tuple(_host_times(work, repeat))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return tuple(one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks))


def _host_times(work: Callable[[], object], repeat: int) -> Iterator[float]:
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        yield time.perf_counter() - began


def floors(device: torch.device, sizes: Sizes) -> Iterator[Timed]:
    """The device's own rates."""
    there = torch.empty(sizes.big, dtype=torch.uint8, device=device)
    here = torch.ones(sizes.big, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds = device_times(partial(there.copy_, here, non_blocking=True), sizes.repeat, device)
    yield Timed(name=H2D, seconds=seconds, nbytes=sizes.big, right=bool((there == 1).all()))
    other = torch.zeros_like(there)
    seconds = device_times(lambda: other.copy_(there), sizes.repeat, device)
    yield Timed(name=D2D, seconds=seconds, nbytes=2 * sizes.big, right=torch.equal(other, there))
    small = torch.zeros(1, device=device)
    yield Timed(name=LAUNCH, seconds=device_times(lambda: small.add_(1), 200, device), nbytes=0)


def one_copy(device: torch.device, nbytes: int, *, repeat: int = 5) -> Timed:
    """One copy of as many bytes as are pushed, twice of which lie on the device meanwhile."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    other = torch.zeros_like(there)
    seconds = device_times(lambda: other.copy_(there), repeat, device)
    right = all(torch.equal(one, another) for one, another in zip(there.split(1 << 30), other.split(1 << 30), strict=True))
    return Timed(name=ONE_COPY, seconds=seconds, nbytes=2 * nbytes, right=right)


def kernels(device: torch.device, sizes: Sizes) -> Iterator[Timed]:
    """Each kernel, with and without the digest."""
    generator = torch.Generator(device).manual_seed(1)
    made = torch.randn(sizes.rows, sizes.columns, generator=generator, dtype=torch.bfloat16, device=device)
    yield _moved("gather bf16, strided", _padded(made), made, verify=False, sizes=sizes)
    yield _moved("gather bf16, strided, with digest", _padded(made), made, verify=True, sizes=sizes)
    yield _moved("copy bf16, with digest", made, made, verify=True, sizes=sizes)
    wide = made.float()
    yield _moved("cast float32 to bf16, with digest", wide, plain_cast(wide), verify=True, sizes=sizes)
    del wide
    yield _quantized("FP8 128x128", made, verify=False, sizes=sizes)
    yield _quantized("FP8 128x128, with digest", made, verify=True, sizes=sizes)
    yield _landed(made, sizes)


def plain_cast(values: torch.Tensor) -> torch.Tensor:
    """The reference of a cast to bf16."""
    return cast(values, torch.bfloat16)


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    room = torch.empty(matrix.shape[0], matrix.shape[1] + 64, dtype=matrix.dtype, device=matrix.device)
    room[:, : matrix.shape[1]].copy_(matrix)
    return room[:, : matrix.shape[1]]


def _leaves(nbytes: int, uid: int) -> Leaves:
    return Leaves(item_uid=uid, first=0, blocks=1, block_nbytes=nbytes, leaf_nbytes=LEAF_NBYTES)


def _aligned(content: torch.Tensor) -> torch.Tensor:
    """A copy of bytes where kernels can take a bucket from."""
    room = torch.empty(content.numel() + 256, dtype=torch.uint8, device=content.device)
    start = -room.data_ptr() % 256
    return room[start : start + content.numel()].copy_(content)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def _moved(name: str, source: torch.Tensor, expected: torch.Tensor, *, verify: bool, sizes: Sizes) -> Timed:
    nbytes = expected.numel() * expected.element_size()
    write = View(base=None, offset=0, shape=(sizes.rows, sizes.columns), strides=(sizes.columns, 1), dtype=expected.dtype)
    leaves = _leaves(nbytes, 11)
    part = Moved(offset=0, nbytes=nbytes, moves=((View.of(source), write),), leaves=leaves)
    return _assembled(name, [part], _bytes(expected), [(0, nbytes, leaves)], _size(source) + nbytes, verify=verify, sizes=sizes)


def _quantized(name: str, source: torch.Tensor, *, verify: bool, sizes: Sizes) -> Timed:
    how = parse_format(FORMAT)
    codes, scales = plain.quantize(source, how)
    at = -(-codes.numel() // 256) * 256
    expected = torch.zeros(at + scales.numel() * 4, dtype=torch.uint8, device=source.device)
    expected[: codes.numel()] = _bytes(codes)
    expected[at:] = _bytes(scales.float())
    leaves = [(0, codes.numel(), _leaves(codes.numel(), 12)), (at, scales.numel() * 4, _leaves(scales.numel() * 4, 13))]
    part = Part(
        offset=0, shape=(sizes.rows, sizes.columns), dtype=torch.float8_e4m3fn, pieces=(Piece(view=View.of(source)),),
        leaves=leaves[0][2], quantized=Quantized(how=how, scale_offset=at, scale_leaves=leaves[1][2]),
    )  # fmt: skip
    return _assembled(name, [part], expected, leaves, _size(source) + expected.numel(), verify=verify, sizes=sizes)


def _assembled(
    name: str, parts: list[Part | Moved], expected: torch.Tensor, contents: list[tuple[int, int, Leaves]], nbytes: int, *,
    verify: bool, sizes: Sizes,
) -> Timed:  # fmt: skip
    """Build, run, time and check. ``contents``: start, length and leaves of what is digested."""
    device = expected.device
    bucket = _aligned(torch.zeros_like(expected))
    built, limbs = BucketKernels(parts, device, verify=verify), torch.zeros(LIMBS, dtype=torch.int64, device=device)
    assemble(bucket, built, limbs=limbs)
    right = torch.equal(bucket, expected)
    if verify:
        host = expected.cpu()
        digest = sum(digest_view(host[start : start + length], leaves) for start, length, leaves in contents)
        right = right and read_digest(limbs.cpu()) == digest % 2**128
    seconds = device_times(lambda: assemble(bucket, built, limbs=limbs), sizes.repeat, device)
    return Timed(name=name, seconds=seconds, nbytes=nbytes, right=right)


def _landed(made: torch.Tensor, sizes: Sizes) -> Timed:
    bucket, place = _aligned(_bytes(made)), torch.zeros_like(made)
    leaves = _leaves(bucket.numel(), 14)
    built = LandingKernels([Landed(offset=0, places=(place,), leaves=leaves)], made.device)
    digest, same = read_landed(land(bucket, built).cpu())
    right = same and torch.equal(place, made) and digest == digest_view(bucket.cpu(), leaves)
    seconds = device_times(lambda: land(bucket, built), sizes.repeat, made.device)
    return Timed(name="land, with digest", seconds=seconds, nbytes=2 * bucket.numel(), right=right)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
