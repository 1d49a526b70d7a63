"""Source ranks and target ranks of tests, without an engine around them: real stages and transports on real plans.

Loaded by the conftest for tests in one process, and by the nursery for tests with several.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from standins import Fabric, SharedMemoryIpc

from syncline.scheduler.driver import Driver, Limits, TaskSpec
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor
from syncline.scheduler.plan import Plan, PlanOptions, build_plan
from syncline.scheduler.programs import ReceiverId, TargetTask
from syncline.stages.assembly import LandingCopies
from syncline.stages.barrier import GroupBarrier
from syncline.stages.buffers import BufferPool
from syncline.stages.communicator import Communicator, Rendezvous
from syncline.stages.completions import Signal, TaskScope
from syncline.stages.cudart import CudaIpc
from syncline.stages.digest import add_digests, digest_bucket
from syncline.stages.errors import TransportError
from syncline.stages.h2d import H2DStage
from syncline.stages.nccl import CudaNccl
from syncline.stages.nccl_communicator import Issuer
from syncline.stages.prepare import PrepareStage
from syncline.stages.recipes import build_recipes
from syncline.stages.send import SendStage
from syncline.stages.task_memory import TaskMemory, private_capacity
from syncline.stages.transports.cuda_ipc import CudaIpcSender
from syncline.stages.transports.cuda_ipc_receiver import CudaIpcHalf
from syncline.stages.transports.gloo import GlooHalf, GlooSender
from syncline.stages.transports.nccl import NcclNetwork, plan_order
from syncline.stages.transports.shm import ShmSender
from syncline.stages.transports.shm_receiver import ShmHalf
from syncline.stages.transports.two_sided import TwoSidedSender
from syncline.stages.transports.two_sided_receiver import TwoSidedHalf
from syncline.stages.workers import Workers

LOOPBACK = "127.0.0.1"
LARGE_S = 30.0
FABRIC = Fabric()
DTYPES = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "int16")


# --------------------------------------------------------------------------------------------------- what is pushed


def make_spec(
    *,
    seed: int,
    transport: str,
    landing: str,
    sources: int = 1,
    targets: Collection[int] = (1,),
    tensors: int = 6,
    elements: int = 3000,
    bucket_bytes: int = 4096,
    watermark: int = 65536,
    leaf_bytes: int = 1024,
    verify: bool = True,
    route: str = "gather",
    cast: bool = False,
    files: bool = False,
    shapes: list[list[int]] | None = None,
    device: str = "",
    apart: bool = False,
    sends: int = 2,
) -> dict[str, Any]:
    """A transfer as plain data; everything else follows from it, alike in every process. ``targets``: ranks of each.

    ``apart``: targets are on another host, as far as the plan knows, and their ranks pass buckets on to each other.
    ``sends``: tasks in stage ``send`` at once. ``device``: buckets pass through memory of that device (``cuda``), while weights
    stay where they are.
    """
    random = np.random.default_rng(seed)
    if shapes is None:
        shapes = []
        for _ in range(tensors):
            dims = int(random.integers(0, 4))
            shape = [int(random.integers(1, 12)) for _ in range(dims)]
            if dims:
                shape[0] = int(random.integers(1, max(2, elements // max(1, int(np.prod(shape[1:]))))))
            shapes.append(shape)
    dtypes = [DTYPES[int(random.integers(len(DTYPES)))] for _ in shapes]
    return {
        "seed": seed, "transport": transport, "landing": landing, "sources": sources, "targets": list(targets),
        "shapes": shapes, "dtypes": dtypes, "bucket_bytes": bucket_bytes, "watermark": watermark, "verify": verify,
        "leaf_bytes": leaf_bytes, "route": route, "cast": cast, "files": files, "device": device,
        "apart": apart, "sends": sends,
    }  # fmt: skip


def content(name: str, shape: Collection[int], dtype: str, version: int) -> torch.Tensor:
    """The reference: a canonical tensor of a version, each element a hash of its global index. Exact in every type."""
    index = np.arange(int(np.prod(list(shape), dtype=np.int64)), dtype=np.uint64)
    mixed = (index * np.uint64(2654435761) + np.uint64(zlib.crc32(f"{name}/{version}".encode()))) >> np.uint64(7)
    values = torch.from_numpy((mixed % np.uint64(2 if dtype == "bool" else 120)).astype(np.int64))
    return values.to(getattr(torch, dtype)).reshape(tuple(shape))


def _chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """Uneven, as FSDP2 cuts: the last parts may be shorter or empty."""
    step = -(-size // parts)
    start = min(part * step, size)
    return start, min(step, size - start)


def _tensors(spec: dict[str, Any], cast: bool) -> list[Tensor]:
    dtypes = ["float32" if cast and d == "bfloat16" else d for d in spec["dtypes"]]
    return [
        Tensor(name=f"t{i}", shape=tuple(s), dtype=d, group=i * 2 // max(1, len(spec["shapes"])))
        for i, (s, d) in enumerate(zip(spec["shapes"], dtypes, strict=True))
    ]


def source_manifest(spec: dict[str, Any], rank: int) -> Manifest:
    """Row shards; every third tensor is stored transposed, every fourth replicated on all ranks."""
    tensors, pieces, buffers = _tensors(spec, spec["cast"]), [], []
    for index, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        start = [0] * len(shape)
        if shape and index % 4 != 3:
            start[0], shape[0] = _chunk(shape[0], spec["sources"], rank)
        strides = _strides(shape, transposed=index % 3 == 2)
        size = int(np.prod(shape)) * torch.empty(0, dtype=getattr(torch, tensor.dtype)).element_size()
        kind = "file" if spec["files"] and index % 2 == 0 else "memory"
        buffers.append(Buffer(name=tensor.name, nbytes=size, kind=kind))
        if 0 not in shape:
            box = Box(start=tuple(start), shape=tuple(shape))
            pieces.append(Piece(tensor=index, box=box, buffer=index, offset=0, strides=strides, dtype=tensor.dtype))
    return Manifest(rank=rank, world_size=spec["sources"], host="here", tensors=tensors, pieces=pieces, buffers=buffers)


def target_manifest(spec: dict[str, Any], target: int, rank: int) -> Manifest:
    """Slices along the last axis of each rank; tensors that it can't cut are whole on every rank. t0 is held twice."""
    world = spec["targets"][target]
    tensors, pieces, buffers = _tensors(spec, False), [], []
    for index, tensor in enumerate(tensors):
        shape, start = list(tensor.shape), [0] * len(tensor.shape)
        if world > 1 and len(shape) > 1 and shape[-1] % world == 0:
            shape[-1] //= world
            start[-1] = rank * shape[-1]
        pad = 3 if index % 2 and len(shape) > 1 and spec["landing"] != "mapped" else 0  # rows with room between them
        strides = _strides(shape, pad=pad)
        item = torch.empty(0, dtype=getattr(torch, tensor.dtype)).element_size()
        size = int(np.prod([*shape[:-1], shape[-1] + pad])) * item if shape else item
        padding = size - int(np.prod(shape)) * item
        for _ in range(2 if index == 0 else 1):
            box = Box(start=tuple(start), shape=tuple(shape))
            piece = Piece(tensor=index, box=box, buffer=len(buffers), offset=0, strides=strides, dtype=tensor.dtype)
            pieces.append(piece)
            buffers.append(Buffer(name=f"{tensor.name}.{len(buffers)}", nbytes=size, padding=padding))
    host = "there" if spec["apart"] else "here"
    return Manifest(rank=rank, world_size=world, host=host, tensors=tensors, pieces=pieces, buffers=buffers, movable=True)


