"""Stage ``send``: a bucket goes to all its receivers, each over its own transport.

The loss of one receiver does not fail a task. It is reported, and the task waits until the engine has dropped that receiver
(or its whole target) on every rank: so a send never counts as done for a receiver that may still be part of the push.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from syncline.scheduler.programs import ReceiverId, SourceTask

from .completions import Completion, Signal
from .errors import TransportError
from .task_memory import TaskMemory
from .transports.base import Sender


class SendStage:
    """Runs on every source rank, for the tasks that it owns.

    Args:
        tasks: what this rank does, by task.
        memory: where the buckets are.
        routes: which sender serves each receiver.
        on_receiver_error: called on the loop with the first error of each receiver in a push.
        lent: for tasks whose large segments are not in the bucket, those segments' bytes by offset (`Assembly.lent`).

    Attributes:
        sent_bytes: bytes that have gone out in this push, over all receivers.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[int, SourceTask],
        memory: TaskMemory,
        routes: Mapping[ReceiverId, Sender],
        on_receiver_error: Callable[[ReceiverId, TransportError], None],
        lent: Mapping[int, Mapping[int, torch.Tensor]] | None = None,
    ) -> None:
        self._tasks = tasks
        self._lent = lent or {}
        self._memory = memory
        self._routes = dict(routes)
        self._report = on_receiver_error
        self._push = -1
        self._live: set[ReceiverId] = set()
        self._failed: set[ReceiverId] = set()
        self._parked: defaultdict[ReceiverId, list[_Sending]] = defaultdict(list)
        self._waits: defaultdict[ReceiverId, int] = defaultdict(int)
        self._progress: dict[ReceiverId, float] = {}
        self._unsent: deque[int] = deque()
        self._sendings: dict[int, _Sending] = {}
        self.sent_bytes = 0

    def begin(self, push: int, receivers: Collection[ReceiverId]) -> None:
        """Tasks started from now on belong to ``push`` and go to ``receivers`` only."""
        self.end()
        self._push = push
        self._live = set(receivers)
        self._unsent = deque(sorted(index for index, task in self._tasks.items() if task.receivers))
        self._sendings = {}
        self.sent_bytes = 0

    def start(self, task: int) -> Completion | None:
        passed_on = self._tasks[task].relayed  # by others of their target, with which they are lost
        receivers = [r for r in self._tasks[task].receivers if r in self._live and r not in passed_on]
        if not receivers:
            return None
        sending = self._sendings[task] = _Sending(self, self._tasks[task].nbytes, receivers)
        for receiver, completion in self._send(self._tasks[task], receivers).items():
            sending.follow(receiver, completion)
        return sending.completion

    def head(self) -> tuple[int, dict[ReceiverId, float]] | None:
        """The first task of this rank that has not gone to all its receivers, and which of them it waits for, since when.

        The receivers are missing while the task is not being sent yet. None: everything has gone out.
        """
        while self._unsent:
            task = self._unsent[0]
            sending = self._sendings.get(task)
            if sending is not None and sending.pending:
                return task, {receiver: self._progress[receiver] for receiver in sending.pending}
            if sending is None and not self._live.isdisjoint(self._tasks[task].receivers):
                return task, {}
            self._unsent.popleft()
        return None

    def drop(self, receivers: Collection[ReceiverId]) -> None:
        """Send nothing more to ``receivers``, and end what waits for them. Idempotent."""
        for receiver in receivers:
            self._live.discard(receiver)
            sender = self._routes.get(receiver)
            if sender is not None:
                sender.drop([receiver])
            for sending in self._parked.pop(receiver, ()):
                sending.ended(receiver)

    def end(self) -> None:
        """The push is over: nothing waits for a receiver to be dropped any more."""
        parked, self._parked = self._parked, defaultdict(list)
        self._live, self._failed = set(), set()
        self._unsent.clear()
        self._sendings = {}
        for receiver, sendings in parked.items():
            for sending in sendings:
                sending.ended(receiver)

    def lost(self, receiver: ReceiverId, error: TransportError) -> None:
        """Report a receiver's error once a push (also for senders' ``on_lost``)."""
        if receiver in self._live and receiver not in self._failed:
            self._failed.add(receiver)
            self._report(receiver, error)

    def _send(
        self, task: SourceTask, receivers: Collection[ReceiverId]
    ) -> dict[ReceiverId, Completion | TransportError | None]:
        bucket = self._memory.bucket((self._push, task.index))
        by_sender: defaultdict[int, list[ReceiverId]] = defaultdict(list)
        outcome: dict[ReceiverId, Completion | TransportError | None] = {}
        for receiver in receivers:
            if receiver in self._routes:
                by_sender[id(self._routes[receiver])].append(receiver)
            else:
                outcome[receiver] = TransportError(f"receiver {receiver} has no transport")
        lent = self._lent.get(task.index, {})
        for group in by_sender.values():
            outcome |= self._routes[group[0]].send(task, bucket, group, lent)
        return outcome

    def waits(self, receiver: ReceiverId, count: int = 1) -> None:
        """A send waits for ``receiver`` from now on (or, with -1, does not any more)."""
        if not self._waits[receiver]:
            self._progress[receiver] = time.monotonic()
        self._waits[receiver] += count

    def took(self, receiver: ReceiverId, nbytes: int) -> None:
        """``receiver`` has taken a bucket."""
        self._progress[receiver] = time.monotonic()
        self.sent_bytes += nbytes

    def park(self, receiver: ReceiverId, sending: _Sending, error: TransportError) -> None:
        """``sending`` waits until ``receiver``, which failed, is dropped."""
        if receiver not in self._live:
            sending.ended(receiver)
            return
        self._parked[receiver].append(sending)
        self.lost(receiver, error)


class _Sending:
    """One task under way to its receivers."""

    def __init__(self, stage: SendStage, nbytes: int, receivers: Iterable[ReceiverId]) -> None:
        self.pending = set(receivers)
        self._stage = stage
        self._nbytes = nbytes
        self._signal: Signal[None] | None = None

    @property
    def completion(self) -> Signal[None] | None:
        """None if nothing is left to wait for."""
        if self.pending and self._signal is None:
            self._signal = Signal()
        return self._signal

    def follow(self, receiver: ReceiverId, completion: Completion | TransportError | None) -> None:
        self._stage.waits(receiver)
        if completion is None:
            self._taken(receiver)
        elif isinstance(completion, TransportError):
            self._stage.park(receiver, self, completion)
        elif not completion.subscribe(lambda: self._settle(receiver, completion)):
            raise ValueError(f"{completion!r} has to be polled; senders return signalled completions only")

    def ended(self, receiver: ReceiverId) -> None:
        """``receiver`` is done with, well or dropped."""
        self._stage.waits(receiver, -1)
        self.pending.discard(receiver)
        if not self.pending and self._signal is not None:
            self._signal.set()

    def _settle(self, receiver: ReceiverId, completion: Completion) -> None:
        try:
            completion.poll()
        except TransportError as error:
            self._stage.park(receiver, self, error)
        else:
            self._taken(receiver)

    def _taken(self, receiver: ReceiverId) -> None:
        self._stage.took(receiver, self._nbytes)
        self.ended(receiver)
