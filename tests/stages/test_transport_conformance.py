"""What every transport promises in every landing mode that it has: contents, reuse, order, loss, abort. In one process."""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import pytest
import torch
import uvloop

from syncline.stages.errors import TransportError

SUPPORTED = [
    ("shm", "streamed"), ("shm", "staged"), ("shm", "mapped"), ("gloo", "streamed"), ("gloo", "staged"),
    # Over what stands for CUDA (`standins`): the logic of these transports. CUDA itself: tests/cuda.
    ("cuda_ipc", "streamed"), ("cuda_ipc", "staged"), ("nccl", "streamed"), ("nccl", "staged"),
]  # fmt: skip
each_transport = pytest.mark.parametrize(("transport", "landing"), SUPPORTED)


def check(world, version, receivers=None):
    for receiver in world.targets if receivers is None else receivers:
        assert world.targets[receiver].wrong(version) == [], receiver


def receivers(world):
    return list(world.targets)


@each_transport
@pytest.mark.parametrize("seed", range(3))
async def test_contents_arrive(world, transport, landing, seed):
    one = await world(seed=seed, transport=transport, landing=landing, sources=1 + seed % 2, targets=[[1], [2], [1, 2]][seed])
    for version in (1, 2):
        await one.push(version)
        check(one, version)


@each_transport
async def test_buckets_of_one_leaf_and_of_everything(world, transport, landing):
    for bucket_bytes in (1, 1 << 20):
        one = await world(
            seed=7, transport=transport, landing=landing, bucket_bytes=bucket_bytes, leaf_bytes=256, watermark=1 << 21
        )
        await one.push(1)
        check(one, 1)


@each_transport
async def test_shards_cast_and_mapped_files_go_through_prepare(world, transport, landing):
    one = await world(seed=11, transport=transport, landing=landing, sources=3, targets=[2], cast=True, files=True)
    await one.push(1)
    check(one, 1)
    assert all(source.memory.in_flight == 0 for source in one.sources)


@each_transport
async def test_direct_route(world, transport, landing):
    one = await world(seed=12, transport=transport, landing=landing, sources=3, targets=[2], route="direct")
    await one.push(1)
    check(one, 1)


@each_transport
async def test_source_ranks_that_own_nothing(world, transport, landing):
    one = await world(seed=19, transport=transport, landing=landing, sources=5, targets=[1, 1], shapes=[[3, 4], []])
    assert not all(any(task.owner == source.rank for task in source.program.tasks) for source in one.sources)
    for version in (1, 2):
        await one.push(version)
        check(one, version)


@each_transport
async def test_without_digests(world, transport, landing):
    one = await world(seed=13, transport=transport, landing=landing, verify=False)
    await one.push(1)
    check(one, 1)


@each_transport
async def test_memory_is_reused_over_many_pushes(world, transport, landing):
    one = await world(seed=3, transport=transport, landing=landing, targets=[1, 1], tensors=4, elements=500)
    held = one.sources[0].sender.landing_bytes
    for version in range(1, 25):
        await one.push(version)
        check(one, version)
    assert one.sources[0].sender.landing_bytes == held
    assert one.sources[0].memory.in_flight == 0
    assert one.sources[0].pool.in_use == 0


@each_transport
async def test_thousands_of_small_tensors(world, transport, landing):
    one = await world(
        seed=4, transport=transport, landing=landing, shapes=[[i % 5 + 1] for i in range(5000)], bucket_bytes=1 << 16,
        watermark=1 << 20,
    )  # fmt: skip
    await one.push(1)
    check(one, 1)


@each_transport
async def test_a_slow_receiver_slows_but_nothing_breaks(world, transport, landing):
    one = await world(seed=5, transport=transport, landing=landing, targets=[1, 1], elements=4000, watermark=16384)
    slow = one.targets[receivers(one)[0]]
    slow.hold_before = slow.program.tasks[0].index
    push = asyncio.create_task(one.push(1))
    await slow.held.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not push.done()
    slow.go.set()
    await push
    check(one, 1)


@each_transport
async def test_a_dropped_receiver_notices_and_the_others_finish(world, transport, landing):
    one = await world(seed=6, transport=transport, landing=landing, targets=[1, 1], elements=4000, watermark=16384)
    gone, stays = receivers(one)
    source, lost = one.sources[0], one.targets[gone]
    source.fill(1)
    for target in one.targets.values():
        await target.half.begin("a", timeout_s=30)
    lost.hold_before = lost.program.tasks[1].index
    receiving = [asyncio.create_task(one.targets[receiver].receive()) for receiver in (gone, stays)]
    push = asyncio.create_task(source.push("a"))
    await lost.held.wait()
    source.send.drop([gone])
    lost.go.set()
    sent, (missed, got) = await push, await asyncio.gather(*receiving)
    assert sent["error"] == ""
    assert "TransportError" in missed["error"]
    assert got["error"] == ""
    assert got["digest"] == sent["digests"][f"{stays.target}:{stays.rank}"]
    await one.targets[stays].commit()
    await source.end([stays])
    assert source.sender.linked == {stays}
    check(one, 1, [stays])
    await one.connect([gone])
    await one.push(2)
    check(one, 2)