def _strides(shape: list[int], *, transposed: bool = False, pad: int = 0) -> tuple[int, ...]:
    if transposed:
        return tuple(reversed(_strides(shape[::-1])))
    strides, step = [], 1
    for axis, size in enumerate(reversed(shape)):
        strides.append(step)
        step *= max(1, size) + (pad if axis == 0 else 0)
    return tuple(reversed(strides))


def make_buffers(manifest: Manifest) -> list[torch.Tensor]:
    """The rank's memory, poisoned."""
    dtypes = {piece.buffer: piece.dtype for piece in manifest.pieces}
    return [
        torch.full((b.nbytes,), 0x5A, dtype=torch.uint8).view(getattr(torch, dtypes.get(i, "uint8")))
        for i, b in enumerate(manifest.buffers)
    ]


def view(piece: Piece, buffers: list[torch.Tensor]) -> torch.Tensor:
    return buffers[piece.buffer].as_strided(piece.box.shape, piece.strides, piece.offset)


def expected(manifest: Manifest, piece: Piece, version: int) -> torch.Tensor:
    tensor = manifest.tensors[piece.tensor]
    full = content(tensor.name, tensor.shape, tensor.dtype, version)
    return full[tuple(slice(s, s + n) for s, n in zip(piece.box.start, piece.box.shape, strict=True))]


