"""What a source rank needs besides to assemble buckets on a device: recipes, page-locked memory, streams, runtimes."""

from __future__ import annotations

import asyncio
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
from syncline.stages.watch import Watch
from syncline.stages.workers import Workers

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
    def of(cls, recipes: Collection[DeviceRecipe], watermark: int, in_place: Collection[ReceiverId]) -> Shares:
        """``in_place``: receivers for which buckets are assembled in the ring."""
        places = frozenset(in_place)
        rings, privates = [0], [0]
        for recipe in recipes:
            ringed = not places.isdisjoint(recipe.task.receivers)
            rings.append(0 if not ringed or recipe.lent_whole else aligned(recipe.task.nbytes))
            privates.append(recipe.layout.without_bucket if ringed else recipe.layout.with_bucket)
        ring, private = sum(rings), sum(privates)
        share = watermark * ring // (ring + private) if ring + private > watermark else ring
        ring = max(share, *rings)
        return cls(ring=ring, private=max(min(watermark - ring, private), *privates))


@dataclass(kw_only=True)
class DeviceRig:
    """Made by `resolve`, on a thread; its streams by `start`, on the engine's loop."""

    device: Device
    recipes: Mapping[int, DeviceRecipe]
    locks: PageLocks
    shares: Shares
    pinned: torch.Tensor
    in_ring: frozenset[ReceiverId] = frozenset()
    watch: Watch = field(default_factory=Watch)
    ready: Lane | None = None
    _letting_go: asyncio.Task[None] | None = None

    @classmethod
    def resolve(
        cls, program: SourceProgram, device: Device, *, held: Held, kinds: Mapping[int, str], config: TransferConfig
    ) -> DeviceRig:
        """Resolve the program against the rank's memory on the host and on ``device``."""

        def lends(task: SourceTask) -> bool:
            return all(kinds[receiver.target] in LENDING for receiver in task.receivers)

        locks = PageLocks(device)
        bench = Bench(
            buffers=held.buffers, host=host_buffers(held.manifest), device=device.device, locks=locks, lends=lends,
            verify=config.verify,
        )  # fmt: skip
        recipes = build_device_recipes(program, bench)
        receivers = {receiver for task in program.tasks for receiver in task.receivers if kinds[receiver.target] == "cuda_ipc"}
        shares = Shares.of(list(recipes.values()), config.watermark, receivers)
        pinned = device.pinned(pool_nbytes(recipes))
        return cls(
            device=device, recipes=recipes, locks=locks, shares=shares, pinned=pinned, in_ring=frozenset(receivers)
        )  # fmt: skip

    @property
    def lent(self) -> dict[int, Mapping[int, torch.Tensor]]:
        """Tasks of which segments are sent from where they lie."""
        return {index: recipe.lent for index, recipe in self.recipes.items() if recipe.lent}

    @property
    def not_assembled(self) -> dict[int, int]:
        """Tasks that receivers copy as a whole from where they lie, and the temporary bytes that they need all the same."""
        return {
            index: recipe.layout.without_bucket
            for index, recipe in self.recipes.items()
            if recipe.lent_whole and self.in_ring.issuperset(recipe.task.receivers)
        }

    def stages(
        self, memory: TaskMemory, workers: Workers, scope: TaskScope, config: TransferConfig
    ) -> tuple[DeviceH2DStage, DevicePrepareStage]:
        """The stages, each with a stream of its own."""
        self.ready = Lane(self.device, self.watch)
        h2d = DeviceH2DStage(
            recipes=self.recipes, memory=memory, workers=workers, scope=scope, lane=Lane(self.device, self.watch),
            pool=BufferPool(self.pinned),
        )  # fmt: skip
        prepare = DevicePrepareStage(
            recipes=self.recipes, memory=memory, workers=workers, scope=scope, lane=Lane(self.device, self.watch),
            communicator=None, verify=config.verify, trace=config.trace,
        )  # fmt: skip
        return h2d, prepare

    async def source_written(self) -> None:
        """Wait until the device has done what the trainer's thread has given it so far: then its weights may be read."""
        assert self.ready is not None
        await self.watch.until(self.ready.slots.record(self.device.current_stream()).poll)

    async def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Let go of page-locked memory: when the device has done what is under way. Waits for at most ``timeout_s`` seconds."""
        self._letting_go = self._letting_go or asyncio.create_task(self._let_go(self.watch.close()))
        await asyncio.wait({self._letting_go}, timeout=timeout_s)

    async def _let_go(self, idle: Signal[None]) -> None:
        await idle
        self.pinned = torch.empty(0, dtype=torch.uint8)
        await asyncio.to_thread(self.locks.close)


def after_caller(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """``work`` for another thread: what the calling thread has given its CUDA stream comes before what ``work`` finds there.

    Nothing waits but the other thread's stream, on the device; where CUDA is not in use, this is ``work`` itself.
    """
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()  # of this thread: the other one may have another
    written = torch.cuda.Event()
    written.record()

    async def ordered() -> T:
        torch.cuda.current_stream(device).wait_event(written)
        return await work

    return ordered()
