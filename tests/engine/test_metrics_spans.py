"""OpenTelemetry spans, as a real SDK's exporter gets them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from syncline.engine.errors import StageError
from syncline.engine.telemetry import OpenTelemetrySpans

PATIENCE_S = 20.0


@pytest.fixture
def exported():
    """A provider, and what it has exported."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def named(spans: tuple[ReadableSpan, ...], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


async def test_a_push_is_a_span_with_a_child_for_each_stage_and_target(pair, exported) -> None:
    provider, exporter = exported
    engine = await pair.start(targets=2, observers=[OpenTelemetrySpans(provider)])
    with provider.get_tracer("trainer").start_as_current_span("step 7") as step:
        report = await engine.push(7)
    await engine.close()
    for receiver in pair.receivers:
        await receiver.close()
    spans = exporter.get_finished_spans()
    (push,) = named(spans, "syncline.push")
    assert push.parent is not None and push.parent.span_id == step.get_span_context().span_id
    assert push.attributes is not None
    assert {name: push.attributes[f"syncline.{name}"] for name in ("version", "ok", "bytes", "tasks", "peak_tmp_bytes")} == {
        "version": 7, "ok": True, "bytes": report.bytes, "tasks": report.tasks, "peak_tmp_bytes": report.peak_tmp_bytes,
    }  # fmt: skip
    children = [span for span in spans if span.parent and span.parent.span_id == push.context.span_id]
    assert sorted(span.name for span in children) == [
        "syncline.stage.barrier", "syncline.stage.prepare", "syncline.stage.send", "syncline.target", "syncline.target",
    ]  # fmt: skip
    for child in children:
        assert push.start_time <= child.start_time <= child.end_time <= push.end_time
    for stage in ("prepare", "send"):
        (span,) = named(spans, f"syncline.stage.{stage}")
        assert span.attributes["syncline.busy_s"] == pytest.approx(report.stages[stage].busy_s, abs=1e-6)
        assert span.attributes["syncline.tasks"] == report.stages[stage].tasks
    targets = {
        span.attributes["syncline.target"]: span.attributes["syncline.state"] for span in named(spans, "syncline.target")
    }
    assert targets == {receiver.address: "COMMITTED" for receiver in pair.receivers}
    updates = named(spans, "syncline.update")
    assert {span.attributes["syncline.address"] for span in updates} == targets.keys()
    assert sum(span.attributes["syncline.bytes"] for span in updates) == report.bytes
    assert all(span.status.status_code is not StatusCode.ERROR for span in spans)


async def test_a_push_that_fails_says_so(pair, exported) -> None:
    provider, exporter = exported
    engine = await pair.start(observers=[OpenTelemetrySpans(provider)])

    def broken(inner, task):
        raise RuntimeError("no more")

    pair.wrap("prepare", broken)
    with pytest.raises(StageError):
        await engine.push(1)
    await engine.close()
    (push,) = named(exporter.get_finished_spans(), "syncline.push")
    assert push.status.status_code is StatusCode.ERROR
    assert push.attributes["error.type"] == "StageError"


class BrokenExporter(SpanExporter):
    """Raises, or hangs until it is let go."""

    def __init__(self, hang: threading.Event | None) -> None:
        self.hang = hang
        self.calls = 0

    def export(self, spans):
        self.calls += 1
        if self.hang is None:
            raise ConnectionError("no collector")
        self.hang.wait(PATIENCE_S)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_broken_exporter_holds_nothing_up(pair, hangs: bool) -> None:
    go_on = threading.Event()
    exporter = BrokenExporter(go_on if hangs else None)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = await pair.start(observers=[OpenTelemetrySpans(provider)])
    try:
        for version in (1, 2, 3):
            assert (await engine.push(version)).ok
        async with asyncio.timeout(PATIENCE_S / 2):
            await engine.close()
        assert exporter.calls >= 1
    finally:
        go_on.set()
        provider.shutdown()


async def test_without_an_sdk_nothing_happens(pair) -> None:
    engine = await pair.start(observers=[OpenTelemetrySpans()])
    assert (await engine.push(1)).ok
