"""``syncline status``: ask targets what they are and which version they serve."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from syncline.adapters.engines.fleet import TargetState, common_version, states
from syncline.engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StatusArgs:
    """Ask targets what they are and which version they serve.

    Exit code 0 only if all are COMMITTED on the same version; weights that no push has brought are none.
    """

    addresses: tyro.conf.Positional[tuple[str, ...]]
    """Control addresses (unix:/path, tcp://host:port) and URLs of servers: syncline serve, vLLM, SGLang."""
    secret_file: Path | None = None
    """Holds the shared secret, for targets beyond loopback."""
    timeout: float = 10.0
    """Seconds to wait for the answers; all are asked at once."""
    json: bool = False
    """Print one JSON object a line for each target, in the order in which they were named."""


def _secret(args: StatusArgs) -> str | None:
    if args.secret_file is None:
        return None
    try:
        return args.secret_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError([f"secret_file {args.secret_file} cannot be read: {error}"]) from error


def render(found: list[TargetState]) -> str:
    """A table, and what it comes to."""
    rows = [("target", "kind", "state", "version", "ms", "")]
    rows += [(t.address, t.kind, t.state, _version(t), f"{t.seconds * 1e3:.0f}", _notes(t)) for t in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", verdict(found)])


def verdict(found: list[TargetState]) -> str:
    """One line: what all targets together serve."""
    version = common_version(found)
    if version is not None:
        return f"all {len(found)} serve version {version}" if len(found) > 1 else f"serves version {version}"
    silent = [target for target in found if not target.serves]
    if silent:
        return f"{len(silent)} of {len(found)} serve no whole version that was pushed"
    if any(target.version is None for target in found):
        return "not all say which version they serve"
    return "they serve different versions: " + ", ".join(sorted({str(target.version) for target in found}))


def _version(target: TargetState) -> str:
    return "-" if target.version is None else str(target.version)


def _notes(target: TargetState) -> str:
    details = target.details
    notes = []
    if "world_size" in details:
        joined = "" if details.get("ready", True) else ", not all have joined"
        notes.append(f"{details['world_size']} rank(s){joined}")
    if details.get("digest"):
        notes.append(f"content {details['digest'][:12]}")
    if target.message:
        notes.append(target.message)
    return "; ".join(notes)


def main(args: StatusArgs) -> int:
    """Entry point of ``syncline status``."""
    if not args.addresses:
        raise ConfigError(["no target was named; give control addresses or URLs"])
    if not 0 < args.timeout < float("inf"):
        raise ConfigError([f"timeout is {args.timeout}; it must be a finite number of seconds above 0"])
    found = asyncio.run(states(args.addresses, secret=_secret(args), timeout_s=args.timeout))
    if args.json:
        for target in found:
            fields = asdict(target)
            print(json.dumps(fields.pop("details") | fields))
    else:
        print(render(found))
    return 0 if common_version(found) is not None else 1
