"""A bed for measurements: real processes of a source and its targets, on which pushes of any config can be tried in turn.

>>> async with bed(Setup(source="fsdp", source_ranks=2, targets=2)) as here:
...     pushes = await here.push({"transport": "gloo", "landing": "staged"}, repeat=12)
...     await here.control({"transport": "gloo", "landing": "staged"})
'caught'
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from .errors import BenchError
from .peer import Answer, Command, SourceKind
from .processes import Process, processes, together
from .pushes import Pushes
from .shards import nbytes_of, rows_for

_TIMEOUT_S = 600.0
_PER_CORE = 32
"""Processes, at most. Beyond it they take minutes only to start, and the machine's memory."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Who sends what to whom; every rank is a process of its own, on this machine.

    Attributes:
        source: ``module`` (whole tensors, replicated if there are several ranks), ``fsdp`` (FSDP2), ``tp`` (tensor-parallel:
            rows and columns in turn).
        targets, target_ranks: how many targets, of how many ranks each; with several ranks a target is tensor-parallel.
        tensors, nbytes: float32 matrices of about so many bytes in all; `moved_bytes` says how many it came to.
        movable: the targets' parameters may be pointed at shared memory, which landing ``mapped`` needs.
    """

    source: SourceKind = "module"
    source_ranks: int = 1
    targets: int = 1
    target_ranks: int = 1
    tensors: int = 40
    nbytes: int = 409_600_000
    movable: bool = False

    def __post_init__(self) -> None:
        counts = {"source_ranks": self.source_ranks, "targets": self.targets, "target_ranks": self.target_ranks}
        wrong = [f"{name} is {count}" for name, count in counts.items() if count < 1]
        if wrong:
            raise BenchError(f"{'; '.join(wrong)}; there must be at least 1 of each")
        count, most = self.source_ranks + self.targets * self.target_ranks, _PER_CORE * (os.cpu_count() or 1)
        if count > most:
            raise BenchError(
                f"{self}: {count} processes, of {os.cpu_count()} cores; at most {most} run here ({_PER_CORE} a core): "
                "fewer ranks or targets; syncline bench simulate tells of any number"
            )

    @property
    def rows(self) -> int:
        """Of each matrix, of 1024 columns."""
        return rows_for(self.tensors, self.nbytes, self.source_ranks, self.target_ranks)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the weights."""
        return nbytes_of(self.tensors, self.rows)

    def __str__(self) -> str:
        source = f"{self.source}:{self.source_ranks}"
        target = f"tp:{self.target_ranks}" if self.target_ranks > 1 else "module"
        return f"{source} to {target}" if self.targets == 1 else f"{source} to {self.targets} x {target}"


def setup_of(source: str, target: str, *, targets: int = 1, tensors: int, nbytes: int, movable: bool = False) -> Setup:
    """The setup of a source such as ``fsdp:2`` and targets such as ``module`` or ``tp:2``. Raises `BenchError` for others."""
    kind, source_ranks = _side(source, get_args(SourceKind), "--source")
    target_kind, target_ranks = _side(target, ("module", "tp"), "--target")
    if target_kind == "module" and target_ranks > 1:
        raise BenchError(
            f"--target {target}: several ranks are tensor-parallel (tp:{target_ranks}); for more targets: --targets"
        )
    return Setup(
        source=kind, source_ranks=source_ranks, targets=targets, target_ranks=target_ranks, tensors=tensors, nbytes=nbytes,
        movable=movable,
    )  # fmt: skip


def _side(text: str, kinds: Sequence[str], option: str) -> tuple[Any, int]:
    kind, colon, ranks = text.partition(":")
    if kind not in kinds or (colon and not (ranks.isdecimal() and int(ranks))):
        raise BenchError(f"{option} {text}: write KIND or KIND:RANKS, where KIND is one of {', '.join(kinds)}")
    return kind, int(ranks or 1)


