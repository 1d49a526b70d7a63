"""One rank of a source, as a process: ``source_rank.py RANK RANKS STORE``. Commands come as lines of JSON.

Faults can be armed: ``kill`` ends this process, ``corrupt`` changes a byte of the bucket that is just being sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from syncline.adapters.engines import VLLMTarget
from syncline.adapters.engines.checkpoints import load_model
from syncline.adapters.trainers import FSDPSource, ModuleSource
from syncline.engine import TransferConfig, TransferEngine
from syncline.engine.control_client import ControlClient
from syncline.stages.send import SendStage


class Rank:
    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.model: nn.Module
        self.engine: TransferEngine
        self.others: dict[str, dict[str, torch.Tensor]] = {}
        self.fault: tuple[str, int] = ("", 0)
        self.sent = 0
        start, complete = SendStage.start, ControlClient.complete

        async def doomed(client: ControlClient, request: Any) -> Any:
            asked = asyncio.ensure_future(complete(client, request))
            if self.fault[0] == "kill at commit":
                await asyncio.sleep(self.fault[1] / 1000)
                os.kill(os.getpid(), signal.SIGKILL)
            return await asked

        ControlClient.complete = doomed  # type: ignore[method-assign]

        def faulty(stage: SendStage, task: int) -> Any:
            self.sent += 1
            what, at = self.fault
            if what in {"kill", "stop", "corrupt"} and self.sent == at:
                if what != "corrupt":
                    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                bucket = stage._memory.bucket((stage._push, task))
                bucket[bucket.numel() // 2] ^= 0xFF
                self.fault = ("", 0)
            return start(stage, task)

        SendStage.start = faulty  # type: ignore[method-assign]

    def do_load(self, model: str, seed: int | None = None, names: list[str] | None = None) -> int:
        """Hold a model: its own weights, or random ones. ``names``: of a dict with these tensors only."""
        self.model = _own(load_model(model, dtype=torch.float32, random_weights=seed))
        if names is not None:
            self.source: Any = ModuleSource({k: v for k, v in self.model.state_dict().items() if k in names})
            return len(names)
        if self.ranks > 1:
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
            self.source = FSDPSource(self.model)
        else:
            self.source = ModuleSource(self.model)
        return sum(p.numel() for p in self.model.parameters())

    def do_scale_norms(self, factor: float) -> None:
        """Other weights: every norm of a layer times ``factor``."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "layernorm" in name:
                    (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(factor)

    async def do_connect(self, urls: list[str], config: dict[str, Any]) -> None:
        targets = [VLLMTarget(url) for url in urls]
        self.engine = TransferEngine(source=self.source, targets=targets, config=TransferConfig(**config))
        await self.engine.connect()

    async def do_push(self, version: int) -> dict[str, Any]:
        report = await self.engine.push(version)
        return {
            "ok": report.ok,
            "text": str(report),
            "seconds": report.seconds,
            "tasks": report.tasks,
            "targets": {
                address: {
                    "state": t.state,
                    "version": t.version,
                    "error": type(t.error).__name__,
                    "message": str(t.error or ""),
                }
                for address, t in report.targets.items()
            },
        }

    def do_arm(self, what: str, at: int) -> None:
        """At the ``at``-th bucket that is sent from now; ``kill at commit``: so many ms after the commit was asked for."""
        self.sent, self.fault = 0, (what, at)

    async def do_close(self) -> None:
        await self.engine.close()


def _own(model: nn.Module) -> nn.Module:
    """In memory of its own: the loader of transformers leaves parameters in the mapped file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


async def serve(rank: Rank, out: Any) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        arguments = json.loads(line)
        try:
            result = getattr(rank, f"do_{arguments.pop('command')}")(**arguments)
            reply = {"result": await result if asyncio.iscoroutine(result) else result}
        except Exception as error:  # noqa: BLE001 - told to the test
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    if int(sys.argv[2]) > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
    asyncio.run(serve(Rank(int(sys.argv[1]), int(sys.argv[2])), out))
