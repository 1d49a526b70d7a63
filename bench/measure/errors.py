"""What can go wrong with a measurement itself (a push that fails is a result, not an error)."""

from __future__ import annotations

from syncline.scheduler.errors import SynclineError


class BenchError(SynclineError):
    """A measurement could not be made: a measured process ended or gave no answer, or what was asked for does not exist."""
