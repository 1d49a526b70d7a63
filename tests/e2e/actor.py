"""What every worker process does: take commands as JSON lines on its control socket, run them side by side, answer.

``{"id": 3, "cmd": "push", "args": {"version": 7}}`` -> ``{"id": 3, "value": …}`` or ``{"id": 3, "error": {…}}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

HOLD_S = 120.0
"""Longest that a ``block`` holds: then the test has failed long ago."""


class Injected(RuntimeError):
    """What an armed point raises."""


class Points:
    """Named points in the process, where a fault can be armed. Hit from any thread.

    Actions: ``kill`` and ``stop`` signal this process, ``raise`` raises `Injected`, ``block`` waits until `release`.
    """

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self._armed: dict[str, tuple[int, str]] = {}
        self._released = threading.Event()
        self._lock = threading.Lock()

    def arm(self, point: str, action: str, nth: int = 1) -> None:
        """At the ``nth`` hit of ``point`` from now."""
        with self._lock:
            self._released.clear()
            self._armed[point] = (self.hits[point] + nth, action)

    def release(self) -> None:
        """Let go what is blocked and disarm everything."""
        with self._lock:
            self._armed.clear()
            self._released.set()

    def before(self, function: Callable[..., Any], point: str) -> Callable[..., Any]:
        """``function``, with ``point`` hit before each call."""

        @functools.wraps(function)
        def hooked(*args: Any, **options: Any) -> Any:
            self.hit(point)
            return function(*args, **options)

        return hooked

    def hit(self, point: str) -> None:
        """The process is at ``point``."""
        with self._lock:
            self.hits[point] += 1
            at, action = self._armed.get(point, (0, ""))
            if self.hits[point] != at:
                return
            del self._armed[point]
        print(f"armed point {point!r}: {action}; it holds {held_paths()}", flush=True)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "raise":
            raise Injected(f"injected at {point}")
        elif action == "block":
            self._released.wait(HOLD_S)
        else:
            raise ValueError(action)


class Actor:
    """Commands are the methods ``do_…``."""

    def __init__(self) -> None:
        self.points = Points()
        self.leave = asyncio.Event()

    async def serve(self, control: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=control, limit=2**26)
        tasks: set[asyncio.Task[None]] = set()
        leaving = asyncio.create_task(self.leave.wait())
        while not self.leave.is_set():
            line = asyncio.ensure_future(reader.readline())
            await asyncio.wait({line, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                break
            if not line.result():
                break
            task = asyncio.create_task(self._handle(json.loads(line.result()), writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        leaving.cancel()
        writer.close()

    async def _handle(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            value = getattr(self, f"do_{request['cmd']}")(**request["args"])
            reply["value"] = await value if asyncio.iscoroutine(value) else value
        except BaseException as error:  # noqa: BLE001 (it travels to the test)
            reply["error"] = described(error)
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()

    # ---- commands of every worker

    def do_arm(self, point: str, action: str, nth: int = 1) -> None:
        self.points.arm(point, action, nth)

    def do_release(self) -> None:
        self.points.release()

    def do_hits(self) -> dict[str, int]:
        return dict(self.points.hits)

    def do_vitals(self) -> dict[str, int]:
        """Memory in bytes, and counts."""
        gc.collect()
        return vitals()

    def do_reset_peak(self) -> int:
        """Reset the kernel's high-water mark of resident memory; returns what is resident now, in bytes."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        return vitals()["rss"]

    def do_exit(self) -> None:
        self.leave.set()


def described(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return {"kinds": kinds, "message": str(error), "traceback": "".join(traceback.format_exception(error))}


def held_paths() -> list[str]:
    """Files and directories in shared memory that this process has open: who is killed cannot remove them."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return [link for link in links if link.startswith("/dev/shm/")]


def vitals() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "/memfd:syncline" in line or "/dev/shm/" in line]
    return {
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
        "anonymous": int(status["RssAnon"].split()[0]) * 1024,
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "shared_maps": len(shared),
        "tasks": len(asyncio.all_tasks()),
    }


def print_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """SIGUSR2: where every asyncio task stands."""
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


def main(role: str, control: socket.socket) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("syncline").setLevel(logging.DEBUG)

    async def live() -> None:
        if role == "source":
            from source_actor import SourceActor as Kind
        elif role == "tp_source":
            from tp_actor import TpSource as Kind
        elif role == "tp_target":
            from tp_actor import TpTarget as Kind
        else:
            from target_actor import TargetActor as Kind
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, print_tasks, loop)
        await Kind().serve(control)

    uvloop.run(live())
    return 0
