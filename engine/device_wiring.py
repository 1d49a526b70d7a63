"""What a source rank needs besides to assemble buckets on a device: recipes, page-locked memory, streams, runtimes."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from syncline.scheduler.layout import Manifest
from syncline.scheduler.programs import ReceiverId, SourceProgram, SourceTask
from syncline.stages.buffers import BufferPool, aligned
from syncline.stages.completions import Signal, TaskScope
from syncline.stages.device import Device
from syncline.stages.device_h2d import DeviceH2DStage, pool_nbytes
from syncline.stages.device_prepare import DevicePrepareStage
from syncline.stages.device_recipes import Bench, DeviceRecipe, build_device_recipes
from syncline.stages.lanes import Lane
from syncline.stages.page_locks import PageLocks
from syncline.stages.task_memory import TaskMemory
from syncline.stages.transports.cuda_ipc import RING_BUCKETS
from syncline.stages.watch import Watch
from syncline.stages.workers import Workers, call_in_thread

from .config import TransferConfig
from .devices import host_buffers
from .errors import PlanError
from .transports import LENDING

T = TypeVar("T")

_CLOSE_S = 2.0


class Held(NamedTuple):
    """What a source rank holds: its manifest, and its tensors in the order of the manifest's buffers."""

    manifest: Manifest
    buffers: Sequence[torch.Tensor]


