"""What an engine's checkpoint loader wants: canonical names, shapes and types, read off a model's config.

Engines with a loader of their own (vLLM, SGLang) hold parameters in forms of their own: fused, sharded, packed. What they
take in is the checkpoint: whole tensors under Hugging Face names. Those are found without weights and without the engine, by
building the transformers model on the meta device and naming its parameters as `syncline.adapters.names` does for sources, so
that both sides of a transfer agree.

A quantized checkpoint also holds scales. Where we know which ones (block-wise FP8) they are demanded with their weights, since
an engine that misses one computes with whatever lies there; every other quantization is refused by name.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.scheduler.dtypes import itemsize
from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Box, Buffer, Index, Layout, Manifest, Piece, Tensor, row_major

from ..holdings import Holdings

_QUANTIZED = "float8_e4m3fn"
_OLD_PREFIX = re.compile(r"^model\.")


@dataclass(frozen=True, kw_only=True)
class CheckpointTensors:
    """Everything that a checkpoint of some model holds.

    Attributes:
        tensors: in checkpoint order, each with its full shape and the type in which the engine takes it.
        aliases: other names of tensors (tied weights): alias -> name.
    """

    tensors: tuple[Tensor, ...]
    aliases: Mapping[str, str]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Canonical names, in order."""
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_nbytes(tensor) for tensor in self.tensors)

    @cached_property
    def layout(self) -> Layout:
        """A target's layout that takes every tensor whole. Its buffers stand for the engine's; nothing writes into them."""
        pieces = [
            Piece(
                tensor=i,
                box=Box(start=(0,) * len(tensor.shape), shape=tensor.shape),
                buffer=i,
                offset=0,
                strides=row_major(tensor.shape),
                dtype=tensor.dtype,
            )
            for i, tensor in enumerate(self.tensors)
        ]
        buffers = [Buffer(name=tensor.name, nbytes=_nbytes(tensor)) for tensor in self.tensors]
        return Manifest(
            rank=0, world_size=1, host="", tensors=self.tensors, pieces=pieces, buffers=buffers, aliases=self.aliases,
            whole_tensors=True,
        ).layout  # fmt: skip

    def manifest(self, *, rank: int, world_size: int, host: str, fingerprint: str = "") -> Manifest:
        """The manifest of a rank whose loader takes whole checkpoint tensors (`Loader.buffers` returns None)."""
        return Manifest(rank=rank, world_size=world_size, host=host, layout=self.layout, fingerprint=fingerprint)


def checkpoint_tensors(model: Any, *, dtype: str | torch.dtype) -> CheckpointTensors:
    """The tensors that a checkpoint of a causal language model holds.

    Args:
        model: a transformers config, or the folder (or GGUF file) of a checkpoint. No weights are read.
        dtype: of the engine's floating-point parameters (``"bfloat16"`` or ``torch.bfloat16``). What transformers keeps in
            float32 whatever the model's type (a router's bias) is float32 here too.

    Raises:
        PlanError: the architecture is unknown to transformers, or its quantization has no rule here.
    """
    config = _config(model)
    shell = _meta_model(config)
    held = Holdings(shell)
    kind = str(dtype).removeprefix("torch.")
    single = _kept_in_float32(shell)
    tensors = [
        Tensor(name=t.name, shape=t.shape, dtype="float32" if single(t.name) else kind if _is_float(t.dtype) else t.dtype)
        for t in held.tensors
    ]
    return CheckpointTensors(tensors=tuple(_quantized(config, shell, held, tensors)), aliases=dict(held.aliases))


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * itemsize(tensor.dtype)


def _is_float(dtype: str) -> bool:
    return bool(getattr(torch, dtype).is_floating_point)


def _config(model: Any) -> Any:
    if isinstance(model, (str, Path)):
        from .checkpoints import Checkpoint

        return Checkpoint.find(model).config()
    return model


def _meta_model(config: Any) -> nn.Module:
    """The transformers model of a config, without memory, its weights tied."""
    transformers = importlib.import_module("transformers")
    architectures: Sequence[str] = getattr(config, "architectures", None) or ()
    kind = next((found for name in architectures if (found := getattr(transformers, name, None)) is not None), None)
    try:
        with torch.device("meta"):
            make = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config  # noqa: SLF001
            model: Any = make(config)
        model.tie_weights()
    except Exception as error:
        name = ", ".join(architectures) or type(config).__name__
        why = f"transformers cannot build {name} from its config, so the names of its checkpoint are not known: {error}"
        raise PlanError([why]) from error
    built: nn.Module = model
    return built


def _kept_in_float32(model: nn.Module) -> Any:
    """Whether transformers keeps a parameter in float32 whatever the type of the model."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:$|\.)" for part in parts)) if parts else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def _quantized(config: Any, model: nn.Module, held: Holdings, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors as a quantized checkpoint holds them; the same ones if it is not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return tensors
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method, block = str(settings.get("quant_method", "unknown")), settings.get("weight_block_size")
    method = method.removeprefix("QuantizationMethod.").lower()
    if method == "fp8" and block:
        return list(_block_fp8(tensors, _quantized_names(model, held, settings), block))
    how = repr(method) if block else f"{method!r} without weight_block_size"
    why = f"the checkpoint is quantized with {how}, and which scales belong to it is known for block-wise FP8 only"
    raise PlanError([f"{why}: serve an unquantized checkpoint"])


def _quantized_names(model: nn.Module, held: Holdings, settings: Mapping[str, Any]) -> set[str]:
    """Canonical names of the weights of linear layers and packed experts, less the modules that are left as they are."""
    kept = tuple(settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ())
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    owners = {f"{path}.{name}": module for path, module in model.named_modules() for name in vars(module)["_parameters"]}
    names: set[str] = set()
    for piece in held.pieces:
        tensor, owner = held.tensors[piece.tensor], owners.get(held.buffers[piece.buffer].name)
        packed = len(tensor.shape) == 2 and ".experts." in tensor.name
        linear = isinstance(owner, nn.Linear) and owner is not output and tensor.name.endswith(".weight")
        if (packed or linear) and not any(_is_below(tensor.name, part) for part in kept):
            names.add(tensor.name)
    return names


def _is_below(name: str, part: str) -> bool:
    """Whether a parameter belongs to a module that is named by its path, or by the last part of it."""
    return f".{part}." in f".{name}." or _OLD_PREFIX.sub("", name).startswith(f"{part}.")


def _block_fp8(tensors: Sequence[Tensor], names: set[str], block: Sequence[int]) -> Any:
    for tensor in tensors:
        if tensor.name not in names:
            yield tensor
            continue
        yield Tensor(name=tensor.name, shape=tensor.shape, dtype=_QUANTIZED)
        scales: Index = tuple(-(-extent // size) for extent, size in zip(tensor.shape, block, strict=True))
        yield Tensor(name=f"{tensor.name}_scale_inv", shape=scales, dtype="float32")
