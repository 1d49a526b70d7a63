"""A trainer that is a part of a job, whose first rank is not rank 0, and that goes on using its group during the push."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import torch
from torch import nn

WORLD = Path(__file__).with_name("subgroup_world.py")
PATIENCE_S = 100.0


async def test_a_subgroup_pushes_while_it_trains(start_target, kit, tmp_path):
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    target = await start_target(model)
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", str(WORLD), str(rank), str(tmp_path), target.address, stderr=asyncio.subprocess.PIPE
        )
        for rank in range(3)
    ]
    try:
        async with asyncio.timeout(PATIENCE_S):
            errors = [error for _, error in await asyncio.gather(*(process.communicate() for process in processes))]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert results[0] == {}
    for rank in (1, 2):
        assert "error" not in results[rank], results[rank]["error"]
        assert results[rank]["place"] == [rank - 1, 2]
        assert results[rank]["oks"] == [True] * 3
        assert results[rank]["sums"] == [3.0]  # 1 + 2, every time: nothing came in between
        assert results[rank]["passes"] > 1
    for number, param in enumerate(model.parameters()):
        assert torch.equal(param, torch.arange(float(param.numel())).view(param.shape) + 1000 * number + 3)
    assert await target.served() == 3
