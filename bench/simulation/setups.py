"""Scenarios from what ``syncline plan`` takes: a model, a source, targets, hardware, knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.bench.layouts import Model
from syncline.bench.models import find as find_model
from syncline.bench.specs import read_source, read_targets
from syncline.engine.config import TransferConfig
from syncline.scheduler.layout import Manifest

from .hardware import Cores, Hardware
from .simulate import Plans, Scenario
from .wire import WireName, held_as
from .world import Disturbance

_HOST = "here"


def scenario(
    *,
    model: str,
    source: Sequence[str],
    target: Sequence[str],
    hardware: Hardware,
    config: TransferConfig,
    wire: WireName = "same",
    offloaded: bool = False,
    colocated: bool = False,
    ranks_per_host: int = 8,
    disturbance: Disturbance | None = None,
    timeout_s: float = 10.0,
) -> Scenario:
    """A scenario. ``colocated``: rank r of each target is on the host of source rank r (and so reached without a network card).

    On hardware that is one host all ranks are there. Where landing ``mapped`` is asked for, targets of a form have a loader
    that lets parameters move.

    Raises:
        ModelError, SpecError, ControlError: the model, the source or a target is not understood, or does not answer.
        ScenarioError: the hardware cannot do what is asked for, or there is no such rank.
    """
    shape = find_model(model) if model else None
    held = Model.of(shape) if shape else None
    sources = read_source(source, held, ranks_per_host)
    taken = held if wire == "same" or shape is None else held_as(shape, wire)
    targets = read_targets(target, taken, ranks_per_host, timeout_s, movable=config.landing == "mapped")
    if isinstance(hardware, Cores):
        sources, *targets = [[replace(manifest, host=_HOST) for manifest in ranks] for ranks in (sources, *targets)]
    elif colocated:
        targets = [_beside(sources, ranks) for ranks in targets]
    return Scenario(
        plans=Plans(sources, targets),
        hardware=hardware,
        config=config,
        offloaded=offloaded,
        disturbance=disturbance or Disturbance(),
    )


def _beside(sources: Sequence[Manifest], ranks: Sequence[Manifest]) -> list[Manifest]:
    return [replace(manifest, host=sources[manifest.rank % len(sources)].host) for manifest in ranks]
