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
    head, row, _, verdict = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", "kind", "state", "version", "ms"]
    assert row.split()[:4] == [address, "syncline", "COMMITTED", "7"]
    assert "2 rank(s)" in row
    assert "ab12" in row
    assert verdict == "serves version 7"


async def test_several_targets_in_one_call(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    addresses = [await serve(), await serve(), await serve()]
    assert await run(*addresses) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == addresses
    assert lines[-1] == "all 3 serve version 7"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 8}, "they serve different versions: 7, 8"),
        ({"state": "FENCED"}, "1 of 2 serve no whole version that was pushed"),
        ({"state": "UPDATING"}, "1 of 2 serve no whole version that was pushed"),
    ],
)
async def test_one_that_differs_is_not_a_success(
    serve: Any, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], says: str
) -> None:
    assert await run(await serve(), await serve(**fields)) == 1
    assert capsys.readouterr().out.splitlines()[-1] == says


async def test_one_that_is_gone_is_named_and_the_others_are_told(
    serve: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = f"unix:{tmp_path}/no.sock"
    assert await run(gone, await serve(), "--timeout", "5") == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:4] == [gone, "unknown", "UNREACHABLE", "-"]
    assert "TargetUnreachable" in rows[1]
    assert rows[2].split()[2] == "COMMITTED"


async def test_json(serve: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    addresses = [await serve(), await serve(version=8), f"unix:{tmp_path}/no.sock"]
    assert await run(*addresses, "--json") == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["address"] for one in found] == addresses
    assert [(one["state"], one["version"]) for one in found] == [("COMMITTED", 7), ("COMMITTED", 8), ("UNREACHABLE", None)]
    assert (found[0]["kind"], found[0]["pushes"], found[0]["digest"]) == ("syncline", 3, "ab12")


async def test_fenced_is_not_a_success(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(await serve(state="FENCED", version=None, ready=False, message="rank 1 is lost")) == 1
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[2:4] == ["FENCED", "-"]
    assert "not all have joined" in row
    assert "rank 1 is lost" in row


async def test_secret_is_read_from_its_file(serve: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = await serve(secret="open sesame")
    (tmp_path / "secret").write_text("open sesame\n")
    assert await run(address, "--secret-file", str(tmp_path / "secret")) == 0
    capsys.readouterr()
    assert await run(address) == 1
    assert "AuthError" in capsys.readouterr().out
    assert await run(address, "--secret-file", str(tmp_path / "nothing")) == 1
    assert "ConfigError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [([], "no target"), (["tcp://h:1", "--timeout", "0"], "timeout is 0")],
)
async def test_wrong_usage(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert await run(*argv) == 1
    assert says in capsys.readouterr().err


async def test_an_address_that_cannot_be_one_is_a_row_of_its_own(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = await serve()
    assert await run(address, "ftp://h", "nonsense", "--json") == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["address"], row["state"] == "UNREACHABLE") for row in rows] == [
        (address, False),
        ("ftp://h", True),
        ("nonsense", True),
    ]
    assert all(row["message"] for row in rows[1:])
