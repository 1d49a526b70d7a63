"""Pushes in virtual time that can be worked out by hand: a task's second here takes a second there.

Links and engines move 1 byte a second, and every delay is 0 unless a test says otherwise, so bytes are seconds.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from syncline.bench.simulation.critical import critical_path
from syncline.bench.simulation.gpus import GpuWorld
from syncline.bench.simulation.hardware import Gpus
from syncline.bench.simulation.load import Load, Share
from syncline.bench.simulation.play import Knobs, Played, play
from syncline.bench.simulation.world import Disturbance, Terms
from syncline.scheduler.driver import Limits

FREE = 1e12
"""A rate that takes no time."""
FAST = 1e-4
"""Seconds within which figures are exact: the poller's pauses."""


def gpus(**rates: float) -> Gpus:
    """Nothing takes time but what is said."""
    plain = dict.fromkeys(("h2d", "kernel", "copy", "digest", "nvlink", "nic"), FREE)
    delays = dict.fromkeys(("wire_s", "local_s", "launch_s", "task_s", "round_s", "begin_s", "end_s"), 0.0)
    return Gpus(name="by hand", **{**plain, **delays, **rates})


def share(
    index: int, *, h2d: int = 0, kernel: int = 0, send: int = 0, tmp: int = 1, to: tuple[int, ...] = (0,), group: int = 0
) -> Share:
    """A task that takes so many seconds in each stage. The kernel reads ``own`` bytes and writes the bucket."""
    return Share(
        index, group, send, tmp_bytes=tmp, files=h2d, own=kernel - send if kernel else 0, pieces=1, owner=True, receivers=to
    )


def load(
    *ranks: list[Share], receivers: int = 1, hosts: list[int] | None = None, receiver_hosts: list[int] | None = None
) -> Load:
    """Every rank and every receiver on a host of its own, every receiver a target of its own."""
    tasks = sorted((each for shares in ranks for each in shares if each.owner), key=lambda each: each.index)
    return Load(
        sources=ranks,
        receivers=[[each.index for each in tasks if receiver in each.receivers] for receiver in range(receivers)],
        nbytes=[each.nbytes for each in tasks],
        segments=[1] * len(tasks),
        source_hosts=hosts or list(range(len(ranks))),
        receiver_hosts=receiver_hosts or [100 + receiver for receiver in range(receivers)],
        target_of=list(range(receivers)),
        groups=tuple(sorted({each.group for each in tasks})),
    )


def run(what: Load, hardware: Gpus, *, room: int = 1000, disturbance: Disturbance | None = None, **limits: int) -> Played:
    knobs = Knobs(limits=Limits(max_tmp_bytes=room, **limits), poll_interval_s=1e-6, offloaded=False)
    terms = Terms(landing="streamed", verify=False, disturbance=disturbance or Disturbance())
    return play(what, lambda loop: GpuWorld(loop, what, hardware, terms), knobs)


def spans(played: Played, rank: int = 0) -> dict[tuple[str, int], tuple[float, float]]:
    return {(s.stage, s.index): (round(s.start, 3), round(s.end, 3)) for s in played.outcomes[rank].spans}


THREE = gpus(h2d=1.0, kernel=1.0, nic=1.0)


def two_tasks(h2d: int, prepare: int, send: int, *, tmp: int = 1) -> Load:
    return load([share(i, h2d=h2d, kernel=prepare, send=send, tmp=tmp) for i in range(2)])


# ----------------------------------------------------------------------------------------------------- one rank's pipeline


def test_two_tasks_in_three_stages_overlap() -> None:
    played = run(two_tasks(1, 1, 1), THREE)
    assert spans(played) == {
        ("barrier", 0): (3, 3),
        ("h2d", 0): (0, 1), ("h2d", 1): (0, 2),  # both are in the stage; the copy engine serves one after the other
        ("prepare", 0): (1, 2), ("prepare", 1): (2, 3),
        ("send", 0): (2, 3), ("send", 1): (3, 4),
    }  # fmt: skip
    assert played.seconds == pytest.approx(4, abs=FAST)


