"""What one thread issues to a device, in which order, and until when: the part of NCCL that is no call of NCCL.

`IssueOrder` says which messages go next: those of the plan in the plan's order, across all communicators of the device.
`Issuing` carries them out against a `NcclRuntime`: it makes communicators, starts groups of messages, asks how they fare, and
gives a communicator up when a deadline passes or an error comes. It has no clock and no thread; `now` comes in with each turn.

A communicator that was given up is aborted by a call of its own, which may take its time. Until that has returned, memory
of messages under way counts as used: only then do they fail.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .errors import TransportError


class Key(NamedTuple):
    """A message of the plan: its communicator (by what it is for), its direction, the other rank there, and its tag."""

    label: str
    sends: bool
    peer: int
    tag: int


class Message(NamedTuple):
    """Bytes of device memory to or from a rank of a communicator."""

    sends: bool
    address: int
    nbytes: int
    peer: int


class Event(Protocol):
    """A CUDA event."""

    def query(self) -> bool:
        """Whether everything before its record is done."""
        ...


class NcclRuntime(Protocol):
    """What is needed of NCCL, on one device. No call blocks but `abort`; a communicator is whatever `start` returns."""

    def unique_id(self) -> bytes:
        """A new identity, for one rank to tell the others."""
        ...

    def start(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Start making a communicator. It can be used once it is `ready`."""
        ...

    def ready(self, communicator: Any) -> bool:
        """Whether what was started last has been taken on (then it runs on the device). `TransportError` if it failed."""
        ...

    def group(self, communicator: Any, messages: Sequence[Message]) -> None:
        """Start messages side by side, behind those before them."""
        ...

    def mark(self, communicator: Any) -> Event:
        """An event that is done when everything that was started so far is."""
        ...

    def abort(self, communicator: Any) -> None:
        """End everything under way and free it. Blocks until the device does not touch memory for it any more."""
        ...


@dataclass(eq=False)
class Link:
    """A communicator from before it is made until after it is given up.

    Attributes:
        label: what it is for; keys name it so.
        until: when making it must have ended, in the time of `Issuing.turn`.
        made: called when it can be used.
        failed: called once, when it is given up: with the error, when nothing is under way any more.
    """

    label: str
    size: int
    rank: int
    unique_id: bytes
    until: float
    made: Callable[[], None]
    failed: Callable[[TransportError], None]
    communicator: Any = None
    ready: bool = False
    error: TransportError | None = None
    aborted: bool = False


@dataclass(eq=False)
class Operation:
    """Messages of one key. ``done`` is called with None or the error, when their memory is not used any more."""

    link: Link
    key: Key
    messages: Sequence[Message]
    until: float
    done: Callable[[TransportError | None], None]
    keep: Any = None
    """Keeps the memory alive."""


