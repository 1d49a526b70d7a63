"""Errors of the data plane. The whole tree is drawn in `syncline.engine.errors`."""

from __future__ import annotations

from syncline.scheduler.errors import SynclineError


class TransportError(SynclineError):
    """A link broke, a peer went away, or a buffer could not be had. The communicator is discarded, never reused."""
