"""Death, standstill and errors of real processes, at every phase of a push.

What can commit commits; nobody is left waiting; `push` returns within its deadline with a typed result; the one that failed
serves nothing, or one whole version; restarted, it serves nothing until it holds the newest version. Every target answers
all the while, and looks at every element of its weights in every pass: a mix of versions would be seen.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

PUSH_TIMEOUT_S = 10.0
TARGET_TIMEOUT_S = 2.0
MARGIN_S = 3.0  # for the control calls that tell everyone about the end, on a busy machine
MODEL = {"kind": "stamp", "tensors": 12, "width": 64, "rows": 128}
CONFIG: dict[str, Any] = {
    "max_tmp_bytes": "256KiB",
    "bucket_bytes": "16KiB",
    "push_timeout_s": PUSH_TIMEOUT_S,
    "target_timeout_s": TARGET_TIMEOUT_S,
    "connect_timeout_s": 20.0,
}
MODES = [("shm", "staged"), ("shm", "streamed"), ("shm", "mapped"), ("gloo", "staged"), ("gloo", "streamed")]
FENCE = ["fence.prepare", "receive", "fence.vote", "fence.paused", "fence.committing", "fence.applied", "fence.resumed"]

modes = pytest.mark.parametrize(("transport", "landing"), MODES)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def phases(action: str, landing: str) -> list[str]:
    """Where a target is hit, in the order of a push. A signal also hits it before the push begins."""
    if action != "raise":
        return ["idle", *FENCE, "begin", "finish"]
    return ["receive", "begin", "finish", *(["rebind"] if landing == "mapped" else [])]


async def make(cluster: Any, landing: str, **ranks: int) -> tuple[Any, list[Any]]:
    """A source of two ranks, and targets by name and number of ranks."""
    build = {"model": MODEL, "movable": landing == "mapped"}
    source, *targets = await asyncio.gather(
        cluster.source(2, build={"model": MODEL, "layout": "fsdp"}),
        *(cluster.target(name, ranks=count, build=build) for name, count in ranks.items()),
    )
    for target in targets:
        await join(cluster, target)
    return source, targets


async def join(cluster: Any, target: Any) -> None:
    """Let the leader look into the other ranks' memory in its passes."""
    paths = []
    for worker in target.ranks[1:]:
        paths.append(str(cluster.folder / f"peek-{worker.name}"))
        if not await worker.call("is_peeked_at"):
            await worker.call("peek_at", path=paths[-1])
    await target.leader.call("peers", paths=paths)


async def push_well(cluster: Any, source: Any, targets: list[Any], version: int) -> None:
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


async def serves_one_version_or_none(target: Any, versions: set[int], landing: str) -> None:
    served = await target.leader.call("serve_once")
    if served["version"] is not None:
        assert served["version"] in versions
        assert served["saw"] == [float(served["version"])]


async def restart(cluster: Any, target: Any, rank: int, landing: str) -> None:
    """The rank comes back as a new process with random content, under the same address."""
    assert await target.ranks[rank].ended() == -signal.SIGKILL
    target.ranks[rank] = await cluster.worker("target", f"{target.name}-{rank}-again")
    await cluster.build_rank(target, rank, {"model": MODEL, "movable": landing == "mapped"})
    await join(cluster, target)

    async def fenced() -> bool:
        return (await target.state())["state"] == "FENCED"

    await cluster.until(fenced, f"{target.name} is fenced")
    assert (await target.leader.call("serve_once"))["version"] is None


async def hit(worker: Any, phase: str, action: str) -> None:
    if phase != "idle":
        await worker.call("arm", point=phase, action=action, nth=3 if phase == "receive" else 1)
    elif action == "kill":
        worker.kill()
        await worker.ended()
    else:
        worker.send(signal.SIGSTOP)
        await worker.until_stopped()


def check(report: dict[str, Any], well: Any, hurt: Any) -> None:
    assert report["took_s"] <= PUSH_TIMEOUT_S + MARGIN_S
    assert not report["ok"]
    assert report["targets"][well.address]["ok"], report["text"]
    lost = report["targets"][hurt.address]
    assert not lost["ok"], report["text"]
    assert "SynclineError" in lost["error"]
    assert lost["message"]


