from __future__ import annotations

import pytest

from syncline.scheduler.errors import (
    AllTargetsLost,
    DeadlineExceeded,
    IllegalTransition,
    PlanError,
    PushCancelled,
    StageFailure,
)
from syncline.scheduler.events import (
    BarrierDone,
    BarrierFailed,
    Cancelled,
    CollectVotes,
    DeadlinePassed,
    DropTarget,
    FailPush,
    FinishPush,
    LostTarget,
    PushStarted,
    ReleaseBuffers,
    SourceFree,
    StageDone,
    StageFailed,
    StartBarrier,
    StartStage,
    TargetLost,
    TaskSpec,
    VotesCollected,
    VotesFailed,
)
from syncline.scheduler.machine import Limits, PipelineMachine
from syncline.scheduler.records import Phase, TaskState
from syncline.scheduler.schedule import Schedule

ALL = ("h2d", "prepare", "send")


def task(index, *, group=0, tmp=1, stages=ALL, targets=(0,), reads=True):
    return TaskSpec(index=index, group=group, tmp_bytes=tmp, stages=stages, targets=frozenset(targets), reads_source=reads)


class Rank:
    """A machine with short names for its events; it validates after each, and gives instructions as short tuples."""

    def __init__(self, limits: Limits) -> None:
        self.machine = PipelineMachine(limits)
        self.now = 0.0
        self.push_id = 0
        self.last: list[object] = []

    def feed(self, event):
        self.now += 1.0
        self.last = self.machine.handle(event)
        self.machine.validate()
        return [short(order, self.push_id) for order in self.last]

    def push(self, tasks, groups=(0,), targets=(0,)):
        self.push_id += 1
        return self.feed(
            PushStarted(now=self.now, push_id=self.push_id, schedule=Schedule.of(tasks, groups), targets=frozenset(targets))
        )

    def done(self, index, stage, push_id=None):
        return self.feed(StageDone(now=self.now, push_id=push_id or self.push_id, task=index, stage=stage))

    def failed(self, index, stage, error=None, push_id=None):
        return self.feed(
            StageFailed(now=self.now, push_id=push_id or self.push_id, task=index, stage=stage, error=error or OSError("x"))
        )

    def barrier(self, group):
        return self.feed(BarrierDone(now=self.now, push_id=self.push_id, group=group))

    def lost(self, target, at_task, reason="killed"):
        return self.feed(TargetLost(now=self.now, target=target, at_task=at_task, reason=reason))

    def voted(self):
        return self.feed(VotesCollected(now=self.now))

    @property
    def error(self):
        (fail,) = [order for order in self.last if isinstance(order, FailPush)]
        return fail.error


def short(order, push_id):
    if order.push_id != push_id:
        return ("old", order.push_id, *short(order, order.push_id))
    match order:
        case StartStage():
            return (order.stage, order.task)
        case StartBarrier():
            return ("barrier", order.group)
        case ReleaseBuffers():
            return ("release", order.task)
        case DropTarget():
            return ("drop", order.target, order.at_task)
        case SourceFree():
            return ("source free",)
        case CollectVotes():
            return ("votes",)
        case FinishPush():
            return ("finish",)
        case FailPush():
            return ("fail",)


def rank(max_tmp_bytes=100, **limits) -> Rank:
    return Rank(Limits(max_tmp_bytes=max_tmp_bytes, **limits))


# ------------------------------------------------------------------------------------------------------ the plain course


def test_one_task_goes_through_all_stages() -> None:
    r = rank()
    assert r.push([task(7, tmp=5)]) == [("h2d", 7)]
    assert r.done(7, "h2d") == [("prepare", 7)]
    assert r.done(7, "prepare") == [("barrier", 0), ("send", 7), ("source free",)]
    assert r.done(7, "send") == [("release", 7)]
    assert r.barrier(0) == [("votes",)]
    assert r.voted() == [("finish",)]
    (finish,) = r.last
    assert (finish.peak_tmp_bytes, finish.lost) == (5, ())
    assert r.machine.phase is Phase.FINISHED


def test_rank_without_tasks_still_takes_part_in_every_barrier() -> None:
    r = rank()
    assert r.push([], groups=(3, 1)) == [("barrier", 3), ("source free",)]
    assert r.barrier(3) == [("barrier", 1)]
    assert r.barrier(1) == [("votes",)]


