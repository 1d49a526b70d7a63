"""Shared memory: leases, buffers that are held on to, protection of what is shared, doorways."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from syncline.stages.errors import TransportError
from syncline.stages.transports.channel import Channel
from syncline.stages.transports.doorway import Doorway, sweep
from syncline.stages.transports.shared_memory import Mapping, Segment, end_lease
from syncline.stages.transports.shm_landing import MAX_BUFFERS


async def push(one, push_id, version, receivers, **options):
    source = one.sources[0]
    source.fill(version)
    for receiver in receivers:
        await one.targets[receiver].half.begin(push_id, timeout_s=30)
    return await asyncio.gather(source.push(push_id, **options), *(one.targets[r].receive() for r in receivers))


def test_a_lease_is_seen_until_it_ends():
    segment = Segment(1, 10_000)
    first, second = segment.open_lease(), segment.open_lease()
    assert segment.is_leased()
    end_lease(first)
    assert segment.is_leased()
    os.close(second)
    assert not segment.is_leased()
    segment.close()


def test_a_lease_ends_with_the_process_that_holds_it():
    segment = Segment(1, 10)
    lease = segment.open_lease()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lease])
    os.close(lease)
    assert segment.is_leased()
    child.kill()
    child.wait()
    child.stdin.close()
    assert not segment.is_leased()
    segment.close()


def test_a_lease_ends_with_the_last_tensor_over_the_memory():
    segment = Segment(1, 4096)
    fd = segment.open_for_reading()
    mapping = Mapping(fd, 4096)
    os.close(fd)
    mapping.hold(segment.open_lease())
    tensor = mapping.memory.view(torch.float32)[3:]
    del mapping
    assert segment.is_leased()
    del tensor
    assert not segment.is_leased()
    segment.close()


def test_receivers_see_what_is_written_and_cannot_write_it():
    segment = Segment(1, 8192)
    fd = segment.open_for_reading()
    mapping, other = Mapping(fd, 8192), Mapping(fd, 8192)
    segment.memory.fill_(7)
    assert int(mapping.memory.sum()) == 7 * 8192
    mapping.memory[:4096].zero_()  # a stray write stays with who made it
    assert int(segment.memory.sum()) == 7 * 8192
    assert int(other.memory.sum()) == 7 * 8192
    with pytest.raises(OSError, match=r"."):
        mmap.mmap(fd, 8192)
    with pytest.raises(OSError, match=r"."):
        os.write(os.open(f"/proc/self/fd/{segment._fd}", os.O_RDWR), b"x")
    with pytest.raises(OSError, match=r"."):
        os.ftruncate(segment._fd, 0)
    os.close(fd)
    segment.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097])
def test_segments_of_any_size(nbytes):
    segment = Segment(1, nbytes)
    fd = segment.open_for_reading()
    assert segment.memory.numel() == segment.nbytes == Mapping(fd, nbytes).memory.numel() == nbytes
    os.close(fd)
    segment.close()


@pytest.mark.parametrize("landing", ["staged", "mapped"])
async def test_a_lease_that_is_not_released_gets_another_buffer(world, landing):
    one = await world(seed=1, transport="shm", landing=landing, elements=500)
    (receiver,) = one.targets
    source, target = one.sources[0], one.targets[receiver]
    kept = []
    start = source.sender.landing_bytes
    for version in (1, 2, 3):
        sent, got = await push(one, f"p{version}", version, [receiver], lease_timeout_s=0.05)
        assert got["digest"] == sent["digests"]["0:0"]
        kept.append((target.half.take_lease(), {i: b.clone() for i, b in target.buckets.items()}, target.buckets))
        await target.half.end(True)
    assert source.sender.landing_bytes > start
    for lease, want, memory in kept:
        assert all(torch.equal(want[index], memory[index]) for index in want)
        lease.release()
    held = source.sender.landing_bytes
    for version in (4, 5, 6):
        await one.push(version)
    assert source.sender.landing_bytes == held


@pytest.mark.parametrize("landing", ["staged", "mapped"])
async def test_who_never_releases_is_dropped_and_the_others_go_on(world, landing):
    one = await world(seed=2, transport="shm", landing=landing, targets=[1, 1], elements=500)
    bad, good = one.targets
    source = one.sources[0]
    dropped = {}
    kept = []
    for version in range(1, MAX_BUFFERS + 3):
        live = [r for r in (bad, good) if r in source.sender.linked]
        source.fill(version)
        for receiver in live:
            await one.targets[receiver].half.begin(f"p{version}", timeout_s=30)
        receiving = [asyncio.create_task(one.targets[r].receive()) for r in live]
        sent = await source.push(f"p{version}", lease_timeout_s=0.02)
        dropped |= sent["late"]
        got = dict(zip(live, await asyncio.gather(*receiving), strict=True))
        assert got[good]["digest"] == sent["digests"][f"{good.target}:{good.rank}"]
        if got.get(bad, {"error": "gone"})["error"] == "":
            kept.append((one.targets[bad].half.take_lease(), dict(one.targets[bad].buckets)))
            kept[-1] = (*kept[-1], {i: b.clone() for i, b in kept[-1][1].items()})
        await one.targets[good].commit()
        await source.end([good])
        assert one.targets[good].wrong(version) == []
    assert set(dropped) == {f"{bad.target}:{bad.rank}"}
    assert len(source.sender._landing.segments) <= MAX_BUFFERS
    for _, memory, want in kept:  # what it held on to was never touched
        assert all(torch.equal(want[index], memory[index]) for index in want)


@pytest.mark.parametrize("landing", ["staged", "mapped"])
async def test_a_receiver_that_takes_no_part_in_a_push_holds_nothing(world, landing):
    one = await world(seed=9, transport="shm", landing=landing, targets=[1, 1], elements=500)
    takes, idle = one.targets
    source = one.sources[0]
    await one.push(1)
    held = source.sender.landing_bytes
    for version in range(2, 8):
        source.fill(version)
        await one.targets[takes].half.begin(f"p{version}", timeout_s=30)
        source.mine = [takes]
        async with asyncio.timeout(30):  # nobody waits for a lease that is not late
            sending = source.push(f"p{version}", timeout_s=100, lease_timeout_s=100)
            sent, got = await asyncio.gather(sending, one.targets[takes].receive())
        assert (sent["late"], got["error"]) == ({}, "")
        await one.targets[takes].commit()
        await source.end([takes])
        assert one.targets[idle].wrong(1) == []
    if landing == "staged":
        assert source.sender.landing_bytes == held
    assert source.sender.linked == {takes, idle}
    source.mine = [takes, idle]
    await one.push(8)
    assert one.targets[idle].wrong(8) == []


async def test_receivers_that_fell_behind_are_dropped_when_buffers_run_out(world):
    one = await world(seed=10, transport="shm", landing="mapped", targets=[1] * (MAX_BUFFERS + 1), elements=500)
    source, everyone = one.sources[0], list(one.targets)
    served, dropped = {}, []
    for version in range(1, 2 * MAX_BUFFERS + 2):
        behind = version - 1 if version <= MAX_BUFFERS else MAX_BUFFERS  # one after the other stays at its version
        live = [receiver for receiver in everyone[behind:] if receiver in source.sender.linked]
        source.fill(version)
        source.mine = live
        for receiver in live:
            await one.targets[receiver].half.begin(f"p{version}", timeout_s=30)
        sent, *got = await asyncio.gather(source.push(f"p{version}"), *(one.targets[r].receive() for r in live))
        dropped += sent["late"]
        assert [said["error"] for said in (sent, *got)] == [""] * (1 + len(live))
        for receiver in live:
            await one.targets[receiver].commit()
            served[receiver] = version
        await source.end(live)
        assert len(source.sender._landing.segments) <= MAX_BUFFERS
        for receiver, version_served in served.items():
            assert one.targets[receiver].wrong(version_served) == []
    assert dropped
    assert everyone[-1] in source.sender.linked


async def test_what_a_dropped_receiver_serves_from_is_never_written_again(world):
    one = await world(seed=3, transport="shm", landing="mapped", targets=[1, 1], elements=500)
    gone, stays = one.targets
    await one.push(1)
    one.sources[0].sender.drop([gone])
    for version in range(2, 6):
        await one.push(version, [stays])
        assert one.targets[stays].wrong(version) == []
        assert one.targets[gone].wrong(1) == []
    await one.connect([gone])
    assert one.targets[gone].wrong(1) == []
    await one.push(6)
    assert one.targets[gone].wrong(6) == []


async def test_mapped_memory_outlives_the_link_and_the_source(world):
    one = await world(seed=4, transport="shm", landing="mapped", elements=500)
    (target,) = one.targets.values()
    await one.push(1)
    await one.sources[0].close()
    await target.half.close()
    assert target.wrong(1) == []


@pytest.mark.parametrize("guarded", [True, False])
async def test_bytes_that_were_used_again_are_never_taken_for_good(world, monkeypatch, guarded):
    """A receiver sleeps on a bucket of the ring, is dropped, and wakes when its bytes are those of another push."""
    one = await world(
        seed=11, transport="shm", landing="streamed", targets=[1, 1], elements=4000, watermark=8192, bucket_bytes=4096
    )
    sleeps, goes_on = one.targets
    source, sleeper = one.sources[0], one.targets[sleeps]
    source.fill(1)
    for target in one.targets.values():
        await target.half.begin("a", timeout_s=30)
    pushing = asyncio.create_task(source.push("a"))
    receiving = asyncio.create_task(one.targets[goes_on].receive())
    task = sleeper.program.tasks[0]
    bucket = await sleeper.half.receive(task)
    before = bucket.clone()
    source.send.drop([sleeps])
    await pushing
    await receiving
    await one.targets[goes_on].commit()
    await one.push(2, [goes_on])
    assert not torch.equal(bucket, before)  # torn indeed
    if not guarded:  # without the check nothing would be noticed
        monkeypatch.setattr(Channel, "check", lambda self: None)
        sleeper.half.release(task)
        return
    with pytest.raises(TransportError, match="is gone"):
        sleeper.half.release(task)


async def test_a_bucket_from_other_memory_is_refused(world):
    for landing in ("streamed", "staged"):
        one = await world(seed=5, transport="shm", landing=landing)
        (receiver,) = one.targets
        await one.sources[0].sender.begin("a", timeout_s=30)
        task = one.sources[0].program.tasks[0]
        with pytest.raises(TransportError, match="not assembled in"):
            one.sources[0].sender.send(task, torch.zeros(task.nbytes, dtype=torch.uint8), [receiver])
        with pytest.raises(TransportError, match="not in this transport's shared memory"):
            one.sources[0].sender.send(task, torch.empty(task.nbytes, dtype=torch.uint8, device="meta"), [receiver])


async def test_abandoned_writes_keep_their_landing_buffer(world):
    """A task of a failed push may still write: the next push takes another buffer."""
    one = await world(seed=6, transport="shm", landing="staged", elements=500)
    sender, task = one.sources[0].sender, one.sources[0].program.tasks[0]
    await sender.begin("a", timeout_s=30)
    loan = await sender.claim(task)
    await sender.begin("b", timeout_s=30, lease_timeout_s=0.01)
    other = await sender.claim(task)
    assert other.memory.data_ptr() != loan.memory.data_ptr()
    loan.release()
    with pytest.raises(ValueError, match="twice"):
        loan.release()
    other.release()


async def test_a_stranger_gets_nothing(world):
    one = await world(connect=False, seed=7, transport="shm", landing="staged", targets=[1, 1])
    knows, claims = one.targets
    source = one.sources[0]
    offers = await source.sender.offer([knows])
    import msgspec

    from syncline.stages.transports.shm import ShmOffer

    offer = msgspec.msgpack.decode(offers[knows.target], type=ShmOffer)
    forged = msgspec.msgpack.encode(msgspec.structs.replace(offer, token=offer.token ^ 1))
    with pytest.raises(TransportError):
        await one.targets[knows].link({0: forged}, timeout_s=5)
    with pytest.raises(TransportError):  # the right token, but nobody offered that receiver a link
        await one.targets[claims].link({0: offers[knows.target]}, timeout_s=5)
    failed, _ = await asyncio.gather(
        source.sender.link([knows], timeout_s=5), one.targets[knows].link({0: offers[knows.target]}, timeout_s=5)
    )
    assert not failed


async def test_a_dead_owners_doorway_is_swept(tmp_path):
    home = tmp_path / "syncline-0123456789abcdef"  # nobody holds a lock on it
    home.mkdir(mode=0o700)
    (home / "link").touch()
    living = Doorway(lambda _: None, tmp_path)
    assert not home.exists()
    sweep(tmp_path)
    assert (tmp_path / Path(living.path).parent.name / "link").exists()
    living.close()
    living.close()
    assert list(tmp_path.iterdir()) == []


async def test_the_doorway_is_private_and_short_lived(world):
    one = await world(connect=False, seed=8, transport="shm", landing="staged")
    await one.sources[0].sender.offer(list(one.targets))
    home = Path(one.sources[0].sender._reception._doorway.path).parent
    assert home.stat().st_mode & 0o777 == 0o700
    await one.connect()
    assert not home.exists()
    await one.push(1)
