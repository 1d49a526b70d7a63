"""What measured pushes were like, as measured processes say it: `Push` and `Pushes`. Plain data, in JSON between processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import msgspec

from syncline.engine import PushReport, TransferEngine
from syncline.engine.trace import Span
from syncline.scheduler.errors import SynclineError


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """One push.

    Attributes:
        seconds: from the call to the result, on rank 0: control, data, digests, votes, pause, commit and resume.
        source_free_s: seconds until no task read the source's memory any more, on the slowest rank.
        commit_s, pause_s: of the slowest target.
        busy_s: by stage, as `syncline.engine.StageReport`.
        errors: what befell each target that did not commit, as ``"DigestMismatch: ..."``.
        spans: for each source rank its spans, if the config asked for a trace.
    """

    seconds: float
    ok: bool
    bytes: int
    tasks: int
    peak_tmp_bytes: int
    landing_bytes: int
    gather_messages: int
    source_free_s: float
    commit_s: float
    pause_s: float
    busy_s: Mapping[str, float]
    errors: tuple[str, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()

    @classmethod
    def of(cls, report: PushReport, seconds: float) -> Push:
        """The push that ``report`` tells of."""
        targets = report.targets.values()
        return cls(
            seconds=seconds,
            ok=report.ok,
            bytes=report.bytes,
            tasks=report.tasks,
            peak_tmp_bytes=report.peak_tmp_bytes,
            landing_bytes=report.landing_bytes,
            gather_messages=report.routing.messages,
            source_free_s=report.source_free_s,
            commit_s=max((target.commit_s for target in targets), default=0.0),
            pause_s=max((target.pause_s for target in targets), default=0.0),
            busy_s={name: stage.busy_s for name, stage in report.stages.items()},
            errors=tuple(error_text(target.error) for target in targets if target.error is not None),
            spans=tuple(tuple(spans) for spans in report.trace.ranks) if report.trace is not None else (),
        )


class Pushes(msgspec.Struct, frozen=True, kw_only=True):
    """Pushes one after the other, over links that were made once.

    Attributes:
        reports: each push, the first one cold.
        connect_s: seconds of ``connect``: manifests, plan, proof, links.
        error: what ended all of it (``"PlanError: ..."``: a config or plan that was refused, a push that raised); else empty.
        intact: every element at every receiver is what was pushed, and every target says that it has committed it. False
            until somebody looked.
    """

    reports: tuple[Push, ...] = ()
    connect_s: float = 0.0
    error: str = ""
    intact: bool = False

    @property
    def ok(self) -> bool:
        """Every push was committed by every target."""
        return not self.error and bool(self.reports) and all(push.ok for push in self.reports)

    @property
    def seconds(self) -> list[float]:
        """Of each push; the first one is cold."""
        return [push.seconds for push in self.reports]

    @property
    def busy_s(self) -> dict[str, float]:
        """By stage: median over all pushes but the first."""
        later = self.reports[1:] or self.reports
        return {name: statistics.median(push.busy_s[name] for push in later) for name in (later[0].busy_s if later else ())}

    @property
    def tasks(self) -> int:
        """Of one push."""
        return self.reports[-1].tasks if self.reports else 0

    @property
    def sent_bytes(self) -> int:
        """Of one push, over all receivers."""
        return self.reports[-1].bytes if self.reports else 0

    @property
    def gather_messages(self) -> int:
        """That source ranks send each other in one push."""
        return self.reports[-1].gather_messages if self.reports else 0

    @property
    def peak_tmp_bytes(self) -> int:
        """Highest of all pushes."""
        return max((push.peak_tmp_bytes for push in self.reports), default=0)

    @property
    def landing_bytes(self) -> int:
        """After the last push."""
        return self.reports[-1].landing_bytes if self.reports else 0

    @property
    def errors(self) -> tuple[str, ...]:
        """What went wrong: of the whole, and of single targets."""
        found = [self.error] if self.error else []
        return (*found, *(error for push in self.reports for error in push.errors))


async def push_repeatedly(engine: TransferEngine, repeat: int, *, first: int = 1) -> Pushes:
    """Connect, push ``repeat`` versions from ``first`` on (the content stays as it is), close. Errors of ours are results."""
    reports: list[Push] = []
    error, connect_s, began = "", 0.0, time.perf_counter()
    try:
        async with engine:
            connect_s = time.perf_counter() - began
            for version in range(first, first + repeat):
                began = time.perf_counter()
                report = await engine.push(version)
                reports.append(Push.of(report, time.perf_counter() - began))
    except SynclineError as raised:
        error = error_text(raised)
    return Pushes(reports=tuple(reports), connect_s=connect_s, error=error)


def error_text(error: BaseException) -> str:
    """``"DigestMismatch: …"``."""
    return f"{type(error).__name__}: {error}"
