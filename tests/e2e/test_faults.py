"""Death, standstill and errors of real processes, at every phase of a push.

What can commit commits; nobody is left waiting; `push` returns within its deadline with a typed result; the one that failed
serves nothing, or one whole version; restarted, it serves nothing until it holds the newest version. Every target answers
all the while, and looks at every element of its weights in every pass: a mix of versions would be seen.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from typing import Any

import pytest

PUSH_TIMEOUT_S = 12.0
TARGET_TIMEOUT_S = 3.0
MARGIN_S = 3.0  # for the control calls that tell everyone about the end, on a busy machine
MODEL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG: dict[str, Any] = {
    "max_tmp_bytes": "256KiB",
    "bucket_bytes": "16KiB",
    "push_timeout_s": PUSH_TIMEOUT_S,
    "target_timeout_s": TARGET_TIMEOUT_S,
    "connect_timeout_s": 40.0,
}
MODES = [("shm", "staged"), ("shm", "streamed"), ("shm", "mapped"), ("gloo", "staged"), ("gloo", "streamed")]
ACTIONS = ["kill", "stop", "raise"]
WHO = {"server": (1, 0), "leader": (2, 0), "second rank": (2, 1)}
FENCE = ["prepare", "vote", "paused", "committing", "applied", "resumed"]
SOURCE_PHASES = ["manifest", "step:enter", "step:start", "prepare", "send", "barrier", "step:done"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def phases(action: str, landing: str) -> list[str]:
    """Where a target is hit, in the order of a push. A signal also hits it before the push begins."""
    if action == "raise":
        return ["begin", "rebind" if landing == "mapped" else "install", "finish"]
    return ["idle", *(f"fence.{step}" for step in FENCE), "receive", "begin", "finish"]


async def make(cluster: Any, landing: str, ranks: dict[str, int], *, via_install: bool = False) -> tuple[Any, list[Any]]:
    """A source of two ranks, and targets: name -> number of ranks."""
    build = {"model": MODEL, "movable": landing == "mapped", "via_install": via_install}
    source, *targets = await asyncio.gather(
        cluster.source(2, build={"model": MODEL, "layout": "fsdp"}),
        *(cluster.target(name, ranks=count, build=build) for name, count in ranks.items()),
    )
    await asyncio.gather(*(look_into_all_ranks(cluster, target) for target in targets))
    return source, targets


async def look_into_all_ranks(cluster: Any, target: Any) -> None:
    """Let the leader look into the other ranks' memory in its passes."""
    paths = [str(cluster.folder / f"peek-{worker.name}") for worker in target.ranks[1:]]
    for worker, path in zip(target.ranks[1:], paths, strict=True):
        if not await worker.call("is_peeked_at"):
            await worker.call("peek_at", path=path)
    await target.leader.call("peers", paths=paths)


async def push_well(source: Any, targets: list[Any], version: int) -> None:
    """A push that has to succeed everywhere."""
    await source.become(version)
    report = await source.push(version)
    assert report["ok"], report["text"]
    for target in targets:
        await serves(target, version)


async def serves(target: Any, version: int) -> None:
    assert await target.state() == {"state": "COMMITTED", "version": version}
    assert await target.leader.call("serve_once") == {"version": version, "saw": [float(version)]}


async def settled(cluster: Any, target: Any) -> None:
    """No rank of the target goes on waiting for a push that is over."""

    async def at_rest() -> bool:
        states = await asyncio.gather(*(rank.call("state") for rank in target.ranks))
        return all(state["state"] != "UPDATING" for state in states)

    await cluster.until(at_rest, f"all ranks of {target.name} are at rest", PUSH_TIMEOUT_S + MARGIN_S)


async def whole(cluster: Any, target: Any) -> None:
    """All ranks of the target have found each other (again)."""

    async def is_ready() -> bool:
        return (await target.leader.call("status"))["ready"]

    await cluster.until(is_ready, f"{target.name} is whole")


async def serves_one_version_or_none(target: Any, versions: set[int]) -> None:
    served = await target.leader.call("serve_once")
    if served["version"] is not None:
        assert served["version"] in versions
        assert served["saw"] == [float(served["version"])]


async def never_served_a_mix(target: Any) -> None:
    probed = await target.leader.call("stop_probe")
    assert probed["mixes"] == []


