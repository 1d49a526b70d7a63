"""Landing on a device: buckets are copied to where they land, and what has landed is digested, by kernels behind one another
on a stream of the path's own. Launching returns at once; the event that it returns says when the result can be read.

On the CPU the same runs in plain torch and is over when it returns: for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from syncline.scheduler.programs import TargetTask

from .completions import Signal
from .digest import add_digests
from .errors import TransportError
from .issuing import Event
from .kernels.assemble import BucketKernels, read_digest
from .kernels.from_plan import landings_of
from .kernels.land import Landed, LandingKernels, land, read_landed
from .kernels.launches import LIMBS
from .kernels.views import Moved
from .watch import Watch

Lent = Mapping[int, torch.Tensor]
"""Segments that are not in the bucket: offset in it -> where their bytes lie."""


class Launched(NamedTuple):
    """Work under way on the device. ``result`` is its digest, to be asked for once, when ``event`` is done."""

    event: Event
    result: Callable[[], int]


class _Done:
    """What runs at once is done when it returns."""

    def query(self) -> bool:
        return True


class LandingStream:
    """Where kernels of one landing path are launched. From any thread, one at a time.

    Args:
        device: where weights live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._rows: list[torch.Tensor] = []

    def launch(self, work: Callable[[torch.Tensor], None], read: Callable[[torch.Tensor], int]) -> Launched:
        """Run ``work`` on zeroed limbs, (3, `LIMBS`) int64, on the stream. ``read`` gets them on the host."""
        if self._stream is None:
            limbs = torch.zeros((3, LIMBS), dtype=torch.int64)
            work(limbs)
            return Launched(_Done(), lambda: read(limbs))
        rows = self._rows.pop() if self._rows else torch.empty((3, LIMBS), dtype=torch.int64, pin_memory=True)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            limbs = torch.zeros((3, LIMBS), dtype=torch.int64, device=self.device)
            work(limbs)
            rows.copy_(limbs, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)

        def result() -> int:
            digest = read(rows)
            self._rows.append(rows)
            return digest

        return Launched(event, result)

    def behind_loader(self) -> Launched:
        """Everything that the calling thread has launched so far on its current stream: a loader's copies out of a bucket."""
        if self._stream is None:
            return self.nothing()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return Launched(event, lambda: 0)

    def nothing(self) -> Launched:
        """Nothing, done at once."""
        return Launched(_Done(), lambda: 0)

    def follow_caller(self) -> None:
        """What is launched from now on waits for what the calling thread has launched on its own stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))


class _Both:
    def __init__(self, one: Event, other: Event) -> None:
        self._one, self._other = one, other

    def query(self) -> bool:
        return self._one.query() and self._other.query()


def both(one: Launched, other: Launched) -> Launched:
    """Two as one: the digests are added up."""
    return Launched(_Both(one.event, other.event), lambda: add_digests((one.result(), other.result())))


class DeviceCopies:
    """The copies of one task on a receiver: from its bucket into the receiver's own tensors on a device.

    Launches are built when they are first needed: what is lent is known only when links stand.

    Args:
        task: a task of the receiver's program.
        buffers: the receiver's own tensors, in the order of its manifest's buffers.
        stream: where to launch.

    Raises:
        PlanError: the buffers are not those that were planned for.
    """

    def __init__(self, task: TargetTask, buffers: Sequence[torch.Tensor], stream: LandingStream) -> None:
        self._landings = landings_of(task, buffers)
        self._names = {landing.segment.offset: landing.segment.name for landing in task.landings}
        self._stream = stream
        self._kernels: dict[bool, LandingKernels] = {}

    def run(self, bucket: torch.Tensor, lent: Lent) -> Launched:
        """Copy every segment to all its places. ``lent`` is the same each time."""
        kernels = self._built(lent, verify=False)
        return self._stream.launch(lambda limbs: _land(bucket, kernels, limbs), lambda _: 0)

    def run_and_digest(self, bucket: torch.Tensor, lent: Lent) -> Launched:
        """The same, and the digest of what has landed, computed from where it landed.

        Reading it raises `TransportError` if a segment that lands in several places is not the same in all of them.
        """
        kernels = self._built(lent, verify=True)
        return self._stream.launch(lambda limbs: _land(bucket, kernels, limbs), self._read)

    def _read(self, limbs: torch.Tensor) -> int:
        digest, same = read_landed(limbs)
        if not same:
            several = sorted(self._names[one.offset] for one in self._landings if len(one.places) > 1)
            raise TransportError(f"one of {', '.join(several)} landed differently in the places that hold it")
        return digest

    def _built(self, lent: Lent, *, verify: bool) -> LandingKernels:
        if verify not in self._kernels:
            landings = [
                Landed(offset=one.offset, places=one.places, leaves=one.leaves, elsewhere=lent.get(one.offset))
                for one in self._landings
            ]
            self._kernels[verify] = LandingKernels(landings, self._stream.device, verify=verify)
        return self._kernels[verify]


class DeviceDigest:
    """The digest of a bucket where it lies, and of what is lent in place of parts of it.

    Args:
        task: a task of a receiver's program.
        stream: where to launch.
    """

    def __init__(self, task: TargetTask, stream: LandingStream) -> None:
        segments = [landing.segment for landing in task.landings]
        self._parts = [Moved(offset=s.offset, nbytes=s.nbytes, moves=(), leaves=s.leaves) for s in segments]
        self._stream = stream
        self._kernels: BucketKernels | None = None

    def run(self, bucket: torch.Tensor) -> Launched:
        """Digest a whole bucket."""
        if self._kernels is None:
            self._kernels = BucketKernels(self._parts, self._stream.device)
        kernels = self._kernels
        return self._stream.launch(lambda limbs: kernels.run(bucket, None, limbs[0]), lambda limbs: read_digest(limbs[0]))


def _land(bucket: torch.Tensor, kernels: LandingKernels, limbs: torch.Tensor) -> None:
    land(bucket, kernels, limbs=limbs)


def follow(started: Signal[Launched], watch: Watch) -> Signal[int]:
    """Ends with the result of launched work when the device has done it."""
    whole: Signal[int] = Signal()

    def launched() -> None:
        if started.error is not None:
            whole.fail(started.error)
            return
        work = started.result
        done = watch.until(work.event.query)
        done.subscribe(lambda: _finish(work, done, whole))

    started.subscribe(launched)
    return whole


def _finish(work: Launched, done: Signal[None], whole: Signal[int]) -> None:
    try:
        done.poll()
        whole.set(work.result())
    except Exception as error:  # noqa: BLE001 - handed to whoever waits
        whole.fail(error)
