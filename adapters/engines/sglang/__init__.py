"""SGLang servers as targets: `SGLangTarget`, or `SGLangReceiver` beside the server."""

from __future__ import annotations

from .front import ServerInfo, SGLangFront
from .options import SGLangOptions
from .standin import SGLangReceiver
from .target import SGLangTarget

__all__ = ["SGLangFront", "SGLangOptions", "SGLangReceiver", "SGLangTarget", "ServerInfo"]
