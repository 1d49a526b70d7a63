"""Wire formats of quantized weights: what travels beside a weight, under which name, and which weights are quantized.

A quantized weight ``X.weight`` travels as FP8 e4m3 codes of the same shape, with a *scale* for each group of its elements
as a companion tensor; what a reader computes with is ``code * scale``. What the codes and scales are, bit for bit, is
defined in the kernels. Everything here is a pure function of names and shapes.

======================== ==================== =========================== ==============================
format                   group                scale tensor (float32)      shape for a weight (M, N)
======================== ==================== =========================== ==============================
``fp8_e4m3:128x128``     a block of M and N   ``X.weight_scale_inv``      (ceil(M / 128), ceil(N / 128))
``fp8_e4m3:channel``     an output row        ``X.weight_scale``          (M, 1)
``fp8_e4m3:tensor``      the whole weight     ``X.weight_scale``          (1,)
======================== ==================== =========================== ==============================

``:pow2`` at the end makes every scale a power of two. The names are those of checkpoints: ``_inv`` is historical, that
scale is a multiplier like the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Grouping = Literal["block", "channel", "tensor"]

CODES = "float8_e4m3fn"
"""Element type of quantized weights."""

SCALES = "float32"
"""Element type of scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Format:
    """FP8 e4m3 codes with a float32 scale for each group of elements.

    Attributes:
        grouping: which elements of a weight share a scale.
        block: rows and columns of a group; of ``grouping="block"`` only.
        pow2: scales are rounded up to powers of two.
    """

    grouping: Grouping
    block: tuple[int, int] = (128, 128)
    pow2: bool = False

    def __post_init__(self) -> None:
        if self.grouping not in {"block", "channel", "tensor"}:
            raise ValueError(f"grouping is block, channel or tensor, not {self.grouping!r}")
        if min(self.block) < 1:
            raise ValueError(f"blocks have at least one row and one column, not {self.block}")

    @property
    def name(self) -> str:
        """For example ``fp8_e4m3:128x128``; `parse_format` reads it."""
        group = "x".join(map(str, self.block)) if self.grouping == "block" else self.grouping
        return f"fp8_e4m3:{group}{':pow2' if self.pow2 else ''}"

    def group(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a group in a weight of ``shape`` (M, N)."""
        rows, columns = _matrix(shape)
        if self.grouping == "block":
            return self.block
        return (1, max(columns, 1)) if self.grouping == "channel" else (max(rows, 1), max(columns, 1))

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a weight of ``shape`` (M, N)."""
        rows, columns = _matrix(shape)
        if self.grouping == "tensor":
            return (1,)
        if self.grouping == "channel":
            return (rows, 1)
        return (-(-rows // self.block[0]), -(-columns // self.block[1]))

    def scale_name(self, weight: str) -> str:
        """Name of the scales of ``weight``: ``X.weight`` gives ``X.weight_scale_inv`` or ``X.weight_scale``."""
        return f"{weight}_scale_inv" if self.grouping == "block" else f"{weight}_scale"


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"only matrices are quantized, not a tensor of shape {tuple(shape)}")
    return shape[0], shape[1]


def parse_format(name: str) -> Fp8Format:
    """The format that `Fp8Format.name` names; `ValueError` if there is none."""
    found = re.fullmatch(r"fp8_e4m3:(?:(\d+)x(\d+)|(channel|tensor))(:pow2)?", name)
    if found is None:
        raise ValueError(
            f"{name!r} is no wire format: fp8_e4m3:128x128, fp8_e4m3:channel or fp8_e4m3:tensor, each with or without :pow2"
        )
    rows, columns, other, pow2 = found.groups()
    if other is None:
        return Fp8Format(grouping="block", block=(int(rows), int(columns)), pow2=bool(pow2))
    return Fp8Format(grouping="channel" if other == "channel" else "tensor", pow2=bool(pow2))


def format_of_target(
    weight: str,
    shape: Sequence[int],
    scales: Mapping[str, tuple[Sequence[int], str]],
    *,
    block: tuple[int, int] = (128, 128),
    given: Fp8Format | None = None,
) -> Fp8Format:
    """What a target that declares ``weight`` as FP8 expects, told by the scale tensor that it declares beside it.

    Args:
        weight: canonical name of a weight whose dtype at the target is ``float8_e4m3fn``.
        shape: its canonical shape (M, N).
        scales: the target's tensors by canonical name: shape and dtype.
        block: rows and columns of a block. A grid of scales does not tell them, so the target's config must.
        given: the format that it has to be.

    Raises:
        ValueError: the companion is missing, or its shape or dtype fits no format. An FP8 weight without its scale, or
            with another one's, must never be sent.
    """
    candidates = [Fp8Format(grouping="block", block=block), Fp8Format(grouping="channel"), Fp8Format(grouping="tensor")]
    candidates = candidates if given is None else [given]
    declared = [name for name in (f"{weight}_scale_inv", f"{weight}_scale") if name in scales]
    if len(declared) != 1:
        what = "no scale" if not declared else "two scales"
        raise ValueError(
            f"{weight} is FP8 at the target, with {what} beside it: declare one of {weight}_scale_inv, {weight}_scale"
        )
    scale_shape, dtype = scales[declared[0]]
    if dtype != SCALES:
        raise ValueError(f"{declared[0]} is {dtype} at the target, and scales travel as {SCALES}")
    for candidate in candidates:
        if candidate.scale_name(weight) == declared[0] and _same_scales(candidate.scale_shape(shape), tuple(scale_shape)):
            return candidate
    fitting = ", or ".join(f"{c.scale_name(weight)} of shape {c.scale_shape(shape)} ({c.name})" for c in candidates)
    raise ValueError(
        f"{declared[0]} has shape {tuple(scale_shape)} at the target; of {weight} of shape {tuple(shape)} they are {fitting}"
    )


def _same_scales(expected: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Engines hold one scale as () or (1,), and one a row as (M,) or (M, 1)."""
    return declared == expected or (
        1 in expected and tuple(n for n in declared if n != 1) == tuple(n for n in expected if n != 1)
    )


LEFT_OUT_PARTS = (
    "embed_tokens", "word_embeddings", "embedding", "embeddings", "wte", "wpe",
    "lm_head", "output_layer",
    "gate", "router", "shared_expert_gate", "weights_proj",
)  # fmt: skip
"""Last parts of module names that are never quantized by default: embeddings, heads, routers, the indexer's weights."""

LEFT_OUT_TEXT = ("norm", "ln_", "conv1d", "rotary")
"""Text in the last part of module names that are never quantized by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantRules:
    """Which weights of a model are quantized, and how. Made by hand or from a checkpoint's ``quantization_config``.

    Attributes:
        format: how.
        modules_to_not_convert: modules that stay as they are, as transformers reads such a list: a module name, the start
            of one up to a dot, a regular expression that matches so, or the end of a name.
        only: if given, nothing else is quantized (same kind of patterns).
    """

    format: Fp8Format
    modules_to_not_convert: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantRules:
        """From a Hugging Face ``quantization_config`` of ``quant_method: fp8``.

        Raises:
            ValueError: it asks for what is not built here.
        """
        problems = _config_problems(config)
        if problems:
            raise ValueError(f"quantization_config: {'; '.join(problems)}")
        pow2 = config.get("scale_fmt") == "ue8m0"
        block = config.get("weight_block_size")
        how = Fp8Format(grouping="tensor", pow2=pow2)
        if block is not None:
            how = Fp8Format(grouping="block", block=(int(block[0]), int(block[1])), pow2=pow2)
        elif config.get("weight_strategy") == "channel":
            how = Fp8Format(grouping="channel", pow2=pow2)
        return cls(format=how, modules_to_not_convert=tuple(config.get("modules_to_not_convert") or ()))

    def quantizes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor of this canonical name and shape travels quantized."""
        if not name.endswith(".weight") or len(shape) != 2 or 0 in shape:
            return False
        module = name.removesuffix(".weight")
        if any(names_module(pattern, module) for pattern in self.modules_to_not_convert):
            return False
        if self.only is not None:
            return any(names_module(pattern, module) for pattern in self.only)
        last = module.rsplit(".", 1)[-1]
        return last not in LEFT_OUT_PARTS and not any(text in last for text in LEFT_OUT_TEXT)

    def wire(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Everything that travels for canonical tensors of these shapes and is not sent as it is: codes and scales.

        Returns:
            Name to shape and dtype, of each quantized weight and, right after it, of its scales.

        Raises:
            ValueError: a name for scales is taken by another tensor.
        """
        travels: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, shape in shapes.items():
            if not self.quantizes(name, shape):
                continue
            scale = self.format.scale_name(name)
            if scale in shapes:
                raise ValueError(f"{scale} would hold the scales of {name}, and is a tensor of the source's own")
            travels[name] = (tuple(shape), CODES)
            travels[scale] = (self.format.scale_shape(shape), SCALES)
        return travels


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config.get("quant_method") != "fp8":
        problems.append(f"quant_method is {config.get('quant_method')!r}, built is 'fp8'")
    if config.get("fmt", "e4m3") != "e4m3":
        problems.append(f"fmt is {config['fmt']!r}, built is 'e4m3'")
    if config.get("scale_fmt") not in {None, "float", "float32", "ue8m0"}:
        problems.append(f"scale_fmt is {config['scale_fmt']!r}, built are float32 and 'ue8m0'")
    block = config.get("weight_block_size")
    if block is not None and (len(block) != 2 or min(block) < 1):
        problems.append(f"weight_block_size is {block!r}, and must be two positive numbers")
    return problems


def names_module(pattern: str, module: str) -> bool:
    """The rule of transformers (`should_convert_module`): from the start to a boundary, as a regex too, or as the end."""
    return module.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None
