"""Rows as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from . import floors
from .rows import Row, Skipped

_COLUMNS = ("row", "n", "cold", "median", "p90", "max", "GB/s", "x memcpy", "intact", "control")
_STYLES = {"push": "bold", "floor": "cyan", "peer": "yellow", "work": ""}


def print_table(rows: Sequence[Row | Skipped], out: TextIO) -> None:
    """Print measured rows as a table, in milliseconds, and the reasons of what was skipped below it.

    ``x memcpy``: how many times as long as one thread needs to copy as many bytes. Raises `ModuleNotFoundError` without rich.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, soft_wrap=not out.isatty(), width=None if out.isatty() else 160)
    table = Table(*_COLUMNS, title="milliseconds; median, p90 and max of warm samples", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for row in rows:
        if isinstance(row, Row):
            table.add_row(*_cells(row), style=_STYLES[row.kind])
    console.print(table)
    for text in _remarks(rows):
        console.print(text, markup=False, highlight=False)


def _cells(row: Row) -> tuple[str, ...]:
    seconds = (row.first_s, row.seconds.median, row.seconds.p90, row.seconds.max)
    times = (f"{value * 1e3:.1f}" for value in seconds)
    over = row.over_floor.get(floors.MEMCPY)
    intact = {None: "", True: "yes", False: "NO"}[row.integrity]
    unsettled = "" if row.phases is None or row.phases.settled or len(row.samples) < 2 else "*"
    rate = f"{row.gb_s:.2f}" if row.gb_s else ""
    return (row.row, f"{row.n}{unsettled}", *times, rate, f"{over:.2f}" if over else "", intact, row.control or "")


def _remarks(rows: Iterable[Row | Skipped]) -> list[str]:
    remarks = []
    if any(isinstance(row, Row) and row.phases is not None and not row.phases.settled and row.n > 1 for row in rows):
        remarks.append("* not steady before the last half of its samples: the figures are of that half")
    remarks += [f"skipped {row.row}: {row.skipped}" for row in rows if isinstance(row, Skipped)]
    return remarks
