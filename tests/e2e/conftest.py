"""Real processes: ranks of a source, ranks of targets, and what is done to them.

Workers are forked from one process that has imported everything (`zygote.py`). Each runs in a session of its own; all of them
are killed, and looked for, at the end of the test. A wait that passes its deadline fails with the stacks of every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEADLINE_S = 60.0
DUMP_S = 3.0
SHM = Path("/dev/shm")


class RemoteError(Exception):
    """What a command raised in a worker."""

    def __init__(self, worker: str, error: dict[str, Any]) -> None:
        self.kinds: list[str] = error["kinds"]
        self.message: str = error["message"]
        super().__init__(f"in {worker}: {self.kinds[0]}: {self.message}\n{error['traceback']}")


class WorkerGone(Exception):
    """The worker ended before it answered."""


class Zygote:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(DEADLINE_S)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        assert self._receive() == {"ready": True}

    def fork(self, role: str, log: Path) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        request = json.dumps({"op": "fork", "role": role, "log": str(log)}).encode()
        socket.send_fds(self._control, [request], [theirs.fileno()])
        theirs.close()
        return int(self._receive()["pid"]), ours

    def status(self, pid: int) -> int:
        """Exit status of a worker that has ended; negative for a signal."""
        self._control.send(json.dumps({"op": "status", "pid": pid}).encode())
        return int(self._receive()["status"])

    def _receive(self) -> dict[str, Any]:
        data = self._control.recv(2**16)
        assert data, "the zygote has ended"
        return dict(json.loads(data))

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)


class Worker:
    """One worker process."""

    def __init__(self, cluster: Cluster, name: str, role: str) -> None:
        self.name = name
        self.log = cluster.folder / f"{name}.log"
        self.pid, self._socket = cluster.zygote.fork(role, self.log)
        self.pidfd = os.pidfd_open(self.pid)
        self.status: int | None = None
        self._cluster = cluster
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=2**26)
        self._reader = asyncio.create_task(self._read(reader))

    async def call(self, cmd: str, *, timeout: float = DEADLINE_S, **args: Any) -> Any:
        """Run a command in the worker. Raises `RemoteError`, `WorkerGone`; fails the test after ``timeout`` seconds."""
        call = self.begin(cmd, **args)
        try:
            return await asyncio.wait_for(asyncio.shield(call), timeout)
        except TimeoutError:
            pytest.fail(f"{self.name} did not answer {cmd!r} within {timeout} s\n{self._cluster.dump()}")

    def begin(self, cmd: str, **args: Any) -> asyncio.Future[Any]:
        """Start a command in the worker; the future has its answer."""
        assert self._writer is not None
        self._count += 1
        call: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # not everyone looks at every answer
        if self._reader is None or self._reader.done():
            call.set_exception(WorkerGone(f"{self.name} has ended"))
            return call
        self._calls[self._count] = call
        self._writer.write(json.dumps({"id": self._count, "cmd": cmd, "args": args}).encode() + b"\n")
        return call

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                reply = json.loads(line)
                call = self._calls.pop(reply["id"])
                if call.done():
                    continue
                if "error" in reply:
                    call.set_exception(RemoteError(self.name, reply["error"]))
                else:
                    call.set_result(reply["value"])
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerGone(f"{self.name} has ended\n{self.tail()}"))

    # ---- signals and the end

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    @property
    def alive(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    @property
    def stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    async def until_stopped(self, timeout: float = DEADLINE_S) -> None:
        await self._cluster.until(lambda: self.stopped, f"{self.name} is stopped", timeout)

    async def ended(self, timeout: float = DEADLINE_S) -> int:
        """Wait for the process to end; returns its exit status."""
        await self._cluster.until(lambda: not self.alive, f"{self.name} ends", timeout)
        if self.status is None:
            self.status = self._cluster.zygote.status(self.pid)
        return self.status

    async def close(self) -> None:
        self._cluster.note_shared_memory()
        self.send(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.ended(10)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        os.close(self.pidfd)

    def tail(self, lines: int = 60) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"---- {self.name} (pid {self.pid}), last lines of its log", *text[-lines:]])


@dataclass
class Target:
    """A target: its ranks and its address."""

    name: str
    ranks: list[Worker]
    listen: list[str]
    address: str = ""

    @property
    def leader(self) -> Worker:
        return self.ranks[0]

    async def state(self) -> dict[str, Any]:
        return dict(await self.leader.call("state"))


@dataclass
class Source:
    """A source: its ranks."""

    ranks: list[Worker]
    addresses: list[str] = field(default_factory=list)

    async def all(self, cmd: str, *, timeout: float = DEADLINE_S, **args: Any) -> list[Any]:
        """The same command on every rank at once; every answer, or the first error after all have answered."""
        answers = await self.each(cmd, timeout=timeout, **args)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise errors[0]
        return answers

    async def each(self, cmd: str, *, timeout: float = DEADLINE_S, **args: Any) -> list[Any]:
        """As `all`, with errors in the place of answers."""
        calls = [rank.call(cmd, timeout=timeout, **args) for rank in self.ranks]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, (RemoteError, WorkerGone)):
                raise answer
        return list(answers)

    async def push(self, version: int, *, timeout: float = DEADLINE_S, **args: Any) -> dict[str, Any]:
        """Push on every rank; all must report the same. Returns rank 0's report."""
        reports = await self.all("push", version=version, timeout=timeout, **args)
        took = [report.pop("took_s") for report in reports]
        assert all(report == reports[0] for report in reports), reports
        return {**reports[0], "took_s": max(took)}

    async def become(self, version: int) -> None:
        await self.all("become", version=version)


