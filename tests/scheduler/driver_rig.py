"""A driver with fake stages whose work ends when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from syncline.scheduler.driver import Driver, Limits, TaskSpec
from syncline.scheduler.events import STAGES

PATIENCE_S = 10.0


def task(index, *, group=0, tmp=1, stages=STAGES, targets=(0,), reads=True):
    return TaskSpec(index=index, group=group, tmp_bytes=tmp, stages=stages, targets=frozenset(targets), reads_source=reads)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


class Work:
    """A completion that ends when it is told to."""

    def __init__(self, *, signalled: bool) -> None:
        self.signalled = signalled
        self.over = False
        self.error: BaseException | None = None
        self.callback: Callable[[], None] | None = None
        self.polls = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.over and self.error is not None:
            raise self.error
        return self.over

    def subscribe(self, callback: Callable[[], None]) -> bool:
        self.callback = callback
        return self.signalled

    def end(self, error: BaseException | None = None) -> None:
        self.over, self.error = True, error
        if self.signalled and self.callback is not None:
            self.callback()


class Rig:
    """A driver with fake stages. ``auto``: work is done at once; else it waits in ``flying`` for `end`."""

    def __init__(self, *, auto: bool = False, signalled: bool = True, validate: bool = True, **limits: int) -> None:
        self.auto = auto
        self.signalled = signalled
        self.flying: dict[tuple[str, int], Work] = {}
        self.old: list[tuple[tuple[str, int], Work]] = []
        self.started: list[tuple[str, int]] = []
        self.released: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, int]] = []
        self.freed: list[int] = []
        self.voted = 0
        self.hold_votes: asyncio.Event | None = None
        self.raises: dict[tuple[str, int], BaseException] = {}
        self.limits = Limits(**{"max_tmp_bytes": 100, **limits})
        self.driver = Driver(
            {stage: FakeStage(self, stage) for stage in STAGES},
            lambda group: self.start("barrier", group),
            limits=self.limits,
            release=lambda push_id, index: self.released.append((push_id, index)),
            drop_target=lambda target, at_task: self.dropped.append((target, at_task)),
        )
        if validate:
            self.validate_after_every_event(self.driver._machine)

    def validate_after_every_event(self, machine) -> None:
        handle = machine.handle

        def handle_and_validate(event):
            orders = handle(event)
            machine.validate()
            return orders

        machine.handle = handle_and_validate

    def start(self, stage: str, index: int) -> Work | None:
        self.started.append((stage, index))
        if (stage, index) in self.raises:
            raise self.raises[stage, index]
        if self.auto:
            return None
        work = Work(signalled=self.signalled)
        self.flying[stage, index] = work
        return work

    async def end(self, stage: str, index: int, error: BaseException | None = None) -> None:
        """Wait until that work is in flight, and end it."""
        await until(lambda: (stage, index) in self.flying)
        self.flying.pop((stage, index)).end(error)

    def set_aside(self) -> list[Work]:
        """Take what is in flight out of the way of the next push."""
        work = list(self.flying.values())
        self.flying.clear()
        return work

    async def votes(self) -> None:
        self.voted += 1
        if self.hold_votes is not None:
            await self.hold_votes.wait()

    def run(self, tasks, *, push_id=1, groups=(0,), targets=(0,), deadline_s=PATIENCE_S, votes=None):
        return self.driver.run(
            push_id,
            tasks,
            groups,
            frozenset(targets),
            collect_votes=votes or self.votes,
            deadline_s=deadline_s,
            on_source_free=lambda: self.freed.append(push_id),
        )

    async def closed(self) -> None:
        """Close, and look that nothing is left over."""
        assert await self.driver.close(PATIENCE_S) == ()
        assert self.driver.abandoned == 0
        assert self.driver.tmp_bytes == 0
        assert not self.driver._flights and not self.driver._source_free
        assert asyncio.all_tasks() == {asyncio.current_task()}


class FakeStage:
    def __init__(self, rig: Rig, stage: str) -> None:
        self.rig = rig
        self.stage = stage

    def start(self, index: int) -> Work | None:
        return self.rig.start(self.stage, index)


def spans_of(outcome) -> set[tuple[str, int]]:
    return {(span.stage, span.index) for span in outcome.spans}
