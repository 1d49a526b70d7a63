"""The one poller, on a loop and a clock that the test turns by hand."""

from __future__ import annotations

import pytest

from syncline.scheduler.outcome import PushLog
from syncline.scheduler.poller import SLICE_S, SPIN_S, Flight, Pace, Poller

INTERVAL_S = 0.001


class Handle:
    def __init__(self, when: float, call, args) -> None:
        self.when = when
        self.call = lambda: call(*args)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class HandTurnedLoop:
    """Every turn takes a microsecond, and a rest as long as it was asked to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[Handle] = []
        self.rests: list[float] = []
        self.turns = 0

    def clock(self) -> float:
        return self.now

    def call_soon(self, call, *args) -> Handle:
        return self.call_later(0.0, call, *args)

    def call_later(self, delay: float, call, *args) -> Handle:
        handle = Handle(self.now + delay, call, args)
        self.queue.append(handle)
        return handle

    def turn(self) -> bool:
        """One callback; False if there is none."""
        self.queue = [handle for handle in self.queue if not handle.cancelled]
        if not self.queue:
            return False
        handle = min(self.queue, key=lambda each: each.when)
        self.queue.remove(handle)
        self.rests.append(max(0.0, handle.when - self.now))
        self.now = max(self.now, handle.when) + 1e-6
        self.turns += 1
        handle.call()
        return True


class Rig:
    def __init__(self) -> None:
        self.loop = HandTurnedLoop()
        self.over: set[int] = set()
        self.asked: list[int] = []
        self.cost_s = 0.0
        self.poller = Poller(settle=self.settle, interval_s=INTERVAL_S, clock=self.loop.clock)

    def settle(self, flight: Flight) -> bool:
        self.asked.append(flight.index)
        self.loop.now += self.cost_s
        return flight.index in self.over

    def watch(self, index: int) -> None:
        log = PushLog(1, 0.0)
        flight = Flight(push_id=1, stage="send", index=index, completion=None, started=self.loop.now, log=log)
        self.poller.watch(flight, self.loop)


def test_it_spins_at_first_and_then_backs_off_to_the_interval() -> None:
    rig = Rig()
    rig.watch(0)
    while rig.loop.now < 0.1:
        assert rig.loop.turn()
    spun = [rest for rest in rig.loop.rests if rest == 0.0]
    rested = [rest for rest in rig.loop.rests if rest > 0.0]
    assert 0.8 * SPIN_S / 1e-6 < len(spun) < 1.2 * SPIN_S / 1e-6
    assert rested[:4] == pytest.approx([INTERVAL_S / 8, INTERVAL_S / 4, INTERVAL_S / 2, INTERVAL_S])
    assert rested[-1] == pytest.approx(INTERVAL_S)
    assert len(rested) < 0.1 / INTERVAL_S + 10


def test_it_does_nothing_when_nothing_is_watched() -> None:
    rig = Rig()
    assert not rig.loop.turn()
    rig.watch(0)
    rig.over.add(0)
    assert rig.loop.turn()
    assert not rig.loop.turn(), "no turn is taken once the last work is over"
    assert rig.asked == [0]


def test_new_work_wakes_it_from_its_rest() -> None:
    rig = Rig()
    rig.watch(0)
    while not rig.loop.rests or rig.loop.rests[-1] < INTERVAL_S / 2:
        rig.loop.turn()
    rig.over.add(1)
    rig.watch(1)
    before = rig.loop.now
    rig.loop.turn()
    assert rig.asked[-2:] == [0, 1]
    assert rig.loop.now - before < 1e-5
    assert len(rig.loop.queue) == 1, "one turn is planned at any time"


def test_slow_work_is_not_spun_for() -> None:
    rig = Rig()
    rig.watch(0)
    while rig.loop.now < 0.05:
        rig.loop.turn()
    rig.over.add(0)
    while rig.loop.turn():
        pass
    turns = rig.loop.turns
    rig.watch(1)  # the last work took 50 ms: this will not be over in a moment either
    while rig.loop.now < 0.1:
        rig.loop.turn()
    assert rig.loop.turns - turns < 0.05 / INTERVAL_S + 10


def test_quick_work_is_spun_for_again() -> None:
    pace = Pace(INTERVAL_S)
    pace.ended(1.0, took_s=1.0)
    assert pace.pause(1.0) > 0
    pace.ended(2.0, took_s=SPIN_S / 2)
    assert pace.pause(2.0) == 0.0
    assert pace.pause(2.0 + 2 * SPIN_S) > 0


def test_dear_questions_are_spread_over_turns_and_nobody_is_left_out() -> None:
    rig = Rig()
    rig.cost_s = SLICE_S / 3
    for index in range(10):
        rig.watch(index)
    rig.loop.turn()
    assert len(rig.asked) <= 4
    for _ in range(5):
        rig.loop.turn()
    assert set(rig.asked) == set(range(10))


def test_stop_asks_no_more() -> None:
    rig = Rig()
    rig.watch(0)
    rig.loop.turn()
    rig.poller.stop()
    rig.poller.stop()
    assert not rig.loop.turn()
