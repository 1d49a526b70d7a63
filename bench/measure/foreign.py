"""Somebody else's transfer as processes of our own making: ``PYTHON -m MODULE '{...}'``, one for each rank.

They may run in another environment, which must have syncline in it too. What they print last is a JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from syncline.bench.endings import tied

from .errors import BenchError

_DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Package:
    """Somebody else's package.

    Attributes:
        distribution: as it is installed.
        imports: a module that its transfer needs.
        module: ours, that runs one rank of it.
    """

    distribution: str
    imports: str
    module: str


async def version(package: Package, python: str) -> tuple[str, str]:
    """The version that ``python`` has, or an empty text; and why not, in that case."""
    script = f"import {package.imports}, syncline.bench.measure; from importlib import metadata"
    script += f"; print(metadata.version({package.distribution!r}))"
    try:
        asked = await asyncio.create_subprocess_exec(
            python, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return "", f"{python}: {error.strerror}"
    out, said = await asked.communicate()
    if asked.returncode == 0:
        return out.decode().split()[-1], ""
    lines = said.decode().splitlines()
    return "", lines[-1] if lines else f"{python} ended with exit code {asked.returncode}"


async def run_ranks(package: Package, python: str, arguments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run a process for each of ``arguments``; what each printed last. All have ended, with all that they started.

    Raises:
        BenchError: one failed, or they did not end in time; says what was printed.
    """
    ranks = [
        await asyncio.create_subprocess_exec(
            *tied([python, "-m", package.module, msgspec.json.encode(one).decode()]), start_new_session=True,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        for one in arguments
    ]  # fmt: skip
    try:
        async with asyncio.timeout(_DEADLINE_S):
            said = await asyncio.gather(*(rank.communicate() for rank in ranks))
    except TimeoutError:
        raise BenchError(f"{package.distribution}: not done in {_DEADLINE_S:g} s") from None
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # what it started is in its session, too
                os.killpg(rank.pid, signal.SIGKILL)
            await rank.wait()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode:
            last = "\n".join(errors.decode().splitlines()[-12:])
            raise BenchError(f"{package.distribution}: a rank ended with exit code {rank.returncode}:\n{last}")
    return [msgspec.json.decode(out.splitlines()[-1], type=dict[str, Any]) for out, _ in said]
