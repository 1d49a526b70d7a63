"""Put together a bucket on its device: gather strided pieces, cast or quantize them, write scales, and digest what was written.

`BucketKernels` is built once from the plan, off the loop; `assemble` launches it on the current CUDA stream and returns at
once. Contents that are contiguous on both sides and travel as they are get copied and hashed in one pass; the others are
hashed right after they were written, in launches of their own.

Where Triton is absent, and on the CPU, `assemble` does the same in plain torch, on the calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from syncline.scheduler.programs import Leaves
from syncline.stages.digest import add_digests, bytes_of, digest_bytes, digest_view

from .language import INSTALLED, INTERPRETED
from .launches import LIMBS, Program
from .plain import write_part
from .tables import FEWEST_STRIPS, Tables, can_copy_by_leaves, strips_of
from .views import Hashed, Moved, Part, View

Backend = Literal["auto", "triton", "torch"]


def read_digest(limbs: torch.Tensor) -> int:
    """The digest from its limbs (int64, `LIMBS` of them), once they are on the host."""
    return sum(int(limb) << (32 * place) for place, limb in enumerate(limbs.tolist())) % 2**128


def runs_triton(backend: Backend, device: torch.device) -> bool:
    """Whether ``backend`` means Triton on ``device``. `ValueError` if it is asked for where it cannot run."""
    can = INSTALLED and (INTERPRETED or device.type == "cuda")
    if backend == "triton" and not can:
        why = f"kernels do not run on {device}" if INSTALLED else "Triton is not installed"
        raise ValueError(f"backend='triton', and {why}; 'auto' falls back to torch")
    return backend == "triton" or (backend == "auto" and can and device.type == "cuda")


def check_memory(name: str, memory: torch.Tensor, device: torch.device, *, aligned: bool) -> None:
    """`ValueError` if memory is not what tables were made for."""
    if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.device.type != device.type:
        raise ValueError(f"{name} is 1-d uint8 on {device}, not {memory.dtype} of {memory.dim()} axes on {memory.device}")
    if aligned and memory.data_ptr() % 256:
        raise ValueError(
            f"{name} must be aligned to 256 bytes, and begins {memory.data_ptr() % 256} bytes after such an address"
        )


class BucketKernels:
    """Everything that is launched for one bucket.

    Args:
        parts: the bucket's segments. The tensors that they are read from are kept alive.
        device: where the bucket is assembled.
        verify: compute digests.
        backend: ``triton``, ``torch``, or whichever fits the device. Triton on the CPU is its interpreter, for tests.

    Attributes:
        program: what is launched; None where plain torch serves.
        tmp_nbytes: temporary memory of a run on the device, in bytes; count it as the task's.

    Raises:
        ValueError: a cast or a format that is not built, or Triton is asked for and absent.
    """

    def __init__(
        self, parts: Sequence[Part | Moved | Hashed], device: torch.device, *, verify: bool = True, backend: Backend = "auto"
    ) -> None:
        self.parts = tuple(part for part in parts if not _empty(part))
        self.device = device
        self._verify = verify
        triton = runs_triton(backend, device)
        self.program = Program(tables_of(self.parts, verify=verify), device) if triton else None
        self.tmp_nbytes = self.program.tmp_nbytes if self.program is not None else 0

    @property
    def idle(self) -> bool:
        """There is nothing to do: all is sent from where it lies, and nothing is digested."""
        return not self._verify and all(isinstance(part, Hashed) for part in self.parts)

    def run(
        self, bucket: torch.Tensor, given: torch.Tensor | None, limbs: torch.Tensor, scratch: torch.Tensor | None = None
    ) -> None:
        """See `assemble`."""
        if self.program is not None:
            self.program.run(0 if given is None else given.data_ptr(), bucket.data_ptr(), limbs, scratch)
            return
        digests = []
        for part in self.parts:
            if isinstance(part, Hashed):
                digests += [digest_view(part.content.cpu(), part.leaves)] if self._verify else []
                continue
            write_part(part, bucket, given)
            for content, leaves in contents_of(part) if self._verify else ():
                digests.append(digest_bytes(bytes_of(content.tensor(bucket).cpu()), leaves))
        add_to_limbs(limbs, add_digests(digests))


def assemble(
    bucket: torch.Tensor,
    kernels: BucketKernels,
    *,
    given: torch.Tensor | None = None,
    limbs: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write a bucket and add up its digest. On CUDA everything is launched on the current stream, and nothing waits.

    Args:
        bucket: 1-d uint8, contiguous, aligned to 256 bytes, on the device of ``kernels``. Bytes between segments stay as
            they are.
        kernels: what to launch.
        given: memory that pieces without a tensor of their own lie in (1-d uint8, aligned to 256 bytes): what `h2d` or
            the gather has brought for this run.
        limbs: where to add the digest up (int64, `LIMBS`), for example over the buckets of a receiver; new zeros if not
            given.
        scratch: temporary memory (1-d uint8, aligned to 16 bytes) of ``kernels.tmp_nbytes``; allocated if not given.

    Returns:
        ``limbs``. Copy them to pinned memory behind the launches and give them to `read_digest`.
    """
    check_memory("bucket", bucket, kernels.device, aligned=kernels.program is not None)
    if given is not None:
        check_memory("given", given, kernels.device, aligned=kernels.program is not None)
    if limbs is None:
        limbs = torch.zeros(LIMBS, dtype=torch.int64, device=kernels.device)
    kernels.run(bucket, given, limbs, scratch)
    return limbs


