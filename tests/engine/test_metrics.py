"""Metrics as a Prometheus server gets them: scraped over HTTP from a real endpoint, during and after real pushes."""

from __future__ import annotations

import asyncio
import logging
import threading
import urllib.request

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from syncline.adapters.engines import ModuleLoader
from syncline.engine.errors import StageError
from syncline.engine.metrics import PrometheusMetrics
from syncline.engine.observing import Observer
from syncline.stages.completions import Signal

PATIENCE_S = 20.0


class Endpoint:
    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = PrometheusMetrics(self.registry)
        self._server, self._thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=self.registry)

    def _fetch(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._server.server_port}/metrics", timeout=PATIENCE_S) as reply:
            return reply.read().decode()

    async def scrape(self) -> dict[tuple[str, ...], float]:
        """(name without prefix, label values in the order of label names...) -> value."""
        text = await asyncio.to_thread(self._fetch)
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            (s.name.removeprefix("syncline_"), *(value for _, value in sorted(s.labels.items()))): s.value
            for s in samples
            if s.name.startswith("syncline_")
        }

    async def until(self, key: tuple[str, ...], value: float) -> dict[tuple[str, ...], float]:
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.scrape()).get(key) != value:
                await asyncio.sleep(0.01)
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


async def test_a_scrape_says_what_the_report_says(pair, endpoint: Endpoint) -> None:
    engine = await pair.start(targets=2, observers=[endpoint.metrics])
    reports = [await engine.push(version) for version in (1, 2)]
    found = await endpoint.until(("pushes_total", "0", "ok"), 2)
    assert found["stage_bytes_total", "0", "send"] == sum(report.bytes for report in reports)
    assert found["stage_bytes_total", "0", "prepare"] == reports[0].bytes  # once for both targets, in two pushes
    for stage, summary in reports[0].stages.items():
        seconds = sum(report.stages[stage].busy_s for report in reports)
        assert found["stage_seconds_total", "0", stage] == pytest.approx(seconds, abs=1e-6)
        assert found["stage_tasks_total", "0", stage] == 2 * summary.tasks
    assert found["tmp_bytes_peak", "0"] == reports[1].peak_tmp_bytes > 0
    assert (found["tmp_bytes", "0"], found["tasks_in_flight", "0", "send"]) == (0, 0)
    assert found["push_seconds_count", "0"] == 2
    assert found["pushed_version", "0"] == 2
    for receiver in pair.receivers:
        address = receiver.address
        found = await endpoint.until(("receiver_updates_total", address, "ok"), 2)
        assert found["target_version", address] == found["receiver_version", address] == 2
        assert found["target_state", "COMMITTED", address] == found["receiver_state", address, "COMMITTED"] == 1
        assert found["receiver_state", address, "FENCED"] == 0
        assert found["receiver_bytes_total", address] == reports[0].bytes  # half of what goes to two, in two pushes
        assert found["receiver_seconds_total", "landing", address] > 0
        assert found["receiver_landing_bytes", address] == reports[1].targets[address].landing_bytes > 0
    names = {family.name for family in prometheus_client.REGISTRY.collect()}
    assert not [name for name in names if "syncline" in name]


async def test_a_scrape_in_the_middle_of_a_push(pair, endpoint: Endpoint) -> None:
    engine = await pair.start(observers=[endpoint.metrics])
    held: list[Signal[None]] = []

    def hold(inner, task):
        held.append(Signal())
        return held[-1]

    pair.wrap("prepare", hold)
    handle = engine.start_push(1)
    found = await endpoint.until(("tasks_in_flight", "0", "prepare"), 2)
    assert found["tmp_bytes", "0"] > 0
    assert ("pushes_total", "0", "ok") not in found
    handle.cancel()
    for signal in held:
        signal.set()
    await asyncio.gather(handle.result, return_exceptions=True)
    found = await endpoint.until(("pushes_total", "0", "failed"), 1)
    assert found["push_errors_total", "CancelledError", "0"] == 1
    assert found["tmp_bytes", "0"] == 0


