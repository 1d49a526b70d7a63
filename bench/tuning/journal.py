"""A sweep's file: one measurement a line, appended as it is made, so that a sweep that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from syncline.bench.measure.bed import Setup
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.phases import Phases, Quantiles
from syncline.bench.measure.provenance import Machine, Provenance, load
from syncline.bench.measure.rows import Row, Skipped, line, whole_config

from .records import Record, Request, Sample

_KEY = "sweep"
"""Figure of a row in which request and sample are kept whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What measurements must share to be comparable."""

    machine: Machine
    versions: dict[str, str]
    setup: dict[str, Any]

    def differences(self, other: Origin) -> list[str]:
        """What is not the same, as ``"setup: nbytes 4096, here 8192"``."""
        pairs = (
            ("machine", msgspec.to_builtins(self.machine), msgspec.to_builtins(other.machine)),
            ("versions", self.versions, other.versions),
            ("setup", self.setup, other.setup),
        )
        return [
            f"{what}: {key} {there.get(key)!r}, here {here.get(key)!r}"
            for what, there, here in pairs
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key)
        ]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep others out of a sweep's file: two would disturb each other's measurements, and mix their lines.

    Raises:
        BenchError: another sweep is at it.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BenchError(f"another sweep writes to {path}: wait for its end, or give another --out") from error
        yield


class Journal:
    """The file of one sweep.

    Args:
        path: appended to; made if it is not there.
        setup: who sends to whom.

    Raises:
        BenchError: the file was made on another machine, with other versions or another setup, or is no sweep's file.
    """

    def __init__(self, path: Path, setup: Setup, provenance: Provenance) -> None:
        self._path = path
        self._setup = setup
        self._provenance = provenance
        self.records: list[Record] = []
        if path.exists():
            self.records = self._read()
            _drop_half_line(path)  # not before it is known to be a sweep's

    def _read(self) -> list[Record]:
        here = Origin(
            machine=self._provenance.machine, versions=self._provenance.versions, setup=dataclasses.asdict(self._setup)
        )
        records, origin = read(self._path)
        differences = origin.differences(here) if origin is not None else []
        if differences:
            raise BenchError(
                f"{self._path} is of another sweep, whose figures cannot be compared with those of this one "
                f"({'; '.join(differences)}): give another --out, or the same setup"
            )
        return records

    @property
    def next_block(self) -> int:
        """The first number that no block in the file has."""
        return 1 + max((record.request.block for record in self.records), default=-1)

    def add(self, record: Record, *, control: str | None, knobs: Mapping[str, Any]) -> None:
        """Append a measurement, made with ``TransferConfig(**knobs)``."""
        row = self._row(record, control, knobs) if record.sample.seconds else None
        fields = msgspec.json.decode(line(row)) if row is not None else self._skipped(record)
        fields |= {"setup": dataclasses.asdict(self._setup), "versions": self._provenance.versions}
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode({**fields, _KEY: msgspec.to_builtins(record)}) + b"\n")
        self.records.append(record)

    def _row(self, record: Record, control: str | None, knobs: Mapping[str, Any]) -> Row:
        sample, nbytes, where = record.sample, self._setup.moved_bytes, self._provenance
        warm = sample.warm
        quantiles = Quantiles.of(warm)
        return Row(
            row=_name(record),
            n=len(warm),
            seconds=quantiles,
            first_s=sample.seconds[0],
            first_to_median=sample.seconds[0] / quantiles.median,
            phases=Phases.of(sample.seconds),
            samples=sample.seconds,
            bytes=nbytes,
            gb_s=nbytes / quantiles.median / 1e9,
            span_gb_s=nbytes * len(warm) / sum(warm) / 1e9,
            integrity=sample.intact,
            control=control,
            digests=True,
            knobs=whole_config(knobs),
            load_1m=load(),
            machine=where.machine,
            commit=where.commit,
            dirty=where.dirty,
        )

    def _skipped(self, record: Record) -> dict[str, Any]:
        reason, where = record.sample.refused or record.sample.error, self._provenance
        skipped = Skipped(row=_name(record), skipped=reason, machine=where.machine, commit=where.commit)
        fields: dict[str, Any] = msgspec.to_builtins(skipped)
        return fields


def _name(record: Record) -> str:
    return f"sweep: {record.configuration}"


def _drop_half_line(path: Path) -> None:
    """What follows the last line break was not written to its end: cut it off, so that the next line begins a line."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def read(path: Path) -> tuple[list[Record], Origin | None]:
    """All measurements of a sweep's file and what they share; a last line that was not written to its end is left out.

    Raises:
        BenchError: the file cannot be read or is none of a sweep.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; give a file that syncline bench sweep wrote") from error
    records: list[Record] = []
    origin: Origin | None = None
    for number, one in enumerate(text.split(b"\n")[:-1], start=1):
        if not one.strip():
            continue
        try:
            fields = msgspec.json.decode(one, type=dict[str, Any])
            records.append(_sound(msgspec.convert(fields[_KEY], Record)))
            there = msgspec.convert(fields, Origin)
        except (msgspec.DecodeError, KeyError, ValueError) as error:  # also ValidationError
            raise BenchError(f"{path}:{number}: no measurement of syncline bench sweep: {error}") from error
        origin = origin or there
        if differences := origin.differences(there):
            raise BenchError(f"{path}:{number} is of another sweep than the lines before ({'; '.join(differences)})")
    return records, origin


def _sound(record: Record) -> Record:
    """``record``, if its times are times. Raises `ValueError`."""
    sample = record.sample
    if not all(0 < seconds < math.inf for seconds in sample.seconds) or not 0 <= sample.elapsed_s < math.inf:
        raise ValueError(f"{(*sample.seconds, sample.elapsed_s)} are no seconds")
    return record


def setup_of(origin: Origin) -> Setup:
    """Who sent to whom."""
    return msgspec.convert(origin.setup, Setup)


class Replay:
    """Measurements of an earlier run that a search may have again instead of making them.

    The search asks the same questions as long as it gets the same answers. Where it asks something else (another budget), what
    was measured in other phases still serves; but finalists are only compared with finalists of the same hours, so once
    something new was measured their old measurements are not used.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._left = list(records)
        self._fresh = False

    def take(self, request: Request) -> Sample | None:
        """The earlier answer to this request, once; None if it must be measured."""
        for i, record in enumerate(self._left):
            asked = record.request
            same = (asked.configuration, asked.phase, asked.pushes) == (request.configuration, request.phase, request.pushes)
            if same and not (self._fresh and request.phase == "final"):
                del self._left[i]
                return record.sample
        self._fresh = True
        return None
