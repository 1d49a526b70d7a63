"""A real engine and real receivers in one process, over unix sockets, shared memory and gloo.

Sources of several ranks are engines side by side on one loop that meet through a store in memory. Tensors are stamped:
every element carries a number of its own, so that whatever lands in a wrong place is seen there.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.named_box import named_box
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.control_server import ControlServer
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor

PATIENCE_S = 60.0
MODES = [("shm", "staged"), ("shm", "streamed"), ("shm", "mapped"), ("gloo", "staged"), ("gloo", "streamed")]


class MeetingGroup:
    """All that the engine may use of a trainer's process group: the store. Any collective on it is an AttributeError."""

    def __init__(self, store):
        self.store = store

    def get_group_store(self):
        return self.store


class ShardSource:
    """One rank of a source that holds boxes of canonical tensors (a `syncline.engine.source.Source`).

    ``held``: name -> list of (box, local tensor); full shapes and types are those of ``whole``. ``listed``: names that the
    manifest lists (a rank that holds nothing of a tensor may still name it).
    """

    def __init__(self, rank, world, group, whole, held, *, aliases=None, host=None):
        from syncline.engine.host import host_id

        self.rank, self.world_size = rank, world
        self.process_group = group if world > 1 else None
        self.whole, self.held = whole, held
        self.aliases = aliases or {}
        self.host = host or host_id()
        self.devices = {}
        self._cache = None

    def manifest(self):
        if self._cache is None:
            names = list(self.whole)
            tensors = [Tensor(name=n, shape=tuple(t.shape), dtype=dtype_name(t)) for n, t in self.whole.items()]
            pieces, buffers, self.locals = [], [], []
            for name, parts in self.held.items():
                for box, local in parts:
                    extent = 1 + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
                    piece = Piece(
                        tensor=names.index(name), box=box, buffer=len(buffers), offset=0, strides=local.stride(),
                        dtype=dtype_name(local),
                    )  # fmt: skip
                    pieces.append(piece)
                    nbytes = extent * local.element_size()
                    buffers.append(Buffer(name=f"{name}@{box.start}", nbytes=nbytes, device=self.devices.get(name, "cpu")))
                    self.locals.append(local)
            self._cache = Manifest(
                rank=self.rank, world_size=self.world_size, host=self.host, tensors=tensors, pieces=pieces, buffers=buffers,
                aliases=self.aliases, fingerprint=" ".join(str(local.data_ptr()) for local in self.locals),
            )  # fmt: skip
        return self._cache

    def buffers(self):
        self.manifest()
        return self.locals

    def change(self):
        """The content list has changed: the next push plans anew."""
        self._cache = None


def dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def box_of(tensor, index):
    """The box that ``tensor[index]`` is, for an index of slices with step 1."""
    full = tuple(index) + (slice(None),) * (tensor.ndim - len(index))
    ranges = [s.indices(n) for s, n in zip(full, tensor.shape, strict=True)]
    return Box(start=tuple(r[0] for r in ranges), shape=tuple(max(0, r[1] - r[0]) for r in ranges))


def row_shards(whole, world, *, sizes=None, replicated=(), aliases=None, listed=True):
    """Sources that split every tensor by rows (``sizes``: rows per rank, by name), in memory of their own."""
    group = MeetingGroup(dist.HashStore())
    sources = []
    rows = {name: (sizes or {}).get(name) or even(tensor, world) for name, tensor in whole.items()}
    starts = {name: list(itertools.accumulate(counts, initial=0)) for name, counts in rows.items()}
    for rank in range(world):
        held = {}
        for name, tensor in whole.items():
            if name in replicated or not tensor.ndim:
                held[name] = [(Box.whole(tuple(tensor.shape)), tensor.clone())]
                continue
            first, last = starts[name][rank], starts[name][rank + 1]
            if last > first:
                index = (slice(first, last),)
                held[name] = [(box_of(tensor, index), tensor[index].clone())]
        known = whole if listed else {name: whole[name] for name in held}
        sources.append(ShardSource(rank, world, group, known, held, aliases=aliases))
    return sources


