"""How a sweep is doing, on the terminal."""

from __future__ import annotations

import statistics
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress as RichProgress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .records import Record
from .search import Search
from .view import duration_text

_EACH = 10
"""Without a terminal, a line for so many measurements."""


class Progress:
    """A bar with phase, last measurement and an estimate of the time left; plain lines where there is no terminal."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._console = Console(stderr=True)
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=search.budget_s)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, record: Record) -> None:
        """After every measurement."""
        count, left = len(self._search.records), self._search.left_s
        sample, request = record.sample, record.request
        what = f"{statistics.median(sample.warm) * 1e3:.0f} ms" if sample.usable else "refused" if sample.refused else "failed"
        text = f"{count}: {request.phase}: {record.configuration}: {what}; about {duration_text(left)} left"
        self._bar.update(self._task, completed=self._search.spent_s, total=self._search.spent_s + left, description=text)
        if self._bar.disable and count % _EACH == 1:
            self._console.print(text, soft_wrap=True, highlight=False)
