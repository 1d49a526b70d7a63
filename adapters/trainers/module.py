"""`ModuleSource`: the weights of an ``nn.Module`` or of a dict of tensors, on one rank or replicated on several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from syncline.engine.errors import ConfigError
from syncline.engine.host import host_id
from syncline.scheduler.layout import Manifest

from ..holdings import Holdings
from ..names import NameMap


class ModuleSource:
    """The weights of a module (parameters and persistent buffers, frozen ones too) or of a dict of tensors.

    Tied tensors travel once and are aliases of one another. Tensors may have any strides; those that lie in mapped files are
    copied out by the ``h2d`` stage. DTensors in it contribute the boxes that this rank holds.

    Args:
        model: the module, or tensors by name. Later changes (optimizer steps, moved or replaced tensors) are seen.
        rank, world_size: this rank among all ranks that hold the same weights. By default those of ``process_group``; without
            one, of the default group if ``torch.distributed`` is initialized; else 0 of 1. Pass ``world_size=1`` to push
            from one rank of an initialized job alone.
        process_group: the group of all ranks that take part; they meet in it once, at `connect`.
        names: a `NameMap` (such as a `NameTable`) for parameters that are named otherwise in checkpoints.
        optional: canonical names or patterns with ``*`` that a target may lack.

    Raises:
        ConfigError: rank, world size and group contradict each other.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        names: NameMap | None = None,
        optional: Iterable[str] = (),
    ) -> None:
        self._model = model
        self._names = names
        self._optional = tuple(optional)
        self._host = host_id()
        self._holdings: Holdings | None = None
        self._manifest: Manifest | None = None
        self._rank, self._world_size, self._group = _place(rank, world_size, process_group)

    @property
    def rank(self) -> int:
        """This rank among the ranks of the source."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the source."""
        return self._world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the source; None for a single rank."""
        return self._group

    def manifest(self) -> Manifest:
        """What this rank holds now: the same object as before while nothing changed (finding out: 1 to 2 us a tensor).

        Raises:
            PlanError: tensors that cannot travel; lists all of them.
        """
        if self._manifest is None or self._holdings is None or not self._is_current(self._holdings):
            self._holdings = self._take()
            self._manifest = self._holdings.manifest(
                rank=self._rank, world_size=self._world_size, host=self._host, optional=self._optional
            )
        return self._manifest

    def buffers(self) -> Sequence[torch.Tensor]:
        """Local tensors in the order of the manifest's buffers. They share memory with the model's."""
        if self._holdings is None:
            self.manifest()
        return [] if self._holdings is None else self._holdings.locals

    def _is_current(self, holdings: Holdings) -> bool:
        return holdings.unchanged()

    def _take(self) -> Holdings:
        return Holdings(self._model, names=self._names)


def _place(
    rank: int | None, world_size: int | None, group: dist.ProcessGroup | None
) -> tuple[int, int, dist.ProcessGroup | None]:
    """Rank, world size and group, with defaults resolved and checked against each other."""
    if group is None and world_size != 1 and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        world_size = 1 if world_size is None else world_size
        rank = 0 if rank is None else rank
    else:
        rank = dist.get_rank(group) if rank is None else rank
        world_size = dist.get_world_size(group) if world_size is None else world_size
    problems = []
    if world_size < 1 or not 0 <= rank < world_size:
        problems.append(f"rank {rank} of world_size {world_size} does not exist; this process may not be in process_group")
    if world_size > 1 and group is None:
        problems.append(f"world_size is {world_size}, but torch.distributed is not initialized and no process_group was given")
    if group is not None and problems == [] and (rank, world_size) != (dist.get_rank(group), dist.get_world_size(group)):
        problems.append(
            f"rank {rank} of {world_size} is rank {dist.get_rank(group)} of {dist.get_world_size(group)} in process_group; "
            "leave rank and world_size out"
        )
    if problems:
        raise ConfigError(problems)
    return rank, world_size, group if world_size > 1 else None