class Failing(ModuleLoader):
    """Cannot finish a load."""

    def finish(self, version: int) -> None:
        raise OSError("disk full")


async def test_a_target_that_fails(pair, endpoint: Endpoint) -> None:
    engine = await pair.start(observers=[endpoint.metrics], loader=Failing)
    report = await engine.push(1)
    (address,) = report.targets
    kind = type(report.targets[address].error).__name__
    await endpoint.until(("pushes_total", "0", "partial"), 1)
    found = await endpoint.until(("receiver_updates_total", address, "failed"), 1)
    assert found["target_errors_total", kind, address] == 1
    assert [key for key in found if key[0] == "receiver_errors_total"]
    assert found["receiver_state", address, "FENCED"] == 1
    assert found["receiver_version", address] == -1
    assert found["receiver_bytes_total", address] == 0


async def test_a_push_that_fails_as_a_whole(pair, endpoint: Endpoint) -> None:
    engine = await pair.start(observers=[endpoint.metrics])

    def broken(inner, task):
        if task < 3:
            return inner(task)
        raise RuntimeError("no more")

    pair.wrap("prepare", broken)
    with pytest.raises(StageError):
        await engine.push(1)
    found = await endpoint.until(("pushes_total", "0", "failed"), 1)
    assert found["push_errors_total", "StageError", "0"] == 1
    assert found["stage_tasks_total", "0", "prepare"] <= 3
    assert ("pushed_version", "0") not in found


class Broken(Observer):
    """Raises at every call, each time something else."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def push_started(self, push: object) -> None:
        self.called.append("push_started")
        raise ValueError("no")

    def push_ended(self, push: object) -> None:
        self.called.append("push_ended")
        raise SystemExit(3)

    def receiver_started(self, receiver: object) -> None:
        self.called.append("receiver_started")
        raise KeyboardInterrupt

    def update_ended(self, update: object) -> None:
        self.called.append("update_ended")
        raise asyncio.CancelledError


async def test_an_observer_that_raises_is_nobodys_concern(pair, endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    engine = await pair.start(observers=[broken, endpoint.metrics])
    for version in (1, 2, 3):
        assert (await engine.push(version)).ok
    await endpoint.until(("pushes_total", "0", "ok"), 3)
    await endpoint.until(("receiver_updates_total", pair.receivers[0].address, "ok"), 3)
    assert set(broken.called) == {"push_started", "push_ended", "receiver_started", "update_ended"}
    said = [record.getMessage() for record in caplog.records if "observer Broken raised" in record.getMessage()]
    assert len(said) == 4, "each kind of call is complained of once"


async def test_an_observer_that_hangs_holds_nothing_up(pair, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    class Hangs(Observer):
        def push_started(self, push: object) -> None:
            go_on.wait(PATIENCE_S)

    engine = await pair.start(observers=[Hangs()])
    try:
        for version in range(1, 4):
            assert (await engine.push(version)).ok
        with caplog.at_level(logging.WARNING):
            for _ in range(2000):
                engine._observers.tell("push_started", lambda: None)
        assert "what comes now is dropped" in caplog.text
        async with asyncio.timeout(PATIENCE_S / 2):
            await engine.close()
    finally:
        go_on.set()


async def test_news_that_cannot_be_made_are_nobodys_concern(pair, caplog: pytest.LogCaptureFixture) -> None:
    engine = await pair.start(observers=[Observer()])
    engine._session.push_end = lambda *_: 1 / 0
    assert (await engine.push(1)).ok
    assert "observers are not told of push_ended" in caplog.text


def test_a_gauge_that_cannot_be_had_does_not_fail_the_scrape(endpoint: Endpoint) -> None:
    class Gone:
        address = "unix:/gone"

        @property
        def state(self):
            raise RuntimeError("closed")

        version = state

    endpoint.metrics.receiver_started(Gone())
    assert "syncline_receiver_version" in prometheus_client.generate_latest(endpoint.registry).decode()
