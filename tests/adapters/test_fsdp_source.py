"""`FSDPSource` over real gloo processes: what each rank says it holds, against stamped whole tensors. See fsdp_world.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from syncline.adapters.trainers import FSDPSource
from syncline.engine.errors import ConfigError

WORLD = Path(__file__).with_name("fsdp_world.py")
PATIENCE_S = 110.0

OF_FIVE = (
    "default_group",
    "one_dimension",
    "rank_order",
    "hsdp",
    "placements",
    "tensor_parallel",
    "other_axis",
    "cpu_offload",
)
OF_TWO = ("mixed_kinds", "wrapped", "gathered_root", "inside_a_pass", "changes", "loader", "transformers")


def run_world(folder: Path, size: int, cases: tuple[str, ...]) -> list[dict[str, str]]:
    """Run the cases on ``size`` processes; per rank, by case: empty text, or what went wrong."""
    ranks = []
    for rank in range(size):
        log = (folder / f"log-{rank}.txt").open("w")
        command = [sys.executable, "-W", "error", str(WORLD), str(rank), str(size), str(folder), *cases]
        ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    deadline = time.monotonic() + PATIENCE_S
    try:
        for process in ranks:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [_result(folder, rank, cases) for rank in range(size)]


def _result(folder: Path, rank: int, cases: tuple[str, ...]) -> dict[str, str]:
    file = folder / f"result-{rank}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    missing = f"rank {rank} did not get here; its log ends:\n{(folder / f'log-{rank}.txt').read_text()[-3000:]}"
    return {case: found.get(case, missing) for case in cases}


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return run_world(tmp_path_factory.mktemp("five"), 5, OF_FIVE)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("two")
    tiny = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "num_experts_per_tok": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    qwen = Qwen3MoeConfig(**tiny, num_experts=3, moe_intermediate_size=12)
    Qwen3MoeForCausalLM(qwen).save_pretrained(folder / "checkpoint-qwen")
    mixtral = MixtralConfig(**tiny, num_local_experts=3, tie_word_embeddings=True)
    MixtralForCausalLM(mixtral).save_pretrained(folder / "checkpoint-mixtral")
    return run_world(folder, 2, OF_TWO)


@pytest.mark.parametrize("case", OF_FIVE)
def test_five_processes(five, case):
    assert [result[case] for result in five] == [""] * 5


@pytest.mark.parametrize("case", OF_TWO)
def test_two_processes(two, case):
    assert [result[case] for result in two] == [""] * 2


def test_needs_an_initialized_job():
    with pytest.raises(ConfigError, match="use ModuleSource"):
        FSDPSource(nn.Linear(2, 2))
