"""OpenTelemetry spans of pushes and updates, through the API package alone: whatever SDK the application has set up takes them.

>>> engine = TransferEngine(..., observers=[OpenTelemetrySpans()])

A span for each push, a child of the span that was current when it was started, with a child for each stage and target; a span
for each update on a target. They are made when all is over, with the times that were taken then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .observing import Observer, PushEnd, UpdateEnd
from .report import TargetReport

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider


class OpenTelemetrySpans(Observer):
    """Makes spans ``syncline.push`` (children ``syncline.stage.send`` and so on, ``syncline.target``) and ``syncline.update``.

    Args:
        tracer_provider: None takes the global one.

    Raises:
        ModuleNotFoundError: extra ``metrics`` is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        from opentelemetry import trace

        self._api = trace
        self._tracer = trace.get_tracer("syncline", tracer_provider=tracer_provider)

    def push_ended(self, push: PushEnd) -> None:
        span = self._tracer.start_span("syncline.push", start_time=push.began_ns)
        span.set_attributes({"syncline.version": push.version, "syncline.rank": push.rank})
        ends = push.began_ns + _ns(push.seconds)
        try:
            with self._api.use_span(span, end_on_exit=False):
                self._stages(push)
                for address, target in push.report.targets.items() if push.report is not None else ():
                    self._target(address, target, push.began_ns, ends)
            if push.report is not None:
                self._reported(span, push)
            if push.error is not None:
                self._failed(span, type(push.error).__name__, str(push.error))
        finally:
            span.end(end_time=ends)

    def _reported(self, span: Span, push: PushEnd) -> None:
        report = push.report
        assert report is not None
        span.set_attributes(
            {
                "syncline.ok": report.ok,
                "syncline.bytes": report.bytes,
                "syncline.tasks": report.tasks,
                "syncline.peak_tmp_bytes": report.peak_tmp_bytes,
                "syncline.landing_bytes": report.landing_bytes,
                "syncline.source_free_s": report.source_free_s,
                "syncline.digest": report.digest,
            }
        )

    def _stages(self, push: PushEnd) -> None:
        for stage, total in push.stages().items():
            if not total.tasks:
                continue
            span = self._tracer.start_span(f"syncline.stage.{stage}", start_time=push.began_ns + _ns(total.first))
            span.set_attributes({"syncline.busy_s": total.busy_s, "syncline.tasks": total.tasks, "syncline.bytes": total.bytes})
            span.end(end_time=push.began_ns + _ns(total.last))

    def _target(self, address: str, target: TargetReport, began_ns: int, ends: int) -> None:
        span = self._tracer.start_span("syncline.target", start_time=began_ns)
        span.set_attributes(
            {
                "syncline.target": address,
                "syncline.state": target.state or "",
                "syncline.already": target.already,
                "syncline.landing_bytes": target.landing_bytes,
                "syncline.commit_s": target.commit_s,
                "syncline.pause_s": target.pause_s,
            }
        )
        if target.version is not None:
            span.set_attribute("syncline.version", target.version)
        if target.error is not None:
            self._failed(span, type(target.error).__name__, str(target.error))
        span.end(end_time=ends)

    def update_ended(self, update: UpdateEnd) -> None:
        span = self._tracer.start_span("syncline.update", start_time=update.began_ns)
        span.set_attributes(
            {
                "syncline.version": update.version,
                "syncline.rank": update.rank,
                "syncline.address": update.address,
                "syncline.bytes": update.bytes,
                "syncline.landing_s": update.landing_s,
                "syncline.starved_s": update.starved_s,
                "syncline.commit_s": update.commit_s,
            }
        )
        if not update.ok:
            self._failed(span, update.error, "")
        span.end(end_time=update.began_ns + _ns(update.seconds))

    def _failed(self, span: Span, kind: str, text: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, text or kind))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
