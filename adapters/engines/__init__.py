"""Loaders and servers: the weights of an inference engine, for `syncline.engine.Receiver`."""

from __future__ import annotations

from .module import ModuleLoader

__all__ = ["ModuleLoader"]
