"""Rank 0's decisions: the source's side of two-phase control, with every target, in every step of a push.

Each ``decide_…`` takes what all ranks contributed to a step and returns the decision that all of them get. Nothing here
moves data.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from syncline.scheduler.plan import Plan

from .config import TransferConfig
from .errors import (
    PlanError,
    ProtocolError,
    SynclineError,
    TargetLost,
    TargetUnreachable,
    VersionConflict,
    error_from_wire,
    wire_text,
)
from .messages import (
    AbortRequest,
    CompleteReply,
    CompleteRequest,
    ConnectRequest,
    PrepareReply,
    PrepareRequest,
    RankLinks,
)
from .steps import CONTENT, Done, Enter, Linked, Manifests, Offers, Opening, Outcome, Start, TargetOutcome
from .targets import Target, TargetHandle
from .trace_clock import ClockLog, Offset
from .trace_log import TargetLog

log = logging.getLogger("syncline.engine")

T = TypeVar("T", bound=msgspec.Struct)
Misfit = Callable[[list[bytes], list[bytes], int], Awaitable[PlanError | None]]
"""Why manifests of all source ranks and of the ranks of one target do not fit together; None: they do."""
_MODULUS = 2**128
_ABORT_TIMEOUT_S = 2.0
_CLOSE_S = 20.0
_ANSWER_MARGIN_S = 0.5
"""Kept back from the deadline so that a target's last answer still makes it into the report."""


def decode(parts: Sequence[bytes], kind: type[T]) -> list[T]:
    """Decode every rank's contribution."""
    return [msgspec.msgpack.decode(part, type=kind) for part in parts]