@each_transport
async def test_an_aborted_push_leaves_nothing_behind(world, transport, landing):
    one = await world(seed=8, transport=transport, landing=landing, sources=1, targets=[1], elements=4000, watermark=16384)
    (receiver,) = receivers(one)
    source, target = one.sources[0], one.targets[receiver]
    source.fill(1)
    target.hold_before = target.program.tasks[2].index
    await target.half.begin("a", timeout_s=30)
    receiving = asyncio.create_task(target.receive())
    push, held = asyncio.create_task(source.push("a", timeout_s=0.3)), asyncio.create_task(target.held.wait())
    await asyncio.wait({push, held}, return_when=asyncio.FIRST_COMPLETED)  # on a busy machine it may not come so far in time
    held.cancel()
    sent = await push
    if landing == "streamed":  # otherwise nothing waits for the receiver to take anything
        # The transport has the same deadline: where its own thread sees it first, the receiver is dropped.
        assert "DeadlineExceeded" in sent["error"] or receiver in source.errors
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await target.abandon()
    await source.end([])
    target.hold_before = -1
    if source.sender.linked != {receiver}:
        await one.connect()
    await one.push(2)
    check(one, 2)
    async with asyncio.timeout(10):
        while source.memory.in_flight or source.driver.abandoned:
            await asyncio.sleep(0.001)


@each_transport
async def test_two_pushes_back_to_back(world, transport, landing):
    """The source begins the second push while the receiver has not yet said that the first is over."""
    one = await world(seed=9, transport=transport, landing=landing)
    (receiver,) = receivers(one)
    source, target = one.sources[0], one.targets[receiver]
    await one.push(1)
    source.fill(2)
    begun = asyncio.create_task(source.push("next"))
    if transport in {"gloo", "nccl"}:
        await target.half.begin("next", timeout_s=30)
    else:
        await asyncio.sleep(0)
        await target.half.begin("next", timeout_s=30)
    got, sent = await target.receive(), await begun
    assert got["digest"] == sent["digests"]["0:0"]
    await target.commit()
    check(one, 2)


@each_transport
async def test_success_without_moving_anything_is_caught_by_the_digest(world, transport, landing, monkeypatch):
    one = await world(seed=10, transport=transport, landing=landing)
    (target,) = one.targets.values()
    receive = target.half.receive

    async def empty(task):
        return torch.zeros_like(await receive(task))

    monkeypatch.setattr(target.half, "receive", empty)
    with pytest.raises(AssertionError):
        await one.push(1)


@each_transport
async def test_closing_the_source_ends_a_receive_that_waits(world, transport, landing):
    one = await world(seed=14, transport=transport, landing=landing)
    (target,) = one.targets.values()
    await target.half.begin("a", timeout_s=30)
    waiting = asyncio.create_task(target.half.receive(target.program.tasks[0]))
    await asyncio.sleep(0)
    await one.sources[0].close()
    with pytest.raises(TransportError):
        await waiting
    with pytest.raises(TransportError):
        target.half.check()


@each_transport
async def test_closing_the_receiver_is_noticed_by_the_source(world, transport, landing):
    one = await world(seed=15, transport=transport, landing=landing, targets=[1, 1])
    gone, stays = receivers(one)
    await one.targets[gone].half.close()
    one.sources[0].fill(1)
    await one.targets[stays].half.begin("a", timeout_s=30)
    sent, got = await asyncio.gather(one.sources[0].push("a"), one.targets[stays].receive())
    assert sent["error"] == ""
    assert got["digest"] == sent["digests"][f"{stays.target}:{stays.rank}"]
    assert gone not in one.sources[0].sender.linked


@each_transport
async def test_a_receiver_that_does_not_come_is_named_in_time(world, transport, landing):
    one = await world(connect=False, seed=16, transport=transport, landing=landing, targets=[1, 1])
    absent, comes = receivers(one)
    source = one.sources[0]
    offers = await source.sender.offer([absent, comes])
    failed, _ = await asyncio.gather(
        source.sender.link([absent, comes], timeout_s=1.0), one.targets[comes].link({0: offers[comes.target]})
    )
    assert set(failed) == {absent}
    assert source.sender.linked == {comes}