async def restart(cluster: Any, target: Any, rank: int, landing: str) -> None:
    """The rank comes back as a new process, with other content, under the same address: it serves nothing yet."""
    assert await target.ranks[rank].ended() == -signal.SIGKILL
    target.ranks[rank] = await cluster.worker("target", f"{target.name}-{rank}-again")
    await cluster.build_rank(target, rank, {"model": MODEL, "movable": landing == "mapped"})

    async def is_ready_and_fenced() -> bool:
        status = await target.leader.call("status")
        return status["ready"] and status["state"] == "FENCED"

    await cluster.until(is_ready_and_fenced, f"{target.name} is whole again, and fenced")
    await look_into_all_ranks(cluster, target)
    assert (await target.leader.call("serve_once"))["version"] is None


async def hit(worker: Any, phase: str, action: str) -> None:
    """Let ``action`` befall a worker at ``phase``."""
    if phase != "idle":
        await worker.call("arm", point=phase, action=action, nth=3 if phase in ("receive", "install") else 1)
    elif action == "kill":
        worker.kill()
        await worker.ended()
    else:
        worker.send(signal.SIGSTOP)
        await worker.until_stopped()


# Every mode with every action and every kind of victim with both: 15 of 45 cases, which is every pair.
TARGET_CASES = [
    (*mode, action, list(WHO)[(m + a) % len(WHO)])
    for (m, mode), (a, action) in itertools.product(enumerate(MODES), enumerate(ACTIONS))
]


@pytest.mark.parametrize(("transport", "landing", "action", "who"), TARGET_CASES, ids=lambda value: value)
async def test_targets_fail(cluster, transport: str, landing: str, action: str, who: str) -> None:
    """In one push one target fails at each phase, and one stays well."""
    ranks, victim = WHO[who]
    points = phases(action, landing)
    names = {"well": 1} | {f"t{i}": ranks for i in range(len(points))}
    source, (well, *hurt) = await make(cluster, landing, names, via_install=action == "raise" and landing != "mapped")
    await cluster.connect(source, [well, *hurt], transport=transport, landing=landing, **CONFIG)
    await push_well(source, [well, *hurt], 1)
    for target in (well, *hurt):
        await target.leader.call("probe")

    await source.become(2)
    for target, phase in zip(hurt, points, strict=True):
        await hit(target.ranks[victim], phase, action)
    report = await source.push(2)

    assert report["took_s"] <= PUSH_TIMEOUT_S + MARGIN_S
    assert report["targets"][well.address]["ok"], report["text"]
    await serves(well, 2)
    for target, phase in zip(hurt, points, strict=True):
        lost = report["targets"][target.address]
        assert not lost["ok"], (phase, report["text"])
        assert "SynclineError" in lost["error"]
        assert lost["message"]
        if action == "raise":
            assert f"injected at {phase}" in lost["message"]
            assert "LoaderError" in lost["error"]

    if action == "kill":
        await asyncio.gather(*(restart(cluster, target, victim, landing) for target in hurt))
    elif action == "stop":
        for target in hurt:
            target.ranks[victim].send(signal.SIGCONT)
    for target in hurt:
        await whole(cluster, target)
        await settled(cluster, target)  # also one that was stopped before the push: what it finds then is refused as late
        await serves_one_version_or_none(target, {1, 2})
    await push_well(source, [well, *hurt], 3)
    for target in hurt if action != "kill" or victim != 0 else []:
        await never_served_a_mix(target)
    await never_served_a_mix(well)
    await source.all("close")
    await asyncio.gather(*(rank.call("close") for target in (well, *hurt) for rank in target.ranks))


