"""`TransferEngine`: what a trainer holds. One on every rank of the source; all ranks call it alike."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from syncline.stages.closing import Closing, called_off, in_turn, uninterrupted
from syncline.stages.errors import without_frames
from syncline.stages.workers import call_in_thread

from .config import TransferConfig
from .device_wiring import after_caller
from .errors import BusyError, ClosedError, ConfigError
from .observing import Observer, Observers, PushStart
from .ranges import Ranges
from .report import PushReport
from .session import Session
from .source import Source
from .targets import Target

T = TypeVar("T")

_CALL_OFF_S = 20.0
"""What a push or a connect does when it is cancelled takes less. A target of somebody's own may wait for whoever closes."""
_CLOSED = "this engine is closed; make a new one"
_STOP_S = 2.0
"""How long what is left on the engine's own loop, and in its threads, has to end with it."""


@dataclass(frozen=True, kw_only=True)
class PushHandle:
    """A push under way.

    Attributes:
        version: the version being pushed.
        source_free: done when no started or pending task reads the source's memory any more: the optimizer may step. It
            is done at the latest when ``result`` is, also when the push failed.
        result: the push's report, or its error.
    """

    version: int
    source_free: asyncio.Future[None]
    result: asyncio.Task[PushReport]

    def cancel(self) -> None:
        """Abort the push on every rank. ``result`` raises; targets keep or leave the old version as the landing mode says."""
        self.result.cancel()


