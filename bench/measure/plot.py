"""Rows as a picture: a bar for each median, with whiskers from the 10th to the 90th percentile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import floors
from .rows import Kind, Row, Skipped

_COLOURS: dict[Kind, str] = {"push": "#2f7ed8", "peer": "#e08a1e", "floor": "#7f8c9a"}
_LABELS: dict[Kind, str] = {"push": "syncline", "peer": "others", "floor": "floors of this machine"}
_LOW, _HIGH = 0.1, 0.9


def plot_rows(rows: Sequence[Row | Skipped], path: Path) -> bool:
    """Draw all rows that move bytes. False if there are none.

    Raises:
        ModuleNotFoundError: matplotlib is not there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if isinstance(row, Row) and row.bytes]
    if not shown:
        return False
    figure = Figure(figsize=(11, 1.8 + 0.34 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(shown):
        middle = row.seconds.median * 1e3
        low, high = np.quantile(row.warm or (row.seconds.median,), (_LOW, _HIGH)) * 1e3
        whiskers = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.barh(place, middle, height=0.7, color=_COLOURS[row.kind], xerr=whiskers, ecolor="#333333", capsize=3)
        axes.plot(row.first_s * 1e3, place, marker="|", markersize=9, color="#b03030")
        at = (max(high, middle), place)
        axes.annotate(f"{middle:.0f}", at, xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    memcpy = next((row for row in shown if row.row == floors.MEMCPY), None)
    if memcpy is not None:
        axes.axvline(memcpy.seconds.median * 1e3, color=_COLOURS["floor"], linestyle="--", linewidth=1)
    axes.set_yticks(range(len(shown)), [row.row for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0, right=_reach(shown))
    axes.set_xlabel("milliseconds: median, whiskers p10 to p90; red: the first, cold one; dashed: memcpy with 1 thread")
    axes.set_title(f"{max(row.bytes for row in shown) / 1e6:.1f} MB · {shown[0].machine.cpu}, {shown[0].machine.cores} cores")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for kind, colour in _COLOURS.items():
        if any(row.kind == kind for row in shown):
            axes.barh(0, 0, color=colour, label=_LABELS[kind])
    figure.legend(loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120, format="png")
    return True


def _reach(shown: Sequence[Row]) -> float:
    """Right end of the axis, in milliseconds: a single slow start must not press all bars flat."""
    return 1.15e3 * max(float(np.median([row.first_s for row in shown])), *(row.seconds.p90 for row in shown))
