"""Stands in for sglang's compiled kernels. On a CPU without AMX it uses torch instead, and only imports some of these."""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this is a stub: sgl_kernel is not installed")

    return missing
