"""What a plan may be told: sizes, route and landing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .formats import parse_format

Route = Literal["auto", "gather", "direct"]
LandingMode = Literal["staged", "streamed", "mapped"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `syncline.scheduler.plan.build_plan`. Part of the plan's digest.

    Attributes:
        bucket_bytes: a bucket is closed when the next tensor would take it beyond this; a larger tensor is split at leaf
            boundaries.
        max_tmp_bytes: watermark: no task may need more temporary bytes on any rank.
        route: ``gather`` has one rank assemble each part of a tensor; ``direct`` cuts what targets need at the source's
            shard boundaries, so that each shard is sent by a rank that holds it and nothing is gathered; ``auto`` cuts where
            the parts have at least ``leaf_bytes`` on average, and lets another rank assemble a part only if its holder would
            else send well above the mean. What must not be cut (`Layout.whole_tensors`, `Layout.uncut`), and all of it in
            ``mapped`` landing, is always gathered.
        leaf_bytes: size of digest leaves, and with it the smallest part.
        landing: ``mapped`` keeps all parts of a tensor with one owner, in one run of its landing space.
        shared_landing: buckets are assembled in landing memory, which is accounted apart: they cost no temporary bytes.
            Always so with ``mapped``.
        min_tasks_in_flight: parts and buckets are kept so small that this many tasks fit the watermark at once, where the
            leaf size allows.
        verify: whether receivers compute digests.
        scope: names of the tensors that a push covers; None covers everything.
        stage_host: what source ranks hold in memory of the host is copied to temporary memory first (`h2d`), as what lies in
            mapped files always is: buckets are assembled elsewhere.
        wire_format: how weights that a target holds as FP8 are quantized: ``auto`` reads it off the scales that the target
            declares beside them, a format's name (`syncline.scheduler.formats`) adds what they don't tell (blocks other
            than 128 x 128, powers of two), ``cast`` quantizes nothing.
        relays: targets whose ranks pass buckets on to each other where that saves sending them between hosts more than once
            (`syncline.scheduler.relays`).
        modules_to_not_convert: modules whose weights must not be quantized, as checkpoints list them.
    """

    bucket_bytes: int
    max_tmp_bytes: int
    route: Route = "gather"
    leaf_bytes: int = 262144
    landing: LandingMode = "staged"
    shared_landing: bool = False
    min_tasks_in_flight: int = 2
    verify: bool = True
    scope: frozenset[str] | None = None
    stage_host: bool = False
    wire_format: str = "auto"
    modules_to_not_convert: tuple[str, ...] = ()
    relays: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "max_tmp_bytes", "leaf_bytes", "min_tasks_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.wire_format not in {"auto", "cast"}:
            parse_format(self.wire_format)

    @property
    def in_landing(self) -> bool:
        """Whether buckets are assembled in landing memory."""
        return self.shared_landing or self.landing == "mapped"

    @property
    def digest_kind(self) -> str:
        """How receivers digest what they get."""
        return f"xxh3_128:{self.leaf_bytes}" if self.verify else "none"

    def key(self) -> tuple[object, ...]:
        """All options as plain data, equal for equal options."""
        scope = None if self.scope is None else sorted(self.scope)
        sizes = (self.bucket_bytes, self.max_tmp_bytes, self.leaf_bytes, self.min_tasks_in_flight)
        formats = (self.stage_host, self.wire_format, self.modules_to_not_convert)
        return (
            *sizes, self.route, self.landing, self.shared_landing, self.verify, scope, *formats, sorted(self.relays),
        )  # fmt: skip
