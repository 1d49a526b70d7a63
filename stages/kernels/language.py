"""Triton, where it is installed. Without it kernels stay plain functions that nobody calls, and all modules import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # CPU builds of torch come without it
        triton = tl = None

__all__ = ["INSTALLED", "INTERPRETED", "constant", "jit", "tl"]

INSTALLED: bool = triton is not None
"""Whether kernels can be launched at all: on a GPU, or in Triton's interpreter."""

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU: ``TRITON_INTERPRET=1`` when this module is imported. For tests."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`."""
    return function if triton is None else triton.jit(function)


def constant(value: float) -> Any:
    """A global of a module that kernels may read."""
    return value if tl is None else tl.constexpr(value)
