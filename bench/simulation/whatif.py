"""What each knob, and each part of the hardware, does to a push: everything else as it is, this one halved or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from syncline.engine.config import parse_size
from syncline.engine.errors import ConfigError
from syncline.scheduler.errors import PlanError
from syncline.scheduler.routing import size

from .hardware import Gpus, Work
from .simulate import Prediction, Scenario, simulate
from .world import ScenarioError

_RATES = ("h2d", "kernel", "copy", "digest", "nvlink", "nic")


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One change: of what, from which value to which, and the seconds of the push then; ``refused`` says why there are none."""

    knob: str
    before: str
    after: str
    seconds: float | None = None
    peak_tmp_bytes: int = 0
    refused: str = ""


def effects(scenario: Scenario) -> Iterator[Effect]:
    """Every knob, then the hardware. Each is one simulation (and a plan, for the knobs that shape it)."""
    for knob, after in _changes(scenario):
        before = getattr(scenario.config, knob)
        if knob == "bucket_bytes":
            before = scenario.config.bucket
        try:
            there = simulate(replace(scenario, config=replace(scenario.config, **{knob: after})))
        except (ConfigError, PlanError, ScenarioError) as error:
            yield Effect(knob=knob, before=_said(knob, before), after=_said(knob, after), refused=_refusal(error))
            continue
        yield _effect(knob, before, after, there)
    for name, before, after, changed in _machines(scenario):
        yield _effect(name, before, after, simulate(changed))


def _effect(knob: str, before: object, after: object, there: Prediction) -> Effect:
    return Effect(
        knob=knob, before=_said(knob, before), after=_said(knob, after), seconds=there.seconds,
        peak_tmp_bytes=there.peak_tmp_bytes,
    )  # fmt: skip


def _said(knob: str, value: object) -> str:
    """A value in the unit that is meant."""
    if knob.endswith("_bytes"):
        return size(parse_size(value))  # type: ignore[arg-type]  # of a config that was accepted
    return f"{value:g} s" if knob.endswith("_s") else str(value)


def _refusal(error: Exception) -> str:
    problems = error.problems if isinstance(error, (ConfigError, PlanError)) else [str(error)]
    return problems[0]


def _changes(scenario: Scenario) -> Iterator[tuple[str, Any]]:
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


def _machines(scenario: Scenario) -> Iterator[tuple[str, str, str, Scenario]]:
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
            yield f"hardware: {name}", _rate(before), _rate(after), replace(scenario, hardware=other)


def _rate(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"
