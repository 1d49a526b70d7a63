"""Where tensors have to lie for this version's stages to reach them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.scheduler.layout import Manifest
from syncline.scheduler.problems import listed

_REACHED = ("cpu", "meta")
"""Planning itself refuses the meta device."""


def device_problems(sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]]) -> list[str]:
    """Tensors that lie on a device that no stage reaches, by name and place: problems of the plan like others."""
    places = [(f"source rank {manifest.rank}", manifest) for manifest in sources]
    places += [(f"target {t} rank {manifest.rank}", manifest) for t, ranks in enumerate(targets) for manifest in ranks]
    return [problem for where, manifest in places for problem in _of(where, manifest)]


def _of(where: str, manifest: Manifest) -> list[str]:
    buffers, pieces = manifest.buffers, manifest.pieces
    problems = []
    for code, device in enumerate(buffers.devices):
        if device.split(":")[0] in _REACHED:
            continue
        tensors = np.unique(pieces.tensor[buffers.device[pieces.buffer] == code]).tolist()
        if tensors:
            names = listed(manifest.tensors.names[i] for i in tensors)
            problems.append(f"{where} holds {names} on {device}; this version moves weights in CPU memory only")
    return problems
