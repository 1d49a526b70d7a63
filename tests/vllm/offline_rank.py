"""vLLM without a server, in one process with the source: ``offline_rank.py llm|async FOLDER``. Prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from syncline.adapters.engines import VLLMTarget
from syncline.adapters.trainers import ModuleSource
from syncline.engine import TransferConfig, TransferEngine
from syncline.engine.errors import NotServing, VersionConflict

PROMPT = [5, 6, 7]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "weight_transfer_config": {"backend": "syncline"},
}


def weights(folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def expected(model: Any, count: int, prompt: list[int] = PROMPT) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def with_llm(folder: Path) -> dict[str, Any]:
    """Synchronous: push, generate, push, generate."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(folder), **OPTIONS)
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)

    def generate() -> list[int]:
        return list(llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    first, second = weights(folder, 1), weights(folder, 2)
    held = weights(folder, 1)
    engine = TransferEngine(source=ModuleSource(held), targets=[VLLMTarget(llm)], config=TransferConfig())
    engine.connect_blocking()
    saw: dict[str, Any] = {}
    try:
        generate()
    except NotServing as error:
        saw["before"] = str(error)
    saw["same"], saw["version"] = [], []
    for version, model in ((1, first), (2, second), (3, first)):
        held.load_state_dict(model.state_dict())
        report = engine.push_blocking(version)
        assert report.ok, str(report)
        saw["same"].append(generate() == expected(model, 16))
        saw["version"].append(llm.get_weight_version())
    engine.close_blocking()
    saw["after"] = generate() == expected(first, 16)

    held.load_state_dict(second.state_dict())
    following = TransferEngine(source=ModuleSource(held), targets=[VLLMTarget(llm)], config=TransferConfig())
    following.connect_blocking()
    saw["still"] = generate() == expected(first, 16)  # what was held is served
    try:
        saw["same_version"] = str(following.push_blocking(3))
    except VersionConflict as error:
        saw["same_version"] = str(error)
    report = following.push_blocking(4)
    saw["next"] = [report.ok, generate() == expected(second, 16), llm.get_weight_version()]
    following.close_blocking()
    return saw


async def with_async_llm(folder: Path) -> dict[str, Any]:
    """A request in flight goes on over a push, in one process and on one loop with the source."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **OPTIONS))
    progress: list[int] = []

    async def generate(name: str, count: int) -> Any:
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        last = None
        async for output in llm.generate({"prompt_token_ids": PROMPT}, sampling, request_id=name):
            last = output.outputs[0]
            progress.append(len(last.token_ids))
        return last

    first, second = weights(folder, 1), weights(folder, 2)
    held = weights(folder, 1)
    saw: dict[str, Any] = {}
    config = TransferConfig(in_flight="keep", landing="streamed")
    async with TransferEngine(source=ModuleSource(held), targets=[VLLMTarget(llm)], config=config) as engine:
        saw["paused"] = await llm.is_paused()
        assert (await engine.push(1)).ok
        saw["same"] = [list((await generate("a", 16)).token_ids) == expected(first, 16)]
        running = asyncio.create_task(generate("b", 200))
        progress.clear()
        while len(progress) < 5:
            await asyncio.sleep(0.005)
        held.load_state_dict(second.state_dict())
        assert (await engine.push(2)).ok
        saw["running"] = not running.done()
        kept = await running
        saw["spans"] = [dict(span) if isinstance(span, dict) else vars(span) for span in kept.weight_versions]
        saw["kept"] = len(kept.token_ids)
        saw["same"].append(list((await generate("c", 16)).token_ids) == expected(second, 16))
    llm.shutdown()
    return saw


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    folder = Path(sys.argv[2])
    saw = with_llm(folder) if sys.argv[1] == "llm" else asyncio.run(with_async_llm(folder))
    print(json.dumps(saw, default=str), file=out, flush=True)
