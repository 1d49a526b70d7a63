"""A world of source and target ranks in numpy that executes programs literally, with references of its own."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor, row_major
from syncline.scheduler.plan import Plan
from syncline.scheduler.programs import Message, Region, SourceTask, TargetProgram

NUMPY = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int64": np.int64,
    "int32": np.int32, "int16": np.int16, "uint8": np.uint8, "int8": np.int8, "bool": np.bool_,
    "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8, "complex64": np.complex64,
}  # fmt: skip
"""How an element is held here. bfloat16 and float8 are opaque bits: they are never cast in these tests."""


def content(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A canonical tensor: every element tells its global index (exactly so below 2048, as a hash in small types)."""
    index = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
    kind = NUMPY[dtype]
    salt = sum(name.encode()) % 13
    if dtype == "bool":
        return ((index * 2654435761 + salt) >> 5) % 3 == 0
    if np.dtype(kind).itemsize == 1:
        return ((index * 167 + salt) % 127).astype(kind)
    return (index + salt).astype(kind)


def elements(memory: np.ndarray, region: Region | tuple) -> np.ndarray:
    """The region as a writable view of raw memory (uint8). Fails where it reaches beyond."""
    _, offset, shape, strides, dtype = region
    kind = np.dtype(NUMPY[dtype])
    size = kind.itemsize
    if np.prod(shape, dtype=np.int64):
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        assert offset >= 0
        assert (last + 1) * size <= len(memory), f"{region} is beyond {len(memory)} bytes"
    flat = memory[offset * size :]
    flat = flat[: len(flat) // size * size].view(kind)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * size for s in strides))


def write(memory: np.ndarray, counts: np.ndarray, dst: Region, values: np.ndarray) -> None:
    """Write, and count how often each byte was written."""
    elements(memory, dst)[...] = values
    size = np.dtype(NUMPY[dst.dtype]).itemsize
    places = dst.offset + sum(
        (np.arange(n) * s).reshape([-1 if i == d else 1 for i in range(len(dst.shape))])
        for d, (n, s) in enumerate(zip(dst.shape, dst.strides, strict=True))
    )
    places = (np.broadcast_to(places, dst.shape).reshape(-1, 1) * size + np.arange(size)).ravel()
    np.add.at(counts, places, 1)


@dataclass
class Rank:
    """A rank's memory: one array of bytes a buffer."""

    manifest: Manifest
    memory: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def source(cls, manifest: Manifest, contents: dict[str, np.ndarray]) -> Rank:
        """Memory filled as the manifest says; everything that no piece describes is junk."""
        rank = cls.poisoned(manifest)
        for piece in manifest.pieces:
            tensor = manifest.tensors[piece.tensor]
            name = manifest.aliases.get(tensor.name, tensor.name)
            box = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
            region = (piece.buffer, piece.offset, piece.box.shape, piece.strides, piece.dtype)
            elements(rank.memory[piece.buffer], region)[...] = contents[name][box]
        return rank

    @classmethod
    def poisoned(cls, manifest: Manifest) -> Rank:
        return cls(manifest, [np.full(buffer.nbytes, 0xA5, np.uint8) for buffer in manifest.buffers])


class World:
    """Executes a plan: every message is packed, sent and unpacked, every bucket assembled, sent and landed."""

    def __init__(self, plan: Plan, sources: list[Manifest], targets: list[list[Manifest]], contents: dict) -> None:
        self.plan = plan
        self.sources = {m.rank: Rank.source(m, contents) for m in sources}
        self.targets = {(t, m.rank): Rank.poisoned(m) for t, ms in enumerate(targets) for m in ms}
        self.programs = {rank: plan.source_program(rank) for rank in self.sources}
        self.receiving = {key: plan.target_program(*key) for key in self.targets}
        self.buckets: dict[int, np.ndarray] = {}
        self.sent: Counter[int] = Counter()
        self.written = {key: [np.zeros(len(m), np.int64) for m in rank.memory] for key, rank in self.targets.items()}

    def run(self) -> World:
        wire: dict[tuple[int, int, int], np.ndarray] = {}
        tasks = sorted((t.index, rank, t) for rank, program in self.programs.items() for t in program.tasks)
        for _, group in itertools.groupby(tasks, key=lambda row: row[0]):
            members = list(group)
            for _, rank, task in members:
                for message in task.sends:
                    key = (rank, task.owner, message.tag)
                    assert key not in wire
                    assert message.peer == task.owner
                    wire[key] = self._pack(rank, message)
                    self.sent[rank] += message.nbytes
            (owner, task), *more = [(rank, task) for _, rank, task in members if rank == task.owner]
            assert not more
            self.buckets[task.index] = self._assemble(owner, task, wire)
            self.sent[owner] += task.nbytes * len(task.receivers)
        assert not wire, f"never received: {list(wire)}"
        for key, program in self.receiving.items():
            self._land(key, program)
        return self

    def _pack(self, rank: int, message: Message) -> np.ndarray:
        payload = np.full(message.nbytes, 0x5A, np.uint8)
        counts = np.zeros(message.nbytes, np.int64)
        for copy in message.copies:
            write(payload, counts, copy.dst, self._read(rank, copy.src, copy.dst))
        assert counts.max(initial=0) <= 1
        if message.direct:
            (copy,) = message.copies
            assert copy.src.dtype == copy.dst.dtype
            assert (counts == 1).all()
            run = self.sources[rank].memory[copy.src.buffer][copy.src.offset * elsize(copy.src) :][: message.nbytes]
            assert bytes(run) == bytes(payload), "a direct message is contiguous where it is sent from"
        return payload

    def _read(self, rank: int, src: Region, dst: Region) -> np.ndarray:
        assert src.shape == dst.shape
        values = elements(self.sources[rank].memory[src.buffer], src)
        return values.astype(NUMPY[dst.dtype]) if src.dtype != dst.dtype else values

    def _assemble(self, owner: int, task: SourceTask, wire: dict) -> np.ndarray:
        bucket, counts = np.full(task.nbytes, 0x5A, np.uint8), np.zeros(task.nbytes, np.int64)
        for copy in task.local:
            write(bucket, counts, copy.dst, self._read(owner, copy.src, copy.dst))
        for message in task.receives:
            payload = wire.pop((message.peer, owner, message.tag))
            assert len(payload) == message.nbytes
            for copy in message.copies:
                write(bucket, counts, copy.dst, elements(payload, copy.src))
            if message.direct:
                (copy,) = message.copies
                run = bucket[copy.dst.offset * elsize(copy.dst) :][: message.nbytes]
                assert bytes(run) == bytes(payload), "a direct message is contiguous where it arrives"
        inside = np.zeros(task.nbytes, bool)
        for segment in task.segments:
            assert segment.offset % 256 == 0
            assert not inside[segment.offset : segment.offset + segment.nbytes].any()
            inside[segment.offset : segment.offset + segment.nbytes] = True
        assert counts.max(initial=0) <= 1
        assert ((counts == 1) == inside).all()
        return bucket

    def _land(self, key: tuple[int, int], program: TargetProgram) -> None:
        rank = self.targets[key]
        for task in program.tasks:
            assert len(self.buckets[task.index]) == task.nbytes
            for landing in task.landings:
                segment = landing.segment
                data = self.buckets[task.index][segment.offset : segment.offset + segment.nbytes]
                values = data.view(NUMPY[segment.dtype]).reshape(segment.box.shape)
                assert len(landing.dests) == len(landing.pieces) >= 1
                for dest in dict.fromkeys(landing.dests):
                    assert (dest.dtype, dest.shape) == (segment.dtype, segment.box.shape)
                    write(rank.memory[dest.buffer], self.written[key][dest.buffer], dest, values)

    def digest(self, key: tuple[int, int]) -> int:
        """The digest of what a receiver got, from the segments of its program."""
        total = 0
        for task in self.receiving[key].tasks:
            for landing in task.landings:
                segment = landing.segment
                leaves, at, number = segment.leaves, segment.offset, segment.leaves.first
                assert leaves.blocks * leaves.block_nbytes == segment.nbytes
                for _ in range(leaves.blocks):
                    end = at + leaves.block_nbytes
                    while at < end:
                        stop = min(at + leaves.leaf_nbytes, end)
                        seed = (leaves.item_uid + number) % 2**64
                        total += xxhash.xxh3_128_intdigest(self.buckets[task.index][at:stop].tobytes(), seed=seed)
                        at, number = stop, number + 1
        return total % 2**128


def elsize(region: Region) -> int:
    return np.dtype(NUMPY[region.dtype]).itemsize


def expected_buffers(
    manifest: Manifest, contents: dict[str, np.ndarray], skip: frozenset[str] = frozenset()
) -> list[np.ndarray]:
    """A target rank's buffers after a push, by plain assignment from whole tensors."""
    rank = Rank.poisoned(manifest)
    for piece in manifest.pieces:
        name = manifest.tensors[piece.tensor].name
        if name not in skip:
            box = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
            region = (piece.buffer, piece.offset, piece.box.shape, piece.strides, piece.dtype)
            values = contents[name][box]
            same = values.dtype == NUMPY[piece.dtype]
            elements(rank.memory[piece.buffer], region)[...] = values if same else values.astype(NUMPY[piece.dtype])
    return rank.memory


def reference_digest(items: list[tuple[str, str, Box, np.ndarray]], leaf_bytes: int) -> int:
    """The digest of whole items, from the words of the contract: leaf axis, leaves of a block, seeds."""
    total = 0
    for name, dtype, box, values in items:
        start, shape = ",".join(map(str, box.start)), ",".join(map(str, box.shape))
        uid = xxhash.xxh3_64_intdigest(f"{name}|{dtype}|{start}|{shape}".encode())
        size = values.dtype.itemsize
        rows = values.reshape(values.shape or (1,))
        axis = 0
        while axis < rows.ndim - 1 and int(np.prod(rows.shape[axis + 1 :])) * size > leaf_bytes:
            axis += 1
        step = int(np.prod(rows.shape[axis + 1 :], dtype=np.int64)) * size
        per_leaf = max(1, leaf_bytes // step)
        number = 0
        for block in rows.reshape((-1, *rows.shape[axis:])):
            for at in range(0, len(block), per_leaf):
                leaf = np.ascontiguousarray(block[at : at + per_leaf]).tobytes()
                total += xxhash.xxh3_128_intdigest(leaf, seed=(uid + number) % 2**64)
                number += 1
    return total % 2**128


def manifest(rank: int = 0, world_size: int = 1, *, host: str = "here", **parts) -> Manifest:
    """A rank that holds tensors, each piece contiguous in a buffer of its own.

    Args:
        parts: ``tensors`` is name -> (shape, dtype), or (shape, dtype, group), or (shape, dtype, group, boxes): whole unless
            boxes say else. The rest goes to the manifest; ``device`` and ``kind`` to all buffers.
    """
    device, kind = parts.pop("device", "cpu"), parts.pop("kind", "memory")
    tensors, pieces, buffers = [], [], []
    for name, facts in parts.pop("tensors").items():
        shape, dtype, group, boxes = (*facts, *(0, [Box.whole(facts[0])])[len(facts) - 2 :])
        tensors.append(Tensor(name=name, shape=shape, dtype=dtype, group=group))
        for box in boxes:
            nbytes = box.volume * ITEMSIZE.get(dtype, 1)
            place = {"tensor": len(tensors) - 1, "buffer": len(buffers), "offset": 0, "strides": row_major(box.shape)}
            pieces.append(Piece(box=box, dtype=dtype, **place))
            buffers.append(Buffer(name=f"{name}[{len(buffers)}]", nbytes=nbytes, device=device, kind=kind))
    return Manifest(rank=rank, world_size=world_size, host=host, tensors=tensors, pieces=pieces, buffers=buffers, **parts)


def row_shards(tensors: dict, world_size: int, *, replicas: int = 1, hosts: int = 1, **parts) -> list[Manifest]:
    """Ranks that hold rows of every tensor (uneven as ``torch.chunk`` cuts), the whole ``replicas`` times over."""
    shards, rows = world_size // replicas, []
    for rank in range(world_size):
        held = {}
        for name, (shape, dtype, *group) in tensors.items():
            block = -(-shape[0] // shards)
            start = min(block * (rank % shards), shape[0])
            box = Box(start=(start, *(0,) * (len(shape) - 1)), shape=(min(block, shape[0] - start), *shape[1:]))
            held[name] = (shape, dtype, *(group or [0]), [box] if box.volume else [])
        rows.append(manifest(rank, world_size, host=f"host{rank * hosts // world_size}", tensors=held, **parts))
    return rows


@dataclass(frozen=True)
class Simulator:
    """What tests of plans use."""

    World = World
    NUMPY = NUMPY
    content = staticmethod(content)
    expected_buffers = staticmethod(expected_buffers)
    reference_digest = staticmethod(reference_digest)
    manifest = staticmethod(manifest)
    row_shards = staticmethod(row_shards)


@pytest.fixture(scope="session")
def sim() -> Simulator:
    return Simulator()
