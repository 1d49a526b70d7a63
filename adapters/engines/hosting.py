"""A model that answers over HTTP and takes pushes: engine, receiver and server of one process, started and ended together."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import torch

from syncline.engine import Receiver
from syncline.engine.observing import Observer

from .checkpoints import Checkpoint
from .generation import GenerationEngine
from .http_errors import secret_guard
from .module import ModuleLoader
from .server import GenerationServer
from .two_phase_service import TwoPhaseService


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What to serve, and where.

    Attributes:
        model: see `Checkpoint.find`.
        dtype: of the parameters.
        random_weights: seed of random weights; None reads the checkpoint's.
        http: host and port for clients; port 0 takes a free one.
        listen: control address for sources, ``unix:PATH`` or ``tcp://HOST:PORT``.
        movable: parameters may be pointed at shared memory (landing ``mapped``).
        initial_version: of the weights at the start, which are then served; None serves nothing before the first push.
        secret: shared by sources, clients and this process. Needed beyond loopback.
        max_batch, max_length, max_waiting, timeout_s: see `GenerationEngine`.
        two_phase: also take updates from sources that speak only the two-phase document, at the URL for clients.
        observers: are told of updates (see `Receiver`).
    """

    model: str
    dtype: torch.dtype = torch.float32
    random_weights: int | None = None
    http: tuple[str, int] = ("127.0.0.1", 0)
    listen: str = "tcp://127.0.0.1:0"
    movable: bool = False
    initial_version: int | None = None
    secret: str | None = None
    max_batch: int = 8
    max_length: int = 2048
    max_waiting: int = 256
    timeout_s: float = 60.0
    two_phase: bool = False
    observers: tuple[Observer, ...] = ()


class HostedEngine:
    """``async with HostedEngine(options) as hosted``: loads the model, then serves until the block ends."""

    def __init__(self, options: HostOptions) -> None:
        self._options = options
        self._stack = AsyncExitStack()
        self.addresses: dict[str, str] = {}
        """``http``: URL for clients. ``control``: address for sources."""

    async def __aenter__(self) -> Self:
        options = self._options
        engine, receiver, server = await asyncio.to_thread(self._build)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(engine)
            stack.push_async_callback(receiver.close)
            await receiver.start()
            await stack.enter_async_context(server)
            self._stack = stack.pop_all()
        self.addresses = {"http": server.url, "control": receiver.address, "model": options.model}
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _build(self) -> tuple[GenerationEngine, Receiver, GenerationServer]:
        """Seconds of reading files: off the event loop."""
        options = self._options
        checkpoint = Checkpoint.find(options.model)
        tokenizer = checkpoint.tokenizer()
        model = checkpoint.model(dtype=options.dtype, random_weights=options.random_weights)
        engine = GenerationEngine(
            model,
            max_batch=options.max_batch,
            max_length=options.max_length,
            max_waiting=options.max_waiting,
            timeout_s=options.timeout_s,
            version=options.initial_version,
        )
        receiver = Receiver(
            loader=ModuleLoader(model, movable=options.movable),
            listen=options.listen,
            serving=engine,
            initial_version=options.initial_version,
            secret=options.secret,
            observers=options.observers,
        )
        host, port = options.http
        server = GenerationServer(
            engine,
            tokenizer,
            host=host,
            port=port,
            receiver=receiver,
            guard=None if options.secret is None else secret_guard(options.secret),
            two_phase=TwoPhaseService(lambda: receiver.address, secret=options.secret) if options.two_phase else None,
        )
        return engine, receiver, server
