"""Processes that are measured: each reads JSON lines and answers with JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from syncline.bench.endings import tied

from .errors import BenchError
from .peer import Answer, Command

T = TypeVar("T")

_LINE_BYTES = 2**26  # a line with the spans of many pushes
_END_S = 20.0


class Process:
    """A peer process (see `syncline.bench.measure.peer`)."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    async def answer(self, timeout_s: float) -> Answer:
        """The next answer. Raises `BenchError` if the process ended, or says nothing in time."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"a measured process gave no answer in {timeout_s:g} s:\n{self._said()}") from None
        if not line:
            raise BenchError(f"a measured process ended (exit code {await self.process.wait()}):\n{self._said()}")
        return msgspec.json.decode(line, type=Answer)

    async def ask(self, command: Command, timeout_s: float) -> Answer:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        return await self.answer(timeout_s)

    async def end(self) -> None:
        """Close its input, upon which it ends; kill it if it does not."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def _said(self) -> str:
        return self.log.read_text()[-3000:]


@contextlib.asynccontextmanager
async def processes(folder: Path, commands: Sequence[Sequence[str]]) -> AsyncIterator[list[Process]]:
    """Run a peer process for each list of arguments; all have ended when this returns."""
    started: list[Process] = []
    try:
        for number, arguments in enumerate(commands):
            log = folder / f"{number}.log"
            with log.open("w") as file:
                process = await asyncio.create_subprocess_exec(
                    *tied([sys.executable, "-m", "syncline.bench.measure.peer", *arguments]),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file, limit=_LINE_BYTES,
                )  # fmt: skip
            started.append(Process(process, log))
        yield started
    finally:
        await asyncio.gather(*(process.end() for process in started))


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(one) for one in work]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in tasks]
