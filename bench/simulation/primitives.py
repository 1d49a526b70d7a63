"""What this machine does in isolation: copies, digests, gloo messages. Rates alone, and side by side on all cores.

Nothing here is a push: the numbers are what a push is predicted from.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
import uvloop

from syncline.scheduler.boxes import Box
from syncline.scheduler.programs import Leaves, Segment
from syncline.stages.assembly import move_and_digest
from syncline.stages.communicator import Communicator, Rendezvous
from syncline.stages.copies import move_bytes
from syncline.stages.digest import bytes_of, digest_bytes

from .hardware import Work

_BLOCK = 32 * 2**20
_BLOCKS = 6
_LEAF = 262144
_MESSAGE = 8 * 2**20
_MESSAGES = 24
_SMALL = 200
_PORT_WAIT_S = 60.0


class Rate(NamedTuple):
    """Bytes a second: of one alone, and of ``threads`` side by side together; ``cores``: used by one alone."""

    alone: float
    together: float
    threads: int
    cores: float = 1.0

    def work(self) -> Work:
        """As a cost: what two of them cannot do together at full speed is a share of the memory bus."""
        bus = self.alone / self.together if self.together < 0.97 * self.threads * self.alone else 0.0
        return Work(s_per_byte=1 / self.alone, bus=bus, cores=self.cores)


# ------------------------------------------------------------------------------------------------------------ memory


class _Blocks:
    """Memory of one thread: as large as several buckets, so that nothing stays in the cache from one round to the next."""

    def __init__(self) -> None:
        self.src = [torch.ones(_BLOCK, dtype=torch.uint8) for _ in range(_BLOCKS)]
        self.dst = [torch.ones(_BLOCK, dtype=torch.uint8) for _ in range(_BLOCKS)]
        leaves = Leaves(item_uid=7, first=0, blocks=1, block_nbytes=_BLOCK, leaf_nbytes=_LEAF)
        box = Box(start=(0,), shape=(_BLOCK,))
        self.segment = Segment(item=0, name="", box=box, dtype="uint8", offset=0, nbytes=_BLOCK, leaves=leaves)

    def copy(self) -> None:
        for src, dst in zip(self.src, self.dst, strict=True):
            move_bytes(dst.data_ptr(), src.data_ptr(), _BLOCK)

    def digest(self) -> None:
        for src in self.src:
            digest_bytes(bytes_of(src), self.segment.leaves)

    def copy_digest(self) -> None:
        for src, dst in zip(self.src, self.dst, strict=True):
            move_and_digest(bytes_of(dst), dst.data_ptr(), src.data_ptr(), self.segment)


def memory_rates(repeat: int) -> dict[str, Rate]:
    """``copy``, ``digest`` and ``copy_digest``, alone and on all cores."""
    cores = len(os.sched_getaffinity(0))
    blocks = [_Blocks() for _ in range(cores)]
    found = {}
    for name in ("copy", "digest", "copy_digest"):
        jobs: list[Callable[[], None]] = [getattr(each, name) for each in blocks]
        alone = _rate(jobs[:1], repeat)
        found[name] = Rate(alone, _rate(jobs, repeat) if cores > 1 else alone, cores)
    return found


def _rate(jobs: Sequence[Callable[[], None]], repeat: int) -> float:
    """Bytes a second of all jobs side by side, each in a thread of its own; best of the rounds: others only disturb."""
    seconds = [_together(jobs) for _ in range(repeat + 1)]
    return len(jobs) * _BLOCK * _BLOCKS / min(seconds)


def _together(jobs: Sequence[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=job) for job in jobs]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


# -------------------------------------------------------------------------------------------------------------- gloo


class Loopback(NamedTuple):
    """Of gloo between two processes: its rate, and seconds for a small message one way."""

    rate: Rate
    latency_s: float


class _Side(msgspec.Struct):
    """What one end of a pair says of its part."""

    seconds: list[float]
    cpu_s: list[float]
    small_s: float


async def loopback(repeat: int) -> Loopback:
    """Measure one pair of processes alone, then two pairs at once."""
    (alone,) = await asyncio.gather(_pair(repeat))
    pairs = await asyncio.gather(_pair(repeat), _pair(repeat))
    moved = _MESSAGE * _MESSAGES
    one = [moved / s for s in alone[0].seconds[1:]]
    two = [sum(moved / side[0].seconds[i] for side in pairs) for i in range(1, repeat + 1)]
    cores = sum(statistics.median(side.cpu_s[1:]) for side in alone) / min(alone[0].seconds[1:])
    rate = Rate(max(one), max(two), 2, cores)
    return Loopback(rate, alone[0].small_s)


async def _pair(repeat: int) -> list[_Side]:
    """Two processes, of which the first sends."""
    rendezvous = await asyncio.to_thread(Rendezvous.host, "127.0.0.1", timeout_s=_PORT_WAIT_S)
    try:
        return list(await asyncio.gather(*(_end(rendezvous.endpoint, rank, repeat) for rank in range(2))))
    finally:
        rendezvous.close()


async def _end(endpoint: str, rank: int, repeat: int) -> _Side:
    arguments = [sys.executable, "-m", "syncline.bench.simulation.primitives", endpoint, str(rank), str(repeat)]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(2 * _PORT_WAIT_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return msgspec.json.decode(out.splitlines()[-1], type=_Side)


async def _peer(endpoint: str, rank: int, repeat: int) -> _Side:
    """One end, as a process of its own."""
    torch.set_num_threads(1)
    store = await asyncio.to_thread(Rendezvous.join, endpoint, timeout_s=_PORT_WAIT_S)
    link = await Communicator.create(store, name="pair", rank=rank, size=2, bind_host="127.0.0.1", timeout_s=_PORT_WAIT_S)
    try:
        memory = [torch.ones(_MESSAGE, dtype=torch.uint8) for _ in range(_MESSAGES)]
        seconds, cpu_s = [], []
        for _ in range(repeat + 1):
            await _turn(link, rank, 1)
            began, cpu = time.perf_counter(), _cpu_s()
            move = link.send if rank == 0 else link.recv
            for signal in [move(each, 1 - rank, 2) for each in memory]:
                await signal
            seconds.append(time.perf_counter() - began)
            cpu_s.append(_cpu_s() - cpu)
        began = time.perf_counter()
        await _turn(link, rank, _SMALL)
        return _Side(seconds, cpu_s, (time.perf_counter() - began) / (2 * _SMALL))
    finally:
        await link.close()


async def _turn(link: Communicator, rank: int, times: int) -> None:
    """A small message there and back."""
    small = torch.ones(64, dtype=torch.uint8)
    for _ in range(times):
        first, second = (link.send, link.recv) if rank == 0 else (link.recv, link.send)
        await first(small, 1 - rank, 1)
        await second(small, 1 - rank, 1)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str]) -> int:
    """Entry point of one end of a pair."""
    endpoint, rank, repeat = arguments
    side = uvloop.run(_peer(endpoint, int(rank), int(repeat)))
    sys.stdout.write(msgspec.json.encode(side).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
