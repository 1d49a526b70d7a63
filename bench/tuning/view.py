"""Sweeps and advice for people to read."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .noise import Difference
from .recommend import Advice, Candidate, candidates, last_finals
from .records import Record, usable
from .space import Configuration, size_text

_ROWS = 8
_WIDTH = 118


def duration_text(seconds: float) -> str:
    """``"3 min 20 s"``, ``"12 s"``."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def table(records: Sequence[Record]) -> str:
    """The finalists of one transport and landing, or the fastest few where there were no finals.

    ``ms`` is from the finals alone, ``all ms`` from everything that was measured, as in the heat map.
    """
    good = usable(records)
    finals = last_finals(good)
    found = sorted(candidates(finals or good), key=lambda c: c.seconds)[:_ROWS]
    everything = {one.measured: one.seconds for one in candidates(good)}
    pushes: Counter[Configuration] = Counter()
    for record in finals or good:
        pushes[record.configuration] += len(record.sample.warm)
    shown = Table(title="finalists" if finals else "fastest (no finals)", title_justify="left", box=None, padding=(0, 1))
    for name in ("bucket", "watermark", "h2d/prep/send", "workers", "ms", "all ms", "warm pushes", "peak tmp", "landing", ""):
        shown.add_column(name, justify="left" if not name else "right")
    for one in found:
        shown.add_row(*_cells(one, everything[one.measured], pushes[one.measured]))
    console = Console(file=io.StringIO(), width=_WIDTH)
    console.print(shown)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # the buffer from above
    return "\n".join(line.rstrip() for line in text.splitlines())


def _cells(one: Candidate, searched_s: float, pushes: int) -> tuple[str, ...]:
    c = one.measured
    return (
        size_text(c.bucket_bytes),
        size_text(c.max_tmp_bytes),
        f"{c.h2d_concurrency}/{c.prepare_concurrency}/{c.send_concurrency}",
        str(c.workers),
        f"{one.seconds * 1e3:.1f}",
        f"{searched_s * 1e3:.1f}",
        str(pushes),
        size_text(one.peak_tmp_bytes),
        size_text(one.landing_bytes),
        "default" if c == Configuration.default(c.transport, c.landing) else "",
    )


def advice_text(advice: Advice) -> str:
    """A ready `TransferConfig`, what it gains, and why."""
    chosen = advice.chosen
    lines = [
        chosen.configuration.text(),
        f"  {chosen.seconds * 1e3:.1f} ms a push, {gain_text(advice)}",
        f"  peak of temporary memory {size_text(chosen.peak_tmp_bytes)}, landing memory {size_text(chosen.landing_bytes)}",
        f"  {advice.why}",
    ]
    return "\n".join(lines)


def gain_text(advice: Advice) -> str:
    """What is gained over the default, with its interval, or that it is within noise."""
    chosen, default = advice.chosen, advice.default
    if default is None:
        return "no default under this limit was measured beside it"
    if chosen is default:
        c = chosen.configuration
        is_default = c == Configuration.default(c.transport, c.landing)
        return "which is the default" if is_default else "which is the default under a watermark that fits"
    if advice.gain is None:
        return f"default {default.seconds * 1e3:.1f} ms, not measured side by side"
    return f"default {default.seconds * 1e3:.1f} ms: {difference_text(advice.gain)}"


def difference_text(found: Difference) -> str:
    """``"12% less time (95%: 8% to 15%, p 0.001, 9 blocks)"``."""
    what = f"{abs(found.gain):.1%} {'less' if found.gain >= 0 else 'more'} time"
    if found.low == float("-inf"):
        what += " (too few blocks for an interval)"
    elif found.low < found.high:  # a simulator says the same every time
        what += f" (95%: {found.low:.1%} to {found.high:.1%}, p {found.p:.2g}, {found.blocks} blocks)"
    return f"within noise: {what}" if found.within_noise else what
