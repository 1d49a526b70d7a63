"""How a push lands on one rank of a target, in each landing mode, over any transport's receiving half.

=========== ============================================ =========================================================
mode        while data comes (`LandingPath.receive_all`) at commit, under pause (`LandingPath.commit`)
=========== ============================================ =========================================================
streamed    each bucket into live parameters, several at derived content
            once; digest read back from there
staged      digest of landing memory                     landing memory into live parameters; derived content
mapped      digest of landing memory                     parameters pointed at landing memory; derived content
=========== ============================================ =========================================================

What has no live memory that is exposed goes through `Loader.install`; then the digest is that of the landed copy.

Copies and digests run on worker threads, calls of the loader on a thread of its own, one at a time. Work that runs on a
thread cannot be cancelled: after a failure `settled` says whether any is left.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from syncline.scheduler.layout import Manifest
from syncline.scheduler.programs import TargetProgram, TargetTask
from syncline.stages.assembly import LandingCopies
from syncline.stages.completions import Signal
from syncline.stages.copies import torch_dtype
from syncline.stages.digest import add_digests, digest_bucket
from syncline.stages.transports.base import Lease, Placing, ReceivingHalf
from syncline.stages.workers import Workers

from .errors import PlanError, SynclineError, TransportError
from .loader import InstallingAll, Landed
from .loader_thread import LoaderThread, ended
from .messages import Landing
from .placement import WholePiece, balanced, parted, parts_of, whole_pieces

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Received:
    """What has landed: digest over all of it (None where digests are off), and the number of buckets.

    ``starved_s``: seconds in which nothing had come that could have been worked on.
    """

    digest: int | None
    buckets: int
    starved_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a path is made of.

    Attributes:
        program: what this rank takes; checked against ``manifest``.
        manifest: of this rank's loader.
        half: receiving half, linked by the path.
        loader: the loader's thread.
        workers: threads that copy and digest.
        verify: compute digests.
        device: where weights live, if kernels land them there (`syncline.engine.landing_device`); None for CPU memory.
    """

    program: TargetProgram
    manifest: Manifest
    half: ReceivingHalf
    loader: LoaderThread
    workers: Workers
    verify: bool
    device: torch.device | None = None


Buffers = Sequence[torch.Tensor | None] | None
"""As from `Loader.buffers`."""


class _Ways(NamedTuple):
    """How a bucket gets into live parameters: what is copied there, and what the loader installs. None: nothing goes so."""

    copies: LandingCopies | None
    installed: TargetTask | None


def _ways(task: TargetTask, buffers: Buffers) -> _Ways:
    if buffers is None:
        return _Ways(None, task)
    hidden = frozenset(index for index, tensor in enumerate(buffers) if tensor is None)
    exposed = [torch.empty(0) if tensor is None else tensor for tensor in buffers]
    copied, installed = parted(task, hidden)
    return _Ways(None if copied is None else LandingCopies(copied, exposed), installed)


class LandingPath(Protocol):
    """One landing mode on one rank, linked up; used push after push."""

    @property
    def landing_bytes(self) -> int:
        """Spare memory of this process that it holds for landing."""
        ...

    @property
    def nbytes(self) -> int:
        """Of all buckets of a push."""
        ...

    async def linked(self) -> None:
        """The links stand: build what can be built before a push comes."""
        ...

    async def begin(self, push_id: str, timeout_s: float) -> None:
        """Get ready to receive a push."""
        ...

    async def receive_all(self, version: int, writing: Callable[[], None]) -> Received:
        """Take every bucket, in plan order. ``writing`` is called before the first byte reaches live parameters."""
        ...

    async def commit(self, version: int) -> None:
        """Make what was received live. Under pause, after everything has been verified."""
        ...

    async def end(self, *, committed: bool) -> None:
        """The push is over."""
        ...

    async def settled(self) -> None:
        """Wait until no thread works for this path any more."""
        ...

    def take_lease(self) -> Lease | None:
        """What keeps live parameters valid (``mapped``, after `commit`); to be released after the next commit."""
        ...

    async def close(self) -> None: ...


