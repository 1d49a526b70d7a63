"""How a push lands on one rank of a target whose weights live on a device, by kernels (`syncline.stages.device_landing`).

As `landing`, mode by mode; but work is launched and then asked after, and what is lent (`Lending`) is read where it lies in
the source's own storage, not from a bucket. ``mapped`` is not possible: nothing is served from another process's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import torch

from syncline.scheduler.layout import Manifest
from syncline.scheduler.programs import TargetTask
from syncline.stages.completions import Signal
from syncline.stages.device_landing import ALIGNED, DeviceCopies, DeviceDigest, LandingStream
from syncline.stages.launched import Launched, both, failed, follow, nothing, then
from syncline.stages.transports.base import AHEAD, Lending
from syncline.stages.watch import Watch

from .errors import PlanError
from .landing import Buffers, LandingPath, PathBase, Received, Route
from .loader import InstallingAll, Landed
from .loader_thread import guarded
from .messages import Landing
from .placement import parted, parts_of

P = ParamSpec("P")

ON_DEVICE = frozenset({"cuda_ipc", "nccl"})
"""Transports that bring buckets to device memory."""


class _Ways(NamedTuple):
    """How a bucket gets into live parameters: what kernels copy there, and what the loader installs, with its digest."""

    copies: DeviceCopies | None
    installed: TargetTask | None
    digest: DeviceDigest | None


def landing_device(kind: str, manifest: Manifest, buffers: Buffers) -> torch.device | None:
    """Where kernels land what transport ``kind`` brings; None if it comes to CPU memory.

    Raises `PlanError` if the rank's weights are not all on one CUDA device.
    """
    if kind not in ON_DEVICE:
        return None
    exposed = {tensor.device for tensor in buffers or () if tensor is not None and tensor.numel()}
    devices = exposed or {torch.device(name) for name in manifest.buffers.devices}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise PlanError([f"rank {manifest.rank} has weights on {found}; transport {kind!r} needs all of them on one GPU"])
    return devices.pop()


def make_device_path(landing: Landing, route: Route, buffers: Buffers, stream: LandingStream | None = None) -> LandingPath:
    """The path for a landing mode, on a stream of its own. Raises `PlanError` if the mode cannot be had."""
    if route.device is None:
        raise ValueError("this route lands in CPU memory")
    stream = stream or LandingStream(route.device)
    if landing == "streamed":
        return StreamedOnDevice(route, buffers, stream)
    if landing == "staged":
        return StagedOnDevice(route, buffers, stream)
    raise PlanError(["landing 'mapped' needs shared memory; weights on a GPU take 'staged' or 'streamed'"])


class _OnDevice(PathBase, ABC):
    """What the modes share on a device."""

    def __init__(self, route: Route, buffers: Buffers, stream: LandingStream) -> None:
        super().__init__(route)
        self._lending = self._half if isinstance(self._half, Lending) else None
        self._stream = stream
        self._watch = Watch()
        shifts = {task.index: self._shift(task) for task in route.program.tasks}
        self._ways = {task.index: _ways(task, buffers, stream, shifts[task.index]) for task in route.program.tasks}

    async def linked(self) -> None:
        """Build and compile all launches: the first push must not wait for a compiler."""
        await self._submit(self._prepare)

    @abstractmethod
    def _prepare(self) -> None:
        """On a worker."""

    def _shift(self, task: TargetTask) -> int:
        """How many bytes after an aligned address the buckets of a task begin."""
        return 0

    async def settled(self) -> None:
        await super().settled()
        if self._lending is not None:
            await self._lending.settled()

    async def close(self) -> None:
        self._ways.clear()  # launches know addresses in the source's memory, which stays open as long as they do
        _ = self._watch.close()  # it goes on asking for launches under way: they hold what they use
        await super().close()

    def _launch(self, function: Callable[P, Launched], *args: P.args, **kwargs: P.kwargs) -> Signal[int]:
        """Launch on a worker; ends when the device has done it."""
        return self._followed(self._submit(function, *args, **kwargs))

    def _followed(self, started: Signal[Launched]) -> Signal[int]:
        whole = follow(started, self._watch)
        self._jobs.add(whole)
        whole.subscribe(lambda: self._jobs.discard(whole))
        return whole

    def _begin(self, version: int) -> None:
        """On the loader's thread. What is launched after it comes after what the loader has launched."""
        self._route.loader.loader.begin(version)
        self._stream.follow_caller()

    async def _loaded(self, load: Callable[[], Awaitable[Any]], version: int) -> None:
        loader = self._route.loader
        await loader.call(self._begin, version)
        await load()
        await loader.call(loader.loader.finish, version)

    def _by_loader(self, load: Callable[[], Launched], used: object) -> Launched:
        """On the loader's thread. What it launches there is a part of the work, also where it fails midway."""
        try:
            launched = load()
        except Exception as error:  # noqa: BLE001 - told when what was launched before it is done
            launched = failed(error)
        return both(launched, self._stream.behind_loader(used))

    def _install(self, task: TargetTask, bucket: torch.Tensor) -> Launched:
        guarded(self._route.loader.loader.install, parts_of(task, bucket))
        return nothing()


