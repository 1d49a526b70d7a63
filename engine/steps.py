"""What source ranks say to each other in the steps of a push (see `syncline.engine.push`). msgpack, between ranks only."""

from __future__ import annotations

import msgspec

from .messages import Landing
from .trace_clock import Offset
from .trace_log import RankLog, TargetLog

CONTENT = "*"
"""Key in `Done.digests` of the digest over all buckets that a rank owns, each counted once whoever gets it."""


class Enter(msgspec.Struct, kw_only=True):
    """Every rank, at the start of an attempt."""

    version: int | None
    """None at `connect`: plan and link, push nothing."""
    manifest_digest: str
    targets: list[str]
    config_digest: str
    """Ranks with other targets or knobs would build other plans: refused at once."""
    plan_digest: str = ""
    """The plan that the rank is wired up for; empty if it has none, as after an attempt that failed half-way."""
    problems: list[str] = []
    """What is wrong with the rank's manifest; then there is no digest."""
    stuck: int = 0
    """Tasks of earlier pushes whose work on this rank has not ended yet."""


class Opening(msgspec.Struct, kw_only=True):
    """Rank 0's decision on `Enter`."""

    push_id: str
    replan: bool
    link: list[int]
    """Targets to link before this push."""
    regroup: bool
    """Make the communicator among the source ranks anew, under ``group_name``, meeting at ``rendezvous``."""
    group_name: str
    rendezvous: str


class Manifests(msgspec.Struct, kw_only=True):
    """Rank 0's decision on the ranks' manifests: all of them, sources in rank order and targets in order."""

    sources: list[bytes]
    targets: list[list[bytes]]


class Offers(msgspec.Struct, kw_only=True):
    """One rank's descriptors: target (as text) -> transport descriptor."""

    descriptors: dict[str, bytes]


class Linked(msgspec.Struct, kw_only=True):
    """Which targets one rank (or, as decision, any rank) could not link: target (as text) -> (error class, text)."""

    failed: dict[str, tuple[str, str]] = {}


class Start(msgspec.Struct, kw_only=True):
    """Rank 0's decision after the targets' `prepare`: who takes part, and how long the push may still take."""

    live: list[int]
    already: list[int]
    """Targets that say they hold this version: the digest is computed and compared, nothing is sent to them."""
    remaining_s: float
    stale: bool = False
    """A target refused the plan: nobody takes part, and all ranks begin once more."""


class Done(msgspec.Struct, kw_only=True):
    """What one rank did."""

    digests: dict[str, str]
    """Receiver ``"target:rank"`` (or `CONTENT`) -> partial digest (hex) over the buckets that this rank owns."""
    peak_tmp_bytes: int
    landing_bytes: int
    bytes: int
    source_free_s: float
    busy_s: dict[str, float]
    tasks: dict[str, int]
    log: RankLog | None = None
    """What the trace is made of; None when tracing is off."""


class TargetOutcome(msgspec.Struct, kw_only=True):
    """`TargetReport` in a form that travels."""

    ok: bool
    state: str | None
    version: int | None
    error: str = ""
    message: str = ""
    already: bool = False
    landing_bytes: int = 0
    commit_s: float = 0.0
    pause_s: float = 0.0
    log: TargetLog | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """Rank 0's decision at the end: the report, on every rank the same."""

    version: int
    digest: str
    seconds: float
    tasks: int
    targets: list[TargetOutcome]
    ranks: list[Done]
    offsets: list[Offset] = []
    """How the times of each rank's `Done.log` are read on rank 0's clock."""
    voting: tuple[float, float] = (0.0, 0.0)
    """When rank 0 had heard from all ranks, and when all targets had voted, on its clock."""


class HeadNote(msgspec.Struct, kw_only=True):
    """To rank 0, from time to time: the first task, in plan order, that a rank has still to send."""

    attempt: int
    rank: int
    task: int | None
    """None: it has sent everything."""
    waits: dict[str, float]
    """Targets (as text) that this task waits for -> seconds since they last took anything. Empty: it is not ready to go."""


class LossNote(msgspec.Struct, kw_only=True):
    """To rank 0: a link to this target failed here. From rank 0: the target is dropped from task ``at_task`` on."""

    attempt: int
    target: int
    at_task: int
    reason: str
    error: str = "TargetLost"


class PlanSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The knobs that shape a plan; part of `Enter.config_digest`."""

    bucket_bytes: int
    max_tmp_bytes: int
    landing: Landing
    transport: str
    verify: bool
