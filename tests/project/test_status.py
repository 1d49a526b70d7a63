"""``syncline status``, against a control server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from syncline.bench import cli
from syncline.engine.control_server import ControlServer, Service
from syncline.engine.messages import Status


class Fixed:
    """A service that says what it was made with."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    async def on_status(self) -> Status:
        base: dict[str, Any] = {
            "state": "COMMITTED", "version": 7, "digest": "ab12", "incarnation": "one", "rank": 0, "world_size": 2,
            "ready": True, "manifest_digest": "", "pushes": 3,
        }  # fmt: skip
        return Status(**(base | self.fields))

    def on_unwatched(self, peer: str) -> None:
        """Nobody watches."""


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    servers: list[ControlServer] = []

    async def start(secret: str | None = None, **fields: Any) -> str:
        server = ControlServer(cast("Service", Fixed(**fields)), "tcp://127.0.0.1:0", secret=secret)
        await server.start()
        servers.append(server)
        return server.address

    yield start
    for server in servers:
        await server.close()


async def run(*argv: str) -> int:
    return await asyncio.to_thread(cli.main, ["status", *argv])


async def test_says_what_a_target_serves(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = await serve()
    assert await run(address) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{address}: COMMITTED, version 7\n")
    assert "ab12" in out


async def test_json(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(await serve(), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["version"], found["pushes"]) == ("COMMITTED", 7, 3)


async def test_fenced_is_not_a_success(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(await serve(state="FENCED", version=None, ready=False, message="rank 1 is lost")) == 1
    out = capsys.readouterr().out
    assert "FENCED, no version yet" in out
    assert "not all have joined" in out
    assert "rank 1 is lost" in out


async def test_secret_is_read_from_its_file(serve: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = await serve(secret="open sesame")
    (tmp_path / "secret").write_text("open sesame\n")
    assert await run(address, "--secret-file", str(tmp_path / "secret")) == 0
    assert await run(address) == 1
    assert "AuthError" in capsys.readouterr().err
    assert await run(address, "--secret-file", str(tmp_path / "nothing")) == 1
    assert "ConfigError" in capsys.readouterr().err


async def test_nobody_there(serve: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert await run(f"unix:{tmp_path}/no.sock", "--timeout", "2") == 1
    assert "TargetUnreachable" in capsys.readouterr().err
