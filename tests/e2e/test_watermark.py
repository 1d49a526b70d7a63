"""Temporary memory stays under the watermark, by our accounts and by the kernel's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

MIB = 2**20
WATERMARK = 8 * MIB
GROWTH = 24 * MIB
EMBEDDING = 49152 * 576 * 2


async def grown(source: Any, cmd: str, **args: Any) -> tuple[list[Any], list[int]]:
    """Run a command on every rank; its answers, and by how many bytes each process's peak of resident memory rose."""
    resident = await source.all("reset_peak")
    answers = await source.all(cmd, **args)
    peaks = [vitals["peak"] for vitals in await source.all("vitals")]
    return answers, [peak - before for peak, before in zip(peaks, resident, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "landing"), [("shm", "staged"), ("shm", "streamed"), ("shm", "mapped"), ("gloo", "staged")]
)
async def test_a_model_larger_than_the_watermark(cluster, smollm2, transport: str, landing: str) -> None:
    assert EMBEDDING > 6 * WATERMARK
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": {"kind": "folder", "folder": str(smollm2.real)}, "layout": "fsdp"}),
        cluster.target("a", build={"model": {"kind": "folder", "folder": str(smollm2.random)}, "movable": landing == "mapped"}),
    )
    await cluster.connect(source, [target], max_tmp_bytes=WATERMARK, landing=landing, transport=transport)

    (report, _), growth = await grown(source, "push", version=1)

    assert report["ok"], report["text"]
    assert 0 < report["peak_tmp_bytes"] <= WATERMARK
    assert max(growth) <= GROWTH, growth
    out = cluster.folder / "logits.safetensors"
    await target.leader.call("logits", ids=smollm2.prompt, out=str(out))
    assert torch.equal(load_file(out)["logits"], load_file(smollm2.logits)["logits"])

    # Controls: the same measure sees a whole model gathered at once, and a watermark of the model's own size.
    _, growth = await grown(source, "gather_all")
    assert min(growth) > 4 * GROWTH, growth
    await source.all("close")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_watermark_that_is_too_high_is_seen(cluster, smollm2) -> None:
    """Control: with room for whole tensors, the same push must exceed what is allowed above. Its room is made at connect."""
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": {"kind": "folder", "folder": str(smollm2.real)}, "layout": "fsdp"}),
        cluster.target("a", build={"model": {"kind": "folder", "folder": str(smollm2.random)}}),
    )
    resident = await source.all("reset_peak")
    await cluster.connect(
        source, [target], max_tmp_bytes=1024 * MIB, bucket_bytes=256 * MIB, landing="staged", transport="gloo"
    )
    report = await source.push(1)
    peaks = [vitals["peak"] for vitals in await source.all("vitals")]
    assert report["peak_tmp_bytes"] > WATERMARK
    assert max(peak - before for peak, before in zip(peaks, resident, strict=True)) > GROWTH
    await source.all("close")


SMALL = {"kind": "llama", "tied": True, "seed": 1}
LARGE = {"kind": "stamp", "tensors": 6, "width": 512, "rows": 1024}  # up to 2 MiB: digested in 8 leaves, cut between them
SIZES = {"small": [1, 7, 255, 256, 4096, 50_000, 2**26], "large": [1, 2**18 - 1, 2**18, 300_000, 2**20, 2**26]}


@pytest.mark.parametrize(("model", "sizes"), [(SMALL, SIZES["small"]), (LARGE, SIZES["large"])], ids=["small", "large"])
async def test_every_bucket_size_gives_the_same(cluster, model: dict[str, Any], sizes: list[int]) -> None:
    """The same content, digest and landed bytes, from 1 byte a bucket to one bucket for the whole model."""
    other = {**model, "seed": 2} if "seed" in model else model
    source, target = await asyncio.gather(
        cluster.source(2, build={"model": model, "layout": "fsdp"}), cluster.target("a", build={"model": other})
    )
    tasks, digests, sums = [], set(), set()
    for version, size in enumerate(sizes, start=1):
        await target.leader.call("poison")
        await cluster.connect(source, [target], max_tmp_bytes="64MiB", bucket_bytes=size)
        report = await source.push(version)
        assert report["ok"], report["text"]
        tasks.append(report["tasks"])
        digests.add(report["digest"])
        sums.add(str(await target.leader.call("checksum")))
        await source.all("close")
    assert len(digests) == 1
    assert len(sums) == 1
    assert tasks == sorted(tasks, reverse=True)
    assert tasks[0] > tasks[-1] > 0
    if model is LARGE:
        assert await target.leader.call("versions") == [0.0]
        return
    out, expected = (cluster.folder / f"{name}.safetensors" for name in ("out", "expected"))
    await target.leader.call("logits", ids=[5, 6, 7], out=str(out))
    await target.leader.call("tiny_reference", model=model, ids=[5, 6, 7], out=str(expected))
    assert torch.equal(load_file(out)["logits"], load_file(expected)["logits"])
