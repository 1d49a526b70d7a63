"""One run of the bench: its floors, its rows, and where they go."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from . import floors
from .bed import Bed, Setup
from .phases import Phases, Quantiles, warm
from .provenance import Provenance, load
from .pushes import Pushes
from .rows import Kind, Row, Skipped, line, whole_config


class Bench:
    """Takes what was measured, and prints it as rows: JSON lines on standard output, and in a file if there is one.

    Args:
        tensors, nbytes: what all rows move.
        repeat: samples of each row, the cold one among them.
        knobs: of every push, beside what makes the row.
        control: push a corrupted bucket after each push row, and say whether that was noticed.
        out: file that rows are appended to.
        pythons: interpreters that have other people's packages, by package; this one by default.

    Attributes:
        rows: all so far.
    """

    def __init__(
        self, *, tensors: int, nbytes: int, repeat: int, knobs: Mapping[str, Any] = {}, control: bool = True,
        out: Path | None = None, pythons: Mapping[str, Path] = {},
    ) -> None:  # fmt: skip
        self.tensors, self.nbytes, self.repeat = tensors, nbytes, repeat
        self.knobs = dict(knobs)
        self.control = control
        self.rows: list[Row | Skipped] = []
        self._out = out
        self._pythons = dict(pythons)
        self._provenance = Provenance.here()
        self._rates: dict[str, float] = {}  # of floors, bytes a second

    def python_of(self, package: str) -> str:
        """The interpreter that somebody else's package is to be run with."""
        return str(self._pythons.get(package, sys.executable))

    def setup(self, **how: Any) -> Setup:
        """A setup that moves this run's tensors."""
        return Setup(tensors=self.tensors, nbytes=self.nbytes, **how)

    def add(
        self, name: str, seconds: Sequence[float], *, kind: Kind, nbytes: int = 0, versions: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Row:  # fmt: skip
        """Print a row of ``seconds`` (the first one cold).

        Args:
            more: fields of `Row`; anything else is among its ``figures``.
        """
        phases = Phases.of(seconds)
        steady = seconds[phases.warm_from :]
        quantiles = Quantiles.of(steady)
        over = self._over_floor(quantiles.median, nbytes)
        own = {field.name for field in msgspec.structs.fields(Row)}
        where = self._provenance
        row = Row(
            row=name,
            kind=kind,
            n=len(steady),
            seconds=quantiles,
            first_s=seconds[0],
            first_to_median=seconds[0] / quantiles.median,
            phases=phases,
            samples=tuple(seconds),
            bytes=nbytes,
            gb_s=nbytes / quantiles.median / 1e9 if nbytes else None,
            span_gb_s=nbytes * len(steady) / sum(steady) / 1e9 if nbytes else None,
            over_floor=over,
            ratio_to_memcpy=1 / over[floors.MEMCPY] if floors.MEMCPY in over else None,
            load_1m=load(),
            machine=where.machine,
            versions={**where.versions, **(versions or {})},
            commit=where.commit,
            dirty=where.dirty,
            figures={key: value for key, value in more.items() if key not in own},
            **{key: value for key, value in more.items() if key in own},
        )
        self.put(row)
        return row

    async def push_row(self, name: str, bed: Bed, *, against: Mapping[str, float] = {}, **knobs: Any) -> Row | Skipped:
        """Push with the run's knobs and these, and print the row; see `push_result`."""
        config = {**self.knobs, **knobs}
        pushes = await bed.push(config, repeat=self.repeat)
        caught = await bed.control(config) if self.control and pushes.reports else None
        return self.push_result(
            name, pushes, nbytes=bed.setup.moved_bytes, integrity=pushes.ok and pushes.intact, control=caught, config=config,
            against=against, setup=asdict(bed.setup),
        )  # fmt: skip

    def push_result(
        self, name: str, pushes: Pushes, *, nbytes: int, config: Mapping[str, Any], against: Mapping[str, float] = {},
        **more: Any,
    ) -> Row | Skipped:  # fmt: skip
        """Print the row of ``pushes`` that were made with ``config``. What was refused or failed at once is skipped.

        Args:
            against: other rows' medians: ``{"naive": seconds}`` becomes the figure ``ratio_to_naive``.
            more: as in `add`.
        """
        if not pushes.reports:
            return self.note(name, "; ".join(pushes.errors), failed=True)
        seconds = pushes.seconds
        median = Quantiles.of(warm(seconds)).median
        figures = _figures(pushes) | {f"ratio_to_{name}": median / theirs for name, theirs in against.items()}
        return self.add(
            name, seconds, kind="push", nbytes=nbytes, digests=bool(config.get("verify", True)), knobs=whole_config(config),
            **figures, **more,
        )  # fmt: skip

    async def naive_row(self, name: str, bed: Bed) -> Row:
        """The naive way on the same processes: gather each tensor whole, broadcast it."""
        seconds, intact = await bed.naive(repeat=self.repeat)
        return self.add(
            name, seconds, kind="peer", nbytes=bed.setup.moved_bytes, integrity=intact, digests=False, setup=asdict(bed.setup)
        )

    def note(self, name: str, reason: str, *, failed: bool = False) -> Skipped:
        """Print a row that was not measured, and why."""
        skipped = Skipped(
            row=name, skipped=reason, failed=failed, machine=self._provenance.machine, commit=self._provenance.commit
        )
        self.put(skipped)
        return skipped

    def put(self, row: Row | Skipped) -> None:
        """Print a row as it is."""
        self.rows.append(row)
        text = line(row) + "\n"
        sys.stdout.write(text)
        sys.stdout.flush()
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(text)

    def relay(self, row: Row | Skipped) -> None:
        """Print a row that another process measured on this machine, held against the floors of this run."""
        if isinstance(row, Row):
            row = msgspec.structs.replace(row, over_floor=self._over_floor(row.seconds.median, row.bytes))
        self.put(row)

    async def measure_floors(self) -> None:
        """All floors of this machine; rows that come after them are held against them."""
        size, repeat = (self.tensors, self.nbytes, self.repeat), self.repeat
        self._floor(floors.MEMCPY, floors.memcpy(*size))
        self._floor(floors.MEMMOVE, floors.memmove(self.nbytes, repeat))
        self._floor(floors.LOOPBACK, await floors.loopback(self.nbytes, repeat))
        for name, floor in floors.device_floors().items():
            self._floor(name, floor(self.nbytes, repeat))

    def _over_floor(self, seconds: float, nbytes: int) -> dict[str, float]:
        return {floor: seconds * rate / nbytes for floor, rate in self._rates.items()} if nbytes else {}

    def _floor(self, name: str, seconds: Sequence[float]) -> None:
        self._rates[name] = self.nbytes / self.add(name, seconds, kind="floor", nbytes=self.nbytes).seconds.median


def _figures(pushes: Pushes) -> dict[str, Any]:
    later = pushes.reports[1:] or pushes.reports
    middle = {
        name: statistics.median(getattr(push, name) for push in later) for name in ("source_free_s", "commit_s", "pause_s")
    }
    return {
        "connect_s": pushes.connect_s,
        "sent_bytes": pushes.sent_bytes,
        "tasks": pushes.tasks,
        "peak_tmp_bytes": pushes.peak_tmp_bytes,
        "landing_bytes": pushes.landing_bytes,
        "busy_s": pushes.busy_s,
        "gather_messages": pushes.gather_messages,
        **middle,
        **({"errors": pushes.errors} if pushes.errors else {}),
    }
