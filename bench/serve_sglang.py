"""``syncline serve-sglang``: stands beside an SGLang server and takes pushes for it, whoever the source is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from syncline.engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeSGLangArgs:
    """Take pushes for an SGLang server, until SIGTERM or SIGINT. Sources name the address that is printed (RemoteTarget)."""

    url: tyro.conf.Positional[str]
    """The server: http://host:port."""
    listen: str = "tcp://127.0.0.1:0"
    """Where a source reaches this process: unix:PATH or tcp://HOST:PORT. Beyond loopback needs --secret-file."""
    model: str | None = None
    """Checkpoint folder of the server's model; by default the one that the server names."""
    transport: Literal["distributed", "disk", "tensor"] = "distributed"
    """How tensors reach the server: broadcasts, a folder that it can read, or its own pickled calls (loopback only)."""
    bucket_bytes: str = "256MiB"
    """Tensors are handed on in buckets of about this size."""
    secret_file: Path | None = None
    """Holds the secret that sources share."""
    api_key_file: Path | None = None
    """Holds the server's admin key, if it has one."""
    ready_file: Path | None = None
    """Write the address here, as JSON, once ready; removed at the end."""


def main(args: ServeSGLangArgs) -> int:
    """Entry point of ``syncline serve-sglang``."""
    asyncio.run(_serve(args))
    return 0


async def _serve(args: ServeSGLangArgs) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Imported here: torch takes seconds, and --help should not.
    from syncline.adapters.engines.sglang import SGLangOptions, SGLangReceiver

    options = SGLangOptions(
        api_key=_content(args.api_key_file, "api_key_file"),
        model=args.model,
        transport=args.transport,
        bucket_bytes=args.bucket_bytes,
    )
    receiver = SGLangReceiver(args.url, listen=args.listen, options=options, secret=_content(args.secret_file, "secret_file"))
    async with receiver:
        text = json.dumps({"pid": os.getpid(), "control": receiver.address, "sglang": args.url})
        if args.ready_file is not None:
            await asyncio.to_thread(_write, args.ready_file, text)
        print(text, flush=True)
        try:
            await stop.wait()
        finally:
            if args.ready_file is not None:
                args.ready_file.unlink(missing_ok=True)


def _content(path: Path | None, name: str) -> str | None:
    if path is None:
        return None
    with contextlib.suppress(OSError):
        content = path.read_text(encoding="utf-8").strip()
        if content:
            return content
    raise ConfigError([f"{name} {path} cannot be read, or is empty"])


def _write(path: Path, text: str) -> None:
    """The file appears whole."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
