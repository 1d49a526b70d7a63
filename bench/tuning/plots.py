"""Plots of a sweep: time over bucket size and watermark, and time against temporary memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .recommend import Candidate, candidates, last_finals
from .records import Record, enough, spoiled, usable
from .space import MIB, Configuration, Space, size_text

Group = tuple[str, str]
_SLOWEST = 3.0  # times the fastest: what is beyond gets the last colour
_FIRST_INK = 0.55  # share of the scale from which text must be dark


def heat_maps(records: Sequence[Record], path: Path, space: Space | None = None) -> Path:
    """For each transport and landing milliseconds over bucket size and watermark, other knobs at their defaults.

    All have the same axes: every size of ``space``, and every one that was measured anywhere.
    """
    pyplot = _pyplot()
    groups = {group: _Map.of(own) for group, own in _groups(records).items()}
    cells = [cell for each in groups.values() for cell in (*each.cells, *(space.plane(each.default) if space else ()))]
    buckets, watermarks = sorted({c.bucket_bytes for c in cells}), sorted({c.max_tmp_bytes for c in cells})
    width, height = max(5.2, 1.6 + 0.55 * len(watermarks)), max(5.6, 2.0 + 0.4 * len(buckets))
    figure, all_axes = pyplot.subplots(
        1, len(groups), figsize=(1.5 + width * len(groups), height), layout="constrained", squeeze=False
    )
    for axes, (group, own) in zip(all_axes[0], groups.items(), strict=True):
        _heat_map(figure, axes, group, own, (buckets, watermarks))
    figure.suptitle("Milliseconds of a push, other knobs at their defaults (from all measurements, not the finals alone)")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def pareto(records: Sequence[Record], path: Path) -> Path:
    """For each transport and landing, milliseconds against the peak of temporary memory, and the front of the two."""
    pyplot = _pyplot()
    groups = _groups(records)
    figure, all_axes = pyplot.subplots(
        1, len(groups), figsize=(1.5 + 6.0 * len(groups), 5.2), layout="constrained", squeeze=False
    )
    for axes, (group, own) in zip(all_axes[0], groups.items(), strict=True):
        _front(axes, group, own)
    figure.suptitle("Time against temporary memory")
    handles = {label: handle for axes in all_axes[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def front(found: Iterable[Candidate]) -> list[Candidate]:
    """Those to which nothing is both faster and smaller; by memory, ascending."""
    best: list[Candidate] = []
    for one in sorted(found, key=lambda c: (c.peak_tmp_bytes, c.seconds)):
        if not best or one.seconds < best[-1].seconds:
            best.append(one)
    return best


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _groups(records: Sequence[Record]) -> dict[Group, list[Record]]:
    found: dict[Group, list[Record]] = {}
    for record in records:
        found.setdefault((record.configuration.transport, record.configuration.landing), []).append(record)
    return found


@dataclass(frozen=True, kw_only=True)
class _Map:
    """What was found of one transport and landing.

    Attributes:
        found: what was measured. ``refused``: what was not, in a word. ``cells``: where the map has something to show.
    """

    default: Configuration
    found: dict[Configuration, Candidate]
    refused: dict[Configuration, str]
    cells: list[Configuration]

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Map:
        found = {one.measured: one for one in candidates(records)}
        refused = {c: "refused" if record_refused(records, c) else "failed" for c in spoiled(records)}
        default = _default(records)
        plane = [c for c in (*found, *refused) if _in_plane(c, default)]
        return cls(default=default, found=found, refused=refused, cells=[*plane, *_spread(found.values(), default)])


def _heat_map(figure: Any, axes: Any, group: Group, own: _Map, sizes: tuple[Sequence[int], Sequence[int]]) -> None:
    """``sizes``: of buckets, and watermarks."""
    from matplotlib.colors import LogNorm

    buckets, watermarks = sizes

    found, refused, default = own.found, own.refused, own.default
    values = np.full((len(buckets), len(watermarks)), np.nan)
    for i, bucket in enumerate(buckets):
        for j, watermark in enumerate(watermarks):
            cell = default.but(bucket_bytes=bucket, max_tmp_bytes=watermark)
            same = next((c for c in found.values() if _alike(c, cell)), None)
            one = found.get(cell, same)
            if one is not None:
                values[i, j] = one.seconds * 1e3
            _label(axes, j, i, one, measured=cell in found, other=refused.get(cell, ""))
    known = values[np.isfinite(values)]
    low = float(known.min(initial=np.inf)) if known.size else 1.0
    top = float(known.max(initial=0.0)) if known.size else low
    high = max(min(top, _SLOWEST * low), 1.01 * low)  # a scale needs some width
    image = axes.imshow(values, norm=LogNorm(low, high), cmap="viridis_r", origin="lower", aspect="auto")
    _ink(axes, values, low, high)
    _frame(axes, buckets, watermarks, default)
    axes.set_title(" ".join(group))
    bar = figure.colorbar(image, ax=axes, shrink=0.9, extend="max" if top > high else "neither")
    bar.set_label("ms, all measurements, drift between blocks taken out")
    bar.ax.yaxis.set_major_formatter("{x:.0f}")
    bar.ax.yaxis.set_minor_formatter("{x:.0f}")


def record_refused(records: Sequence[Record], configuration: Configuration) -> bool:
    """Whether a config or plan refused it (and it did not fail in a push)."""
    return any(record.configuration == configuration and record.sample.refused for record in records)


def _default(records: Sequence[Record]) -> Configuration:
    first = records[0].configuration
    return Configuration.default(first.transport, first.landing)


def _in_plane(c: Configuration, default: Configuration) -> bool:
    return c.but(bucket_bytes=default.bucket_bytes, max_tmp_bytes=default.max_tmp_bytes) == default


def _alike(one: Candidate, cell: Configuration) -> bool:
    """Whether the watermarks make no difference between what was measured and ``cell``."""
    least = enough(one.measured, one.peak_tmp_bytes)
    same = one.measured.but(max_tmp_bytes=cell.max_tmp_bytes) == cell
    return same and min(one.measured.max_tmp_bytes, cell.max_tmp_bytes) >= least


def _spread(found: Iterable[Candidate], default: Configuration) -> list[Configuration]:
    """Configurations down to the lowest watermark that made no difference: so that the map shows how far that goes."""
    spread = []
    for one in found:
        watermark = one.measured.max_tmp_bytes
        while _in_plane(one.measured, default) and watermark // 2 >= max(4 * MIB, enough(one.measured, one.peak_tmp_bytes)):
            watermark //= 2
            spread.append(one.measured.but(max_tmp_bytes=watermark))
    return spread


def _label(axes: Any, x: int, y: int, one: Candidate | None, *, measured: bool, other: str) -> None:
    text = other if one is None else f"{one.seconds * 1e3:.0f}" if measured else f"={one.seconds * 1e3:.0f}"
    axes.text(x, y, text, ha="center", va="center", fontsize=9, fontstyle="normal" if measured or other else "italic")


def _ink(axes: Any, values: Any, low: float, high: float) -> None:
    """White text on dark cells."""
    for text in axes.texts:
        x, y = text.get_position()
        value = values[int(y), int(x)]
        if np.isfinite(value) and np.log(value / low) > _FIRST_INK * np.log(high / low):
            text.set_color("white")


def _frame(axes: Any, buckets: Sequence[int], watermarks: Sequence[int], default: Configuration) -> None:
    from matplotlib.patches import Rectangle

    axes.set_facecolor("#e6e6e6")
    axes.set_xticks(range(len(watermarks)), [size_text(w) for w in watermarks], rotation=35, ha="right")
    axes.set_yticks(range(len(buckets)), [size_text(b) for b in buckets])
    axes.set_xlabel("watermark, max_tmp_bytes   (=: not reached, so as measured; grey: not measured)")
    axes.set_ylabel("bucket_bytes")
    if default.bucket_bytes in buckets and default.max_tmp_bytes in watermarks:
        corner = watermarks.index(default.max_tmp_bytes) - 0.5, buckets.index(default.bucket_bytes) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#d62728", linewidth=2.5))
        axes.plot([], [], "s", mfc="none", mec="#d62728", mew=2, label="default")
        axes.legend(loc="upper left", fontsize=8)


def _front(axes: Any, group: Group, records: Sequence[Record]) -> None:
    everything, finals = candidates(records), candidates(last_finals(usable(records)))
    axes.set_title(" ".join(group))
    axes.set_xlabel("peak of temporary memory, MiB")
    axes.set_ylabel("ms a push")
    axes.grid(alpha=0.3)
    if not everything:
        return
    best = front(finals or everything)
    searched = [c for c in everything if c.measured not in {one.measured for one in finals}]
    axes.plot([c.peak_tmp_bytes / MIB for c in searched], [c.seconds * 1e3 for c in searched], "o", color="#9aa7b5", ms=4,
              alpha=0.7, label="searched (few pushes, from all measurements)")  # fmt: skip
    axes.plot([c.peak_tmp_bytes / MIB for c in finals], [c.seconds * 1e3 for c in finals], "o", color="#2f7ed8", ms=8,
              label="finalists (from the finals)")  # fmt: skip
    axes.step([c.peak_tmp_bytes / MIB for c in best], [c.seconds * 1e3 for c in best], where="post", color="#2f7ed8",
              label="front")  # fmt: skip
    for number, one in enumerate(best):
        c, side = one.measured, 1 if number % 2 == 0 else -1  # neighbours get their text on different sides
        counts = f"{c.h2d_concurrency}/{c.prepare_concurrency}/{c.send_concurrency}, {c.workers} workers"
        axes.annotate(
            f"{size_text(c.bucket_bytes)} of {size_text(c.max_tmp_bytes)}\n{counts}",
            (one.peak_tmp_bytes / MIB, one.seconds * 1e3), xytext=(11 * side, 5 * side),
            textcoords="offset points", fontsize=7, va="bottom" if side > 0 else "top",
            ha="left" if side > 0 else "right",
        )  # fmt: skip
    _mark_default(axes, finals or everything)
    axes.margins(x=0.3)
    least = min(c.seconds for c in (*everything, *finals)) * 1e3
    axes.set_ylim(0.9 * least, _SLOWEST * least)
    if max(c.peak_tmp_bytes for c in everything) == 0:
        axes.set_xlim(-1, 1)
        axes.set_xlabel("peak of temporary memory: none (buckets lie in landing memory)")
        axes.set_xticks([0])


def _mark_default(axes: Any, found: Iterable[Candidate]) -> None:
    for one in found:
        c = one.measured
        if c == Configuration.default(c.transport, c.landing):
            axes.plot([one.peak_tmp_bytes / MIB], [one.seconds * 1e3], "s", mfc="none", mec="#d62728", mew=2, ms=13,
                      label="default")  # fmt: skip
