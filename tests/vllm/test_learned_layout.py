"""Layouts learned from the weight loaders of real vLLM models, alone and with tensor parallelism; pushes into them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

WORLD = Path(__file__).parent / "learned_world.py"
KINDS = ("llama", "llama-tied", "llama-1-kv-head", "qwen2", "qwen3-moe", "mixtral")
DEADLINE_S = 300.0


def run_world(size: int) -> list[dict[str, Any]]:
    """What each rank found, by kind of model."""
    with tempfile.TemporaryDirectory(prefix="sl-vllm-") as name:
        folder = Path(name)
        logs = [folder / f"{rank}.log" for rank in range(size)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                command = [sys.executable, str(WORLD), str(rank), str(size), name]
                ranks.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=name))
        try:
            codes = [process.wait(DEADLINE_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for segment in Path("/dev/shm").glob(f"{folder.name}*"):  # vLLM's own, named by VLLM_DIST_IDENT
                segment.unlink()
        assert codes == [0] * size, "\n".join(log.read_text()[-3000:] for log in logs)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    return {size: run_world(size) for size in (1, 2)}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_push_lands_as_the_loader_loads(worlds: dict[int, list[dict[str, Any]]], kind: str, size: int) -> None:
    for rank, found in enumerate(world[kind] for world in worlds[size]):
        assert found["through_loader"] == {} and found["unused"] == [], (rank, found["text"])
        assert found["direct"] == found["tensors"]
        assert found["untouched"] and found["moved"] == []
        assert found["report"]["ok"], found["report"]
        assert found["wrong"] == [] and found["wrong_beside_padding"] == [], rank
    assert worlds[size][0][kind]["report"]["messages"] == 0


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_say_what_vllm_does(worlds: dict[int, list[dict[str, Any]]], kind: str, size: int) -> None:
    """`tp_layout`, which knows names and config only, against what vLLM's loaders were seen to do."""
    assert [world[kind]["other_than_tp_layout"] for world in worlds[size]] == [[]] * size
