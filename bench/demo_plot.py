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
    lanes = sorted({(span["pid"], list(COLOURS).index(span["cat"]), span["tid"]) for span in spans})
    figure, axes = pyplot.subplots(figsize=(12, 1.4 + 0.36 * max(1, len(lanes))), layout="constrained")
    for row, (rank, stage, track) in enumerate(lanes):
        name = list(COLOURS)[stage]
        for span in spans:
            if (span["pid"], span["cat"], span["tid"]) == (rank, name, track):
                left, width = span["ts"] / 1e3, max(span["dur"] / 1e3, 0.02)
                axes.barh(row, width, left=left, height=0.8, color=COLOURS[name], edgecolor="white", linewidth=0.4)
                axes.text(left + width / 2, row, str(span["args"]["task"]), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(lanes)), [f"rank {rank} · {list(COLOURS)[stage]}" for rank, stage, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the push began (numbers are tasks; a barrier's number is its mesh group)")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    used = [name for name in COLOURS if any(list(COLOURS)[stage] == name for _, stage, _ in lanes)]
    handles = [Patch(color=COLOURS[name], label=name) for name in used]
    figure.legend(handles=handles, loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
