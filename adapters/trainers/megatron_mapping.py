"""Every parameter of a Megatron model to the boxes of checkpoint tensors that it holds, by its family's table.

Everything that does not fit is collected: unmapped parameters, shapes that no rule explains, configs that contradict each
other, and what Megatron can be told to do with weights that no rule here undoes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Index

from ..named_box import NamedBox, padding_box
from .megatron_layout import Shard, boxes, whole_shape
from .megatron_model import Parameter, Places, layer_numbers, parameters, unwrapped
from .megatron_tables import Dims, Family, Match, Row, named

DENSE, EXPERT = 0, 1
"""Mesh groups."""

_UNSUPPORTED = {
    "layernorm_zero_centered_gamma": "stores norms minus 1",
    "rotary_interleaved": "rotates neighbouring elements of queries and keys, whose rows then have another order",
    "attention_output_gate": "has rows of a gate among those of the queries",
    "qk_l2_norm": "normalizes queries and keys without any weight",
    "glu_linear_offset": "adds to what a gate multiplies",
    "activation_func_clamp_value": "clamps what goes into the activation function",
    "apply_residual_connection_post_layernorm": "takes the residual from behind the norm",
    "no_rope_freq": "leaves some layers without rotation",
    "moe_apply_probs_on_input": "weights the inputs of experts instead of their outputs",
}
"""Knobs of Megatron's config that change what weights mean and leave no trace in names or shapes.

Grouped-query attention of all Hugging Face models in `families` rotates halves, as Megatron does unless it is told otherwise.
With latent attention Megatron always takes pairs, as DeepSeek's checkpoints have them, and refuses ``rotary_interleaved``.
"""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}
"""What both sides call activation functions; others are not compared, nor approximations told from the function."""


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """What a model's parameters are.

    Attributes:
        boxes: by the parameter's name in the list of chunks.
        groups: mesh group of the checkpoint tensors that are not in group 0.
        aliases: names that are other names of a checkpoint tensor.
    """

    boxes: Mapping[str, Sequence[NamedBox]]
    groups: Mapping[str, int]
    aliases: Mapping[str, str]


def map_model(
    chunks: nn.ModuleList,
    *,
    family: Family,
    places: Places,
    hf_config: Any = None,
    vocabulary: int | None = None,
    leave_out: Sequence[str] = (),
) -> Mapped:
    """Map all parameters of this rank's chunks, but for those whose names match a pattern (``*``) of ``leave_out``.

    Raises:
        PlanError: with every problem found.
    """
    model = unwrapped(chunks[0])
    problems = check_configs(model.config, hf_config, family)
    tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
    if hf_config is not None and setting(hf_config, "tie_word_embeddings") and not tied:
        problems.append("the Hugging Face config ties the embeddings, Megatron's model has an output layer of its own")
    experts = int(getattr(model.config, "num_moe_experts", None) or 0)
    if experts % places.expert.ranks:
        problems.append(f"{experts} experts cannot be dealt out evenly to {places.expert.ranks} expert-parallel ranks")
    mapper = _Mapper(
        family=family,
        places=places,
        dims=_dims(model.config, vocabulary),
        leave_out=leave_out,
        local_experts=experts // places.expert.ranks,
        tied=tied,
        problems=problems,
    )
    layers = [layer_numbers(chunk) for chunk in chunks]
    for parameter in parameters(chunks):
        mapper.add(parameter, layers[parameter.chunk])
    mapper.finish(whole=all(any(getattr(unwrapped(c), end, False) for c in chunks) for end in ("pre_process", "post_process")))
    if problems:
        raise PlanError(problems)
    return Mapped(boxes=mapper.boxes, groups=mapper.groups, aliases={family.head: family.embedding} if tied else {})


def setting(config: Any, name: str) -> Any:
    """An attribute of a config, or a key of one that is a mapping; None if it is not there."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def check_configs(config: Any, hf_config: Any, family: Family) -> list[str]:
    """What is wrong with Megatron's config, alone and compared with Hugging Face's."""
    problems = [
        f"Megatron's {knob}={getattr(config, knob)!r} {what}, for which there is no rule; it must not be set"
        for knob, what in _UNSUPPORTED.items()
        if getattr(config, knob, None) and knob not in family.allows
    ]
    problems += _silent(config, hf_config)
    for knob, names in family.numbers.items() if hf_config is not None else ():
        found = {name: setting(hf_config, name) for name in names}
        name, theirs = next(((name, value) for name, value in found.items() if value is not None), (names[0], None))
        if name == "head_dim" and theirs is None:
            name, theirs = "hidden_size // num_attention_heads", _head_dim(hf_config)
        mine = getattr(config, knob, None)
        if mine != theirs:
            problems.append(f"Megatron's {knob} is {mine}, the Hugging Face config's {name} is {theirs}")
    return problems


def _silent(config: Any, hf_config: Any) -> list[str]:
    """Where both configs contradict each other in what neither names nor shapes nor numbers tell."""
    if hf_config is None:
        return []
    problems = []
    function = getattr(config, "activation_func", None)
    mine = _ACTIVATIONS.get(getattr(function, "__name__", type(function).__name__).lower())
    act = setting(hf_config, "hidden_act")
    theirs = _ACTIVATIONS.get(act) if isinstance(act, str) else None
    if mine and theirs and mine != theirs:
        problems.append(f"Megatron's activation_func is {mine}, the Hugging Face config's hidden_act is {act}")
    if getattr(config, "multi_latent_attention", False) and setting(hf_config, "rope_interleave") is False:
        problems.append("Megatron's latent attention rotates pairs, the Hugging Face config's rope_interleave is False")
    return problems