@pytest.mark.parametrize(
    ("h2d", "prepare", "send", "seconds"),
    [(1, 1, 1, 4), (3, 1, 1, 8), (1, 3, 1, 8), (1, 2, 2, 7), (2, 4, 3, 13)],
)
def test_the_longest_stage_is_passed_twice_and_the_others_once(h2d: int, prepare: int, send: int, seconds: int) -> None:
    assert run(two_tasks(h2d, prepare, send), THREE).seconds == pytest.approx(seconds, abs=FAST)


def test_a_watermark_of_one_task_makes_them_follow_each_other() -> None:
    played = run(two_tasks(1, 2, 2, tmp=10), THREE, room=10)
    assert spans(played)["h2d", 1][0] == pytest.approx(5)
    assert played.seconds == pytest.approx(10, abs=FAST)
    assert run(two_tasks(1, 2, 2, tmp=10), THREE, room=20).seconds == pytest.approx(7, abs=FAST)
    assert [outcome.peak_tmp_bytes for outcome in played.outcomes] == [10]


@pytest.mark.parametrize(("send", "seconds"), [(1, 4), (2, 2), (4, 1)])
def test_send_concurrency_lets_tasks_to_several_receivers_go_side_by_side(send: int, seconds: int) -> None:
    """Receivers' links take a byte a second, the sender's takes no time."""
    what = load([share(i, send=1, to=(i,)) for i in range(4)], receivers=4)
    hardware = gpus(nvlink=FREE, nic=FREE)

    class Slow(GpuWorld):
        def __init__(self, loop, what, hardware, terms) -> None:
            super().__init__(loop, what, hardware, terms)
            for _, nic in self._into:
                nic.rate = 1.0

    terms = Terms(landing="streamed", verify=False)
    knobs = Knobs(limits=Limits(max_tmp_bytes=1000, send=send), poll_interval_s=1e-6)
    assert play(what, lambda loop: Slow(loop, what, hardware, terms), knobs).seconds == pytest.approx(seconds, abs=FAST)


def test_groups_follow_each_other_at_the_barrier() -> None:
    what = load(
        [share(0, kernel=2, send=1), share(2, kernel=1, send=1, group=1)],
        [share(1, kernel=5, send=1), share(3, kernel=1, send=1, group=1)],
        receivers=1,
    )
    played = run(what, gpus(kernel=1.0, round_s=0.5))
    first, second = spans(played, 0), spans(played, 1)
    assert first["prepare", 0] == (0, 2)
    assert first["barrier", 0] == (2, 5.5)  # until the slower rank has come, and the round of two is over
    assert first["prepare", 2] == (5.5, 6.5)
    assert second["prepare", 3] == (5.5, 6.5)
    assert played.seconds == pytest.approx(7.0, abs=FAST)  # and the second barrier


# --------------------------------------------------------------------------------------------------------- several ranks


def test_a_straggler_is_what_the_push_waits_for() -> None:
    what = load([share(0, kernel=4, send=1, to=(0,))], [share(1, kernel=4, send=1, to=(1,))], receivers=2)
    hardware = gpus(kernel=1.0)
    assert run(what, hardware).seconds == pytest.approx(4, abs=FAST)
    slow = run(what, hardware, disturbance=Disturbance(stragglers={1: 2.5}))
    assert slow.seconds == pytest.approx(10, abs=FAST)
    steps = critical_path(slow.last).steps
    longest = max(steps, key=lambda step: step.seconds)
    assert (longest.what, longest.where, longest.task) == ("kernel", "GPU of source rank 1", 1)
    assert longest.seconds == pytest.approx(10, abs=FAST)