class IssueOrder:
    """Which operations go next.

    What was told by `expect` goes step by step, each when all of it has been submitted and nothing is being launched; anything
    else at once, in the order in which it comes on each communicator. So communicators are greeted side by side: two ranks may
    begin with different ones, and each would wait for the other.
    """

    def __init__(self) -> None:
        self._steps: deque[frozenset[Key]] = deque()
        self._expected: set[Key] = set()
        self._waiting: dict[Key, Operation] = {}
        self._others: deque[Operation] = deque()

    def expect(self, steps: Iterable[Iterable[Key]]) -> list[Operation]:
        """A new plan's messages, in order; those of one step, on one communicator, go together.

        Returns what is left of the plan before, which will not be issued.
        """
        left = list(self._waiting.values())
        self._waiting = {}
        self._steps = deque(frozenset(step) for step in steps)
        self._expected = {key for step in self._steps for key in step}
        return left

    def submit(self, operation: Operation) -> None:
        """``operation`` may be issued, as far as its own sender or receiver is concerned."""
        if operation.key in self._expected and operation.key not in self._waiting:
            self._waiting[operation.key] = operation
        else:
            self._others.append(operation)

    def forget(self, label: str) -> list[Operation]:
        """Nothing more goes over communicators of this label; what others wait for they do not wait for any more."""
        gone = [operation for operation in self._waiting.values() if operation.key.label == label]
        gone += [operation for operation in self._others if operation.key.label == label]
        self._steps = deque(frozenset(key for key in step if key.label != label) for step in self._steps)
        self._expected = {key for key in self._expected if key.label != label}
        self._waiting = {key: operation for key, operation in self._waiting.items() if key.label != label}
        self._others = deque(operation for operation in self._others if operation.key.label != label)
        return gone

    def pop(self, launching: Collection[str] = ()) -> list[Operation]:
        """What is to be issued now, as one group; empty if there is nothing yet.

        ``launching``: labels of communicators on which something is being launched.
        """
        for operation in self._others:
            if operation.key.label not in launching:
                self._others.remove(operation)
                return [operation]
        if launching:
            return []
        while self._steps and not self._steps[0]:
            self._steps.popleft()
        if not self._steps or any(key not in self._waiting for key in self._steps[0]):
            return []
        step = self._steps.popleft()
        self._expected -= step
        return [self._waiting.pop(key) for key in sorted(step)]

    @property
    def waiting(self) -> bool:
        """Something was submitted and not issued yet."""
        return bool(self._waiting or self._others)

    def late(self, now: float) -> set[str]:
        """Labels of communicators for which something waits whose deadline has passed."""
        waiting = (*self._waiting.values(), *self._others)
        return {operation.key.label for operation in waiting if operation.until <= now}


@dataclass(eq=False)
class _Flight:
    """Operations that were issued together."""

    link: Link
    operations: list[Operation]
    event: Event | None = None

    @property
    def until(self) -> float:
        return min(operation.until for operation in self.operations)


