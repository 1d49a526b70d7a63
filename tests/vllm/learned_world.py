"""One rank of real vLLM models, without a server: what `learn_layout` learns from their own loaders, and a push into them.

    python learned_world.py RANK SIZE FOLDER

Started by test_learned_layout.py, one process a rank. For each kind of model: learn, prove, compare with `tp_layout`, take a
push, compare with an ordinary load. Results go to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
os.environ["VLLM_DIST_IDENT"] = Path(sys.argv[3]).name  # as its executor does; the same on all ranks

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from syncline.adapters.engines.learned_loader import LearnedLoader
from syncline.adapters.engines.tp_layout import Parallel, tp_layout
from syncline.adapters.named_box import NamedBox
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine

_SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
KINDS: dict[str, Any] = {
    "llama": LlamaConfig(**_SIZES, architectures=["LlamaForCausalLM"]),
    "llama-tied": LlamaConfig(**_SIZES, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]),
    "llama-1-kv-head": LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}, architectures=["LlamaForCausalLM"]),
    "qwen2": Qwen2Config(**_SIZES, architectures=["Qwen2ForCausalLM"]),
    "qwen3-moe": Qwen3MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "mixtral": MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]
    ),
}  # fmt: skip


def reference(config: Any) -> nn.Module:
    """The transformers model, with weights of a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def checkpoint(source: ModuleSource) -> dict[str, torch.Tensor]:
    """Whole checkpoint tensors."""
    manifest, buffers = source.manifest(), source.buffers()
    found = {t.name: torch.zeros(t.shape) for t in manifest.tensors}
    for piece in manifest.pieces:
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        buffer = buffers[piece.buffer]
        view = buffer.as_strided(piece.box.shape, piece.strides, buffer.storage_offset() + piece.offset)
        found[manifest.tensors[piece.tensor].name][region] = view
    return found


def engine_config(config: Any, folder: Path, size: int) -> Any:
    """vLLM's config of a model."""
    config.save_pretrained(folder)
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=32, load_format="dummy",
        tensor_parallel_size=size,
    ).create_engine_config()  # fmt: skip


def differences(config: Any, model: nn.Module, rank: int, size: int, learned: dict[str, tuple[NamedBox, ...]]) -> list[str]:
    """Parameters for which `tp_layout` says something else than what was learned."""
    layout = tp_layout(config, model, Parallel(tp_rank=rank, tp_size=size))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return [name for name in layout.keys() - tied if sorted(map(repr, layout[name])) != sorted(map(repr, learned[name]))]


async def pushed(loader: LearnedLoader, source: ModuleSource, rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Rank 0 is trainer, too: push into all ranks."""
    addresses = [f"unix:{folder}/{n}.sock" for n in range(size)]
    leader = addresses[0] if rank else None
    async with Receiver(loader=loader, listen=addresses[rank], rank=rank, world_size=size, leader=leader) as receiver:
        if rank == 0:
            sizes = {"max_tmp_bytes": "1MiB", "bucket_bytes": "32KiB"}
            config = TransferConfig(**sizes, route="direct", landing="streamed", transport="gloo")
            targets = [RemoteTarget(receiver.address)]
            async with TransferEngine(source=source, targets=targets, config=config) as engine:
                report = await engine.push(1)
            return {"ok": report.ok, "text": str(report), "messages": report.routing.messages}
        async with asyncio.timeout(120):
            while receiver.version != 1:
                await asyncio.sleep(0.01)
        return {"ok": True}


def examine(kind: str, rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Everything about one kind of model."""
    folder.mkdir(exist_ok=True)
    config = KINDS[kind]
    vllm_config = engine_config(config, folder / f"config-{rank}", size)
    source = ModuleSource(reference(config), rank=0, world_size=1)
    with set_current_vllm_config(vllm_config):
        torch.set_default_dtype(torch.float32)
        model: nn.Module = initialize_model(vllm_config=vllm_config)
        for param in model.parameters():
            param.data.fill_(0.5)
        places = {name: param.data_ptr() for name, param in model.named_parameters()}
        loader = LearnedLoader(model, model.load_weights, source.manifest().tensors)
        untouched = all(bool((param == 0.5).all()) for param in model.parameters())
        report = asyncio.run(pushed(loader, source, rank, size, folder))
        after = {name: param.detach().clone() for name, param in model.named_parameters()}
        model.load_weights(iter(checkpoint(source).items()))
    learned = loader.learned
    padding = {name for name, boxes in learned.layout.items() if any(box.is_padding for box in boxes)}
    return {
        "report": report,
        "direct": len(learned.direct),
        "tensors": len(learned.tensors),
        "through_loader": dict(learned.through_loader),
        "unused": list(learned.unused),
        "text": str(learned),
        "untouched": untouched,
        "moved": [name for name, param in model.named_parameters() if param.data_ptr() != places[name]],
        "wrong": [
            name for name, param in model.named_parameters() if name not in padding and not torch.equal(param, after[name])
        ],
        "wrong_beside_padding": [
            name for name, param in model.named_parameters()
            if name in padding and not torch.equal(param[after[name] != 0.5], after[name][after[name] != 0.5])
        ],
        "other_than_tp_layout": differences(config, model, rank, size, dict(learned.layout)),
    }  # fmt: skip


def main(rank: int, size: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    # groups of experts are made for mixtures only
    with set_current_vllm_config(engine_config(KINDS["mixtral"], folder / f"first-{rank}", size)):
        init_distributed_environment(
            world_size=size, rank=rank, local_rank=rank, distributed_init_method=f"file://{folder}/store", backend="gloo"
        )
        initialize_model_parallel(size, 1)
    results = {kind: examine(kind, rank, size, folder / kind) for kind in KINDS}
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    except BaseException:  # noqa: BLE001 - the end of the process; its log tells
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # vLLM's own threads need not be waited for
