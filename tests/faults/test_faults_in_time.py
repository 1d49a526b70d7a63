"""Faults of time: what is late, slow, early, or breaks half-way. The fence holds, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest
import torch

from syncline.adapters.engines import ModuleLoader
from syncline.engine.errors import DigestMismatch, LoaderError, SynclineError
from syncline.engine.fence import Phase
from syncline.engine.linking import transports
from syncline.engine.rank import Rank
from syncline.stages.completions import Signal
from syncline.stages.transports.gloo import GlooSender

SHAPES = {f"t{i}": (8, 8) for i in range(8)}  # one bucket of 256 bytes each
EACH = {"bucket_bytes": 256, "push_timeout_s": 20.0}
AFTER = {"staged": 1, "mapped": 1, "streamed": None}
"""The version served after a push of version 2 failed on the way."""


def become(whole, version):
    for tensor in whole.values():
        tensor.fill_(float(version))


def holds(model, version):
    return all(tensor.unique().tolist() == [float(version)] for tensor in model.state_dict().values())


def loader_for(model, landing, **options):
    return ModuleLoader(model, movable=landing == "mapped", **options)


class Halves:
    """A half factory that lets a test change what the halves do: ``on_receive(rank, task, bucket)``, once it has arrived."""

    def __init__(self, on_receive=None):
        self.on_receive = on_receive
        self.make = transports("127.0.0.1")
        self.made = []

    def __call__(self, kind, program, landing, workers):
        half = self.make(kind, program, landing, workers)
        receive, rank = half.receive, program.receiver.rank

        async def changed(task):
            bucket = await receive(task)
            return bucket if self.on_receive is None else await self.on_receive(rank, task, bucket)

        half.receive = changed
        self.made.append(half)
        return half


# slow rank


class Late:
    """A completion that begins ``delay_s`` late, however it is waited for."""

    def __init__(self, start, delay_s):
        self.start, self.until, self.inner = start, asyncio.get_running_loop().time() + delay_s, None

    def poll(self):
        if self.inner is None:
            if asyncio.get_running_loop().time() < self.until:
                return False
            self.inner = self.start()
        return self.inner is None or self.inner.poll()

    def subscribe(self, callback):
        return False


def make_late(communicator, delay_s):
    """Everything that this rank does with the others starts late."""
    loop = asyncio.get_running_loop()

    def later(start):
        def begin(*args):
            outer = Signal()

            def go():
                inner = start(*args)
                inner.subscribe(lambda: outer.fail(inner.error) if inner.error is not None else outer.set())

            loop.call_later(delay_s, go)
            return outer

        return begin

    barrier = communicator.barrier
    communicator.send, communicator.recv = later(communicator.send), later(communicator.recv)
    communicator.barrier = lambda: Late(barrier, delay_s)


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_a_rank_that_is_late_in_every_collective_makes_it_slower_and_not_stuck(start_target, connect, kit, late):
    whole = kit.stamped({f"t{i}": (9, 8) for i in range(6)})
    model = kit.Bag(kit.poisoned(whole))
    pusher = await connect(kit.row_shards(whole, 3), [await start_target(model)], target_timeout_s=2.0, **EACH)
    make_late(pusher.engines[late]._session._wiring._communicator, 0.02)
    for version in (1, 2):
        await pusher.push_well(version)
        assert kit.differing(model, whole) == []


async def test_a_rank_that_comes_late_to_the_push_is_waited_for(start_target, connect, kit):
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    pusher = await connect(kit.row_shards(whole, 2), [await start_target(model)], **EACH)
    first, last = pusher.engines
    handle = last.start_push(1)
    await kit.until(lambda: last._session._attempt == 1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not handle.result.done()
    assert (await first.push(1)).ok
    assert (await handle.result).ok
    assert kit.differing(model, whole) == []


# lifetime


class Stream:
    """A stream that gets to what was queued only when nothing else can go on: it then reads the memory as it is by now."""

    def __init__(self, monkeypatch, *, honest):
        self.queue, self.torn, self.sends, self.most = [], 0, 0, 0
        self._honest = honest
        self._send = GlooSender._send_one
        monkeypatch.setattr(GlooSender, "_send_one", lambda *args: self.start(*args))  # noqa: PLW0108 - it has to bind

    def start(self, sender, task, parts, receiver):
        done = Signal()
        self.queue.append((sender, task, parts, receiver, torch.cat(parts), done))
        self.sends += 1
        self.most = max(self.most, len(self.queue))
        return done if self._honest else None  # not honest: "sent", while it is only queued

    async def run(self):
        while True:
            before = self.sends
            for _ in range(200):  # as long as new sends come, the stream is behind
                await asyncio.sleep(0)
            if self.sends == before and self.queue:
                sender, task, parts, receiver, snapshot, done = self.queue.pop(0)
                self.torn += not torch.equal(torch.cat(parts), snapshot)
                inner = self._send(sender, task, parts, receiver)
                inner.subscribe(lambda inner=inner, done=done: done.fail(inner.error) if inner.error else done.set())


@pytest.mark.parametrize("honest", [True, False])
async def test_memory_is_not_reused_while_its_send_is_only_queued(start_target, connect, kit, monkeypatch, honest):
    """Four times as many buckets as memory for them. With completions that say "sent" too early, the test has to fail."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(model)
    stream = Stream(monkeypatch, honest=honest)
    settings = {**EACH, "push_timeout_s": 6.0, "max_tmp_bytes": 512, "transport": "gloo"}
    pusher = await connect(whole, [target], **settings)
    running = asyncio.create_task(stream.run())
    try:
        report = await pusher.push(1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert stream.sends == len(SHAPES)
    if honest:
        assert report.ok
        assert (stream.torn, stream.most) == (0, 2)
        assert report.peak_tmp_bytes == 512
        assert kit.differing(model, whole) == []
    else:
        assert stream.torn > 0
        assert not report.ok
        assert target.leader.version is None


# early commit, early ACK


async def test_a_commit_waits_for_the_last_bucket(start_target, connect, kit, transport, landing):
    """The transport says that everything was sent; the last bucket arrives late."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()})
    go, reached, commits = asyncio.Event(), asyncio.Event(), []

    async def hold(rank, task, bucket):
        if task.index == len(SHAPES) - 1:
            reached.set()
            await go.wait()
        return bucket

    target = await start_target(
        loader_for(model, landing), half_factory=Halves(hold), on_commit=commits.append, initial_version=1
    )
    pusher = await connect(whole, [target], transport=transport, landing=landing, **EACH)
    become(whole, 2)
    handle = pusher.engines[0].start_push(2)
    await reached.wait()
    for _ in range(200):
        await asyncio.sleep(0)
    assert not handle.result.done()
    assert commits == []
    assert target.leader.state == "UPDATING"
    assert target.leader.serving_version == AFTER[landing]
    if landing != "streamed":
        assert holds(model, 1)
    go.set()
    assert (await handle.result).ok
    assert commits == [2]
    assert holds(model, 2)


async def four_ranks(start_target, connect, kit, slow, go):
    """A target of four ranks; rank ``slow`` gets its last bucket only when ``go`` is set. All serve version 1."""
    whole = kit.stamped(SHAPES)
    models = [kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()}) for _ in range(4)]
    reached = asyncio.Event()

    async def hold(rank, task, bucket):
        if rank == slow and task.index == len(SHAPES) - 1:
            reached.set()
            await go.wait()
        return bucket

    target = await start_target(*models, half_factory=Halves(hold), initial_version=1)
    pusher = await connect(whole, [target], **EACH)
    become(whole, 2)
    handle = pusher.engines[0].start_push(2)
    await reached.wait()
    return models, target, handle


@pytest.mark.parametrize("slow", [0, 2, 3])
async def test_a_target_votes_only_when_all_its_ranks_have_everything(start_target, connect, kit, slow):
    go = asyncio.Event()
    models, target, handle = await four_ranks(start_target, connect, kit, slow, go)
    fences = [receiver._rank.fence for receiver in target.receivers]
    others = [rank for rank in range(4) if rank != slow]
    await kit.until(lambda: [fences[rank].phase for rank in others] == [Phase.VOTED] * 3)
    for _ in range(200):
        await asyncio.sleep(0)
    assert fences[slow].phase is Phase.RECEIVING
    assert [fences[rank].phase for rank in others] == [Phase.VOTED] * 3
    assert [receiver.serving_version for receiver in target.receivers] == [1] * 4
    assert all(holds(model, 1) for model in models)
    assert not handle.result.done()
    go.set()
    assert (await handle.result).ok
    assert all(holds(model, 2) for model in models)
    assert target.states == [("COMMITTED", 2)] * 4


async def test_a_rank_that_votes_early_lets_the_others_commit(start_target, connect, kit, monkeypatch):
    """So that the test above is known to be able to fail: with a vote that does not wait, the commit is ordered without the
    last bucket of one rank, and the fence of the whole target is what is left."""
    from syncline.engine.messages import VoteReply

    vote, slow = Rank.vote, 2

    async def early(self, request):
        if self.rank != slow:
            return await vote(self, request)
        self.fence.vote(request.push_id, request.digests[str(slow)])
        return VoteReply(yes=True, rank=slow)

    order, ordered = Rank.order, []

    async def noting(self, request):
        ordered.append(request.order)
        return await order(self, request)

    monkeypatch.setattr(Rank, "vote", early)
    monkeypatch.setattr(Rank, "order", noting)
    go = asyncio.Event()
    models, _, handle = await four_ranks(start_target, connect, kit, slow, go)
    report = await handle.result
    go.set()
    assert "commit" in ordered  # while one rank lacked its last bucket
    assert not report.ok or not holds(models[slow], 2)


# receiver error


class Raising:
    """A loader with a load path of its own, which raises at the third bucket."""

    def __init__(self, model, at=3):
        self.inner, self.at, self.installed = ModuleLoader(model), at, 0
        self.manifest, self.rebind, self.finish = self.inner.manifest, self.inner.rebind, self.inner.finish

    def buffers(self):
        return None

    def begin(self, version):
        self.installed = 0

    def install(self, landed):
        self.installed += 1
        if self.installed == self.at:
            self.refuse_this_bucket(landed)
        self.inner.install(landed)

    def refuse_this_bucket(self, landed):
        raise RuntimeError(f"no kernel for a part of shape {tuple(landed[0].tensor.shape)}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_a_loader_that_raises_is_told_at_the_sender_with_its_traceback(start_target, connect, kit, landing, ranks):
    whole = kit.stamped(SHAPES)
    models = [kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()}) for _ in range(ranks)]
    loaders = [*(ModuleLoader(model) for model in models[:-1]), Raising(models[-1])]
    target = await start_target(*loaders, initial_version=1)
    pusher = await connect(whole, [target], landing=landing, **EACH)
    become(whole, 2)
    report = await pusher.push(2)
    error = report.targets[target.address].error
    assert isinstance(error, LoaderError)
    for word in ("Traceback", "in refuse_this_bucket", "RuntimeError", "no kernel for a part of shape (8, 8)"):
        assert word in str(error), str(error)
    assert target.leader.version == 1
    await kit.until(lambda: all(receiver.state == "FENCED" for receiver in target.receivers))
    assert await target.served() is None
    loaders[-1].at = -1
    await pusher.push_well(3)
    assert all(holds(model, 2) for model in models)
    assert await target.served() == 3


# version on failure, empty success


@pytest.mark.parametrize("ranks", [1, 2])
async def test_whichever_bucket_fails_the_version_stays(start_target, connect, kit, *, transport, landing, ranks):
    """Bucket k arrives damaged, for every k: the version is what it was, and the fence as the landing mode says."""
    whole = kit.stamped(SHAPES)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(ranks)]
    damaged = [-1]

    async def damage(rank, task, bucket):
        if rank == ranks - 1 and task.index == damaged[0]:
            bucket = bucket.clone()
            bucket[7] ^= 1
        return bucket

    target = await start_target(*(loader_for(model, landing) for model in models), half_factory=Halves(damage))
    pusher = await connect(whole, [target], transport=transport, landing=landing, **EACH)
    version = 1
    become(whole, version)
    await pusher.push_well(version)
    for bucket in range(0, len(SHAPES), 1 if ranks == 1 else 4):
        damaged[0] = bucket
        become(whole, version + 1)
        report = await pusher.push(version + 1)
        assert isinstance(report.targets[target.address].error, DigestMismatch), report
        assert target.leader.version == version
        assert await target.served() == (version if landing != "streamed" else None)
        if landing != "streamed":
            assert all(holds(model, version) for model in models)
        damaged[0] = -1
        version += 2
        become(whole, version)
        await pusher.push_well(version)
        assert all(holds(model, version) for model in models)


@pytest.mark.parametrize("verify", [True, False])
async def test_a_transport_that_moves_nothing_is_a_mismatch(start_target, connect, kit, *, transport, landing, verify):
    """Every bucket is said to have arrived, and is empty. Without digests that would be a success: the test can fail."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()})
    halves = Halves()

    async def nothing(rank, task, bucket):
        for half in halves.made:
            for space in getattr(half, "_spaces", {}).values():
                half._spaces = {owner: torch.zeros_like(space) for owner in half._spaces}
        return torch.zeros_like(bucket)

    halves.on_receive = nothing
    target = await start_target(loader_for(model, landing), half_factory=halves, initial_version=1)
    pusher = await connect(whole, [target], transport=transport, landing=landing, verify=verify, **EACH)
    become(whole, 2)
    report = await pusher.push(2)
    if verify:
        assert isinstance(report.targets[target.address].error, DigestMismatch)
        assert target.leader.version == 1
        assert await target.served() == AFTER[landing]
    else:
        assert report.ok
        assert not holds(model, 2)
    halves.on_receive = None
    become(whole, 3)
    await pusher.push_well(3)
    assert holds(model, 3)


async def test_a_transport_that_says_nothing_at_all_ends_by_the_deadline(start_target, connect, kit, monkeypatch):
    """The sender believes that it sent; nothing reaches the other side."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()})
    target = await start_target(model, initial_version=1)
    pusher = await connect(whole, [target], transport="gloo", bucket_bytes=256, push_timeout_s=2.0)
    with monkeypatch.context() as patch:
        patch.setattr(GlooSender, "send", lambda self, task, bucket, receivers, lent=None: dict.fromkeys(receivers))
        report = await pusher.push(2)
    assert isinstance(report.targets[target.address].error, SynclineError)
    await kit.until(lambda: target.leader.serving_version == 1)
    assert holds(model, 1)
    become(whole, 3)
    await pusher.push_well(3)
    assert holds(model, 3)


# cleanup


class Serving:
    """An engine with a say of its own, which raises where it is told to."""

    def __init__(self):
        self.calls = []
        self.raises = None

    def _call(self, name):
        self.calls.append(name)
        if self.raises == f"serving.{name}":
            raise RuntimeError(f"by the test, in {name}")

    async def pause(self, in_flight):
        self._call("pause")

    async def resume(self, version):
        self._call("resume")

    async def fence(self, reason):
        self._call("fence")


POINTS = ["begin", "write", "finish", "on_commit", "serving.pause", "serving.resume", "manifest", "on_update"]


@pytest.mark.parametrize("point", POINTS)
async def test_an_exception_inside_an_update_never_leaves_generation_paused(
    start_target, connect, kit, *, transport, landing, point
):
    """After it, forward passes go on (on one whole version) or are refused; nothing waits for ever."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()})
    serving = Serving()
    active = [False]

    def boom(*_args):
        if active[0]:
            raise RuntimeError(f"by the test, in {point}")

    loader = loader_for(model, landing, on_update=boom if point == "on_update" else None)
    if point in ("begin", "finish"):
        inner = getattr(loader, point)
        setattr(loader, point, lambda version: (boom(), inner(version)))
    elif point == "manifest":
        manifest = loader.manifest
        loader.manifest = lambda **place: (boom(), manifest(**place))[1]
    elif point == "write":
        inner_rebind, inner_install = loader.rebind, loader.install
        loader.rebind = lambda landed: (boom(), inner_rebind(landed))
        loader.install = lambda landed: (boom(), inner_install(landed))
        if landing != "mapped":
            loader.buffers = lambda: None
    target = await start_target(loader, serving=serving, initial_version=1, on_commit=boom if point == "on_commit" else None)
    pusher = await connect(whole, [target], transport=transport, landing=landing, **EACH)
    active[0], serving.raises = True, point
    become(whole, 2)
    try:
        report = await pusher.push(2)
    except SynclineError:
        report = None
    active[0], serving.raises = False, None
    gate = target.leader.gate
    await kit.until(lambda: gate._mode in ("open", "fenced"))
    served = await target.served()
    assert served in ((1, 2, None) if point == "serving.resume" else (1, None))
    if report is not None and report.ok:
        assert point == "serving.resume"
    if served is not None:
        assert holds(model, served)
    assert (target.leader.state == "FENCED") == (served is None)
    become(whole, 3)
    await pusher.push_well(3)
    assert holds(model, 3)
    assert await target.served() == 3


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_without_the_cleanup_generation_stays_paused(start_target, connect, kit, monkeypatch, landing):
    """So that the test above is known to be able to fail."""
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()})

    def boom(version):
        raise RuntimeError("by the test")

    target = await start_target(ModuleLoader(model, on_update=boom), initial_version=1)
    pusher = await connect(whole, [target], landing=landing, **EACH)
    with monkeypatch.context() as patch:

        async def nothing(self):
            return None

        patch.setattr(Rank, "_align", nothing)
        report = await pusher.push(2)
        assert not report.ok
        with pytest.raises(TimeoutError):
            await kit.until(lambda: target.leader.gate._mode in ("open", "fenced"), patience_s=0.5)


