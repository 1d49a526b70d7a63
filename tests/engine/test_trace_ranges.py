"""Ranges in a real profiler bear the names of the trace's spans."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from syncline.engine.errors import ConfigError
from syncline.engine.ranges import NvtxRanges, ProfilerRanges
from syncline.engine.trace import STAGES


async def test_torch_profiler_shows_every_span_by_its_name(pair) -> None:
    engine = await pair.start(ranges=ProfilerRanges())
    await engine.push(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        report = await engine.push(2)
    spans = {span.name: span for span in report.trace.ranks[0]}
    ranges = {event.name: event for event in profiler.events() if event.name.split(" ")[0] in STAGES}
    assert ranges.keys() == spans.keys()
    assert "send 3" in ranges and "prepare 0" in ranges and "barrier 0" in ranges
    # Each range encloses its span: there is a distance between the two clocks with which that is true of all of them.
    least = max(ranges[name].time_range.start * 1e-6 - span.start for name, span in spans.items())
    most = min(ranges[name].time_range.end * 1e-6 - span.end for name, span in spans.items())
    assert least <= most + 5e-6  # the profiler's microseconds are rounded


async def test_without_ranges_the_profiler_sees_none(pair) -> None:
    engine = await pair.start()
    await engine.push(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        await engine.push(2)
    assert not [event.name for event in profiler.events() if event.name.startswith(("prepare ", "send "))]
    assert engine._session._wiring.driver._open_range is None


class Broken:
    """Raises when a range is opened, or closed."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls = 0

    def begin(self, name: str) -> str:
        self.calls += 1
        if self.where == "begin":
            raise RuntimeError("no profiler")
        return name

    def end(self, token: str) -> None:
        raise RuntimeError("no profiler")


@pytest.mark.parametrize("where", ["begin", "end"])
async def test_ranges_that_raise_are_used_no_more(pair, where: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken(where)
    engine = await pair.start(ranges=broken)
    assert (await engine.push(1)).ok
    calls = broken.calls
    assert (await engine.push(2)).ok
    assert broken.calls == calls > 0
    assert "pushes go on without ranges" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nvtx_needs_cuda() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        NvtxRanges()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NVTX needs a CUDA device")
def test_nvtx_ranges_open_and_close() -> None:
    ranges = NvtxRanges()
    ranges.end(ranges.begin("send 1"))