def home_of(buffers: Sequence[torch.Tensor]) -> torch.device:
    """Where a rank assembles: where its own tensors are, or the calling thread's device if all of them are on the host.

    Raises:
        PlanError: they are on several devices.
    """
    found = sorted({tensor.device for tensor in buffers if tensor.device.type == "cuda"}, key=str)
    if len(found) > 1:
        raise PlanError([f"this rank holds tensors on {' and '.join(map(str, found))}: a rank has one GPU"])
    return found[0] if found else torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How device memory under the watermark is divided, in bytes: tasks' private memory, and the ring of CUDA IPC."""

    private: int
    ring: int

    @classmethod
    def of(
        cls, recipes: Collection[DeviceRecipe], watermark: int, in_place: Collection[ReceiverId], *, in_flight: int = 6
    ) -> Shares:
        """In proportion to what ``in_flight`` tasks need of each: few that are large count as much as they take up.

        Args:
            in_place: receivers for which buckets are assembled in the ring.
            in_flight: tasks that the stages may have at once.

        Raises:
            PlanError: the largest bucket and the most that a task needs beside it do not fit.
        """
        places = frozenset(in_place)
        rings, privates = [0], [0]
        for recipe in recipes:
            ringed = not places.isdisjoint(recipe.task.receivers)
            passes = ringed and recipe.layout.assembles and not recipe.lent_whole
            rings.append(aligned(recipe.task.nbytes) if passes else 0)
            privates.append(recipe.layout.without_bucket if ringed else recipe.layout.with_bucket)
        ring, private = min(sum(rings), RING_BUCKETS * max(rings)), sum(privates)
        if ring + private > watermark:
            most = [sum(heapq.nlargest(in_flight, sizes)) for sizes in (rings, privates)]
            ring = min(ring, watermark * most[0] // sum(most))
        ring = max(min(ring, watermark - max(privates)), *rings)
        private = max(min(watermark - ring, private), *privates)
        if ring + private > watermark:
            raise PlanError([_too_much(max(rings), max(privates), watermark)])
        return cls(ring=ring, private=private)


def _too_much(bucket: int, beside: int, watermark: int) -> str:
    return (
        f"buckets of up to {bucket} bytes and the {beside} bytes that tasks need beside them (for kernels, and for what is "
        f"gathered) do not fit into max_tmp_bytes, {watermark}, at once: lower bucket_bytes or raise max_tmp_bytes"
    )


@dataclass(kw_only=True)
class DeviceRig:
    """Made by `resolve`, on a thread; its streams by `start`, on the engine's loop."""

    device: Device
    recipes: Mapping[int, DeviceRecipe]
    locks: PageLocks
    shares: Shares
    pinned: torch.Tensor
    private: torch.Tensor
    in_ring: frozenset[ReceiverId] = frozenset()
    watch: Watch = field(default_factory=Watch)
    ready: Lane | None = None
    pool: BufferPool | None = None
    _letting_go: asyncio.Task[None] | None = None

    @classmethod
    def resolve(
        cls, program: SourceProgram, device: Device, *, held: Held, kinds: Mapping[int, str], config: TransferConfig
    ) -> DeviceRig:
        """Resolve the program against the rank's memory on the host and on ``device``."""

        def lends(task: SourceTask) -> bool:
            return all(kinds[receiver.target] in LENDING for receiver in task.receivers)

        locks = PageLocks(device)
        try:
            bench = Bench(
                buffers=held.buffers, host=host_buffers(held.manifest), device=device.device, locks=locks, lends=lends,
                verify=config.verify,
            )  # fmt: skip
            recipes = build_device_recipes(program, bench)
            receivers = {r for task in program.tasks for r in task.receivers if kinds[r.target] == "cuda_ipc"}
            in_flight = config.h2d_concurrency + config.prepare_concurrency + config.send_concurrency
            shares = Shares.of(list(recipes.values()), config.watermark, receivers, in_flight=in_flight)
            pinned = device.pinned(pool_nbytes(recipes))
            private = device.empty(aligned(shares.private))
        except BaseException:
            locks.close()  # a lock that outlives its memory is one on whatever comes to lie there
            raise
        return cls(
            device=device, recipes=recipes, locks=locks, shares=shares, pinned=pinned, private=private,
            in_ring=frozenset(receivers),
        )  # fmt: skip

    @property
    def lent(self) -> dict[int, Mapping[int, torch.Tensor]]:
        """Tasks of which segments are sent from where they lie."""
        return {index: recipe.lent for index, recipe in self.recipes.items() if recipe.lent}

    @property
    def tmp_nbytes(self) -> dict[int, int]:
        """Temporary bytes of each task: what its kernels need too, and no bucket if receivers copy all of it where it lies."""

        def held(recipe: DeviceRecipe) -> int:
            nothing = recipe.lent_whole and self.in_ring.issuperset(recipe.task.receivers)
            return recipe.layout.without_bucket if nothing else recipe.layout.with_bucket

        return {index: held(recipe) for index, recipe in self.recipes.items()}

    def stages(
        self, memory: TaskMemory, workers: Workers, scope: TaskScope, config: TransferConfig
    ) -> tuple[DeviceH2DStage, DevicePrepareStage]:
        """The stages, each with a stream of its own."""
        self.ready = Lane(self.device, self.watch)
        self.pool = BufferPool(self.pinned)
        h2d = DeviceH2DStage(
            recipes=self.recipes, memory=memory, workers=workers, scope=scope, lane=Lane(self.device, self.watch),
            pool=self.pool,
        )  # fmt: skip
        prepare = DevicePrepareStage(
            recipes=self.recipes, memory=memory, workers=workers, scope=scope, lane=Lane(self.device, self.watch),
            communicator=None, verify=config.verify, trace=config.trace,
        )  # fmt: skip
        return h2d, prepare

    async def source_written(self, timeout_s: float) -> None:
        """Wait until the device has done what the trainer's thread has given it so far: then its weights may be read.

        Raises:
            TimeoutError: it had not done that within ``timeout_s``.
        """
        assert self.ready is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self.watch.until(self.ready.slots.record(self.device.current_stream()).poll)
        except TimeoutError:
            raise TimeoutError("the device had not yet done what the trainer gave it before the push") from None

    async def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Let go of page-locked memory: when the device has done what is under way. Waits for at most ``timeout_s`` seconds."""
        self._letting_go = self._letting_go or asyncio.create_task(self._let_go(self.watch.close()))
        await asyncio.wait({self._letting_go}, timeout=timeout_s)

    async def _let_go(self, idle: Signal[None]) -> None:
        await idle
        if self.pool is not None:
            self.pool.close()
        self.pinned = self.private = torch.empty(0, dtype=torch.uint8)
        await call_in_thread(self.locks.close, name="syncline-unlock")


def after_caller(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """``work`` for a thread of the engine's own, as if it ran on the calling one: on its device, after what it has launched.

    Nothing waits but the other thread's stream, on the device; where CUDA is not in use, this is ``work`` itself.
    """
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()  # one of each thread: weights on the host are assembled on the caller's
    written = torch.cuda.Event()
    written.record()

    async def ordered() -> T:
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).wait_event(written)
        return await work

    return ordered()
