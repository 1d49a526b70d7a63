"""Errors of the data plane. The whole tree is drawn in `syncline.engine.errors`."""

from __future__ import annotations

import traceback
from typing import TypeVar

from syncline.scheduler.errors import SynclineError

E = TypeVar("E", bound=BaseException)


class TransportError(SynclineError):
    """A link broke, a peer went away, or a buffer could not be had. The communicator is discarded, never reused."""


def without_frames(error: E) -> E:
    """The same error, for somebody who keeps it: without the frames that it went through, and what lies in them.

    They would hold memory that was worked on for as long as the error is known. Where it arose stays there to be read, as a
    note of errors that are not ours.
    """
    if not isinstance(error, SynclineError) and error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            found += [one.__cause__, one.__context__]
    return error