@dataclass(eq=False)
class Issuing:
    """The machine. Driven by `turn`, on one thread.

    Args:
        runtime: the calls.
        start_abort: has `NcclRuntime.abort` called for a link elsewhere, since it may block; then `aborted` is to be called.
    """

    runtime: NcclRuntime
    start_abort: Callable[[Link], None]
    order: IssueOrder = field(default_factory=IssueOrder)
    links: dict[str, Link] = field(default_factory=dict)
    _launching: list[_Flight] = field(default_factory=list)
    _flying: list[_Flight] = field(default_factory=list)
    _ending: defaultdict[int, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    _aborting: set[int] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        """Something is under way that has to be asked about, or may be late."""
        making = any(not link.ready for link in self.links.values())
        return making or bool(self._launching) or bool(self._flying) or self.order.waiting

    @property
    def idle(self) -> bool:
        """There is no communicator, and none is being given up."""
        return not self.links and not self._aborting

    def make(self, link: Link) -> None:
        """Start making a communicator. One of the same label that is still there is given up."""
        previous = self.links.get(link.label)
        if previous is not None:
            self.give_up(previous, TransportError(f"another communicator was made for {link.label}"))
        self.links[link.label] = link
        try:
            link.communicator = self.runtime.start(link.size, link.unique_id, link.rank)
        except (TransportError, RuntimeError) as error:
            self.give_up(link, _named(link, error))

    def submit(self, operation: Operation) -> None:
        """Have an operation issued in its turn; it fails at once on a link that was given up."""
        if operation.link.error is not None:
            operation.done(operation.link.error)
            return
        self.order.submit(operation)

    def expect(self, steps: Iterable[Iterable[Key]]) -> None:
        """See `IssueOrder.expect`. Nothing is awaited for a communicator that is gone: nobody would submit it."""
        there = [frozenset(key for key in step if key.label in self.links) for step in steps]
        for operation in self.order.expect(there):
            operation.done(TransportError("the push that this message was part of is over"))

    def turn(self, now: float) -> None:
        """Carry on: ask, start what may start, give up what is late. Never blocks."""
        self._check_making(now)
        self._check_flying(now)
        self._check_launching(now)
        while operations := self.order.pop({flight.link.label for flight in self._launching}):
            self._launch(operations)
            self._check_launching(now)
        for label in self.order.late(now):
            self._late(self.links.get(label))

    def give_up(self, link: Link, error: TransportError) -> None:
        """Abort a communicator. What waits for it fails now, what is under way when the abort has returned. Idempotent."""
        if link.error is not None:
            return
        link.error = error
        current = self.links.get(link.label) is link
        if current:
            del self.links[link.label]
            for operation in self.order.forget(link.label):
                operation.done(error)
        for flight in (*self._flying, *self._launching):
            if flight.link is link:
                self._ending[id(link)] += flight.operations
        self._flying = [flight for flight in self._flying if flight.link is not link]
        self._launching = [flight for flight in self._launching if flight.link is not link]
        self._aborting.add(id(link))
        self.start_abort(link)

    def give_up_all(self, error: TransportError) -> None:
        """Abort every communicator."""
        for link in list(self.links.values()):
            self.give_up(link, error)

    def aborted(self, link: Link) -> None:
        """The abort of a link has returned: its memory is not used any more."""
        error = link.error or TransportError("closed")
        link.aborted, link.communicator = True, None
        self._aborting.discard(id(link))
        for operation in self._ending.pop(id(link), ()):
            operation.done(error)
        link.failed(error)

    def _check_making(self, now: float) -> None:
        for link in [link for link in self.links.values() if not link.ready]:
            if self._asked(link):
                link.ready = True
                link.made()
            elif link.error is None and link.until <= now:
                self.give_up(link, TransportError(f"rank {link.rank} of {link.size} did not meet the others in time"))

    def _check_flying(self, now: float) -> None:
        for flight in list(self._flying):
            if flight.link.error is not None:
                continue
            try:
                done = flight.event is not None and flight.event.query()
                if not done:
                    self.runtime.ready(flight.link.communicator)  # raises what has gone wrong meanwhile
            except (TransportError, RuntimeError) as error:
                self.give_up(flight.link, _named(flight.link, error))
                continue
            if done:
                self._flying.remove(flight)
                for operation in flight.operations:
                    operation.done(None)
            elif flight.until <= now:
                self._late(flight.link)

    def _check_launching(self, now: float) -> None:
        for flight in list(self._launching):
            if self._asked(flight.link):
                self._mark(flight)
            elif flight.link.error is None and flight.until <= now:
                self._late(flight.link)

    def _launch(self, operations: list[Operation]) -> None:
        link = operations[0].link
        self._launching.append(_Flight(link, operations))
        try:
            self.runtime.group(link.communicator, [message for one in operations for message in one.messages])
        except (TransportError, RuntimeError) as error:
            self.give_up(link, _named(link, error))

    def _mark(self, flight: _Flight) -> None:
        """It runs on the device now."""
        try:
            flight.event = self.runtime.mark(flight.link.communicator)
        except (TransportError, RuntimeError) as error:
            self.give_up(flight.link, _named(flight.link, error))
            return
        self._flying.append(flight)
        self._launching.remove(flight)

    def _asked(self, link: Link) -> bool:
        try:
            return bool(self.runtime.ready(link.communicator))
        except (TransportError, RuntimeError) as error:
            self.give_up(link, _named(link, error))
            return False

    def _late(self, link: Link | None) -> None:
        if link is not None:
            peers = f"rank {link.rank} of {link.size}"
            self.give_up(link, TransportError(f"{link.label}: nothing came through in time ({peers}); the link is aborted"))


def _named(link: Link, error: Exception) -> TransportError:
    """What a call of the runtime raised, with what the communicator is for."""
    return TransportError(f"{link.label}: {error}")