class StreamedOnDevice(_OnDevice):
    """Implements `LandingPath`: no spare memory, live parameters change while data comes."""

    def __init__(self, route: Route, buffers: Buffers, stream: LandingStream) -> None:
        super().__init__(route, buffers, stream)
        self._begun = False
        if self._lending is not None:
            self._lending.when_gone(self._forget)
            if all(ways.installed is None for ways in self._ways.values()):
                self._abreast = max(AHEAD, self._abreast)

    def _forget(self, owner: int) -> None:
        """Launches know addresses in the memory of source rank ``owner``, which stays mapped as long as they do."""
        for task in self._route.program.tasks:
            if task.owner == owner:
                self._ways.pop(task.index, None)

    async def begin(self, push_id: str, timeout_s: float) -> None:
        self._begun = False
        await super().begin(push_id, timeout_s)

    async def receive_all(self, version: int, writing: Callable[[], None]) -> Received:
        async def before() -> None:
            writing()
            await self._begin_loading(version)

        return await self._each_bucket(self._take, before)

    async def commit(self, version: int) -> None:
        if not self._begun:  # nothing had to be written
            await self._begin_loading(version)
        await self._route.loader.call(self._route.loader.loader.finish, version)

    async def _begin_loading(self, version: int) -> None:
        self._begun = True
        await self._route.loader.call(self._begin, version)

    def _prepare(self) -> None:
        for task in self._route.program.tasks:
            ways = self._ways.get(task.index)
            if ways is None:  # its source has gone again
                continue
            if ways.copies is not None:
                ways.copies.prepare(self._lent(task), verify=self._route.verify)
            if ways.digest is not None and self._route.verify:
                ways.digest.prepare()

    def _take(self, task: TargetTask, bucket: torch.Tensor) -> Signal[int]:
        self._half.check()  # a link that has ended since its bucket came has taken the way there with it
        ways, lent = self._ways[task.index], self._lent(task)
        if ways.installed is None:
            return self._launch(self._write, ways, bucket, lent)
        return self._followed(self._route.loader.call(self._write_and_install, ways, ways.installed, bucket, lent))

    def _lent(self, task: TargetTask) -> Mapping[int, torch.Tensor]:
        return {} if self._lending is None else self._lending.lent(task)

    def _write(self, ways: _Ways, bucket: torch.Tensor, lent: Mapping[int, torch.Tensor]) -> Launched:
        if ways.copies is None:
            return nothing()
        return ways.copies.run_and_digest(bucket, lent) if self._route.verify else ways.copies.run(bucket, lent)

    def _write_and_install(
        self, ways: _Ways, installed: TargetTask, bucket: torch.Tensor, lent: Mapping[int, torch.Tensor]
    ) -> Launched:
        """On the loader's thread, which gets all it installs in one piece of memory."""
        used: list[object] = [bucket, lent]

        def load() -> Launched:
            whole = bucket if not lent else _joined(installed, bucket, lent, self._stream.device)
            used.append(whole)
            digest = nothing()
            if self._route.verify and ways.digest is not None:
                self._stream.follow_caller()
                digest = ways.digest.run(whole)
            return then(digest, lambda: self._install(installed, whole))

        return then(self._write(ways, bucket, lent), lambda: self._by_loader(load, used))


