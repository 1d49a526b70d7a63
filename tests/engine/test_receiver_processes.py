"""A target of two ranks in processes of their own, over real shared memory: death and standstill at every step of a push.

The test is the source. Ranks kill or stop themselves at a step of their own fence, so that it is the same step every time.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

STEPS = ["prepare", "vote", "paused", "committing", "applied", "resumed"]
AFTER_THE_ORDER = {"committing", "applied", "resumed"}


@pytest.fixture
async def pair(rig, run_dir, processes, until):
    """Starts both ranks and a source; gives a function that starts a rank again."""
    made = []

    async def start(landing, *, version=1):
        options = {"world": 2, "version": version, "movable": landing == "mapped"}
        leader = await processes(rank=0, listen=f"unix:{run_dir}/0.sock", **options)
        member = await processes(rank=1, listen=f"unix:{run_dir}/1.sock", leader=leader.address, **options)
        source = rig.ShmSource(leader.address, landing=landing)
        made.append(source)
        await until(lambda: ready(source))
        await source.connect()
        return [leader, member], source

    yield start
    for source in made:
        await source.close()


async def ready(source):
    try:
        return (await source.client.status()).ready
    except Exception:  # noqa: BLE001 - a leader that is just starting
        return False


async def looks(rank, until, state, *, holds=None):
    """Wait until a rank is in ``state``; then what it serves is whole."""
    found = {}

    async def there():
        found.update(await rank.ask("look", newest=20))
        return found["state"] == state

    await until(there)
    if holds is not None:
        assert found["holds"] == [holds]
        assert found["serving"] == holds
    if state == "FENCED":
        assert found["serving"] is None
    return found


@pytest.mark.parametrize("landing", ["staged", "streamed", "mapped"])
async def test_pushes_over_shared_memory(pair, until, landing):
    ranks, source = await pair(landing)
    for version in (2, 3, 4):
        result = await source.push(version)
        assert result.success, result
        for rank in ranks:
            await looks(rank, until, "COMMITTED", holds=version)
    assert (await source.prepare(4)).status == "already"


@pytest.mark.parametrize("action", ["kill", "stop", "raise"])
@pytest.mark.parametrize("step", STEPS)
async def test_the_other_rank_fails_at_each_step(pair, processes, until, run_dir, *, step, action):
    ranks, source = await pair("staged")
    await ranks[1].ask("arm", step=step, action=action)
    async with asyncio.timeout(30):
        result = await source.push(2, timeout_s=4.0)
    assert result.error == ("TargetLost" if action != "raise" else "StageError" if step == "vote" else "ControlError")
    if step in AFTER_THE_ORDER:
        await looks(ranks[0], until, "FENCED")
    else:
        await looks(ranks[0], until, "COMMITTED", holds=1)
    if action == "stop":
        ranks[1].signal(signal.SIGCONT)
        await until(lambda: ready(source))
        # it woke up, decided alone, and joined again: no rank serves what the others do not
        states = [await rank.ask("look", newest=20) for rank in ranks]
        assert len({state["serving"] for state in states}) == 1
    elif action == "kill":
        await ranks[1].gone()
        ranks[1] = await processes(rank=1, world=2, listen=f"unix:{run_dir}/1.sock", leader=ranks[0].address)
        await until(lambda: ready(source))
        for rank in ranks:
            await looks(rank, until, "FENCED")
    await until(lambda: ready(source))
    await source.connect()
    result = await source.push(3)
    assert result.success, result
    for rank in ranks:
        await looks(rank, until, "COMMITTED", holds=3)


@pytest.mark.parametrize("step", STEPS)
async def test_the_leader_dies_at_each_step(pair, processes, until, run_dir, step):
    ranks, source = await pair("staged")
    await ranks[0].ask("arm", step=step, action="kill")
    with pytest.raises(Exception, match=r"unix:"):
        async with asyncio.timeout(30):
            await source.push(2, timeout_s=4.0)
    await ranks[0].gone()
    expected = "COMMITTED" if step in ("prepare", "vote", "paused") else "FENCED"
    if step == "resumed":
        expected = "COMMITTED"  # ranks are let go one by one, the leader last: this one was, and it holds what all hold
    found = await looks(ranks[1], until, expected)
    assert found["serving"] in ((1, 2) if expected == "COMMITTED" else (None,))
    ranks[0] = await processes(rank=0, world=2, listen=f"unix:{run_dir}/0.sock")
    await until(lambda: ready(source))
    for rank in ranks:
        await looks(rank, until, "FENCED")
    await source.connect()
    assert (await source.push(3)).success
    for rank in ranks:
        await looks(rank, until, "COMMITTED", holds=3)


@pytest.mark.parametrize("landing", ["streamed", "mapped"])
async def test_a_rank_is_killed_while_it_receives(pair, processes, until, run_dir, landing):
    ranks, source = await pair(landing)
    reply = await source.prepare(2, timeout_s=20.0)
    assert reply.status == "ready"
    ranks[1].signal(signal.SIGKILL)
    await source.send(2)
    result = await source.complete(2, timeout_s=20.0)
    assert (result.success, result.error) == (False, "TargetLost")
    if landing == "streamed":
        await looks(ranks[0], until, "FENCED")
    else:
        await looks(ranks[0], until, "COMMITTED", holds=1)
    await ranks[1].gone()
    ranks[1] = await processes(
        rank=1, world=2, listen=f"unix:{run_dir}/1.sock", leader=ranks[0].address, movable=landing == "mapped"
    )
    await until(lambda: ready(source))
    await source.connect()
    assert (await source.push(2)).success
    for rank in ranks:
        await looks(rank, until, "COMMITTED", holds=2)


async def test_the_source_dies_in_the_middle_of_a_push(pair, until, rig):
    ranks, source = await pair("staged")
    opened = asyncio.Event()
    watch = asyncio.create_task(source.client.watch(opened.set))
    await opened.wait()
    await source.prepare(2, timeout_s=1000.0)
    await source.close()
    await watch
    for rank in ranks:
        await looks(rank, until, "COMMITTED", holds=1)
    another = rig.ShmSource(ranks[0].address, landing="staged", incarnation="another")
    await another.connect()
    assert (await another.push(2)).success
    await another.close()
    for rank in ranks:
        await looks(rank, until, "COMMITTED", holds=2)


async def test_a_target_that_was_stopped_before_prepare_does_not_begin_a_push_of_the_past(rig, run_dir, processes, until):
    """It goes on when its source has given it up, and finds the prepare in its socket."""
    leader = await processes(rank=0, listen=f"unix:{run_dir}/0.sock", world=1, version=1)
    source = rig.ShmSource(leader.address)
    await until(lambda: ready(source))
    await source.connect()
    os.kill(leader.pid, signal.SIGSTOP)
    # What a source does whose watch was not answered in time: the watch is closed, and so is the call.
    watch = asyncio.create_task(source.client.watch())
    preparing = asyncio.create_task(source.prepare(2, source_incarnation="source", timeout_s=20.0))
    await until(lambda: source.client.calls_under_way == 2)  # both have been sent
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    os.kill(leader.pid, signal.SIGCONT)
    reply = await preparing
    assert (reply.status, reply.error) in {("error", "ProtocolError"), ("error", "SourceRankLost")}
    assert (await looks(leader, until, "COMMITTED", holds=1))["state"] == "COMMITTED"
    await source.close()
