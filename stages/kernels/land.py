"""Take a bucket apart on its device: copy every segment to where it lands, and digest what has landed.

The receiver's counterpart of `assemble`, by the same kernels. Nothing is cast here: the wire type is the receiver's. A
segment that lands contiguously is copied and hashed in one pass, each hash block read back from where it landed. One that
does not is copied, copied back into scratch memory without its gaps, and hashed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.scheduler.programs import Leaves
from syncline.stages.digest import digest_view

from .assemble import Backend, add_to_limbs, check_memory, read_digest, runs_triton
from .launches import LIMBS, Program
from .tables import Tables, can_copy_by_leaves
from .views import View, matrices

_ALIGN = 256

_LARGE_NBYTES = 1 << 20
"""What is only copied, contiguous and at least this large, is left to the device's own copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Landed:
    """A segment of a bucket and where it lands.

    Attributes:
        offset: where in the bucket it begins, in bytes.
        places: tensors of the segment's shape and wire type, any strides; more than one where a tied tensor is held twice.
        leaves: digest leaves.
        elsewhere: where its bytes are read from instead (1-d uint8); None for the bucket.
    """

    offset: int
    places: tuple[torch.Tensor, ...]
    leaves: Leaves
    elsewhere: torch.Tensor | None = None


class LandingKernels:
    """Everything that is launched to land one bucket.

    Args:
        landings: the bucket's segments as this receiver takes them. Their tensors are kept alive.
        device: where they live.
        verify: compute digests; without, everything is only copied.
        backend: as for `BucketKernels`.

    Attributes:
        triton: whether kernels run; else plain torch serves.
        scratch_nbytes: temporary memory for segments that land with gaps, in bytes.
        tmp_nbytes: all temporary memory of a run, in bytes.
    """

    def __init__(
        self, landings: Sequence[Landed], device: torch.device, *, verify: bool = True, backend: Backend = "auto"
    ) -> None:
        self.device = device
        self._verify = verify
        self._landings = tuple(landing for landing in landings if landing.places and landing.places[0].numel())
        self._programs: list[tuple[Program, int]] = []
        self._whole: list[tuple[Landed, torch.Tensor]] = []
        self.scratch_nbytes = 0
        self.triton = runs_triton(backend, device)
        if self.triton:
            self._programs = self._build()
        self.tmp_nbytes = self.scratch_nbytes + sum(program.tmp_nbytes for program, _ in self._programs)

    def _build(self) -> list[tuple[Program, int]]:
        """Programs and the row of limbs that each adds up to: everything once, then tied places against their first."""
        content, firsts, others = Tables(), Tables(), Tables()
        for landing in self._landings:
            if not self._verify:
                for place in landing.places:
                    if place.is_contiguous() and place.nbytes >= _LARGE_NBYTES:
                        self._whole.append((landing, _bytes(place)))
                    else:
                        _copy(content, landing, place)
                continue
            first, *more = landing.places
            self._land(content, landing, first)
            for place in more:
                self._land(others, landing, place)
                self._land(firsts, landing, first)
        return [
            (Program(tables, self.device), row)
            for row, tables in enumerate((content, firsts, others))
            if tables.copies or tables.long or tables.short
        ]

    def _land(self, tables: Tables, landing: Landed, place: torch.Tensor) -> None:
        shape, dtype = tuple(place.shape), place.dtype
        packed = _row_major(shape)
        base, start = _read_from(landing, dtype)
        place = place.detach()
        if place.is_contiguous():
            flat = View.of(place.as_strided((place.numel(),), (1,)))
            read = View(base=base, offset=start, shape=flat.shape, strides=flat.strides, dtype=dtype)
            if can_copy_by_leaves(read, flat, landing.leaves):
                tables.add_leaves(flat, landing.leaves, read)
            else:
                tables.add_copy(read, flat)
                tables.add_leaves(flat, landing.leaves)
            return
        back = self._take(place.numel() * dtype.itemsize) // dtype.itemsize
        for size, (at, steps), (to, to_steps) in matrices(shape, packed, place.stride()):
            there = View(base=place, offset=to, shape=size, strides=to_steps, dtype=dtype)
            tables.add_copy(View(base=base, offset=start + at, shape=size, strides=steps, dtype=dtype), there)
            tables.add_return(there, View(base=None, offset=back + at, shape=size, strides=steps, dtype=dtype))
        count = place.numel()
        tables.add_leaves(View(base=None, offset=back, shape=(1, count), strides=(count, 1), dtype=dtype), landing.leaves)

    def _take(self, nbytes: int) -> int:
        at = self.scratch_nbytes
        self.scratch_nbytes += -(-nbytes // _ALIGN) * _ALIGN
        return at

    def run(self, bucket: torch.Tensor, limbs: torch.Tensor) -> None:
        """See `land`."""
        if not self.triton:
            self._run_plain(bucket, limbs)
            return
        scratch = torch.empty(self.scratch_nbytes + _ALIGN, dtype=torch.uint8, device=self.device)
        at = -(-scratch.data_ptr() // _ALIGN) * _ALIGN
        for landing, place in self._whole:
            place.copy_(_content(landing, bucket, place.numel()), non_blocking=True)
        for program, row in self._programs:
            program.run(bucket.data_ptr(), at, limbs[row])

    def _run_plain(self, bucket: torch.Tensor, limbs: torch.Tensor) -> None:
        for landing in self._landings:
            digests = []
            for place in landing.places:
                nbytes = place.numel() * place.element_size()
                source = _content(landing, bucket, nbytes)
                place.detach().copy_(source.view(place.dtype).view(place.shape))
                if not self._verify:
                    continue
                digests.append(digest_view(place.detach().cpu(), landing.leaves))
            if not digests:
                continue
            add_to_limbs(limbs[0], digests[0])
            for digest in digests[1:]:
                add_to_limbs(limbs[1], digests[0])
                add_to_limbs(limbs[2], digest)


def land(bucket: torch.Tensor, kernels: LandingKernels, *, limbs: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a bucket to where it lands and add up the digest of what has landed, on the current stream.

    Args:
        bucket: 1-d uint8, aligned to 256 bytes, on the device of ``kernels``.
        kernels: what to launch.
        limbs: (3, `LIMBS`) int64 to add to; new zeros if not given.

    Returns:
        ``limbs``; see `read_landed`.
    """
    check_memory("bucket", bucket, kernels.device, aligned=kernels.triton)
    if limbs is None:
        limbs = torch.zeros((3, LIMBS), dtype=torch.int64, device=kernels.device)
    kernels.run(bucket, limbs)
    return limbs


def read_landed(limbs: torch.Tensor) -> tuple[int, bool]:
    """The digest of what has landed, and whether tied tensors got the same in all their places; limbs on the host."""
    content, firsts, others = (read_digest(row) for row in limbs)
    return content, firsts == others


def _read_from(landing: Landed, dtype: torch.dtype) -> tuple[torch.Tensor | None, int]:
    """Where a segment's first element is read: a tensor, or None for the bucket, and how many elements from its start."""
    if landing.elsewhere is None:
        return None, landing.offset // dtype.itemsize
    return landing.elsewhere.view(dtype), 0


def _content(landing: Landed, bucket: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A segment's bytes, where they are read from."""
    return bucket[landing.offset : landing.offset + nbytes] if landing.elsewhere is None else landing.elsewhere


def _bytes(place: torch.Tensor) -> torch.Tensor:
    return place.detach().as_strided((place.numel(),), (1,)).view(torch.uint8)


def _copy(tables: Tables, landing: Landed, place: torch.Tensor) -> None:
    """Copy a segment to a place, and no more."""
    place = place.detach()
    base, start = _read_from(landing, place.dtype)
    shape = tuple(place.shape)
    for size, (at, steps), (to, to_steps) in matrices(shape, _row_major(shape), place.stride()):
        read = View(base=base, offset=start + at, shape=size, strides=steps, dtype=place.dtype)
        tables.add_copy(read, View(base=place, offset=to, shape=size, strides=to_steps, dtype=place.dtype))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
