"""One rank's connection of a source with its targets, from `connect` to `close`: the steps of a push, in order.

    enter ─ (manifests ─ planned) ─ (offer ─ linked) ─ start ─ the pipeline runs ─ done
                  if a side changed    if a link is missing

Each step is an `exchange`: all ranks contribute, rank 0 decides (`Coordinator`), all ranks get the decision. `connect` is
the same sequence up to ``linked``. A rank that fails says so in its next step, and all ranks leave the push together.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from syncline.scheduler.errors import AllTargetsLost, DeadlineExceeded, PushCancelled, StageFailure
from syncline.scheduler.layout import Manifest
from syncline.scheduler.outcome import PushOutcome, Spans
from syncline.scheduler.plan import Plan, build_plan
from syncline.stages.closing import in_turn, uninterrupted
from syncline.stages.communicator import Rendezvous
from syncline.stages.workers import call_in_thread

from .config import TransferConfig
from .coordination import LOST, Coordination, attempt_of
from .coordinator import Coordinator
from .devices import device_problems
from .errors import (
    ClosedError,
    ControlError,
    PlanError,
    PushError,
    PushTimeout,
    StageError,
    SynclineError,
    TransportError,
    error_from_wire,
)
from .meeting import meet
from .observing import PushEnd
from .ranges import Ranges
from .report import PushReport
from .reporting import build_report
from .running import PushRun
from .source import Source
from .steps import Enter, HeadNote, Linked, LossNote, Manifests, Offers, Opening, Start
from .targets import Target, TargetHandle
from .trace_clock import Trip
from .trace_log import MarkColumns, RankLog, SpanColumns, Step, TaskColumns
from .transports import plan_options, transport_kinds
from .wiring import Wiring

T = TypeVar("T")
Call = Literal["connect", "push"]

_TARGET_NUMBER = re.compile(r"\btarget (\d{1,4})\b")

_STEP_MARGIN_S = 2.0
"""How much longer than the push other ranks wait for rank 0's last decision: it speaks first, and says more."""

_CAUSE_S = 1.0
"""A link between ranks that broke has its cause elsewhere: how long a rank waits to be told of it."""


