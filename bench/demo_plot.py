"""The plot of a push: stages over time, one lane for each rank and stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"h2d": "#7f8c9a", "prepare": "#2f7ed8", "send": "#e08a1e", "barrier": "#5a9e5a"}


def plot_push(trace: dict[str, Any], path: Path, *, title: str) -> None:
    """Draw a trace (Chrome trace format) as a PNG of stages over time, in milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] in COLOURS]
    lanes = sorted({(span["pid"], list(COLOURS).index(span["cat"])) for span in spans})
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.5 * max(1, len(lanes))), layout="constrained")
    for row, (rank, stage) in enumerate(lanes):
        name = list(COLOURS)[stage]
        bars = [
            (span["ts"] / 1e3, max(span["dur"] / 1e3, 0.02)) for span in spans if span["pid"] == rank and span["cat"] == name
        ]
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=COLOURS[name], edgecolor="white", linewidth=0.3, alpha=0.85)
    axes.set_yticks(range(len(lanes)), [f"rank {rank} · {list(COLOURS)[stage]}" for rank, stage in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the push began")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    used = [name for name in COLOURS if any(list(COLOURS)[stage] == name for _, stage in lanes)]
    axes.legend(handles=[Patch(color=COLOURS[name], label=name) for name in used], loc="upper right", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
