"""Traces that are not what a whole push wrote: edited ones, and those of pushes that did not reach everybody."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.bench import cli
from syncline.bench.measure.corruption import corrupted
from syncline.bench.tracing.explain import Explanation
from syncline.bench.tracing.record import Part, TraceArgs, end, listening, model_of, start
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import TraceError
from syncline.engine.trace import Trace, merged_json

KNOBS = {"transport": "gloo", "landing": "staged", "max_tmp_bytes": "8MiB", "bucket_bytes": "4MiB"}


def explained(path: Path) -> str:
    """Everything that is made of a trace: words, and events for viewers."""
    trace = Trace.load(path)
    assert merged_json([trace, trace])
    return str(Explanation.of(trace))


@pytest.fixture(scope="module")
def recording(module_tracing) -> str:
    """What one push wrote."""
    return asyncio.run(module_tracing.push(ranks=2, targets=2, layers=4, route="gather")).path.read_text()


@pytest.fixture
def recorded(recording, tmp_path) -> Path:
    """A file of it that a test may change."""
    path = tmp_path / "trace.json"
    path.write_text(recording)
    return path


def places(value: Any, here: tuple = ()) -> list[tuple]:
    """Of everything in a JSON value, the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*here, key), *places(inner, (*here, key)))]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([2**63, 10**30]), st.floats(-1e300, 1e300),
    st.floats(0, 1), st.sampled_from(["", "many", "send", "barrier", "h2d"]), st.just([]), st.just({}),
)  # fmt: skip


def edit(draw, root: Any, all_places: list[tuple]) -> None:
    place = draw(st.sampled_from(all_places))
    holder = root
    try:
        for key in place[:-1]:
            holder = holder[key]
        value = holder[place[-1]]
    except (KeyError, IndexError, TypeError):
        return  # an earlier edit has taken it away
    what = draw(st.sampled_from(["delete", "replace", "halve", "reverse", "double", "shift"]))
    if what == "delete":
        del holder[place[-1]]
    elif what == "replace":
        holder[place[-1]] = draw(SCALARS)
    elif isinstance(value, list):
        half = value[: len(value) // 2]
        holder[place[-1]] = {"halve": half, "reverse": value[::-1], "double": value + half, "shift": value[1:]}[what]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        holder[place[-1]] = {"halve": value / 2, "reverse": -value, "double": value * 2, "shift": value + 1}[what]


def test_no_edit_gives_anything_but_a_typed_error_or_an_explanation(recorded: Path) -> None:
    whole = json.loads(recorded.read_text())
    everything = places(whole["syncline"])
    said = {"error": 0, "words": 0}

    @settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed = copy.deepcopy(whole["syncline"])
        for _ in range(data.draw(st.integers(1, 3))):
            edit(data.draw, changed, everything)
        path = recorded.with_name("edited.json")
        path.write_text(json.dumps({"format": 1, "syncline": changed}))
        try:
            explained(path)
        except TraceError as error:
            said["error" if str(path) in str(error) else "error that does not name the file"] += 1
        else:
            said["words"] += 1

    check()
    assert min(said.values()) > 10  # both happen


def drop_spans(trace: dict, keep: float) -> None:
    spans = trace["details"][0]["spans"]
    trace["details"][0]["spans"] = spans[: int(keep * len(spans))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(details=[]), "no source rank"),
        (lambda t: t.update(knobs={}), "knob max_tmp_bytes is missing"),
        (lambda t: t["knobs"].update(send_concurrency="many"), "knob send_concurrency is 'many'"),
        (lambda t: t["knobs"].update(send_concurrency=0), "knob send_concurrency is 0"),
        (lambda t: drop_spans(t, 0.5), "there is no barrier 0"),
        (lambda t: drop_spans(t, 0.0), "there is no barrier 0"),
        (lambda t: t["details"][0].update(tasks=[]), "is work of no task"),
        (lambda t: t["knobs"].update(max_tmp_bytes=1), "more than max_tmp_bytes (1)"),
        (lambda t: t["knobs"].update(bucket_bytes=-4), "knob bucket_bytes is -4"),
        *(
            (lambda t, name=name: t["targets"][0].update({name: 99.0}), f"{name} is 99.0 s, of a push that took")
            for name in ("pause_s", "commit_s")
        ),
    ],
)
def test_what_does_not_fit_is_named(recorded: Path, capsys: pytest.CaptureFixture[str], change, said: str) -> None:
    whole = json.loads(recorded.read_text())
    change(whole["syncline"])
    recorded.write_text(json.dumps(whole))
    assert cli.main(["bench", "explain", str(recorded)]) == 1
    err = capsys.readouterr().err
    assert said in err and str(recorded) in err and "Traceback" not in err


async def test_a_digest_mismatch(tmp_path: Path) -> None:
    args = TraceArgs(mebibytes=16)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, corrupted():
        async with Receiver(ModuleLoader(model_of(args)), f"unix:{folder}/t.sock") as receiver:
            config = TransferConfig(**KNOBS)
            target = RemoteTarget(receiver.address)
            async with TransferEngine(source=ModuleSource(model_of(args)), targets=[target], config=config) as engine:
                report = await engine.push(1)
    assert not report.ok and report.trace is not None
    report.trace.save(tmp_path / "trace.json")
    text = explained(tmp_path / "trace.json")
    assert "did not commit: DigestMismatch: " in text and "4 of 4 tasks went out" in text


@pytest.mark.leaks_ok("a send that gloo has lost keeps a thread until its deadline")
@pytest.mark.parametrize("targets", [1, 2])
async def test_a_target_is_killed(tmp_path: Path, targets: int) -> None:
    """In the middle of a push; where it is the only one, the push is cut off before its barrier."""
    args = TraceArgs(mebibytes=32)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        parts = [Part(role="target", rank=rank, args=args, folder=folder) for rank in range(targets)]
        processes = [await start(part) for part in parts]
        try:
            await asyncio.gather(*(listening(process) for process in processes))
            engine = TransferEngine(
                source=ModuleSource(model_of(args)), targets=[RemoteTarget(part.address(part.rank)) for part in parts],
                config=TransferConfig(**KNOBS, target_timeout_s=3.0, push_timeout_s=30.0),
            )  # fmt: skip
            async with engine:
                await engine.push(1)
                stages = engine._session._wiring.driver._stages
                stages["send"] = Killing(stages["send"], processes[-1].pid)
                report = await engine.push(2)
        finally:
            for process in processes:
                await end(process)
    assert not report.ok and report.trace is not None
    report.trace.save(tmp_path / "trace.json")
    text = explained(tmp_path / "trace.json")
    assert f"{parts[-1].address(targets - 1)} did not commit: TargetLost: " in text
    assert "of 8 tasks went out" in text


class Killing:
    """A stage that kills a process before its third piece of work."""

    def __init__(self, inner, pid: int) -> None:
        self._inner, self._pid, self._left = inner, pid, 3

    def start(self, task: int):
        self._left -= 1
        if self._left == 0:
            os.kill(self._pid, signal.SIGKILL)
        return self._inner.start(task)
