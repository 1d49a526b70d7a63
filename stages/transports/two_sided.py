"""What two-sided transports share: each source rank has one communicator with the ranks of each target that it sends to.

Ranks of a target that pass buckets on to each other have another one, for each source rank: see `relay`.

Bytes only, point to point only, the task's index as tag. A bucket is one message, or several: large segments travel alone
(`syncline.stages.frames`), out of the trainer's memory and, with ``streamed`` landing, into live parameters, where both are
contiguous and of one type. A receiver posts its receives in plan order: two buckets at a time into buffers of its own or
live memory (``streamed``), or a few ahead straight into private landing memory (``staged``); a send waits for its receive.
``mapped`` is not possible. After any error, and after a push that was not committed, the communicator with that
target is discarded on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec
import torch

from syncline.scheduler.programs import ReceiverId, SourceProgram, SourceTask

from ..communicator import Rendezvous, unique_name
from ..completions import Completion, Signal
from ..errors import TransportError
from ..frames import Frame, FrameTable
from ..workers import call_in_thread
from .base import LandingMode, Loan, OnLost
from .linked import Linked, Network


class TwoSidedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one target need to link up: rank 0 of the communicator is the source rank, ``members`` follow.

    ``relays`` are those of them that share the other communicator, in order; none if nothing is passed on.
    """

    kind: str
    endpoint: str
    name: str
    mode: LandingMode
    members: list[int]
    relays: list[int] = []


class _TargetLink:
    """The communicator with one target."""

    def __init__(self, target: int, ranks: Sequence[int]) -> None:
        self.target = target
        self.ranks = list(ranks)
        self.name = unique_name(f"target-{target}")
        self.communicator: Linked | None = None
        self.dropped = asyncio.Event()

    @property
    def receivers(self) -> list[ReceiverId]:
        return [ReceiverId(self.target, rank) for rank in self.ranks]

    @property
    def usable(self) -> bool:
        return self.communicator is not None and self.communicator.usable


