"""Whom rank 0 blames when nothing moves: only who holds up the first unsent task of all ranks."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.engine.running import PushRun
from syncline.engine.steps import HeadNote, Start


@pytest.fixture
def run() -> PushRun:
    wiring: Any = SimpleNamespace(program=SimpleNamespace(world_size=2))
    start = Start(live=[0, 1, 2], already=[], remaining_s=9.0)
    return PushRun(
        1, 7, start, wiring=wiring, unless_aborted=asyncio.wait_for, report_loss=lambda *_: None, tell_head=lambda _: None
    )  # fmt: skip


def note(rank: int, task: int | None, **waits: float) -> HeadNote:
    return HeadNote(attempt=1, rank=rank, task=task, waits={name[1:]: seconds for name, seconds in waits.items()})


def test_who_waits_behind_another_target_is_not_blamed(run: PushRun) -> None:
    run.heard_head(note(0, 6, t1=3.4))  # target 1 waits for task 5 of rank 1, which waits for target 0
    run.heard_head(note(1, 3, t0=3.3, t2=0.1))
    assert run._holding_up(5.0) == {0: 3.3, 2: 0.1}


def test_a_task_that_is_not_ready_is_nobodys_fault(run: PushRun) -> None:
    run.heard_head(note(0, 6, t1=3.4))
    run.heard_head(note(1, 3))
    assert run._holding_up(5.0) == {}


def test_a_rank_that_has_sent_everything_holds_up_nobody(run: PushRun) -> None:
    run.heard_head(note(0, 6, t1=3.4))
    run.heard_head(note(1, None))
    assert run._holding_up(5.0) == {1: 3.4}
    run.heard_head(note(0, None))
    assert run._holding_up(5.0) == {}


def test_nobody_is_blamed_while_a_rank_says_nothing(run: PushRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.heard_head(note(0, 6, t1=3.4))
    assert run._holding_up(5.0) == {}
    run.heard_head(note(1, 9, t2=1.0))
    assert run._holding_up(5.0) == {1: 3.4}
    later = time.monotonic() + 6.0
    monkeypatch.setattr("syncline.engine.running.time.monotonic", lambda: later)
    run.heard_head(note(0, 6, t1=9.4))
    assert run._holding_up(5.0) == {}  # rank 1 may be what everybody waits for
