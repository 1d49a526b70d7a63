"""The small engine of `tiny_engine.py`, for tests of target layouts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def tiny_engine() -> ModuleType:
    """The module ``tiny_engine.py``."""
    spec = importlib.util.spec_from_file_location("tiny_engine", HERE / "tiny_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_engine"] = module
    spec.loader.exec_module(module)
    return module
