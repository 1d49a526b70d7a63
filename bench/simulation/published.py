"""Set-ups whose figures others have published, simulated with our engine on hardware like theirs, side by side.

Agreement says that the model of the hardware is sound; a difference says what their figure includes, or what ours leaves
out. Nothing here is fitted to the published figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from syncline.engine.config import TransferConfig

from .bounds import bounds
from .hardware import find
from .setups import scenario
from .simulate import Prediction, Scenario, simulate
from .wire import WireName

_KNOBS: dict[str, Any] = {"max_tmp_bytes": "2GiB", "bucket_bytes": "256MiB", "landing": "streamed", "trace": False}
_NEAR = 1.25


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published figure: what it is of, and what we take its set-up to be.

    Attributes:
        figure: from ``low`` to ``high``, in seconds (``unit`` ``s``), or in GB/s of each receiving GPU while data moves.
        assumptions: what the publication does not say, and what its timer includes.
    """

    who: str
    what: str
    low: float
    high: float
    unit: Literal["s", "GB/s"] = "s"
    model: str
    source: str
    target: str
    hardware: str
    wire: WireName = "bf16"
    offloaded: bool = False
    colocated: bool = False
    assumptions: str

    def scenario(self) -> Scenario:
        """The set-up with our engine."""
        return scenario(
            model=self.model, source=(self.source,), target=(self.target,), hardware=find(self.hardware),
            config=TransferConfig(**_KNOBS), wire=self.wire, offloaded=self.offloaded, colocated=self.colocated,
        )  # fmt: skip


def published() -> tuple[Published, ...]:
    """All that can be simulated."""
    kimi: dict[str, Any] = {
        "model": "kimi-k2", "source": "megatron:tp=8,pp=8,dp=4,ep=32,etp=1", "target": "4x tp:8,dp=4,ep=32"
    }  # fmt: skip
    return (
        Published(
            who="Perplexity", what="Kimi-K2, BF16 training to FP8 inference, 256 to 128 GPUs", low=1.3, high=1.3,
            model="kimi-k2", source="megatron:tp=8,dp=32,ep=128,etp=1", target="4x tp:8,dp=4,ep=32", hardware="h200-400g",
            wire="fp8", offloaded=True,
            assumptions="weights in host memory (their pipeline begins with a copy to the device); experts on pairs "
            "of GPUs (as in their mesh groups, EP 128), the rest TP 8; inference EP 32, TP 8; H200; RDMA writes, no digests "
            "there, two-sided sends with digests here",
        ),
        Published(
            who="NeMo-RL", what="DeepSeek-V3 (1342 GB), BF16, 256 to 256 H100", low=2.39, high=2.83, model="deepseek-v3",
            source="megatron:tp=8,pp=8,dp=4,ep=32,etp=1", target="8x tp:8,dp=4,ep=32", hardware="h100-400g",
            assumptions="Megatron TP 8, PP 8, EP 32; eight engines of 32 GPUs; whether their figure includes installing and "
            "control is not said",
        ),
        Published(
            who="prime-rl", what="rate on the wire of each GPU while data moves", low=44.3, high=44.3, unit="GB/s", **kimi,
            hardware="h100-400g", wire="fp8",
            assumptions="their model and layouts are not known: the rate of the busiest receiver of Kimi-K2 stands for them",
        ),
        Published(
            who="vLLM sharded RDT", what="Kimi-K2, BF16, 256 to 128 H100 (their own bound: 1.25 s)", low=7.53, high=7.53,
            hardware="h100-400g", **kimi,
            assumptions="Megatron TP 8, PP 8, EP 32; four engines of 32 GPUs; their figure goes through the engine's loader",
        ),
        Published(
            who="checkpoint-engine", what="Qwen3-235B, one node of 8 GPUs, through the engine's loader", low=6.22, high=6.22,
            model="qwen3-235b-a22b", source="fsdp:8", target="tp:8", hardware="h800-400g", offloaded=True, colocated=True,
            assumptions="weights in host memory, an eighth with each rank; H800; theirs is broadcast whole to every GPU and "
            "loaded by the engine, ours sends each rank its slices",
        ),
        Published(
            who="checkpoint-engine", what="GLM-4.5-Air, one node of 8 GPUs, through the engine's loader", low=3.47, high=3.47,
            model="glm-4.5-air", source="fsdp:8", target="tp:8", hardware="h800-400g", offloaded=True, colocated=True,
            assumptions="as above",
        ),
        Published(
            who="slime", what="Qwen3-30B, colocated, CUDA IPC, 8 H100", low=7.0, high=7.0, model="qwen3-30b-a3b",
            source="megatron:tp=4,dp=2,ep=8,etp=1", target="2x tp:4", hardware="h100-400g", colocated=True,
            assumptions="Megatron TP 4, EP 8; two engines of TP 4; theirs gathers whole tensors and loads them by the engine",
        ),
    )  # fmt: skip


NOT_SIMULATED = (
    "verl's 11.4 to 14.9 s (235B): a bit-exact delta, which syncline does not send",
    "verl's 246 to 266 s for a full broadcast (235B): its hardware is not said",
)


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure and ours: ``ours`` in its unit, the bound in seconds, and ours over theirs."""

    who: str
    what: str
    theirs: str
    ours: float
    bound_s: float
    unit: str
    ratio: float
    verdict: str
    bottleneck: str
    assumptions: str


def side_by_side() -> Iterator[Beside]:
    """Simulate each."""
    for each in published():
        there = each.scenario()
        prediction = simulate(there)
        ours = prediction.seconds if each.unit == "s" else _rate(there, prediction)
        nearest = min(max(ours, each.low), each.high)
        ratio = ours / nearest
        yield Beside(
            who=each.who, what=each.what, theirs=f"{each.low:g}" if each.low == each.high else f"{each.low:g} to {each.high:g}",
            ours=ours, bound_s=max(bounds(there).values()), unit=each.unit, ratio=ratio, verdict=_verdict(ratio, each.unit),
            bottleneck=prediction.bottleneck, assumptions=each.assumptions,
        )  # fmt: skip


def _rate(there: Scenario, prediction: Prediction) -> float:
    """GB/s of the receiver that takes most, from the first task to the commit."""
    plan, _ = there.plans.of(there.options)
    nbytes = float(plan.traffic.received.max())
    return nbytes / (prediction.seconds - prediction.control_s - prediction.commit_s) / 1e9


def _verdict(ratio: float, unit: str) -> str:
    if 1 / _NEAR <= ratio <= _NEAR:
        return "agrees"
    faster = ratio < 1 if unit == "s" else ratio > 1
    return f"differs: simulated {max(ratio, 1 / ratio):.1f} times {'faster' if faster else 'slower'}"
