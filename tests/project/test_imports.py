"""What importing does, and does not do: extras stay optional, nothing is configured, nothing runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

# Of the library, only these may need an extra: one adapter, or one command, each.
MAY_NEED_EXTRAS = ("syncline.adapters.engines.", "syncline.bench.")
NEVER_NEED_EXTRAS = ("syncline.adapters.engines.module", "syncline.bench.cli", "syncline.bench.doctor", "syncline.bench.probes")

IMPORT_ALL = """
import importlib, json, logging, signal, threading
handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name or str(error)
print(json.dumps({
    "failed": failed,
    "root handlers": len(logging.getLogger().handlers),
    "our handlers": [name for name in logging.root.manager.loggerDict if name.startswith("syncline")
        and [h for h in logging.getLogger(name).handlers if not isinstance(h, logging.NullHandler)]],
    "threads": [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
    "signals kept": all(signal.getsignal(number) is handler for number, handler in handlers.items()),
    "bare": sorted({"engine", "scheduler", "stages", "adapters", "bench", "tests"} & set(sys.modules)),
}))
"""


@pytest.fixture(scope="module")
def library(modules: Sequence[str]) -> list[str]:
    """Every module but those that are programs."""
    return [name for name in modules if not name.endswith(".__main__")]


def test_importing_everything_without_extras(without_extras: Run, library: Sequence[str]) -> None:
    done = without_extras(IMPORT_ALL, json.dumps(library))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, f"importing printed something:\n{done.stdout}"
    found = json.loads(done.stdout)
    excused = {name for name in found["failed"] if name.startswith(MAY_NEED_EXTRAS) and not name.startswith(NEVER_NEED_EXTRAS)}
    unexcused = {name: missing for name, missing in found["failed"].items() if name not in excused}
    assert unexcused == {}
    assert found == {
        "failed": {name: found["failed"][name] for name in excused},
        "root handlers": 0,
        "our handlers": [],
        "threads": [],
        "signals kept": True,
        "bare": [],
    }


def test_what_takes_long_is_imported_by_those_who_use_it(python: Run) -> None:
    """DTensor takes as long to import as torch does; who has none of it imports none of it."""
    done = python(
        "import torch, torch.distributed\nbefore = set(sys.modules)\n"
        "import syncline.engine, syncline.adapters.engines, syncline.adapters.trainers, syncline.bench.measure.peer\n"
        "print(sorted({'torch.distributed.tensor', 'torch.distributed.fsdp', 'transformers'} & (set(sys.modules) - before)))"
    )
    assert done.stdout == "[]\n", done.stderr


def test_scheduler_does_without_torch(python: Run, library: Sequence[str]) -> None:
    names = [name for name in library if name.startswith("syncline.scheduler")]
    done = python(IMPORT_ALL, json.dumps(names), blocked=("torch",))
    assert json.loads(done.stdout)["failed"] == {}, done.stderr


def test_names_that_others_program_against() -> None:
    from syncline.adapters.engines import ModuleLoader
    from syncline.adapters.trainers import FSDPSource, ModuleSource
    from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine

    for method in ("connect", "push", "start_push", "push_blocking", "close"):
        assert callable(getattr(TransferEngine, method))
    for name in ("start", "close", "address", "version", "state"):
        assert hasattr(Receiver, name)
    config = TransferConfig(
        max_tmp_bytes="64MiB", bucket_bytes="16MiB", h2d_concurrency=2, prepare_concurrency=2, send_concurrency=2,
        landing="staged", verify=True, push_timeout_s=60.0, transport="auto",
    )  # fmt: skip
    assert config.watermark == 64 * 2**20
    assert RemoteTarget("unix:/run/x.sock").address == "unix:/run/x.sock"
    assert ModuleLoader
    assert FSDPSource
    assert ModuleSource
