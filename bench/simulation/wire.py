"""Wire formats by name: in which form targets hold weights, and so what they are when they travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from syncline.bench.layouts import Model, tensor_table
from syncline.bench.models import Architecture, Parameter
from syncline.scheduler.formats import CODES, SCALES

WireName = Literal["same", "bf16", "fp8"]

_BLOCK = 128


def held_as(shape: Architecture, wire: WireName) -> Model:
    """The model as targets hold it: ``same`` as the source, in ``bf16``, or its matrices in ``fp8``.

    ``fp8``: e4m3 with a float32 scale for each block of 128 x 128, as the checkpoints of DeepSeek-V3 and Kimi-K2 have it:
    embeddings, output layer, norms, routers and biases stay as they are.
    """
    if wire == "same":
        return Model.of(shape)
    if wire == "bf16":
        return Model.of(replace(shape, dtype="bfloat16"))
    model = Model.of(shape)
    rows = tuple(_quantized(model.rows))
    return Model(shape=shape, rows=rows, table=tensor_table(rows, shape.dtype))


def _quantized(rows: Iterable[Parameter]) -> Iterator[Parameter]:
    for p in rows:
        if p.layer < 0 or len(p.shape) != 2 or p.name.endswith(("gate.weight", ".bias")):
            yield p
            continue
        yield p._replace(dtype=CODES)
        blocks = tuple(-(-size // _BLOCK) for size in p.shape)
        yield p._replace(name=f"{p.name}_scale_inv", shape=blocks, dtype=SCALES)
