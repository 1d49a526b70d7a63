"""Targets for tests of the receiver: toy loaders whose content says its version, a transport in memory, a toy source.

Loaded by the conftest, and run as a script for ranks in processes of their own (`nursery`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import zlib

import numpy as np
import torch
import xxhash

from syncline.engine.control_client import ControlClient
from syncline.engine.fence import Fence
from syncline.engine.messages import AbortRequest, CompleteRequest, ConnectRequest, PrepareRequest, RankLinks
from syncline.engine.receiver import Receiver
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor
from syncline.scheduler.plan import PlanOptions, build_plan
from syncline.scheduler.programs import ReceiverId
from syncline.stages.errors import TransportError
from syncline.stages.transports.shm import ShmSender
from syncline.stages.workers import Workers

SHAPES = {
    "a": ((6, 4), "float32"),
    "b": ((5,), "bfloat16"),
    "c": ((2, 3, 2), "int64"),
    "d": ((8, 16), "float32"),
    "e": ((), "float32"),
}
LEAF = 64
PATIENCE_S = 30.0


def content(name, version):
    """The reference: a whole tensor of a version."""
    shape, dtype = SHAPES[name]
    index = torch.arange(int(np.prod(shape, dtype=int)), dtype=torch.float64)
    values = (index * 7 + zlib.crc32(name.encode()) % 50 + 31 * version) % 127
    return values.reshape(shape).to(getattr(torch, dtype))


def slices(name, rank, world):
    """The rows of a tensor that a rank of a target takes: tensors that can be cut are, the others are whole everywhere."""
    shape, _ = SHAPES[name]
    if world > 1 and shape and shape[0] % world == 0:
        rows = shape[0] // world
        return (slice(rank * rows, (rank + 1) * rows),)
    return ()


class ToyLoader:
    """Live tensors of one rank, poisoned at first. ``hooks``: name of a call -> what to run in it."""

    def __init__(self, *, rank=0, world=1, movable=False, expose=True, version=None):
        self.rank, self.world, self.movable, self.expose = rank, world, movable, expose
        self.live = {}
        for name in SHAPES:
            whole = content(name, 0 if version is None else version)
            self.live[name] = whole[slices(name, rank, world)].clone()
            if version is None:
                self.live[name].fill_(float("nan") if whole.is_floating_point() else -1)
        self.calls = []
        self.hooks = {}
        self.fingerprint = ""
        self._manifest = None

    def manifest(self, *, rank, world_size, host):
        if self._manifest is None or self._manifest.fingerprint != self.fingerprint:
            tensors, pieces, buffers = [], [], []
            for index, (name, (shape, dtype)) in enumerate(SHAPES.items()):
                mine = self.live[name]
                tensors.append(Tensor(name=name, shape=shape, dtype=dtype))
                cut = slices(name, self.rank, self.world)
                start = tuple(cut[0].start if i == 0 and cut else 0 for i in range(len(shape)))
                box = Box(start=start, shape=tuple(mine.shape))
                pieces.append(Piece(tensor=index, box=box, buffer=index, offset=0, strides=mine.stride(), dtype=dtype))
                buffers.append(Buffer(name=name, nbytes=mine.numel() * mine.element_size()))
            self._manifest = Manifest(
                rank=rank, world_size=world_size, host=host, tensors=tensors, pieces=pieces, buffers=buffers,
                movable=self.movable, fingerprint=self.fingerprint,
            )  # fmt: skip
        return self._manifest

    def buffers(self):
        return list(self.live.values()) if self.expose else None

    def begin(self, version):
        self._called("begin", version)

    def install(self, landed):
        self._called("install", len(landed))
        names = list(SHAPES)
        for part in landed:
            piece = self._manifest.pieces[part.piece]
            view = self.live[names[piece.tensor]]
            inside = [slice(s - o, s - o + n) for s, o, n in zip(part.box.start, piece.box.start, part.box.shape, strict=True)]
            view[tuple(inside)].copy_(part.tensor) if inside else view.copy_(part.tensor)

    def rebind(self, landed):
        self._called("rebind", len(landed))
        names = list(SHAPES)
        for part in landed:
            self.live[names[self._manifest.pieces[part.piece].tensor]] = part.tensor

    def finish(self, version):
        self._called("finish", version)

    def _called(self, name, detail):
        self.calls.append((name, detail))
        hook = self.hooks.get(name)
        if hook is not None:
            hook()

    def holds(self, version):
        """Every live byte belongs to this version."""
        return all(
            torch.equal(tensor, content(name, version)[slices(name, self.rank, self.world)])
            for name, tensor in self.live.items()
        )

    def versions(self, newest):
        """Versions that live memory holds as a whole."""
        return [version for version in range(newest + 1) if self.holds(version)]


def bucket_of(task, version):
    """The bytes of a bucket, from the reference."""
    bucket = torch.zeros(task.nbytes, dtype=torch.uint8)
    for landing in task.landings:
        segment = landing.segment
        box = segment.box
        part = content(segment.name, version)[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]
        raw = part.contiguous().reshape(-1).view(torch.uint8)
        assert len(raw) == segment.nbytes
        bucket[segment.offset : segment.offset + segment.nbytes] = raw
    return bucket


def digest_of(program, version):
    """What the source says that it sent: leaf by leaf, from the definition."""
    total = 0
    for task in program.tasks:
        bucket = bucket_of(task, version)
        for landing in task.landings:
            leaves = landing.segment.leaves
            data = bytes(bucket[landing.segment.offset : landing.segment.offset + landing.segment.nbytes].tolist())
            number = leaves.first
            for block in range(leaves.blocks):
                block_data = data[block * leaves.block_nbytes : (block + 1) * leaves.block_nbytes]
                for at in range(0, len(block_data), leaves.leaf_nbytes):
                    seed = (leaves.item_uid + number) % 2**64
                    total += xxhash.xxh3_128_intdigest(block_data[at : at + leaves.leaf_nbytes], seed)
                    number += 1
    return f"{total % 2**128:032x}"


class FakeHalf:
    """A receiving half in memory: the test says what arrives when. Poisons buckets once they are released."""

    def __init__(self, program, landing):
        self.program, self.landing = program, landing
        self.persistent = landing != "streamed"
        self.pushes = []
        self.ends = []
        self.released = []
        self.leases = []
        self.closed = False
        self.error = None
        self.link_error = None
        self.begin_error = None
        self._arrived = {}
        self._space = torch.zeros(program.landing_nbytes, dtype=torch.uint8)

    @property
    def landing_bytes(self):
        return self._space.numel() if self.persistent else 0

    async def link(self, descriptors, *, timeout_s):
        if self.link_error is not None:
            raise self.link_error

    async def begin(self, push_id, *, timeout_s):
        if self.begin_error is not None:
            raise self.begin_error
        self.pushes.append(push_id)
        self.released = []
        self.error = None
        self._arrived = {task.index: asyncio.get_running_loop().create_future() for task in self.program.tasks}
        for future in self._arrived.values():
            future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._space = torch.zeros(self.program.landing_nbytes, dtype=torch.uint8)

    def deliver(self, task, version):
        bucket = bucket_of(task, version)
        if self.persistent:
            place = self._space[task.landing_offset : task.landing_offset + task.nbytes]
            place.copy_(bucket)
            bucket = place
        self._arrived[task.index].set_result(bucket)

    def deliver_all(self, version, *, but=()):
        for task in self.program.tasks:
            if task.index not in but and not self._arrived[task.index].done():
                self.deliver(task, version)

    def fail(self, error):
        self.error = error
        for future in self._arrived.values():
            if not future.done():
                future.set_exception(error)

    async def receive(self, task):
        return await asyncio.shield(self._arrived[task.index])

    def release(self, task):
        if not self.persistent and not isinstance(self.error, TransportError):
            self._arrived[task.index].result().fill_(0xEE)
        self.released.append(task.index)
        self.check()

    def check(self):
        if self.error is not None:
            raise self.error

    def space(self, owner):
        return self._space

    def offset_of(self, landing):
        return landing.landing_offset

    def take_lease(self):
        lease = FakeLease()
        self.leases.append(lease)
        return lease

    async def end(self, committed):
        self.ends.append(committed)

    async def close(self, timeout_s=5.0):
        self.closed = True


class FakeLease:
    def __init__(self):
        self.released = False

    def release(self):
        self.released = True


class Halves:
    """A half factory that remembers what it made: the newest half of every rank."""

    def __init__(self):
        self.of = {}
        self.made = 0

    def __call__(self, kind, program, landing, workers):
        half = FakeHalf(program, landing)
        self.of[program.receiver.rank] = half
        self.made += 1
        return half


class ToySource:
    """A source of one rank that talks to one target's leader. The data path is the test's business."""

    def __init__(
        self, address, *, landing="staged", secret=None, incarnation="source", bucket_bytes=300, verify=True, transport="shm"
    ):
        self.client = ControlClient(address, secret=secret, timeout_s=PATIENCE_S)
        self.landing, self.incarnation, self.bucket_bytes, self.verify = landing, incarnation, bucket_bytes, verify
        self.transport = transport
        self.generation = 0
        self.pushes = 0
        self.programs = {}
        self.descriptors = {}

    async def plan(self):
        reply = await self.client.manifest()
        manifests = [Manifest.from_bytes(data) for data in reply.manifests]
        tensors, pieces, buffers = [], [], []
        for index, (name, (shape, dtype)) in enumerate(SHAPES.items()):
            tensors.append(Tensor(name=name, shape=shape, dtype=dtype))
            whole = content(name, 0)
            box = Box(start=(0,) * len(shape), shape=shape)
            pieces.append(Piece(tensor=index, box=box, buffer=index, offset=0, strides=whole.stride(), dtype=dtype))
            buffers.append(Buffer(name=name, nbytes=whole.numel() * whole.element_size()))
        mine = Manifest(rank=0, world_size=1, host="here", tensors=tensors, pieces=pieces, buffers=buffers)
        options = PlanOptions(
            bucket_bytes=self.bucket_bytes, max_tmp_bytes=2**20, leaf_bytes=LEAF, landing=self.landing, verify=self.verify,
            shared_landing=self.landing != "streamed" and self.transport == "shm",
        )  # fmt: skip
        self.built = build_plan([mine], [manifests], options)
        self.programs = {rank: self.built.target_program(0, rank) for rank in range(len(manifests))}
        return reply

    async def connect(self, **changes):
        reply = await self.plan()
        self.generation += 1
        links = [
            RankLinks(rank=rank, program=program.to_bytes(), transport=self.transport, descriptors=self.descriptors)
            for rank, program in self.programs.items()
        ]
        fields = {
            "target": 0, "plan_digest": self.built.digest, "manifest_digest": reply.manifest_digest,
            "source_incarnation": self.incarnation, "generation": self.generation, "landing": self.landing, "in_flight": "keep",
            "verify": self.verify, "ranks": links, "timeout_s": PATIENCE_S,
        }  # fmt: skip
        return await self.client.connect(ConnectRequest(**{**fields, **changes}))

    def digests(self, version):
        return {str(rank): digest_of(program, version) for rank, program in self.programs.items()} if self.verify else {}

    async def prepare(self, version, *, push_id=None, timeout_s=PATIENCE_S, **changes):
        if push_id is None:
            self.pushes += 1
            push_id = f"{self.incarnation}-{self.pushes}"
        self.push_id = push_id
        fields = {
            "num_buckets": self.built.total_tasks, "version": version, "plan_digest": self.built.digest, "push_id": push_id,
            "timeout_s": timeout_s,
        }  # fmt: skip
        return await self.client.prepare(PrepareRequest(**{**fields, **changes}))

    async def complete(self, version, *, push_id=None, timeout_s=PATIENCE_S, **changes):
        digests = self.digests(version)
        fields = {"version": version, "push_id": push_id or self.push_id, "digests": digests, "timeout_s": timeout_s}
        return await self.client.complete(CompleteRequest(**{**fields, **changes}))

    async def abort(self, *, push_id=None, reason="by the test"):
        return await self.client.abort(AbortRequest(push_id=push_id or self.push_id, reason=reason))

    async def close(self):
        await self.client.close()


class ShmSource(ToySource):
    """A toy source that really sends, over shared memory."""

    def __init__(self, address, **options):
        super().__init__(address, **options)
        self.workers = Workers(1)
        self.sender = None

    async def connect(self, **changes):
        await self.plan()
        if self.sender is not None:
            await self.sender.close()
        self.sender = ShmSender(
            program=self.built.source_program(0), landing=self.landing, ring_nbytes=2**20, workers=self.workers,
            on_lost=lambda receiver, error: None,
        )  # fmt: skip
        receivers = [ReceiverId(0, rank) for rank in self.programs]
        offers = await self.sender.offer(receivers)
        self.descriptors = {"0": offers[0]}
        linking = asyncio.create_task(self.sender.link(receivers, timeout_s=PATIENCE_S))
        try:
            ack = await super().connect(**changes)
            failed = await linking
        finally:
            linking.cancel()
        assert not failed, failed
        return ack

    async def send(self, version):
        await self.sender.begin(self.push_id, timeout_s=PATIENCE_S)
        by_index = {task.index: task for program in self.programs.values() for task in program.tasks}
        for task in self.built.source_program(0).tasks:
            loan = await self.sender.claim(task)
            loan.memory.copy_(bucket_of(by_index[task.index], version))
            sent = self.sender.send(task, loan.memory, [r for r in task.receivers if r in self.sender.linked])
            for completion in sent.values():
                if completion is not None:
                    try:
                        await completion
                    except TransportError:
                        continue
            loan.release()

    async def push(self, version, *, timeout_s=PATIENCE_S):
        reply = await self.prepare(version, timeout_s=timeout_s)
        if reply.status != "ready":
            return reply
        await self.send(version)
        result = await self.complete(version, timeout_s=timeout_s)
        await self.sender.end([ReceiverId(0, rank) for rank in self.programs] if result.success else [])
        return result

    async def close(self):
        await super().close()
        if self.sender is not None:
            await self.sender.close()
        self.workers.close()


# ranks in processes of their own


def arm(step, action):
    """At the fence's step ``step``: ``kill`` or ``stop`` this process, or ``raise``. Once."""
    original = getattr(Fence, step)
    armed = [True]

    def hooked(self, *args, **options):
        if armed[0]:
            armed[0] = False
            if action == "raise":
                raise ZeroDivisionError(f"by the test, at {step}")
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        return original(self, *args, **options)

    setattr(Fence, step, hooked)