class Coordinator:
    """Everything that only rank 0 knows: the targets' handles and what the plan in force was made from."""

    def __init__(self, targets: Sequence[Target], config: TransferConfig, rendezvous: str) -> None:
        self.config = config
        self.rendezvous = rendezvous
        self.handles = [TargetHandle(index, target, config) for index, target in enumerate(targets)]
        self.incarnation = secrets.token_hex(8)
        self.generation = 0
        self.group_broken = True
        self.push_id = ""
        self.flush_cache = False
        self.last_version: int | None = None
        self._planned_sources: list[str] = []
        self._sources: list[bytes] = []
        self._started = 0.0
        self._prepared: dict[int, PrepareReply] = {}
        self._failed: dict[int, SynclineError] = {}
        self._logs: dict[int, TargetLog] = {}

    # ------------------------------------------------------------------------------------------------------ opening

    async def decide_opening(self, parts: Sequence[bytes]) -> bytes:
        """Check that all ranks want the same; see which targets are there; say what has to be made anew."""
        self._started = time.perf_counter()
        enters = decode(parts, Enter)
        self._check_alike(enters)
        _check_manifests(enters)
        version = enters[0].version
        self._prepared, self._failed, self._logs = {}, {}, {}
        self.push_id = secrets.token_hex(8)
        await self._refresh(must=version is None)
        sources = [enter.manifest_digest for enter in enters]
        known = [handle for handle in self.handles if handle.raw_manifests]
        changed = [handle.index for handle in known if handle.planned_digest != handle.manifest_digest]
        for handle in known:
            if handle.misfit is not None:
                self._failed.setdefault(handle.index, handle.misfit)
        replan = sources != self._planned_sources or bool(changed)
        replan = replan or not all(enter.plan_digest and enter.plan_digest == enters[0].plan_digest for enter in enters)
        self._planned_sources = sources
        link = [h.index for h in known if h.index not in self._failed and (replan or h.needs_link())]
        regroup = self.group_broken or replan
        if regroup or link:
            self.generation += 1
        opening = Opening(
            push_id=self.push_id,
            replan=replan,
            link=link,
            regroup=regroup,
            group_name=f"source-{self.incarnation}-{self.generation}",
            rendezvous=self.rendezvous,
        )
        return msgspec.msgpack.encode(opening)

    def _check_alike(self, enters: Sequence[Enter]) -> None:
        for what in ("version", "targets", "config_digest"):
            values = [getattr(enter, what) for enter in enters]
            if any(value != values[0] for value in values):
                named = "config" if what == "config_digest" else what
                shown = "" if named == "config" else ": " + ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
                raise ProtocolError(f"the source ranks called with different {named}s{shown}; all ranks must call alike")
        stuck = {rank: enter.stuck for rank, enter in enumerate(enters) if enter.stuck}
        if stuck:
            raise ProtocolError(
                f"work of an earlier push has not ended on source ranks {stuck} (rank: tasks in flight); its memory cannot "
                "be reused; close this engine and make a new one"
            )

    async def _refresh(self, *, must: bool) -> None:
        """Ask every target whose links do not stand whether it is there. ``must``: all of them have to be."""
        asked = [handle for handle in self.handles if not handle.linked]
        timeout_s = self.config.connect_timeout_s if must else min(self.config.target_timeout, self.config.connect_timeout_s)
        results = await asyncio.gather(*(handle.refresh(timeout_s, wait=must) for handle in asked), return_exceptions=True)
        for handle, result in zip(asked, results, strict=True):
            error: BaseException | None = result if isinstance(result, BaseException) else None
            if isinstance(error, TimeoutError):
                error = TargetUnreachable(f"target {handle.address} gave no status within {timeout_s:.3g} s")
            if error is not None and (must or not isinstance(error, SynclineError)):
                raise error
            if error is not None:
                self._failed[handle.index] = TargetLost(f"target {handle.address} is not there: {error}")

    async def decide_manifests(self, parts: Sequence[bytes]) -> bytes:
        """All manifests, for every rank to plan from."""
        self._sources = list(parts)
        for handle in self.handles:
            handle.planned()
            handle.linked_incarnation = ""
        return self._all_manifests()

    def _all_manifests(self) -> bytes:
        manifests = Manifests(sources=self._sources, targets=[handle.raw_manifests for handle in self.handles])
        return msgspec.msgpack.encode(manifests)

    async def decide_misfits(self, error: PlanError, problem: Misfit) -> bytes:
        """No plan for a push: a target that came back with another model is left out, and the plan goes on as before that.

        Args:
            error: why there is no plan; raised if no such target is to blame.
            problem: why the sources and the manifests of one target, of this index, do not fit together.
        """
        found = 0
        for handle in self.handles:
            if not handle.came_back_changed:
                continue
            if (why := await problem(self._sources, handle.raw_manifests, handle.index)) is not None:
                found += 1
                text = f"target {handle.address} came back with other tensors than it had, which do not fit this source"
                misfit = PlanError([text, *why.problems])
                self._failed[handle.index] = misfit
                handle.keep_before(misfit)
        if not found:
            self._planned_sources = []
            raise error
        return self._all_manifests()

    async def decide_planned(self, parts: Sequence[bytes]) -> bytes:
        """Plans must be one and the same on every rank."""
        if any(part != parts[0] for part in parts):
            self._planned_sources = []
            raise ProtocolError(f"the source ranks computed different plans: {[part.decode()[:12] for part in parts]}")
        return parts[0]

    # -------------------------------------------------------------------------------------------------------- linking

    async def connect_targets(
        self, link: Sequence[int], offers: Sequence[Offers], plan: Plan, kinds: Mapping[int, str], timeout_s: float
    ) -> Linked:
        """``POST /connect`` to every target in ``link`` (while all source ranks link up); who failed."""
        results = await asyncio.gather(
            *(self._connect(self.handles[index], offers, plan, kinds[index], timeout_s) for index in link),
            return_exceptions=True,
        )
        failed: dict[str, tuple[str, str]] = {}
        for index, result in zip(link, results, strict=True):
            if isinstance(result, SynclineError):
                failed[str(index)] = (type(result).__name__, wire_text(result))
            elif isinstance(result, BaseException):
                raise result
        return Linked(failed=failed)

    async def _connect(self, handle: TargetHandle, offers: Sequence[Offers], plan: Plan, kind: str, timeout_s: float) -> None:
        if handle.misfit is not None:
            raise handle.misfit
        assert handle.status is not None
        # A receiver's program takes up to seconds to draw where a large source is cut finely.
        programs = await asyncio.to_thread(_programs, plan, handle.index, len(handle.manifests))
        descriptors = {str(owner): offers[owner].descriptors[str(handle.index)] for owner in range(len(offers))}
        ranks = [
            RankLinks(rank=rank, program=program, transport=kind, descriptors=descriptors)  # type: ignore[arg-type]
            for rank, program in enumerate(programs)
        ]
        await handle.client.connect(
            ConnectRequest(
                target=handle.index,
                plan_digest=plan.digest,
                manifest_digest=handle.status.manifest_digest,
                source_incarnation=self.incarnation,
                generation=self.generation,
                landing=self.config.landing,
                in_flight=self.config.in_flight,
                verify=self.config.verify,
                ranks=ranks,
                timeout_s=timeout_s,
            )
        )

    async def decide_linked(self, parts: Sequence[bytes], link: Sequence[int], *, must: bool) -> bytes:
        """A target is linked when every rank has linked it. ``must``: all of them have to be."""
        failed: dict[str, tuple[str, str]] = {}
        for linked in reversed(decode(parts, Linked)):  # rank 0 knows what the target itself said
            failed.update(linked.failed)
        for index in link:
            handle = self.handles[index]
            if str(index) in failed:
                error = error_from_wire(*failed[str(index)])
                handle.unlinked(str(error))
                self._failed[index] = error
                if must:
                    raise error
            else:
                handle.linked_up()
        self.group_broken = False
        return msgspec.msgpack.encode(Linked(failed=failed))

    # ------------------------------------------------------------------------------------------------------- prepare

    async def decide_start(self, version: int, plan: Plan, remaining: Callable[[], float], *, retry: bool) -> bytes:
        """Phase one: every linked target gets ready. Says who takes part.

        ``retry``: a target that refuses the plan (it was reallocated, or linked with another source meanwhile) ends this
        attempt, and the next one plans anew.
        """
        linked = [handle for handle in self.handles if handle.index not in self._failed and handle.linked]
        timeout_s = min(remaining(), self.config.target_timeout)
        replies = await self._ask(linked, lambda handle: self._prepare(handle, version, plan, remaining()), timeout_s)
        conflict: SynclineError | None = None
        for index, reply in replies.items():
            if isinstance(reply, SynclineError):
                conflict = conflict or (reply if isinstance(reply, VersionConflict) else None)
                self._failed[index] = reply
                self.handles[index].unlinked(str(reply))
            else:
                self._prepared[index] = reply
        if conflict is not None:
            await self.abort(f"version conflict: {conflict}")
            raise conflict
        refused = next((reply for reply in replies.values() if isinstance(reply, PlanError)), None)
        if refused is not None and retry:
            await self.abort(f"planned anew: {refused.problems[0]}")
            return msgspec.msgpack.encode(Start(live=[], already=[], remaining_s=remaining(), stale=True))
        start = Start(
            live=[index for index, reply in self._prepared.items() if reply.status == "ready"],
            already=[index for index, reply in self._prepared.items() if reply.status == "already"],
            remaining_s=remaining(),
        )
        return msgspec.msgpack.encode(start)

    async def _prepare(self, handle: TargetHandle, version: int, plan: Plan, timeout_s: float) -> PrepareReply:
        request = PrepareRequest(
            num_buckets=plan.total_tasks,
            version=version,
            plan_digest=plan.digest,
            push_id=self.push_id,
            incarnation=handle.linked_incarnation,
            source_incarnation=self.incarnation,
            timeout_s=timeout_s,
        )
        reply = await handle.client.prepare(request)
        if reply.status == "error":
            raise error_from_wire(reply.error or "PushError", f"target {handle.address}: {reply.message}")
        self._logs[handle.index] = TargetLog(ready=time.perf_counter())
        return reply

    # ------------------------------------------------------------------------------------------------------ complete

    async def decide_outcome(
        self, parts: Sequence[bytes], version: int, plan: Plan, lost: Mapping[int, str], remaining: Callable[[], float],
        *, clock: ClockLog | None = None,
    ) -> bytes:  # fmt: skip
        """Phase two: every target votes and commits. Builds the outcome that all ranks report.

        ``clock``: this rank's, if there is to be a trace.
        """
        all_done = time.perf_counter()
        ranks = decode(parts, Done)
        digests = _add_digests(ranks)
        for index, reason in lost.items():
            self._failed.setdefault(index, TargetLost(f"target {self.handles[index].address} was lost: {reason}"))
            self.handles[index].unlinked(reason)
        await self._check_already(version, digests)
        ready = [
            self.handles[index]
            for index, reply in self._prepared.items()
            if reply.status == "ready" and index not in self._failed
        ]
        timeout_s = max(remaining() - _ANSWER_MARGIN_S, remaining() / 2)
        replies = await self._ask(ready, lambda handle: self._complete(handle, version, digests, timeout_s), timeout_s)
        outcomes = [self._outcome(handle, version, replies.get(handle.index)) for handle in self.handles]
        self.last_version = version
        outcome = Outcome(
            version=version,
            digest=_hex(digests[CONTENT]) if CONTENT in digests else "",
            seconds=time.perf_counter() - self._started,
            tasks=plan.total_tasks,
            targets=outcomes,
            ranks=ranks,
            offsets=_offsets(ranks, clock),
            voting=(all_done, time.perf_counter()),
        )
        return msgspec.msgpack.encode(outcome)

    async def _check_already(self, version: int, digests: Mapping[str, int]) -> None:
        for index, reply in self._prepared.items():
            if reply.status != "already" or not self.config.verify:
                continue
            for rank, held in reply.digests.items():
                sent = _hex(digests.get(f"{index}:{rank}", 0))
                if held and held != sent:
                    conflict = VersionConflict(
                        f"target {self.handles[index].address} rank {rank} holds version {version} with digest {held}, and "
                        f"this push names other content by it ({sent}); push the new content under a higher version"
                    )
                    await self.abort(str(conflict))
                    raise conflict

    async def _complete(
        self, handle: TargetHandle, version: int, digests: Mapping[str, int], timeout_s: float
    ) -> CompleteReply:
        mine = {str(rank): _hex(digests.get(f"{handle.index}:{rank}", 0)) for rank in range(len(handle.manifests))}
        request = CompleteRequest(
            version=version,
            push_id=self.push_id,
            flush_cache=self.flush_cache,
            digests=mine if self.config.verify else {},
            timeout_s=timeout_s,
        )
        log = self._logs.setdefault(handle.index, TargetLog())
        log.asked = time.perf_counter()
        reply = await handle.client.complete(request)
        log.answered = time.perf_counter()
        log.commit_s, log.pause_s, log.landings = reply.commit_s, reply.pause_s, reply.landings
        return reply

    def _outcome(self, handle: TargetHandle, version: int, reply: CompleteReply | SynclineError | None) -> TargetOutcome:
        prepared = self._prepared.get(handle.index)
        error = self._failed.get(handle.index)
        if isinstance(reply, SynclineError):
            error = reply
            handle.unlinked(str(reply))
        elif isinstance(reply, CompleteReply) and not reply.success:
            error = error_from_wire(reply.error or "PushError", f"target {handle.address}: {reply.message}")
            handle.unlinked(str(error))
        elif reply is None and error is None and not (prepared and prepared.status == "already"):
            error = handle.lost_error()
        answered = reply if isinstance(reply, CompleteReply) else None
        already = error is None and prepared is not None and prepared.status == "already"
        return TargetOutcome(
            ok=error is None,
            state=answered.state if answered else ("COMMITTED" if already else None),
            version=answered.version if answered else (version if already else None),
            error=type(error).__name__ if error else "",
            message=wire_text(error) if error else "",
            already=already,
            landing_bytes=answered.landing_bytes if answered else 0,
            commit_s=answered.commit_s if answered else 0.0,
            pause_s=answered.pause_s if answered else 0.0,
            log=self._logs.get(handle.index),
        )

    # --------------------------------------------------------------------------------------------------------- abort

    async def abort(self, reason: str) -> None:
        """Tell every target that got ready that this push is over. Every rank closes its links: all are made anew next time."""
        prepared = [self.handles[i] for i, reply in self._prepared.items() if reply.status == "ready" and i not in self._failed]
        request = AbortRequest(push_id=self.push_id, reason=reason)
        self.group_broken = True
        try:
            await self._ask(prepared, lambda handle: handle.client.abort(request), _ABORT_TIMEOUT_S)
        finally:
            for handle in self.handles:
                if handle.linked:
                    handle.unlinked(f"the last push was aborted: {reason}")

    async def _ask(
        self, handles: Sequence[TargetHandle], call: Callable[[TargetHandle], Awaitable[T]], timeout_s: float
    ) -> dict[int, T | SynclineError]:
        """Call several targets side by side; each answer, or the typed error in its place. A lost target ends its call."""
        tasks = {handle.index: asyncio.ensure_future(call(handle)) for handle in handles}
        losses = {handle.index: asyncio.create_task(handle.lost.wait()) for handle in handles}
        try:
            async with asyncio.TaskGroup() as scope:
                waits = {
                    handle.index: scope.create_task(self._answer(handle, tasks[handle.index], losses[handle.index], timeout_s))
                    for handle in handles
                }
        finally:
            for task in (*tasks.values(), *losses.values()):
                task.cancel()
            await asyncio.gather(*tasks.values(), *losses.values(), return_exceptions=True)
        return {index: wait.result() for index, wait in waits.items()}

    async def _answer(
        self, handle: TargetHandle, call: asyncio.Future[T], loss: asyncio.Future[Any], timeout_s: float
    ) -> T | SynclineError:
        await asyncio.wait((call, loss), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            error = call.exception()
            if error is None:
                return call.result()
            if isinstance(error, SynclineError) and not isinstance(error, TargetUnreachable):
                return error
            return TargetLost(f"target {handle.address} is lost: {error}")
        if loss.done():
            return handle.lost_error()
        slow = "; in_flight='drain' waits for requests that are being answered" if self.config.in_flight == "drain" else ""
        return TargetLost(f"target {handle.address} is lost: it gave no answer within {timeout_s:.3g} s{slow}")

    async def close(self) -> None:
        """Let go of every target. One of somebody's own may wait for whoever waits here, and does not hold this up."""
        closing = [asyncio.create_task(handle.close()) for handle in self.handles]
        _, late = await asyncio.wait(closing, timeout=_CLOSE_S)
        for task in late:
            task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody is told any more
            task.cancel()
        errors = [task.exception() for task in closing if task.done() and not task.cancelled()]
        for error in filter(None, errors):
            raise error


def _programs(plan: Plan, target: int, ranks: int) -> list[bytes]:
    return [plan.target_program(target, rank).to_bytes() for rank in range(ranks)]


def _check_manifests(enters: Sequence[Enter]) -> None:
    """What is wrong with the source's manifests, of all ranks at once; the same problem of several ranks once."""
    ranks: dict[str, list[int]] = {}
    for rank, enter in enumerate(enters):
        for problem in enter.problems:
            ranks.setdefault(problem, []).append(rank)
    if ranks:
        raise PlanError([f"source rank {', '.join(map(str, who))}: {problem}" for problem, who in ranks.items()])


def _add_digests(ranks: Sequence[Done]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for done in ranks:
        for receiver, partial in done.digests.items():
            sums[receiver] = (sums.get(receiver, 0) + int(partial, 16)) % _MODULUS
    return sums


def _offsets(ranks: Sequence[Done], clock: ClockLog | None) -> list[Offset]:
    if clock is None:
        return []
    logs = [done.log for done in ranks]
    return [clock.offset(rank, log.trips) if rank and log is not None else Offset() for rank, log in enumerate(logs)]


def _hex(digest: int) -> str:
    return f"{digest:032x}"
