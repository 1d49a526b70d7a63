"""One rank of a source in a process of its own: FSDP2 over gloo, driven by JSON lines.

    python ranks.py RANK WORLD_SIZE STORE FOLDER...

FOLDER…: checkpoints of one architecture; what is pushed becomes the weights of one of them. Each line in is a command with its
arguments, each line out its answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncline.adapters.engines.checkpoints import load_model
from syncline.adapters.engines.sglang import SGLangOptions, SGLangTarget
from syncline.adapters.engines.sglang.ways import DistributedWay
from syncline.adapters.trainers import FSDPSource
from syncline.engine import RemoteTarget, TransferConfig, TransferEngine
from syncline.stages.send import SendStage

PR_SET_PDEATHSIG = 1


def shards_of(folder: str, world_size: int) -> torch.nn.Module:
    model = load_model(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Rank:
    """Holds the models and the engine."""

    def __init__(self, rank: int, world_size: int, store: str, folders: list[str]) -> None:
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
        self.models = [shards_of(folder, world_size) for folder in folders]
        self.live = shards_of(folders[0], world_size)
        self.engine: TransferEngine

    async def do_connect(self, url: str = "", address: str = "", options: dict[str, Any] | None = None, **config: Any) -> None:
        target = SGLangTarget(url, SGLangOptions(**(options or {}))) if url else RemoteTarget(address)
        self.engine = TransferEngine(source=FSDPSource(self.live), targets=[target], config=TransferConfig(**config))
        await self.engine.connect()

    async def do_push(self, version: int, model: int) -> dict[str, Any]:
        with torch.no_grad():
            for mine, other in zip(self.live.parameters(), self.models[model].parameters(), strict=True):
                mine.to_local().copy_(other.to_local())
        report = await self.engine.push(version)
        target = next(iter(report.targets.values()))
        return {
            "ok": target.ok,
            "state": target.state,
            "version": target.version,
            "error": str(target.error or ""),
            "seconds": report.seconds,
            "pause_s": target.pause_s,
        }

    async def do_kill_at(self, point: str, nth: int, signal: int = signal.SIGKILL) -> None:
        """Kill (or stop) this process before the ``nth`` bucket: where it is sent, or where it is handed on to SGLang."""
        kind: Any = {"send": SendStage, "hand on": DistributedWay}[point]
        name = {"send": "start", "hand on": "send"}[point]
        setattr(kind, name, _killing(getattr(kind, name), nth, signal))

    async def do_close(self) -> None:
        await self.engine.close()


def _killing(function: Callable[..., Any], nth: int, how: int) -> Callable[..., Any]:
    calls = 0

    def killing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), how)
        return function(*args, **options)

    return killing


async def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    print(json.dumps({"value": "ready"}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        try:
            answer = {"value": await getattr(rank, f"do_{request.pop('cmd')}")(**request)}
        except Exception as error:  # noqa: BLE001 (it travels to the test)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
