"""Traced pushes of real engines in processes of their own, and Perfetto's trace processor to look at what they wrote."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.adapters.engines import ModuleLoader
from syncline.engine import Receiver
from syncline.engine.trace import Trace

HERE = Path(__file__).parent
PATIENCE_S = 120.0
TRACE_PROCESSOR = Path(sys.prefix) / "share" / "perfetto-trace-processor"
"""Where the checks unpack Perfetto's trace processor (see noxfile.py)."""


@dataclass(frozen=True)
class Traced:
    """A push: its trace, the file that it lies in, and what rank 0's report said."""

    trace: Trace
    path: Path
    report: dict[str, Any]


class Tracing:
    """Pushes a small model from ``ranks`` processes (FSDP2) into a receiver of this process, over gloo."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def push(
        self, *, ranks=1, targets=1, layers=16, width=64, faults=(), skews=None, loader=ModuleLoader, **config
    ) -> Traced:
        """``faults``: stage, rank (None: all), before_s, after_s. ``skews``: seconds that each rank's clock is off."""
        knobs = {"transport": "gloo", "landing": "staged", "max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB", **config}
        receivers = []
        for number in range(targets):
            module = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
            receivers.append(Receiver(loader(module, movable=False), f"unix:{self.folder}/t{number}.sock"))
            await receivers[-1].start()
        task = {
            "world_size": ranks, "width": width, "layers": layers, "config": knobs, "faults": list(faults),
            "targets": [receiver.address for receiver in receivers], "store": str(self.folder / "store"),
            "out": str(self.folder / "trace.json"),
        }  # fmt: skip
        try:
            said = await asyncio.gather(
                *(_run({**task, "rank": rank, "skew_s": (skews or [0.0] * ranks)[rank]}) for rank in range(ranks))
            )
        finally:
            for receiver in receivers:
                await receiver.close()
        path = self.folder / "trace.json"
        return Traced(Trace.load(path), path, json.loads(said[0]))


async def _run(task: dict[str, Any]) -> str:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "traced_rank.py"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, **threads},
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate(json.dumps(task).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-4000:]
    return out.decode()


def _tracing() -> Iterator[Tracing]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Tracing(Path(folder))


tracing = pytest.fixture(_tracing, name="tracing")
module_tracing = pytest.fixture(_tracing, name="module_tracing", scope="module")


class TraceProcessor:
    """Perfetto's trace processor with one trace in it, asked through Perfetto's own Python package."""

    def __init__(self, socket: Path) -> None:
        from perfetto.trace_processor import TraceProcessor as Client

        self._client = Client(remote=str(socket))

    def load(self, trace: Path) -> None:
        """Over the same connection as queries: the package itself loads traces into a native trace processor only."""
        backend = self._client._backend
        kinds = backend.protos.TraceProcessorRpc
        self._call(kinds.TPM_APPEND_TRACE_DATA, trace.read_bytes())
        self._call(kinds.TPM_FINALIZE_TRACE_DATA)

    def _call(self, kind: int, data: bytes | None = None) -> None:
        backend = self._client._backend
        stream = backend.protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.request = kind
        if data is not None:
            message.append_trace_data = data
        backend.transport.send(stream.SerializeToString())
        reply = backend.protos.TraceProcessorRpc()
        reply.MergeFromString(backend._read_payload())
        assert not reply.append_result.error, reply.append_result.error

    def rows(self, sql: str) -> list[dict[str, Any]]:
        return [dict(row.__dict__) for row in self._client.query(sql)]

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def trace_processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceProcessor]:
    """Skips where there is no trace processor: its files and Node.js come with the checks (see noxfile.py)."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js to run Perfetto's trace processor")
    if not (TRACE_PROCESSOR / "trace_processor.wasm").exists():
        pytest.skip(f"Perfetto's trace processor is not in {TRACE_PROCESSOR}; `nox -s tests` puts it there")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        socket = Path(folder) / "tp.sock"
        command = [node, str(HERE / "trace_processor.mjs"), str(TRACE_PROCESSOR), str(socket)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            client = TraceProcessor(socket)
            yield client
            client.close()
            process.wait(PATIENCE_S)