def make_path(landing: Landing, route: Route, buffers: Buffers) -> LandingPath:
    """The path for a landing mode. ``buffers`` as from `Loader.buffers`. Raises `PlanError` if the mode cannot be had."""
    if landing == "streamed":
        return Streamed(route, buffers)
    if landing == "staged":
        return Staged(route, buffers)
    return Mapped(route)


class PathBase:
    """What the modes share."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._half = route.half
        self._jobs: set[Signal[Any]] = set()
        self._starved_s = 0.0
        self._abreast = route.workers.count

    @property
    def landing_bytes(self) -> int:
        return self._half.landing_bytes

    @property
    def nbytes(self) -> int:
        return sum(task.nbytes for task in self._route.program.tasks)

    async def linked(self) -> None:
        """Nothing to build here."""

    async def begin(self, push_id: str, timeout_s: float) -> None:
        self._starved_s = 0.0
        await self._half.begin(push_id, timeout_s=timeout_s)

    async def end(self, *, committed: bool) -> None:
        await self._half.end(committed)

    async def settled(self) -> None:
        while self._jobs:
            await ended(next(iter(self._jobs)))
        await self._route.loader.until_idle()

    def take_lease(self) -> Lease | None:
        return None

    async def close(self) -> None:
        await self._half.close()

    def _submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Signal[T]:
        signal = self._route.workers.submit(function, *args, **kwargs)
        self._jobs.add(signal)
        signal.subscribe(lambda: self._jobs.discard(signal))
        return signal

    async def _each_bucket(
        self,
        work: Callable[[TargetTask, torch.Tensor], Signal[int]],
        before: Callable[[], Awaitable[None]] | None = None,
        failures: Sequence[Exception] = (),
    ) -> Received:
        """Run ``work`` on every bucket in plan order, ``_abreast`` side by side; adds the digests up.

        ``before`` runs once the first bucket is there. After a failure of ours (or ``failures`` that were there before) the
        rest is taken and thrown away: a source that could not get rid of it would see a broken target where there is an error
        to be told.
        """
        running: deque[Signal[None]] = deque()
        parts: list[int] = []
        failures = list(failures)
        over = False

        def retire(task: TargetTask, signal: Signal[int], retired: Signal[None]) -> None:
            # At once, not when the next bucket comes: the source may wait for this one before it sends that.
            if over:
                return
            try:
                self._half.release(task)  # raises if the bucket may have been torn meanwhile
                parts.append(signal.result)
            except Exception as error:  # noqa: BLE001 - raised when all buckets have been taken
                failures.append(error)
            retired.set()

        try:
            for task in self._route.program.tasks:
                bucket = await self._starving(self._bucket(task, failures))
                if before is not None and not failures:
                    await collect(before(), failures)
                    before = None
                if failures:
                    del bucket
                    self._half.release(task)
                    continue
                signal, retired = work(task, bucket), Signal[None]()
                del bucket  # it may lie in a source's memory, which errors must not keep open with this frame
                signal.subscribe(partial(retire, task, signal, retired))
                running.append(retired)
                while len(running) >= self._abreast:
                    await running.popleft()
            while running:
                await running.popleft()
        finally:
            over = True
        if failures:
            failure = failures[0]
            failures.clear()  # else what it went through here would hold it, and with it whatever lies in its other frames
            try:
                raise failure
            finally:
                del failure
        self._half.check()
        digest = add_digests(parts) if self._route.verify else None
        return Received(digest=digest, buckets=len(parts), starved_s=self._starved_s)

    async def _starving(self, coming: Awaitable[T]) -> T:
        """Wait for what the source sends, and count the seconds."""
        began = time.perf_counter()
        try:
            return await coming
        finally:
            self._starved_s += time.perf_counter() - began

    async def _bucket(self, task: TargetTask, failures: list[Exception]) -> torch.Tensor:
        """The bucket of a task. If the link is whole and something else fails, it comes all the same, to be thrown away."""
        try:
            return await self._half.receive(task)
        except TransportError as error:
            raise (failures[0] if failures else error) from None
        except Exception as error:  # noqa: BLE001 - raised when all buckets have been taken
            failures.append(error)
            return await self._half.receive(task)

    def _digest(self, task: TargetTask, bucket: torch.Tensor) -> int:
        return digest_bucket(bucket, (landing.segment for landing in task.landings)) if self._route.verify else 0

    async def _loaded(self, load: Callable[[], Awaitable[Any]], version: int) -> None:
        """``begin``, the loading itself, ``finish``."""
        loader = self._route.loader
        await loader.call(loader.loader.begin, version)
        await load()
        await loader.call(loader.loader.finish, version)


class Streamed(PathBase):
    """Implements `LandingPath`: no spare memory, live parameters change while data comes."""

    def __init__(self, route: Route, buffers: Buffers) -> None:
        super().__init__(route)
        self._ways = {task.index: _ways(task, buffers) for task in route.program.tasks}
        self._begun = False
        self._placing = self._expose(route.half) if isinstance(route.half, Placing) else None

    async def begin(self, push_id: str, timeout_s: float) -> None:
        self._begun = False
        await super().begin(push_id, timeout_s)

    async def receive_all(self, version: int, writing: Callable[[], None]) -> Received:
        async def before() -> None:
            writing()
            await self._begin_loading(version)

        if self._placing is None:
            return await self._each_bucket(self._take, before)
        failures: list[Exception] = []
        await self._starving(self._placing.first_bytes())
        await collect(before(), failures)
        self._placing.open_places(live=not failures)
        return await self._each_bucket(self._take, failures=failures)

    async def settled(self) -> None:
        await super().settled()
        if self._placing is not None:
            await self._placing.settled()

    def _expose(self, half: Placing) -> Placing | None:
        """Let large segments be received straight into live memory. Returns ``half`` if there are any."""
        copies = {index: ways.copies for index, ways in self._ways.items() if ways.copies is not None}
        placed: defaultdict[int, set[int]] = defaultdict(set)
        for index, offset in half.expose({index: copy.places for index, copy in copies.items()}):
            placed[index].add(offset)
        for index, offsets in placed.items():
            copies[index].leave(offsets)
        return half if placed else None

    async def commit(self, version: int) -> None:
        if not self._begun:  # nothing had to be written
            await self._begin_loading(version)
        loader = self._route.loader
        await loader.call(loader.loader.finish, version)

    async def _begin_loading(self, version: int) -> None:
        self._begun = True
        await self._route.loader.call(self._route.loader.loader.begin, version)

    def _take(self, task: TargetTask, bucket: torch.Tensor) -> Signal[int]:
        ways = self._ways[task.index]
        if ways.installed is None:
            if not self._route.verify and (ways.copies is None or ways.copies.idle):
                return _done(0)
            return self._submit(self._write, ways, bucket)
        return self._route.loader.call(self._install, ways, ways.installed, bucket)

    def _write(self, ways: _Ways, bucket: torch.Tensor) -> int:
        if ways.copies is None:
            return 0
        if self._route.verify:
            return ways.copies.run_and_digest(bucket)
        ways.copies.run(bucket)
        return 0

    def _install(self, ways: _Ways, installed: TargetTask, bucket: torch.Tensor) -> int:
        digest = self._digest(installed, bucket)
        self._route.loader.loader.install(parts_of(installed, bucket))
        return add_digests((digest, self._write(ways, bucket)))


class _Landed(PathBase):
    """Implements the receiving side of ``staged`` and ``mapped``: a whole push stays in landing memory until commit."""

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self._buckets: dict[int, torch.Tensor] = {}

    async def begin(self, push_id: str, timeout_s: float) -> None:
        self._buckets = {}
        await super().begin(push_id, timeout_s)

    async def receive_all(self, version: int, writing: Callable[[], None]) -> Received:
        return await self._each_bucket(self._keep)

    async def end(self, *, committed: bool) -> None:
        self._buckets = {}
        await super().end(committed=committed)

    def _keep(self, task: TargetTask, bucket: torch.Tensor) -> Signal[int]:
        self._buckets[task.index] = bucket
        return self._submit(self._digest, task, bucket)


class Staged(_Landed):
    """Implements `LandingPath`: copied into live parameters at commit; their addresses never change."""

    def __init__(self, route: Route, buffers: Buffers) -> None:
        super().__init__(route)
        ways = {task.index: _ways(task, buffers) for task in route.program.tasks}
        self._copies = {index: way.copies for index, way in ways.items() if way.copies is not None}
        self._installed = [way.installed for way in ways.values() if way.installed is not None]

    async def commit(self, version: int) -> None:
        await self._loaded(self._copy_and_install, version)

    async def _copy_and_install(self) -> None:
        tasks = [task for task in self._route.program.tasks if task.index in self._copies]
        for signal in [self._submit(self._copy, share) for share in balanced(tasks, self._route.workers.count)]:
            await signal
        loader = self._route.loader
        if isinstance(loader.loader, InstallingAll):
            await loader.call(loader.loader.install_all, self._all_parts())
            return
        for task in self._installed:
            await loader.call(self._install, task, self._buckets[task.index])

    def _all_parts(self) -> list[Landed]:
        return [part for task in self._installed for part in parts_of(task, self._buckets[task.index])]

    def _copy(self, tasks: Iterable[TargetTask]) -> None:
        for task in tasks:
            self._copies[task.index].run(self._buckets[task.index])

    def _install(self, task: TargetTask, bucket: torch.Tensor) -> None:
        self._route.loader.loader.install(parts_of(task, bucket))


class Mapped(_Landed):
    """Implements `LandingPath`: parameters are pointed at landing memory at commit.

    Raises:
        PlanError: the loader's parameters may not move, the transport has no memory to share, or the plan scatters a piece.
    """

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        problems = []
        if not route.manifest.movable:
            problems.append("landing 'mapped' needs a loader whose parameters may move (for example movable=True)")
        if not route.half.persistent:
            problems.append("landing 'mapped' needs a transport with landing memory, such as shared memory")
        self._pieces = whole_pieces(route.program, route.manifest, problems)
        if problems:
            raise PlanError(problems)
        self._lease: Lease | None = None

    async def commit(self, version: int) -> None:
        await self._loaded(self._rebind, version)

    def take_lease(self) -> Lease | None:
        lease, self._lease = self._lease, None
        return lease

    async def _rebind(self) -> None:
        self._lease = self._half.take_lease()
        await self._route.loader.call(self._rebind_all)

    def _rebind_all(self) -> None:
        self._route.loader.loader.rebind([self._landed(piece) for piece in self._pieces])

    def _landed(self, whole: WholePiece) -> Landed:
        piece = self._route.manifest.pieces[whole.piece]
        shape, dtype = piece.box.shape, torch_dtype(whole.dtype)
        if whole.first is None:
            return Landed(whole.piece, piece.box, torch.empty(shape, dtype=dtype))
        start = self._half.offset_of(whole.first)
        memory = self._half.space(whole.owner)[start : start + whole.nbytes]
        return Landed(whole.piece, piece.box, memory.view(dtype).view(shape))


def _done(digest: int) -> Signal[int]:
    signal: Signal[int] = Signal()
    signal.set(digest)
    return signal


async def collect(work: Awaitable[None], failures: list[Exception]) -> None:
    """Wait for ``work``; an error of ours goes to ``failures``."""
    try:
        await work
    except SynclineError as error:
        failures.append(error)
