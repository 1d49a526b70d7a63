"""Messages of the control plane: msgspec structs, JSON over HTTP (msgpack where a body carries a plan or a manifest).

`PrepareRequest`, `PrepareReply`, `CompleteRequest` and `CompleteReply` are the four messages of the two-phase protocol
(``POST /prepare_weights_update``, ``POST /complete_weights_update``) plus what the fence needs: version, plan digest,
incarnation, push id, vote. A source that speaks only the two-phase protocol sends just its fields; ours leave
``buckets`` empty, because the plan that both sides hold already says what each bucket is.

Between the leader rank of a target and its other ranks the same structs travel, and `VoteReply`, `RankOrder`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["COMMITTED", "UPDATING", "FENCED"]
Landing = Literal["staged", "streamed", "mapped"]
InFlight = Literal["drain", "abort", "keep"]


class BucketMetadata(msgspec.Struct, kw_only=True):
    """What one bucket holds, for sources that send it with every push."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class PrepareRequest(msgspec.Struct, kw_only=True):
    """``POST /prepare_weights_update``: get ready for one push."""

    num_buckets: int
    buckets: list[BucketMetadata] = []
    group_name: str = "weight_sync_group"
    version: int | None = None
    plan_digest: str = ""
    push_id: str = ""
    incarnation: str = ""
    source_incarnation: str = ""
    """As in `ConnectRequest`; another source's links are not used. Empty: not said."""
    digests: dict[str, str] = {}
    """What the source would send to each rank, if it knows before: rank -> content digest (hex)."""
    timeout_s: float = 60.0


class PrepareReply(msgspec.Struct, kw_only=True):
    """``status``: ``ready`` (receives are posted), ``already`` (this version is committed here), or ``error``."""

    status: Literal["ready", "already", "error"]
    message: str = ""
    error: str = ""
    incarnation: str = ""
    manifest_digest: str = ""
    version: int | None = None
    digests: dict[str, str] = {}
    """What the ranks hold under ``version``: rank -> content digest (hex)."""


class CompleteRequest(msgspec.Struct, kw_only=True):
    """``POST /complete_weights_update``: wait for the last byte, verify, vote, and commit if all ranks vote yes."""

    group_name: str = "weight_sync_group"
    flush_cache: bool = False
    version: int | None = None
    push_id: str = ""
    incarnation: str = ""
    digests: dict[str, str] = {}
    """What the source sent to each rank: rank -> content digest (hex). Empty when digests are off."""
    timeout_s: float = 60.0


class LandingTime(msgspec.Struct, frozen=True, array_like=True):
    """How a push landed on one rank of a target.

    ``seconds`` from ``ready`` until every byte had landed and was digested; in ``starved_s`` of them nothing had come.
    """

    rank: int
    seconds: float
    starved_s: float


class CompleteReply(msgspec.Struct, kw_only=True):
    """``success`` only when every rank voted yes and committed."""

    success: bool
    num_buckets_received: int = 0
    message: str = ""
    error: str = ""
    """Class name of the error (see `syncline.engine.errors`)."""
    state: State = "FENCED"
    version: int | None = None
    votes: dict[str, bool] = {}
    landing_bytes: int = 0
    commit_s: float = 0.0
    pause_s: float = 0.0
    landings: list[LandingTime] = []


class AbortRequest(msgspec.Struct, kw_only=True):
    """``POST /abort``: the push is over; a late abort of an older push changes nothing."""

    push_id: str
    reason: str = ""


class RankOrder(msgspec.Struct, kw_only=True):
    """Leader to rank: one step of a push. ``incarnation``: which life of the rank is meant; others refuse."""

    push_id: str
    incarnation: str = ""
    order: Literal["pause", "commit", "resume", "fence", "abort"]
    version: int | None = None
    in_flight: InFlight = "keep"
    flush_cache: bool = False
    reason: str = ""
    timeout_s: float = 60.0


class VoteReply(msgspec.Struct, kw_only=True):
    """A rank's vote: yes only when its last byte has landed and its digest equals the source's."""

    yes: bool
    rank: int
    digest: str = ""
    message: str = ""
    error: str = ""
    buckets: int = 0
    landing_bytes: int = 0
    landing_s: float = 0.0
    starved_s: float = 0.0
    """See `LandingTime`."""


class Ack(msgspec.Struct, kw_only=True):
    """Done, or why not."""

    ok: bool = True
    message: str = ""
    error: str = ""
    serving: int | None = None
    """The version that forward passes may read on the rank that answers; None: none may run."""


class JoinRequest(msgspec.Struct, kw_only=True):
    """Rank to leader: I am here.

    ``incarnation`` is new for every join, ``process`` stays for the life of the process. ``serving``: see `Ack`.
    """

    rank: int
    address: str
    incarnation: str
    process: str = ""
    world_size: int = 0
    serving: int | None = None


class Status(msgspec.Struct, kw_only=True):
    """``GET /status``: what a target (asked of its leader) or a rank is and serves."""

    state: State
    version: int | None
    digest: str
    incarnation: str
    rank: int
    world_size: int
    ready: bool
    """All ranks have joined; manifests can be asked for."""
    manifest_digest: str
    landing_bytes: int = 0
    pushes: int = 0
    message: str = ""


class RankLinks(msgspec.Struct, kw_only=True):
    """What one rank of a target needs to link up: its program and one descriptor per owner and transport."""

    rank: int
    program: bytes
    transport: Literal["shm", "gloo", "cuda_ipc", "nccl"]
    descriptors: dict[str, bytes]
    """Source rank (as text) -> the sender's descriptor."""


class ConnectRequest(msgspec.Struct, kw_only=True):
    """``POST /connect`` (msgpack): the plan as each rank of the target sees it, and how to link up."""

    target: int
    plan_digest: str
    manifest_digest: str
    source_incarnation: str
    generation: int
    landing: Landing
    in_flight: InFlight
    verify: bool
    ranks: list[RankLinks]
    timeout_s: float


class ManifestReply(msgspec.Struct, kw_only=True):
    """``GET /manifest`` (msgpack): the manifests of all ranks of the target, in rank order."""

    manifests: list[bytes]
    incarnation: str
    manifest_digest: str
