"""Kernels in Triton's interpreter, on any machine, and compiled, on a GPU: the same tests.

Whether Triton interprets is decided when it is imported, for a whole process. Without ``TRITON_INTERPRET=1`` the tests
here are for a GPU (marked ``cuda``); `test_interpreter.py` runs all of them in a process of its own that has it set.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INTERPRET and "kernels" in getattr(item, "fixturenames", ()):
            item.add_marker("cuda")


@pytest.fixture(scope="session")
def kernels() -> SimpleNamespace:
    """The kernels' modules, and the device that they run on."""
    pytest.importorskip("triton", reason="this environment has no Triton")
    from syncline.stages.kernels import assemble, land, launches, tables

    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("no GPU; test_interpreter.py runs these in Triton's interpreter")
    return SimpleNamespace(
        assemble=assemble, land=land, launches=launches, tables=tables, device=torch.device("cpu" if INTERPRET else "cuda")
    )


@pytest.fixture(scope="session")
def interpreted(kernels: SimpleNamespace) -> SimpleNamespace:
    """The same, for tests with many small cases that only the interpreter needs."""
    if not INTERPRET:
        pytest.skip("run in Triton's interpreter only")
    return kernels
