"""Prometheus metrics of an engine (the source's side) and of a receiver (the target's).

>>> registry = CollectorRegistry()
>>> metrics = PrometheusMetrics(registry)
>>> engine = TransferEngine(..., observers=[metrics])
>>> receiver = Receiver(..., observers=[metrics])

Opt-in: extra ``metrics``. Nothing is registered anywhere but in the registry that is passed in, and nothing is served: that is
the application's, with `prometheus_client.start_http_server` or a route of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from syncline.scheduler.outcome import SPAN_NAMES

from .observing import Live, Observer, PushEnd, PushStart, Served, UpdateEnd
from .report import TargetReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_STATES = ("COMMITTED", "UPDATING", "FENCED")
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class PrometheusMetrics(Observer):
    """Keeps metrics of any number of engines and receivers of this process in ``registry``.

    ======================================================= ============================================================
    metric (all begin with ``syncline_``)                   of
    ======================================================= ============================================================
    ``pushes_total{rank,result}``                           source rank: ``ok``, ``partial`` (a target missed it), ``failed``
    ``push_seconds{rank}`` (histogram)                      source rank, failed pushes included
    ``stage_seconds_total{rank,stage}``                     source rank: seconds in which a stage was busy
    ``stage_bytes_total{rank,stage}``                       source rank: bytes that went through a stage
    ``stage_tasks_total{rank,stage}``                       source rank
    ``tasks_in_flight{rank,stage}``, ``tmp_bytes{rank}``    source rank, at this moment
    ``tmp_bytes_peak{rank}``                                source rank: of the last push
    ``pushed_version{rank}``                                source rank: the last that did not fail as a whole
    ``target_version{target}``, ``target_state{target,state}``  target, as the last push found it
    ``push_errors_total{rank,kind}``                        source rank: of pushes as a whole
    ``target_errors_total{target,kind}``                    target, as the last push found it
    ``receiver_version{receiver}``, ``receiver_state{...}`` rank of a target, at this moment
    ``receiver_updates_total{receiver,result}``             rank of a target: ``ok``, ``failed``
    ``receiver_errors_total{receiver,kind}``                rank of a target
    ``receiver_bytes_total{receiver}``                      rank of a target: bytes of committed updates
    ``receiver_seconds_total{receiver,phase}``              rank of a target: ``landing``, ``starved``, ``commit``
    ``receiver_landing_bytes{receiver}``                    rank of a target: spare memory for landing
    ======================================================= ============================================================

    Raises:
        ModuleNotFoundError: extra ``metrics`` is not installed.
        ValueError: the registry has metrics of these names already.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"syncline_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"syncline_{name}", text, labels, registry=registry)

        self._pushes = counter("pushes", "Pushes that have ended", "rank", "result")
        self._push_seconds = Histogram(
            "syncline_push_seconds", "Seconds of a push", ["rank"], buckets=_SECONDS, registry=registry
        )
        self._stage_seconds = counter("stage_seconds", "Seconds in which a stage was busy", "rank", "stage")
        self._stage_bytes = counter("stage_bytes", "Bytes that went through a stage", "rank", "stage")
        self._stage_tasks = counter("stage_tasks", "Tasks that went through a stage", "rank", "stage")
        self._in_flight = gauge("tasks_in_flight", "Tasks in a stage now", "rank", "stage")
        self._tmp_bytes = gauge("tmp_bytes", "Temporary bytes of tasks in flight now", "rank")
        self._tmp_peak = gauge("tmp_bytes_peak", "Most temporary bytes of tasks in flight in the last push", "rank")
        self._pushed_version = gauge("pushed_version", "Version of the last push", "rank")
        self._push_errors = counter("push_errors", "Pushes that failed as a whole, by kind of error", "rank", "kind")
        self._target_version = gauge("target_version", "Version that a target has committed", "target")
        self._target_state = gauge("target_state", "1 for the state that a target is in", "target", "state")
        self._target_errors = counter("target_errors", "What kept a target from a push, by kind of error", "target", "kind")
        self._version = gauge("receiver_version", "Version committed last; -1 before the first", "receiver")
        self._state = gauge("receiver_state", "1 for the state that a receiver is in", "receiver", "state")
        self._updates = counter("receiver_updates", "Updates that have ended", "receiver", "result")
        self._errors = counter("receiver_errors", "Updates that failed, by kind of error", "receiver", "kind")
        self._bytes = counter("receiver_bytes", "Bytes of committed updates", "receiver")
        self._seconds = counter("receiver_seconds", "Seconds of updates, by phase", "receiver", "phase")
        self._landing_bytes = gauge("receiver_landing_bytes", "Spare memory for landing", "receiver")

    def push_started(self, push: PushStart) -> None:
        rank, live = str(push.rank), push.live
        self._tmp_bytes.labels(rank).set_function(_asked(lambda: live.tmp_bytes))
        for stage in SPAN_NAMES[:3]:
            self._in_flight.labels(rank, stage).set_function(_asked(partial(_in_stage, live, stage)))

    def push_ended(self, push: PushEnd) -> None:
        rank, report = str(push.rank), push.report
        self._push_seconds.labels(rank).observe(push.seconds)
        for stage, total in push.stages().items():
            self._stage_seconds.labels(rank, stage).inc(total.busy_s)
            self._stage_bytes.labels(rank, stage).inc(total.bytes)
            self._stage_tasks.labels(rank, stage).inc(total.tasks)
        if push.outcome is not None:
            self._tmp_peak.labels(rank).set(push.outcome.peak_tmp_bytes)
        if push.error is not None:
            self._push_errors.labels(rank, type(push.error).__name__).inc()
        if report is not None:
            self._pushed_version.labels(rank).set(report.version)
            for address, target in report.targets.items():
                self._target(address, target)
        self._pushes.labels(rank, "failed" if report is None else "ok" if report.ok else "partial").inc()

    def _target(self, address: str, target: TargetReport) -> None:
        if target.version is not None:
            self._target_version.labels(address).set(target.version)
        if target.state is not None:
            for state in _STATES:
                self._target_state.labels(address, state).set(state == target.state)
        if target.error is not None:
            self._target_errors.labels(address, type(target.error).__name__).inc()

    def receiver_started(self, receiver: Served) -> None:
        address = receiver.address
        self._version.labels(address).set_function(_asked(lambda: -1 if receiver.version is None else receiver.version))
        for state in _STATES:
            self._state.labels(address, state).set_function(_asked(partial(_is_in, receiver, state)))

    def update_ended(self, update: UpdateEnd) -> None:
        self._updates.labels(update.address, "ok" if update.ok else "failed").inc()
        self._bytes.labels(update.address).inc(update.bytes)
        phases = {"landing": update.landing_s, "starved": update.starved_s, "commit": update.commit_s}
        for phase, seconds in phases.items():
            self._seconds.labels(update.address, phase).inc(seconds)
        self._landing_bytes.labels(update.address).set(update.landing_bytes)
        if not update.ok:
            self._errors.labels(update.address, update.error).inc()


def _in_stage(live: Live, stage: str) -> int:
    return live.in_flight.get(stage, 0)


def _is_in(receiver: Served, state: str) -> bool:
    return receiver.state == state


def _asked(ask: Callable[[], float]) -> Callable[[], float]:
    """For a gauge that is asked at every scrape: an engine or receiver that cannot answer must not fail the whole scrape."""

    def value() -> float:
        try:
            return float(ask())
        except Exception:  # noqa: BLE001
            return float("nan")

    return value