class Bed:
    """Running processes. Made by `bed`; its methods are called one after the other."""

    def __init__(self, setup: Setup, folder: Path, targets: list[list[Process]], sources: list[Process]) -> None:
        self.setup = setup
        self._folder = folder
        self._targets = targets
        self._sources = sources
        self._addresses: tuple[str, ...] = ()
        self._content = 1
        self._version = 0

    async def start(self) -> None:
        """Wait until all processes are there."""
        answers = await together([rank[0].answer(_TIMEOUT_S) for rank in self._targets])
        self._addresses = tuple(answer.address for answer in answers)
        others = [process for ranks in self._targets for process in ranks[1:]]
        await together([process.answer(_TIMEOUT_S) for process in (*others, *self._sources)])

    async def push(self, config: Mapping[str, Any], *, repeat: int, corrupt: bool = False) -> Pushes:
        """Connect with ``TransferConfig(**config)``, push ``repeat`` versions of new content, close, and look at every element.

        What a config or a plan is refused for, and what ends a push, is told in the result (`Pushes.error`). The trace is off
        unless ``config`` asks for it. ``corrupt``: one bit of a bucket is flipped on its way out (see `control`).

        Raises:
            BenchError: a process ended or gave no answer.
        """
        self._content += 1
        command = Command(
            do="push", content=self._content, config={"trace": False, **config}, targets=self._addresses, repeat=repeat,
            first=self._version + 1, corrupt=corrupt,
        )  # fmt: skip
        self._version += repeat
        answers = await together([process.ask(command, _TIMEOUT_S) for process in self._sources])
        pushes = answers[0].pushes
        if pushes is None:
            raise BenchError("a source did not say what its pushes were like")
        return msgspec.structs.replace(pushes, intact=all(a.ok and a.state == "COMMITTED" for a in await self._verify()))

    async def control(self, config: Mapping[str, Any]) -> str:
        """The negative control: push a corrupted bucket, with digests if ``config`` has them, and without.

        Returns ``"caught"``, or what was not noticed.
        """
        if config.get("verify", True):
            pushes = await self.push(config, repeat=1, corrupt=True)
            if not any("DigestMismatch" in error for error in pushes.errors):
                return f"missed by digests ({'; '.join(pushes.errors) or 'committed'})"
        pushes = await self.push({**config, "verify": False}, repeat=1, corrupt=True)
        if not pushes.ok:
            return f"failed without digests ({'; '.join(pushes.errors)})"
        return "missed by the look at every element" if pushes.intact else "caught"

    async def naive(self, *, repeat: int) -> tuple[list[float], bool]:
        """The naive way: gather each tensor whole, broadcast it from rank 0. Seconds of each push, and whether all arrived."""
        self._content += 1
        receivers = [process for ranks in self._targets for process in ranks]
        everyone = [self._sources[0], *receivers, *self._sources[1:]]
        command = Command(
            do="naive", content=self._content, repeat=repeat, size=1 + len(receivers),
            store=str(self._folder / f"naive-{self._content}"),
        )  # fmt: skip
        placed = [msgspec.structs.replace(command, place=place) for place in range(len(everyone))]
        answers = await together([process.ask(own, _TIMEOUT_S) for process, own in zip(everyone, placed, strict=True)])
        return answers[0].seconds, all(answer.ok for answer in answers[1 : 1 + len(receivers)])

    async def _verify(self) -> list[Answer]:
        command = Command(do="verify", content=self._content)
        return await together([process.ask(command, _TIMEOUT_S) for ranks in self._targets for process in ranks])


@contextlib.asynccontextmanager
async def bed(setup: Setup) -> AsyncIterator[Bed]:
    """Start the processes of ``setup``; all have ended when this returns."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        each = setup.target_ranks
        async with processes(folder, [*_target_arguments(setup, folder), *_source_arguments(setup, folder)]) as started:
            receivers, sources = started[: setup.targets * each], started[setup.targets * each :]
            targets = [receivers[at : at + each] for at in range(0, len(receivers), each)]
            here = Bed(setup, folder, targets, sources)
            await here.start()
            yield here


def _target_arguments(setup: Setup, folder: Path) -> list[list[str]]:
    found = []
    for target in range(setup.targets):
        leader = f"unix:{folder}/t{target}r0.sock"
        for rank in range(setup.target_ranks):
            arguments = _arguments("target", setup, rank, setup.target_ranks)
            arguments += ["--address", f"unix:{folder}/t{target}r{rank}.sock", *(["--leader", leader] if rank else [])]
            found.append([*arguments, *(["--movable"] if setup.movable else [])])
    return found


def _source_arguments(setup: Setup, folder: Path) -> list[list[str]]:
    more = ["--kind", setup.source, "--store", str(folder / "store")]
    return [[*_arguments("source", setup, rank, setup.source_ranks), *more] for rank in range(setup.source_ranks)]


def _arguments(role: str, setup: Setup, rank: int, size: int) -> list[str]:
    shape = ["--tensors", str(setup.tensors), "--rows", str(setup.rows)]
    return ["--role", role, *shape, "--rank", str(rank), "--world-size", str(size)]
