"""Real megatron-core on a CPU: four ranks and an engine in processes of their own, laid out anew for each test.

Without megatron-core nothing here is collected. The nox session ``megatron`` installs it, and fails where no test ran.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEADLINE_S = 60.0
RANKS = 4
OTHER_SEED = 99
"""Of the weights that an engine starts with."""
PROMPT = [3, 17, 5, 30, 8, 9, 26, 11]

collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]


class RemoteError(Exception):
    """What a command raised in a worker."""

    def __init__(self, worker: str, error: Mapping[str, Any]) -> None:
        self.kinds: list[str] = error["kinds"]
        self.message: str = error["message"]
        super().__init__(f"in {worker}: {self.kinds[0]}: {self.message}\n{error['traceback']}")


class Zygote:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(DEADLINE_S)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        assert self._control.recv(64) == b"ready", "the zygote has ended"

    def fork(self, role: str, log: Path) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        socket.send_fds(self._control, [json.dumps({"role": role, "log": str(log)}).encode()], [theirs.fileno()])
        theirs.close()
        return int(self._control.recv(64)), ours

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)


class Worker:
    """One worker process; commands are answered one after the other."""

    def __init__(self, zygote: Zygote, role: str, name: str, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.pid, self._socket = zygote.fork(role, self.log)
        self._socket.settimeout(DEADLINE_S)
        self._lines = self._socket.makefile("rb")

    def begin(self, cmd: str, **args: Any) -> None:
        self._socket.sendall(json.dumps({"cmd": cmd, "args": args}).encode() + b"\n")

    def end(self) -> Any:
        """The answer to the command that was begun. Raises `RemoteError`."""
        try:
            line = self._lines.readline()
        except TimeoutError:
            os.kill(self.pid, signal.SIGUSR1)
            pytest.fail(f"{self.name} did not answer within {DEADLINE_S} s\n{self.tail()}")
        if not line:
            pytest.fail(f"{self.name} has ended\n{self.tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RemoteError(self.name, reply["error"])
        return reply["value"]

    def call(self, cmd: str, **args: Any) -> Any:
        self.begin(cmd, **args)
        return self.end()

    def tail(self) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"---- {self.name}, last lines of its log", *text[-60:]])

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class World:
    """A Megatron job of up to four ranks, and an engine that takes its pushes."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.folder = folder
        self.trainers = [Worker(zygote, "trainer", f"trainer{rank}", folder) for rank in range(RANKS)]
        self.engine = Worker(zygote, "engine", "engine", folder)
        self.ranks: list[Worker] = []
        self._count = itertools.count()
        self.version = 0

    def all(self, cmd: str, **args: Any) -> list[Any]:
        """The same command on every rank of the job at once; every answer, or the first error."""
        answers = self.each(cmd, **args)
        for answer in answers:
            if isinstance(answer, RemoteError):
                raise answer
        return answers

    def each(self, cmd: str, **args: Any) -> list[Any]:
        """As `all`, with errors in the place of answers."""
        for rank in self.ranks:
            rank.begin(cmd, **args)
        answers: list[Any] = []
        for rank in self.ranks:
            try:
                answers.append(rank.end())
            except RemoteError as error:
                answers.append(error)
        return answers

    def job(self, ranks: int, parallel: Mapping[str, Any], **build: Any) -> None:
        """A job of ``ranks`` ranks with a model; ``build`` as in `worker.Trainer.do_build`."""
        self.ranks = self.trainers[:ranks]
        store = str(self.folder / f"store-{next(self._count)}")
        for number, rank in enumerate(self.ranks):
            rank.begin("join", rank=number, world_size=ranks, store=store, parallel=parallel)
        for rank in self.ranks:
            rank.end()
        self.build = build
        self.all("build", **build)

    def megatron_logits(self) -> float:
        """Largest difference between what Megatron computes and what transformers does with the original weights."""
        return max(self.all("logits", ids=PROMPT))

    def serve(self, **changes: Any) -> str:
        """An engine of the same kind as the trainer's model, with other weights; returns its address."""
        same = {key: self.build[key] for key in ("family", "hf", "dtype") if key in self.build}
        listen = f"unix:{self.folder}/engine-{next(self._count)}.sock"
        address: str = self.engine.call("serve", **{**same, "seed": OTHER_SEED, "listen": listen, **changes})
        return address

    def connect(self, address: str, *, source: Mapping[str, Any] | None = None, **config: Any) -> None:
        self.all("source", **(source or {}))
        self.all("connect", addresses=[address], config={"transport": "shm", **config})

    def push(self) -> dict[str, Any]:
        """Push the next version from every rank; rank 0's report."""
        self.version += 1
        reports = self.all("push", version=self.version)
        assert all(report["ok"] for report in reports), reports[0]["errors"]
        return dict(reports[0])

    def compare(self, **changes: Any) -> dict[str, Any]:
        """The engine's model with the one that the trainer's weights came from."""
        same = {key: self.build[key] for key in ("family", "hf", "seed", "dtype") if key in self.build}
        return dict(self.engine.call("compare", **{**same, "ids": PROMPT, **changes}))

    def pushed_exactly(self, **changes: Any) -> None:
        """Every tensor is equal bit for bit, and so are logits."""
        found = self.compare(**changes)
        assert found["tensors"] > 10
        assert found["differ"] == []
        assert found["logits"] == 0.0

    def end(self) -> None:
        """Close engine and job, whatever a test left of them."""
        self.each("close")
        self.engine.begin("close")
        try:
            self.engine.end()
        except RemoteError:
            pass

    def close(self) -> None:
        for worker in (*self.trainers, self.engine):
            worker.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def processes(zygote: Zygote) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="sl-mg-"))  # pytest's own are too long for unix sockets
    world = World(zygote, folder)
    yield world
    world.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def world(processes: World) -> Iterator[World]:
    """The processes of the session; what a test builds in them is closed after it."""
    yield processes
    processes.end()


@pytest.fixture
def refused(world: World) -> Callable[..., str]:
    """Connecting must fail: `PlanError` on every rank, and the engine has what it had. Returns the message."""

    def connect(engine: Mapping[str, Any] | None = None, source: Mapping[str, Any] | None = None) -> str:
        address = world.serve(**(engine or {}))
        world.all("source", **(source or {}))
        answers = world.each("connect", addresses=[address], config={"transport": "shm"})
        assert all(isinstance(answer, RemoteError) and "PlanError" in answer.kinds for answer in answers), answers
        assert len({answer.message for answer in answers}) == 1
        assert world.compare(**{**(engine or {}), "seed": OTHER_SEED})["differ"] == []
        assert world.engine.call("state") == ["FENCED", None]
        world.end()
        return str(answers[0].message)

    return connect
