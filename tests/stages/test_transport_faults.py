"""Processes that die, stop and come back in the middle of a push, for every transport and landing mode. Nothing leaks."""

from __future__ import annotations

import asyncio
import signal

import pytest

SUPPORTED = [("shm", "streamed"), ("shm", "staged"), ("shm", "mapped"), ("gloo", "streamed"), ("gloo", "staged")]
each_transport = pytest.mark.parametrize(("transport", "landing"), SUPPORTED)
FIRST, SECOND = (0, 0), (1, 0)


async def until(question, *, within_s=20.0):
    """The first true answer of ``question()``."""
    async with asyncio.timeout(within_s):
        while not (answer := await question()):
            await asyncio.sleep(0.01)
    return answer


@each_transport
async def test_two_source_ranks_and_three_receivers(processes, transport, landing):
    one = await processes(
        seed=21, transport=transport, landing=landing, sources=2, targets=[1, 2], elements=20_000, bucket_bytes=1 << 15,
        watermark=1 << 18,
    )  # fmt: skip
    for version in (1, 2, 3):
        await one.push(version)


async def two_receivers(processes, transport, landing):
    return await processes(
        seed=22, transport=transport, landing=landing, targets=[1, 1], elements=20_000, bucket_bytes=1 << 14, watermark=1 << 16
    )


async def interrupted(one, fault):
    """A push in which the first receiver meets ``fault`` before its third bucket. What the source and the second say."""
    source, first, second = one.sources[0], one.targets[FIRST], one.targets[SECOND]
    push_id = await one.begin(1)
    third = (await first.tasks())[2]
    receiving = [asyncio.create_task(first.receive(hold_before=third)), asyncio.create_task(second.receive())]
    push = asyncio.create_task(source.push(push_id=push_id, auto_drop=False))
    await first.await_held()
    await fault(first)
    return source, push, receiving


@each_transport
async def test_a_killed_receiver_is_noticed_and_the_other_finishes(processes, transport, landing):
    one = await two_receivers(processes, transport, landing)

    async def kill(first):
        await first.kill()

    source, push, (lost, receiving) = await interrupted(one, kill)
    with pytest.raises(EOFError):
        await lost

    async def noticed():
        facts = await source.facts()
        return "0:0" in {*facts["errors"], *facts["lost"]}

    if transport == "shm" or landing == "streamed":
        await until(noticed)
    await source.drop(receivers=[FIRST])
    sent, got = await push, await receiving
    assert sent["error"] == ""
    assert one.agrees(SECOND, [sent], got)
    await one.targets[SECOND].commit()
    await source.end(committed=[SECOND])
    assert (await source.facts())["linked"] == ["1:0"]
    await one.push(2, [SECOND])
    await one.restart(FIRST)
    await one.connect([FIRST])
    await one.push(3)


@each_transport
async def test_a_stopped_receiver_holds_nobody_up_and_never_takes_torn_bytes(processes, transport, landing):
    one = await two_receivers(processes, transport, landing)

    async def stop(first):
        first.signal(signal.SIGSTOP)

    source, push, (stopped, receiving) = await interrupted(one, stop)
    await source.drop(receivers=[FIRST])
    sent, got = await push, await receiving
    assert sent["error"] == ""
    assert one.agrees(SECOND, [sent], got)
    await one.targets[SECOND].commit()
    await source.end(committed=[SECOND])
    for version in (2, 3, 4):  # all memory is used again
        await one.push(version, [SECOND])
    one.targets[FIRST].signal(signal.SIGCONT)
    await one.targets[FIRST].release_hold()
    said = await stopped
    assert "TransportError" in said["error"]
    await one.targets[FIRST].abandon()
    await one.connect([FIRST])
    await one.push(5)


@each_transport
async def test_a_killed_source_ends_the_receivers_wait(processes, transport, landing):
    one = await two_receivers(processes, transport, landing)
    push_id = await one.begin(1)
    receiving = [asyncio.create_task(one.targets[r].receive()) for r in (FIRST, SECOND)]
    last = (await one.sources[0].tasks())[-1]
    push = asyncio.create_task(one.sources[0].push(push_id=push_id, hold_before=last))
    await one.sources[0].await_held()
    await one.sources[0].kill()
    with pytest.raises(EOFError):
        await push
    async with asyncio.timeout(20):
        for said in await asyncio.gather(*receiving):
            assert "TransportError" in said["error"]


@each_transport
async def test_a_killed_source_rank_ends_the_others_prepare(processes, transport, landing):
    one = await processes(
        seed=23, transport=transport, landing=landing, sources=2, targets=[1], elements=20_000, bucket_bytes=1 << 14,
        watermark=1 << 16,
    )  # fmt: skip
    push_id = await one.begin(1)
    receiving = asyncio.create_task(one.targets[FIRST].receive())
    survivor, dies = one.sources
    waiting = asyncio.create_task(survivor.push(push_id=push_id))
    await dies.kill()
    async with asyncio.timeout(20):
        said = await waiting
    assert "TransportError" in said["error"] or "closed by peer" in said["error"], said
    await survivor.kill()
    assert "TransportError" in (await receiving)["error"]


@each_transport
async def test_a_hundred_pushes_leak_nothing(processes, transport, landing):
    one = await processes(seed=24, transport=transport, landing=landing, sources=1, targets=[1, 1], elements=300)
    peers = [*one.sources, *one.targets.values()]
    for version in range(1, 11):
        await one.push(version)
    before = await asyncio.gather(*(peer.resources() for peer in peers))
    for version in range(11, 101):
        await one.push(version)
    after = await asyncio.gather(*(peer.resources() for peer in peers))
    assert after == before
    await one.sources[0].close()
    for target in one.targets.values():
        await target.close()

    async def gone():
        left = await asyncio.gather(*(peer.resources() for peer in peers))
        return all(r["memfds"] == r["maps"] == 0 for r in left)

    await until(gone)


@pytest.mark.parametrize(("transport", "landing"), [("shm", "mapped"), ("shm", "streamed"), ("gloo", "staged")])
async def test_linking_anew_leaks_nothing(processes, transport, landing):
    one = await processes(seed=25, transport=transport, landing=landing, sources=1, targets=[1, 1], elements=300)
    peers = [*one.sources, *one.targets.values()]
    counts = []
    for version in range(1, 31):
        await one.connect([FIRST])
        await one.push(version)
        if version in (5, 30):
            counts.append([await settled(peer) for peer in peers])
    assert counts[0] == counts[1]


async def settled(peer):
    """Resources once two answers agree: threads that tear communicators down take a moment."""
    last = None
    while (now := await peer.resources()) != last:
        last = now
        await asyncio.sleep(0.1)
    return now
