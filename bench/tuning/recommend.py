"""Which knobs a sweep speaks for, under a limit on memory. Pure.

Only finalists are chosen among, where there are any that fit: they were measured more, side by side, after they had been
chosen, so that the luck of the search is not in their figures. Nothing that was measured slower than the default is ever
recommended. Among what is within noise of the fastest, what needs less temporary memory is preferred, and then what changes
fewer knobs. Where the default is near the fastest, other knobs are recommended only for a gain that is beyond noise, or for
less memory.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.scheduler.errors import SynclineError

from .noise import Difference, Fit, difference, fit
from .records import Record, enough, peaks, usable
from .space import MIB, Configuration, size_text

_NEAR = 1.05  # at most so much slower than the fastest, noise or not
_Z = 2.0  # standard errors
_CLEARLY = 3.0  # of many, one is two standard errors off by luck


class NothingFits(SynclineError):
    """No configuration that was measured keeps the limit. The message names the smallest need."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """On memory.

    Attributes:
        nbytes: None for no limit.
        landing: whether landing memory counts beside temporary bytes.
    """

    nbytes: int | None = None
    landing: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration as it was measured.

    Attributes:
        configuration: with a watermark that keeps the limit.
        measured: as it was measured; the same but for a watermark that was not reached.
        seconds: of a push, from the fit to all blocks.
        overlap: sum of the stages' busy seconds over the seconds of the push.
    """

    configuration: Configuration
    measured: Configuration
    seconds: float
    peak_tmp_bytes: int
    landing_bytes: int
    overlap: float

    @property
    def memory_level(self) -> int:
        """Temporary bytes to the nearest power of two: less than that is no reason to prefer anything."""
        return round(math.log2(max(self.peak_tmp_bytes, MIB)))

    @property
    def changes(self) -> int:
        """Knobs that one has to set, besides transport and landing."""
        return len(self.configuration.changed().keys() - {"transport", "landing"})


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to set.

    Attributes:
        chosen, default, fastest: what is recommended, what it is compared with (None if it was not measured or does not fit
            the limit), and the fastest that fits.
        gain: of ``chosen`` over ``default``; None if they are the same or were never measured side by side.
        finals: whether the figures come from finals.
        why: in one or two sentences.
    """

    chosen: Candidate
    default: Candidate | None
    fastest: Candidate
    gain: Difference | None
    finals: bool
    why: str

    @property
    def within_noise(self) -> bool:
        """Whether nothing shows that it is faster than the default."""
        return self.gain is None or self.gain.within_noise


def advise(records: Sequence[Record], *, limit: Limit | None = None) -> Advice:
    """The best configuration of one transport and landing.

    Raises:
        NothingFits: nothing that was measured keeps the limit.
    """
    limit = limit or Limit()
    good = usable(records)
    pool = _pool(good, limit)
    found = _candidates(pool, limit)
    if not found:
        raise NothingFits(_too_little(good, limit))
    fitted = fit([record.batch for record in pool])
    default = _default(found)
    fastest = min(found, key=lambda c: c.seconds)
    may = [c for c in found if default is None or c.seconds <= default.seconds]
    near = [c for c in may if _is_near(c, fastest, fitted)]
    if default is not None and default.seconds <= _NEAR * fastest.seconds:
        near = [c for c in near if _is_worth_it(pool, c, default)] or [default]
    chosen = min(near, key=lambda c: (c.memory_level, c.changes, c.seconds))
    gain = _gain(pool, chosen, default)
    advice = Advice(chosen=chosen, default=default, fastest=fastest, gain=gain, finals=pool is not good, why="")
    return dataclasses.replace(advice, why=_why(advice, len(found)))


def _pool(good: list[Record], limit: Limit) -> list[Record]:
    """The finals, unless finalists do not fit and something else that does is clearly faster than those left."""
    finals = last_finals(good)
    finalists = {one.measured for one in _candidates(finals, limit)}
    if not finalists or len(finalists) == len({record.configuration for record in finals}):
        return finals if finalists else good
    everything = fit([record.batch for record in good])
    best = min(finalists, key=lambda c: everything.seconds[c])
    others = {one.measured for one in _candidates(good, limit)} - finalists
    return good if any(everything.worse(best, one, _CLEARLY) for one in others) else finals


def last_finals(records: Sequence[Record]) -> list[Record]:
    """Measurements of the last finals: those after the last one that belongs to the search."""
    found: list[Record] = []
    for record in records:
        found = [*found, record] if record.request.phase == "final" else []
    return found


def candidates(records: Sequence[Record]) -> list[Candidate]:
    """All configurations of ``records``, as measured."""
    return _candidates(usable(records), Limit())


def _candidates(records: Sequence[Record], limit: Limit) -> list[Candidate]:
    if not records:
        return []
    seconds, peak = fit([record.batch for record in records]).seconds, peaks(records)
    found = []
    for configuration in seconds:
        own = [record.sample for record in records if record.configuration == configuration]
        landing = max(sample.landing_bytes for sample in own)
        room = None if limit.nbytes is None else limit.nbytes - (landing if limit.landing else 0)
        fitting = _within(configuration, peak[configuration], room)
        if fitting is not None:
            found.append(
                Candidate(
                    configuration=fitting,
                    measured=configuration,
                    seconds=seconds[configuration],
                    peak_tmp_bytes=peak[configuration],
                    landing_bytes=landing,
                    overlap=statistics.median(sum(s.busy_s.values()) / statistics.median(s.warm) for s in own),
                )
            )
    return found


def _within(configuration: Configuration, peak: int, room: int | None) -> Configuration | None:
    """The configuration with a watermark of at most ``room``, if that changes nothing else."""
    if room is None or configuration.max_tmp_bytes <= room:
        return configuration
    lower = max(room // MIB * MIB, 0)
    return configuration.but(max_tmp_bytes=lower) if lower >= enough(configuration, peak) else None


def _default(found: Sequence[Candidate]) -> Candidate | None:
    """The default; where it does not fit the limit, what one has who sets nothing but a watermark that fits."""

    def of(one: Candidate, watermark: int | None) -> Configuration:
        return Configuration.default(one.measured.transport, one.measured.landing, watermark=watermark)

    exact = [one for one in found if one.measured == of(one, None)]
    fitting = [one for one in found if one.configuration == of(one, one.configuration.max_tmp_bytes)]
    return max(exact or fitting, key=lambda one: one.configuration.max_tmp_bytes, default=None)


def _is_near(one: Candidate, fastest: Candidate, fitted: Fit[Configuration]) -> bool:
    return one.seconds <= _NEAR * fastest.seconds and not fitted.worse(one.measured, fastest.measured, _Z)


def _is_worth_it(records: Sequence[Record], one: Candidate, default: Candidate) -> bool:
    """Whether there is a reason to set its knobs: less memory than the default's, or a gain that is no noise."""
    gain = _gain(records, one, default)
    return one.memory_level < default.memory_level or (gain is not None and not gain.within_noise)


