"""Loaders and servers: the weights of an inference engine, for `syncline.engine.Receiver`; and engines as targets."""

from __future__ import annotations

from .module import ModuleLoader
from .sglang import SGLangTarget
from .two_phase_target import TwoPhaseTarget
from .vllm import VLLMTarget

__all__ = ["ModuleLoader", "SGLangTarget", "TwoPhaseTarget", "VLLMTarget"]
