"""``syncline doctor``: what is there and usable on this machine, and what is missing for what."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from .probes import MODULES, Finding, check_loopback, check_machine, check_module, check_shared_memory, in_child

_BASE = ("machine", "torch", "aiohttp", "uvloop", "msgspec", "xxhash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Something one may want to do, the findings that it needs, and the modules of ours that do it."""

    name: str
    needs: tuple[str, ...]
    ours: tuple[str, ...] = ()
    required: bool = False


FEATURES: tuple[Feature, ...] = (
    Feature(name="push on one host (shm; staged, streamed, mapped)", needs=(*_BASE, "shared memory"), required=True),
    Feature(name="push between hosts (gloo; staged, streamed)", needs=(*_BASE, "loopback", "gloo"), required=True),
    Feature(
        name="several source ranks (FSDP2)",
        needs=(*_BASE, "loopback", "gloo"),
        ours=("syncline.adapters.trainers.fsdp",),
        required=True,
    ),
    Feature(
        name="generation server (syncline serve)",
        needs=(*_BASE, "transformers", "safetensors"),
        ours=("syncline.bench.serve",),
    ),
    Feature(
        name="demo (syncline demo)",
        needs=(*_BASE, "gloo", "transformers", "safetensors", "rich", "matplotlib"),
        ours=("syncline.bench.demo",),
    ),
    Feature(name="SmolLM2-135M weights (--model smollm2)", needs=("transformers", "gguf", "accelerate", "smollm2 weights")),
    Feature(name="benchmarks (syncline bench)", needs=(*_BASE, "loopback", "gloo"), ours=("syncline.bench.measure.run",)),
    Feature(
        name="weights on GPUs (NCCL, CUDA IPC)",
        needs=("cuda", "nccl", "triton"),
        ours=("syncline.stages.transports.nccl", "syncline.stages.transports.cuda_ipc"),
    ),
    Feature(name="pushing into vLLM servers", needs=_BASE, ours=("syncline.adapters.engines.vllm",)),
    Feature(name="vLLM servers that run here", needs=("vllm",), ours=("syncline.adapters.engines.vllm.plugin",)),
    Feature(
        name="pushing into SGLang servers",
        needs=(*_BASE, "loopback", "gloo", "transformers", "safetensors"),
        ours=("syncline.adapters.engines.sglang",),
    ),
    Feature(name="SGLang servers that run here", needs=("sglang",)),
    Feature(name="TorchRL targets", needs=("torchrl",), ours=("syncline.adapters.engines.torchrl",)),
    Feature(name="Megatron-core sources", needs=("megatron-core",), ours=("syncline.adapters.trainers.megatron",)),
    Feature(name="Ray actors", needs=("ray",), ours=("syncline.adapters.ray",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a feature can be used here, and if not, what lacks and what to do about it."""

    feature: str
    ready: bool
    required: bool
    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    remedies: tuple[str, ...]


def examine(*, timeout_s: float = 60.0) -> dict[str, Finding]:
    """Try everything; a check in a process of its own gets ``timeout_s`` seconds. In order of the report."""
    children = ("torch", "gloo", "cuda", "nccl")
    with ThreadPoolExecutor(max_workers=2) as pool:
        tried = [pool.submit(in_child, name, timeout_s=timeout_s) for name in children]
        modules = [pool.submit(check_module, name, timeout_s=timeout_s) for name in MODULES]
        findings = [check_machine(), check_shared_memory(), check_loopback()]
        findings += [future.result() for future in (*tried, *modules)]
    return {finding.name: finding for finding in findings}


def is_built(module: str) -> bool:
    """Whether this version of syncline has the module. Looks for its file: importing its parents would import torch."""
    place = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def judge(findings: Mapping[str, Finding], features: Sequence[Feature] = FEATURES) -> list[Verdict]:
    """What the findings mean for each feature."""
    return [_judge(feature, findings) for feature in features]


def _judge(feature: Feature, findings: Mapping[str, Finding]) -> Verdict:
    bad = [findings[need] for need in feature.needs if findings[need].state != "ok"]
    absent = [module for module in feature.ours if not is_built(module)]
    lacks = [f"{finding.name} ({finding.state})" for finding in bad]
    lacks += [f"{module} (not in this version)" for module in absent]
    remedies = [finding.remedy for finding in bad if finding.remedy]
    remedies += ["a later version of syncline"] if absent else []
    return Verdict(
        feature=feature.name,
        ready=not lacks,
        required=feature.required,
        needs=feature.needs,
        lacks=tuple(lacks),
        remedies=tuple(dict.fromkeys(remedies)),
    )


def render(findings: Mapping[str, Finding], verdicts: Sequence[Verdict]) -> str:
    """Both tables as text."""
    width = max(len(name) for name in findings)
    lines = ["What is here", ""]
    lines += [f"  {finding.state:<8} {finding.name:<{width}}  {finding.detail}" for finding in findings.values()]
    lines += ["", "What can be done with it", ""]
    for verdict in verdicts:
        lines.append(f"  {'ready' if verdict.ready else 'no':<8} {verdict.feature}")
        if not verdict.ready:
            lines.append(f"  {'':<8}   lacks:  {', '.join(verdict.lacks)}")
            lines.append(f"  {'':<8}   remedy: {'; '.join(verdict.remedies) or 'see above'}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Say what is there and usable, and what is missing for what. Exit code 1 if plain pushes cannot work here."""

    json: bool = False
    """Print one JSON object instead of tables."""
    timeout: float = 60.0
    """Seconds that one framework may take to be imported and tried."""


def main(args: DoctorArgs) -> int:
    """Entry point of ``syncline doctor``."""
    findings = examine(timeout_s=args.timeout)
    verdicts = judge(findings)
    if args.json:
        report = {
            "findings": [asdict(finding) for finding in findings.values()],
            "features": [asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(report, indent=2))
    else:
        print(render(findings, verdicts))
    broken = [verdict.feature for verdict in verdicts if verdict.required and not verdict.ready]
    if broken and not args.json:
        print(f"\nsyncline cannot work here: {'; '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0
