"""One of two FSDP2 ranks that push into a server of the two-phase document: ``rank store url folder``. Run as a script."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from syncline.adapters.engines import TwoPhaseTarget
from syncline.adapters.trainers import FSDPSource
from syncline.engine import TransferConfig, TransferEngine


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 301), nn.ReLU(), nn.Linear(301, 17, bias=False))


def become(model, seed):
    with torch.no_grad():
        for mine, whole in zip(model.parameters(), model_of(seed).parameters(), strict=True):
            assert isinstance(mine, DTensor)
            mine.copy_(torch.distributed.tensor.distribute_tensor(whole.detach(), mine.device_mesh, mine.placements))


async def main(rank, store, url):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    model = fully_shard(model_of(1), mesh=mesh)
    wanted = {name: (tuple(tensor.shape), "bfloat16") for name, tensor in model_of(0).state_dict().items()}
    config = TransferConfig(trace=False, bucket_bytes="8KiB", max_tmp_bytes="64KiB")
    targets = [TwoPhaseTarget(url, model=wanted)]
    async with TransferEngine(source=FSDPSource(model), targets=targets, config=config) as engine:
        for version in (1, 2, 3):
            become(model, version)
            report = await engine.push(version)
            assert report.ok, str(report)
    print(json.dumps({"ok": True}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