def make_plan(spec: dict[str, Any]) -> Plan:
    return _plan(json.dumps(spec))


@functools.lru_cache(maxsize=2)
def _plan(text: str) -> Plan:
    spec = json.loads(text)
    targets = [[target_manifest(spec, t, r) for r in range(n)] for t, n in enumerate(spec["targets"])]
    return build_plan(
        [source_manifest(spec, rank) for rank in range(spec["sources"])],
        targets,
        PlanOptions(
            bucket_bytes=spec["bucket_bytes"],
            max_tmp_bytes=spec["watermark"],
            leaf_bytes=spec["leaf_bytes"],
            landing=spec["landing"],
            route=spec["route"],
            verify=spec["verify"],
            shared_landing=spec["transport"] == "shm" and spec["landing"] != "streamed",
            relays=frozenset(range(len(targets)) if spec["apart"] else ()),
        ),
    )


# ------------------------------------------------------------------------------------------------------ source ranks


class SourceRank:
    """One source rank: stages, driver, one sender."""

    def __init__(self, spec: dict[str, Any], rank: int, *, directory: str | None = None) -> None:
        self.spec = spec
        self.rank = rank
        self.plan = make_plan(spec)
        self.program = self.plan.source_program(rank)
        self.manifest = source_manifest(spec, rank)
        self.buffers = make_buffers(self.manifest)
        self.receivers = [ReceiverId(t, r) for t, n in enumerate(spec["targets"]) for r in range(n)]
        self.mine = [r for r in self.receivers if any(r in task.receivers for task in self.program.tasks)]
        self.lost: dict[ReceiverId, str] = {}
        self.errors: dict[ReceiverId, str] = {}
        self.workers = Workers(2)
        self.scope = TaskScope()
        self.communicator: Communicator | None = None
        self.sender = self._make_sender(directory)
        if spec["device"]:
            self.sender = Uploading(self.sender, spec["device"], self.scope)
        files = [i for i, buffer in enumerate(self.manifest.buffers) if buffer.kind == "file"]
        recipes = build_recipes(self.program, self.buffers, files)
        capacity = private_capacity(
            ((recipe.task, recipe.layout) for recipe in recipes.values()),
            spec["watermark"],
            in_place=self.receivers if self.sender.in_place else (),
        )
        self.pool = BufferPool.private(capacity)
        routes = dict.fromkeys(self.receivers, self.sender)
        self.memory = TaskMemory(self.pool, routes)
        self.h2d = H2DStage(recipes=recipes, memory=self.memory, workers=self.workers, scope=self.scope)
        self.prepare = PrepareStage(
            recipes=recipes, memory=self.memory, workers=self.workers, scope=self.scope, communicator=None,
            verify=spec["verify"],
        )  # fmt: skip
        self.send = SendStage(
            tasks={task.index: task for task in self.program.tasks},
            memory=self.memory,
            routes=routes,
            on_receiver_error=self._receiver_error,
        )
        self.barrier = GroupBarrier(None)
        self.hold_before = -1
        self.held = asyncio.Event()
        self.go = asyncio.Event()
        self.auto_drop = True
        self.pushes = 0
        self.driver = Driver(
            stages={"h2d": self.h2d, "prepare": self.prepare, "send": _Held(self)},
            barrier=self.barrier,
            limits=Limits(max_tmp_bytes=spec["watermark"], h2d=2, prepare=2, send=spec["sends"]),
            release=self.memory.release,
            drop_target=lambda _target, _at: None,
        )

    def _make_sender(self, directory: str | None) -> Any:
        if self.spec["transport"] == "gloo":
            return GlooSender(landing=self.spec["landing"], bind_host=LOOPBACK, on_lost=self._lost, program=self.program)
        if self.spec["transport"] == "nccl":
            self.issuer = Issuer(nccl_runtime(self.spec))
            return TwoSidedSender(
                network=NcclNetwork(self.issuer, torch.device(self.spec["device"] or "cpu")), landing=self.spec["landing"],
                bind_host=LOOPBACK, on_lost=self._lost, program=self.program,
            )  # fmt: skip
        if self.spec["transport"] == "cuda_ipc":
            self.runtime = ipc_runtime(self.spec)
            return CudaIpcSender(
                program=self.program, landing=self.spec["landing"], ring_nbytes=self.spec["watermark"], runtime=self.runtime,
                workers=self.workers, on_lost=self._lost, directory=Path(directory) if directory else None,
            )  # fmt: skip
        return ShmSender(
            program=self.program, landing=self.spec["landing"], ring_nbytes=self.spec["watermark"], workers=self.workers,
            on_lost=self._lost, directory=Path(directory) if directory else None,
        )  # fmt: skip

    def _lost(self, receiver: ReceiverId, error: Exception) -> None:
        self.lost[receiver] = str(error)

    def _receiver_error(self, receiver: ReceiverId, error: Exception) -> None:
        self.errors[receiver] = str(error)
        if self.auto_drop:
            self.send.drop([receiver])

    def fill(self, version: int) -> None:
        """Write the content of ``version`` into this rank's memory."""
        for piece in self.manifest.pieces:
            view(piece, self.buffers).copy_(expected(self.manifest, piece, version))

    async def group(self, rendezvous: Rendezvous | None, endpoint: str, name: str) -> None:
        """Meet the other source ranks."""
        if self.spec["sources"] > 1:
            if rendezvous is None:
                rendezvous = await asyncio.to_thread(Rendezvous.join, endpoint, timeout_s=LARGE_S)
            if self.communicator is not None:
                await self.communicator.close()
            self.communicator = await Communicator.create(
                rendezvous, name=name, rank=self.rank, size=self.spec["sources"], bind_host=LOOPBACK, timeout_s=LARGE_S
            )
        self.prepare.communicator = self.barrier.communicator = self.communicator

    async def push(self, push_id: str, *, timeout_s: float = LARGE_S, lease_timeout_s: float = 5.0) -> dict[str, Any]:
        """One push; what it came to. ``begin`` has been called on receivers."""
        live = [receiver for receiver in self.mine if receiver in self.sender.linked]
        late = await self.sender.begin(push_id, timeout_s=timeout_s, lease_timeout_s=lease_timeout_s)
        live = [receiver for receiver in live if receiver not in late]
        if self.spec["transport"] == "nccl":
            ranks = {target: range(count) for target, count in enumerate(self.spec["targets"])}
            self.issuer.expect(plan_order(self.program, ranks, live, gather=False))
        self.errors = {}
        if self.communicator is not None:
            self.communicator.set_deadline(timeout_s)
        self.pushes += 1
        for stage in (self.h2d, self.prepare):
            stage.begin(self.pushes)
        self.send.begin(self.pushes, live)
        specs = tuple(self._spec(task, live) for task in self.program.tasks)
        targets = frozenset(range(len(self.spec["targets"])))
        error = ""
        try:
            await self.driver.run(
                self.pushes, specs, self.program.groups, targets, collect_votes=_nothing, deadline_s=timeout_s,
                on_source_free=lambda: None,
            )  # fmt: skip
        except Exception as failure:  # noqa: BLE001 - told to the test
            error = f"{type(failure).__name__}: {failure}"
        digests = {f"{r.target}:{r.rank}": digest for r, digest in self.prepare.digests().items()}
        return {"error": error, "digests": digests, "late": {key(r): str(e) for r, e in late.items()}}

    def _spec(self, task: Any, live: Collection[ReceiverId]) -> TaskSpec:
        targets = frozenset(receiver.target for receiver in task.receivers if receiver in live)
        stages: list[Any] = ["h2d"] if task.file_bytes else []
        stages += ["prepare"] + (["send"] if targets else [])
        return TaskSpec(index=task.index, group=task.group, tmp_bytes=task.tmp_bytes, stages=tuple(stages), targets=targets)

    async def end(self, committed: Collection[ReceiverId] | None = None) -> None:
        self.send.end()
        await self.sender.end(self.receivers if committed is None else committed)

    async def close(self) -> None:
        self.go.set()
        self.send.drop(self.receivers)
        if self.communicator is not None:
            await self.communicator.close()
        await self.driver.close(5.0)
        await self.sender.close()
        await self.scope.join(5.0)
        self.pool.close()
        self.workers.close()


