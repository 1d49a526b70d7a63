"""``syncline bench run``: what pushes take on this machine, beside the machine's own rates and other people's ways.

Every row is one JSON line on standard output (see `syncline.bench.measure.rows`); a table for people comes at the end, on
standard error. ``bench/README.md`` says how to read each figure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from syncline.bench.outputs import check_outputs
from syncline.engine import TransferConfig
from syncline.engine.config import Transport
from syncline.engine.messages import Landing
from syncline.scheduler.options import Route

from .bed import Setup, bed, setup_of
from .bench import Bench
from .errors import BenchError
from .peers import LEAST, NAMES, peer_rows
from .plot import plot_rows
from .rows import Row, Skipped
from .suites import SUITES, Suite
from .table import print_table


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Measure pushes on this machine: one configuration, or suites of them; one JSON line a row.

    With any of --source, --target, --targets, --transport, --landing and --route, that configuration is one row, and suites are
    run only if they are asked for. Without: all suites.
    """

    source: str | None = None
    """Who sends: module, module:N (replicas), fsdp:N, tp:N; N ranks."""
    target: str | None = None
    """Who receives: module, or tp:N for a tensor-parallel target of N ranks."""
    targets: int | None = None
    """How many of it."""
    transport: Transport | None = None
    landing: Landing | None = None
    route: Route | None = None
    suites: tuple[Suite, ...] | None = None
    """What else to measure."""
    peers: bool = False
    """Measure others on the same tensors, beside ours: naive broadcast, TorchRL, Awex, checkpoint-engine, vLLM."""
    peer_python: tuple[str, ...] = ()
    """Interpreters that have them (and syncline) where this one has not: awex=PYTHON torchrl=PYTHON ..."""
    repeat: int = 12
    """Pushes of each row, the cold one among them."""
    tensors: int = 40
    nbytes: int = 409_600_000
    """Bytes of each push, float32, in ``tensors`` tensors."""
    max_tmp_bytes: str = "256MiB"
    bucket_bytes: str | None = None
    """By default a quarter of the watermark, at most 32MiB."""
    h2d_concurrency: int = 2
    prepare_concurrency: int = 2
    send_concurrency: int = 2
    workers: int = 2
    verify: bool = True
    """Digests over every landed byte."""
    control: bool = True
    """After each row, push a bucket that was corrupted on purpose, and say whether that was noticed."""
    floors: bool = True
    """Measure what the machine can do with the same bytes; rows are held against that."""
    out: Path | None = None
    """Also append the rows to this file."""
    plot: Path | None = None
    """Draw the rows into this PNG file."""
    table: bool = True
    """Print a table at the end, on standard error."""

    def knobs(self) -> dict[str, Any]:
        """Those of every push; what is not here has its default."""
        names = (
            "max_tmp_bytes", "bucket_bytes", "h2d_concurrency", "prepare_concurrency", "send_concurrency", "workers", "verify",
        )  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def configuration(self) -> tuple[Setup, dict[str, Any]] | None:
        """The one that was asked for, if any."""
        how = {"transport": self.transport, "landing": self.landing, "route": self.route}
        given = {name: value for name, value in how.items() if value is not None}
        if not given and self.source is None and self.target is None and self.targets is None:
            return None
        setup = setup_of(
            self.source or "module", self.target or "module", targets=1 if self.targets is None else self.targets,
            tensors=self.tensors, nbytes=self.nbytes, movable=self.landing == "mapped",
        )  # fmt: skip
        return setup, given

    def interpreters(self) -> dict[str, Path]:
        """By package. Raises `BenchError` for what cannot be one."""
        found = {}
        for text in self.peer_python:
            name, equals, path = text.partition("=")
            if not equals or name not in NAMES:
                raise BenchError(f"--peer-python {text}: write NAME=PYTHON, where NAME is one of {', '.join(NAMES)}")
            found[name] = Path(path)
        return found


def bench_of(args: RunArgs) -> Bench:
    """The bench that ``args`` ask for."""
    counts = {"--repeat": args.repeat, "--tensors": args.tensors, "--nbytes": args.nbytes}
    if wrong := [f"{name} is {count}" for name, count in counts.items() if count < 1]:
        raise BenchError(f"{', '.join(wrong)}; it must be at least 1")
    if args.peers and args.repeat < LEAST:
        raise BenchError(f"--peers compares medians of at least {LEAST // 2} warm samples: --repeat {LEAST} or more")
    TransferConfig(**args.knobs())  # refuses what makes no sense, as the next one does
    args.configuration()
    return Bench(
        tensors=args.tensors, nbytes=args.nbytes, repeat=args.repeat, knobs=args.knobs(), control=args.control, out=args.out,
        pythons=args.interpreters(),
    )  # fmt: skip


async def measure(args: RunArgs, bench: Bench) -> None:
    """Measure all that ``args`` ask for."""
    one = args.configuration()
    if args.floors:
        await bench.measure_floors()
    if one is not None:
        setup, how = one
        async with bed(setup) as here:
            await bench.push_row(_name(setup, how), here, **how)
    for suite in _suites(args, alone=one is None):
        await SUITES[suite](bench)
    if args.peers:
        await peer_rows(bench)


def _suites(args: RunArgs, *, alone: bool) -> Sequence[Suite]:
    if args.suites is not None:
        return args.suites
    return tuple(SUITES) if alone and not args.peers else ()


def _name(setup: Setup, how: dict[str, Any]) -> str:
    words = [how[name] for name in ("transport", "landing", "route") if name in how]
    return " ".join((*words, str(setup)))


def main(args: RunArgs) -> int:
    """Entry point of the command line: 1 if something arrived wrong, or something wrong was not noticed."""
    check_outputs(args.out, args.plot)
    if args.plot is not None:
        import matplotlib as _  # noqa: F401 - said at the start, not after minutes of work
    bench = bench_of(args)
    try:
        uvloop.run(measure(args, bench))
    finally:
        _show(args, bench)
    return 0 if all(map(_is_good, bench.rows)) else 1


def _is_good(row: Row | Skipped) -> bool:
    if isinstance(row, Skipped):
        return not row.failed
    return row.integrity is not False and row.control in {None, "caught"}


def _show(args: RunArgs, bench: Bench) -> None:
    if not bench.rows:
        return
    if args.plot is not None and not plot_rows(bench.rows, args.plot):
        print("no row to draw", file=sys.stderr)
    if args.table:
        try:
            print_table(bench.rows, sys.stderr)
        except ModuleNotFoundError:
            print("no table: rich is not installed (pip install 'syncline[bench]')", file=sys.stderr)
