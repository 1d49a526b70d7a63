"""The pool of temporary memory: nothing is lent twice, nobody overtakes, nothing comes back by itself."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from syncline.stages.buffers import BufferPool
from syncline.stages.errors import TransportError

CAPACITY = 4096


class Pool(RuleBasedStateMachine):
    """Random requests and releases. Each loan is filled with its own number: an overlap would be seen in the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.pool = self.loop.run_until_complete(self._make())
        self.waiting = []
        self.lent = {}
        self.order = []

    async def _make(self):
        return BufferPool.private(CAPACITY)

    def teardown(self) -> None:
        self.loop.close()

    def _run(self, function, *arguments):
        async def call():
            return function(*arguments)

        return self.loop.run_until_complete(call())

    @rule(nbytes=st.one_of(st.integers(0, 600), st.integers(0, CAPACITY)))
    def acquire(self, nbytes):
        self.waiting.append((nbytes, self._run(self.pool.acquire, nbytes)))
        self._collect()

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def release(self, data):
        generation = data.draw(st.sampled_from(sorted(self.lent)))
        buffer, value = self.lent.pop(generation)
        assert (buffer.memory == value).all()
        self._run(buffer.release)
        with pytest.raises(ValueError, match="twice"):
            self._run(buffer.release)
        self._collect()

    def _collect(self):
        while self.waiting and self.waiting[0][1].done:
            nbytes, signal = self.waiting.pop(0)
            buffer = signal.result
            assert buffer.nbytes == nbytes
            assert buffer.memory.data_ptr() % 64 == 0 or not nbytes
            value = buffer.generation % 251
            buffer.memory.fill_(value)
            self.lent[buffer.generation] = (buffer, value)

    @invariant()
    def nobody_overtakes(self):
        assert not any(signal.done for _, signal in self.waiting)

    @invariant()
    def nothing_waits_for_an_empty_pool(self):
        assert self.lent or not self.waiting

    @invariant()
    def what_is_lent_is_untouched_and_accounted(self):
        assert all((buffer.memory == value).all() for buffer, value in self.lent.values())
        assert self.pool.in_use == sum(buffer.nbytes for buffer, _ in self.lent.values()) <= self.pool.peak <= CAPACITY


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


async def test_memory_is_kept_while_a_send_of_it_is_only_queued():
    """A fake stream reads late, when no Python object names the buffer any more: the pool must not have lent it again."""
    pool = BufferPool.private(1024)
    queued = []
    for number in (1, 2):
        buffer = await pool.acquire(512)
        buffer.memory.fill_(number)
        queued.append((buffer.memory.data_ptr(), number, buffer.release))
        del buffer
    gc.collect()
    third = pool.acquire(512)
    assert not third.done
    for address, number, release in queued:  # the stream gets to it
        content = torch.frombuffer((__import__("ctypes").c_char * 512).from_address(address), dtype=torch.uint8)
        assert (content == number).all()
        release()
    assert (await third).nbytes == 512


async def test_a_late_release_of_an_earlier_use_frees_nothing():
    pool = BufferPool.private(256)
    first = await pool.acquire(256)
    first.release()
    second = await pool.acquire(256)
    assert second.generation != first.generation
    with pytest.raises(ValueError, match="twice"):
        first.release()
    assert not pool.acquire(1).done


async def test_what_can_never_fit_is_refused_at_once():
    pool = BufferPool.private(1000)
    with pytest.raises(TransportError, match="max_tmp_bytes"):
        await pool.acquire(2000)
    (await pool.acquire(1000)).release()


async def test_closing_fails_who_waits_and_lets_others_finish():
    pool = BufferPool.private(256)
    held, waits = await pool.acquire(10), pool.acquire(10)
    pool.close()
    for signal in (waits, pool.acquire(1)):
        with pytest.raises(TransportError, match="closed"):
            await signal
    held.release()
    assert pool.in_use == 0


async def test_a_closed_pool_keeps_no_memory_but_what_is_on_loan():
    """Who holds the pool is a closed engine, which a trainer may hold for ever."""
    array = np.zeros(1024, dtype=np.uint8)
    pool, memory = BufferPool(torch.from_numpy(array)), weakref.ref(array)
    del array
    held = await pool.acquire(100)
    pool.close()
    gc.collect()
    assert memory() is not None
    assert held.memory.tolist() == [0] * 100
    held.release()
    del held
    gc.collect()
    assert memory() is None


async def test_any_number_of_requests_that_nobody_wants_any_more_are_served_and_given_back():
    """Of tasks of a push that has failed: each is given back as soon as it is served, which serves the next."""
    pool = BufferPool.private(256)
    held = await pool.acquire(256)
    unwanted = [pool.acquire(256) for _ in range(5000)]
    for signal in unwanted:
        signal.subscribe(lambda signal=signal: signal.result.release())
    wanted = pool.acquire(256)
    held.release()
    assert wanted.done
    wanted.result.release()
    assert pool.in_use == 0


async def test_peak_can_be_reset():
    pool = BufferPool.private(1024)
    for buffer in [await pool.acquire(300), await pool.acquire(300)]:
        buffer.release()
    assert pool.peak == 600
    pool.reset_peak()
    assert pool.peak == 0
