"""Whole pushes between processes on one GPU: trainer, CUDA IPC or NCCL, receiver; every element looked at.

One command runs them: ``nox -s cuda``.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from syncline.bench.gpu_peer import Command

SMALL = {"max_tmp_bytes": 8 << 20, "bucket_bytes": 1 << 20}
SLACK_BYTES = 64 << 20


def well(pushes):
    assert pushes.error == ""
    assert pushes.errors == ()
    assert pushes.ok
    assert pushes.intact


@pytest.mark.parametrize("landing", ["streamed", "staged"])
@pytest.mark.parametrize("place", ["device", "padded", "pinned", "host"])
@pytest.mark.parametrize("fp8", [False, True])
async def test_cuda_ipc(bed, landing, place, fp8):
    here = await bed(tensors=5, rows=600, columns=1000, place=place, fp8=fp8)
    for _ in range(2):
        well(await here.push({"transport": "cuda_ipc", "landing": landing, **SMALL}, repeat=2))


@pytest.mark.parametrize("landing", ["streamed", "staged"])
@pytest.mark.parametrize("place", ["device", "padded", "pinned"])
async def test_nccl(bed, landing, place):
    here = await bed(tensors=5, rows=600, columns=1000, place=place, nccl=True)
    well(await here.push({"transport": "nccl", "landing": landing, **SMALL}, repeat=2))


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_shards_are_gathered_over_nccl(bed, transport):
    here = await bed(tensors=5, rows=600, columns=1000, fp8=True, source_ranks=3, nccl=True)
    well(await here.push({"transport": transport, "route": "gather", **SMALL}, repeat=2))


async def test_auto_takes_cuda_ipc_on_one_host(bed):
    here = await bed()
    well(await here.push({"landing": "streamed", **SMALL}))


async def test_transports_for_cpu_memory_are_refused_by_name(bed):
    here = await bed()
    for transport in ("shm", "gloo"):
        pushes = await here.push_only({"transport": transport, **SMALL})
        assert "PlanError" in pushes.error
        assert "on a GPU; choose 'auto'" in pushes.error


async def test_without_digests(bed):
    here = await bed(tensors=5, rows=600, columns=1000, place="padded")
    well(await here.push({"transport": "cuda_ipc", "verify": False, **SMALL}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_a_hundred_pushes_hold_nothing_more(bed, transport):
    """Device memory, page-locked memory, descriptors and threads: after 100 pushes over the same links, and new links."""
    here = await bed(tensors=8, rows=512, columns=1024, nccl=transport == "nccl")
    config = {"transport": transport, "landing": "streamed", **SMALL}
    well(await here.push(config, repeat=3))
    before = await here.facts()
    well(await here.push(config, repeat=100))
    after = await here.facts()
    for earlier, later in zip(before, after, strict=True):
        assert later.device_bytes <= earlier.device_bytes + (1 << 20)
        assert later.pinned_bytes <= earlier.pinned_bytes + (1 << 20)
        assert later.descriptors <= earlier.descriptors + 2
        assert later.threads <= earlier.threads + 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("watermark", [256 << 20, 1 << 30, 4 << 30])
async def test_temporary_device_memory_keeps_to_the_watermark(bed, watermark):
    here = await bed(tensors=16, rows=16_384, columns=8_192, place="padded")
    config = {"transport": "cuda_ipc", "landing": "streamed", "max_tmp_bytes": watermark, "bucket_bytes": watermark // 4}
    well(await here.push(config, repeat=2))
    assert here.peak_bytes <= watermark + SLACK_BYTES


async def test_a_stopped_nccl_peer_costs_one_push(bed):
    """The push returns within its deadline, the source lives, and the next push, to a fresh peer, is whole."""
    here = await bed(tensors=8, rows=1024, columns=1024, nccl=True)
    config = {
        "transport": "nccl", "landing": "streamed", "push_timeout_s": 15.0, "target_timeout_s": 4.0, "connect_timeout_s": 15.0,
        **SMALL,
    }  # fmt: skip
    well(await here.push(config, keep=True))
    many = asyncio.create_task(here.push_only(config, repeat=10_000, keep=True))
    await asyncio.sleep(3.0)  # into the pushes: there is nothing to be told by that could be awaited
    here.target.signal(signal.SIGSTOP)
    began = time.monotonic()
    pushes = await many
    assert time.monotonic() - began < 30
    assert pushes.errors
    assert here.sources[0].process.returncode is None
    here.target.process.kill()
    await here.target.process.wait()
    await here.start_target()
    well(await here.push(config, keep=True))


async def test_a_killed_ipc_receiver_costs_one_push(bed):
    here = await bed(tensors=8, rows=1024, columns=1024)
    config = {"transport": "cuda_ipc", "landing": "streamed", "push_timeout_s": 15.0, "target_timeout_s": 4.0, **SMALL}
    well(await here.push(config, keep=True))
    many = asyncio.create_task(here.push_only(config, repeat=10_000, keep=True))
    await asyncio.sleep(2.0)
    here.target.process.kill()
    await here.target.process.wait()
    assert (await many).errors
    await here.start_target()
    well(await here.push(config, keep=True))
    answer = await here.sources[0].ask(Command(do="facts"))
    assert answer.facts is not None
