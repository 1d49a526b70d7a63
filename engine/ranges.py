"""The work of a push as ranges in a profiler, by the names that it has in the trace: ``"send 7"``.

Opt-in: ``TransferEngine(..., ranges=ProfilerRanges())``. A range is open from the start of a piece of work to its end; ranges
overlap as the work does. They are opened and closed on the engine's event loop: `torch.profiler` sees them if it records that
thread (the one that awaits ``push``; with ``push_blocking`` the engine's own, under ``profile_all_threads``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .errors import ConfigError
from .trace_log import span_name

log = logging.getLogger("syncline.engine")


class Ranges(Protocol):
    """Opens and closes ranges in a profiler."""

    def begin(self, name: str) -> Any:
        """Open a range; returns what `end` is given."""
        ...

    def end(self, token: Any) -> None:
        """Close a range."""
        ...


class ProfilerRanges:
    """Ranges of `torch.profiler`: user annotations, as ``torch.profiler.record_function`` makes them."""

    def begin(self, name: str) -> Any:
        return torch.ops.profiler._record_function_enter_new(name)  # noqa: SLF001 - what record_function calls

    def end(self, token: Any) -> None:
        torch.ops.profiler._record_function_exit(token)  # noqa: SLF001


class NvtxRanges:
    """NVTX ranges, as Nsight Systems shows them.

    Raises:
        ConfigError: there is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(["ranges is NvtxRanges() and there is no CUDA device; use ProfilerRanges()"])

    def begin(self, name: str) -> Any:
        return torch.cuda.nvtx.range_start(name)

    def end(self, token: Any) -> None:
        torch.cuda.nvtx.range_end(token)


def opener(ranges: Ranges) -> Callable[[str, int], Callable[[], None]]:
    """For the driver: opens the range of a piece of work, returns what closes it. Ranges that raise are used no more."""
    broken = False

    def give_up(error: Exception) -> None:
        nonlocal broken
        broken = True
        log.warning("%s raised %r: pushes go on without ranges", type(ranges).__name__, error)

    def begin(stage: str, index: int) -> Callable[[], None]:
        if broken:
            return _nothing
        try:
            token = ranges.begin(span_name(stage, index))
        except Exception as error:  # noqa: BLE001 - no profiler may fail a push
            give_up(error)
            return _nothing

        def end() -> None:
            try:
                ranges.end(token)
            except Exception as error:  # noqa: BLE001
                give_up(error)

        return end

    return begin


def _nothing() -> None:
    """The end of no range."""