class StagedOnDevice(_OnDevice):
    """Implements `LandingPath`: copied into live parameters at commit; their addresses never change."""

    def __init__(self, route: Route, buffers: Buffers, stream: LandingStream) -> None:
        super().__init__(route, buffers, stream)
        self._digests = {task.index: DeviceDigest(task, stream, shift=self._shift(task)) for task in route.program.tasks}
        self._buckets: dict[int, torch.Tensor] = {}
        if self._lending is not None:
            self._abreast = max(AHEAD, self._abreast)

    async def begin(self, push_id: str, timeout_s: float) -> None:
        self._buckets = {}
        await super().begin(push_id, timeout_s)

    async def receive_all(self, version: int, writing: Callable[[], None]) -> Received:
        return await self._each_bucket(self._keep)

    async def end(self, *, committed: bool) -> None:
        self._buckets = {}
        await super().end(committed=committed)

    async def commit(self, version: int) -> None:
        await self._loaded(self._copy_and_install, version)

    def _shift(self, task: TargetTask) -> int:
        """The parts of a tensor lie side by side in landing memory, whatever the sizes of their buckets."""
        return task.landing_offset % ALIGNED

    def _prepare(self) -> None:
        for ways in self._ways.values():
            if ways.copies is not None:
                ways.copies.prepare({}, verify=False)
        if self._route.verify:
            for digest in self._digests.values():
                digest.prepare()

    def _keep(self, task: TargetTask, bucket: torch.Tensor) -> Signal[int]:
        self._buckets[task.index] = bucket
        if not self._route.verify:
            return self._launch(nothing)
        return self._launch(self._digests[task.index].run, bucket)

    async def _copy_and_install(self) -> None:
        copies = {index: ways.copies for index, ways in self._ways.items() if ways.copies is not None}
        copying = [self._launch(copy.run, self._buckets[index], {}) for index, copy in copies.items()]
        for signal in copying:
            await signal
        installed = [ways.installed for ways in self._ways.values() if ways.installed is not None]
        loader = self._route.loader
        if isinstance(loader.loader, InstallingAll):
            parts = [part for task in installed for part in parts_of(task, self._buckets[task.index])]
            await self._followed(loader.call(self._by_loader, partial(self._install_all, loader.loader, parts), parts))
            return
        for task in installed:
            bucket = self._buckets[task.index]
            await self._followed(loader.call(self._by_loader, partial(self._install, task, bucket), bucket))

    def _install_all(self, loader: InstallingAll, parts: Sequence[Landed]) -> Launched:
        guarded(loader.install_all, parts)
        return nothing()


def _ways(task: TargetTask, buffers: Buffers, stream: LandingStream, shift: int) -> _Ways:
    if buffers is None:
        return _Ways(None, task, DeviceDigest(task, stream, shift=shift))
    hidden = frozenset(index for index, tensor in enumerate(buffers) if tensor is None)
    exposed = [torch.empty(0) if tensor is None else tensor for tensor in buffers]
    copied, installed = parted(task, hidden)
    return _Ways(
        None if copied is None else DeviceCopies(copied, exposed, stream, shift=shift),
        installed,
        None if installed is None else DeviceDigest(installed, stream, shift=shift),
    )


def _joined(task: TargetTask, bucket: torch.Tensor, lent: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """A bucket with what is lent in its place, for a loader that takes memory in one piece: on ``device``, the receiver's."""
    whole = torch.empty(task.nbytes, dtype=torch.uint8, device=device)
    for landing in task.landings:
        at, nbytes = landing.segment.offset, landing.segment.nbytes
        if nbytes:
            whole[at : at + nbytes].copy_(lent[at] if at in lent else bucket[at : at + nbytes])
    return whole
