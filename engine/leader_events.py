"""What happens to a target (events), and what its leader does about it (orders). Plain data; see `leader_machine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .messages import Landing

Step = Literal["prepare", "vote", "pause", "commit", "resume", "abort", "fence"]
Call = Literal["prepare", "complete", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A rank is there. ``incarnation`` names this connection, ``process`` its process, ``serving`` what it serves."""

    rank: int
    incarnation: str
    process: str
    serving: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A rank went away, or does not answer."""

    rank: int
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareAsked:
    """The source begins a push."""

    push_id: str
    version: int
    landing: Landing


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteAsked:
    """The source has sent everything."""

    push_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortAsked:
    """The source gives up, or went away."""

    push_id: str
    reason: str
    error: str = "PushAborted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replied:
    """A rank answered an order. ``serving`` (abort, fence): what it serves now."""

    push_id: str
    step: Step
    rank: int
    ok: bool
    already: bool = False
    serving: int | None = None
    error: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlinePassed:
    """The push took too long; ``grace``: and so did the ranks that had to give it up."""

    push_id: str
    grace: bool = False


Event = Joined | Lost | PrepareAsked | CompleteAsked | AbortAsked | Replied | DeadlinePassed


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Order ``step`` on each of ``ranks``."""

    push_id: str
    step: Step
    ranks: tuple[int, ...]
    version: int | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to the source's call."""

    push_id: str
    call: Call
    ok: bool
    already: bool = False
    error: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """From now on wait only briefly, then say `DeadlinePassed` with ``grace``."""

    push_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Close the connection to this rank: it did not obey. It has to join again."""

    rank: int
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """The push has ended on this target; its timers and its data can go."""

    push_id: str
    committed: bool


Order = Send | Answer | Grace | Drop | Over
