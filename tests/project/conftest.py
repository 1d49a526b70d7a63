"""What the tests of the project itself share: its modules, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

FOLDERS = ("scheduler", "stages", "engine", "adapters", "bench")

OPTIONAL = (
    "accelerate", "gguf", "matplotlib", "megatron", "psutil", "ray", "rich", "safetensors", "sglang", "tokenizers", "torchrl",
    "transformers", "triton", "vllm",
)  # fmt: skip


@pytest.fixture(scope="session")
def folders() -> tuple[str, ...]:
    return FOLDERS


@pytest.fixture(scope="session")
def sources(repository: Path) -> list[Path]:
    """Every module of the package."""
    return sorted(path for folder in FOLDERS for path in (repository / folder).rglob("*.py"))


@pytest.fixture(scope="session")
def modules(repository: Path, sources: Sequence[Path]) -> list[str]:
    """Their import names."""
    names = [".".join(("syncline", *path.relative_to(repository).with_suffix("").parts)) for path in sources]
    return [name.removesuffix(".__init__") for name in names]


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``python(code)`` in a process of its own, in an empty folder; ``blocked`` names cannot be imported there."""

    def run(code: str, *argv: str, blocked: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
        prelude = f"import sys\nfor name in {list(blocked)!r}: sys.modules[name] = None\n"
        return subprocess.run(
            [sys.executable, "-c", prelude + code, *argv],
            cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def without_extras(python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As ``python``, where none of the optional packages is installed."""

    def run(code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return python(code, *argv, blocked=OPTIONAL, **env)

    return run
