"""One push in virtual time: all ranks' real drivers, all receivers, one loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.scheduler.driver import PushOutcome

from .clock import VirtualLoop
from .legs import Leg
from .load import Load
from .ranks import Around, Barriers, Knobs, Meeting, SourceRank
from .receivers import Ending, Receiver
from .world import World

__all__ = ["Knobs", "Played", "play"]


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of it.

    Attributes:
        seconds: of the push. ``commit_s``: the longest commit.
        outcomes: what each source rank's driver says.
        last: the leg that the push ended with.
    """

    seconds: float
    commit_s: float
    outcomes: Sequence[PushOutcome]
    last: Leg
    world: World


def play(load: Load, make_world: Callable[[asyncio.AbstractEventLoop], World], knobs: Knobs) -> Played:
    """Run it to its end. Not to be called on an event loop: it runs one of its own. Raises `StandsStill`."""
    collecting = gc.isenabled()
    gc.disable()  # millions of legs that are all needed to the end: looking through them takes longer than making them
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(_push(load, make_world, knobs))
    finally:
        if collecting:
            gc.enable()


async def _push(load: Load, make_world: Callable[[asyncio.AbstractEventLoop], World], knobs: Knobs) -> Played:
    loop = asyncio.get_running_loop()
    world = make_world(loop)
    begin_s, _ = world.control_s()
    begin = Leg("control", "all", -1, start=0.0, end=begin_s, after=None)
    ending = Ending(loop, world, len(load.sources))
    receivers = [Receiver(n, tasks, world, begin, ending.landed) for n, tasks in enumerate(load.receivers)]
    ending.of(receivers, load.target_of)
    around = Around(
        loop=loop, world=world, knobs=knobs, meeting=Meeting(world), barriers=Barriers(loop, world, len(load.sources)),
        receivers=receivers, targets=load.target_of, alone=len(load.sources) == 1, begin=begin,
    )  # fmt: skip
    ranks = [SourceRank(rank, shares, around) for rank, shares in enumerate(load.sources)]
    await asyncio.sleep(begin_s)
    targets = frozenset(load.target_of)
    outcomes = await asyncio.gather(*(r.push(load.groups, targets, lambda rank: ending.sent(rank.last)) for r in ranks))
    assert ending.last is not None
    return Played(seconds=loop.time(), commit_s=ending.commit_s, outcomes=outcomes, last=ending.last, world=world)