class TwoSidedSender:
    """Implements `Sender`.

    Args:
        network: what communicators are made of.
        landing: landing mode.
        bind_host: address that the rendezvous binds to.
        on_lost: see `OnLost`.
        program: what this rank sends; says which receivers get it from each other. None: none do.
    """

    in_place = False
    lends = True

    def __init__(
        self, *, network: Network, landing: LandingMode, bind_host: str, on_lost: OnLost, rendezvous_timeout_s: float = 60.0,
        program: SourceProgram | None = None,
    ) -> None:  # fmt: skip
        if landing == "mapped":
            raise TransportError(f"landing 'mapped' needs shared memory; {network.kind} has none")
        self.kind = network.kind
        self._network = network
        self._mode: LandingMode = landing
        self._bind_host = bind_host
        self._on_lost = on_lost
        self._timeout_s = rendezvous_timeout_s
        self._relays = relay_ranks(program) if program is not None else {}
        self._rendezvous: Rendezvous | None = None
        self._links: dict[int, _TargetLink] = {}
        self._closing: set[Signal[None]] = set()
        self._forsaken: set[asyncio.Future[Linked]] = set()
        self._closed = False
        self._frames = FrameTable()

    @property
    def linked(self) -> frozenset[ReceiverId]:
        return frozenset(receiver for link in self._links.values() if link.usable for receiver in link.receivers)

    @property
    def landing_bytes(self) -> int:
        return 0

    async def offer(self, receivers: Collection[ReceiverId]) -> Mapping[int, bytes]:
        if self._closed:
            raise TransportError("this sender is closed")
        self.drop(receivers)
        if self._rendezvous is None:
            host = partial(Rendezvous.host, self._bind_host, timeout_s=self._timeout_s)
            self._rendezvous = await call_in_thread(host, name="syncline-rendezvous")
        offers = {}
        for target in sorted({receiver.target for receiver in receivers}):
            link = _TargetLink(target, sorted(r.rank for r in receivers if r.target == target))
            self._links[target] = link
            offer = TwoSidedOffer(
                kind=self.kind, endpoint=self._rendezvous.endpoint, name=link.name, mode=self._mode, members=link.ranks,
                relays=self._relays.get(target, []),
            )  # fmt: skip
            offers[target] = msgspec.msgpack.encode(offer)
        return offers

    async def link(self, receivers: Collection[ReceiverId], *, timeout_s: float) -> Mapping[ReceiverId, TransportError]:
        targets = sorted({receiver.target for receiver in receivers})
        errors = await asyncio.gather(*(self._meet(target, timeout_s) for target in targets))
        failed = {target: error for target, error in zip(targets, errors, strict=True) if error is not None}
        self.drop([receiver for receiver in receivers if receiver.target in failed])
        return {receiver: failed[receiver.target] for receiver in receivers if receiver.target in failed}

    async def begin(
        self, push_id: str, *, timeout_s: float, lease_timeout_s: float = 5.0
    ) -> Mapping[ReceiverId, TransportError]:
        for link in self._links.values():
            if link.communicator is not None:
                link.communicator.set_deadline(timeout_s)
        return {}

    def claim(self, task: SourceTask) -> Signal[Loan]:
        raise TransportError(f"task {task.index}: {self.kind} sends from any memory; there is none to claim")

    def send(
        self,
        task: SourceTask,
        bucket: torch.Tensor,
        receivers: Collection[ReceiverId],
        lent: Mapping[int, torch.Tensor] | None = None,
    ) -> Mapping[ReceiverId, Completion | None]:
        parts = parts_of(self._frames.of(task), bucket, lent or {})
        return {receiver: self._send_one(task, parts, receiver) for receiver in receivers}

    def drop(self, receivers: Collection[ReceiverId]) -> None:
        for target in {receiver.target for receiver in receivers}:
            link = self._links.pop(target, None)
            if link is not None:
                link.dropped.set()
                if link.communicator is not None:
                    self._discard(link.communicator)

    async def end(self, committed: Collection[ReceiverId]) -> None:
        done = set(committed)
        self.drop([receiver for link in self._links.values() for receiver in link.receivers if receiver not in done])

    async def close(self, timeout_s: float = 5.0) -> None:
        self._closed = True
        self.drop([receiver for link in self._links.values() for receiver in link.receivers])
        try:
            async with asyncio.timeout(timeout_s):
                for closing in list(self._closing):
                    await closing
        except TimeoutError:
            pass
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    async def _meet(self, target: int, timeout_s: float) -> TransportError | None:
        link = self._links.get(target)
        if link is None or self._rendezvous is None:
            return TransportError(f"target {target} was not offered a link")
        making = asyncio.ensure_future(
            self._network.meet(
                self._rendezvous,
                name=link.name,
                label=f"target-{target}",
                rank=0,
                members=["this rank", *(f"rank {member} of target {target}" for member in link.ranks)],
                timeout_s=timeout_s,
                one_way=True,
            )
        )
        dropped = asyncio.create_task(link.dropped.wait())
        wanted = False
        try:
            await asyncio.wait({making, dropped}, return_when=asyncio.FIRST_COMPLETED)
            wanted = not link.dropped.is_set()
        finally:
            dropped.cancel()
            if not wanted:
                self._forsaken.add(making)
                making.add_done_callback(self._forsake)
                making.cancel()
        if not wanted:
            return TransportError(f"target {target} was dropped while it linked up")
        try:
            link.communicator = making.result()
        except TransportError as error:
            return TransportError(f"target {target}: {error}")
        return None

    def _forsake(self, making: asyncio.Future[Linked]) -> None:
        self._forsaken.discard(making)
        if not making.cancelled() and making.exception() is None:
            self._discard(making.result())

    def _discard(self, communicator: Linked) -> None:
        closing = communicator.abort()
        self._closing.add(closing)
        closing.subscribe(lambda: self._closing.discard(closing))

    def _send_one(self, task: SourceTask, parts: Sequence[torch.Tensor], receiver: ReceiverId) -> Signal[None] | None:
        link = self._links.get(receiver.target)
        if link is None or link.communicator is None or receiver.rank not in link.ranks:
            signal: Signal[None] = Signal()
            signal.fail(TransportError(f"receiver {receiver} is not linked any more"))
            return signal
        if not parts:
            return None
        sent = link.communicator.send_all(parts, 1 + link.ranks.index(receiver.rank), task.index)
        sent.subscribe(lambda: self._sent(link, receiver, sent))
        return sent

    def _sent(self, link: _TargetLink, receiver: ReceiverId, sent: Signal[None]) -> None:
        if sent.error is not None and self._links.get(link.target) is link:
            self.drop([receiver])
            for other in link.receivers:
                self._on_lost(other, TransportError(f"target {link.target}: {sent.error}"))


def parts_of(cut: Sequence[Frame], bucket: torch.Tensor, elsewhere: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """The memory of each message: in the bucket, or elsewhere."""
    return [elsewhere[f.start] if f.start in elsewhere else bucket[f.start : f.start + f.nbytes] for f in cut]


def relay_ranks(program: SourceProgram) -> dict[int, list[int]]:
    """By target, the ranks that get something from this source rank that some of them pass on to others."""
    found: dict[int, set[int]] = {}
    for task in program.tasks:
        for target in {receiver.target for receiver in task.relayed}:
            found.setdefault(target, set()).update(r.rank for r in task.receivers if r.target == target)
    return {target: sorted(ranks) for target, ranks in found.items()}