class Session:
    """What a `TransferEngine` is connected by. Belongs to one event loop; one push at a time."""

    def __init__(self, source: Source, targets: Sequence[Target], config: TransferConfig, ranges: Ranges | None = None) -> None:
        self.source = source
        self.targets = targets
        self.config = config
        self._ranges = ranges
        self._coordination: Coordination | None = None
        self._coordinator: Coordinator | None = None
        self._wiring: Wiring | None = None
        self._replaced: Wiring | None = None
        """That of before, until it is closed."""
        self._attempt = 0
        self._called = 0.0
        self._steps: list[Step] = []
        self._until = 0.0
        self._run: PushRun | None = None
        self._rendezvous: Rendezvous | None = None
        self._dead: SynclineError | None = None
        self._cause: SynclineError | None = None
        self._caused = asyncio.Event()

    # ------------------------------------------------------------------------------------------------- what is called

    async def connect(self) -> None:
        """Meet, plan, prove, link."""
        source, config = self.source, self.config
        self._coordination = await meet(
            source.process_group, source.rank, source.world_size, config.bind_host, config.connect_timeout_s
        )
        self._coordination.watch(self._on_abort, self._on_note)
        if source.rank == 0:
            if source.world_size > 1:
                host = partial(Rendezvous.host, config.bind_host, timeout_s=config.connect_timeout_s)
                self._rendezvous = await call_in_thread(host, name="syncline-rendezvous")
            self._coordinator = Coordinator(self.targets, config, self._rendezvous.endpoint if self._rendezvous else "")
        self._until = time.monotonic() + config.connect_timeout_s
        await self._guarded(self._open(None), "connect")

    async def push(self, version: int, on_source_free: Callable[[], None], *, flush_cache: bool = False) -> PushReport:
        """One push of ``version``."""
        if self._dead is not None:
            raise self._dead
        self._attempt += 1
        self._called, self._steps = time.perf_counter(), []
        if self._coordinator is not None:
            self._coordinator.flush_cache = flush_cache
        self._cause = None
        self._caused.clear()
        self._until = time.monotonic() + self.config.push_timeout_s
        self._coordination_or_raise().forget(self._is_past)
        report = await self._guarded(self._push(version, on_source_free), "push")
        assert report is not None
        return report

    async def close(self) -> None:
        """Close everything in bounded time. Idempotent."""
        parts = (self._replaced, self._wiring, self._coordinator, self._coordination)
        closing = [part.close for part in parts if part is not None]
        await in_turn(*closing, self._leave)

    async def _leave(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    # ------------------------------------------------------------------------------------------- what observers are told

    @property
    def tmp_bytes(self) -> int:
        """Temporary bytes of tasks in flight on this rank."""
        return self._wiring.driver.tmp_bytes if self._wiring else 0

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Tasks in each stage on this rank."""
        return self._wiring.driver.in_flight if self._wiring else {}

    def push_end(
        self, version: int, began_ns: int, began: float, report: PushReport | None, error: BaseException | None
    ) -> PushEnd:
        """What observers are told of the push that has just ended."""
        wiring = self._wiring
        outcome = wiring.driver.snapshot() if wiring else None
        mine = outcome if outcome is not None and outcome.push_id == self._attempt else None
        return PushEnd(
            version=version, rank=self.source.rank, began_ns=began_ns, seconds=time.perf_counter() - began, report=report,
            error=error, began=began, outcome=mine, columns=wiring.task_columns if wiring else TaskColumns(),
            sent_bytes=wiring.sent_bytes if wiring and mine is not None else 0,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- the steps

    async def _push(self, version: int, on_source_free: Callable[[], None]) -> PushReport:
        start = await self._start(version, retry=True)
        if start.stale:
            self._attempt += 1
            start = await self._start(version, retry=False)
        self._run = PushRun(
            self._attempt, version, start, wiring=self._wired(), unless_aborted=self._unless_aborted,
            report_loss=self._report_loss, tell_head=self._tell_head,
            log=self._log if self.config.trace else None,
        )  # fmt: skip
        try:
            async with self._watching(start):
                outcome = await self._run.run(self._remaining(), on_source_free, lambda done: self._finish(version, done))
        finally:
            self._run = None
        addresses = [target.address for target in self.targets]
        return build_report(outcome, addresses, routing=self._wired().plan.routing, config=self.config)

    def _log(self, outcome: PushOutcome | None) -> RankLog:
        """This rank's side of the push so far, on its own clock."""
        wiring, now = self._wired(), time.perf_counter()
        spans = outcome.spans if outcome is not None else None
        return RankLog(
            began=self._called,
            piped=outcome.started if outcome is not None else now,
            done=now,
            spans=SpanColumns.of(spans) if isinstance(spans, Spans) else SpanColumns(),
            tasks=wiring.task_columns,
            groups=list(wiring.program.groups),
            local_ends=MarkColumns.of(wiring.local_ends),
            steps=self._steps,
            trips=[*self._coordination_or_raise().clock.trips(), Trip(self._step("done"), now)],
        )

    async def _start(self, version: int, *, retry: bool) -> Start:
        """Everything up to the targets' ``ready``. ``retry``: plan anew if a target's memory is not what it was planned for."""
        await self._open(version)
        plan = self._wired().plan
        start = await self._exchange("start", b"", lambda _parts: self._decide_start(version, plan, retry=retry))
        return msgspec.msgpack.decode(start, type=Start)

    async def _open(self, version: int | None) -> None:
        """``enter``; then whatever has to be made anew."""
        manifest, problems = self._take_manifest()
        enter = Enter(
            version=version,
            manifest_digest=manifest.digest if manifest is not None else "",
            problems=problems,
            plan_digest=self._wiring.plan.digest if self._wiring else "",
            targets=[target.address for target in self.targets],
            config_digest=_config_digest(self.config),
            stuck=await self._wiring.settle() if self._wiring else 0,
        )
        decide = self._coordinator.decide_opening if self._coordinator else _not_here
        opening = await self._exchange("enter", msgspec.msgpack.encode(enter), decide)
        assert manifest is not None  # a rank with problems fails the step
        await self._make(msgspec.msgpack.decode(opening, type=Opening), manifest, must=version is None)

    async def _unless_aborted(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, but no longer than until another rank has failed this attempt: nobody comes to meet it any more."""
        task, aborted = asyncio.ensure_future(work), asyncio.create_task(self._caused.wait())
        try:
            await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._cause is not None:
                raise self._cause
            task.result()
        finally:
            task.cancel()
            aborted.cancel()
            await asyncio.gather(task, aborted, return_exceptions=True)

    def _take_manifest(self) -> tuple[Manifest | None, list[str]]:
        """This rank's manifest, or what is wrong with it: all ranks' problems are told together."""
        try:
            return self.source.manifest(), []
        except PlanError as error:
            return None, list(error.problems)

    async def _make(self, opening: Opening, manifest: Manifest, *, must: bool) -> None:
        if opening.replan:
            await self._replan(manifest, must=must)
        wiring = self._wired()
        wiring.push_id = opening.push_id
        if opening.regroup:
            name, endpoint = opening.group_name, opening.rendezvous
            await self._unless_aborted(wiring.regroup(name, endpoint, self._rendezvous, timeout_s=self._remaining()))
        if opening.link:
            await self._unless_aborted(self._link(opening.link, must=must))

    async def _replan(self, manifest: Manifest, *, must: bool) -> None:
        coordinator = self._coordinator
        decide = coordinator.decide_manifests if coordinator else _not_here
        addresses = [target.address for target in self.targets]
        payload = await self._exchange("manifests", manifest.to_bytes(), decide)
        try:
            plan, sources, targets = await asyncio.to_thread(_plan, payload, self.config, addresses)
        except PlanError as error:  # on every rank the same: they all have the same manifests
            if must:
                raise
            payload = await self._exchange("misfits", b"", partial(self._decide_misfits, error))
            plan, sources, targets = await asyncio.to_thread(_plan, payload, self.config, addresses)
        await self._exchange("planned", plan.digest.encode(), coordinator.decide_planned if coordinator else _not_here)
        self._replaced, self._wiring = self._wiring, None
        if self._replaced is not None:
            await uninterrupted(self._replaced.close())
            self._replaced = None

        async def make() -> None:
            self._wiring = await Wiring.make(self.source, plan, sources, targets, self.config, ranges=self._ranges)

        async with asyncio.timeout(self._remaining()):  # what resolves asks a device, which may be held up
            await self._unless_aborted(make())
        if coordinator is not None:
            coordinator.group_broken = True

    async def _link(self, link: list[int], *, must: bool) -> None:
        wiring, coordinator = self._wired(), self._coordinator
        offers = Offers(descriptors=await wiring.offer(link))
        payloads: list[bytes] = []

        async def keep(parts: Sequence[bytes]) -> bytes:
            payloads.extend(parts)
            return b""

        await self._exchange("offer", msgspec.msgpack.encode(offers), keep)
        timeout_s = self._remaining() if must else min(self._remaining(), self.config.target_timeout)
        linking = asyncio.ensure_future(wiring.link(link, timeout_s=timeout_s))
        try:
            linked = Linked()
            if coordinator is not None:
                offered = [msgspec.msgpack.decode(part, type=Offers) for part in payloads]
                linked = await coordinator.connect_targets(link, offered, wiring.plan, wiring.kinds, timeout_s)
                self._refused(linked.failed)
            linked.failed = {**await linking, **linked.failed}  # what the target itself says is the reason
        finally:
            if not linking.done():
                linking.cancel()
                await asyncio.gather(linking, return_exceptions=True)

        async def decide(parts: Sequence[bytes]) -> bytes:
            assert coordinator is not None
            return await coordinator.decide_linked(parts, link, must=must)

        decision = msgspec.msgpack.decode(await self._exchange("linked", msgspec.msgpack.encode(linked), decide), type=Linked)
        wiring.drop_targets(int(index) for index in decision.failed)

    def _refused(self, failed: Iterable[str]) -> None:
        """Rank 0: targets have refused to link up; no rank waits for them any longer."""
        for target in map(int, failed):
            note = LossNote(attempt=self._attempt, target=target, at_task=0, reason="it refused to link up")
            self._coordination_or_raise().tell("refused", msgspec.msgpack.encode(note))
            self._wired().drop_targets([target])

    async def _decide_misfits(self, error: PlanError, _parts: Sequence[bytes]) -> bytes:
        assert self._coordinator is not None
        return await self._coordinator.decide_misfits(error, self._misfit)

    async def _misfit(self, sources: list[bytes], target: list[bytes], index: int) -> PlanError | None:
        """Why one target alone cannot be planned for; it is called by its ``index`` among all."""
        payload = msgspec.msgpack.encode(Manifests(sources=sources, targets=[target]))
        try:
            await asyncio.to_thread(_plan, payload, self.config, [])  # whoever asks knows its address
        except PlanError as error:
            return PlanError([_TARGET_NUMBER.sub(f"target {index}", problem) for problem in error.problems])
        return None

    async def _decide_start(self, version: int, plan: Plan, *, retry: bool) -> bytes:
        assert self._coordinator is not None
        return await self._coordinator.decide_start(version, plan, self._remaining, retry=retry)

    async def _finish(self, version: int, done: bytes) -> bytes:
        async def decide(parts: Sequence[bytes]) -> bytes:
            assert self._coordinator is not None
            assert self._run is not None
            return await self._coordinator.decide_outcome(
                parts, version, self._wired().plan, self._run.lost, self._remaining,
                clock=self._coordination_or_raise().clock if self.config.trace else None,
            )  # fmt: skip

        return await self._exchange("done", done, decide)

    # ------------------------------------------------------------------------------------------------- failing together

    async def _guarded(self, work: Awaitable[T], what: Call) -> T:
        """Run ``work``; if it fails here, every rank and every target is told, and the error comes out typed."""
        try:
            return await work
        except BaseException as raised:
            error = await uninterrupted(self._give_up(raised, what))
            if error is raised or isinstance(raised, asyncio.CancelledError):
                raise
            raise error from raised

    async def _give_up(self, raised: BaseException, what: Call) -> SynclineError:
        """Tell everybody, in bounded time. Returns what the attempt has failed with."""
        error = await self._cause_of(raised, what)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STEP_MARGIN_S * 2):
                await self._spread(error)
        if self._wiring is not None:
            self._wiring.abort()
        return error

    async def _cause_of(self, raised: BaseException, what: Call) -> SynclineError:
        """Why this rank failed: what another rank failed with, if all that is known here is that a link to it broke."""
        if isinstance(raised.cause if isinstance(raised, StageFailure) else raised, TransportError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CAUSE_S):
                    await self._caused.wait()
            if self._cause is not None:
                return self._cause
        return _typed(raised, what, self.config)

    async def _spread(self, error: SynclineError) -> None:
        coordination = self._coordination_or_raise()
        await coordination.fail(str(self._attempt), error)
        if self._coordinator is not None:
            await self._coordinator.abort(f"{type(error).__name__}: {error}")

    def _on_abort(self, attempt: str, error: SynclineError) -> None:
        if attempt == LOST:
            self._dead = error
        elif attempt != str(self._attempt):
            return
        self._cause = self._cause or error
        self._caused.set()
        if self._run is not None:
            self._run.abort(error)

    # --------------------------------------------------------------------------------------------------- losing a target

    def _report_loss(self, target: int, error: SynclineError) -> None:
        """This rank cannot reach a target any more: rank 0 decides, for all."""
        note = LossNote(attempt=self._attempt, target=target, at_task=0, reason=str(error), error=type(error).__name__)
        if self._coordinator is not None:
            self._decide_loss(note)
        else:
            self._coordination_or_raise().tell("lost", msgspec.msgpack.encode(note))

    @contextlib.asynccontextmanager
    async def _watching(self, start: Start) -> AsyncIterator[None]:
        """Rank 0: while the push runs, a target whose process dies is lost at once."""
        handles = [self._coordinator.handles[index] for index in start.live] if self._coordinator else []

        async def watch(handle: TargetHandle) -> None:
            await handle.lost.wait()
            self._report_loss(handle.index, handle.lost_error())

        tasks = [asyncio.create_task(watch(handle)) for handle in handles]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _decide_loss(self, note: LossNote) -> None:
        """Rank 0: the target is lost on every rank. Sends are point to point, so it may take effect at any task."""
        if self._run is None or note.attempt != self._attempt or note.target in self._run.lost:
            return
        self._coordination_or_raise().tell("drop", msgspec.msgpack.encode(note))
        self._run.drop(note.target, note.at_task, note.reason)

    def _tell_head(self, note: HeadNote) -> None:
        """Rank 0 gets to know what this rank has still to send."""
        if self._coordinator is None:
            self._coordination_or_raise().tell("head", msgspec.msgpack.encode(note))
        elif self._run is not None and note.attempt == self._attempt:
            self._run.heard_head(note)

    def _on_note(self, topic: str, payload: bytes) -> None:
        if topic == "head":
            self._tell_head(msgspec.msgpack.decode(payload, type=HeadNote))
            return
        note = msgspec.msgpack.decode(payload, type=LossNote)
        if topic == "lost":
            self._decide_loss(note)
        elif topic == "refused" and self._wiring is not None and note.attempt == self._attempt:
            self._wiring.drop_targets([note.target])
        elif topic == "drop" and self._run is not None and note.attempt == self._attempt:
            self._run.drop(note.target, note.at_task, note.reason)

    # ----------------------------------------------------------------------------------------------------------- small

    def _remaining(self) -> float:
        return max(0.05, self._until - time.monotonic())

    def _step(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _is_past(self, step: str) -> bool:
        return int(attempt_of(step)) < self._attempt

    async def _exchange(self, name: str, payload: bytes, decide: Callable[[Sequence[bytes]], object]) -> bytes:
        coordination = self._coordination_or_raise()
        margin = 0.0 if coordination.rank == 0 else _STEP_MARGIN_S
        began = time.perf_counter()
        decision = await coordination.exchange(self._step(name), payload, decide, self._remaining() + margin)  # type: ignore[arg-type]
        self._steps.append(Step(name, began, time.perf_counter()))
        return decision

    def _coordination_or_raise(self) -> Coordination:
        if self._coordination is None:
            raise ClosedError("this session is not connected")
        return self._coordination

    def _wired(self) -> Wiring:
        if self._wiring is None:
            raise ControlError("there is no plan: the last connection attempt failed half-way; connect again")
        return self._wiring


async def _not_here(_parts: Sequence[bytes]) -> bytes:
    raise ControlError("only rank 0 decides")


def _config_digest(config: TransferConfig) -> str:
    return hashlib.sha256(repr(config).encode()).hexdigest()


def _plan(
    payload: bytes, config: TransferConfig, addresses: Sequence[str]
) -> tuple[Plan, list[Manifest], list[list[Manifest]]]:
    """The plan from all ranks' manifests. What is wrong names targets by number; their ``addresses`` are told with it."""
    manifests = msgspec.msgpack.decode(payload, type=Manifests)
    sources = Manifest.all_from_bytes(manifests.sources)
    targets = [Manifest.all_from_bytes(ranks) for ranks in manifests.targets]
    kinds: dict[int, str] = {}
    problems = device_problems(sources, targets)
    try:
        kinds = transport_kinds(sources, targets, config)
    except PlanError as error:
        problems += error.problems
    try:
        plan = build_plan(sources, targets, plan_options(targets, config, kinds))
    except PlanError as error:
        raise PlanError(_addressed([*problems, *error.problems], addresses)) from error
    if problems:
        raise PlanError(_addressed(problems, addresses))
    _ = plan.routing  # of a large plan it takes a while: here, in a thread, not when the first report is made
    return plan, sources, targets


def _addressed(problems: Iterable[str], addresses: Sequence[str]) -> list[str]:
    """Each problem in one line, with the addresses of the targets whose numbers it names."""
    told = []
    for problem in problems:
        numbers = sorted({int(number) for number in _TARGET_NUMBER.findall(problem)})
        known = [f"target {number} is {addresses[number]}" for number in numbers if number < len(addresses)]
        told.append("; ".join([_escaped(problem), *known]))
    return told


def _escaped(text: str) -> str:
    """``text`` in one line: what cannot be printed, as in names that hold a line break, the way ``repr`` shows it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _typed(error: BaseException, what: Call, config: TransferConfig) -> SynclineError:
    """The engine's name for what pure code or a stage raised while ``what`` was under way."""
    if isinstance(error, StageFailure):
        if isinstance(error.cause, PushError):
            return error.cause
        return StageError(str(error))
    if isinstance(error, (DeadlineExceeded, TimeoutError)):
        knob, limit_s = f"{what}_timeout_s", config.connect_timeout_s if what == "connect" else config.push_timeout_s
        why = str(error) or "a step of it was still under way"
        return PushTimeout(f"the {what} did not end within {knob} = {limit_s:g} s: {why}")
    if isinstance(error, AllTargetsLost):
        return error_from_wire("TargetLost", str(error))
    if isinstance(error, (PushCancelled, asyncio.CancelledError)):
        return PushError(f"the {what} was cancelled")
    if isinstance(error, SynclineError):
        return error
    return PushError(f"{type(error).__name__}: {error}")
