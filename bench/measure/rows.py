"""`Row`: one measured thing with its provenance, as one JSON object a line. `Skipped`: what could not be measured, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec

from syncline.engine import TransferConfig

from .errors import BenchError
from .phases import Phases, Quantiles
from .provenance import Machine

Kind = Literal["push", "floor", "peer", "work"]
"""``push``: ours. ``floor``: what the machine can do. ``peer``: somebody else's way. ``work``: no bytes are moved."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `line` writes it, `read` reads it.

    Attributes:
        row: its name; rows of one name are comparable if machine, setup and knobs are the same.
        n: warm samples, of which ``seconds`` are the quantiles.
        first_s, first_to_median: the cold sample, and how many times the warm median it is.
        phases: which samples are cold, ramp and warm.
        samples: seconds of all of them, in order; each, like the quantiles, is finite and above 0 (else ValueError).
        bytes: of the weights; 0 where none are moved.
        gb_s: ``bytes`` over the median, in 1e9 bytes a second. span_gb_s: bytes of all warm samples over their sum.
        over_floor: for each floor of the same run, the median over what the floor takes for as many bytes.
        ratio_to_memcpy: rate over that of a one-thread copy (the inverse of that floor's ``over_floor``).
        integrity: every element was looked at and is right. None where there is nothing to look at.
        control: ``caught`` if a bucket that was corrupted on purpose was noticed; None where there is no such control.
        digests: whether the content was digested on both sides.
        knobs: the whole `TransferConfig`. setup: who sends to whom.
        load_1m: the machine's load average when the row was done.
        figures: what this row alone has; in the line they are keys like the others.
    """

    row: str
    kind: Kind = "push"
    n: int = 0
    seconds: Quantiles
    first_s: float = 0.0
    first_to_median: float = 0.0
    phases: Phases | None = None
    samples: tuple[float, ...] = ()
    bytes: int = 0
    gb_s: float | None = None
    span_gb_s: float | None = None
    over_floor: dict[str, float] = {}
    ratio_to_memcpy: float | None = None
    integrity: bool | None = None
    control: str | None = None
    digests: bool | None = None
    knobs: dict[str, Any] | None = None
    setup: dict[str, Any] | None = None
    load_1m: float | None = None
    machine: Machine = Machine()
    versions: dict[str, str] = {}
    commit: str | None = None
    dirty: bool | None = None
    figures: dict[str, Any] = {}

    def __post_init__(self) -> None:
        wrong = next((s for s in (*self.samples, *msgspec.structs.astuple(self.seconds)) if not 0 < s < math.inf), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is among the seconds of {self.row!r}; they are finite and above 0")
        if self.phases is not None and not 0 <= self.phases.warm_from <= len(self.samples):
            raise ValueError(f"warm_from of {self.row!r} is {self.phases.warm_from}, of {len(self.samples)} samples")

    @property
    def warm(self) -> tuple[float, ...]:
        """The warm samples."""
        return self.samples[self.phases.warm_from :] if self.phases is not None else ()


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """What was not measured, and why not. ``failed``: it should have been; it was tried and went wrong."""

    row: str
    skipped: str
    failed: bool = False
    machine: Machine = Machine()
    commit: str | None = None


def line(row: Row | Skipped) -> str:
    """The row as one line of JSON, without a line break."""
    fields: dict[str, Any] = msgspec.to_builtins(row)
    figures = fields.pop("figures", {})
    return msgspec.json.encode({**fields, **figures}).decode()


def parse(text: str | bytes) -> Row | Skipped:
    """A line that `line` wrote. Lines of older versions lack fields; what is left out gets its default."""
    fields = msgspec.json.decode(text, type=dict[str, Any])
    if "skipped" in fields:
        return msgspec.convert(fields, Skipped)
    known = {field.name for field in msgspec.structs.fields(Row)}
    figures = {name: value for name, value in fields.items() if name not in known}
    # Lines of earlier versions have min, median and max only.
    seconds = fields.get("seconds", {})
    if isinstance(seconds, dict):
        fields["seconds"] = {"p90": seconds.get("max"), "p99": seconds.get("max"), **seconds}
    return msgspec.convert({**fields, "figures": figures}, Row)


def read(path: Path) -> list[Row | Skipped]:
    """All rows of a file. Raises `BenchError` with the line's number for what is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; give a file that syncline bench run --out wrote") from error
    found = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            found.append(parse(text))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the former: also ValidationError
            raise BenchError(f"{path}:{number}: no row of syncline bench run: {error}") from error
    return found


def whole_config(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """All knobs of ``TransferConfig(**knobs)``, with defaults and sizes resolved; without the secret."""
    config = TransferConfig(**knobs)
    shown = asdict(config) | {"max_tmp_bytes": config.watermark, "bucket_bytes": config.bucket}
    shown.pop("secret")
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(shown))  # as it will be read back
    return plain
