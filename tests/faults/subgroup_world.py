"""One process of a job of three, of which ranks 1 and 2 are the trainer: ``subgroup_world.py RANK FOLDER ADDRESS``.

The trainer's ranks push while a thread of theirs uses the very group that they meet through. Started by test_ranks.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from syncline.adapters.trainers import FSDPSource
from syncline.engine import RemoteTarget, TransferConfig, TransferEngine

RANK, FOLDER, ADDRESS = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
PUSHES = 3


def make():
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view(param.shape) + 1000 * number)
    return model


def train(group, stop, sums):
    """Collectives of the trainer, until told to end; both ranks stop after the same one."""
    while True:
        tensor = torch.tensor([float(dist.get_rank()), float(stop.is_set())])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor[0].item())
        if tensor[1].item():
            return


async def push_all(engine, model):
    await engine.connect()
    oks = []
    for version in range(1, PUSHES + 1):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        oks.append((await engine.push(version)).ok)
    await engine.close()
    return oks


def trainer():
    mesh = DeviceMesh("cpu", [1, 2])
    if RANK == 0:
        return {}
    model = fully_shard(make(), mesh=mesh)
    source = FSDPSource(model)
    engine = TransferEngine(
        source=source, targets=[RemoteTarget(ADDRESS)], config=TransferConfig(max_tmp_bytes="64KiB", bucket_bytes=256)
    )
    stop, sums = threading.Event(), []
    training = threading.Thread(target=train, args=(mesh.get_group(), stop, sums))
    training.start()
    try:
        oks = asyncio.run(push_all(engine, model))
    finally:
        stop.set()
        training.join()
    return {"place": [source.rank, source.world_size], "oks": oks, "sums": sorted(set(sums)), "passes": len(sums)}


def main():
    store = dist.FileStore(str(FOLDER / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=3, timeout=timedelta(seconds=60))
    try:
        result = trainer()
    except Exception:  # noqa: BLE001 - the test shows it
        result = {"error": traceback.format_exc()}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


main()
