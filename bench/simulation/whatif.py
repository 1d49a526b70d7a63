"""What each knob, and each part of the hardware, does to a push: everything else as it is, this one halved or doubled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from syncline.engine.config import parse_size
from syncline.engine.errors import ConfigError
from syncline.scheduler.errors import PlanError
from syncline.scheduler.routing import size

from .hardware import Gpus, Work
from .simulate import Scenario, simulate
from .world import ScenarioError

_RATES = ("h2d", "kernel", "copy", "digest", "nvlink", "nic")


class _Change(NamedTuple):
    """What is changed, in words, and how: ``made`` may refuse."""

    knob: str
    before: str
    after: str
    made: Callable[[], Scenario]


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One change: of what, from which value to which, and the seconds of the push then; ``refused`` says why there are none."""

    knob: str
    before: str
    after: str
    seconds: float | None = None
    peak_tmp_bytes: int = 0
    refused: str = ""


_PLANNED = frozenset({"bucket_bytes", "max_tmp_bytes", "landing", "route"})
"""Knobs that shape the plan: a change of one takes a plan besides the simulation."""


def effects(scenario: Scenario, within_s: float = math.inf) -> tuple[list[Effect], int]:
    """Every knob, then the hardware, and how many changes are missing. Each is one simulation, for some knobs with a plan.

    Begins none after ``within_s`` seconds; those that need no plan come first.
    """
    changes = [*_changes(scenario), *_machines(scenario)]
    found: dict[int, Effect] = {}
    until = time.perf_counter() + within_s
    for number in sorted(range(len(changes)), key=lambda number: changes[number].knob in _PLANNED):
        if time.perf_counter() >= until:
            break
        found[number] = _effect(changes[number])
    return [found[number] for number in sorted(found)], len(changes) - len(found)


def _effect(change: _Change) -> Effect:
    effect = Effect(knob=change.knob, before=change.before, after=change.after)
    try:
        there = simulate(change.made())
    except (ConfigError, PlanError, ScenarioError) as error:
        return msgspec.structs.replace(effect, refused=_refusal(error))
    return msgspec.structs.replace(effect, seconds=there.seconds, peak_tmp_bytes=there.peak_tmp_bytes)


def _said(knob: str, value: object) -> str:
    """A value in the unit that is meant."""
    if knob.endswith("_bytes"):
        return size(parse_size(value))  # type: ignore[arg-type]  # of a config that was accepted
    return f"{value:g} s" if knob.endswith("_s") else str(value)


def _refusal(error: Exception) -> str:
    problems = error.problems if isinstance(error, (ConfigError, PlanError)) else [str(error)]
    return problems[0]


def _changes(scenario: Scenario) -> Iterator[_Change]:
    for knob, after in _values(scenario):
        before = scenario.config.bucket if knob == "bucket_bytes" else getattr(scenario.config, knob)
        yield _Change(knob, _said(knob, before), _said(knob, after), partial(_with, scenario, knob, after))


def _with(scenario: Scenario, knob: str, value: object) -> Scenario:
    return replace(scenario, config=replace(scenario.config, **{knob: value}))  # type: ignore[arg-type]  # a knob's own type


def _values(scenario: Scenario) -> Iterator[tuple[str, Any]]:
    config, on_cores = scenario.config, not isinstance(scenario.hardware, Gpus)
    for knob, value in (("bucket_bytes", config.bucket), ("max_tmp_bytes", config.watermark)):
        yield knob, value // 2
        yield knob, value * 2
    knobs = ["prepare_concurrency", "send_concurrency", *(["workers"] if on_cores else [])]
    for knob in (["h2d_concurrency"] if scenario.offloaded else []) + knobs:
        value = getattr(config, knob)
        if value > 1:
            yield knob, value // 2
        yield knob, value * 2
    yield "poll_interval_s", config.poll_interval_s / 2
    yield "poll_interval_s", config.poll_interval_s * 2
    yield "verify", not config.verify
    for knob, choices in (("landing", ("staged", "streamed")), ("route", ("auto", "gather", "direct"))):
        for choice in choices:
            if choice != getattr(config, knob):
                yield knob, choice


def _machines(scenario: Scenario) -> Iterator[_Change]:
    """The same push on hardware of which one rate is halved or doubled."""
    hardware = scenario.hardware
    names = _RATES if isinstance(hardware, Gpus) else ("copy", "digest", "copy_digest", "loopback")
    for name in names:
        if name == "h2d" and not scenario.offloaded:
            continue
        value = getattr(hardware, name)
        if isinstance(value, Work) and not value.s_per_byte:
            continue  # takes no time at all: there is nothing to halve
        for factor in (0.5, 2.0):
            if isinstance(value, Work):
                changed: Any = msgspec.structs.replace(value, s_per_byte=value.s_per_byte / factor)
                before, after = 1 / value.s_per_byte, factor / value.s_per_byte
            else:
                changed, before, after = value * factor, value, value * factor
            other = msgspec.structs.replace(hardware, **{name: changed})
            made = partial(replace, scenario, hardware=other)
            yield _Change(f"hardware: {name}", _rate(before), _rate(after), made)


def _rate(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"
