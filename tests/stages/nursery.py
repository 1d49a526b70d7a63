"""A script that makes peer processes for tests.

It imports everything once and forks a process for each connection to its socket. A peer tells its pid, then takes one JSON
command a line and answers with one JSON line each, as soon as that command has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from typing import Any

from peer import LARGE_S, LOOPBACK, SourceRank, TargetRank, key, resources

from syncline.scheduler.programs import ReceiverId
from syncline.stages.communicator import Rendezvous


class Script:
    """Commands of one peer process."""

    def __init__(self) -> None:
        self.peer: Any = None
        self.rendezvous: Rendezvous | None = None

    async def make_source(self, spec: dict[str, Any], rank: int, directory: str) -> None:
        self.peer = SourceRank(spec, rank, directory=directory)

    async def make_target(self, spec: dict[str, Any], target: int, rank: int) -> None:
        self.peer = TargetRank(spec, target, rank)

    async def host(self) -> str:
        self.rendezvous = Rendezvous.host(LOOPBACK, timeout_s=LARGE_S)
        return self.rendezvous.endpoint

    async def group(self, endpoint: str, name: str) -> None:
        await self.peer.group(self.rendezvous, endpoint, name)

    async def offer(self, receivers: list[list[int]]) -> dict[int, str]:
        offers = await self.peer.sender.offer([ReceiverId(*r) for r in receivers])
        return {target: data.hex() for target, data in offers.items()}

    async def link_source(self, receivers: list[list[int]], timeout_s: float) -> dict[str, str]:
        failed = await self.peer.sender.link([ReceiverId(*r) for r in receivers], timeout_s=timeout_s)
        return {key(receiver): str(error) for receiver, error in failed.items()}

    async def link_target(self, descriptors: dict[str, str], timeout_s: float) -> None:
        await self.peer.link({int(r): bytes.fromhex(d) for r, d in descriptors.items()}, timeout_s)

    async def fill(self, version: int) -> None:
        self.peer.fill(version)

    async def push(self, push_id: str, hold_before: int = -1, auto_drop: bool = True, lease_timeout_s: float = 5.0) -> Any:
        peer = self.peer
        peer.hold_before, peer.auto_drop = hold_before, auto_drop
        peer.held.clear()
        peer.go.clear()
        return await peer.push(push_id, lease_timeout_s=lease_timeout_s)

    async def await_held(self) -> None:
        await self.peer.held.wait()

    async def release_hold(self) -> None:
        self.peer.go.set()

    async def drop(self, receivers: list[list[int]]) -> None:
        self.peer.send.drop([ReceiverId(*r) for r in receivers])

    async def facts(self) -> dict[str, Any]:
        return {
            "lost": {key(r): e for r, e in self.peer.lost.items()},
            "errors": {key(r): e for r, e in self.peer.errors.items()},
            "linked": sorted(key(r) for r in self.peer.sender.linked),
            "landing_bytes": self.peer.sender.landing_bytes,
            "in_flight": self.peer.memory.in_flight,
        }

    async def end(self, committed: list[list[int]] | None = None) -> None:
        await self.peer.end(None if committed is None else [ReceiverId(*r) for r in committed])

    async def begin(self, push_id: str) -> None:
        await self.peer.half.begin(push_id, timeout_s=LARGE_S)

    async def receive(self, hold_before: int = -1) -> Any:
        self.peer.hold_before = hold_before
        self.peer.held.clear()
        self.peer.go.clear()
        return await self.peer.receive()

    async def commit(self) -> None:
        await self.peer.commit()

    async def abandon(self) -> None:
        await self.peer.abandon()

    async def wrong(self, version: int) -> list[str]:
        return self.peer.wrong(version)

    async def tasks(self) -> list[int]:
        return [task.index for task in self.peer.program.tasks]

    async def resources(self) -> dict[str, int]:
        return resources()

    async def close(self) -> None:
        await self.peer.close()


async def _serve(script: Script, connection: socket.socket) -> None:
    commands, answers = await asyncio.open_connection(sock=connection, limit=2**24)
    answers.write(f"{os.getpid()}\n".encode())

    async def answer(line: bytes) -> None:
        number, name, arguments = json.loads(line)
        try:
            reply = [number, await getattr(script, name)(**arguments), None]
        except BaseException as error:  # noqa: BLE001 - told to the test
            reply = [number, None, f"{type(error).__name__}: {error}"]
        answers.write((json.dumps(reply) + "\n").encode())

    async with asyncio.TaskGroup() as running:
        while line := await commands.readline():
            running.create_task(answer(line))


def _nursery(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                asyncio.run(_serve(Script(), connection))
            finally:
                os._exit(0)
        connection.close()


if __name__ == "__main__":
    _nursery(sys.argv[1])
