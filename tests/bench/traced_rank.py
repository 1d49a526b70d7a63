"""One rank of a source whose pushes are traced, in a process of its own, with a fault in it. Started by tests.

Reads one JSON document on standard input (see `main`), writes rank 0's last trace to ``out``.
"""

from __future__ import annotations

import json
import sys
import time

TASK = json.load(sys.stdin)
if TASK["skew_s"]:  # before anything has taken hold of it: this rank's clock has an origin of its own
    real = time.perf_counter
    time.perf_counter = lambda: real() + TASK["skew_s"]

import asyncio  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from syncline.adapters.trainers import FSDPSource, ModuleSource  # noqa: E402
from syncline.engine import RemoteTarget, TransferConfig, TransferEngine  # noqa: E402
from syncline.scheduler.completion import Completion  # noqa: E402
from syncline.stages.completions import Signal, TaskScope  # noqa: E402


class Slow:
    """A stage that takes longer than the one that it wraps, by a time that the fault says: before it, or after it."""

    def __init__(self, inner, fault) -> None:
        self._inner, self._before, self._after = inner, fault.get("before_s", 0.0), fault.get("after_s", 0.0)
        self._scope = TaskScope()

    def start(self, task: int) -> Completion:
        return self._scope.start(self._run(task))

    async def _run(self, task: int) -> None:
        await asyncio.sleep(self._before)
        completion = self._inner.start(task)
        if isinstance(completion, Signal):
            await completion
        await asyncio.sleep(self._after)


def source():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(TASK["width"], TASK["width"], bias=False) for _ in range(TASK["layers"])])
    if TASK["world_size"] == 1:
        return ModuleSource(model)
    return FSDPSource(fully_shard(model, mesh=init_device_mesh("cpu", (TASK["world_size"],))))


async def push() -> None:
    engine = TransferEngine(
        source=source(), targets=[RemoteTarget(each) for each in TASK["targets"]], config=TransferConfig(**TASK["config"])
    )
    async with engine:
        await engine.push(1)  # cold
        stages = engine._session._wiring.driver._stages
        for fault in TASK["faults"]:
            if fault["rank"] in (None, TASK["rank"]):
                stages[fault["stage"]] = Slow(stages[fault["stage"]], fault)
        report = await engine.push(2)
        assert report.ok, str(report)
        if TASK["rank"] == 0:
            report.trace.save(TASK["out"])
            busy = {name: stage.busy_s for name, stage in report.stages.items()}
            print(json.dumps({"busy_s": busy, "seconds": report.seconds, "peak_tmp_bytes": report.peak_tmp_bytes}))


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{TASK['store']}", rank=TASK["rank"], world_size=TASK["world_size"])
try:
    asyncio.run(push())
finally:
    dist.destroy_process_group()
