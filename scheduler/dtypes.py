"""Element types by name, as torch prints them without the ``torch.`` prefix."""

from __future__ import annotations

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}
"""Bytes of one element. A dtype that is not listed cannot travel: planning refuses it by name."""

CASTABLE: frozenset[str] = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Types between which `prepare` may cast (round to nearest even, as ``Tensor.to`` does). Others travel unchanged."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``; `KeyError` if the dtype cannot travel."""
    return ITEMSIZE[dtype]
