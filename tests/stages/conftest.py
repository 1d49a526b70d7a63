"""Source and target ranks for tests of stages and transports: in this process, or in processes of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio

PEER = Path(__file__).with_name("peer.py")
PATIENCE_S = 60.0


def _load(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def standins() -> ModuleType:
    """The module with what stands for CUDA where there is no GPU."""
    return _load("standins", PEER.with_name("standins.py"))


@pytest.fixture(scope="session")
def peer(standins: ModuleType) -> ModuleType:
    """The module with `SourceRank`, `TargetRank`, `make_spec` and the reference."""
    return _load("syncline_tests_peer", PEER)


@pytest.fixture
def doorways() -> Iterator[Path]:
    """A directory for doorways (short: the path of a socket has 107 bytes at most). Every one must be gone in the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        yield Path(home)
        assert list(Path(home).iterdir()) == []


class World:
    """All ranks of one transfer, in this process and on this loop."""

    def __init__(self, peer: ModuleType, spec: dict[str, Any], directory: Path) -> None:
        self.peer = peer
        self.spec = spec
        self.sources = [peer.SourceRank(spec, rank, directory=str(directory)) for rank in range(spec["sources"])]
        self.targets = {
            receiver: peer.TargetRank(spec, receiver.target, receiver.rank) for receiver in self.sources[0].receivers
        }
        self._names = itertools.count()
        self._pushes = itertools.count()

    async def connect(self, receivers: Any = None) -> None:
        """Make all links (or those of ``receivers``)."""
        receivers = list(self.targets if receivers is None else receivers)
        if self.sources[0].communicator is None and len(self.sources) > 1:
            rendezvous = self.peer.Rendezvous.host(self.peer.LOOPBACK, timeout_s=30)
            await asyncio.gather(*(s.group(rendezvous, "", "sources") for s in self.sources))
        offers = [await source.sender.offer(receivers) for source in self.sources]
        links = [source.sender.link(receivers, timeout_s=30) for source in self.sources]
        for receiver in receivers:
            links.append(self.targets[receiver].link({rank: offer[receiver.target] for rank, offer in enumerate(offers)}))
        for failed in await asyncio.gather(*links):
            assert not failed, failed

    async def push(self, version: int, receivers: Any = None) -> dict[Any, Any]:
        """Fill, push, commit; what each receiver said. Fails if digests differ."""
        receivers = list(self.targets if receivers is None else receivers)
        push_id = f"push-{next(self._pushes)}"
        for source in self.sources:
            source.fill(version)
        for receiver in receivers:
            await self.targets[receiver].half.begin(push_id, timeout_s=30)
        results = await asyncio.gather(
            *(source.push(push_id) for source in self.sources), *(self.targets[r].receive() for r in receivers)
        )
        sent, got = results[: len(self.sources)], dict(zip(receivers, results[len(self.sources) :], strict=True))
        assert [s["error"] for s in sent] == [""] * len(sent)
        assert [g["error"] for g in got.values()] == [""] * len(got)
        if self.spec["verify"]:
            for receiver, said in got.items():
                parts = [s["digests"].get(f"{receiver.target}:{receiver.rank}", 0) for s in sent]
                assert said["digest"] == sum(parts) % 2**128
        for receiver in receivers:
            await self.targets[receiver].commit()
        for source in self.sources:
            await source.end()
        return got

    async def close(self) -> None:
        for target in self.targets.values():
            await target.close()
        for source in self.sources:
            await source.close()


@pytest_asyncio.fixture
async def world(peer: ModuleType, doorways: Path) -> AsyncIterator[Any]:
    """``await world(**spec)``: a connected `World`."""
    made: list[World] = []

    async def make(*, connect: bool = True, **spec: Any) -> World:
        made.append(World(peer, peer.make_spec(**spec), doorways))
        if connect:
            await made[-1].connect()
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture
def new_world(peer: ModuleType, doorways: Path) -> Any:
    """``new_world(**spec)``: a `World` that is not connected, on the loop that runs; to be closed by the test."""
    return lambda **spec: World(peer, peer.make_spec(**spec), doorways)


class Process:
    """A peer in a process of its own: ``await process.push(push_id="a")`` runs that command there."""

    def __init__(self, pid: int, answers: asyncio.StreamReader, commands: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._lines = answers
        self._commands = commands
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, nursery: str) -> Process:
        answers, commands = await asyncio.open_unix_connection(nursery, limit=2**24)
        return cls(int(await answers.readline()), answers, commands)

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            number = next(self._numbers)
            self._answers[number] = asyncio.get_running_loop().create_future()
            self._commands.write((json.dumps([number, name, arguments]) + "\n").encode())
            async with asyncio.timeout(PATIENCE_S):
                return await self._answers[number]

        return call

    async def _line(self) -> bytes:
        try:
            return await self._lines.readline()
        except ConnectionError:
            return b""

    async def _read(self) -> None:
        while line := await self._line():
            number, result, error = json.loads(line)
            answer = self._answers.pop(number)
            if answer.done():
                continue
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(RuntimeError(error))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EOFError("the peer process is gone"))
                answer.exception()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if not self._reader.done():
            self.signal(signal.SIGKILL)
        await self._reader
        self._commands.close()


