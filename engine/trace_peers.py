"""What ranks waited for of each other, inside their own work: known only when the traces of all ranks lie side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .trace_log import Span

if TYPE_CHECKING:
    from .trace import RankTrace


class PeerWait(NamedTuple):
    """From ``start`` to ``end``, in seconds, work of ``stage`` on ``task`` (``barrier``: of a group) waited for ``rank``."""

    stage: str
    task: int
    rank: int
    start: float
    end: float


class Part(NamedTuple):
    """A rank's part in work that several ranks do together: the span, and when its own share of it was done."""

    span: Span
    own_end: float


def peer_waits(ranks: Sequence[RankTrace]) -> list[list[PeerWait]]:
    """For each rank what it waited for of others.

    In a barrier everybody waits for the last one to enter. In the ``prepare`` of a task whose pieces come from several ranks
    each waits, once its own part is done, until the slowest has done its part.
    """
    found: list[list[PeerWait]] = [[] for _ in ranks]
    for (stage, index), parts in together(ranks).items():
        last = max(parts, key=lambda rank: parts[rank].own_end)
        until = parts[last].own_end
        for rank, (span, own_end) in parts.items():
            if rank != last and min(until, span.end) > own_end:
                found[rank].append(PeerWait(stage, index, last, own_end, min(until, span.end)))
    return found


def together(ranks: Sequence[RankTrace]) -> Mapping[tuple[str, int], Mapping[int, Part]]:
    """Work in which more than one rank took part -> each one's part. What a rank itself does in a barrier is to enter it."""
    shared: defaultdict[tuple[str, int], dict[int, Part]] = defaultdict(dict)
    for rank, details in enumerate(ranks):
        for span in details.spans:
            if span.stage == "barrier":
                shared[span.stage, span.task][rank] = Part(span, span.start)
            elif span.stage == "prepare":
                own_end = min(details.local_ends.get(span.task, span.end), span.end)
                shared[span.stage, span.task][rank] = Part(span, own_end)
    return {key: parts for key, parts in shared.items() if len(parts) > 1}