def add_to_limbs(limbs: torch.Tensor, digest: int) -> None:
    """Add a digest that was computed on the host."""
    limbs += torch.tensor([digest >> (32 * place) & 0xFFFFFFFF for place in range(LIMBS)], device=limbs.device)


def _empty(part: Part | Moved | Hashed) -> bool:
    if isinstance(part, Hashed):
        return not part.content.numel()
    return part.nbytes == 0 if isinstance(part, Moved) else 0 in part.shape


def tables_of(parts: Sequence[Part | Moved | Hashed], *, verify: bool) -> Tables:
    """What to launch for a bucket's parts; with ``verify`` for their digest, too."""
    tables = Tables()
    by_strips = verify and sum(strips_of(part) for part in parts if isinstance(part, Part)) >= FEWEST_STRIPS
    for part in parts:
        if isinstance(part, Hashed):
            if verify:
                tables.add_leaves(View.of(part.content), part.leaves)
            continue
        if isinstance(part, Moved):
            _add_moved(tables, part, verify=verify)
            continue
        whole = _whole(part)
        if by_strips and strips_of(part):
            tables.add_strips(part)
            _, scales = contents_of(part)
            tables.add_leaves(*scales)
            continue
        if part.quantized is not None:
            tables.add_quantized(part)
        elif verify and (piece := _only_piece(part)) and can_copy_by_leaves(piece, whole, part.leaves):
            tables.add_leaves(whole, part.leaves, piece)
            continue
        else:
            for piece_ in part.pieces:
                tables.add_copy(piece_.view, part.place(piece_))
        if verify:
            for content, leaves in contents_of(part):
                tables.add_leaves(content, leaves)
    return tables


def _add_moved(tables: Tables, part: Moved, *, verify: bool) -> None:
    if verify and len(part.moves) == 1:
        read, write = part.moves[0]
        alone = write.shape[0] * write.shape[1] * write.itemsize == part.nbytes
        if alone and can_copy_by_leaves(read, write, part.leaves):
            tables.add_leaves(part.content, part.leaves, read)
            return
    for read, write in part.moves:
        tables.add_copy(read, write)
    if verify:
        tables.add_leaves(part.content, part.leaves)


def _only_piece(part: Part) -> View | None:
    view = part.pieces[0].view
    return view if view.shape == part.shape else None


def _whole(part: Part) -> View:
    offset, (_, columns) = part.offset // part.dtype.itemsize, part.shape
    return View(base=None, offset=offset, shape=part.shape, strides=(columns, 1), dtype=part.dtype)


def contents_of(part: Part | Moved) -> list[tuple[View, Leaves]]:
    """What of a part travels, with its leaves: its elements, and its scales if it has any."""
    if isinstance(part, Moved):
        return [(part.content, part.leaves)]
    contents = [(_whole(part), part.leaves)]
    if part.quantized is not None:
        down, across = part.quantized.how.group(part.shape)
        shape = (-(-part.shape[0] // down), -(-part.shape[1] // across))
        offset = part.quantized.scale_offset // 4
        scales = View(base=None, offset=offset, shape=shape, strides=(shape[1], 1), dtype=torch.float32)
        contents.append((scales, part.quantized.scale_leaves))
    return contents
