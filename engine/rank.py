"""One rank of a target in its updates: obeys the leader, moves data in, and keeps its fence.

Every step of a push first asks the fence. Whatever goes wrong ends in `_settle`: forward passes go on if the fence still
names a version to serve, else they are refused; nothing stays paused. The rank has its own deadline for every push, a
little after the leader's, so that it also settles when leader and source are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from syncline.scheduler.layout import Manifest
from syncline.stages.closing import in_turn
from syncline.stages.completions import TaskScope
from syncline.stages.device_marks import DeviceMarks
from syncline.stages.transports.base import Lease
from syncline.stages.watch import Watch
from syncline.stages.workers import Workers, call_in_thread

from .control import traceback_text
from .errors import BusyError, DigestMismatch, PlanError, ProtocolError, PushAborted, PushTimeout, SynclineError, TransportError
from .fence import Fence, Phase
from .gate import Gate
from .landing import LandingPath, Received
from .linking import HalfFactory, Link, close_path, end_path, make_link, stale
from .loader import Loader, Serving, Unmapping
from .loader_thread import LoaderThread
from .messages import Ack, CompleteRequest, ConnectRequest, Landing, PrepareReply, PrepareRequest, RankOrder, VoteReply
from .observing import UpdateEnd
from .switch import Switch

log = logging.getLogger("syncline.engine")

T = TypeVar("T")

CommitHook = Callable[[int], Awaitable[None] | None]

_GRACE_S = 3.0
"""A rank waits so much longer than a deadline says, for the leader to decide first."""
_STOP_S = 2.0
_SETTLE_S = 15.0
"""How long `Rank.close` waits for each kind of threads."""


@dataclass(kw_only=True)
class _Update:
    """A push under way on this rank."""

    push_id: str
    version: int
    link: Link
    timer: asyncio.TimerHandle
    receiving: asyncio.Task[Received] | None = None
    work: set[asyncio.Future[Any]] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    ready: PrepareReply | None = None
    landing_s: float = 0.0
    starved_s: float = 0.0
    commit_s: float = 0.0
    error: str = ""
    began: float = field(default_factory=time.perf_counter)
    began_ns: int = field(default_factory=time.time_ns)


class Rank:
    """One rank of a target. Lives on one event loop.

    Args:
        loader: the weights.
        rank, world_size: place in the target.
        host: see `syncline.engine.host.host_id`.
        gate: of this rank's forward passes.
        marks: the gate's; also says when what the loader has launched is done.
        serving: the engine's own say; None: the gate alone.
        initial_version: what the live parameters hold; None starts fenced.
        initial_digest: see `Fence`.
        workers: threads that copy and digest.
        make_half: see `HalfFactory`.
        on_commit: called once per version, under pause, after all content is in place.
        scope: where work in the background runs.
        on_update: told of every update that has ended here.
    """

    def __init__(
        self,
        *,
        loader: Loader,
        rank: int,
        world_size: int,
        host: str,
        gate: Gate,
        marks: DeviceMarks,
        serving: Serving | None,
        initial_version: int | None,
        initial_digest: str = "",
        workers: int,
        make_half: HalfFactory,
        on_commit: CommitHook | None,
        scope: TaskScope,
        on_update: Callable[[UpdateEnd], None] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.process = secrets.token_hex(8)
        self.fence = Fence(incarnation=self.process, version=initial_version, digest=initial_digest)
        self.landing_bytes = 0
        self.pushes = 0
        self.manifest_digest = ""
        self._host = host
        self._switch = Switch(gate, serving)
        self._marks = marks
        self._make_half = make_half
        self._on_commit = on_commit
        self._scope = scope
        self._on_update = on_update
        self._loader = LoaderThread(loader)
        self._workers = Workers(workers)
        self._manifest: Manifest | None = None
        self._manifest_bytes = b""
        self._link: Link | None = None
        self._linking: asyncio.Task[Link] | None = None
        self._retired: list[LandingPath] = []
        self._update: _Update | None = None
        self._settling = asyncio.Lock()
        self._leases: list[Lease] = []

    # what it is

    @property
    def link(self) -> Link | None:
        """What the last `connect` set up."""
        return self._link

    @property
    def serving(self) -> int | None:
        """The version that forward passes may read now."""
        return self.fence.serving_version

    async def start(self) -> None:
        """Serve the initial version, or nothing. The manifest is asked for once."""
        if self.fence.serving_version is None:
            await self._switch.fence(self.fence.reason)
        else:
            await self._switch.resume(self.fence.serving_version)
        await self.manifest()

    async def manifest(self) -> bytes:
        """The loader's manifest as it is now; `manifest_digest` names it."""
        loader = self._loader.loader
        manifest = await self._loader.call(lambda: loader.manifest(rank=self.rank, world_size=self.world_size, host=self._host))
        if manifest is not self._manifest:
            self._manifest_bytes, self.manifest_digest = await self._workers.submit(
                lambda: (manifest.to_bytes(), manifest.digest)
            )
            self._manifest = manifest
            self._marks.of(manifest.buffers.devices)
        return self._manifest_bytes

    async def refresh(self, timeout_s: float) -> None:
        """Look at the manifest again, unless the loader is busy: then what was seen last stays."""
        if self._loader.idle and self._update is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.manifest()

    # connect

    async def connect(self, request: ConnectRequest) -> None:
        """Prove the program, link up with every owner. The links before it are closed.

        Raises:
            BusyError: a push is under way.
            PlanError: the program does not fit this rank's manifest, or the landing mode cannot be had.
            TransportError: a link did not come about.
        """
        async with self._settling:
            if self._update is not None:
                raise BusyError(f"push {self._update.push_id} is under way; its links cannot be replaced now")
        self._check_generation(request)
        if self._linking is not None:
            await _cancel(self._linking)
        self._retire()
        self._linking = task = asyncio.create_task(self._make_link(request), name=f"syncline-link-{self.rank}")
        try:
            async with asyncio.timeout(request.timeout_s):
                self._link = await task
        except TimeoutError:
            raise TransportError(f"rank {self.rank} did not link up within {request.timeout_s:.3g} s") from None
        except asyncio.CancelledError:
            if task.cancelled() and self._linking is not task:
                raise ProtocolError(f"a newer connect request came while rank {self.rank} linked up") from None
            raise
        finally:
            task.cancel()
            if self._linking is task:
                self._linking = None

    def _retire(self) -> None:
        """Close the links there are, in the background: a peer that hangs must not hold up the new ones."""
        old, self._link = self._link, None
        if old is not None:
            self._retired.append(old.path)
            _ = self._scope.start(close_path(old.path))

    def _check_generation(self, request: ConnectRequest) -> None:
        link = self._link
        if link is not None and link.source == request.source_incarnation and request.generation < link.generation:
            raise ProtocolError(
                f"connect of generation {request.generation} came late: generation {link.generation} is linked already"
            )

    async def _make_link(self, request: ConnectRequest) -> Link:
        await self.manifest()
        assert self._manifest is not None
        await self._move_home(request.landing)
        return await make_link(request, self._manifest, loader=self._loader, workers=self._workers, make_half=self._make_half)

    async def _move_home(self, landing: Landing) -> None:
        """After ``mapped`` pushes another mode begins: live parameters get memory of their own, if the loader can do that."""
        loader = self._loader.loader
        if self._leases and landing != "mapped" and isinstance(loader, Unmapping):
            await self._loader.call(loader.unmap)
            self._release(self._leases)
            self._leases = []

    @staticmethod
    def _release(leases: Iterable[Lease]) -> None:
        for lease in leases:
            lease.release()

    # the steps of a push

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Get ready to receive. Raises what the reply's ``error`` is to say."""
        self.fence.check_incarnation(request.incarnation)
        update = self._update
        if update is not None and update.push_id == request.push_id:
            if update.ready is None:
                raise BusyError(f"push {request.push_id} is being prepared on rank {self.rank} already")
            return update.ready
        link = await self._usable_link(request)
        digest = request.digests.get(str(self.rank), "")
        answer = self.fence.prepare(
            request.push_id, request.version, link.landing, incarnation=request.incarnation, digest=digest
        )
        if answer == "already":
            return self._prepare_reply("already")
        assert request.version is not None
        loop = asyncio.get_running_loop()
        timer = loop.call_later(request.timeout_s + _GRACE_S, self._expire, request.push_id)
        update = _Update(push_id=request.push_id, version=request.version, link=link, timer=timer)
        self._update = update
        try:
            await self._guard(update, self._get_ready(update, request.timeout_s), request.timeout_s)
        except BaseException as error:
            self._give_up(update, f"prepare failed: {error}")
            await self._settle()
            raise
        update.ready = self._prepare_reply("ready")
        return update.ready

    async def _usable_link(self, request: PrepareRequest) -> Link:
        try:
            async with asyncio.timeout(request.timeout_s):
                async with self._settling:
                    link = self._link
                if link is None:
                    raise ProtocolError(f"rank {self.rank} is not linked with a source; connect first")
                if self._update is None:
                    for path in [*self._retired, link.path]:
                        await path.settled()
                    self._retired.clear()
                    await self.manifest()
        except TimeoutError:
            raise BusyError(
                f"work of an earlier push has not ended on rank {self.rank} within {request.timeout_s:.3g} s"
            ) from None
        if request.plan_digest != link.plan_digest:
            raise PlanError([f"rank {self.rank} was connected with plan {link.plan_digest}, not {request.plan_digest}"])
        if self.manifest_digest != link.manifest_digest:
            raise PlanError([stale(self.rank, link.manifest_digest, self.manifest_digest)])
        return link

    async def _get_ready(self, update: _Update, timeout_s: float) -> None:
        if update.link.landing == "streamed":
            await self._switch.pause(update.link.in_flight)
        await update.link.path.begin(update.push_id, timeout_s)
        began = time.perf_counter()
        update.receiving = asyncio.create_task(
            update.link.path.receive_all(update.version, lambda: self.fence.writing(update.push_id)),
            name=f"syncline-receive-{update.push_id}",
        )

        def over(task: asyncio.Task[Received]) -> None:
            update.landing_s = time.perf_counter() - began
            _seen(task)

        update.receiving.add_done_callback(over)

    def _prepare_reply(self, status: Any) -> PrepareReply:
        return PrepareReply(
            status=status,
            incarnation=self.fence.incarnation,
            manifest_digest=self.manifest_digest,
            version=self.fence.version,
            digests={str(self.rank): self.fence.digest} if status == "already" else {},
        )

    async def vote(self, request: CompleteRequest) -> VoteReply:
        """Wait for the last byte, verify, vote. A vote of no says why."""
        try:
            self.fence.check_incarnation(request.incarnation)
            update = self._at(request.push_id, Phase.RECEIVING, request.timeout_s)
            assert update.receiving is not None
            received = await self._guard(update, asyncio.shield(update.receiving), request.timeout_s)
            update.starved_s = received.starved_s
            digest = self._verified(received, request, update)
            self.fence.vote(request.push_id, digest)
        except SynclineError as error:
            self._note(error)
            message = "\n".join(error.problems) if isinstance(error, PlanError) else str(error)
            return VoteReply(yes=False, rank=self.rank, message=message, error=type(error).__name__)
        except Exception as error:  # noqa: BLE001 - whatever stopped the receiving is told to the source
            self._note(error)
            message = f"receiving raised {error!r}\n{traceback_text(error)}"
            return VoteReply(yes=False, rank=self.rank, message=message, error="StageError")
        self.landing_bytes = update.link.path.landing_bytes
        return VoteReply(
            yes=True,
            rank=self.rank,
            digest=digest,
            buckets=received.buckets,
            landing_bytes=self.landing_bytes,
            landing_s=update.landing_s,
            starved_s=received.starved_s,
        )

    def _verified(self, received: Received, request: CompleteRequest, update: _Update) -> str:
        if received.digest is None:
            return ""
        mine = f"{received.digest:032x}"
        sent = request.digests.get(str(self.rank))
        if sent is None:
            raise ProtocolError(f"digests are on, and the source sent none for rank {self.rank}")
        if sent != mine:
            raise DigestMismatch(
                f"rank {self.rank}, version {update.version}: {received.buckets} buckets landed with digest {mine}, the "
                f"source sent {sent}"
            )
        return mine

    async def order(self, order: RankOrder) -> Ack:
        """Carry out one order of the leader. Raises what the leader has to be told."""
        self.fence.check_incarnation(order.incarnation)
        match order.order:
            case "pause":
                update = self._at(order.push_id, Phase.VOTED, order.timeout_s)
                await self._guard(update, self._pause(order), order.timeout_s)
            case "commit":
                update = self._at(order.push_id, Phase.PAUSED, order.timeout_s)
                await self._commit(update, order)
            case "resume":
                await self._resume(self._at(order.push_id, Phase.APPLIED, order.timeout_s))
            case "abort":
                if self.fence.abort(order.push_id, order.reason):
                    self._mark_over(order.reason)
                await self._settle()
            case "fence":
                self.fence.fence(order.reason)
                self._mark_over(order.reason)
                await self._settle()
        return Ack(serving=self.serving)

    async def _pause(self, order: RankOrder) -> None:
        await self._switch.pause(order.in_flight)
        self.fence.paused(order.push_id)

    async def _commit(self, update: _Update, order: RankOrder) -> None:
        self.fence.committing(update.push_id)
        began = time.perf_counter()
        try:
            await self._guard(update, self._make_live(update, order), order.timeout_s)
            self.fence.applied(update.push_id)
            update.commit_s = time.perf_counter() - began
        except BaseException as error:
            self._note(error)
            if self.fence.push_id == update.push_id:
                self.fence.fence(f"rank {self.rank} failed in the commit of version {update.version}: {error}")
                self._mark_over(str(error))
            _ = self._scope.start(self._settle())
            raise

    async def _make_live(self, update: _Update, order: RankOrder) -> None:
        path = update.link.path
        try:
            await path.commit(update.version)
        finally:
            lease = path.take_lease()
            if lease is not None:
                self._leases.append(lease)
        if order.flush_cache:
            await self._switch.flush(update.version)
        if self._on_commit is not None:
            hooked = await self._loader.call(self._on_commit, update.version)
            if inspect.isawaitable(hooked):
                await hooked
        await self._loaded()

    async def _loaded(self) -> None:
        """Wait until the GPU has done what the loader has launched: a pass on any stream may read the weights from then on."""
        behind = await self._loader.call(self._marks)
        if behind is not None:
            await Watch().until(behind)

    async def _resume(self, update: _Update) -> None:
        self.fence.resumed(update.push_id)
        self._update = None
        update.timer.cancel()
        async with self._settling:
            if self.fence.serving_version == update.version:
                await self._switch.resume(update.version)
        self.pushes += 1
        self._tell(update, ok=True)
        if update.link.landing == "mapped":  # whatever live parameters pointed at before is nobody's now
            self._release(self._leases[:-1])
            self._leases = self._leases[-1:]
        await end_path(update.link.path, committed=True)

    # giving up

    def abandon(self, reason: str) -> Coroutine[Any, Any, None]:
        """The leader went away: decide alone. The coroutine waits until forward passes go on or are refused."""
        self.fence.lost(reason)
        self._mark_over(reason)
        return self._settle()

    def _expire(self, push_id: str) -> None:
        reason = f"push {push_id} did not end on rank {self.rank} before its deadline: source or leader went away"
        self.fence.timeout(push_id, reason)
        self._mark_over(reason)
        _ = self._scope.start(self._settle())

    def _give_up(self, update: _Update, reason: str) -> None:
        if self.fence.push_id == update.push_id:
            self.fence.lost(reason)
        self._mark_over(reason)

    def _mark_over(self, reason: str) -> None:
        """End whatever waits for the push under way, if the fence says that it is over."""
        update = self._update
        if update is not None and self.fence.push_id != update.push_id:
            update.reason = update.reason or reason
            update.timer.cancel()
            update.over.set()

    async def _settle(self) -> None:
        """After the fence has ended a push, or fenced: bring forward passes and data path in line with it."""
        async with self._settling:
            update = self._update
            if update is not None and update.over.is_set():
                await _cancel(*update.work)  # a pause that is under way must not come after the resume
            else:
                update = None
            if self.fence.push_id is None:
                await self._align()
            if update is not None:
                self._update = None
                await self._drop(update)

    async def _align(self) -> None:
        serving = self.fence.serving_version
        if serving is None:
            await self._switch.fence(self.fence.reason)
        elif self._switch.touched:
            await self._switch.resume(serving)

    async def _drop(self, update: _Update) -> None:
        """Threads that still work for the push are not waited for here: the next one does (`_usable_link`)."""
        if update.receiving is not None:
            await _cancel(update.receiving)
        self._tell(update, ok=False)
        await end_path(update.link.path, committed=False)

    def _note(self, error: BaseException) -> None:
        """Of the update under way: what it fails with."""
        if self._update is not None:
            self._update.error = self._update.error or type(error).__name__

    def _tell(self, update: _Update, *, ok: bool) -> None:
        if self._on_update is None:
            return
        end = UpdateEnd(
            rank=self.rank, version=update.version, ok=ok, error="" if ok else update.error or "PushAborted",
            began_ns=update.began_ns, seconds=time.perf_counter() - update.began,
            bytes=update.link.path.nbytes if ok else 0, landing_s=update.landing_s, starved_s=update.starved_s,
            commit_s=update.commit_s, landing_bytes=self.landing_bytes,
        )  # fmt: skip
        self._on_update(end)

    # waiting

    def _at(self, push_id: str, phase: Phase, timeout_s: float) -> _Update:
        """The push under way, if it is this one and in this phase. Puts its deadline off to ``timeout_s`` from now."""
        self.fence.require(push_id, phase)
        update = self._update
        assert update is not None
        update.timer.cancel()
        loop = asyncio.get_running_loop()
        update.timer = loop.call_later(timeout_s + _GRACE_S, self._expire, push_id)
        return update

    async def _guard(self, update: _Update, work: Awaitable[T], timeout_s: float) -> T:
        """Wait for ``work``, but no longer than the push lasts and its deadline allows."""
        task = asyncio.ensure_future(work)
        over = asyncio.create_task(update.over.wait())
        update.work.add(task)
        try:
            await asyncio.wait({task, over}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if update.over.is_set():
                raise PushAborted(f"rank {self.rank}: {update.reason}")
            raise PushTimeout(f"rank {self.rank} was not done within {timeout_s:.3g} s")
        finally:
            await _cancel(task, over)
            update.work.discard(task)

    async def close(self) -> None:
        """End everything in bounded time. Live parameters stay valid."""
        if self._update is not None:
            settling = self._scope.start(self.abandon("the receiver was closed"))
            with contextlib.suppress(TimeoutError):  # what the engine or a hook does may wait for this
                async with asyncio.timeout(_SETTLE_S):
                    await settling
        if self._linking is not None:
            await _cancel(self._linking)
        link, self._link = self._link, None
        if link is not None:
            self._retired.append(link.path)
        self._leases = []  # not released: live parameters may lie there for as long as the process serves them
        await in_turn(
            # those of before, too: what had begun to close one may have been cut off
            *(partial(close_path, path) for path in self._retired),
            lambda: call_in_thread(self._stop_threads, name="syncline-stop"),
        )

    def _stop_threads(self) -> None:
        if not (self._loader.close(_STOP_S) and self._workers.close(_STOP_S)):
            log.warning("rank %d: a thread is still busy with an earlier push", self.rank)


async def _cancel(*work: asyncio.Future[Any]) -> None:
    for future in work:
        future.cancel()
    await asyncio.gather(*work, return_exceptions=True)


def _seen(task: asyncio.Task[Received]) -> None:
    """Its error is told with the vote; until then it is nobody's surprise."""
    if not task.cancelled():
        task.exception()
