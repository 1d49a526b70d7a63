"""Receivers for tests: in this process over a transport in memory, or in processes of their own over shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

RIG = Path(__file__).with_name("rig.py")


def _load():
    spec = importlib.util.spec_from_file_location("syncline_tests_rig", RIG)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rig():
    """The module with `ToyLoader`, `ToySource` and the reference."""
    return sys.modules.get("syncline_tests_rig") or _load()


@pytest.fixture
def run_dir():
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        yield Path(home)


class Target:
    """All ranks of one target in this process, with a toy source linked to them."""

    def __init__(self, rig, home, world, landing, options):
        self.rig, self.home, self.world, self.landing = rig, home, world, landing
        self.options = options
        self.halves = rig.Halves()
        self.loaders = []
        self.receivers = []
        self.source = None

    async def start(self, *, movable=False, expose=True, version=None, verify=True):
        for rank in range(self.world):
            loader = self.rig.ToyLoader(rank=rank, world=self.world, movable=movable, expose=expose, version=version)
            self.loaders.append(loader)
            self.receivers.append(self.make(rank, loader, version))
            await self.receivers[-1].start()
        async with asyncio.timeout(self.rig.PATIENCE_S):
            for receiver in self.receivers:
                await receiver.joined()
        self.source = self.rig.ToySource(self.leader.address, landing=self.landing, verify=verify)
        await until(self.is_ready)
        await self.source.connect()
        return self

    def make(self, rank, loader, version):
        return self.rig.Receiver(
            loader, f"unix:{self.home}/{rank}.sock", rank=rank, world_size=self.world,
            leader=None if rank == 0 else self.receivers[0].address, initial_version=version, half_factory=self.halves,
            heartbeat_s=0.2, patience_s=5.0, **self.options,
        )  # fmt: skip

    @property
    def leader(self):
        return self.receivers[0]

    async def is_ready(self):
        return (await self.source.client.status()).ready

    def deliver(self, version, *, ranks=None):
        for rank in range(self.world) if ranks is None else ranks:
            self.halves.of[rank].deliver_all(version)

    async def push(self, version):
        """A whole push that has to succeed."""
        reply = await self.source.prepare(version)
        assert reply.status == "ready", reply
        self.deliver(version)
        result = await self.source.complete(version)
        assert result.success, result
        return result

    def states(self):
        return [(receiver.state, receiver.serving_version) for receiver in self.receivers]

    def hold(self, version):
        return all(loader.holds(version) for loader in self.loaders)

    async def close(self):
        if self.source is not None:
            await self.source.close()
        for receiver in reversed(self.receivers):
            await receiver.close()


async def until(predicate, patience_s=30.0):
    """Poll a predicate, async or not, until it holds."""
    async with asyncio.timeout(patience_s):
        while True:
            held = predicate()
            if await held if inspect.isawaitable(held) else held:
                return
            await asyncio.sleep(0.01)


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
async def targets(rig, run_dir):
    """Makes targets in this process: ``await targets(world=2, landing="staged")``."""
    made = []

    async def make(*, world=1, landing="staged", movable=None, expose=True, version=None, verify=True, **options):
        target = Target(rig, run_dir / str(len(made)), world, landing, options)
        made.append(target)
        movable = landing == "mapped" if movable is None else movable
        return await target.start(movable=movable, expose=expose, version=version, verify=verify)

    yield make
    for target in made:
        await target.close()


@pytest.fixture(scope="session")
def nursery():
    """The socket where rank processes are born."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        path = f"{home}/nursery"
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, str(RIG), path], stdout=subprocess.PIPE, env={**os.environ, **one_thread})
        with process:
            assert process.stdout.readline() == b"ready\n"
            yield path
            process.kill()


class RankProcess:
    """One rank in a process of its own. Its end is seen at its connection."""

    def __init__(self, reader, writer, pid):
        self._reader, self._writer, self.pid = reader, writer, pid
        self.address = ""

    async def ask(self, name, **arguments):
        self._writer.write(json.dumps([name, arguments]).encode() + b"\n")
        async with asyncio.timeout(60):
            return json.loads(await self._reader.readline())

    def signal(self, number):
        os.kill(self.pid, number)

    async def gone(self):
        """Wait until the process is dead."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while await self._reader.readline():
                    pass

    async def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        await self.gone()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@pytest.fixture
async def processes(nursery):
    """Starts ranks in processes of their own: ``await processes(rank=0, world=2, listen=…, leader=…)``."""
    made = []

    async def start(**options):
        reader, writer = await asyncio.open_unix_connection(nursery)
        rank = RankProcess(reader, writer, int(await reader.readline()))
        made.append(rank)
        rank.address = await rank.ask("start", **options)
        return rank

    yield start
    for rank in made:
        await rank.end()


class Pair:
    """A whole engine of one rank and targets of one rank each, in this process, over gloo: real pushes of a small model."""

    def __init__(self, run_dir):
        self._run_dir = run_dir
        self._stack = contextlib.AsyncExitStack()
        self.receivers = []
        self.engine = None

    async def start(self, *, targets=1, loader=None, observers=(), ranges=None, **config):
        """Receivers and engine, connected. ``loader``: makes a target's loader of its model."""
        import torch

        from syncline.adapters.engines import ModuleLoader
        from syncline.adapters.trainers import ModuleSource
        from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine

        def model():
            return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])

        make = loader or (lambda module: ModuleLoader(module, movable=False))
        for number in range(targets):
            address = f"unix:{self._run_dir}/target-{number}.sock"
            receiver = Receiver(make(model()), address, observers=observers)
            self._stack.push_async_callback(receiver.close)
            await receiver.start()
            self.receivers.append(receiver)
        knobs = {"transport": "gloo", "max_tmp_bytes": "64KiB", "bucket_bytes": "16KiB", "push_timeout_s": 20.0, **config}
        self.engine = TransferEngine(
            source=ModuleSource(model()), targets=[RemoteTarget(receiver.address) for receiver in self.receivers],
            config=TransferConfig(**knobs), observers=observers, ranges=ranges,
        )  # fmt: skip
        self._stack.push_async_callback(self.engine.close)
        await self.engine.connect()
        return self.engine

    def wrap(self, stage, start):
        """``start(inner, task)`` in the place of a stage's ``start``, from now on."""
        stages = self.engine._session._wiring.driver._stages
        inner = stages[stage].start
        stages[stage] = type("Wrapped", (), {"start": staticmethod(lambda task: start(inner, task))})()

    async def close(self):
        await self._stack.aclose()


@pytest.fixture
async def pair(run_dir):
    pair = Pair(run_dir)
    yield pair
    await pair.close()