@each_transport
async def test_what_is_no_offer_is_refused(world, transport, landing):
    one = await world(connect=False, seed=20, transport=transport, landing=landing)
    (target,) = one.targets.values()
    for descriptor in (b"", b"nonsense", bytes([0x80])):
        with pytest.raises(TransportError, match="is not a"):
            await target.link({0: descriptor}, timeout_s=5)
    with pytest.raises(TransportError, match=r"source ranks \[0\]"):
        await target.link({}, timeout_s=5)


@each_transport
def test_on_uvloop(new_world, transport, landing):
    async def pushes():
        one = new_world(seed=30, transport=transport, landing=landing, sources=2, targets=[1, 1])
        try:
            await one.connect()
            for version in (1, 2, 3):
                await one.push(version)
                check(one, version)
            one.sources[0].send.drop(receivers(one)[:1])
            await one.connect(receivers(one)[:1])
            await one.push(4)
            check(one, 4)
        finally:
            await one.close()

    uvloop.run(pushes())


@each_transport
async def test_closing_twice_is_harmless(world, transport, landing):
    one = await world(seed=17, transport=transport, landing=landing)
    await one.push(1)
    for _ in range(2):
        await one.close()
    with pytest.raises(TransportError):
        await one.sources[0].sender.offer(receivers(one))


@each_transport
async def test_a_half_that_is_closed_holds_no_memory_of_its_own(world, transport, landing):
    """Whoever links anew asks for as much again, and there may not be room for both."""
    one = await world(seed=17, transport=transport, landing=landing)
    await one.push(1)
    for target in one.targets.values():
        half, held = target.half, target.half.landing_bytes
        await half.close()
        if transport != "shm":  # there it is the source's, and whoever has a lease keeps it
            assert (held > 0) == (landing == "staged")
            assert half.landing_bytes == 0


@each_transport
async def test_an_empty_bucket_arrives(world, transport, landing):
    one = await world(seed=18, transport=transport, landing=landing)
    (receiver,) = receivers(one)
    source, target = one.sources[0], one.targets[receiver]
    program = dataclasses.replace(target.program, tasks=(dataclasses.replace(target.program.tasks[0], nbytes=0, landings=()),))
    task = dataclasses.replace(source.program.tasks[0], nbytes=0, segments=())
    target.half._program = program
    await target.half.begin("a", timeout_s=30)
    await source.sender.begin("a", timeout_s=30)
    memory = (await source.sender.claim(task)).memory if source.sender.in_place else torch.empty(0, dtype=torch.uint8)
    sent = source.sender.send(task, memory, [receiver])
    assert (await target.half.receive(program.tasks[0])).numel() == 0
    target.half.release(program.tasks[0])
    if sent[receiver] is not None:
        await sent[receiver]


# --------------------------------------------------------------------------------------- device memory, between processes

DEVICES = [
    pytest.param("cpu", id="standin"),
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")], id="cuda"
    ),
]
each_device = pytest.mark.parametrize("device", DEVICES)
on_device = pytest.mark.parametrize(
    ("transport", "landing"), [(t, m) for t in ("cuda_ipc", "nccl") for m in ("streamed", "staged")]
)


def skip_nccl_standin(transport, device):
    if transport == "nccl" and device == "cpu":
        pytest.skip("what stands for NCCL works within one process only")


@on_device
@each_device
@pytest.mark.parametrize("seed", range(3))
async def test_contents_arrive_through_device_memory(processes, transport, landing, device, seed):
    skip_nccl_standin(transport, device)
    one = await processes(
        seed=seed, transport=transport, landing=landing, sources=1 + seed % 2, targets=[[1], [2], [1, 2]][seed], device=device
    )
    for version in (1, 2, 3):
        await one.push(version)


@on_device
@each_device
async def test_a_killed_receiver_of_device_memory_is_given_up_and_comes_back(processes, transport, landing, device):
    skip_nccl_standin(transport, device)
    one = await processes(seed=6, transport=transport, landing=landing, targets=[1, 1], device=device)
    gone, stays = one.receivers
    await one.push(1)
    one.targets[gone].signal(signal.SIGKILL)
    await one.sources[0].drop(receivers=[gone])
    push_id = await one.begin(2, [stays])
    sent, got = await asyncio.gather(one.sources[0].push(push_id=push_id), one.targets[stays].receive())
    assert one.agrees(stays, [sent], got)
    await one.targets[stays].commit()
    await one.sources[0].end(committed=[stays])
    await one.restart(gone)
    await one.connect([gone])
    await one.push(3)