class World:
    """A source of two ranks with its targets: a server, and a target of two ranks."""

    def __init__(self, cluster: Any, name: str, transport: str, landing: str, push_timeout_s: float) -> None:
        self.cluster, self.name, self.landing = cluster, name, landing
        self.config = {**CONFIG, "push_timeout_s": push_timeout_s, "transport": transport, "landing": landing}
        self.version = 0

    async def begin(self) -> None:
        names = {f"{self.name}a": 1, f"{self.name}b": 2}
        self.source, self.targets = await make(self.cluster, self.landing, names)
        await self.cluster.connect(self.source, self.targets, **self.config)
        await self.push_well()
        for target in self.targets:
            await target.leader.call("probe")

    async def push_well(self) -> None:
        self.version += 1
        await push_well(self.source, self.targets, self.version)

    async def push_with_a_fault(self, phase: str, action: str, victim: int) -> None:
        """The push fails on every rank that is left; targets go back, or are fenced; the next push works."""
        self.version += 1
        await self.source.become(self.version)
        worker, other = self.source.ranks[victim], self.source.ranks[1 - victim]
        await hit(worker, phase, action)
        calls = [rank.begin("push", version=self.version) for rank in self.source.ranks]
        error = await self.error_of(calls[1 - victim])
        if action == "raise":
            own = await self.error_of(calls[victim])
            assert "SynclineError" in error.kinds, error
            assert f"injected at {phase}" in own.message
            assert f"injected at {phase}" in error.message  # and what rank it was
        else:  # what nobody can tell from a slow rank is a timeout, at the latest
            assert "SourceRankLost" in error.kinds or (action == "stop" and "PushTimeout" in error.kinds), error
        for target in self.targets:
            await settled(self.cluster, target)
            await serves_one_version_or_none(target, {self.version - 1, self.version})
        if action != "raise":
            worker.kill()
            await other.call("close")
            await self.new_source()
        await self.push_well()

    async def error_of(self, call: Any) -> Any:
        timeout = self.config["push_timeout_s"] + MARGIN_S
        done, _ = await asyncio.wait({call}, timeout=timeout)
        if not done:
            pytest.fail(f"push did not return within {timeout} s\n{self.cluster.dump()}")
        error = call.exception()
        assert error is not None, call.result()
        return error

    async def new_source(self) -> None:
        self.source = await self.cluster.source(2, build={"model": MODEL, "layout": "fsdp"})
        await self.cluster.connect(self.source, self.targets, **self.config)

    async def end(self) -> None:
        for target in self.targets:
            await never_served_a_mix(target)
        await self.source.all("close")
        await asyncio.gather(*(rank.call("close") for target in self.targets for rank in target.ranks))


SOURCE_CASES = [(*mode, action, (m + a) % 2) for m, mode in enumerate(MODES) for a, action in enumerate(["kill", "raise"])]


@pytest.mark.parametrize(("transport", "landing", "action", "victim"), SOURCE_CASES, ids=str)
async def test_a_source_rank_fails(cluster, transport: str, landing: str, action: str, victim: int) -> None:
    """One phase after the other."""
    world = World(cluster, "", transport, landing, PUSH_TIMEOUT_S)
    await world.begin()
    for phase in [*(["idle"] if action == "kill" else []), *SOURCE_PHASES]:
        await world.push_with_a_fault(phase, action, victim)
    await world.end()


@pytest.mark.parametrize(("transport", "landing", "victim"), [("shm", "staged", 0), ("gloo", "streamed", 1)], ids=str)
async def test_a_source_rank_stops(cluster, transport: str, landing: str, victim: int) -> None:
    """Nobody hears of a process that stands still: that takes the push's deadline. All phases side by side."""

    async def one(number: int, phase: str) -> None:
        world = World(cluster, f"w{number}", transport, landing, 12.0)  # many processes at once, and perhaps a busy machine
        await world.begin()
        await world.push_with_a_fault(phase, "stop", victim)
        await world.end()

    await asyncio.gather(*(one(number, phase) for number, phase in enumerate(["idle", *SOURCE_PHASES])))


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_source_rank_dies_while_it_connects(cluster, victim: int) -> None:
    """The other ranks hear of it; the next source finds everything as if that one had never been."""
    build = {"model": MODEL}
    targets = list(await asyncio.gather(cluster.target("a", build=build), cluster.target("b", build=build, ranks=2)))
    for step in ["enter", "manifests", "planned", "offer", "linked"]:
        source = await cluster.source(2, build={"model": MODEL, "layout": "fsdp"})
        await source.ranks[victim].call("arm", point=f"step:{step}", action="kill")
        addresses = [target.address for target in targets]
        await source.all("engine", addresses=addresses, config=CONFIG)
        other = (await source.each("connect"))[1 - victim]
        assert "SourceRankLost" in other.kinds, other
        assert (await targets[0].state())["state"] == "FENCED"
        await source.ranks[1 - victim].call("close")
    source = await cluster.source(2, build={"model": MODEL, "layout": "fsdp"})
    await cluster.connect(source, targets, **CONFIG)
    await push_well(source, targets, 1)
    await source.all("close")