class Cluster:
    """The workers of one test."""

    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote
        self.folder = Path(tempfile.mkdtemp(prefix="sl-e2e-"))  # pytest's own are too long for unix sockets
        self.workers: list[Worker] = []
        self.shared_memory: set[str] = set()
        self._names = 0

    async def worker(self, role: str, name: str) -> Worker:
        self._names += 1
        worker = Worker(self, f"{self._names:02d}-{name}", role)
        self.workers.append(worker)
        await worker.open()
        return worker

    async def source(self, ranks: int, *, build: dict[str, Any], role: str = "source") -> Source:
        """A source of ``ranks`` ranks; ``build`` as in `SourceActor.do_build`."""
        self._names += 1
        store = self.folder / f"store-{self._names}"
        source = Source(ranks=[await self.worker(role, f"source{rank}") for rank in range(ranks)])
        inits = [w.call("init", rank=r, world_size=ranks, store=str(store)) for r, w in enumerate(source.ranks)]
        await asyncio.gather(*inits)
        await source.all("build", **build)
        return source

    async def connect(self, source: Source, targets: Sequence[Target], *, blocking: bool = False, **config: Any) -> None:
        source.addresses = [target.address for target in targets]
        await source.all("engine", addresses=source.addresses, config=config)
        await source.all("connect", blocking=blocking)
        self.note_shared_memory()

    async def target(
        self,
        name: str,
        *,
        ranks: int = 1,
        build: dict[str, Any],
        initial_version: int | None = None,
        listen: Sequence[str] | None = None,
        group: bool = False,
        role: str = "target",
    ) -> Target:
        """A target of ``ranks`` ranks; ``build`` as in `TargetActor.do_build`; ``group``: with a process group of its own."""
        target = Target(
            name=name,
            ranks=[await self.worker(role, f"{name}-{rank}") for rank in range(ranks)],
            listen=list(listen or [f"unix:{self.folder}/{name}-{rank}.sock" for rank in range(ranks)]),
        )
        if group:
            self._names += 1
            store = str(self.folder / f"store-{self._names}")
            await asyncio.gather(*(w.call("init", rank=r, world_size=ranks, store=store) for r, w in enumerate(target.ranks)))
        await asyncio.gather(*(self.build_rank(target, rank, build, initial_version) for rank in range(ranks)))
        return target

    async def build_rank(self, target: Target, rank: int, build: dict[str, Any], initial_version: int | None = None) -> None:
        """Build one rank's model and start its receiver; rank 0's address is the target's."""
        worker, world = target.ranks[rank], len(target.ranks)
        if build["model"]["kind"] == "stamp" and world > 1:
            build = {**build, "model": {**build["model"], "rank": rank, "ranks": world}}
        await worker.call("build", **build)
        leader = target.listen[0] if world > 1 and rank > 0 else None
        address = await worker.call(
            "listen", listen=target.listen[rank], rank=rank, world_size=world, leader=leader, initial_version=initial_version
        )
        if rank == 0:
            target.address = address

    # ---- waiting and looking

    async def until(self, true: Any, what: str, timeout: float = DEADLINE_S) -> None:
        """Poll until ``true()`` (may be async); fails the test after ``timeout`` seconds."""
        give_up = time.monotonic() + timeout
        while True:
            found = true()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            if time.monotonic() > give_up:
                pytest.fail(f"waited {timeout} s in vain until {what}\n{self.dump()}")
            await asyncio.sleep(0.005)

    def dump(self) -> str:
        """The stacks of every thread and asyncio task of every worker, and the ends of their logs."""
        sizes = {}
        for worker in self.workers:
            if worker.alive and not worker.stopped:
                sizes[worker] = worker.log.stat().st_size if worker.log.exists() else 0
                worker.send(signal.SIGUSR1)
                worker.send(signal.SIGUSR2)
        give_up = time.monotonic() + DUMP_S
        while time.monotonic() < give_up and any(worker.log.stat().st_size == size for worker, size in sizes.items()):
            time.sleep(0.02)
        time.sleep(0.2)
        states = [f"{w.name}: {'stopped' if w.stopped else 'alive' if w.alive else 'ended'}" for w in self.workers]
        return "\n".join([", ".join(states), *(worker.tail(200) for worker in self.workers)])

    def note_shared_memory(self) -> None:
        """Remember which directories of shared memory the workers use."""
        for worker in self.workers:
            self.shared_memory |= shared_memory_of(worker)

    def leftovers(self) -> list[str]:
        """Directories of shared memory that the workers used and that are still there."""
        return sorted(path for path in self.shared_memory if Path(path).exists())

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        sessions = {worker.pid for worker in self.workers}
        await self.until(lambda: not processes_of(sessions), "no process of the workers' sessions is left", 10)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def shared_memory_of(worker: Worker) -> set[str]:
    """Directories ``/dev/shm/syncline-…`` in which a worker has something mapped or open, or had when it was killed."""
    texts: list[str] = []
    for file in (Path(f"/proc/{worker.pid}/maps"), worker.log):
        with contextlib.suppress(OSError):
            texts.append(file.read_text(errors="replace"))
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{worker.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                texts.append(str(entry.readlink()))
    return {found for text in texts for found in re.findall(rf"{SHM}/syncline-\w+", text)}


def processes_of(sessions: set[int]) -> list[int]:
    """Processes whose session is one of these."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
async def cluster(zygote: Zygote, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Processes for one test; nothing of them is left after it, whatever they went through."""
    cluster = Cluster(zygote)
    yield cluster
    try:
        await cluster.close()
        left = cluster.leftovers()
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        assert not left, f"shared memory is left behind: {left}"
    finally:
        cluster.remove()


@dataclass(frozen=True)
class Checkpoint:
    """SmolLM2-135M on disk: real weights, random weights of the same config, and what transformers says with the real ones."""

    real: Path
    random: Path
    prompt: list[int]
    logits: Path
    answer: int


@pytest.fixture(scope="session")
def smollm2(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Converted once: reading the GGUF file takes seconds."""
    folder = tmp_path_factory.mktemp("smollm2")

    async def convert() -> Checkpoint:
        cluster = Cluster(zygote)
        try:
            worker = await cluster.worker("target", "convert")
            real, random, logits = folder / "real", folder / "random", folder / "logits.safetensors"
            prompt = await worker.call("convert", name="smollm2", real=str(real), random=str(random), seed=1, timeout=240)
            answer, text = await worker.call("reference", folder=str(real), ids=prompt, out=str(logits))
            assert text == " Paris"
            return Checkpoint(real=real, random=random, prompt=prompt, logits=logits, answer=answer)
        finally:
            await cluster.close()
            cluster.remove()

    return asyncio.run(convert())
