"""Buckets that ranks of a target pass on to each other: see `syncline.scheduler.relays` for which.

For each source rank the ranks that take part share a communicator of their own, beside the one with that source rank. What
goes over it is started in the plan's order on every rank: NCCL matches messages by their order, and two ranks that each wait
for the other's would wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from syncline.scheduler.programs import TargetTask

from ..completions import Signal, all_of
from ..errors import TransportError
from .linked import Linked


class Relay:
    """One rank's part in passing on the buckets of one source rank.

    Args:
        communicator: among the ranks that take part.
        members: those ranks, in the communicator's order.
    """

    def __init__(self, communicator: Linked, members: Sequence[int]) -> None:
        self.communicator = communicator
        self._members = list(members)
        self._turns: deque[int] = deque()
        self._ready: dict[int, Callable[[], None]] = {}
        self._waiting: set[Signal[None]] = set()

    def begin(self, tasks: Iterable[TargetTask], *, timeout_s: float) -> None:
        """A push begins. ``tasks``: those that this rank gets from, or passes on to, another one, in plan order."""
        self.communicator.set_deadline(timeout_s)
        self._turns = deque(task.index for task in tasks)
        self._ready = {}

    def recv(self, task: TargetTask, parts: Sequence[torch.Tensor]) -> Signal[None]:
        """Receive the messages of a task from the rank that passes it on."""
        assert task.via is not None, "it comes from its owner"
        peer = self._members.index(task.via)
        return self._in_turn(task, lambda: self.communicator.recv_all(parts, peer, task.index))

    def send(self, task: TargetTask, parts: Sequence[torch.Tensor]) -> Signal[None]:
        """Pass the messages of a task on. Their memory must not change until the signal has ended."""
        peers = [self._members.index(rank) for rank in task.onward]
        return self._in_turn(task, lambda: all_of([self.communicator.send_all(parts, peer, task.index) for peer in peers]))

    def fail(self, error: TransportError) -> None:
        """What has not been started will not be."""
        self._turns.clear()
        self._ready = {}
        for signal in list(self._waiting):
            signal.fail(error)
        self._waiting.clear()

    def _in_turn(self, task: TargetTask, start: Callable[[], Signal[None]]) -> Signal[None]:
        signal: Signal[None] = Signal()
        if task.index not in self._turns:
            signal.fail(TransportError(f"task {task.index} is not one that is passed on in this push"))
            return signal
        self._waiting.add(signal)
        self._ready[task.index] = lambda: self._start(signal, start)
        while self._turns and self._turns[0] in self._ready:
            self._ready.pop(self._turns.popleft())()
        return signal

    def _start(self, signal: Signal[None], start: Callable[[], Signal[None]]) -> None:
        self._waiting.discard(signal)
        under_way = start()

        def ended() -> None:
            if under_way.error is None:
                signal.set()
            else:
                signal.fail(under_way.error)

        under_way.subscribe(ended)
