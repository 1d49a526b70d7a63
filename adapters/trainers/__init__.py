"""Sources: the weights of a trainer's ranks, for `syncline.engine.TransferEngine`."""

from __future__ import annotations

from .fsdp import FSDPSource
from .megatron import MegatronSource
from .module import ModuleSource

__all__ = ["FSDPSource", "MegatronSource", "ModuleSource"]
