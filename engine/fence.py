"""The version fence of one rank of a target: what it may serve, and which orders it still obeys. Pure: no I/O, no clock.

    COMMITTED(v) --prepare--> UPDATING: receiving -> voted -> paused -> committing -> applied --resumed--> COMMITTED(v')
         ^                        |          |         |           |            |
         '------- abort ----------+----------+---------'           |            |
                                  |          |         | (lost or  |            |
         FENCED <-----------------'          '         | timeout)  |            |
            ^      (streamed, once a byte landed)      |           |            |
            '------------------------------------------+-----------+------------'

`serving_version` is a version only while every byte of the live parameters belongs to that one committed version and no
forward pass could meet another: under ``staged`` and ``mapped`` until the rank is paused, under ``streamed`` until the
prepare. A rank that has acknowledged its pause can no longer go back by itself: other ranks may have committed. It goes
back only when the leader says that it ordered nobody to commit; losing the leader, or its own deadline, fences it.

Versions strictly increase. The version that is held can be prepared again: answered, never applied twice. Every push has
an id; what comes late, of a push that is over or of an older incarnation of this rank, is rejected and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from .errors import BusyError, ProtocolError, VersionConflict
from .messages import Landing, State

_REMEMBERED_PUSHES = 256
_STORY_LINES = 40


class Phase(Enum):
    """How far a push has come on this rank."""

    RECEIVING = "receiving"
    VOTED = "voted"
    PAUSED = "paused"
    COMMITTING = "committing"
    APPLIED = "applied"


_REVERSIBLE = frozenset({Phase.RECEIVING, Phase.VOTED})
_UNSURE = frozenset({Phase.PAUSED, Phase.COMMITTING, Phase.APPLIED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A version and the digest (hex, empty where digests are off) of the content that this rank holds under it."""

    version: int
    digest: str = ""


@dataclass(kw_only=True, slots=True)
class _Push:
    push_id: str
    version: int
    landing: Landing
    phase: Phase = Phase.RECEIVING
    dirty: bool = False
    digest: str = ""


