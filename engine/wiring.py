"""One rank's plan, wired up: its program, its stages, its links. Lives as long as the plan does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from syncline.scheduler.driver import Driver, Limits, TaskSpec
from syncline.scheduler.events import StageName
from syncline.scheduler.layout import Manifest
from syncline.scheduler.outcome import Moments
from syncline.scheduler.plan import Plan
from syncline.scheduler.programs import ReceiverId, SourceProgram, SourceTask
from syncline.stages.barrier import GroupBarrier
from syncline.stages.buffers import BufferPool
from syncline.stages.closing import uninterrupted
from syncline.stages.communicator import Communicator, Rendezvous
from syncline.stages.completions import Signal, TaskScope
from syncline.stages.device import CudaDevice
from syncline.stages.device_h2d import DeviceH2DStage
from syncline.stages.h2d import H2DStage
from syncline.stages.nccl_communicator import NcclCommunicator
from syncline.stages.prepare import PrepareStage
from syncline.stages.recipes import Recipe, build_recipes
from syncline.stages.send import SendStage
from syncline.stages.task_memory import TaskMemory, private_capacity
from syncline.stages.transports.cuda_ipc import Lent
from syncline.stages.transports.nccl import GATHER, plan_order
from syncline.stages.workers import Errand, Workers, call_in_thread

from .config import TransferConfig
from .device_wiring import DeviceRig, Held, home_of
from .devices import on_device
from .errors import SynclineError, TransportError, wire_text
from .ranges import Ranges, opener
from .source import Source
from .steps import CONTENT
from .trace_log import TaskColumns, TaskRow
from .transports import LENDING, Senders, in_place, transport_kinds

_SETTLE_S = 5.0
"""How long abandoned work may take to end before the next push gives up on it."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A plan resolved against one rank's memory (see `Wiring.make`).

    Attributes:
        program: what this rank does.
        kinds: which transport serves each target.
        receivers: the ranks of each target.
        recipes: the program's copies and messages as addresses.
        pool: private temporary memory, touched.
        columns: the program's tasks for the trace and for observers.
        device: where buckets are assembled; None for CPU memory.
        rig: what is needed to assemble them there; then there are no ``recipes``.
    """

    program: SourceProgram
    kinds: Mapping[int, str]
    receivers: Sequence[Sequence[ReceiverId]]
    recipes: Mapping[int, Recipe]
    pool: BufferPool
    columns: TaskColumns
    device: torch.device | None = None
    rig: DeviceRig | None = None


class Wiring:
    """Everything that one rank needs to run pushes of one plan. Made by `make`, on the engine's loop."""

    def __init__(self, plan: Plan, config: TransferConfig, resolved: Resolved, workers: Workers, ranges: Ranges | None) -> None:
        self.plan = plan
        self.config = config
        self.push_id = ""
        self.kinds = resolved.kinds
        self.task_columns = resolved.columns
        self.program = resolved.program
        self.receivers = resolved.receivers
        self._rank, self._world_size = resolved.program.rank, resolved.program.world_size
        self._tasks: dict[int, SourceTask] = {task.index: task for task in self.program.tasks}
        self._specs: dict[frozenset[int], tuple[TaskSpec, ...]] = {}
        self._scope = TaskScope()
        self._workers = workers
        self._rendezvous: Rendezvous | None = None
        self._communicator: Communicator | None = None
        self._device = resolved.device
        self._nccl: NcclCommunicator | None = None
        self._on_lost: Callable[[int, SynclineError], None] = lambda _target, _error: None
        self._dropped: set[int] = set()
        self._aborting: Signal[None] | None = None
        self._rig = rig = resolved.rig
        lent: Lent = _lent(resolved.recipes, self.kinds) if rig is None else rig.lent
        made = Senders(
            set(self.kinds.values()), program=self.program, config=config, workers=self._workers, on_lost=self._receiver_lost,
            device=resolved.device, lent=lent, gather=resolved.device is not None and self._world_size > 1,
            ring_nbytes=None if rig is None else rig.shares.ring,
        )  # fmt: skip
        self._senders, self._issuer = made.by_kind, made.issuer
        self._routes = routes = {r: self._senders[self.kinds[t]] for t, ranks in enumerate(self.receivers) for r in ranks}
        self._memory = TaskMemory(resolved.pool, routes)
        self._lends = frozenset(lent)
        self._tmp_nbytes = {} if rig is None else rig.tmp_nbytes
        self._h2d, self._prepare = self._make_stages(resolved, frozenset(lent))
        self._send = SendStage(
            tasks=self._tasks, memory=self._memory, routes=routes, on_receiver_error=self._receiver_lost, lent=lent
        )
        self._barrier = GroupBarrier(None)
        self.driver = Driver(
            stages={"h2d": self._h2d, "prepare": self._prepare, "send": self._send},
            barrier=self._barrier,
            limits=Limits(
                max_tmp_bytes=config.watermark,
                h2d=config.h2d_concurrency,
                prepare=config.prepare_concurrency,
                send=config.send_concurrency,
            ),
            release=self._memory.release,
            drop_target=lambda target, _at_task: self.drop_targets([target]),
            poll_interval_s=config.poll_interval_s,
            open_range=None if ranges is None else opener(ranges),
        )

    @classmethod
    async def make(
        cls, source: Source, plan: Plan, sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]],
        config: TransferConfig, *, ranges: Ranges | None = None,
    ) -> Wiring:  # fmt: skip
        """Resolve the plan against the source's memory and set temporary memory aside (off the loop: it is touched here)."""
        buffers = list(source.buffers())
        kinds = transport_kinds(sources, targets, config)
        receivers = [[ReceiverId(t, rank) for rank in range(len(ranks))] for t, ranks in enumerate(targets)]
        placed = [receiver for target in in_place(kinds) for receiver in receivers[target]]
        held, there = Held(sources[source.rank], buffers), on_device(targets)
        home = home_of(buffers) if there else torch.device("cpu")  # here: the current device is one of a thread

        def resolve() -> Resolved:
            program = plan.source_program(source.rank)
            if there:
                device = CudaDevice(home)
                with device.on(device.stream()):  # not on the default one, on which whatever the trainer waits for is ahead
                    rig = DeviceRig.resolve(program, device, held=held, kinds=kinds, config=config)
                needs = rig.tmp_nbytes
                return Resolved(
                    program=program, kinds=kinds, receivers=receivers, recipes={}, rig=rig, device=device.device,
                    pool=BufferPool(rig.private),
                    columns=TaskColumns.of([_row(task, needs.get(task.index, task.tmp_bytes)) for task in program.tasks]),
                )  # fmt: skip
            recipes = build_recipes(program, buffers, _file_buffers(sources[source.rank]))
            layouts = [(recipe.task, recipe.layout) for recipe in recipes.values()]
            pool = BufferPool.private(private_capacity(layouts, config.watermark, in_place=placed))
            columns = TaskColumns.of([_row(task, task.tmp_bytes) for task in program.tasks])
            return Resolved(
                program=program, kinds=kinds, receivers=receivers, recipes=recipes, pool=pool, columns=columns
            )  # fmt: skip

        workers = Workers(config.workers)
        resolving = Errand(resolve, _unmake, name="syncline-resolve")
        try:
            return cls(plan, config, await resolving.result, workers, ranges)
        except BaseException:
            workers.close(0.0)
            await uninterrupted(_ended(resolving.give_up(), _SETTLE_S))
            raise

    def _make_stages(self, resolved: Resolved, lent: Collection[int]) -> tuple[H2DStage | DeviceH2DStage, PrepareStage]:
        if resolved.rig is not None:
            return resolved.rig.stages(self._memory, self._workers, self._scope, self.config)
        h2d = H2DStage(recipes=resolved.recipes, memory=self._memory, workers=self._workers, scope=self._scope)
        prepare = PrepareStage(
            recipes=resolved.recipes, memory=self._memory, workers=self._workers, scope=self._scope, communicator=None,
            verify=self.config.verify, lends=lent, trace=self.config.trace,
        )  # fmt: skip
        return h2d, prepare

    # ------------------------------------------------------------------------------------------------------- linking

    async def regroup(self, name: str, endpoint: str, rendezvous: Rendezvous | None, *, timeout_s: float) -> None:
        """Make the communicator among the source ranks (anew). Collective over them."""
        old, self._communicator = self._communicator, None
        if old is not None:
            await old.close()
        if self._world_size > 1:
            self._rendezvous = rendezvous or self._rendezvous
            if self._rendezvous is None:
                join = partial(Rendezvous.join, endpoint, timeout_s=timeout_s)
                self._rendezvous = await call_in_thread(join, name="syncline-rendezvous")
            self._communicator = await Communicator.create(
                self._rendezvous, name=name, rank=self._rank, size=self._world_size, bind_host=self.config.bind_host,
                timeout_s=timeout_s,
            )  # fmt: skip
        self._prepare.communicator = self._barrier.communicator = self._communicator
        if self._issuer is not None and self._world_size > 1:
            await self._regroup_on_device(name, timeout_s)

    async def _regroup_on_device(self, name: str, timeout_s: float) -> None:
        """The same for what the ranks gather on GPUs; the barrier stays on gloo, off the data network."""
        old, self._nccl = self._nccl, None
        if old is not None:
            await old.close()
        if self._rendezvous is None or self._issuer is None or self._device is None:
            return
        self._nccl = await NcclCommunicator.create(
            self._rendezvous, issuer=self._issuer, name=f"{name}-nccl", label=GATHER, rank=self._rank,
            size=self._world_size, timeout_s=timeout_s, device=self._device,
        )  # fmt: skip
        self._prepare.communicator = self._nccl

    async def offer(self, link: Iterable[int]) -> dict[str, bytes]:
        """Descriptors for targets that are to link up: target (as text) -> descriptor of its transport."""
        offers: dict[str, bytes] = {}
        for kind, targets in self._by_kind(link).items():
            receivers = [receiver for target in targets for receiver in self.receivers[target]]
            offers.update({str(t): d for t, d in (await self._senders[kind].offer(receivers)).items()})
            self._dropped -= set(targets)  # from here on they may be dropped again: one that refuses holds up nobody
        return offers

    async def link(self, link: Iterable[int], *, timeout_s: float) -> dict[str, tuple[str, str]]:
        """Wait until offered targets have linked up, over all transports at once; which failed, and why."""
        failed: dict[str, tuple[str, str]] = {}

        async def over(kind: str, targets: list[int]) -> None:
            receivers = [receiver for target in targets for receiver in self.receivers[target]]
            errors = await self._senders[kind].link(receivers, timeout_s=timeout_s)
            failed.update({str(receiver.target): _wire(error) for receiver, error in errors.items()})

        linking = [over(kind, targets) for kind, targets in self._by_kind(link).items()]
        for error in await asyncio.gather(*linking, return_exceptions=True):
            if error is not None:
                raise error
        return failed

    def _by_kind(self, targets: Iterable[int]) -> dict[str, list[int]]:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for target in targets:
            groups[self.kinds[target]].append(target)
        return groups

    # -------------------------------------------------------------------------------------------------------- a push

    async def begin(
        self, attempt: int, live: Collection[int], *, timeout_s: float, on_lost: Callable[[int, SynclineError], None]
    ) -> None:
        """A push to the targets ``live`` begins.

        Raises:
            TimeoutError: the trainer's weights were not written on its device within ``timeout_s``.
        """
        self._on_lost = on_lost
        until = time.monotonic() + timeout_s
        if self._rig is not None:
            # Before everybody's deadline: another rank's, which says only that nothing moved, would be told for the reason.
            await self._rig.source_written(timeout_s - min(1.0, timeout_s / 10))
        timeout_s = max(0.0, until - time.monotonic())
        receivers = [receiver for target in live if target not in self._dropped for receiver in self.receivers[target]]
        self._h2d.begin(attempt)
        self._prepare.begin(attempt)
        self._send.begin(attempt, receivers)
        if self._communicator is not None:
            self._communicator.set_deadline(timeout_s)
        if self._nccl is not None:
            self._nccl.set_deadline(timeout_s)
        if self._issuer is not None:
            ranks = {t: range(len(ranks)) for t, ranks in enumerate(self.receivers) if self.kinds[t] == "nccl"}
            self._issuer.expect(plan_order(self.program, ranks, receivers, gather=self._nccl is not None))
        for sender in self._senders.values():
            for receiver, error in (await sender.begin(self.push_id, timeout_s=timeout_s)).items():
                self._receiver_lost(receiver, error)

    async def end(self, committed: Collection[int]) -> None:
        """The push is over; the targets ``committed`` have committed it."""
        self._on_lost = lambda _target, _error: None
        self._send.end()
        kept = [receiver for target in committed for receiver in self.receivers[target]]
        for sender in self._senders.values():
            await sender.end([receiver for receiver in kept if self._routes[receiver] is sender])

    def specs(self, live: frozenset[int]) -> tuple[TaskSpec, ...]:
        """This rank's tasks for the driver, when ``live`` are the targets that get anything."""
        if live not in self._specs:
            self._specs = {live: tuple(self._spec(task, live) for task in self.program.tasks)}
        return self._specs[live]

    def _spec(self, task: SourceTask, live: frozenset[int]) -> TaskSpec:
        targets = frozenset(receiver.target for receiver in task.receivers) & live
        stages = _stages(task, sent=bool(targets))
        return TaskSpec(
            index=task.index, group=task.group, tmp_bytes=self._tmp_bytes(task), stages=stages, targets=targets,
            lends=bool(targets) and task.index in self._lends,
        )  # fmt: skip

    def _tmp_bytes(self, task: SourceTask) -> int:
        """What a task holds of the temporary memory: on a device that is known only when its kernels are."""
        return self._tmp_nbytes.get(task.index, task.tmp_bytes)

    def drop_targets(self, targets: Iterable[int]) -> None:
        """Send nothing more to ``targets``; their links close."""
        for target in targets:
            if target not in self._dropped:
                self._dropped.add(target)
                self._send.drop(self.receivers[target])

    def head(self) -> tuple[int, dict[int, float]] | None:
        """This rank's first task that has not gone out: its index, and the targets that it waits for, with the seconds.

        The targets are missing while it is not being sent yet. None: everything has gone out.
        """
        head = self._send.head()
        if head is None:
            return None
        task, since = head
        waits: dict[int, float] = {}
        for receiver, at in since.items():
            waits[receiver.target] = max(waits.get(receiver.target, 0.0), time.monotonic() - at)
        return task, waits

    def digests(self) -> dict[str, str]:
        """This rank's part of every receiver's content digest, and of the content's own (`CONTENT`)."""
        if not self.config.verify:
            return {}
        parts = {f"{r.target}:{r.rank}": f"{digest:032x}" for r, digest in self._prepare.digests().items()}
        return {**parts, CONTENT: f"{self._prepare.content_digest():032x}"}

    @property
    def local_ends(self) -> Moments:
        """When this rank's own part of each ``prepare`` was done (see `PrepareStage`)."""
        return self._prepare.local_ends

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in this push, over all receivers."""
        return self._send.sent_bytes

    @property
    def landing_bytes(self) -> int:
        """Landing memory that this rank holds for its targets."""
        return sum(sender.landing_bytes for sender in self._senders.values())

    def _receiver_lost(self, receiver: ReceiverId, error: TransportError) -> None:
        self._on_lost(receiver.target, error)

    # ------------------------------------------------------------------------------------------------------- the end

    def abort(self) -> None:
        """A push failed: cut what is under way, so that abandoned work ends soon."""
        self._cut_sources()
        self.drop_targets(range(len(self.receivers)))

    def _cut_sources(self) -> None:
        """End what is under way among the source ranks."""
        if self._communicator is not None:
            self._aborting = self._communicator.abort()
        if self._nccl is not None:
            _ = self._nccl.abort()

    async def settle(self) -> int:
        """Wait a bounded time for work that an earlier push left in flight; how much of it has not ended."""
        return await self.driver.settle(_SETTLE_S)

    async def close(self) -> None:
        """Close everything in bounded time. Memory that work still uses is kept alive by that work."""
        if self.driver.abandoned or any(self.driver.in_flight.values()):
            self.abort()
        else:  # links that stand are closed in order: receivers let go of this rank's memory before it does itself
            self._cut_sources()
        await self.driver.close(_SETTLE_S)
        for sender in self._senders.values():
            await sender.close()
        for communicator in (self._communicator, self._nccl):
            if communicator is not None:
                await communicator.close()
        self._rendezvous = None
        await self._scope.join(_SETTLE_S)
        self._memory.pool.close()
        if self._rig is not None:
            await self._rig.close()
        with contextlib.suppress(RuntimeError):
            await call_in_thread(self._workers.close, name="syncline-stop")


def _unmake(resolved: Resolved) -> None:
    """What was page-locked for a source that has gone must not stay so."""
    if resolved.rig is not None:
        resolved.rig.locks.close()


async def _ended(signal: Signal[Any], timeout_s: float) -> None:
    """Wait for the end of what may hang, at most so long."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(timeout_s):
            await signal


def _stages(task: SourceTask, *, sent: bool) -> tuple[StageName, ...]:
    found: list[tuple[StageName, bool]] = [("h2d", task.file_bytes > 0), ("prepare", True), ("send", sent)]
    return tuple(stage for stage, runs in found if runs)


def _row(task: SourceTask, tmp_bytes: int) -> TaskRow:
    return TaskRow(task.index, task.group, tmp_bytes, task.nbytes, _stages(task, sent=bool(task.receivers)))


def _lent(recipes: Mapping[int, Recipe], kinds: Mapping[int, str]) -> dict[int, dict[int, torch.Tensor]]:
    """Tasks that are sent, in part, straight from the trainer's memory: nobody needs their buckets in one place."""
    found = {}
    for index, recipe in recipes.items():
        lent = recipe.assembly.lent if recipe.assembly is not None else {}
        if lent and all(kinds[receiver.target] in LENDING for receiver in recipe.task.receivers):
            found[index] = lent
    return found


def _file_buffers(manifest: Manifest) -> frozenset[int]:
    return frozenset(index for index, buffer in enumerate(manifest.buffers) if buffer.kind == "file")


def _wire(error: SynclineError) -> tuple[str, str]:
    return type(error).__name__, wire_text(error)
