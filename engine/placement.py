"""What has landed, as a loader takes it: the parts of a bucket, or whole pieces out of landing space."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Manifest
from syncline.scheduler.programs import Landing as Part, TargetProgram, TargetTask
from syncline.stages.copies import torch_dtype

from .errors import PlanError
from .loader import Landed


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePiece:
    """A piece of the manifest as it lies in landing space: contiguous, from ``first`` on, at source rank ``owner``."""

    piece: int
    owner: int
    first: Part | None
    nbytes: int
    dtype: str


def whole_pieces(program: TargetProgram, manifest: Manifest, problems: list[str]) -> list[WholePiece]:
    """Where each piece that the program fills lies in landing space. Adds to ``problems`` those that are scattered."""
    parts: dict[int, list[tuple[int, Part]]] = {}
    for task in program.tasks:
        for landing in task.landings:
            for piece in landing.pieces:
                parts.setdefault(piece, []).append((task.owner, landing))
    return [_whole_piece(piece, found, manifest, problems) for piece, found in sorted(parts.items())]


def _whole_piece(index: int, parts: list[tuple[int, Part]], manifest: Manifest, problems: list[str]) -> WholePiece:
    parts = sorted(parts, key=lambda part: (part[0], part[1].shared_offset))
    owner, first = parts[0]
    name, dtype = first.segment.name, first.segment.dtype
    nbytes = math.prod(manifest.pieces[index].box.shape) * ITEMSIZE[dtype]
    at = first.shared_offset
    for who, landing in parts:
        if who != owner or landing.shared_offset != at:
            problems.append(f"{name}: its parts do not lie side by side in landing memory; landing 'mapped' needs whole pieces")
            break
        at += landing.segment.nbytes
    else:
        if at - first.shared_offset != nbytes:
            sent = at - first.shared_offset
            problems.append(f"{name}: {sent} of {nbytes} bytes are sent; landing 'mapped' needs whole pieces")
    return WholePiece(piece=index, owner=owner, first=first if nbytes else None, nbytes=nbytes, dtype=dtype)


def parts_of(task: TargetTask, bucket: torch.Tensor) -> list[Landed]:
    """What `Loader.install` gets of a bucket: views into it."""
    landed = []
    for landing in task.landings:
        segment = landing.segment
        memory = bucket[segment.offset : segment.offset + segment.nbytes]
        tensor = memory.view(torch_dtype(segment.dtype)).view(segment.box.shape)
        landed += [Landed(piece, segment.box, tensor) for piece in landing.pieces]
    return landed


def parted(task: TargetTask, hidden: frozenset[int]) -> tuple[TargetTask | None, TargetTask | None]:
    """What of a task lands in exposed live memory, and what in ``hidden`` buffers, which only the loader can fill.

    Raises `PlanError` for a segment that lands in both.
    """
    if not hidden:
        return task, None
    sides: tuple[list[Part], list[Part]] = [], []
    for landing in task.landings:
        kinds = {region.buffer in hidden for region in landing.dests}
        if len(kinds) > 1:
            problem = f"{landing.segment.name} lands in live memory and goes through the loader; a loader says one of the two"
            raise PlanError([problem])
        sides[kinds.pop() if kinds else False].append(landing)
    exposed, covered = (replace(task, landings=tuple(side)) if side else None for side in sides)
    return (exposed, covered) if exposed or covered else (task, None)


def balanced(tasks: Iterable[TargetTask], shares: int) -> list[list[TargetTask]]:
    """Tasks in ``shares`` lists of about equal bytes, each in plan order."""
    found: list[list[TargetTask]] = [[] for _ in range(shares)]
    filled = [0] * shares
    for task in tasks:
        least = filled.index(min(filled))
        found[least].append(task)
        filled[least] += task.nbytes
    return [share for share in found if share]