def test_plan_without_groups_goes_straight_to_the_votes() -> None:
    assert rank().push([], groups=()) == [("votes",), ("source free",)]


def test_bytes_are_admitted_in_plan_order_even_where_a_later_task_would_fit() -> None:
    r = rank(10, h2d=5)
    assert r.push([task(0, tmp=6), task(1, tmp=6), task(2, tmp=1)]) == [("h2d", 0)]
    r.done(0, "h2d")
    r.done(0, "prepare")
    assert r.done(0, "send") == [("release", 0), ("h2d", 1), ("h2d", 2)]


def test_prepares_start_in_plan_order_whatever_finishes_first() -> None:
    r = rank(h2d=3)
    assert r.push([task(0), task(1), task(2)]) == [("h2d", 0), ("h2d", 1), ("h2d", 2)]
    assert r.done(2, "h2d") == []
    assert r.done(1, "h2d") == []
    assert r.done(0, "h2d") == [("prepare", 0), ("prepare", 1)]


def test_sends_start_in_plan_order_too() -> None:
    r = rank(send=2)
    r.push([task(0, stages=("prepare", "send")), task(1, stages=("prepare", "send"))])
    assert r.done(1, "prepare") == []
    assert r.done(0, "prepare") == [("barrier", 0), ("send", 0), ("send", 1), ("source free",)]


def test_what_can_be_sent_goes_before_what_can_be_admitted() -> None:
    r = rank(2, h2d=1, prepare=1, send=1)
    r.push([task(i) for i in range(4)])
    assert r.done(0, "h2d") == [("prepare", 0), ("h2d", 1)]
    assert r.done(1, "h2d") == []
    assert r.done(0, "prepare") == [("send", 0), ("prepare", 1)]
    assert r.done(1, "prepare") == []
    assert r.done(0, "send") == [("release", 0), ("send", 1), ("h2d", 2)]


def test_barrier_waits_for_prepares_and_not_for_sends_and_h2d_runs_ahead_of_it() -> None:
    r = rank(h2d=2)
    tasks = [task(0), task(1, group=1), task(2, group=1, stages=("send",))]
    assert r.push(tasks, groups=(0, 1)) == [("h2d", 0), ("h2d", 1)]
    assert r.done(1, "h2d") == []
    r.done(0, "h2d")
    assert r.done(0, "prepare") == [("barrier", 0), ("send", 0)]
    assert r.barrier(0) == [("prepare", 1)]
    assert r.done(1, "prepare") == [("barrier", 1), ("send", 1)]
    assert r.done(0, "send") == [("release", 0), ("send", 2)]


def test_contributors_end_with_their_prepare() -> None:
    r = rank()
    r.push([task(0, stages=("prepare",)), task(4, stages=("prepare",))])
    assert r.done(4, "prepare") == [("release", 4)]
    assert r.done(0, "prepare") == [("release", 0), ("barrier", 0), ("source free",)]


# --------------------------------------------------------------------------------------------------------------- sources


def test_source_is_free_when_nobody_reads_it_any_more() -> None:
    r = rank()
    r.push([task(0, reads=False), task(1), task(2, reads=False)])
    r.done(0, "h2d")
    r.done(1, "h2d")
    assert r.done(1, "prepare") == [("source free",)]


def test_zero_copy_tasks_read_until_they_are_sent() -> None:
    r = rank()
    assert r.push([task(0, stages=("send",))]) == [("barrier", 0), ("send", 0)]
    r.barrier(0)
    assert r.done(0, "send") == [("release", 0), ("votes",), ("source free",)]


def test_after_a_failure_the_source_is_free_only_when_the_last_reader_has_ended() -> None:
    r = rank(h2d=3)
    r.push([task(0), task(1), task(2)])
    assert r.failed(1, "h2d") == [("fail",), ("release", 1)]
    assert r.done(0, "h2d") == [("release", 0)]
    assert r.failed(2, "h2d") == [("release", 2), ("source free",)]


def test_a_send_in_flight_does_not_keep_the_source() -> None:
    r = rank()
    r.push([task(0), task(1)])
    r.done(0, "h2d")
    r.done(0, "prepare")
    assert r.failed(1, "h2d") == [("fail",), ("release", 1), ("source free",)]
    assert r.machine.abandoned == 1
    assert r.done(0, "send") == [("release", 0)]