@modes
@pytest.mark.parametrize("action", ["kill", "stop", "raise"])
@pytest.mark.parametrize("who", ["server", "leader", "second rank"])
async def test_a_target_fails(cluster, action: str, who: str, transport: str, landing: str) -> None:
    ranks, victim = {"server": (1, 0), "leader": (2, 0), "second rank": (2, 1)}[who]
    source, (well, hurt) = await make(cluster, landing, a=1, b=ranks)
    await cluster.connect(source, [well, hurt], transport=transport, landing=landing, **CONFIG)
    await push_well(cluster, source, [well, hurt], 1)
    await well.leader.call("probe")
    version = 1
    for phase in phases(action, landing):
        print("phase", phase)
        version += 1
        if phase != "idle":
            await hurt.leader.call("probe")
        worker = hurt.ranks[victim]
        await hit(worker, phase, action)
        await source.become(version)
        report = await source.push(version)

        print(f"  push {report['took_s']:.2f} s: {report['targets'][hurt.address]}")
        check(report, well, hurt)
        if action == "raise":
            assert "LoaderError" in report["targets"][hurt.address]["error"] or phase == "receive", report["text"]
            assert f"injected at {phase}" in report["targets"][hurt.address]["message"]
        await serves(well, version)
        if action == "kill":
            await restart(cluster, hurt, victim, landing)
        else:
            worker.send(signal.SIGCONT)
        import time

        t0 = time.monotonic()
        await settled(cluster, hurt)
        print(f"  settled {time.monotonic() - t0:.2f}")
        await serves_one_version_or_none(hurt, {version - 1, version}, landing)
        version += 1
        await push_well(cluster, source, [well, hurt], version)
        print(f"  recovered {time.monotonic() - t0:.2f}")
        if phase != "idle" and (action != "kill" or victim != 0):
            assert (await hurt.leader.call("stop_probe"))["mixes"] == []
    probed = await well.leader.call("stop_probe")
    assert probed["mixes"] == []
    assert probed["passes"] > 0
    await source.all("close")
    await asyncio.gather(*(rank.call("close") for target in (well, hurt) for rank in target.ranks))


SOURCE_PHASES = ["idle", "manifest", "step:enter", "step:start", "prepare", "send", "barrier", "step:done"]


@modes
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("action", ["kill", "stop", "raise"])
async def test_a_source_rank_fails(cluster, action: str, victim: int, transport: str, landing: str) -> None:
    """The push fails on every rank that is left; targets serve one whole version or none; a new source carries on."""
    source, targets = await make(cluster, landing, a=1, b=2)
    version = 1
    config = {
        **CONFIG,
        "push_timeout_s": 4.0 if action == "stop" else PUSH_TIMEOUT_S,
        "transport": transport,
        "landing": landing,
    }
    await cluster.connect(source, targets, **config)
    await push_well(cluster, source, targets, version)
    for target in targets:
        await target.leader.call("probe")
    for phase in SOURCE_PHASES:
        print("phase", phase)
        if phase == "idle" and action == "raise":
            continue
        version += 1
        await source.become(version)
        worker, other = source.ranks[victim], source.ranks[1 - victim]
        if phase == "idle":
            await hit(worker, phase, action)
        else:
            await worker.call("arm", point=phase, action=action)
        calls = [rank.begin("push", version=version) for rank in source.ranks]
        error = await failed(cluster, calls[1 - victim], config["push_timeout_s"])
        if action == "raise":
            own = await failed(cluster, calls[victim], config["push_timeout_s"])
            assert "SynclineError" in error.kinds
            assert "injected" in own.message or "injected" in error.message
        else:
            assert "SourceRankLost" in error.kinds, error
        for target in targets:
            await settled(cluster, target)
            await serves_one_version_or_none(target, {version - 1, version}, landing)
        if action != "raise":
            worker.kill()
            await other.call("close")
            other.kill()
            source = await cluster.source(2, build={"model": MODEL, "layout": "fsdp"})
            await cluster.connect(source, targets, **config)
        version += 1
        await push_well(cluster, source, targets, version)
    for target in targets:
        probed = await target.leader.call("stop_probe")
        assert probed["mixes"] == []
        assert probed["passes"] > 0
    await source.all("close")
    await asyncio.gather(*(rank.call("close") for target in targets for rank in target.ranks))


async def failed(cluster: Any, call: Any, push_timeout_s: float) -> Any:
    """The error of a push, in time."""
    done, _ = await asyncio.wait({call}, timeout=push_timeout_s + MARGIN_S)
    if not done:
        pytest.fail(f"push did not return within its deadline\n{cluster.dump()}")
    error = call.exception()
    assert error is not None, call.result()
    return error
