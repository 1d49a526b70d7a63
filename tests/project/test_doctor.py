"""``syncline doctor``: it really tries things, survives what is broken, and says what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.bench import doctor, probes
from syncline.bench.probes import Finding

Run = Callable[..., subprocess.CompletedProcess[str]]


def findings(**states: str) -> dict[str, Finding]:
    """Everything is well but what is named."""
    names = {need for feature in doctor.FEATURES for need in feature.needs}
    well = {name: Finding(name=name, state="ok", detail="1.0") for name in names}
    bad = {
        name.replace("_", " "): Finding(name=name.replace("_", " "), state=state, detail="?", remedy=f"mend {name}")
        for name, state in states.items()
    }
    return well | bad


def test_reports_this_machine_as_json(python: Run) -> None:
    done = python("from syncline.bench.cli import main; sys.exit(main(['doctor', '--json']))")
    report = json.loads(done.stdout)
    state = {item["name"]: item["state"] for item in report["findings"]}
    for name in ("torch", "gloo", "loopback", "shared memory", "machine", "xxhash", "uvloop"):
        assert state[name] == "ok", report
    assert state["cuda"] != "ok", "CUDA_VISIBLE_DEVICES is empty"
    for name in ("nccl", "vllm", "sglang", "megatron-core", "ray", "torchrl", "triton", "transformers"):
        assert state[name] in {"ok", "missing", "broken"}
    required = [item for item in report["features"] if item["required"]]
    assert required
    assert done.returncode == (0 if all(item["ready"] for item in required) else 1)


def test_works_without_any_extra(without_extras: Run) -> None:
    done = without_extras("from syncline.bench.cli import main; sys.exit(main(['doctor']))")
    assert "missing  transformers" in done.stdout, done.stderr
    assert "pip install 'syncline[demo]'" in done.stdout
    assert "ready    push on one host" in done.stdout


def test_every_need_is_found_out() -> None:
    """A feature that needs what nobody looks for would be a KeyError on somebody's machine."""
    known = {"machine", "shared memory", "loopback", *probes._IN_CHILD, *probes.MODULES}
    assert {need for feature in doctor.FEATURES for need in feature.needs} <= known


def test_what_lacks_is_named_with_its_remedy() -> None:
    verdicts = {verdict.feature: verdict for verdict in doctor.judge(findings(shared_memory="broken", gloo="missing"))}
    one_host = verdicts["push on one host (shm; staged, streamed, mapped)"]
    assert not one_host.ready
    assert one_host.lacks == ("shared memory (broken)",)
    assert one_host.remedies == ("mend shared_memory",)
    between = verdicts["push between hosts (gloo; staged, streamed)"]
    assert between.lacks == ("gloo (missing)",)


def test_doctor_itself_imports_no_torch(python: Run) -> None:
    """A torch that cannot be loaded is a finding, not the end of the doctor."""
    done = python(
        "from syncline.bench import doctor\n"
        "names = {need for feature in doctor.FEATURES for need in feature.needs}\n"
        "doctor.judge({name: doctor.Finding(name=name, state='ok', detail='') for name in names})\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_an_adapter_that_is_not_built_is_named() -> None:
    feature = doctor.Feature(name="x", needs=(), ours=("syncline.engine.errors", "syncline.adapters.nothing"))
    (verdict,) = doctor.judge({}, [feature])
    assert verdict.lacks == ("syncline.adapters.nothing (not in this version)",)


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("broken", 1)])
def test_exit_code_says_whether_pushes_can_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda timeout_s: findings(gloo=state, cuda="missing", vllm="missing"))
    monkeypatch.setattr(doctor, "is_built", lambda module: True)
    assert doctor.main(doctor.DoctorArgs()) == code
    assert ("cannot work here" in capsys.readouterr().err) == bool(code)


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Finding]:
    """``framework(code)`` is what is found of a vllm whose module is ``code``."""

    def find(code: str, timeout_s: float = 30.0) -> Finding:
        (tmp_path / "vllm.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return probes.check_module("vllm", timeout_s=timeout_s)

    return find


def test_framework_that_works(framework: Callable[..., Finding]) -> None:
    assert framework("print('noise')").state == "ok"


def test_framework_that_raises(framework: Callable[..., Finding]) -> None:
    found = framework("raise OSError('libcudart.so.12: cannot open shared object file')")
    assert found.state == "broken"
    assert "libcudart.so.12" in found.detail


def test_framework_that_kills_its_process(framework: Callable[..., Finding]) -> None:
    found = framework("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert found.state == "broken"
    assert str(-signal.SIGSEGV) in found.detail


def test_framework_that_exits(framework: Callable[..., Finding]) -> None:
    assert framework("raise SystemExit(3)").state == "broken"


def test_framework_that_hangs_is_ended_with_what_it_started(framework: Callable[..., Finding], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    found = framework(
        f"import pathlib, subprocess, time\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\ntime.sleep(60)",
        timeout_s=4.0,
    )
    assert found.state == "broken"
    assert "no answer in 4 s" in found.detail
    pid, give_up = int(note.read_text()), time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < give_up, "the grandchild is still there"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_absent_framework_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    found = probes.check_module("vllm", timeout_s=1.0)
    assert (found.state, found.remedy) == ("missing", "pip install vllm")


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert probes.check_shared_memory(tmp_path / "nothing").state == "missing"


def test_shared_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    assert probes.check_shared_memory(tmp_path).state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((real.f_bsize, 4096, 16384, 16384, 16384, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    found = probes.check_shared_memory(tmp_path)
    assert found.state == "broken"
    assert "--shm-size" in found.remedy


def test_shared_memory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    found = probes.check_shared_memory(tmp_path)
    assert found.state == "broken"
    assert "No space left" in found.detail
    assert list(tmp_path.iterdir()) == []
