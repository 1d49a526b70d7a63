"""What an engine and a receiver tell to whoever watches them: metrics, tracing, a user's own.

No observer can touch a push: observers are called on a thread of their own, what they raise is logged (once for each kind of
call) and forgotten, and when they fall behind, news is dropped.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Literal, Protocol

from syncline.scheduler.outcome import SPAN_NAMES, PushOutcome

from .messages import State
from .report import PushReport, busy_seconds
from .trace_log import TaskColumns

log = logging.getLogger("syncline.engine")

_MOST_NEWS = 1000


class Live(Protocol):
    """What is going on in an engine at this moment. May be asked from any thread."""

    @property
    def tmp_bytes(self) -> int:
        """Temporary bytes of tasks in flight on this rank."""
        ...

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Tasks in each stage."""
        ...


class Served(Protocol):
    """What a receiver is at this moment. May be asked from any thread. A `Receiver` is one."""

    @property
    def address(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def version(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class StageTotal:
    """What one rank did in one stage of a push.

    Attributes:
        first, last: when its first work began and its last ended, in seconds since the push began; both 0 if there was none.
        busy_s: seconds in which at least one task was in it.
        tasks: how many went through.
        bytes: of their buckets; for ``send`` once for each receiver.
    """

    first: float = 0.0
    last: float = 0.0
    busy_s: float = 0.0
    tasks: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PushStart:
    """A push begins on this rank. ``live``: to be asked while it runs, and after it."""

    version: int
    rank: int
    targets: Sequence[str]
    live: Live


@dataclass(frozen=True, kw_only=True)
class PushEnd:
    """A push is over on this rank, well or not.

    Attributes:
        version, rank: of the push.
        began_ns: wall clock at the beginning, in nanoseconds since the epoch.
        seconds: how long it took here.
        report: its report; None if it failed as a whole.
        error: what it failed with as a whole.
        began: clock of ``outcome`` at the beginning.
        outcome: what this rank's pipeline did; None if it did not come to that.
        columns: the rank's tasks.
        sent_bytes: that this rank sent, over all receivers.
    """

    version: int
    rank: int
    began_ns: int
    seconds: float
    report: PushReport | None
    error: BaseException | None
    began: float
    outcome: PushOutcome | None
    columns: TaskColumns
    sent_bytes: int

    def stages(self) -> dict[str, StageTotal]:
        """By stage what this rank did. Linear in its tasks: to be called on an observer's thread."""
        if self.outcome is None:
            return {stage: StageTotal() for stage in SPAN_NAMES}
        nbytes = {row.index: row.nbytes for row in self.columns.rows()}
        found: dict[str, StageTotal] = {}
        for stage in SPAN_NAMES:
            spans = [span for span in self.outcome.spans if span.stage == stage]
            moved = self.sent_bytes if stage == "send" else sum(nbytes.get(s.index, 0) for s in spans if stage != "barrier")
            found[stage] = StageTotal(
                first=min((span.start for span in spans), default=self.began) - self.began,
                last=max((span.end for span in spans), default=self.began) - self.began,
                busy_s=busy_seconds((span.start, span.end) for span in spans),
                tasks=len(spans),
                bytes=moved,
            )
        return found


@dataclass(frozen=True, kw_only=True)
class UpdateEnd:
    """An update is over on one rank of a target, well or not.

    Attributes:
        address: control address of the rank.
        rank, version: of the update.
        ok: committed and served.
        error: class of the error; empty if ok.
        began_ns: wall clock at the beginning, in nanoseconds since the epoch.
        seconds: from ``ready`` to the end.
        bytes: that landed; 0 if not all did.
        landing_s, starved_s: until everything had landed, and how many seconds of that nothing had come.
        commit_s: seconds of the commit.
        landing_bytes: spare memory for landing.
    """

    address: str = ""
    rank: int
    version: int
    ok: bool
    error: str = ""
    began_ns: int
    seconds: float
    bytes: int
    landing_s: float
    starved_s: float
    commit_s: float
    landing_bytes: int


class Observer:
    """Is told what happens. Override what you care about. Called on a thread that belongs to all observers of an engine."""

    def push_started(self, push: PushStart) -> None:
        """On every source rank."""

    def push_ended(self, push: PushEnd) -> None:
        """On every source rank."""

    def receiver_started(self, receiver: Served) -> None:
        """On every rank of a target."""

    def update_ended(self, update: UpdateEnd) -> None:
        """On every rank of a target."""


Call = Literal["push_started", "push_ended", "receiver_started", "update_ended"]
_News = tuple[contextvars.Context, Call, object]


@dataclass(kw_only=True)
class Observers:
    """Tells several observers, without ever waiting for them or failing with them. False if there are none."""

    observers: Sequence[Observer] = ()
    _news: Queue[_News | None] = field(default_factory=lambda: Queue(_MOST_NEWS))
    _thread: threading.Thread | None = None
    _complained: set[tuple[int, str]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.observers)

    def tell(self, call: Call, make: Callable[[], object]) -> None:
        """Call every observer's method ``call``, some time, with what ``make`` makes of this moment. Never raises."""
        if not self.observers:
            return
        try:
            news = (contextvars.copy_context(), call, make())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="syncline-observers", daemon=True)
                self._thread.start()
            self._news.put_nowait(news)
        except Full:
            self._complain(0, "behind", "observers are %d news behind: what comes now is dropped", _MOST_NEWS)
        except Exception as error:  # noqa: BLE001 - a push must not fail for those who watch it
            self._complain(0, "unsaid", "observers are not told of %s: %r", call, error)

    def _run(self) -> None:
        while (news := self._news.get()) is not None:
            context, call, what = news
            for number, observer in enumerate(self.observers):
                try:
                    context.run(getattr(observer, call), what)
                except BaseException as error:  # noqa: BLE001 - whatever an observer does is its own affair
                    name = type(observer).__name__
                    self._complain(number, call, "observer %s raised %r in %s; the push does not mind", name, error, call)
            del news, context, what  # an idle thread must not keep the last push's report alive

    def _complain(self, number: int, what: str, text: str, *values: object) -> None:
        if (number, what) not in self._complained:
            self._complained.add((number, what))
            log.warning(text, *values)

    def close(self, timeout_s: float = 2.0) -> None:
        """Blocks until observers have heard everything, at most ``timeout_s`` seconds. One that hangs is left behind."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._news.put(None, timeout=timeout_s)
        except Full:
            self._drain()
        thread.join(timeout_s)

    def _drain(self) -> None:
        """Nobody takes the news: throw it away, so that the thread ends if it ever comes back."""
        while True:
            try:
                self._news.get_nowait()
            except Empty:
                self._news.put(None)
                return
