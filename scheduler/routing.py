"""What of a plan goes straight from the ranks that hold it, what is gathered by one rank first, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .cutting import WHY, Why
from .materialize import Routes
from .problems import listed

IN_WORDS: Mapping[Why, str] = {
    "balance": "its holder would send too much",
    "route": "route is 'gather'",
    "mapped": "landing is 'mapped'",
    "whole": "the target takes it whole",
    "small": "its parts are small",
    "groups": "quantization groups span shards",
}
"""Reasons for gathering, for people."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Tensors that are gathered for one reason: bytes as receivers get them, and the names (all of them, in few words)."""

    tensors: int
    nbytes: int
    names: str


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a plan's bytes travel. Bytes are counted as receivers get them, once for each, unless said otherwise.

    Attributes:
        direct_tensors, direct_nbytes: tensors of which every byte comes from a rank that holds it, and all such bytes (those
            of tensors that are gathered in part too).
        partly_direct_tensors: gathered tensors of which a part is direct.
        gathered_tensors, gathered_nbytes: tensors of which some part is put together from other ranks' pieces, and these
            parts' bytes.
        moved_nbytes: bytes that source ranks send each other for that.
        messages: in so many messages.
        why: for each reason, what is gathered for it. A tensor may be gathered for more than one.
    """

    direct_tensors: int = 0
    direct_nbytes: int = 0
    gathered_tensors: int = 0
    gathered_nbytes: int = 0
    moved_nbytes: int = 0
    messages: int = 0
    why: Mapping[Why, Gathered] = field(default_factory=dict)
    partly_direct_tensors: int = 0

    @property
    def direct_in_words(self) -> str:
        """What is direct: bytes, of which tensors, and why where the route asks for gathering."""
        parts = f", parts of {self.partly_direct_tensors} tensors" if self.partly_direct_tensors else ""
        reason = " (one rank holds them whole)" if "route" in self.why and self.direct_nbytes else ""
        return f"{size(self.direct_nbytes)}: {self.direct_tensors} whole tensors{parts}{reason}"

    def __str__(self) -> str:
        direct = f"direct: {self.direct_in_words}"
        if not self.gathered_tensors:
            return f"{direct}; nothing is gathered"
        reasons = "; ".join(f"{IN_WORDS[why]}: {rows.tensors}" for why, rows in self.why.items())
        moved = f"{size(self.moved_nbytes)} between source ranks in {self.messages} messages"
        return f"{direct}; gathered: {size(self.gathered_nbytes)} of {self.gathered_tensors} tensors ({moved}; {reasons})"


def summarize(routes: Routes) -> Routing:
    """Count what of a plan is direct and what is gathered."""
    segments, patterns, rows = routes.segments, routes.patterns, routes.gather.contributions
    audience = np.array([len(receivers) for receivers in patterns.audiences], np.int64)
    copies = audience[routes.tasks.audience[segments.task]] if len(segments.task) else segments.task
    nbytes = patterns.units.nbytes[segments.unit] * copies
    gathered = np.zeros(len(segments.task), bool)
    gathered[rows.segment[rows.message >= 0]] = True
    why = patterns.items.why[patterns.units.item[segments.unit]]
    reasons: dict[Why, Gathered] = {}
    for code, reason in enumerate(WHY):
        mine = gathered & (why == code)
        if mine.any():
            tensors = np.unique(segments.tensor[mine]).tolist()
            names = listed(routes.names[t] for t in tensors)
            reasons[reason] = Gathered(tensors=len(tensors), nbytes=int(nbytes[mine].sum()), names=names)
    some = len(np.unique(segments.tensor[gathered]))
    direct = len(np.unique(segments.tensor)) - some
    return Routing(
        direct_tensors=direct,
        partly_direct_tensors=len(np.unique(segments.tensor[~gathered])) - direct,
        direct_nbytes=int(nbytes[~gathered].sum()),
        gathered_tensors=some,
        gathered_nbytes=int(nbytes[gathered].sum()),
        moved_nbytes=int(routes.gather.messages.nbytes.sum()),
        messages=len(routes.gather.messages.task),
        why=reasons,
    )


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit, step in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= step:
            return f"{nbytes / step:.1f} {unit}"
    return f"{nbytes:.0f} bytes"