class Fence:
    """State of one rank. Not thread-safe: it lives on the event loop.

    Args:
        incarnation: names this life of the process; messages that name another are rejected.
        version: what the live parameters hold at the start, if that is known; None starts ``FENCED``.
        digest: of the content that they hold under it. Empty takes whatever is pushed under that version for the same.
    """

    def __init__(self, *, incarnation: str, version: int | None = None, digest: str = "") -> None:
        self.incarnation = incarnation
        self.reason = "nothing was committed yet" if version is None else ""
        self._live: Held | None = None if version is None else Held(version=version, digest=digest)
        self._last: Held | None = self._live
        self._floor: Held | None = self._live
        self._push: _Push | None = None
        self._over: OrderedDict[str, str] = OrderedDict()
        self._story: deque[str] = deque(maxlen=_STORY_LINES)

    @property
    def state(self) -> State:
        """``UPDATING`` while a push is under way; else ``COMMITTED`` or ``FENCED``."""
        if self._push is not None:
            return "UPDATING"
        return "FENCED" if self._live is None else "COMMITTED"

    @property
    def version(self) -> int | None:
        """The version committed last, served or not (see `state` and `serving_version`)."""
        return None if self._last is None else self._last.version

    @property
    def digest(self) -> str:
        """Digest of the content of `version`."""
        return "" if self._last is None else self._last.digest

    @property
    def serving_version(self) -> int | None:
        """The version that forward passes may read now; None: none may run."""
        push, live = self._push, self._live
        if live is None or (push is not None and (push.phase in _UNSURE or push.landing == "streamed")):
            return None
        return live.version

    @property
    def push_id(self) -> str | None:
        """The push under way."""
        return None if self._push is None else self._push.push_id

    @property
    def phase(self) -> Phase | None:
        """How far the push under way has come."""
        return None if self._push is None else self._push.phase

    @property
    def story(self) -> tuple[str, ...]:
        """The latest transitions, oldest first."""
        return tuple(self._story)

    def check_incarnation(self, incarnation: str) -> None:
        """Reject a message meant for another life of this rank (empty: the sender does not say)."""
        if incarnation and incarnation != self.incarnation:
            raise ProtocolError(
                f"this message is for incarnation {incarnation}; this rank is {self.incarnation}: it restarted or rejoined "
                "since; connect again"
            )

    def prepare(
        self, push_id: str, version: int | None, landing: Landing, *, incarnation: str = "", digest: str = ""
    ) -> Literal["ready", "already"]:
        """A push begins. ``already``: this version is committed here and nothing needs to be done.

        Args:
            digest: what the source would send (hex), if it knows: other content under a held version is refused.

        Raises:
            ProtocolError: no version or push id; a push that is over; another incarnation.
            BusyError: another push is under way.
            VersionConflict: older than what is held, or other content under the same version.
        """
        self.check_incarnation(incarnation)
        if not push_id or version is None:
            raise ProtocolError("a push needs a push id and a version")
        if self._push is not None:
            return self._prepare_again(push_id, version)
        if push_id in self._over and not (self._over[push_id] == "committed" and self.version == version):
            raise ProtocolError(f"push {push_id} is over here ({self._over[push_id]}): this prepare came late")
        if self._is_held(version, digest):
            return "already"
        self._push = _Push(push_id=push_id, version=version, landing=landing)
        self._note(f"prepared version {version}, {landing}")
        return "ready"

    def _prepare_again(self, push_id: str, version: int) -> Literal["ready"]:
        push = self._push
        assert push is not None
        if push.push_id != push_id:
            raise BusyError(
                f"push {push.push_id} of version {push.version} is {push.phase.value} here; push {push_id} of version "
                f"{version} must wait for its end"
            )
        if push.version != version or push.phase is not Phase.RECEIVING:
            raise ProtocolError(f"push {push_id} is {push.phase.value} here with version {push.version}, not {version}")
        return "ready"

    def _is_held(self, version: int, digest: str) -> bool:
        floor = self._floor
        if floor is None or version > floor.version:
            return False
        if version < floor.version:
            raise VersionConflict(
                f"version {version} is older than version {floor.version}, which this rank has committed; versions strictly "
                "increase"
            )
        self._check_content(version, digest)
        return self._live is not None and self._live.version == version

    def _check_content(self, version: int, digest: str) -> None:
        floor = self._floor
        if floor is not None and floor.version == version and digest and floor.digest and floor.digest != digest:
            raise VersionConflict(
                f"version {version} is committed here with digest {floor.digest}, and this push has {digest} under the same "
                "version; give new content a new version"
            )

    def writing(self, push_id: str) -> None:
        """``streamed``: the first byte is about to reach live parameters; from here only a whole push helps."""
        push = self._current(push_id, Phase.RECEIVING)
        if push.landing == "streamed" and not push.dirty:
            push.dirty = True
            self._live = None
            self._note("writing live parameters")

    def vote(self, push_id: str, digest: str = "") -> None:
        """This rank has every byte, verified. Raises `VersionConflict` for other content under a committed version."""
        push = self._current(push_id, Phase.RECEIVING)
        self._check_content(push.version, digest)
        push.digest = digest
        self._step(push, Phase.VOTED)

    def paused(self, push_id: str) -> None:
        """No forward pass runs any more, and the leader will be told so."""
        self._step(self._current(push_id, Phase.VOTED), Phase.PAUSED)

    def committing(self, push_id: str) -> None:
        """The leader ordered the commit: live parameters are about to change."""
        push = self._current(push_id, Phase.PAUSED)
        self._live = None
        self._floor = Held(version=push.version, digest=push.digest)
        self._step(push, Phase.COMMITTING)

    def applied(self, push_id: str) -> None:
        """Live parameters hold the new version, whole. Other ranks may not have it yet."""
        self._step(self._current(push_id, Phase.COMMITTING), Phase.APPLIED)

    def resumed(self, push_id: str) -> None:
        """The leader says that all ranks have applied it: it may be served."""
        push = self._current(push_id, Phase.APPLIED)
        self._live = self._last = self._floor = Held(version=push.version, digest=push.digest)
        self._end("committed")

    def abort(self, push_id: str, reason: str) -> bool:
        """Nobody was ordered to commit, and nobody will be. Back to the old version if its bytes are still whole.

        Returns:
            False if the push is not under way (over, or never heard of: then its messages to come are rejected).

        Raises:
            ProtocolError: the commit was ordered; there is no way back.
        """
        if self._push is None or self._push.push_id != push_id:
            self._remember(push_id, "aborted before it began")
            return False
        if self._push.phase in (Phase.COMMITTING, Phase.APPLIED):
            raise ProtocolError(f"push {push_id} cannot be aborted: its commit was ordered")
        self._give_up(reason)
        return True

    def lost(self, reason: str) -> None:
        """The leader went away."""
        if self._push is not None:
            self._give_up(reason) if self._push.phase in _REVERSIBLE else self.fence(reason)

    def timeout(self, push_id: str, reason: str) -> None:
        """This rank's own deadline for the push passed."""
        if self._push is not None and self._push.push_id == push_id:
            self.lost(reason)

    def fence(self, reason: str) -> None:
        """Serve nothing until a whole push has committed."""
        self._live = None
        self.reason = reason
        self._end(f"fenced: {reason}")

    def _give_up(self, reason: str) -> None:
        if self._live is None:
            self.reason = reason
        self._end(f"aborted: {reason}")

    def is_over(self, push_id: str) -> str | None:
        """How a push ended here (``committed``, ``aborted: …``, ``fenced: …``); None if it did not."""
        return self._over.get(push_id)

    def require(self, push_id: str, phase: Phase) -> None:
        """Raises `ProtocolError` unless this push is under way and in this phase."""
        self._current(push_id, phase)

    def _current(self, push_id: str, phase: Phase) -> _Push:
        push = self._push
        if push is None or push.push_id != push_id:
            how = self._over.get(push_id, "it was never prepared here")
            raise ProtocolError(f"push {push_id} is not under way on this rank ({how})")
        if push.phase is not phase:
            raise ProtocolError(
                f"push {push_id} is {push.phase.value}, not {phase.value}, on this rank; it went: " + "; ".join(self._story)
            )
        return push

    def _step(self, push: _Push, phase: Phase) -> None:
        push.phase = phase
        self._note(phase.value)

    def _end(self, how: str) -> None:
        if self._push is not None:
            self._remember(self._push.push_id, how)
        self._note(how)
        self._push = None

    def _remember(self, push_id: str, how: str) -> None:
        self._over.setdefault(push_id, how)
        while len(self._over) > _REMEMBERED_PUSHES:
            self._over.popitem(last=False)

    def _note(self, what: str) -> None:
        push = self._push
        self._story.append(what if push is None else f"{push.push_id}: {what}")
