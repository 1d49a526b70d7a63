"""The fence of one rank, transition by transition; and the gate between forward passes and commits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from syncline.engine.errors import BusyError, NotServing, ProtocolError, VersionConflict
from syncline.engine.fence import Fence
from syncline.engine.gate import Gate
from syncline.engine.loader import Fencing, Serving

MODES = ["staged", "streamed", "mapped"]
STEPS = ["prepare", "writing", "vote", "paused", "committing", "applied", "resumed"]


def make(version=1):
    return Fence(incarnation="i", version=version)


def go(fence, upto, *, landing="staged", push_id="p", version=2, digest="d2"):
    """Take the steps of a push up to and with ``upto``."""
    for step in STEPS[: STEPS.index(upto) + 1]:
        match step:
            case "prepare":
                assert fence.prepare(push_id, version, landing) == "ready"
            case "vote":
                fence.vote(push_id, digest)
            case "writing":
                fence.writing(push_id)
            case _:
                getattr(fence, step)(push_id)
    return fence


@pytest.mark.parametrize("landing", MODES)
def test_a_whole_push(landing):
    fence = make()
    served = []
    for step in STEPS:
        go(fence, step, landing=landing) if step == "prepare" else None
        if step == "vote":
            fence.vote("p", "d2")
        elif step != "prepare":
            getattr(fence, step)("p")
        served.append(fence.serving_version)
        assert fence.state == ("COMMITTED" if step == "resumed" else "UPDATING")
    old = None if landing == "streamed" else 1
    assert served == [old, old, old, None, None, None, 2]
    assert (fence.version, fence.digest) == (2, "d2")


def test_fresh():
    fence = Fence(incarnation="i")
    assert (fence.state, fence.version, fence.serving_version, fence.phase) == ("FENCED", None, None, None)
    assert go(fence, "vote").serving_version is None
    assert go(Fence(incarnation="i"), "resumed").serving_version == 2


@pytest.mark.parametrize("landing", MODES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("end", ["abort", "lost", "timeout", "fence"])
def test_how_a_push_that_fails_leaves_the_rank(landing, step, end):
    fence = go(make(), step, landing=landing)
    late = step in ("committing", "applied")
    match end:
        case "abort" if late:
            with pytest.raises(ProtocolError, match="commit was ordered"):
                fence.abort("p", "why")
            return
        case "abort":
            assert fence.abort("p", "why") == (step != "resumed")
        case "timeout":
            fence.timeout("p", "why")
        case "lost" | "fence":
            getattr(fence, end)("why")
    if step == "resumed":
        expected = None if end == "fence" else 2
    elif end == "fence" or late or (step == "paused" and end != "abort") or (landing == "streamed" and step != "prepare"):
        expected = None
    else:
        expected = 1
    assert fence.serving_version == expected
    assert fence.state == ("FENCED" if expected is None else "COMMITTED")
    assert fence.version == (2 if step == "resumed" else 1)
    assert fence.push_id is None
    if expected is None:
        assert fence.reason == "why"
    again = go(fence, "resumed", landing=landing, push_id="q", version=3)
    assert again.serving_version == 3


def test_a_rank_that_held_nothing_goes_back_to_nothing():
    fence = go(Fence(incarnation="i"), "vote")
    assert fence.abort("p", "why")
    assert (fence.state, fence.reason) == ("FENCED", "why")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("wrong", STEPS[1:])
def test_steps_out_of_order_change_nothing(step, wrong):
    fence = go(make(), step)
    follows = {"prepare": ["writing", "vote"], "writing": ["writing", "vote"]}
    if wrong in follows.get(step, STEPS[STEPS.index(step) + 1 : STEPS.index(step) + 2]):
        return
    before = (fence.state, fence.phase, fence.serving_version, fence.version)
    with pytest.raises(ProtocolError):
        fence.vote("p") if wrong == "vote" else getattr(fence, wrong)("p")
    assert (fence.state, fence.phase, fence.serving_version, fence.version) == before


@pytest.mark.parametrize("step", STEPS[1:])
def test_steps_of_another_push_change_nothing(step):
    fence = go(make(), STEPS[STEPS.index(step) - 1])
    before = (fence.state, fence.phase, fence.serving_version, fence.version)
    with pytest.raises(ProtocolError, match="not under way"):
        fence.vote("older") if step == "vote" else getattr(fence, step)("older")
    fence.timeout("older", "late")
    assert not fence.abort("older", "late")
    assert (fence.state, fence.phase, fence.serving_version, fence.version) == before


def test_the_story_is_told_with_the_error():
    fence = go(make(), "vote")
    with pytest.raises(ProtocolError, match=r"prepared version 2, staged; p: voted"):
        fence.committing("p")


def test_a_fenced_rank_does_not_obey_orders_that_come_late():
    fence = go(make(), "paused")
    fence.fence("the leader says so")
    with pytest.raises(ProtocolError, match="the leader says so"):
        fence.committing("p")
    assert fence.state == "FENCED"


def test_versions_strictly_increase():
    fence = make(5)
    for version in (0, 4):
        with pytest.raises(VersionConflict, match=rf"version {version} is older than version 5"):
            fence.prepare("p", version, "staged")
    assert fence.prepare("p", 5, "staged") == "already"
    assert fence.state == "COMMITTED"
    assert fence.prepare("q", 9, "staged") == "ready"


def test_the_same_version_with_other_content():
    fence = go(make(), "resumed")
    assert fence.prepare("q", 2, "staged", digest="d2") == "already"
    assert fence.prepare("r", 2, "staged", digest="") == "already"
    with pytest.raises(VersionConflict, match="new version"):
        fence.prepare("s", 2, "staged", digest="other")
    fence.fence("why")
    assert fence.prepare("t", 2, "staged") == "ready"
    with pytest.raises(VersionConflict):
        fence.vote("t", "other")
    fence.vote("t", "d2")


def test_a_version_whose_commit_failed_may_come_again_with_the_same_content_only():
    fence = go(make(), "committing")
    fence.fence("the loader raised")
    assert fence.version == 1
    with pytest.raises(VersionConflict):
        fence.prepare("q", 1, "staged")
    assert fence.prepare("r", 2, "staged") == "ready"
    with pytest.raises(VersionConflict):
        fence.vote("r", "other")


def test_a_version_that_was_aborted_may_come_again_with_any_content():
    fence = go(make(), "paused")
    fence.abort("p", "why")
    assert go(fence, "resumed", push_id="q", digest="other").digest == "other"


def test_pushes_are_told_apart():
    fence = go(make(), "prepare")
    assert fence.prepare("p", 2, "staged") == "ready"
    with pytest.raises(ProtocolError):
        fence.prepare("p", 3, "staged")
    with pytest.raises(BusyError, match="push q of version 3 must wait"):
        fence.prepare("q", 3, "staged")
    fence.vote("p")
    with pytest.raises(ProtocolError):
        fence.prepare("p", 2, "staged")
    fence.abort("p", "why")
    with pytest.raises(ProtocolError, match="came late"):
        fence.prepare("p", 2, "staged")


def test_a_push_that_was_aborted_before_it_came():
    fence = make()
    assert not fence.abort("p", "why")
    with pytest.raises(ProtocolError, match="came late"):
        fence.prepare("p", 2, "staged")


def test_a_late_prepare_of_a_committed_push_is_answered():
    fence = go(make(), "resumed")
    assert fence.prepare("p", 2, "staged") == "already"
    go(fence, "resumed", push_id="q", version=3)
    with pytest.raises(ProtocolError, match="committed"):
        fence.prepare("p", 2, "staged")


@pytest.mark.parametrize(("push_id", "version"), [("", 2), ("p", None)])
def test_a_push_needs_a_name_and_a_version(push_id, version):
    with pytest.raises(ProtocolError):
        make().prepare(push_id, version, "staged")


def test_incarnations():
    fence = make()
    fence.check_incarnation("")
    fence.check_incarnation("i")
    with pytest.raises(ProtocolError, match="incarnation j"):
        fence.prepare("p", 2, "staged", incarnation="j")


def test_what_is_remembered_is_bounded():
    fence = make()
    for number in range(2000):
        fence.abort(f"p{number}", "why")
    assert len(fence._over) < 1000
    assert fence.is_over("p1999")
    assert len(go(fence, "resumed").story) < 100


# the gate


def test_a_fenced_gate_refuses():
    gate = Gate()
    assert gate.version is None
    with pytest.raises(NotServing, match="nothing was committed yet"), gate.forward():
        pass
    assert gate.inside == 0


async def test_passes_run_side_by_side_and_tell_the_version():
    gate = Gate(version=3)
    with gate.forward() as first:
        async with gate.forward() as second:
            assert (first, second, gate.inside) == (3, 3, 2)
    assert gate.inside == 0


async def test_a_pass_that_raises_is_out():
    gate = Gate(version=3)
    with pytest.raises(ZeroDivisionError), gate.forward():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        async with gate.forward():
            raise ZeroDivisionError
    assert gate.inside == 0


async def test_pause_waits_for_passes_and_holds_new_ones_back():
    gate = Gate(version=1)
    gate.enter()
    pausing = asyncio.create_task(gate.pause("drain"))
    await asyncio.sleep(0)
    assert not pausing.done()
    assert gate.version is None
    waiting = [asyncio.create_task(gate.enter_async()) for _ in range(3)]
    await asyncio.sleep(0)
    gate.leave()
    await pausing
    assert not any(task.done() for task in waiting)
    await gate.resume(2)
    assert await asyncio.gather(*waiting) == [2, 2, 2]
    assert gate.inside == 3


async def test_threads_wait_too():
    gate = Gate(version=1)
    await gate.pause()
    seen = []

    def forward():
        with gate.forward() as version:
            seen.append(version)

    threads = [threading.Thread(target=forward) for _ in range(4)]
    for thread in threads:
        thread.start()
    await gate.resume(2)
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
    assert seen == [2] * 4


async def test_a_pass_in_a_thread_is_waited_for():
    gate = Gate(version=1)
    inside, go_on = threading.Event(), threading.Event()

    def forward():
        with gate.forward():
            inside.set()
            go_on.wait(20)

    thread = threading.Thread(target=forward)
    thread.start()
    await asyncio.to_thread(inside.wait, 20)
    pausing = asyncio.create_task(gate.pause())
    async with asyncio.timeout(20):
        while not gate._waiting:  # it waits for the pass
            await asyncio.sleep(0)
    assert (gate.version, gate.inside, pausing.done()) == (None, 1, False)
    go_on.set()
    async with asyncio.timeout(20):
        await pausing
    thread.join()


async def test_whoever_waits_is_refused_when_the_gate_is_fenced():
    gate = Gate(version=1)
    await gate.pause()
    waiting = asyncio.create_task(gate.enter_async())
    errors = []

    def forward():
        try:
            gate.enter()
        except NotServing as error:
            errors.append(error)

    thread = threading.Thread(target=forward)
    thread.start()
    await asyncio.sleep(0)
    await gate.fence("half of it is missing")
    with pytest.raises(NotServing, match="half of it is missing"):
        await waiting
    await asyncio.to_thread(thread.join, 20)
    assert len(errors) == 1
    await gate.resume(2)
    with gate.forward() as version:
        assert version == 2


@pytest.mark.parametrize("wait", [0.0, 0.001])
async def test_a_wait_may_be_bounded(wait):
    gate = Gate(version=1)
    await gate.pause()
    with pytest.raises(NotServing, match="under way"):
        async with gate.forward(wait):
            pass
    with pytest.raises(NotServing, match="under way"), gate.forward(wait):
        pass
    assert (gate.inside, len(gate._waiting)) == (0, 0)


async def test_a_cancelled_wait_leaves_nothing():
    gate = Gate(version=1)
    await gate.pause()
    waiting = asyncio.create_task(gate.enter_async())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(gate._waiting) == 0
    await gate.resume(1)
    assert gate.inside == 0


async def test_never_a_pass_and_a_commit_at_once():
    gate = Gate(version=0)
    writing = [False]
    seen = []
    stop = threading.Event()

    def forward():
        while not stop.is_set():
            with gate.forward() as version:
                assert not writing[0]
                seen.append(version)

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, 100):
        await gate.pause()
        writing[0] = True
        await asyncio.sleep(0)
        writing[0] = False
        await gate.resume(version)
        await asyncio.sleep(0)
    stop.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
    assert seen == sorted(seen)


def test_the_gate_is_serving():
    assert isinstance(Gate(), Serving)
    assert isinstance(Gate(), Fencing)


async def test_a_loop_that_is_gone_does_not_hold_up_others():
    gate = Gate(version=1)
    await gate.pause()
    started = threading.Event()

    def elsewhere():
        loop = asyncio.new_event_loop()
        task = loop.create_task(gate.enter_async())
        loop.run_until_complete(asyncio.sleep(0))
        started.set()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        gate._waiting.add(lambda: loop.call_soon_threadsafe(print))  # as if its wait had never been tidied up
        loop.close()

    await asyncio.to_thread(elsewhere)
    gate._waiting.clear()
    await gate.resume(2)
    assert gate.version == 2


def test_other_content_than_the_fence_starts_with_is_a_conflict() -> None:
    fence = Fence(incarnation="a", version=7, digest="unknown")
    assert (fence.state, fence.version, fence.digest) == ("COMMITTED", 7, "unknown")
    with pytest.raises(VersionConflict):
        fence.prepare("p", 7, "staged", digest="0f")
    assert fence.prepare("q", 8, "staged") == "ready"
