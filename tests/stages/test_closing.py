"""Ends that come about whoever is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from syncline.scheduler.errors import SynclineError
from syncline.stages.closing import Closing, in_turn, uninterrupted


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_uninterrupted_ends_before_its_caller_does(fails):
    """However often the caller is cancelled; the cancellation is told, and not how the work ended."""
    may_end, said = asyncio.Event(), []

    async def work():
        await may_end.wait()
        said.append("ended")
        if fails:
            raise ValueError("nobody asks")
        return 7

    calling = asyncio.create_task(uninterrupted(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        calling.cancel()
    await asyncio.sleep(0)
    assert not calling.done() and not said
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert said == ["ended"]
    if not fails:
        assert await uninterrupted(work()) == 7
    else:
        with pytest.raises(ValueError, match="nobody asks"):
            await uninterrupted(work())


class Things:
    """Something with three things to let go of, which takes a turn of the loop for each."""

    def __init__(self, *, fails=0):
        self.left, self.fails, self.begun = [1, 2, 3], fails, 0
        self.closing = Closing(self.close, "closing")

    async def close(self):
        self.begun += 1
        while self.left:
            await asyncio.sleep(0)
            if self.fails:
                self.fails -= 1
                raise OSError("one of them stays")
            self.left.pop()


async def test_a_close_is_begun_once():
    things = Things()
    assert not things.closing.begun
    await asyncio.gather(*(things.closing() for _ in range(3)))
    await things.closing()
    assert things.closing.begun and things.left == [] and things.begun == 1


@pytest.mark.parametrize("turns", range(6))
async def test_a_close_whose_own_task_is_cancelled_goes_on(turns):
    """Also before its first step. Whoever awaits it was not cancelled, and is told nothing."""
    things = Things()
    calling = asyncio.create_task(things.closing())
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task(), calling}:
        task.cancel()
    await calling
    assert things.left == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_close_goes_on_where_its_caller_is_cancelled_with_it(turns):
    """As by `asyncio.run`, of a close that was begun as the last that a program does."""
    things = Things()
    calling = asyncio.create_task(things.closing())
    for _ in range(turns):
        await asyncio.sleep(0)
    begun = things.closing.begun
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    assert (things.left == []) == begun


async def test_a_caller_that_is_cancelled_is_told_so_at_the_end():
    things = Things()
    calling = asyncio.create_task(things.closing())
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert things.left == []


async def test_a_close_that_failed_is_begun_anew():
    things = Things(fails=1)
    with pytest.raises(OSError, match="stays"):
        await things.closing()
    assert things.left
    await things.closing()
    assert things.left == []


async def test_who_waits_for_a_close_that_failed_is_told_that_also_where_another_begins_it_anew():
    things = Things(fails=1)

    async def again():
        with pytest.raises(OSError, match="stays"):
            await things.closing()
        await things.closing()

    first, other = asyncio.create_task(again()), asyncio.create_task(things.closing())
    with pytest.raises(OSError, match="stays"):
        await other
    await first
    assert things.left == []


async def test_who_comes_to_a_close_as_its_task_is_cancelled_waits_for_its_end():
    things = Things()
    first = asyncio.create_task(things.closing())
    while things.closing._task is None:
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await things.closing()
    assert things.left == []
    await asyncio.gather(first, return_exceptions=True)


async def test_a_close_that_is_cut_off_from_within_is_an_error_and_no_cancellation():
    async def close():
        asyncio.get_running_loop().create_future().cancel()
        raise asyncio.CancelledError

    with pytest.raises(SynclineError, match="from within"):
        await Closing(close, "closing")()


async def test_a_close_does_not_wait_for_itself():
    async def close():
        await closing()

    closing = Closing(close, "closing")
    with pytest.raises(SynclineError, match="its own end"):
        await closing()


async def test_a_close_on_another_loop_is_refused_and_spoils_nothing():
    things, said = Things(), []
    things.closing.here()

    def elsewhere():
        with pytest.raises(SynclineError, match="another event loop"):
            asyncio.run(things.closing())
        said.append(things.closing.begun)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert said == [False]
    await things.closing()
    assert things.left == []


async def test_steps_go_on_where_one_has_failed():
    done = []

    def step(name, error=None):
        async def run():
            done.append(name)
            if error is not None:
                raise error

        return run

    with pytest.raises(OSError, match="first"):
        await in_turn(step("a", OSError("first")), step("b", ValueError("second")), step("c"))
    assert done == ["a", "b", "c"]
    await in_turn()
    with pytest.raises(SynclineError, match="cancelled"):  # by whoever: the caller was not
        await in_turn(step("d", asyncio.CancelledError()), step("e"))
    assert done[-1] == "e"
