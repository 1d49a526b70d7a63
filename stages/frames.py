"""How a bucket is cut into messages on two-sided transports: large segments travel alone, small neighbours together.

A segment that travels alone need not pass through a bucket: it can be sent straight from the trainer's memory and received
straight into the place where it is to be. Both ends cut in the same way, by the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline.scheduler.programs import Segment, SourceTask, TargetTask

FRAME_NBYTES = 512 * 1024
"""From this size on a segment travels alone: a message more costs less than a copy of so many bytes."""


class Frame(NamedTuple):
    """One message: bytes ``start`` to ``start + nbytes`` of a bucket. ``alone``: they are one whole segment."""

    start: int
    nbytes: int
    alone: bool


def frames(segments: Sequence[Segment], nbytes: int) -> tuple[Frame, ...]:
    """The messages of a bucket of ``nbytes``, in order. What alignment leaves between them is not sent."""
    if not segments:
        return (Frame(0, nbytes, alone=False),) if nbytes else ()
    found: list[Frame] = []
    for segment in segments:  # in order of their offsets
        if segment.nbytes == 0:
            continue
        last = found[-1] if found else None
        if segment.nbytes >= FRAME_NBYTES or last is None or last.alone:
            found.append(Frame(segment.offset, segment.nbytes, segment.nbytes >= FRAME_NBYTES))
        else:
            found[-1] = Frame(last.start, segment.offset + segment.nbytes - last.start, alone=False)
    return tuple(found)


class FrameTable:
    """The messages of every task, cut when they are first asked for."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SourceTask | TargetTask, tuple[Frame, ...]]] = {}

    def of(self, task: SourceTask | TargetTask) -> tuple[Frame, ...]:
        """The messages of a task, the same on both ends."""
        known = self._known.get(task.index)
        if known is None or known[0] is not task:
            segments = task.segments if isinstance(task, SourceTask) else [landing.segment for landing in task.landings]
            known = self._known[task.index] = task, frames(segments, task.nbytes)
        return known[1]