class TransferEngine:
    """Pushes the weights of a source into its targets, asynchronously and pipelined.

    From async code, everything runs on the caller's loop (`connect`, `push`, `start_push`, `close`). From synchronous
    code (`connect_blocking`, `push_blocking`, `close_blocking`) it runs on a uvloop thread of the engine's own. An engine
    stays on the loop on which it connected.

    Args:
        source: the weights of this rank.
        targets: the same targets in the same order on every rank. Only rank 0 talks to them.
        config: every knob; the same on every rank.
        observers: are told what happens on this rank, such as `PrometheusMetrics`. They cannot touch a push.
        ranges: opens a range in a profiler for each piece of work, such as `ProfilerRanges`.
    """

    def __init__(
        self,
        *,
        source: Source,
        targets: Sequence[Target],
        config: TransferConfig | None = None,
        observers: Sequence[Observer] = (),
        ranges: Ranges | None = None,
    ) -> None:
        self.source = source
        self.targets = tuple(targets)
        self.config = config or TransferConfig()
        self._observers = Observers(observers=tuple(observers))
        self._ranges = ranges
        self._check_targets()
        self._session: Session | None = None
        self._begun: Session | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[PushReport] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing = Closing(self._close, "syncline-close")
        self._thread: _LoopThread | None = None
        self._failed_to_close: Exception | None = None
        self._lock = threading.Lock()

    def _check_targets(self) -> None:
        strangers = [(i, target) for i, target in enumerate(self.targets) if not isinstance(target, Target)]
        problems = [f"targets[{i}] is {target!r}, not a target such as RemoteTarget(address)" for i, target in strangers]
        if not problems:
            addresses = [target.address for target in self.targets]
            problems += [f"target {a!r} is listed more than once" for a in sorted(set(addresses)) if addresses.count(a) > 1]
            for target in self.targets:
                problems += target.problems(self.config)
        if not self.targets:
            problems.append("targets is empty: there is nothing to push to")
        if not isinstance(self.source, Source):
            problems.append(f"source is a {type(self.source).__name__}; wrap it: ModuleSource(model) or FSDPSource(model)")
        if problems:
            raise ConfigError(problems)

    async def connect(self) -> None:
        """Exchange manifests, plan, prove the plan, link up. Collective over the source's ranks.

        Raises:
            PlanError: the source and a target do not fit together; lists every problem by name.
            TargetUnreachable, TransportError: a target gave no answer, or could not be linked.
            SourceRankLost: the ranks did not meet within ``connect_timeout_s``.
        """
        self._claim_loop()
        if self._session is not None or self._connecting is not None:
            raise BusyError("this engine is connected already" if self._session else "connect() is running already")
        self._connecting = asyncio.create_task(self._connect(), name="syncline-connect")
        try:
            await self._closing.unless(
                self._connecting, ClosedError("this engine was closed while it connected; make a new one")
            )
        finally:
            self._connecting = None

    async def _connect(self) -> None:
        if self._begun is not None:  # that of an attempt before, which could not be closed then
            await uninterrupted(self._begun.close())
        self._begun = session = Session(self.source, self.targets, self.config, self._ranges)
        try:
            await session.connect()
        except BaseException:
            await uninterrupted(session.close())
            self._begun = None
            raise
        self._session = session

    async def push(self, version: int, *, flush_cache: bool = False) -> PushReport:
        """Push ``version`` and wait for the result. Collective over the source's ranks.

        Args:
            version: greater than every version pushed before; or the same one again, to bring targets up to date that
                missed it (targets that hold it with the same content answer, and nothing is applied twice).
            flush_cache: targets that can drop every cached key and value at the commit, those of requests under way with
                them. What rank 0 says counts.

        Returns:
            The report. ``ok`` is False if a target was lost or failed: the others have committed all the same.

        Raises:
            VersionConflict: a target holds a newer version, or other content under this one. Nothing was moved.
            PlanError: the source changed and no longer fits. Nothing was moved. (A target that came back with another model is
                reported, and the others commit.)
            PushError: this push failed as a whole (`SourceRankLost`, `StageError`, `PushTimeout`, …).
            BusyError: a push is running.
        """
        handle = self.start_push(version, flush_cache=flush_cache)
        try:
            return await handle.result
        except asyncio.CancelledError:
            handle.cancel()
            await asyncio.gather(handle.result, return_exceptions=True)
            raise

    def start_push(self, version: int, *, flush_cache: bool = False) -> PushHandle:
        """Start a push on the running loop; see `PushHandle`. Errors as in `push`, from ``handle.result``."""
        self._claim_loop()
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
            raise ConfigError([f"version is {version!r}; it must be a whole number from 0 to 2**63 - 1"])
        if self._session is None:
            raise ClosedError("this engine is not connected; call connect() first")
        if self._running is not None and not self._running.done():
            raise BusyError(f"a push is running on this engine; wait for its result before pushing version {version}")
        free: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = self._push(self._session, version, free, flush_cache=flush_cache)
        self._running = asyncio.create_task(work, name=f"syncline-push-{version}")
        return PushHandle(version=version, source_free=free, result=self._running)

    async def _push(self, session: Session, version: int, free: asyncio.Future[None], *, flush_cache: bool) -> PushReport:
        def source_free() -> None:
            if not free.done():
                free.set_result(None)

        work = session.push(version, source_free, flush_cache=flush_cache)
        try:
            return await (self._observed(session, version, work) if self._observers else work)
        finally:
            source_free()

    async def _observed(self, session: Session, version: int, work: Awaitable[PushReport]) -> PushReport:
        targets = [target.address for target in self.targets]
        start = PushStart(version=version, rank=self.source.rank, targets=targets, live=session)
        self._observers.tell("push_started", lambda: start)
        began_ns, began = time.time_ns(), time.perf_counter()
        report: PushReport | None = None
        failure: BaseException | None = None
        try:
            report = await work
        except BaseException as error:
            failure = error
            raise
        finally:
            end = partial(session.push_end, version, began_ns, began, report, failure)
            self._observers.tell("push_ended", end)
            del failure, end  # an error must not be kept by the frame that its traceback holds
        return report

    async def close(self) -> None:
        """Cancel what runs, wait a bounded time for abandoned work, close every link. Idempotent.

        Once begun it is done, also where its caller is cancelled meanwhile. If a part of it fails the rest is closed all the
        same, and then that is raised.
        """
        await self._closing()

    async def _close(self) -> None:
        await in_turn(
            lambda: called_off(self._connecting, _CALL_OFF_S),
            lambda: called_off(self._running, _CALL_OFF_S),
            self._end_session,
            self._end_observers,
        )

    async def _end_session(self) -> None:
        if self._begun is not None:  # connected or not: what closes one that is not may have been cut off
            await self._begun.close()

    async def _end_observers(self) -> None:
        if self._observers:
            await call_in_thread(self._observers.close, name="syncline-observers-close")

    def connect_blocking(self) -> None:
        """`connect`, from synchronous code."""
        self._blocking(self.connect())

    def push_blocking(self, version: int, *, flush_cache: bool = False) -> PushReport:
        """`push`, from synchronous code; connects first if that was not done."""
        if self._session is None and not self._closing.begun:
            self.connect_blocking()
        return self._blocking(self.push(version, flush_cache=flush_cache))

    def close_blocking(self) -> None:
        """`close`, from synchronous code; ends the engine's thread. If something could not be closed every call says so."""
        try:
            if self._failed_to_close is None:
                self._blocking(self.close(), ordered=False)
        except ClosedError:
            if self._thread is None or not self._thread.stopping:
                raise
        except Exception as error:  # noqa: BLE001 - raised when the thread has ended; not where only the waiting was interrupted
            self._failed_to_close = without_frames(error)
        if self._thread is not None:
            self._thread.stop()
        if self._failed_to_close is not None:
            raise self._failed_to_close

    def _blocking(self, work: Coroutine[Any, Any, T], *, ordered: bool = True) -> T:
        """``ordered``: see `after_caller`. Closing needs no order, and a device that is lost gives none."""
        try:
            if self._home is not None and (self._thread is None or self._home is not self._thread.loop):
                raise ClosedError("this engine lives on the event loop on which connect() was awaited; await its methods there")
            with self._lock:
                if self._thread is None:
                    self._thread = _LoopThread()
                thread = self._thread
            behind = after_caller(work) if ordered else work
        except BaseException:
            work.close()
            raise
        try:
            return thread.run(behind)
        except ClosedError:
            work.close()  # it has not begun, or is over
            raise

    def _claim_loop(self) -> None:
        if self._closing.begun:
            raise ClosedError(_CLOSED)
        loop = asyncio.get_running_loop()
        if self._home is None:
            self._home = loop
            self._closing.here()
        elif self._home is not loop:
            raise ClosedError("this engine lives on another event loop (the one on which it connected); use it from there")

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _LoopThread:
    """A uvloop event loop in a thread of its own. `run` and `stop` from any thread."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self.stopping = False
        self._lock = threading.Lock()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._executor = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="syncline-loop")
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name="syncline-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_end_all(asyncio.all_tasks(self.loop)))
        ending = threading.Thread(target=self._executor.shutdown, name="syncline-loop-end", daemon=True)
        ending.start()
        ending.join(_STOP_S)  # one of its threads may hang in a call of somebody else's
        self.loop.close()
        for future in list(self._waiting):  # of what did not end however it was asked to
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(ClosedError(_CLOSED))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self.stopping:
                work.close()
                raise ClosedError(_CLOSED)
            future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
            self._waiting.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt of the waiting thread aborts the push, too
            raise
        finally:
            self._waiting.discard(future)

    def stop(self) -> None:
        """Idempotent; returns when it has ended."""
        with self._lock:
            if not self.stopping:
                self.stopping = True
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def _end_all(tasks: set[asyncio.Task[Any]]) -> None:
    """Let tasks end, for somebody may wait for them in another thread; cancel those that do not."""
    for late in (False, True):
        for task in tasks if late else ():
            task.cancel()
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=_STOP_S)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
