"""Predictions for people: tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

from syncline.scheduler.routing import size

from .critical import CriticalPath
from .published import NOT_SIMULATED, Beside
from .simulate import Prediction
from .whatif import Effect

if TYPE_CHECKING:
    from .validate import Row

_WIDTH = 150
_STEPS = 14


class View:
    """Prints to ``out``, wide enough for a file."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, soft_wrap=not out.isatty(), width=None if out.isatty() else _WIDTH)

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, markup=False, highlight=False)

    def _table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 1) -> None:
        """``right``: from this column on figures, to the right."""
        table = Table(*columns, title=title, title_justify="left")
        for place, column in enumerate(table.columns):
            column.justify = "right" if place >= right else "left"
        for row in rows:
            table.add_row(*row)
        self._console.print(table, markup=False)

    def prediction(self, there: Prediction, terms: Mapping[str, float]) -> None:
        """Stages, resources, the bound and the critical path."""
        self.say(
            f"push       {_s(there.seconds)}: control {_s(there.control_s)}, commit {_s(there.commit_s)}; "
            f"{size(there.sent_bytes)} in {there.tasks} tasks"
        )
        self.say(
            f"memory     peak {size(there.peak_tmp_bytes)} temporary on a source rank, landing {size(there.landing_bytes)}"
        )
        rows = [("stage", name, seconds) for name, seconds in there.busy_s.items()]
        rows += [("resource", name, seconds) for name, seconds in sorted(there.used_s.items(), key=lambda row: -row[1])]
        self._table(
            "busy, on the rank where it is longest", ("", "what", "seconds", "of the push"),
            [(kind, name, _s(seconds), f"{seconds / there.seconds:.0%}") for kind, name, seconds in rows if seconds], right=2,
        )  # fmt: skip
        self.say(f"bottleneck {there.bottleneck}: {_s(there.critical.by_what[there.bottleneck])} of the critical path")
        if terms:
            rows_of = [(name, _s(seconds)) for name, seconds in sorted(terms.items(), key=lambda row: -row[1])]
            self._table("bound: no order of tasks is faster", ("term", "seconds"), rows_of)
            bound = max(terms.values())
            self.say(
                f"bound      {_s(bound)}; the push takes {there.seconds / bound:.2f} times as long"
                if bound
                else "bound      none"
            )
        else:
            self.say(f"bound      {_s(there.bound_s)} on the {there.busiest}: everything shares the cores of one host")
        self._critical(there.critical)

    def _critical(self, path: CriticalPath) -> None:
        total = sum(step.seconds for step in path.steps) or 1.0
        self._table(
            "critical path, by what was done", ("what", "seconds", "share"),
            [(what, _s(took), f"{took / total:.0%}") for what, took in path.by_what.items() if took / total >= 0.005],
        )  # fmt: skip
        self._table(
            "and where", ("where", "seconds", "share"),
            [(where, _s(seconds), f"{seconds / total:.0%}") for where, seconds in list(path.by_where.items())[:8]],
        )  # fmt: skip
        longest = sorted(path.steps, key=lambda step: -step.seconds)[:_STEPS]
        self._table(
            f"its longest steps, of {len(path.steps)}", ("what", "where", "task", "from", "seconds", "had waited"),
            [
                (step.what, step.where, str(step.task) if step.task >= 0 else "", _s(step.start), _s(step.seconds), step.why)
                for step in sorted(longest, key=lambda step: step.start)
            ],
            right=2,
        )  # fmt: skip
        if path.by_why:
            self.say("waits on it: " + ", ".join(f"{why} ({count} times)" for why, count in path.by_why.items()))

    def effects(self, there: Prediction, found: Sequence[Effect]) -> None:
        """What each change does."""
        rows = []
        for effect in found:
            change = f"{effect.before} -> {effect.after}"
            if effect.seconds is None:
                rows.append((effect.knob, change, "refused", "", effect.refused[:60]))
                continue
            more = effect.seconds / there.seconds - 1
            memory = "" if effect.peak_tmp_bytes == there.peak_tmp_bytes else size(effect.peak_tmp_bytes)
            rows.append((effect.knob, change, _s(effect.seconds), "same" if abs(more) < 5e-4 else f"{more:+.1%}", memory))
        self._table("what if", ("knob", "change", "push", "by", "peak temporary"), rows, right=2)

    def published(self, rows: Sequence[Beside]) -> None:
        """Ours beside theirs."""
        self._table(
            "published figures beside our engine's, simulated on hardware like theirs",
            ("who", "what", "theirs", "ours", "bound", "", "bottleneck"),
            [
                (
                    row.who, row.what, f"{row.theirs} {row.unit}", f"{row.ours:.2f} {row.unit}", _s(row.bound_s), row.verdict,
                    row.bottleneck,
                )
                for row in rows
            ],
            right=2,
        )  # fmt: skip
        self.say("assumed:")
        for row in rows:
            self.say(f"  {row.who}, {row.what}: {row.assumptions}")
        for text in NOT_SIMULATED:
            self.say(f"not simulated: {text}")

    def validation(self, rows: Sequence[Row], limit: float) -> None:
        """Predicted beside measured."""
        self._table(
            "predicted and measured on this machine, milliseconds",
            ("configuration", "predicted", "measured (median)", "least", "most", "n", "error", "intact"),
            [
                (row.case, *(f"{seconds * 1e3:.1f}" for seconds in (row.predicted_s, row.median_s, row.least_s, row.most_s)),
                 str(row.n), f"{row.error:+.0%}", "yes" if row.intact else "NO")
                for row in rows
            ],
        )  # fmt: skip
        within = sum(abs(row.error) <= limit for row in rows)
        self.say(f"{within} of {len(rows)} are within {limit:.0%}; none of them was used to calibrate")


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