# ---------------------------------------------------------------------------------------------------------- lost targets


def test_tasks_nobody_wants_are_prepared_and_not_sent() -> None:
    r = rank()
    r.push([task(0, targets=(0, 1)), task(1, targets=(1,)), task(2, targets=(0,))], targets=(0, 1))
    assert r.lost(1, at_task=0) == [("drop", 1, 0)]
    r.done(0, "h2d")
    r.done(1, "h2d")
    assert ("send", 0) in r.done(0, "prepare")
    assert r.done(1, "prepare") == [("release", 1)]
    r.done(2, "h2d")
    assert ("send", 2) in r.done(2, "prepare")
    r.done(0, "send")
    r.done(2, "send")
    r.barrier(0)
    r.voted()
    (finish,) = r.last
    assert finish.lost == (LostTarget(1, 0, "killed"),)


def test_a_task_that_waits_to_be_sent_ends_when_its_target_is_lost() -> None:
    r = rank(send=1)
    r.push([task(0, stages=("prepare", "send")), task(1, stages=("prepare", "send"), targets=(1,))], targets=(0, 1))
    r.done(0, "prepare")
    r.done(1, "prepare")
    assert r.lost(1, at_task=1) == [("drop", 1, 1), ("release", 1)]


def test_tasks_before_the_stated_one_are_still_sent_to_a_lost_target() -> None:
    r = rank()
    r.push([task(i, stages=("prepare", "send"), targets=(1,)) for i in (3, 4)], targets=(0, 1))
    r.lost(1, at_task=4)
    assert ("send", 3) in r.done(3, "prepare")
    assert ("release", 4) in r.done(4, "prepare")


@pytest.mark.parametrize("fails", [False, True])
def test_a_send_in_flight_to_a_lost_target_ends_through_its_own_completion(fails: bool) -> None:
    r = rank()
    r.push([task(0, stages=("send",), targets=(1,), tmp=7)], targets=(0, 1))
    assert r.lost(1, at_task=0) == [("drop", 1, 0)]
    assert r.machine.budget.in_use == 7
    assert ("release", 0) in (r.failed(0, "send") if fails else r.done(0, "send"))
    assert r.machine.phase is Phase.RUNNING


def test_a_failed_send_that_a_living_target_waits_for_fails_the_push() -> None:
    r = rank()
    r.push([task(0, stages=("send",), targets=(0, 1))], targets=(0, 1))
    r.lost(1, at_task=0)
    assert ("fail",) in r.failed(0, "send")


def test_zero_copy_tasks_that_nobody_wants_are_passed_over() -> None:
    r = rank(send=1)
    tasks = [task(i, stages=("send",), targets=(i % 2,)) for i in range(4)]
    assert r.push(tasks, targets=(0, 1)) == [("barrier", 0), ("send", 0)]
    r.lost(1, at_task=0)
    assert r.done(0, "send") == [("release", 0), ("send", 2)]
    assert r.done(2, "send") == [("release", 2), ("source free",)]
    assert r.barrier(0) == [("votes",)]


def test_targets_that_take_no_part_get_nothing() -> None:
    r = rank()
    r.push([task(0, stages=("prepare", "send"), targets=(5,))], targets=(0,))
    assert r.done(0, "prepare") == [("release", 0), ("barrier", 0), ("source free",)]


@pytest.mark.parametrize("voting", [False, True])
def test_losing_all_targets_fails_the_push(voting: bool) -> None:
    r = rank()
    r.push([task(0, stages=("prepare", "send"), targets=(0, 1))], targets=(0, 1))
    r.lost(0, at_task=0, reason="first")
    if voting:
        r.done(0, "prepare")
        r.done(0, "send")
        r.barrier(0)
        assert r.machine.phase is Phase.VOTING
    assert r.lost(1, at_task=9, reason="second")[:2] == [("drop", 1, 9), ("fail",)]
    assert isinstance(r.error, AllTargetsLost)
    assert r.error.reasons == {0: "first", 1: "second"}


def test_a_push_without_targets_fails() -> None:
    r = rank()
    assert r.push([task(0)], targets=()) == [("fail",), ("source free",)]
    assert isinstance(r.error, AllTargetsLost)


