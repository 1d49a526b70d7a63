"""`MegatronSource`: the weights of a megatron-core model under tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch.distributed as dist
from torch import nn

from syncline.engine.errors import ConfigError
from syncline.scheduler.layout import Index

from ..holdings import Holdings
from ..named_box import NamedBox
from .families import FAMILIES
from .megatron_mapping import Mapped, map_model, setting
from .megatron_model import places, unwrapped
from .megatron_tables import Family
from .module import ModuleSource


class MegatronSource(ModuleSource):
    """This rank's part of a megatron-core model, under the names and in the shapes of the Hugging Face checkpoint.

    Nothing is gathered here: every rank offers the boxes of checkpoint tensors that its parameters hold. Replicas (data and
    context parallelism, norms and routers on every tensor-parallel rank, the copy of tied embeddings on the last pipeline
    stage) are offered by every rank that has them, and the plan spreads the load. Rows that pad the vocabulary are offered
    by nobody. Experts are mesh group 1 where they live on other process groups than dense parameters, which are group 0.

    Push between steps, when parameters are up to date on every rank: with a distributed optimizer that overlaps the gathering
    of parameters with the forward pass, after ``disable_forward_pre_hook()`` or a forced parameter sync.

    Args:
        model: a chunk of the model, or the list of chunks of a rank with virtual pipeline stages; wrappers (``DDP``,
            ``Float16Module``) may be around them.
        hf_config: the Hugging Face config (object or dict) of the same model. Its ``model_type`` finds the family, its
            ``vocab_size`` says which rows are padding, and what the family's table names (`Family.numbers`: layers, heads,
            experts) is compared with Megatron's. Rotation, norms' epsilons and the like are not: weights do not depend on
            them. Without it nothing tells that a target cuts tensors of the same shapes into another number of heads.
        family: name of a family in `syncline.adapters.trainers.families`, or a `Family` of your own.
        vocab_size: rows of the embeddings in the checkpoint. By default that of ``hf_config``; without one the model's own,
            padding included.
        process_group: the group of all ranks of the model. By default the default group.
        optional: canonical names or patterns with ``*`` that a target may lack.
        leave_out: Megatron's names (without ``module.``) or patterns with ``*`` of parameters that no target wants, such as
            ``mtp.*``: they need no row. One that matches nothing is refused where this rank has all stages of the pipeline.

    Raises:
        ConfigError: no chunk is given, or none of Megatron's; ``hf_config``, ``vocab_size`` or ``leave_out`` cannot be one; the
            family is not known; ``torch.distributed`` or Megatron's parallel state is not initialized.
        PlanError: (from `manifest`) unmapped parameters, or configs that contradict each other; lists all of them.
    """

    _model: nn.ModuleList

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        hf_config: Any = None,
        family: Family | str | None = None,
        vocab_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        optional: Iterable[str] = (),
        leave_out: Iterable[str] = (),
    ) -> None:
        chunks = [model] if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList) else list(model)
        if not chunks:
            raise ConfigError(["MegatronSource needs at least one chunk of the model; this rank gave an empty list"])
        if problems := _wrong(hf_config, vocab_size, leave_out):
            raise ConfigError(problems)
        self.family = _family(family, hf_config)
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(["MegatronSource needs torch.distributed to be initialized"])
        if getattr(unwrapped(chunks[0]), "config", None) is None:
            kind = type(unwrapped(chunks[0])).__name__
            raise ConfigError([f"{kind} is no model of Megatron: it has no config; push other modules from a ModuleSource"])
        self._hf_config = hf_config
        self._leave_out = tuple(leave_out)
        self._vocabulary: int | None = setting(hf_config, "vocab_size") if vocab_size is None and hf_config else vocab_size
        self._places = places(unwrapped(chunks[0]))
        super().__init__(nn.ModuleList(chunks), process_group=process_group, optional=optional)

    def _take(self) -> Holdings:
        mapped = map_model(
            self._model,
            family=self.family,
            places=self._places,
            hf_config=self._hf_config,
            vocabulary=self._vocabulary,
            leave_out=self._leave_out,
        )
        holdings = Holdings(self._model, names=_Names(mapped))
        holdings.tensors[:] = [replace(tensor, group=mapped.groups.get(tensor.name, 0)) for tensor in holdings.tensors]
        holdings.aliases.update(mapped.aliases)
        return holdings


class _Names:
    """A model's mapping as a `NameMap`."""

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped

    def boxes(self, shapes: Mapping[str, Index]) -> Mapping[str, Sequence[NamedBox]]:
        return self._mapped.boxes


def _wrong(hf_config: Any, vocab_size: Any, leave_out: Any) -> list[str]:
    """What is wrong with arguments, whatever the model."""
    problems = []
    if isinstance(hf_config, str | bytes | PathLike):
        problems.append(f"hf_config is {hf_config!r}; give a config object or a dict, as AutoConfig.from_pretrained(…) does")
        hf_config = None
    vocabulary = setting(hf_config, "vocab_size") if vocab_size is None and hf_config is not None else vocab_size
    if vocabulary is not None and (type(vocabulary) is not int or vocabulary <= 0):
        problems.append(f"vocab_size is {vocabulary!r}; it must be a whole number above 0")
    if isinstance(leave_out, str):
        problems.append(f"leave_out is {leave_out!r}; give a list of patterns: [{leave_out!r}]")
    return problems


def _family(family: Family | str | None, hf_config: Any) -> Family:
    """The family that is asked for. Raises `ConfigError` where it is not known."""
    if isinstance(family, Family):
        return family
    wanted = setting(hf_config, "model_type") if family is None and hf_config is not None else family
    for known in FAMILIES:
        if wanted == known.name or (family is None and wanted in known.model_types):
            return known
    names = ", ".join(known.name for known in FAMILIES)
    asked = "neither hf_config nor family is given" if wanted is None else f"no family {wanted!r} is known"
    raise ConfigError([f"{asked}; known are {names}; pass family= one of them, or a Family of your own"])
