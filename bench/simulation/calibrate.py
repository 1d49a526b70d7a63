"""A cost model of this machine, from primitives: memory, digests, gloo messages, and pushes of next to nothing.

Pushes of 64 KiB say what control and Python cost; no push of any size that is to be predicted is looked at.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from syncline.bench.measure.bed import Setup, bed
from syncline.bench.measure.errors import BenchError

from .hardware import Cores, checked
from .local import scenario_of
from .primitives import Loopback, Rate, loopback, memory_rates
from .simulate import simulate

_SMALL = 65_536
_MANY = 64
_ROUNDS = 40
_STEPS = 18
_PASSES = 3

SHM: Mapping[str, Any] = {"transport": "shm", "landing": "staged"}
GLOO: Mapping[str, Any] = {"transport": "gloo", "landing": "staged"}
_ONE = Setup(tensors=1, nbytes=_SMALL)
_TWO_TARGETS = Setup(tensors=1, nbytes=_SMALL, targets=2)
_TWO_SOURCES = Setup(source="fsdp", source_ranks=2, tensors=1, nbytes=_SMALL)
_PIECES = Setup(tensors=_MANY, nbytes=_SMALL * _MANY)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A field of the cost model, and the small push that says what it is."""

    field: str
    setup: Setup
    config: Mapping[str, Any]
    most_s: float

    def __str__(self) -> str:
        return f"{self.setup.moved_bytes} bytes, {self.setup}, {dict(self.config)}"


_FITS = (
    _Fit(field="begin_s", setup=_ONE, config=SHM, most_s=0.1),
    _Fit(field="piece_s", setup=_PIECES, config={**SHM, "bucket_bytes": _SMALL * _MANY}, most_s=1e-3),
    _Fit(field="task_s", setup=_PIECES, config={**SHM, "bucket_bytes": _SMALL}, most_s=0.01),
    _Fit(field="target_s", setup=_TWO_TARGETS, config=SHM, most_s=0.1),
    _Fit(field="source_s", setup=_TWO_SOURCES, config=GLOO, most_s=0.1),
)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        memory: ``copy``, ``digest`` and ``copy_digest``.
        loopback: gloo between two processes.
        pushes_s: seconds of the small push of each field in `_FITS`, medians.
    """

    cores: int
    memory: dict[str, Rate]
    loopback: Loopback
    pushes_s: dict[str, float]


async def measure(*, repeat: int = 5, tell: Callable[[str], None] = lambda _text: None) -> Measured:
    """Measure this machine's primitives. Takes a minute or two, and wants it to be quiet.

    Raises:
        BenchError: a measured process failed.
    """
    tell("memory and digests")
    memory = await asyncio.to_thread(memory_rates, repeat)
    tell("gloo between two processes, and between four")
    link = await loopback(repeat)
    pushes_s: dict[str, float] = {}
    for setup in dict.fromkeys(fit.setup for fit in _FITS):
        tell(f"pushes of next to nothing: {setup}, {setup.tensors} tensor(s)")
        async with bed(setup) as here:
            for fit in (fit for fit in _FITS if fit.setup == setup):
                pushes = await here.push(fit.config, repeat=_ROUNDS)
                if not pushes.ok:
                    raise BenchError(f"a push that was to be measured failed: {pushes.errors}")
                pushes_s[fit.field] = statistics.median(pushes.seconds[_ROUNDS // 4 :])
    return Measured(cores=len(os.sched_getaffinity(0)), memory=memory, loopback=link, pushes_s=pushes_s)


def fitted(measured: Measured) -> Cores:
    """The cost model in which primitives take as long as they were measured to take."""
    memory, link = measured.memory, measured.loopback
    found = Cores(
        name="this-machine", cores=measured.cores, copy=memory["copy"].work(), digest=memory["digest"].work(),
        copy_digest=memory["copy_digest"].work(), loopback=link.rate.work(), loopback_s=link.latency_s, round_s=link.latency_s,
        notify_s=link.latency_s / 2, task_s=0.0, land_s=0.0, piece_s=0.0, begin_s=0.0, end_s=0.0, target_s=0.0, source_s=0.0,
        sources={
            **{name: str(rate) for name, rate in memory.items()},
            "loopback": f"{link.rate}; a small message {link.latency_s * 1e6:.0f} us one way",
            **{fit.field: f"a push of {fit} took {measured.pushes_s[fit.field] * 1e3:.2f} ms" for fit in _FITS},
        },
    )  # fmt: skip
    for fit in _FITS * _PASSES:  # what one field has to explain depends on the others
        found = _fitted(found, fit, measured.pushes_s[fit.field])
    checked(found)
    return found


def _fitted(hardware: Cores, fit: _Fit, measured_s: float) -> Cores:
    """The value of a field with which a push takes as long as it was measured to take: the middle of a closing interval."""
    low, high = 0.0, fit.most_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        seconds = simulate(scenario_of(fit.setup, fit.config, _with(hardware, fit.field, middle))).seconds
        low, high = (middle, high) if seconds < measured_s else (low, middle)
    return _with(hardware, fit.field, (low + high) / 2)


def _with(hardware: Cores, field: str, value: float) -> Cores:
    also = {"begin_s": "end_s", "task_s": "land_s"}.get(field)
    return msgspec.structs.replace(hardware, **{field: value, **({also: value} if also else {})})
