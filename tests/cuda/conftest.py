"""What tests on a GPU share. Without one they are skipped, with that reason."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from syncline.bench.gpu_bed import GpuSetup, gpu_bed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a GPU."""
    for item in items:
        if "tests/cuda/" in item.path.as_posix():
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest_asyncio.fixture
async def bed() -> AsyncIterator[Any]:
    """``await bed(**setup)``: running processes of a source and a target on the GPU."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**setup: Any) -> Any:
            return await stack.enter_async_context(gpu_bed(GpuSetup(**setup)))

        yield start