class RankServer:
    """A rank in a process of its own: one JSON command a line, one JSON answer a line."""

    def __init__(self):
        self.loader = self.receiver = None

    async def start(self, *, rank, world, listen, leader=None, version=None, movable=False):
        self.loader = ToyLoader(rank=rank, world=world, movable=movable, version=version)
        self.receiver = Receiver(
            self.loader, listen, rank=rank, world_size=world, leader=leader, initial_version=version, heartbeat_s=0.2,
            patience_s=2.0,
        )  # fmt: skip
        await self.receiver.start()
        return self.receiver.address

    async def arm(self, step, action):
        arm(step, action)

    async def look(self, newest):
        receiver = self.receiver
        return {
            "state": receiver.state, "version": receiver.version, "serving": receiver.serving_version,
            "holds": self.loader.versions(newest), "calls": self.loader.calls,
        }  # fmt: skip

    async def serve(self, connection):
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(f"{os.getpid()}\n".encode())
        while line := await reader.readline():
            name, arguments = json.loads(line)
            answer = await getattr(self, name)(**arguments)
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()
        if self.receiver is not None:
            await self.receiver.close()


def nursery(path):
    """Import everything once; fork a rank for each connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    asyncio.run(RankServer().serve(connection))
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    nursery(sys.argv[1])
