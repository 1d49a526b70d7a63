"""``syncline bench compare``: what changed between two result files, or two revisions, beyond noise."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import tyro

from .comparing import ALPHA, LEAST, Comparison, compare, regressions
from .errors import BenchError
from .revisions import measure_revisions
from .rows import Row, Skipped, read

_COLUMNS = ("row", "A ms", "B ms", "B / A", "p (Holm)", "B slower than A", "verdict")
_STYLES = {
    "slower": "red",
    "broken": "bold red",
    "faster": "green",
    "mended": "green",
    **dict.fromkeys(("not comparable", "too few", "only in A"), "yellow"),
}


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Say what changed from A to B beyond noise: a JSON line for each row, and a table on standard error.

    Mann-Whitney U on the warm samples, corrected for all rows (Holm).
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Two result files, A and B, that syncline bench run --out wrote. A row that a file has several times: several runs."""
    revisions: tuple[str, ...] = ()
    """Or two revisions, OLD and NEW: both are checked out and measured in turn, OLD NEW NEW OLD."""
    rounds: int = 1
    """How often that is done."""
    run: str = "--suites shm gloo"
    """What is measured of revisions: arguments of syncline bench run, as --run="--suites shm"."""
    repository: Path = Path()
    """The checkout that has the revisions."""
    alpha: float = ALPHA
    """Chance of calling any row changed if none is."""
    least: float = LEAST
    """Smallest change of the median that counts, as a part."""
    across: bool = False
    """Also compare rows of different machines, setups or knobs; it is said of each."""
    fail_on_regression: bool = False
    """Exit with 1, and say why, if a row is slower, or not intact any more; also if B lacks a row of A, or has one
    that cannot be compared with A's."""


def main(args: CompareArgs) -> int:
    """Entry point of the command line."""
    a, b = _sides(args)
    found = compare(a, b, alpha=args.alpha, least=args.least, across=args.across)
    if not found:
        raise BenchError("neither side has a row that was measured")
    for one in found:
        sys.stdout.write(msgspec.json.encode(one).decode() + "\n")
    sys.stdout.flush()
    print_comparison(found, sys.stderr)
    why = regressions(found) if args.fail_on_regression else []
    for reason in why:
        print(f"regression: {reason}", file=sys.stderr)
    return 1 if why else 0


def _sides(args: CompareArgs) -> tuple[Sequence[Row | Skipped], Sequence[Row | Skipped]]:
    if len(args.files) == 2 and not args.revisions:
        return read(args.files[0]), read(args.files[1])
    if len(args.revisions) == 2 and not args.files and args.rounds >= 1:
        old, new = measure_revisions(args.repository, args.revisions, (0, 1, 1, 0) * args.rounds, shlex.split(args.run))
        return old, new
    raise BenchError("give two files, or --revisions OLD NEW (and --rounds of at least 1)")


def print_comparison(found: Sequence[Comparison], out: TextIO) -> None:
    """Print a table, and below it what is to be said of single rows."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, width=None if out.isatty() else 160)
    table = Table(*_COLUMNS, title="B against A: medians of warm samples", title_justify="left")
    for column in table.columns[1:]:
        column.no_wrap = True
    for one in found:
        table.add_row(*_cells(one), style=_STYLES.get(one.verdict, ""))
    console.print(table)
    for one in found:
        if one.why:
            console.print(f"{one.row}: {one.why}", markup=False, highlight=False)


def _cells(one: Comparison) -> tuple[str, ...]:
    if one.a_median is None or one.b_median is None or one.ratio is None:
        return (one.row, "", "", "", "", "", one.verdict)
    medians = (f"{one.a_median * 1e3:.2f}", f"{one.b_median * 1e3:.2f}")
    return (one.row, *medians, f"{one.ratio:.3f}", f"{one.p_holm:.2g}", f"{100 * (one.superiority or 0):.0f}%", one.verdict)
