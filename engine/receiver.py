"""`Receiver`: what an inference engine's process holds. One on every rank of a target."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from syncline.stages.closing import Closing, called_off, in_turn
from syncline.stages.completions import TaskScope
from syncline.stages.device_marks import DeviceMarks
from syncline.stages.workers import call_in_thread

from .address import Address
from .control_server import ControlServer
from .errors import ClosedError, ConfigError, ProtocolError
from .gate import Gate
from .host import host_id
from .leader import Leader
from .linking import HalfFactory, transports
from .loader import Loader, Serving
from .member import Member
from .messages import (
    AbortRequest,
    Ack,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    JoinRequest,
    ManifestReply,
    PrepareReply,
    PrepareRequest,
    RankOrder,
    State,
    Status,
    VoteReply,
)
from .observing import Observer, Observers, UpdateEnd
from .rank import CommitHook, Rank

_CLOSE_S = 5.0
_CLOSED = "this receiver is closed; make a new one"


class Receiver:
    """Takes pushes into one rank of a target, and says which version may be served.

    Runs on the loop that calls `start`; whatever blocks runs on threads of its own. Starts ``FENCED``, unless
    ``initial_version`` says what the weights are. Forward passes go through `gate` (``with receiver.gate.forward() as
    version: …``), or the engine implements `Serving` itself.

    Args:
        loader: the weights of this rank.
        listen: ``unix:/path`` (directory made 0700, socket 0600) or ``tcp://host:port``; port 0 takes a free one.
        rank, world_size: place in the target.
        leader: control address of rank 0; None on rank 0 itself. Sources talk to the leader only.
        secret: shared by sources and all ranks of the target. Needed beyond loopback.
        serving: the engine's own pause and resume; None: `gate` alone. May also implement `Fencing` and `Flushing`.
        initial_version: version of the weights at the start, which may then be served.
        initial_digest: digest of their content. Empty: unknown, and a push of that version is taken for the same content; text
            that is no digest makes such a push a `VersionConflict`.
        workers: threads that copy and digest.
        advertise: host under which sources and other ranks reach this rank, where ``listen`` does not say it (0.0.0.0).
        bind_host: address that this rank's own data connections (gloo) bind to; None takes that of ``listen``.
        on_commit: called with the version under pause, once per version on every rank, after all content is in place: drop
            prefix caches here. A plain function runs on the loader's thread; what it returns is awaited if it can be. Neither
            it nor ``serving`` may await `close`, which waits for them (and goes on without them after some seconds).
        heartbeat_s, patience_s: ranks of a target look after each other so often, and give each other up after so long
            without a sign of life, in seconds.
        observers: are told what happens on this rank, such as `PrometheusMetrics`. They cannot touch a push.
        half_factory: makes receiving halves of transports; None takes syncline's own.

    Raises:
        ConfigError: lists everything that is wrong.
    """

    def __init__(
        self,
        loader: Loader,
        listen: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        leader: str | None = None,
        secret: str | None = None,
        serving: Serving | None = None,
        initial_version: int | None = None,
        initial_digest: str = "",
        workers: int = 2,
        advertise: str | None = None,
        bind_host: str | None = None,
        on_commit: CommitHook | None = None,
        heartbeat_s: float = 2.0,
        patience_s: float = 10.0,
        half_factory: HalfFactory | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        problems = _place_problems(rank, world_size, leader)
        problems += _knob_problems(
            initial_version=initial_version, workers=workers, heartbeat_s=heartbeat_s, patience_s=patience_s
        )
        try:
            self._server = ControlServer(self, listen, secret=secret, advertise=advertise)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        self._marks = DeviceMarks()
        self.gate = Gate(version=initial_version, mark=self._marks)
        if not isinstance(loader, Loader):
            raise ConfigError([f"loader is a {type(loader).__name__}; wrap it: ModuleLoader(model)"])
        self._loader = loader
        self._serving = serving
        self._place = (rank, world_size)
        self._leader_address = leader
        self._secret = secret
        self._initial_version = initial_version
        self._initial_digest = initial_digest
        self._worker_count = workers
        self._on_commit = on_commit
        self._heart = {"heartbeat_s": heartbeat_s, "patience_s": patience_s}
        where = Address.parse(listen)
        self._make_half = half_factory or transports(bind_host or where.host or "127.0.0.1")
        self._scope: TaskScope | None = None
        self._rank: Rank | None = None
        self._leader: Leader | None = None
        self._member: Member | None = None
        self._joining: asyncio.Task[None] | None = None
        self._observers = Observers(observers=tuple(observers))
        self._starting: asyncio.Task[None] | None = None
        self._closing = Closing(self._close, "syncline-receiver-close")

    async def start(self) -> None:
        """Listen. On a rank that is not the leader, also begin to look for the leader; `joined` waits until it is found."""
        if self._closing.begun or self._starting is not None:
            raise ClosedError(_CLOSED if self._closing.begun else "this receiver runs already")
        self._closing.here()
        self._starting = asyncio.create_task(self._start(), name="syncline-receiver-start")
        try:
            await self._closing.unless(self._starting, ClosedError("this receiver was closed while it started; make a new one"))
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        self._scope = TaskScope()
        rank, world_size = self._place
        self._rank = Rank(
            loader=self._loader,
            rank=rank,
            world_size=world_size,
            host=await asyncio.to_thread(host_id),
            gate=self.gate,
            marks=self._marks,
            serving=self._serving,
            initial_version=self._initial_version,
            initial_digest=self._initial_digest,
            workers=self._worker_count,
            make_half=self._make_half,
            on_commit=self._on_commit,
            scope=self._scope,
            on_update=self._tell_update if self._observers else None,
        )
        await self._rank.start()
        await self._server.start()
        self._start_place(self._rank, self._scope)
        self._observers.tell("receiver_started", lambda: self)

    def _tell_update(self, update: UpdateEnd) -> None:
        self._observers.tell("update_ended", lambda: replace(update, address=self.address))

    def _start_place(self, rank: Rank, scope: TaskScope) -> None:
        if self._leader_address is None:
            self._leader = Leader(
                rank,
                world_size=rank.world_size,
                scope=scope,
                secret=self._secret,
                drop_watches=self._server.drop_watches,
                watched=self._server.watched,
                **self._heart,
            )
            self._leader.start()
            return
        self._member = Member(
            rank, leader=self._leader_address, address=self._server.address, secret=self._secret, **self._heart
        )
        self._joining = asyncio.create_task(self._member.run(), name=f"syncline-rank-{rank.rank}")

    async def joined(self) -> None:
        """On a rank that is not the leader: returns once the leader has accepted it. On the leader: at once.

        Raises:
            ClosedError: it does not run, or was closed meanwhile.
        """
        self._running()
        if self._member is None or self._joining is None:
            return
        joined = asyncio.create_task(self._member.joined.wait())
        try:
            await asyncio.wait({joined, self._joining}, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                if not self._joining.cancelled():
                    self._joining.result()
                raise ClosedError(_CLOSED)
        finally:
            joined.cancel()

    @property
    def address(self) -> str:
        """Control address, with the real port."""
        return self._server.address

    @property
    def state(self) -> State:
        """``COMMITTED``, ``UPDATING`` or ``FENCED``; on the leader that of the whole target."""
        if self._rank is None:
            return "FENCED"
        return self._rank.fence.state if self._leader is None or self._closing.begun else self._leader.state

    @property
    def version(self) -> int | None:
        """The version committed last. It is served only as `state` says: not while ``FENCED``."""
        return self._initial_version if self._rank is None else self._rank.fence.version

    @property
    def serving_version(self) -> int | None:
        """The version that forward passes may read now; None: none may run."""
        return None if self._rank is None else self._rank.serving

    async def status(self) -> Status:
        """As ``GET /status`` answers."""
        return await self.on_status()

    async def close(self) -> None:
        """Stop listening and end everything, in bounded time. A push under way is given up as its landing mode says.

        Live parameters stay valid, and are served or not as before. Once begun it is done, also where its caller is cancelled
        meanwhile. If a part of it fails the rest is closed all the same, and then that is raised.
        """
        await self._closing()

    async def _close(self) -> None:
        await in_turn(
            lambda: called_off(self._starting, _CLOSE_S),
            lambda: called_off(self._joining, _CLOSE_S),
            self._end_place,
            self._server.close,
            self._end_rank,
            self._end_observers,
        )

    async def _end_place(self) -> None:
        for place in (self._member, self._leader):
            if place is not None:
                await place.close()

    async def _end_rank(self) -> None:
        if self._rank is not None:
            await self._rank.close()
        if self._scope is not None:
            await self._scope.join(_CLOSE_S)

    async def _end_observers(self) -> None:
        if self._observers:
            await call_in_thread(self._observers.close, name="syncline-observers-close")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # what the control server asks (see `control_server.Service`)

    async def on_status(self) -> Status:
        rank = self._running()
        if self._leader is not None:
            return await self._leader.status()
        await rank.refresh(1.0)
        fence = rank.fence
        return Status(
            state=fence.state,
            version=fence.version,
            digest=fence.digest,
            incarnation=fence.incarnation,
            rank=rank.rank,
            world_size=rank.world_size,
            ready=self._member is not None and self._member.joined.is_set(),
            manifest_digest=rank.manifest_digest,
            landing_bytes=rank.landing_bytes,
            pushes=rank.pushes,
            message=fence.reason if fence.state == "FENCED" else "",
        )

    async def on_manifest(self) -> ManifestReply:
        rank = self._running()
        if self._leader is not None:
            return await self._leader.manifest()
        manifest = await rank.manifest()
        return ManifestReply(manifests=[manifest], incarnation=rank.fence.incarnation, manifest_digest=rank.manifest_digest)

    async def on_connect(self, request: ConnectRequest) -> Ack:
        rank = self._running()
        if self._leader is not None:
            return await self._leader.connect(request)
        await rank.connect(request)
        return Ack(serving=rank.serving)

    async def on_prepare(self, request: PrepareRequest) -> PrepareReply:
        rank = self._running()
        return await (rank if self._leader is None else self._leader).prepare(request)

    async def on_complete(self, request: CompleteRequest) -> CompleteReply:
        return await self._as_leader().complete(request)

    async def on_abort(self, request: AbortRequest) -> Ack:
        return await self._as_leader().abort(request)

    async def on_join(self, request: JoinRequest) -> Ack:
        return await self._as_leader().join(request)

    async def on_vote(self, request: CompleteRequest) -> VoteReply:
        return await self._as_member().vote(request)

    async def on_order(self, request: RankOrder) -> Ack:
        return await self._as_member().order(request)

    def on_unwatched(self, peer: str) -> None:
        if self._leader is not None:
            self._leader.unwatched(peer)

    def _running(self) -> Rank:
        if self._rank is None or self._closing.begun:
            raise ClosedError("this receiver does not run; call start() first")
        return self._rank

    def _as_leader(self) -> Leader:
        self._running()
        if self._leader is None:
            raise ProtocolError(f"rank {self._place[0]} is not the leader of its target; ask {self._leader_address}")
        return self._leader

    def _as_member(self) -> Rank:
        rank = self._running()
        if self._leader is not None:
            raise ProtocolError("the leader of a target takes no orders")
        return rank


def _place_problems(rank: int, world_size: int, leader: str | None) -> list[str]:
    problems = []
    if world_size < 1 or not 0 <= rank < world_size:
        problems.append(f"rank {rank} of world_size {world_size}: ranks go from 0 to world_size - 1")
    if (rank == 0) != (leader is None):
        problems.append("leader is the control address of rank 0: set it on every other rank, and only there")
    if leader is not None:
        try:
            Address.parse(leader)
        except ConfigError as error:
            problems += error.problems
    return problems


def _knob_problems(*, initial_version: int | None, workers: int, heartbeat_s: float, patience_s: float) -> list[str]:
    problems = []
    if initial_version is not None and initial_version < 0:
        problems.append(f"initial_version is {initial_version}; versions are whole numbers from 0")
    if workers < 1:
        problems.append(f"workers is {workers}; it must be at least 1")
    for name, value in (("heartbeat_s", heartbeat_s), ("patience_s", patience_s)):
        if not 0 < value < float("inf"):
            problems.append(f"{name} is {value!r}; it must be a finite number of seconds above 0")
    return problems