def test_losing_a_target_again_is_no_news_unless_it_drops_more() -> None:
    r = rank()
    r.push([task(i, targets=(0, 1)) for i in range(5)], targets=(0, 1))
    assert r.lost(1, at_task=3) == [("drop", 1, 3)]
    assert r.lost(1, at_task=3) == []
    assert r.lost(1, at_task=4) == []
    assert r.lost(8, at_task=0) == []
    assert r.lost(1, at_task=2) == [("drop", 1, 2)]


# -------------------------------------------------------------------------------------------------------------- failures


def test_a_failed_stage_tells_its_story() -> None:
    r = rank()
    r.push([task(4, group=2)], groups=(2,))
    r.done(4, "h2d")
    cause = OSError("the link broke")
    r.failed(4, "prepare", cause)
    error = r.error
    assert isinstance(error, StageFailure)
    assert (error.push_id, error.stage, error.task, error.group) == (1, "prepare", 4, 2)
    assert error.cause is cause
    assert error.__cause__ is cause
    assert "stage prepare of task 4 (group 2) failed in push 1: OSError: the link broke" in str(error)
    assert "start h2d" in str(error)
    assert [(step.before, step.after, step.why) for step in r.machine.story(4)][:3] == [
        (TaskState.PENDING, TaskState.RUNNING, "start h2d"),
        (TaskState.RUNNING, TaskState.WAITING, "h2d done"),
        (TaskState.WAITING, TaskState.RUNNING, "start prepare"),
    ]
    assert r.machine.story(4)[-1].after is TaskState.DROPPED


def test_abandoned_bytes_and_slots_count_against_the_next_push() -> None:
    r = rank(10, h2d=1)
    r.push([task(0, tmp=6)])
    r.feed(Cancelled(now=0.0, reason="the trainer said so"))
    assert isinstance(r.error, PushCancelled)
    assert "the trainer said so" in str(r.error)
    assert "h2d of task 0" in str(r.error)
    assert r.push([task(0, tmp=6), task(1, tmp=2)]) == []
    assert r.machine.budget.peak == 6
    assert r.done(0, "h2d", push_id=1) == [("old", 1, "release", 0), ("h2d", 0), ("old", 1, "source free")]
    assert r.done(0, "h2d", push_id=2)[:1] == [("prepare", 0)]


def test_deadline_says_what_it_waited_for() -> None:
    r = rank()
    r.push([task(0), task(1, group=1)], groups=(0, 1))
    r.done(0, "h2d")
    r.done(0, "prepare")
    r.feed(DeadlinePassed(now=r.now, deadline_s=2.5))
    assert isinstance(r.error, DeadlineExceeded)
    for part in ("2.5 s", "0 of 2 tasks", "send of task 0 for", "barrier of group 0 for"):
        assert part in str(r.error)
    assert r.machine.abandoned == 3
    assert r.feed(BarrierFailed(now=0.0, push_id=1, group=0, error=OSError())) == []


def test_deadline_while_voting() -> None:
    r = rank()
    r.push([], groups=())
    r.feed(DeadlinePassed(now=r.now, deadline_s=1.0))
    assert "in flight: the votes of the targets" in str(r.error)
    assert r.voted() == []


def test_a_failed_barrier_fails_the_push() -> None:
    r = rank()
    r.push([], groups=(5,))
    r.feed(BarrierFailed(now=0.0, push_id=1, group=5, error=OSError("gone")))
    assert isinstance(r.error, StageFailure)
    assert (r.error.stage, r.error.task, r.error.group) == ("barrier", None, 5)
    assert "barrier of group 5 failed in push 1: OSError: gone" in str(r.error)


def test_failed_votes_fail_the_push_with_their_own_error() -> None:
    r = rank()
    r.push([], groups=())
    error = RuntimeError("digest mismatch")
    assert r.feed(VotesFailed(now=0.0, error=error)) == [("fail",)]
    assert r.error is error


def test_cancelled_with_an_error_fails_with_it() -> None:
    r = rank()
    r.push([task(0)])
    error = RuntimeError("rank 3 failed first")
    r.feed(Cancelled(now=0.0, reason="abort", error=error))
    assert r.error is error


