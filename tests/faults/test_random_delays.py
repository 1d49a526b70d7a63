"""Real gloo, real threads, and everything late by a random time: what ends first on one rank ends last on another."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from syncline.adapters.engines import ModuleLoader
from syncline.stages.communicator import Communicator
from syncline.stages.completions import Signal
from syncline.stages.workers import Workers

MOST_S = 0.004


def late(dice, signal):
    """A signal that ends some time after ``signal`` does."""
    loop = asyncio.get_running_loop()
    relayed = Signal()

    def relay():
        relayed.set(signal.result) if signal.error is None else relayed.fail(signal.error)

    signal.subscribe(lambda: loop.call_later(dice.random() * MOST_S, relay))
    return relayed


@pytest.fixture
def delays(monkeypatch):
    """Switches the delays on: in worker threads, and in every message's completion."""

    def switch_on(seed):
        dice, pause = random.Random(seed), threading.Event().wait
        submit, start = Workers.submit, Communicator._start

        def slow_submit(self, function, *args, **kwargs):
            seconds = dice.random() * MOST_S

            def job():
                pause(seconds)
                return function(*args, **kwargs)

            return submit(self, job)

        monkeypatch.setattr(Workers, "submit", slow_submit)
        monkeypatch.setattr(Communicator, "_start", lambda self, *args: late(dice, start(self, *args)))

    return switch_on


@pytest.mark.parametrize("case", [(landing, seed) for landing in ("streamed", "staged") for seed in range(6)], ids=str)
async def test_real_gloo_with_random_delays_ends_and_is_right(start_target, connect, kit, delays, case):
    landing, seed = case
    dice = random.Random(seed)
    shapes = {f"t{i}": (dice.randint(1, 300), dice.randint(1, 300)) for i in range(24)}
    whole = kit.stamped(shapes)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    targets = [await start_target(ModuleLoader(model)) for model in models]
    pusher = await connect(
        kit.row_shards(whole, 4), targets, transport="gloo", landing=landing, bucket_bytes="64KiB", max_tmp_bytes="1MiB",
        prepare_concurrency=3, send_concurrency=3,
    )  # fmt: skip
    delays(seed)
    for version in (1, 2):
        await pusher.push_well(version)
    assert [kit.differing(model, whole) for model in models] == [[], []]