class Processes:
    """All ranks of one transfer, each in a process of its own."""

    def __init__(self, spec: dict[str, Any], nursery: str, directory: str) -> None:
        self.spec = spec
        self.nursery = nursery
        self.directory = directory
        self.receivers = [(t, r) for t, n in enumerate(spec["targets"]) for r in range(n)]
        self.sources: list[Process] = []
        self.targets: dict[tuple[int, int], Process] = {}
        self.started: list[Process] = []
        self._pushes = itertools.count()

    async def _new(self) -> Process:
        self.started.append(await Process.start(self.nursery))
        return self.started[-1]

    async def start(self) -> None:
        self.sources = [await self._new() for _ in range(self.spec["sources"])]
        for receiver in self.receivers:
            self.targets[receiver] = await self._new()
        makes = [
            source.make_source(spec=self.spec, rank=rank, directory=self.directory) for rank, source in enumerate(self.sources)
        ]
        makes += [target.make_target(spec=self.spec, target=t, rank=r) for (t, r), target in self.targets.items()]
        await asyncio.gather(*makes)
        if len(self.sources) > 1:
            endpoint = await self.sources[0].host()
            await asyncio.gather(*(source.group(endpoint=endpoint, name="sources") for source in self.sources))
        await self.connect()

    async def restart(self, receiver: tuple[int, int]) -> None:
        """Another process for a target rank, not linked."""
        self.targets[receiver] = await self._new()
        await self.targets[receiver].make_target(spec=self.spec, target=receiver[0], rank=receiver[1])

    async def connect(self, receivers: Any = None) -> None:
        receivers = list(self.receivers if receivers is None else receivers)
        offers = [await source.offer(receivers=receivers) for source in self.sources]
        links = [source.link_source(receivers=receivers, timeout_s=30) for source in self.sources]
        for t, r in receivers:
            descriptors = {str(rank): offer[str(t)] for rank, offer in enumerate(offers)}
            links.append(self.targets[t, r].link_target(descriptors=descriptors, timeout_s=30))
        for failed in await asyncio.gather(*links):
            assert not failed, failed

    async def begin(self, version: int, receivers: Any = None) -> str:
        push_id = f"push-{next(self._pushes)}"
        receivers = list(self.receivers if receivers is None else receivers)
        await asyncio.gather(*(source.fill(version=version) for source in self.sources))
        await asyncio.gather(*(self.targets[r].begin(push_id=push_id) for r in receivers))
        return push_id

    def agrees(self, receiver: tuple[int, int], sent: list[Any], got: Any) -> bool:
        """The receiver has what the sources sent."""
        parts = [s["digests"].get(f"{receiver[0]}:{receiver[1]}", 0) for s in sent]
        return got["error"] == "" and got["digest"] == sum(parts) % 2**128

    async def push(self, version: int, receivers: Any = None) -> None:
        """A push that must go well, and be committed."""
        receivers = list(self.receivers if receivers is None else receivers)
        push_id = await self.begin(version, receivers)
        results = await asyncio.gather(
            *(source.push(push_id=push_id) for source in self.sources), *(self.targets[r].receive() for r in receivers)
        )
        sent, got = results[: len(self.sources)], results[len(self.sources) :]
        assert [s["error"] for s in sent] == [""] * len(sent)
        for receiver, said in zip(receivers, got, strict=True):
            assert self.agrees(receiver, sent, said), (receiver, said)
        await asyncio.gather(*(self.targets[r].commit() for r in receivers))
        await asyncio.gather(*(source.end(committed=receivers) for source in self.sources))
        for receiver in receivers:
            assert await self.targets[receiver].wrong(version=version) == []

    async def close(self) -> None:
        for process in self.started:
            await process.kill()


@pytest.fixture(scope="session")
def nursery() -> Iterator[str]:
    """The socket where peer processes are born."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        path = f"{home}/nursery"
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(PEER.with_name("nursery.py")), path], stdout=subprocess.PIPE, env={**os.environ, **one_thread}
        )
        with process:
            assert process.stdout.readline() == b"ready\n"
            yield path
            process.kill()


@pytest_asyncio.fixture
async def processes(peer: ModuleType, nursery: str, doorways: Path) -> AsyncIterator[Any]:
    """``await processes(**spec)``: a connected `Processes`."""
    made: list[Processes] = []

    async def make(**spec: Any) -> Processes:
        made.append(Processes(peer.make_spec(**spec), nursery, str(doorways)))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.close()
