"""What somebody ran into who used the project for the first time, each as a test of its kind."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ConfigError, LoaderError, NotServing, PlanError
from syncline.engine.gate import Gate

EXIT_WITH_WORK_UNDER_WAY = """
import asyncio, threading, torch
from syncline.stages.communicator import Communicator
from syncline.stages.rendezvous import Rendezvous

async def main():
    meeting = Rendezvous.host("127.0.0.1", timeout_s=20)
    make = lambda rank: Communicator.create(meeting, name="g", rank=rank, size=2, bind_host="127.0.0.1", timeout_s=20)
    one, two = await asyncio.gather(make(0), make(1))
    one.set_deadline(0.5)  # gloo's wait ends while the interpreter does
    one.recv(torch.empty(8, dtype=torch.uint8), 1, 7)
    one.send(torch.empty(2**20, dtype=torch.uint8), 1, 8)
    globals()["kept"] = (meeting, one, two)

class SlowToGo:
    def __del__(self, wait=threading.Event().wait):
        wait(1.5)

slow = SlowToGo()
asyncio.run(main())
print("done")
"""


def test_a_process_that_ends_with_gloo_work_under_way_ends_well() -> None:
    command = [sys.executable, "-c", EXIT_WITH_WORK_UNDER_WAY]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


async def test_a_pass_on_the_event_loop_does_not_wait_for_a_commit_of_that_loop() -> None:
    gate = Gate(version=1)
    await gate.pause()
    with pytest.raises(NotServing, match="async with"), gate.forward():
        pass
    waiting = asyncio.ensure_future(gate.enter_async(30))
    await asyncio.to_thread(lambda: None)
    await gate.resume(2)
    assert await waiting == 2
    gate.leave()


async def test_target_tensors_that_overlap_in_part_are_refused(tmp_path) -> None:
    base = torch.zeros(6)
    model = nn.Module()
    model.w, model.v = nn.Parameter(base[:4]), nn.Parameter(base[2:])
    with pytest.raises((PlanError, LoaderError), match="share part of their memory"):
        await Receiver(loader=ModuleLoader(model), listen=f"unix:{tmp_path}/s").start()


async def test_a_wrong_shape_is_one_problem_not_three(tmp_path) -> None:
    async with Receiver(loader=ModuleLoader(nn.Linear(4, 8, bias=False)), listen=f"unix:{tmp_path}/s") as receiver:
        source = ModuleSource(nn.Linear(8, 4, bias=False), world_size=1)
        engine = TransferEngine(source=source, targets=[RemoteTarget(receiver.address)])
        with pytest.raises(PlanError) as caught:
            await engine.connect()
        await engine.close()
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["weight"]


def test_what_is_not_wrapped_is_refused_with_the_remedy(tmp_path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"ModuleSource\(model\)"):
        TransferEngine(source=model, targets=[RemoteTarget("unix:/x")])
    with pytest.raises(ConfigError, match=r"ModuleLoader\(model\)"):
        Receiver(loader=model, listen=f"unix:{tmp_path}/s")


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("secret", b"x", "text that is not empty"),
        ("secret", "", "text that is not empty"),
        ("max_tmp_bytes", 1.5, "whole number"),
        ("workers", 10_000, "256"),
    ],
)
def test_knobs_of_the_wrong_kind(knob: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferConfig(**{knob: value})


async def test_blocking_calls_work_beside_a_running_loop(tmp_path) -> None:
    async with Receiver(loader=ModuleLoader(nn.Linear(2, 2)), listen=f"unix:{tmp_path}/s") as receiver:
        source = ModuleSource(nn.Linear(2, 2), world_size=1)

        def train() -> bool:
            async def inside() -> bool:
                engine = TransferEngine(source=source, targets=[RemoteTarget(receiver.address)])
                engine.connect_blocking()
                report = engine.push_blocking(1)
                engine.close_blocking()
                return report.ok

            return asyncio.run(inside())

        assert await asyncio.to_thread(train)