def test_late_news_is_ignored_when_no_push_runs() -> None:
    r = rank()
    for event in (
        Cancelled(now=0.0, reason="x"),
        DeadlinePassed(now=0.0, deadline_s=1.0),
        TargetLost(now=0.0, target=0, at_task=0, reason="x"),
        VotesFailed(now=0.0, error=OSError()),
    ):
        assert r.feed(event) == []
        assert r.machine.phase is Phase.IDLE


# ---------------------------------------------------------------------------------------------------- illegal transitions


def test_illegal_transitions_raise_and_change_nothing() -> None:
    r = rank()
    r.push([task(0), task(1)], groups=(0, 1))
    r.done(0, "h2d")
    before = [(step.after, step.why) for step in r.machine.story(0)]
    for event, words in (
        (StageDone(now=0.0, push_id=1, task=0, stage="h2d"), "which is running"),
        (StageDone(now=0.0, push_id=1, task=0, stage="send"), "start prepare"),
        (StageDone(now=0.0, push_id=1, task=9, stage="h2d"), "was not started"),
        (StageFailed(now=0.0, push_id=7, task=0, stage="h2d", error=OSError()), "was not started"),
        (BarrierDone(now=0.0, push_id=1, group=0), "not in flight"),
        (VotesCollected(now=0.0), "while the push is running"),
        (PushStarted(now=0.0, push_id=2, schedule=Schedule.of([], ()), targets=frozenset({0})), "while push 1 is running"),
    ):
        with pytest.raises(IllegalTransition, match=words):
            r.machine.handle(event)
        r.machine.batch = []
        r.machine.validate()
    assert [(step.after, step.why) for step in r.machine.story(0)] == before
    assert r.done(0, "prepare")[:1] == [("send", 0)]


def test_a_stage_ends_once_even_after_a_failure() -> None:
    r = rank()
    r.push([task(0)])
    r.feed(Cancelled(now=0.0, reason="x"))
    r.done(0, "h2d")
    with pytest.raises(IllegalTransition, match="which is dropped"):
        r.done(0, "h2d")
    r.push([], groups=())
    with pytest.raises(IllegalTransition, match="was not started"):
        r.done(0, "h2d", push_id=1)


def test_push_ids_must_grow() -> None:
    r = rank()
    r.push([], groups=())
    r.voted()
    r.push_id = 0
    with pytest.raises(IllegalTransition, match="must grow"):
        r.push([], groups=())


def test_a_task_that_can_never_fit_is_refused_before_anything_starts() -> None:
    r = rank(10)
    with pytest.raises(PlanError, match=r"task 1 needs 11 temporary bytes .* max_tmp_bytes of 10"):
        r.push([task(0, tmp=10), task(1, tmp=11)])
    assert r.machine.phase is Phase.IDLE
    assert r.push([task(0, tmp=10)]) == [("h2d", 0)]


def test_limits_of_less_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="prepare concurrency is 0"):
        Limits(max_tmp_bytes=1, prepare=0)


def test_a_schedule_reports_all_its_problems_at_once() -> None:
    bad = [
        task(3),
        task(3),
        task(4, group=1),
        task(5, group=0),
        task(6, group=9),
        task(7, group=1, stages=()),
        task(8, group=1, stages=("send", "prepare")),
        task(9, group=1, tmp=-1),
        task(10, group=1, targets=()),
    ]
    with pytest.raises(PlanError) as caught:
        Schedule.of(bad, (0, 1))
    text = str(caught.value)
    for words in (
        "task 3 comes after task 3",
        "task 5 of mesh group 0 comes after task 4 of group 1",
        "task 6 is of mesh group 9",
        "task 7 has stages ()",
        "task 8 has stages ('send', 'prepare')",
        "task 9 has -1 temporary bytes",
        "task 10 has a send stage and no target",
    ):
        assert words in text
    with pytest.raises(PlanError, match="name a group twice"):
        Schedule.of([], (0, 1, 0))
    many = [task(0)] * 100
    with pytest.raises(PlanError, match="and 79 more like these"):
        Schedule.of(many, (0,))


def test_same_events_same_instructions() -> None:
    def play() -> list[list[object]]:
        r = rank(3, h2d=2)
        out = [r.push([task(i, tmp=1) for i in range(6)])]
        for index, stage in ((1, "h2d"), (0, "h2d"), (1, "prepare"), (0, "prepare"), (1, "send")):
            out.append(r.done(index, stage))
        out.append(r.failed(0, "send"))
        return out

    assert play() == play()
