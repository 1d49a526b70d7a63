"""Where tensors have to lie for the stages to reach them, and where buckets are assembled.

Buckets are assembled where the targets hold their weights: in memory of the host, or on a CUDA device. What the trainer holds
on the host goes to the device first (`h2d`); the way back is not built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.scheduler.layout import Manifest
from syncline.scheduler.problems import listed

_HOST = ("cpu", "meta")
"""Planning itself refuses the meta device."""

Targets = Sequence[Sequence[Manifest]]


def on_device(targets: Targets) -> bool:
    """Whether targets hold their weights on CUDA devices, so that buckets are assembled there."""
    return any(_kind(device) == "cuda" for ranks in targets for manifest in ranks for device in _held(manifest))


def host_buffers(manifest: Manifest) -> frozenset[int]:
    """Indexes of a rank's buffers that lie in memory of the host."""
    codes = manifest.buffers.device.tolist()
    return frozenset(index for index, code in enumerate(codes) if _kind(manifest.buffers.devices[code]) != "cuda")


def device_problems(sources: Sequence[Manifest], targets: Targets) -> list[str]:
    """Tensors that lie where no stage reaches them, by name and place: problems of the plan like others."""
    there = on_device(targets)
    problems = []
    for manifest in sources:
        problems += _source_problems(f"source rank {manifest.rank}", manifest, there)
    for t, ranks in enumerate(targets):
        for manifest in ranks:
            problems += _target_problems(f"target {t} rank {manifest.rank}", manifest, there)
    return problems


def _source_problems(where: str, manifest: Manifest, there: bool) -> list[str]:
    held = _held(manifest)
    problems = _unreached(where, manifest)
    cuda = [device for device in held if _kind(device) == "cuda"]
    if cuda and not there:
        names = _names(manifest, cuda)
        problems.append(
            f"{where} holds {names} on {cuda[0]}, and no target is on a GPU; the way from a GPU to the host is not built"
        )
    return problems


def _target_problems(where: str, manifest: Manifest, there: bool) -> list[str]:
    problems = _unreached(where, manifest)
    kinds = {_kind(device) for device in _held(manifest)}
    if there and "cpu" in kinds:
        names = _names(manifest, [device for device in _held(manifest) if _kind(device) == "cpu"])
        problems.append(
            f"{where} holds {names} on cpu, and others are on a GPU: buckets are assembled in one of both; move them, or push "
            "to targets of either kind with an engine each"
        )
    return problems


def _unreached(where: str, manifest: Manifest) -> list[str]:
    reached = "weights are moved in memory of the host and of CUDA devices only"
    strange = [device for device in _held(manifest) if _kind(device) not in {"cuda", *_HOST}]
    return [f"{where} holds {_names(manifest, [device])} on {device}; {reached}" for device in strange]


def _kind(device: str) -> str:
    return device.split(":", maxsplit=1)[0]


def _held(manifest: Manifest) -> list[str]:
    """Devices on which a rank has pieces."""
    buffers, pieces = manifest.buffers, manifest.pieces
    codes = np.unique(buffers.device[pieces.buffer]).tolist() if len(pieces) else []
    return [buffers.devices[code] for code in codes]


def _names(manifest: Manifest, devices: Sequence[str]) -> str:
    buffers, pieces = manifest.buffers, manifest.pieces
    codes = [buffers.devices.index(device) for device in devices]
    tensors = np.unique(pieces.tensor[np.isin(buffers.device[pieces.buffer], codes)]).tolist()
    return listed(manifest.tensors.names[i] for i in tensors)
