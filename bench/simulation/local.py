"""Set-ups of `syncline.bench.measure.bed` as scenarios: what is measured on this machine can be predicted from its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from syncline.bench.layouts import Draft, Model, fsdp, manifests_of, part, tensor_table, whole_layout
from syncline.bench.measure.bed import Setup
from syncline.bench.measure.shards import WIDTH
from syncline.bench.models import Architecture, Parameter
from syncline.engine.config import TransferConfig
from syncline.scheduler.layout import Layout, Manifest

from .hardware import Hardware
from .simulate import Plans, Scenario

_HOST = "here"


def scenario_of(setup: Setup, config: Mapping[str, Any], hardware: Hardware) -> Scenario:
    """What a push of ``TransferConfig(**config)`` on this bed is, on ``hardware``."""
    return Scenario(plans=plans_of(setup), hardware=hardware, config=TransferConfig(**{"trace": False, **config}))


def plans_of(setup: Setup) -> Plans:
    """The manifests of a bed's ranks, without its processes."""
    model = _model(setup)
    sources = {
        "module": lambda: _here([whole_layout(model)] * setup.source_ranks),
        "fsdp": lambda: [replace(m, host=_HOST) for m in fsdp(model, shards=setup.source_ranks)],
        "tp": lambda: _here(_split(model, setup.source_ranks)),
    }[setup.source]()
    ranks = _split(model, setup.target_ranks) if setup.target_ranks > 1 else [whole_layout(model)]
    target = _here([replace(layout, movable=setup.movable) for layout in ranks])
    return Plans(sources, [target] * setup.targets)


def _model(setup: Setup) -> Model:
    rows = tuple(Parameter(f"tensors.{number}", (setup.rows, WIDTH), "whole") for number in range(setup.tensors))
    shape = Architecture(layers=1, hidden=1, heads=1, intermediate=1, vocab=1, dtype="float32")
    return Model(shape=shape, rows=rows, table=tensor_table(rows, "float32"))


def _split(model: Model, ranks: int) -> list[Layout]:
    """By rows and by columns in turn, as `Shards` does."""
    found = []
    for rank in range(ranks):
        draft = Draft(model)
        for index, parameter in enumerate(model.rows):
            height, width = parameter.shape
            if index % 2:
                draft.columns(parameter.name, index, part(width, ranks, rank))
            else:
                draft.rows(parameter.name, index, part(height, ranks, rank))
        found.append(draft.layout())
    return found


def _here(layouts: Sequence[Layout]) -> list[Manifest]:
    return [replace(manifest, host=_HOST) for manifest in manifests_of(layouts, _HOST, len(layouts))]