def even(tensor, world):
    """Rows per rank as FSDP2 splits them: the first ones get ``ceil(rows / world)`` each, the last may get none."""
    rows = tensor.shape[0] if tensor.ndim else 0
    step = -(-rows // world)
    return [max(0, min(rows, (rank + 1) * step) - rank * step) for rank in range(world)]


def stamped(shapes, *, first=1):
    """Tensors by name in which every element of a float32 or int64 tensor has a number of its own. ``shapes``: name -> shape
    or (shape, dtype). Small types repeat their numbers."""
    found = {}
    at = first
    for name, spec in shapes.items():
        shape, dtype = spec if spec and isinstance(spec[-1], torch.dtype) else (spec, torch.float32)
        count = math.prod(shape)
        values = torch.arange(at, at + count)
        at += count
        if dtype is torch.bool:
            values = (values * 2654435761 >> 7) % 2
        elif dtype in (torch.bfloat16, torch.float16, torch.int8, torch.uint8):
            values = values % 113
        elif dtype.itemsize == 1:  # float8
            values = values % 7
        found[name] = values.reshape(shape).to(dtype)
    return found


class Bag(nn.Module):
    """A module that holds tensors under dotted names, as buffers (so that every type is allowed)."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_buffer(last, tensor)


def poisoned(tensors):
    """Tensors like these, with content that no push sends: NaN, -1, or True where False is."""
    return {name: poison(torch.empty_like(t, memory_format=torch.contiguous_format)) for name, t in tensors.items()}


def poison(tensor):
    with torch.no_grad():
        if tensor.dtype is torch.bool:
            return tensor.fill_(True)
        if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -1)


def same(tensor, expected):
    """Bit for bit, NaNs too."""
    if tensor.shape != expected.shape or tensor.dtype is not expected.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, expected)))


def differing(model, expected):
    """Names whose content in ``model`` is not what ``expected`` says."""
    held = dict(model.state_dict()) if isinstance(model, nn.Module) else model
    assert set(held) == set(expected), set(held) ^ set(expected)
    return [name for name, tensor in expected.items() if not same(held[name], tensor)]


class Target:
    """All ranks of one target."""

    def __init__(self, receivers, loaders):
        self.receivers, self.loaders = receivers, loaders

    @property
    def leader(self):
        return self.receivers[0]

    @property
    def address(self):
        return self.leader.address

    @property
    def states(self):
        return [(receiver.state, receiver.serving_version) for receiver in self.receivers]

    async def served(self, timeout_s=5.0):
        """The version that a forward pass started now reads on the leader; None if it is refused."""
        from syncline.engine.errors import NotServing

        try:
            async with self.leader.gate.forward(timeout_s) as version:
                return version
        except NotServing:
            return None


class Pusher:
    """The engines of all ranks of a source, called alike."""

    def __init__(self, engines):
        self.engines = engines

    async def _all(self, calls):
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]
        return results

    async def connect(self):
        await self._all(engine.connect() for engine in self.engines)
        return self

    async def push(self, version):
        """One push; the report, which all ranks share."""
        async with asyncio.timeout(PATIENCE_S):
            reports = await self._all(engine.push(version) for engine in self.engines)
        assert all(report.targets == reports[0].targets for report in reports if report.ok)
        return reports[0]

    async def push_well(self, version):
        report = await self.push(version)
        assert report.ok, str(report)
        return report

    async def results(self, version):
        """What every rank's push came to: a report or an error."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*(engine.push(version) for engine in self.engines), return_exceptions=True)

    async def close(self):
        await asyncio.gather(*(engine.close() for engine in self.engines))


@pytest.fixture
def run_dir():
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        yield Path(home)


@pytest.fixture
async def start_target(run_dir):
    """Starts a target: ``await start_target(module or loader, or one for each rank, **receiver options)``."""
    started = []
    numbers = itertools.count()

    async def start(*loaders, at=None, **options):
        loaders = [ModuleLoader(loader) if isinstance(loader, nn.Module) else loader for loader in loaders]
        home = run_dir / (at or f"t{next(numbers)}")
        receivers = []
        for rank, loader in enumerate(loaders):
            receiver = Receiver(
                loader, f"unix:{home}/{rank}.sock", rank=rank, world_size=len(loaders),
                leader=None if rank == 0 else receivers[0].address, heartbeat_s=0.5, **options,
            )  # fmt: skip
            await receiver.start()
            started.append(receiver)
            receivers.append(receiver)
        async with asyncio.timeout(PATIENCE_S):
            for receiver in receivers:
                await receiver.joined()
        return Target(receivers, loaders)

    yield start
    for receiver in reversed(started):
        await receiver.close()


@pytest.fixture
async def engines():
    """Makes the engines of a source, not connected yet: ``engines(source or model or one for each rank, [target], …)``."""
    made = []

    def make(source, targets, **config):
        sources = source if isinstance(source, list) else [source]
        sources = [s if hasattr(s, "manifest") else ModuleSource(s, world_size=1) for s in sources]
        settings = {"max_tmp_bytes": "1MiB", "push_timeout_s": 30.0, "connect_timeout_s": 30.0, **config}
        remotes = [RemoteTarget(t if isinstance(t, str) else t.address) for t in targets]
        pusher = Pusher([TransferEngine(source=s, targets=remotes, config=TransferConfig(**settings)) for s in sources])
        made.append(pusher)
        return pusher

    yield make
    for pusher in made:
        await pusher.close()


@pytest.fixture
def connect(engines):
    """As `engines`, and connects."""

    async def make(source, targets, **config):
        return await engines(source, targets, **config).connect()

    return make


@pytest.fixture
def calls(monkeypatch):
    """Control calls that any receiver got, by path."""
    counted = Counter()
    read = ControlServer._read

    async def counting(self, request):
        counted[request.path] += 1
        return await read(self, request)

    monkeypatch.setattr(ControlServer, "_read", counting)
    return counted


async def until(predicate, patience_s=PATIENCE_S):
    """Poll a predicate, async or not, until it holds."""
    async with asyncio.timeout(patience_s):
        while True:
            held = predicate()
            if await held if inspect.isawaitable(held) else held:
                return
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def kit():
    """Helpers that are plain functions and classes."""
    return SimpleNamespace(
        Bag=Bag, MeetingGroup=MeetingGroup, ShardSource=ShardSource, box_of=box_of, differing=differing, even=even,
        loader=ModuleLoader, named_box=named_box, poison=poison, poisoned=poisoned, row_shards=row_shards, same=same,
        stamped=stamped, until=until,
    )  # fmt: skip


def pytest_generate_tests(metafunc):
    """``transport`` and ``landing`` take every pair that exists; ``transport`` and ``in_place`` those that keep addresses."""
    for landing, modes in (("landing", MODES), ("in_place", [mode for mode in MODES if mode[1] != "mapped"])):
        if {"transport", landing} <= set(metafunc.fixturenames):
            metafunc.parametrize(("transport", landing), modes, ids=["-".join(mode) for mode in modes])
