"""What SGLang's endpoints take, by version: read off its releases 0.5.9 to 0.5.23, and run with 0.5.23."""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.engine.errors import ConfigError

Version = tuple[int, int, int]

OLDEST: Version = (0, 5, 9)
BEYOND: Version = (0, 6, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How a version wants to be spoken to.

    Attributes:
        version: as the server says it.
        sessions: updates run between ``/begin_weight_update`` and ``/end_weight_update``, and only there.
        selector: updates say which models they are for: the target, the draft, or both.
        continue_keeps_memory: ``/continue_generation`` empties the allocator's cache unless it is told not to.
        flush_waits: ``/flush_cache`` takes a timeout.
        flushes_over_waiting: a paused server flushes although requests wait; before, it refuses while any does.
        reports_spans: answers say which tokens come from which version.
    """

    version: str
    sessions: bool
    selector: bool
    continue_keeps_memory: bool
    flush_waits: bool
    flushes_over_waiting: bool
    reports_spans: bool


def dialect_of(version: str) -> Dialect:
    """The dialect of a version as ``/server_info`` says it (``0.5.23``, ``0.5.10.post1``).

    Raises:
        ConfigError: a version that is too old, too new, or none at all.
    """
    number = _number(version)
    if not OLDEST <= number < BEYOND:
        why = f"SGLang {version} is not supported: syncline speaks to {_text(OLDEST)} and later, before {_text(BEYOND)}"
        raise ConfigError([f"{why}; install one of those, or a newer syncline"])
    return Dialect(
        version=version,
        sessions=number >= (0, 5, 21),
        selector=number >= (0, 5, 21),
        continue_keeps_memory=number >= (0, 5, 20),
        flush_waits=number >= (0, 5, 10),
        flushes_over_waiting=number >= (0, 5, 20),
        reports_spans=number >= (0, 5, 20),
    )


def _number(version: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError([f"the server says that its version is {version!r}, which is no version of SGLang"])
    return int(match[1]), int(match[2]), int(match[3])


def _text(version: Version) -> str:
    return ".".join(map(str, version))
