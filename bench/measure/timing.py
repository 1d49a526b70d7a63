"""Seconds of repeated calls."""

from __future__ import annotations

import time
from collections.abc import Callable


def times(work: Callable[[], object], repeat: int) -> list[float]:
    """Seconds of each of ``repeat`` calls."""
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds
