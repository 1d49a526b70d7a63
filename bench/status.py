"""``syncline status``: ask a target what it is and which version it serves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tyro

from syncline.engine.control_client import ControlClient
from syncline.engine.errors import ConfigError
from syncline.engine.messages import Status


@dataclass(frozen=True, kw_only=True)
class StatusArgs:
    """Ask a target what it is and which version it serves. Exit code 1 unless it is COMMITTED."""

    address: tyro.conf.Positional[str]
    """Control address of the target's leader: ``unix:/path`` or ``tcp://host:port``."""
    secret_file: Path | None = None
    """Holds the shared secret, for a target beyond loopback."""
    timeout: float = 10.0
    """Seconds to wait for the answer."""
    json: bool = False
    """Print one JSON object."""


async def ask(args: StatusArgs) -> Status:
    """The target's own word. Raises `TargetUnreachable` or `AuthError`."""
    client = ControlClient(args.address, secret=_secret(args), timeout_s=args.timeout)
    try:
        return await client.status()
    finally:
        await client.close()


def _secret(args: StatusArgs) -> str | None:
    if args.secret_file is None:
        return None
    try:
        return args.secret_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError([f"secret_file {args.secret_file} cannot be read: {error}"]) from error


def render(address: str, status: Status) -> str:
    """A few lines of text."""
    version = "no version yet" if status.version is None else f"version {status.version}"
    lines = [
        f"{address}: {status.state}, {version}",
        f"  ranks     {status.world_size}{'' if status.ready else ' (not all have joined yet)'}",
        f"  pushes    {status.pushes}",
        f"  landing   {status.landing_bytes} bytes",
        f"  content   {status.digest or 'unknown'}",
        f"  process   {status.incarnation}",
    ]
    if status.message:
        lines.append(f"  message   {status.message}")
    return "\n".join(lines)


def main(args: StatusArgs) -> int:
    """Entry point of ``syncline status``."""
    status = asyncio.run(ask(args))
    print(json.dumps(msgspec.to_builtins(status)) if args.json else render(args.address, status))
    return 0 if status.state == "COMMITTED" else 1