def nccl_runtime(spec: dict[str, Any]) -> Any:
    """NCCL where there is a device, else what stands for it."""
    if spec["device"] != "cuda":
        return FABRIC.runtime()
    os.environ |= {"NCCL_HOSTID": f"peer-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}  # several ranks on one GPU
    return CudaNccl(torch.device("cuda"))


def ipc_runtime(spec: dict[str, Any]) -> Any:
    """CUDA IPC where there is a device, else what stands for it."""
    return CudaIpc(torch.device("cuda")) if spec["device"] == "cuda" else SharedMemoryIpc()


class Uploading:
    """A sender for stages on the CPU: each bucket is copied to memory of a device, and sent from there."""

    in_place = False
    lends = False

    def __init__(self, sender: Any, device: str, scope: TaskScope) -> None:
        self._sender, self._device, self._scope = sender, torch.device(device), scope

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def send(self, task: Any, bucket: torch.Tensor, receivers: Any, lent: Any = None) -> dict[ReceiverId, Any]:
        signals: dict[ReceiverId, Signal[None]] = {receiver: Signal() for receiver in receivers}
        self._scope.start(self._send(task, bucket, signals))
        return dict(signals)

    async def _send(self, task: Any, bucket: torch.Tensor, signals: dict[ReceiverId, Signal[None]]) -> None:
        loan, memory = None, torch.empty(task.nbytes, dtype=torch.uint8, device=self._device)
        try:
            if self._sender.in_place:
                loan = await self._sender.claim(task)
                memory = loan.memory
            await asyncio.to_thread(self._upload, memory, bucket)
            sent = self._sender.send(task, memory, list(signals))
        except TransportError as error:
            sent = dict.fromkeys(signals, error)
        for receiver, completion in sent.items():
            try:
                if isinstance(completion, TransportError):
                    raise completion
                if completion is not None:
                    await completion
                signals[receiver].set()
            except TransportError as error:
                signals[receiver].fail(error)
        if loan is not None:
            loan.release()

    def _upload(self, memory: torch.Tensor, bucket: torch.Tensor) -> None:
        memory.copy_(bucket)
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class _Held:
    """The send stage, with a place to stop at: before task `SourceRank.hold_before` until `SourceRank.go` is set."""

    def __init__(self, rank: SourceRank) -> None:
        self._rank = rank

    def start(self, task: int) -> Any:
        rank = self._rank
        if task != rank.hold_before:
            return rank.send.start(task)
        return rank.scope.start(self._late(task))

    async def _late(self, task: int) -> None:
        self._rank.held.set()
        await self._rank.go.wait()
        completion = self._rank.send.start(task)
        if completion is not None:
            await completion


async def _nothing() -> None:
    return None


def key(receiver: ReceiverId) -> str:
    return f"{receiver.target}:{receiver.rank}"


# ------------------------------------------------------------------------------------------------------ target ranks


class TargetRank:
    """One rank of a target: a receiving half, and memory to land in."""

    def __init__(self, spec: dict[str, Any], target: int, rank: int) -> None:
        self.spec = spec
        self.program = make_plan(spec).target_program(target, rank)
        self.manifest = target_manifest(spec, target, rank)
        self.buffers = make_buffers(self.manifest)
        self.copies = {task.index: LandingCopies(task, self.buffers) for task in self.program.tasks}
        self.workers = Workers(1)
        self.runtime: Any = None
        self.lease: Any = None
        self.served: dict[int, torch.Tensor] = {}
        self.buckets: dict[int, torch.Tensor] = {}
        self.hold_before = -1
        self.held = asyncio.Event()
        self.go = asyncio.Event()
        self.half: Any = None

    async def link(self, descriptors: dict[int, bytes], timeout_s: float = LARGE_S) -> None:
        if self.half is not None:
            await self.half.close()
        if self.spec["transport"] == "gloo":
            self.half = GlooHalf(program=self.program, landing=self.spec["landing"], bind_host=LOOPBACK, workers=self.workers)
        elif self.spec["transport"] == "nccl":
            self.half = TwoSidedHalf(
                network=NcclNetwork(Issuer(nccl_runtime(self.spec)), torch.device(self.spec["device"] or "cpu")),
                program=self.program,
                landing=self.spec["landing"], workers=self.workers,
            )  # fmt: skip
        elif self.spec["transport"] == "cuda_ipc":
            self.runtime = self.runtime or ipc_runtime(self.spec)
            self.half = CudaIpcHalf(
                program=self.program, landing=self.spec["landing"], runtime=self.runtime, workers=self.workers
            )
        else:
            self.half = ShmHalf(program=self.program, landing=self.spec["landing"])
        await self.half.link(descriptors, timeout_s=timeout_s)

    async def receive(self, push_id: str = "", before: Callable[[TargetTask], None] | None = None) -> dict[str, Any]:
        """Take one push. Its digest as a number, or the error."""
        parts: list[int] = []
        self.buckets = {}
        try:
            for task in self.program.tasks:
                if task.index == self.hold_before:
                    self.held.set()
                    await self.go.wait()
                bucket = await self.half.receive(task)
                if before is not None:
                    before(task)
                parts.append(await self._take(task, bucket))
                self.half.release(task)
            self.half.check()
        except Exception as error:  # noqa: BLE001 - told to the test
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": "", "digest": add_digests(parts)}

    async def _take(self, task: TargetTask, bucket: torch.Tensor) -> int:
        bucket = bucket.cpu()
        copies = self.copies[task.index]
        if not self.half.persistent:
            if self.spec["verify"]:
                return await self.workers.submit(copies.run_and_digest, bucket)
            await self.workers.submit(copies.run, bucket)
            return 0
        self.buckets[task.index] = bucket
        segments = [landing.segment for landing in task.landings]
        return await self.workers.submit(digest_bucket, bucket, segments) if self.spec["verify"] else 0

    async def commit(self) -> None:
        """Make what was received the live content, as the landing mode has it."""
        if self.spec["landing"] == "staged":
            for task in self.program.tasks:
                await self.workers.submit(self.copies[task.index].run, self.buckets[task.index])
        elif self.spec["landing"] == "mapped":
            lease = self.half.take_lease()
            self.served = self._mapped_pieces()
            if self.lease is not None:
                self.lease.release()
            self.lease = lease
        self.buckets = {}
        await self.half.end(True)

    def _mapped_pieces(self) -> dict[int, torch.Tensor]:
        """Every piece where it lies in landing space."""
        found: dict[int, torch.Tensor] = {}
        for task in self.program.tasks:
            space = self.half.space(task.owner)
            for landing in task.landings:
                for index in landing.pieces:
                    piece = self.manifest.pieces[index]
                    if index not in found and landing.segment.box.start == piece.box.start:
                        dtype = getattr(torch, piece.dtype)
                        size = int(np.prod(piece.box.shape)) * torch.empty(0, dtype=dtype).element_size()
                        at = self.half.offset_of(landing)
                        found[index] = space[at : at + size].view(dtype).view(piece.box.shape)
        return found

    async def abandon(self) -> None:
        self.buckets = {}
        await self.half.end(False)

    def wrong(self, version: int) -> list[str]:
        """Names of tensors whose live content is not exactly that of ``version``."""
        bad = []
        for index, piece in enumerate(self.manifest.pieces):
            live = self.served[index] if self.spec["landing"] == "mapped" and self.served else view(piece, self.buffers)
            want = expected(self.manifest, piece, version)
            if _bits(live) != _bits(want):
                bad.append(self.manifest.tensors[piece.tensor].name)
        return bad

    async def close(self) -> None:
        self.go.set()
        if self.half is not None:
            await self.half.close()
        self.served = {}
        self.lease = None
        self.workers.close()


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def resources() -> dict[str, int]:
    """What this process holds, for leak tests."""
    shared = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            shared += "memfd:syncline" in str(fd.readlink())
        except OSError:
            continue
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "memfds": shared,
        "maps": Path("/proc/self/maps").read_text().count("memfd:syncline"),
    }
