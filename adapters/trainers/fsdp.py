"""`FSDPSource`: the weights of a model under FSDP2 (``fully_shard``), alone or with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from syncline.engine.errors import ConfigError
from syncline.scheduler.errors import PlanError

from ..dtensor import mesh_of, mesh_ranks, reshard
from ..holdings import Holdings
from ..modules import entries
from ..names import NameMap
from .module import ModuleSource


class FSDPSource(ModuleSource):
    """This rank's shards of a model under FSDP2: 1-D, HSDP, with tensor parallelism, CPU offload, any shard axis.

    Nothing is gathered here: each rank offers the boxes that it holds, replicas included, and the plan decides who sends
    what. Parameters that are not DTensors (ignored by FSDP) and persistent buffers count as replicated on every rank.

    Push between steps. A root module that a forward pass without backward left gathered is put back into its sharded state
    (``FSDPModule.reshard()``, as ``state_dict()`` does): the next pass gathers again, results are unchanged.

    Args:
        model: the module that ``fully_shard`` was applied to, or a module that contains it.
        process_group: the group of all ranks that take part. By default the ranks of the parameters' device meshes: the
            default group if that is all of them, or a one-dimensional mesh's own group. Pass it where a mesh with several axes
            is only a part of the job, and where ranks hold different layers (pipeline parallelism).
        names: a `NameMap` (such as a `NameTable`) for parameters that are named otherwise in checkpoints.
        optional: canonical names or patterns with ``*`` that a target may lack.

    Raises:
        ConfigError: ``torch.distributed`` is not initialized, this rank is not in the group, or the group must be given.
    """

    _model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        names: NameMap | None = None,
        optional: Iterable[str] = (),
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(["FSDPSource needs torch.distributed to be initialized; for a plain module use ModuleSource"])
        self._model = model
        self._reshard()  # meshes are those of the sharded parameters
        group = process_group if process_group is not None else _meeting_group(model)
        super().__init__(model, process_group=group, names=names, optional=optional)

    def _is_current(self, holdings: Holdings) -> bool:
        if holdings.unchanged():
            return True
        self._reshard()  # often all that changed is that the root is gathered
        return holdings.unchanged()

    def _take(self) -> Holdings:
        self._reshard()
        return super()._take()

    def _reshard(self) -> None:
        refused = reshard(self._model)
        if refused:
            raise PlanError(
                [f"FSDP module {name} is inside a forward or backward pass; push between steps" for name in refused]
            )


def _meeting_group(model: nn.Module) -> dist.ProcessGroup:
    """The group of all ranks that hold a part of the model."""
    world = dist.group.WORLD
    if world is None:
        raise ConfigError(["the default process group is gone; FSDPSource must be made before destroy_process_group()"])
    tensors = [entry.tensor for entry in entries(model)]
    ranks = sorted(frozenset().union(*(mesh_ranks(tensor) for tensor in tensors)))
    if not ranks or len(ranks) == dist.get_world_size():
        return world
    for tensor in tensors:
        mesh = mesh_of(tensor)
        if mesh is not None and mesh.ndim == 1 and mesh.size() == len(ranks):
            return mesh.get_group()
    # Not made here: a group over some ranks needs every rank of the job, or as many groups so far on each of its own ranks.
    problem = (
        f"the model is spread over ranks {ranks} of {dist.get_world_size()}, and none of its meshes has a group of just those; "
        f"call group = torch.distributed.new_group({ranks}) on every rank of the job and pass it as process_group"
    )
    raise ConfigError([problem])
