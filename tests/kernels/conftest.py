"""Kernels in Triton's interpreter, on any machine, and compiled, on a GPU: the same tests.

Whether Triton interprets is decided when it is imported, for a whole process. Without ``TRITON_INTERPRET=1`` the tests
here are for a GPU (marked ``cuda``); `test_interpreter.py` runs all of them in a process of its own that has it set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INTERPRET and "kernels" in getattr(item, "fixturenames", ()):
            item.add_marker("cuda")


@pytest.fixture(scope="session", autouse=INTERPRET)
def language_patched_once() -> Iterator[None]:
    """The interpreter patches Triton's language for each kernel, and for each call of a device function: half of its time."""
    from triton.language import core
    from triton.runtime import interpreter

    call = interpreter.InterpretedFunction.__call__

    def call_without(self: Any, *arguments: Any, **named: Any) -> Any:
        languages = [module for name in ("tl", "core") if isinstance(module := self.fn.__globals__.get(name), ModuleType)]
        if not languages or any(core.is_builtin(language.load) for language in languages):
            return call(self, *arguments, **named)
        return self.rewrite()(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_without)
        yield


@pytest.fixture(scope="session")
def kernels() -> Iterator[SimpleNamespace]:
    """The kernels' modules, and the device that they run on."""
    pytest.importorskip("triton", reason="this environment has no Triton")
    from syncline.stages.kernels import assemble, land, launches, tables

    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("no GPU; test_interpreter.py runs these in Triton's interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "FEWEST_STRIPS", 1)  # buckets of these tests are small
        yield SimpleNamespace(
            assemble=assemble, land=land, launches=launches, tables=tables, device=torch.device("cpu" if INTERPRET else "cuda")
        )


@pytest.fixture(scope="session")
def interpreted(kernels: SimpleNamespace) -> SimpleNamespace:
    """The same, for tests with many small cases that only the interpreter needs."""
    if not INTERPRET:
        pytest.skip("run in Triton's interpreter only")
    return kernels