def _gain(records: Sequence[Record], chosen: Candidate, default: Candidate | None) -> Difference | None:
    if default is None or chosen.measured == default.measured:
        return None
    try:
        return difference([record.batch for record in records], chosen.measured, default.measured)
    except ValueError:
        return None


def _too_little(records: Sequence[Record], limit: Limit) -> str:
    everything = _candidates(records, Limit())
    if not everything:
        return "no configuration was measured without a fault: run syncline bench sweep again"
    need = min(
        min(c.measured.max_tmp_bytes, enough(c.measured, c.peak_tmp_bytes)) + (c.landing_bytes if limit.landing else 0)
        for c in everything
    )
    what = "temporary and landing memory" if limit.landing else "temporary memory"
    return f"nothing that was measured keeps to {size_text(limit.nbytes or 0)} of {what}; the least is {size_text(need)}"


def _why(advice: Advice, count: int) -> str:
    chosen, default, fastest = advice.chosen, advice.default, advice.fastest
    noun = "finalist" if advice.finals else "configuration"
    what = f"of {count} {noun}s that fit" if count > 1 else f"of the one {noun} that fits"
    sentences = []
    if chosen is fastest:
        sentences.append(f"Nothing {what} was faster." if chosen is default else f"It is the fastest {what}.")
    elif chosen is default:
        ahead = f"{1 - fastest.seconds / chosen.seconds:.1%}"
        sentences.append(f"The fastest {what} takes {ahead} less time, which is within noise: the default is as good.")
    else:
        behind = f"{chosen.seconds / fastest.seconds - 1:.1%} behind the fastest {what}, which is within noise"
        reason = (
            f"needs {size_text(chosen.peak_tmp_bytes)} of temporary memory instead of {size_text(fastest.peak_tmp_bytes)}"
            if chosen.memory_level < fastest.memory_level
            else f"changes {chosen.changes} knobs instead of {fastest.changes}"
        )
        sentences.append(f"It is {behind}, and {reason}.")
    if advice.gain is not None and advice.gain.within_noise and default is not None:
        saved = " in time" if chosen.memory_level < default.memory_level else ""
        sentences.append(f"As far as these measurements show, the default is as good{saved}.")
    if default is not None and chosen is not default and abs(chosen.overlap - default.overlap) >= 0.1:
        sentences.append(f"Its stages overlap {chosen.overlap:.2f}-fold, the default's {default.overlap:.2f}-fold.")
    if not advice.finals:
        sentences.append("It was measured a few times only: check with --verify.")
    return " ".join(sentences)