SOURCE_POINTS = ["manifest", "buffers", "digest"]


@pytest.mark.parametrize("point", SOURCE_POINTS)
@pytest.mark.parametrize("victim", [0, 1])
async def test_an_exception_on_a_source_rank_ends_the_push_on_all(start_target, connect, kit, monkeypatch, *, point, victim):
    whole = kit.stamped(SHAPES)
    model = kit.Bag({name: torch.full_like(t, 1.0) for name, t in whole.items()})
    target = await start_target(model, initial_version=1)
    sources = kit.row_shards(whole, 2)
    pusher = await connect(sources, [target], **EACH)

    def boom(*_args, **_options):
        raise RuntimeError("by the test")

    with monkeypatch.context() as patch:
        if point == "digest":
            wiring = pusher.engines[victim]._session._wiring
            patch.setattr(wiring, "digests", boom)
        else:
            patch.setattr(sources[victim], point, boom)
            if point == "buffers":
                sources[victim].held = {
                    name: [(box, t.clone()) for box, t in parts] for name, parts in sources[victim].held.items()
                }
                sources[victim].change()
        results = await pusher.results(2)
    assert all(isinstance(result, SynclineError) for result in results), results
    assert any("by the test" in str(result) for result in results)
    await kit.until(lambda: target.leader.state != "UPDATING")
    assert await target.served() == 1
    assert holds(model, 1)
    await pusher.push_well(3)
    assert kit.differing(model, whole) == []
