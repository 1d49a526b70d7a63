"""A bed for measurements on one GPU: real processes of a source and a target, on which pushes can be tried in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .gpu_peer import Answer, Command, Facts, Place
from .measure.errors import BenchError
from .measure.pushes import Pushes

_TIMEOUT_S = 180.0
_END_S = 15.0
_LINE_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class GpuSetup:
    """Who sends what to whom, all on one device.

    Attributes:
        tensors, rows, columns: bf16 matrices; with several source ranks each holds an equal part of the rows.
        place: where the source keeps them.
        fp8: the target holds FP8 of 128x128 blocks, quantized on the way.
        nccl: every process counts as a host of its own, so that NCCL takes several on one GPU.
    """

    device: str = "cuda"
    tensors: int = 4
    rows: int = 256
    columns: int = 512
    place: Place = "device"
    fp8: bool = False
    source_ranks: int = 1
    nccl: bool = False

    @property
    def nbytes(self) -> int:
        """Of the weights as the source holds them."""
        return self.tensors * self.rows * self.columns * 2


class Peer:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @classmethod
    async def start(cls, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Peer:
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "syncline.bench.gpu_peer", *arguments, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=file, limit=_LINE_BYTES, env={**os.environ, **environment},
            )  # fmt: skip
        return cls(process, log)

    async def answer(self, timeout_s: float = _TIMEOUT_S) -> Answer:
        """Its next answer. Raises `BenchError` if it ended, or says nothing in time."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"a measured process gave no answer in {timeout_s:g} s:\n{self.said}") from None
        if not line:
            raise BenchError(f"a measured process ended (exit code {await self.process.wait()}):\n{self.said}")
        return msgspec.json.decode(line, type=Answer)

    async def ask(self, command: Command) -> Answer:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        return await self.answer()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def end(self) -> None:
        """Close its input, upon which it ends; kill it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    @property
    def said(self) -> str:
        """The end of what it wrote to standard error."""
        return self._log.read_text()[-3000:]


class GpuBed:
    """Running processes. Made by `gpu_bed`; its methods are called one after the other.

    Attributes:
        peak_bytes: temporary device memory of the last pushes, on the source rank where it was most.
    """

    def __init__(self, setup: GpuSetup, folder: Path) -> None:
        self.setup = setup
        self.sources: list[Peer] = []
        self.target: Peer
        self._folder = folder
        self._started = 0
        self._address = ""
        self._content = 0
        self._version = 0
        self.peak_bytes = 0

    async def start(self) -> None:
        """Start all, and wait until they are there."""
        for rank in range(self.setup.source_ranks):
            shape = ["--rank", str(rank), "--world-size", str(self.setup.source_ranks), "--store", str(self._folder / "store")]
            self.sources.append(await self._peer("source", *shape, "--place", self.setup.place))
        await self.start_target()
        await asyncio.gather(*(peer.answer() for peer in self.sources))

    async def start_target(self) -> None:
        """A target at the one address; where there was one, it has ended."""
        path = self._folder / "target.sock"
        path.unlink(missing_ok=True)
        self.target = await self._peer("target", "--address", f"unix:{path}")
        self._address = (await self.target.answer()).address

    async def push(self, config: Mapping[str, Any], *, repeat: int = 1, keep: bool = False) -> Pushes:
        """Connect, push ``repeat`` versions of a new content, close, and look at every element that has arrived."""
        pushes = await self.push_only(config, repeat=repeat, keep=keep)
        if not pushes.ok:
            return pushes
        seen = await self.target.ask(Command(do="verify", content=self._content))
        return msgspec.structs.replace(pushes, intact=seen.ok and seen.state == "COMMITTED")

    async def push_only(self, config: Mapping[str, Any], *, repeat: int = 1, keep: bool = False) -> Pushes:
        """The same without the look at what has arrived. ``keep``: see `Command`."""
        self._content += 1
        self.peak_bytes = 0
        command = Command(
            do="push", content=self._content, config={"trace": False, **config}, targets=(self._address,), repeat=repeat,
            first=self._version + 1, keep=keep,
        )  # fmt: skip
        self._version += repeat
        answers = await asyncio.gather(*(peer.ask(command) for peer in self.sources))
        self.peak_bytes = max(answer.facts.device_peak_bytes if answer.facts else 0 for answer in answers)
        pushes = answers[0].pushes
        if pushes is None:
            raise BenchError("a source did not say what its pushes were like")
        return pushes

    async def facts(self) -> tuple[Facts, Facts]:
        """What the first source rank and the target hold."""
        answers = await asyncio.gather(*(peer.ask(Command(do="facts")) for peer in (self.sources[0], self.target)))
        found = [answer.facts or Facts() for answer in answers]
        return found[0], found[1]

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(peer.end() for peer in (*self.sources, self.target)))

    async def _peer(self, role: str, *arguments: str) -> Peer:
        setup = self.setup
        shape = ["--device", setup.device, "--tensors", str(setup.tensors), "--rows", str(setup.rows)]
        shape += ["--columns", str(setup.columns), *(["--fp8"] if setup.fp8 else [])]
        self._started += 1
        environment = {}
        if setup.nccl:  # NCCL refuses two ranks on one GPU of one host
            environment = {"NCCL_HOSTID": f"syncline-{self._started}", "NCCL_SOCKET_IFNAME": "lo"}
        return await Peer.start(["--role", role, *shape, *arguments], self._folder / f"{self._started}.log", environment)


@contextlib.asynccontextmanager
async def gpu_bed(setup: GpuSetup) -> AsyncIterator[GpuBed]:
    """Start the processes of ``setup``; all have ended when this returns."""
    with tempfile.TemporaryDirectory(prefix="syncline-gpu-") as name:
        here = GpuBed(setup, Path(name))
        try:
            await here.start()
            yield here
        finally:
            await here.close()
