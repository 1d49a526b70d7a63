"""`SGLangOptions`: how an SGLang server is reached and updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from syncline.engine.address import Address
from syncline.engine.config import parse_size
from syncline.scheduler.layout import Layout

from ..update_group import Backend
from .front import Selector

Transport = Literal["distributed", "disk", "tensor"]


@dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """How an SGLang server is reached and updated.

    Attributes:
        api_key: see `SGLangFront`.
        model: checkpoint folder, GGUF file or transformers config of the server's model; None reads the folder that the server
            names, which works on its own machine.
        layout: what the server's checkpoint loader takes in, for models that transformers does not know; None derives it from
            ``model``.
        dtype: of the server's weights; None takes what the server says, or the checkpoint where that is ``auto``.
        transport: ``distributed`` (broadcasts), ``disk`` (through a folder that the server can read), or ``tensor`` (in the
            calls themselves, as the pickle that SGLang's endpoint wants; to loopback only).
        backend: of the broadcasts: ``gloo``, or ``nccl`` from GPU to GPU.
        host: address of this machine as the server reaches it, for the broadcasts.
        folder: where ``disk`` puts its folders; None takes the system's place for temporary files.
        bucket_bytes: tensors are handed on in buckets of about this size; each is held here and at every rank of the server.
        selector: which of the server's models are updated: ``target``, ``draft``, or ``all``.
        timeout_s: longest time for one bucket, in seconds.
        watch_s: the server is asked so often whether it is still the same, in seconds.
    """

    api_key: str | None = None
    model: Any = None
    layout: Layout | None = None
    dtype: str | None = None
    transport: Transport = "distributed"
    backend: Backend = "gloo"
    host: str = "127.0.0.1"
    folder: str | None = None
    bucket_bytes: int | str = "256MiB"
    selector: Selector = "target"
    timeout_s: float = 120.0
    watch_s: float = 1.0

    def problems(self, url: str) -> list[str]:
        """What is wrong with them for a server at ``url``."""
        problems = [
            f"{name} is {value!r}; choose one of {', '.join(get_args(kind))}"
            for name, value, kind in (
                ("transport", self.transport, Transport),
                ("backend", self.backend, Backend),
                ("selector", self.selector, Selector),
            )
            if value not in get_args(kind)
        ]
        host = urlsplit(url).hostname or ""
        if self.transport == "tensor" and not Address(host=host).is_local:
            problems.append(f"transport 'tensor' sends a pickle, to loopback only; {url} is beyond it: use 'distributed'")
        for name, seconds in (("timeout_s", self.timeout_s), ("watch_s", self.watch_s)):
            if not 0 < seconds < float("inf"):
                problems.append(f"{name} is {seconds!r}; it must be a finite number of seconds above 0")
        try:
            parse_size(self.bucket_bytes)
        except (ValueError, TypeError) as error:
            problems.append(f"bucket_bytes: {error}")
        return problems
