"""Landing on a device: buckets are copied to where they land, and what has landed is digested, by kernels behind one another
on a stream of the path's own. Launching returns at once; the event that it returns says when the result can be read.

On the CPU the same runs in plain torch and is over when it returns: for tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from syncline.scheduler.programs import TargetTask

from .cudart import own_stream
from .errors import TransportError, without_frames
from .issuing import Event
from .kernels.assemble import BucketKernels, assemble, read_digest
from .kernels.from_plan import landings_of
from .kernels.land import LandingKernels, land, read_landed
from .kernels.launches import LIMBS
from .kernels.views import Moved
from .launched import DONE, Launched

ALIGNED = 256
"""Bytes. Kernels take it that what they are given begins at a multiple of this; a bucket need not, in landing memory."""

Lent = Mapping[int, torch.Tensor]
"""Segments that are not in the bucket: offset in it -> where their bytes lie."""


class LandingStream:
    """Where kernels of one landing path are launched. From any thread, several at a time.

    Args:
        device: where weights live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._stream = own_stream(device) if self._cuda else None
        self._free_rows: list[torch.Tensor] = []

    def launch(
        self, work: Callable[[torch.Tensor], None], read: Callable[[torch.Tensor], int] | None, used: object
    ) -> Launched:
        """Run ``work`` on zeroed limbs, (3, `LIMBS`) int64, on the stream. ``read`` gets them on the host; None: nobody does,
        and they are what they happen to be.

        ``used``: all memory that ``work`` reads and writes. If it fails midway, what it has launched is under way all the
        same: the error is told at its end.
        """
        rows = self._rows() if read is not None else None
        problem: Exception | None = None
        with self._on_stream():
            make = torch.empty if rows is None else torch.zeros
            limbs = make((3, LIMBS), dtype=torch.int64, device=self.device)
            try:
                work(limbs)
                if rows is not None:
                    rows.copy_(limbs, non_blocking=True)
            except Exception as error:  # noqa: BLE001 - raised by `result`
                problem = without_frames(error)  # its frames hold what was to be worked on
            event = self._mark(self._stream)

        def result() -> int:
            if problem is not None:
                raise problem
            if rows is None or read is None:
                return 0
            digest = read(rows)
            self._free_rows.append(rows)
            return digest

        return Launched(event, result, (self, used, limbs, rows))

    def behind_loader(self, used: object) -> Launched:
        """Everything that the calling thread has launched so far on its current stream: a loader's copies out of ``used``."""
        stream = torch.cuda.current_stream(self.device) if self._cuda else None
        return Launched(self._mark(stream), lambda: 0, used)

    def _rows(self) -> torch.Tensor:
        """Page-locked memory for limbs that nobody uses."""
        try:
            return self._free_rows.pop()
        except IndexError:
            return torch.empty((3, LIMBS), dtype=torch.int64, pin_memory=self._cuda)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _mark(self, stream: Any) -> Event:
        """The end of what ``stream`` has been given."""
        if stream is None:
            return DONE
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def follow_caller(self) -> None:
        """What is launched from now on waits for what the calling thread has launched on its own stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))


class DeviceCopies:
    """The copies of one task on a receiver: from its bucket into the receiver's own tensors on a device.

    Launches are built by `prepare`, when links stand: only then is known what is lent.

    Args:
        task: a task of the receiver's program.
        buffers: the receiver's own tensors, in the order of its manifest's buffers.
        stream: where to launch.
        shift: how many bytes after a multiple of `ALIGNED` its buckets begin.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """

    def __init__(self, task: TargetTask, buffers: Sequence[torch.Tensor], stream: LandingStream, *, shift: int = 0) -> None:
        self._landings = landings_of(task, buffers)
        self._names = {landing.segment.offset: landing.segment.name for landing in task.landings}
        self._stream = stream
        self._shift = shift
        self._kernels: dict[bool, LandingKernels] = {}

    def prepare(self, lent: Lent, *, verify: bool) -> None:
        """Build and compile what `run_and_digest` (``verify``) or `run` launches. Takes seconds: on a worker, before a push."""
        self._built(lent, verify=verify)

    def run(self, bucket: torch.Tensor, lent: Lent) -> Launched:
        """Copy every segment to all its places. ``lent`` is the same each time."""
        kernels, bucket = self._built(lent, verify=False), _from_aligned(bucket, self._shift)
        return self._stream.launch(lambda limbs: _land(bucket, kernels, limbs), None, (bucket, kernels))

    def run_and_digest(self, bucket: torch.Tensor, lent: Lent) -> Launched:
        """The same, and the digest of what has landed, computed from where it landed.

        Reading it raises `TransportError` if a segment that lands in several places is not the same in all of them.
        """
        kernels, bucket = self._built(lent, verify=True), _from_aligned(bucket, self._shift)
        return self._stream.launch(lambda limbs: _land(bucket, kernels, limbs), self._read, (bucket, kernels))

    def _read(self, limbs: torch.Tensor) -> int:
        digest, same = read_landed(limbs)
        if not same:
            several = sorted(self._names[one.offset] for one in self._landings if len(one.places) > 1)
            raise TransportError(f"one of {', '.join(several)} landed differently in the places that hold it")
        return digest

    def _built(self, lent: Lent, *, verify: bool) -> LandingKernels:
        if verify not in self._kernels:
            landings = [replace(one, offset=one.offset + self._shift, elsewhere=lent.get(one.offset)) for one in self._landings]
            self._kernels[verify] = LandingKernels(landings, self._stream.device, verify=verify)
        return self._kernels[verify]


class DeviceDigest:
    """The digest of a bucket where it lies, and of what is lent in place of parts of it.

    Args:
        task: a task of a receiver's program.
        stream: where to launch.
        shift: as for `DeviceCopies`.
    """

    def __init__(self, task: TargetTask, stream: LandingStream, *, shift: int = 0) -> None:
        segments = [landing.segment for landing in task.landings]
        self._parts = [Moved(offset=s.offset + shift, nbytes=s.nbytes, moves=(), leaves=s.leaves) for s in segments]
        self._stream = stream
        self._shift = shift
        self._kernels: BucketKernels | None = None

    def prepare(self) -> BucketKernels:
        """Build and compile what `run` launches. Takes seconds: on a worker, before a push."""
        if self._kernels is None:
            self._kernels = BucketKernels(self._parts, self._stream.device)
        return self._kernels

    def run(self, bucket: torch.Tensor) -> Launched:
        """Digest a whole bucket."""
        kernels, bucket = self.prepare(), _from_aligned(bucket, self._shift)
        return self._stream.launch(
            lambda limbs: _digest(bucket, kernels, limbs), lambda limbs: read_digest(limbs[0]), (bucket, kernels)
        )


def _land(bucket: torch.Tensor, kernels: LandingKernels, limbs: torch.Tensor) -> None:
    land(bucket, kernels, limbs=limbs)


def _digest(bucket: torch.Tensor, kernels: BucketKernels, limbs: torch.Tensor) -> None:
    assemble(bucket, kernels, limbs=limbs[0])


def _from_aligned(bucket: torch.Tensor, shift: int) -> torch.Tensor:
    """A bucket with the ``shift`` bytes of its storage that lie before it."""
    if not shift:
        return bucket
    return bucket.as_strided((shift + bucket.numel(),), (1,), bucket.storage_offset() - shift)