def _head_dim(hf_config: Any) -> int | None:
    hidden, heads = setting(hf_config, "hidden_size"), setting(hf_config, "num_attention_heads")
    return hidden // heads if hidden and heads else None


def _dims(config: Any, vocabulary: int | None) -> Dims:
    heads = int(config.num_attention_heads)
    return Dims(
        heads=heads,
        groups=int(getattr(config, "num_query_groups", None) or heads),
        head_dim=int(getattr(config, "kv_channels", None) or config.hidden_size // heads),
        gated=bool(getattr(config, "gated_linear_unit", True)),
        vocabulary=vocabulary,
    )


@dataclass(kw_only=True)
class _Mapper:
    """Maps one parameter after the other."""

    family: Family
    places: Places
    dims: Dims
    leave_out: Sequence[str]
    local_experts: int
    tied: bool
    problems: list[str]
    boxes: dict[str, list[NamedBox]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    unmapped: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    embedded: bool = False

    def add(self, parameter: Parameter, layers: Mapping[str, int]) -> None:
        left = {pattern for pattern in self.leave_out if fnmatchcase(parameter.path, pattern)}
        self.used |= left
        if left:
            self.boxes[parameter.key] = [padding_box(parameter.tensor.shape)]
            return
        match = self.family.find(parameter.path)
        if match is None:
            self.unmapped.append(parameter.path)
            return
        if not match.row.expert and getattr(parameter.tensor, "allreduce", True) is False:
            self.problems.append(
                f"{parameter.path} is an expert's parameter (allreduce=False), but its row of family {self.family.name} has no "
                "{expert} in its pattern"
            )
            return
        numbers = self._numbers(parameter, match, layers)
        if numbers is None:
            return
        try:
            found = self._boxes(parameter, match.row)
        except ValueError as error:
            self.problems.append(f"{parameter.path} of shape {tuple(parameter.tensor.shape)}: {error}")
            return
        self.boxes[parameter.key] = self._settled([self._named(box, numbers) for box in found])
        if match.row.expert and self.places.apart:
            self.groups.update((box.name, EXPERT) for box in self.boxes[parameter.key])

    def finish(self, *, whole: bool) -> None:
        """One problem for all parameters that no row matches, and, where we have all stages, one for patterns without any."""
        idle = [pattern for pattern in dict.fromkeys(self.leave_out) if pattern not in self.used]
        if idle and whole:
            self.problems.append(f"leave_out: {', '.join(map(repr, idle))} matches no parameter of the model; mend or drop it")
        if self.unmapped:
            kinds = dict.fromkeys(self.unmapped)
            self.problems.append(
                f"family {self.family.name} has no row for {', '.join(kinds)}; add one: pass "
                f'family=Family(name="...", rows=(Row("...", Same("...")), *{self.family.name.upper()}.rows)) to MegatronSource'
            )

    def _numbers(self, parameter: Parameter, match: Match, layers: Mapping[str, int]) -> dict[str, int] | None:
        """The numbers of layer and expert in the whole model."""
        numbers = dict(match.numbers)
        if "layer" in numbers:
            path = match.paths["layer"]
            if path not in layers:
                self.problems.append(f"{parameter.path}: the module at {path} has no layer_number, so its place is not known")
                return None
            numbers["layer"] = layers[path]
        if "expert" in numbers:
            numbers["expert"] += self.places.expert.rank * self.local_experts
        return numbers

    def _boxes(self, parameter: Parameter, row: Row) -> list[NamedBox]:
        local: Index = tuple(parameter.tensor.shape)
        place = self.places.expert_tensor if row.expert else self.places.tensor
        shard = None
        axis = parameter.axis(expert=row.expert)
        if axis is not None and place.ranks > 1:
            axis = axis if row.axis is None else row.axis
            self._check_gate(parameter, row)
            shard = Shard(axis, place.ranks, place.rank, parameter.stride if row.rule.stride is None else row.rule.stride)
            if not 0 <= axis < len(local) or local[axis] % shard.stride:
                raise ValueError(f"it cannot be sharded along axis {axis} in {shard.stride} rounds")
        whole = whole_shape(local, shard)
        segments = row.rule.segments(whole[0] if whole else 1, self.dims)
        found = boxes(local, segments, shard)
        return found or [padding_box(local)]

    def _check_gate(self, parameter: Parameter, row: Row) -> None:
        """Megatron marks halves of a rank's own with a stride; parameters that were never initialized, or TE's, lack that."""
        silent = row.rule.stride is None and parameter.stride == 1
        if silent and self.dims.gated and ".linear_fc1." in parameter.path:
            raise ValueError(
                "each rank holds [gate; up] of its own, and neither the parameter nor its row says so; write Gated(...), or "
                "Same(..., stride=2) for a checkpoint that has both in one tensor"
            )

    def _settled(self, found: list[NamedBox]) -> list[NamedBox]:
        """The boxes; nothing of a second copy of tied embeddings on this rank."""
        if not (self.tied and found[0].name == self.family.embedding):
            return found
        copy, self.embedded = self.embedded, True
        return [padding_box(found[0].local_size())] if copy else found

    def _named(self, box: NamedBox, numbers: Mapping[str, int]) -> NamedBox:
        name = named(box.name, numbers)
        if self.tied and name == self.family.head:  # the last pipeline stage has a copy of the embeddings
            name = self.family.embedding
        return replace(box, name=name)