@pytest.mark.parametrize(("ranks_per_nic", "seconds"), [(1, 3), (2, 6)])
def test_senders_of_a_host_share_its_network_card(ranks_per_nic: int, seconds: int) -> None:
    what = load([share(0, send=3, to=(0,))], [share(1, send=3, to=(1,))], receivers=2, hosts=[0, 0])
    hardware = msgspec.structs.replace(gpus(nic=1.0), ranks_per_nic=ranks_per_nic)
    assert run(what, hardware).seconds == pytest.approx(seconds, abs=FAST)


def test_two_senders_to_one_receiver_share_its_network_card() -> None:
    what = load([share(0, send=3, to=(0,))], [share(1, send=3, to=(0,))])
    played = run(what, gpus(nic=1.0))
    assert (spans(played, 0)["send", 0], spans(played, 1)["send", 1]) == ((0, 3), (0, 6))
    assert critical_path(played.last).by_where["NIC into receiver 0"] == pytest.approx(6, abs=FAST)


def test_ranks_of_one_host_do_not_use_the_network() -> None:
    what = load([share(0, send=6)], hosts=[7], receiver_hosts=[7])
    assert run(what, gpus(nic=1.0, nvlink=2.0)).seconds == pytest.approx(3, abs=FAST)


def gathered() -> Load:
    """Rank 1 gives rank 0 four bytes, which it has to pack first (two in, two out: four seconds)."""
    owner, contributor = share(0, kernel=6, send=2, tmp=1), share(0, tmp=1)
    contributor.owner, contributor.own, contributor.receivers = False, 2, ()
    owner.takes, contributor.gives = [(1, 4)], [(0, 4)]
    return load([owner], [contributor])


def test_an_owner_waits_for_the_pieces_of_others() -> None:
    """Packed at 4, there at 8; then the kernel: four of its own, four that came, two written."""
    played = run(gathered(), gpus(kernel=1.0, nic=1.0))
    assert spans(played, 1)["prepare", 0] == (0, 8)
    assert spans(played, 0)["prepare", 0] == (0, 18)
    assert spans(played, 0)["send", 0] == (18, 20)


def test_a_receiver_takes_two_buckets_at_a_time_in_plan_order() -> None:
    """Landing takes four seconds a bucket (two bytes, read and written): the third comes when the first has landed."""
    what = load([share(i, send=2) for i in range(3)])
    played = run(what, gpus(nic=2.0, copy=1.0), send=3)
    found = spans(played)
    assert [found["send", i] for i in range(3)] == [(0, 1), (0, 2), (0, 6)]
    assert played.seconds == pytest.approx(13, abs=FAST)  # landed at 5, 9, 13


# ------------------------------------------------------------------------------------------------------ the critical path


def test_the_critical_path_leaves_no_gap_and_names_what_was_waited_for() -> None:
    played = run(two_tasks(1, 3, 1), THREE)
    steps = critical_path(played.last).steps
    assert steps[0].start == 0
    assert steps[-1].end == pytest.approx(played.seconds)
    assert all(one.end == pytest.approx(two.start) for one, two in itertools.pairwise(steps))
    long = [(step.what, step.task, round(step.start), round(step.end)) for step in steps if step.seconds > 0.5]
    assert long == [("h2d", 0, 0, 1), ("kernel", 0, 1, 4), ("kernel", 1, 4, 7), ("nic out", 1, 7, 8)]


def test_a_watermark_that_holds_up_is_named() -> None:
    path = critical_path(run(two_tasks(1, 2, 2, tmp=10), THREE, room=10).last)
    assert path.by_why == {"the watermark is reached": 1}
    assert not critical_path(run(two_tasks(1, 2, 2, tmp=10), THREE, room=20).last).by_why.get("the watermark is reached")


def test_the_same_seed_gives_the_same_push() -> None:
    what = load([share(i, kernel=3, send=2) for i in range(6)])

    def once(seed: int) -> tuple[float, object]:
        played = run(what, THREE, disturbance=Disturbance(jitter=0.3, seed=seed))
        return played.seconds, list(played.outcomes[0].spans)

    assert once(1) == once(1)
    assert once(1) != once(2)
