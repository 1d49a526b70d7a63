"""The rows that ``syncline bench run`` measures by default. Each suite prints rows into a `Bench`."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from .bed import bed
from .bench import Bench
from .direct import direct_rows
from .errors import BenchError
from .vllm_row import vllm_rows

Suite = Literal["shm", "gloo", "direct", "vllm", "driver", "plan"]

_PLAN_S = 600.0
_TASKS = 10_000


async def shm_rows(bench: Bench) -> None:
    """One source rank to one and to two receivers over shared memory."""
    for count in (1, 2):
        async with bed(bench.setup(targets=count, movable=True)) as here:
            for landing in ("mapped", "streamed", "staged"):
                name = f"shm {landing}, 1 source rank to {count}"
                await bench.push_row(name, here, transport="shm", landing=landing)


async def gloo_rows(bench: Bench) -> None:
    """Two FSDP2 ranks to two receivers, each getting the whole; then the naive way in the same processes."""
    async with bed(bench.setup(source="fsdp", source_ranks=2, targets=2)) as here:
        name = "gloo staged, 2 source ranks to 2"
        await bench.push_row(name, here, transport="gloo", landing="staged")
        await bench.naive_row("naive: full_tensor() and broadcast by rank 0, 2 source ranks to 2", here)


async def driver_row(bench: Bench) -> None:
    """What the scheduler itself costs: all stages do nothing."""
    from syncline.scheduler.driver import Driver, Limits, TaskSpec

    specs = tuple(
        TaskSpec(index=i, group=0, tmp_bytes=1, stages=("h2d", "prepare", "send"), targets=frozenset({0}))
        for i in range(_TASKS)
    )

    class Nothing:
        def start(self, task: int) -> None:
            return None

    async def votes() -> None:
        return None

    nothing = Nothing()
    driver = Driver(
        stages={"h2d": nothing, "prepare": nothing, "send": nothing},
        barrier=lambda _group: None,
        limits=Limits(max_tmp_bytes=64, h2d=2, prepare=2, send=2),
        release=lambda _push, _task: None,
        drop_target=lambda _target, _at_task: None,
    )
    seconds = []
    for push_id in range(1, bench.repeat + 1):
        began = time.perf_counter()
        await driver.run(
            push_id, specs, (0,), frozenset({0}), collect_votes=votes, deadline_s=120, on_source_free=lambda: None
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
    await driver.close(5)
    per_task = statistics.median(seconds[1:] or seconds) / _TASKS
    bench.add(f"driver, {_TASKS} tasks of no-op stages, uvloop", seconds, kind="work", us_per_task=per_task * 1e6)


async def plan_row(bench: Bench) -> None:
    """Planning for Kimi-K2's shapes, in a process of its own so that its peak memory can be told."""
    planning = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "syncline.bench.measure.planning",  # ends by itself in seconds
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PLAN_S):
            out, said = await planning.communicate()
    finally:
        if planning.returncode is None:
            planning.kill()
            await planning.wait()
    if planning.returncode:
        raise BenchError(f"planning Kimi-K2 ended with exit code {planning.returncode}: {said.decode()[-2000:]}")
    result = msgspec.json.decode(out.splitlines()[-1], type=dict[str, Any])
    seconds = float(result.pop("seconds"))
    bench.add("plan: Kimi-K2 shapes, 256 ranks (8 x 32) to 4 x 32", [seconds], kind="work", **result)


SUITES: Mapping[Suite, Callable[[Bench], Awaitable[None]]] = MappingProxyType(
    {
        "shm": shm_rows,
        "gloo": gloo_rows,
        "direct": direct_rows,
        "vllm": vllm_rows,
        "driver": driver_row,
        "plan": plan_row,
    }
)
