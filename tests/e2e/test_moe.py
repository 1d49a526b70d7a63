"""Mixtures of experts of transformers: packed experts on both sides, single ones on the way, tied and untied."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file

PROMPT = [7, 3, 11, 90, 4, 4, 52]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
async def test_experts_arrive(cluster, kind: str, tied: bool) -> None:
    real = {"kind": kind, "tied": tied, "seed": 1}
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": real, "layout": "fsdp"}),
        cluster.target("a", build={"model": {**real, "seed": 2}}),
    )
    files = [cluster.folder / f"{name}.safetensors" for name in ("before", "after", "expected")]
    before, after, expected = map(str, files)
    await target.leader.call("tiny_reference", model={**real, "seed": 2}, ids=PROMPT, out=before)
    await target.leader.call("tiny_reference", model=real, ids=PROMPT, out=expected)

    await cluster.connect(source, [target], max_tmp_bytes="1MiB", bucket_bytes="8KiB")
    report = await source.push(1)

    assert report["ok"], report["text"]
    assert report["tasks"] > 10  # experts of one layer fall into several buckets
    assert await target.leader.call("logits", ids=PROMPT, out=after) == 1
    logits = [load_file(file)["logits"] for file in files]
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[0], logits[2])
    await source.all("close")
