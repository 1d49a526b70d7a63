"""What this machine can do with the same bytes: the floors that rows are held against, measured in the same run.

    python -m syncline.bench.measure.floors '{"rank": 0, "store": ..., "nbytes": ..., "repeat": ...}'

is one of the two processes of the loopback floor.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.bench.endings import tied

from .errors import BenchError
from .timing import times

MEMCPY = "memcpy, 1 thread"
MEMMOVE = "memmove of the whole, 1 call"
LOOPBACK = "loopback gloo, send and recv of the whole"
H2D = "host to device, pinned"
D2D = "device to device"

_TIMEOUT_S = 300.0


def memcpy(tensors: int, nbytes: int, repeat: int) -> list[float]:
    """One thread copies tensor by tensor, between memory that was touched before. Seconds of each time."""
    source = [torch.ones(nbytes // 4 // tensors) for _ in range(tensors)]
    target = [torch.zeros_like(tensor) for tensor in source]

    def copy() -> None:
        for destination, tensor in zip(target, source, strict=True):
            destination.copy_(tensor)

    with _one_thread():
        return times(copy, repeat)


def memmove(nbytes: int, repeat: int) -> list[float]:
    """The C library moves all bytes in one call."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return times(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes), repeat)


async def loopback(nbytes: int, repeat: int) -> list[float]:
    """Two processes: one send and one recv of all bytes over gloo, as one message, and a byte back."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        shared = {"store": f"{folder}/store", "nbytes": nbytes, "repeat": repeat}
        ranks = [
            await asyncio.create_subprocess_exec(
                *tied([sys.executable, "-m", __spec__.name, json.dumps({**shared, "rank": rank})]),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                said = await asyncio.gather(*(rank.communicate() for rank in ranks))
        except TimeoutError:
            raise BenchError(f"{LOOPBACK}: not done in {_TIMEOUT_S:g} s") from None
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
                    await rank.wait()
    if ranks[0].returncode:
        raise BenchError(f"{LOOPBACK}: {said[0][1].decode()[-2000:]}")
    seconds: list[float] = json.loads(said[0][0].splitlines()[-1])
    return seconds


def host_to_device(nbytes: int, repeat: int) -> list[float]:
    """From pinned memory to the first GPU."""
    return _device_copy(torch.ones(nbytes, dtype=torch.uint8).pin_memory(), repeat)


def device_to_device(nbytes: int, repeat: int) -> list[float]:
    """Within the first GPU."""
    return _device_copy(torch.ones(nbytes, dtype=torch.uint8, device="cuda"), repeat)


def device_floors() -> dict[str, Callable[[int, int], list[float]]]:
    """Floors that need a GPU; none where there is none."""
    return {H2D: host_to_device, D2D: device_to_device} if torch.cuda.is_available() else {}


def _device_copy(source: torch.Tensor, repeat: int) -> list[float]:
    target = torch.zeros_like(source, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return times(copy, repeat)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """One of the two processes of `loopback`. Rank 0 sends, and prints the seconds of each message as JSON."""
    args: dict[str, Any] = json.loads(sys.argv[1])
    rank, nbytes = args["rank"], args["nbytes"]
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = dist.FileStore(str(Path(args["store"])), 2)  # type: ignore[attr-defined]  # public, but not listed as such
    group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)  # send and recv are missing in torch's stubs
    data, back = torch.full((nbytes,), rank, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    seconds = []
    for tag in range(args["repeat"]):
        began = time.perf_counter()
        if rank == 0:
            group.send([data], 1, tag).wait()
            group.recv([back], 1, tag).wait()
        else:
            group.recv([data], 0, tag).wait()
            group.send([back], 0, tag).wait()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
