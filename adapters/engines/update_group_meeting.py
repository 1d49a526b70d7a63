"""Where the members of a weight-update group meet, under the names that torch's own functions give to things."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from syncline.engine.errors import ConfigError
from syncline.stages.completions import gloo_text
from syncline.stages.errors import TransportError

Backend = Literal["gloo", "nccl"]

_DEVICE: dict[Backend, str] = {"gloo": "cpu", "nccl": "cuda"}
"""The prefix that torch gives a backend's keys: the first kind of device that it serves."""
_LOOK_AGAIN_S = 0.1
_TRY_AGAIN_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which group, and who in it.

    Attributes:
        name: of the group; the same for every member, and not used twice on one store.
        host, port: where rank 0 hosts the store.
        rank, world_size: this member's place.
        backend: ``gloo`` for tensors in CPU memory, ``nccl`` for tensors on this process's current CUDA device.
    """

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: Backend = "gloo"

    def problems(self) -> list[str]:
        """What is wrong with it."""
        problems = []
        if not self.name:
            problems.append("group_name is empty")
        if not 0 < self.port < 2**16:
            problems.append(f"master_port is {self.port}; it must be from 1 to 65535")
        if self.world_size < 2 or not 0 <= self.rank < self.world_size:
            problems.append(
                f"rank {self.rank} of world_size {self.world_size}: a group has two members at least, from rank 0 on"
            )
        if self.backend not in _DEVICE:
            problems.append(f"backend is {self.backend!r}; it is one of {', '.join(_DEVICE)}")
        elif self.backend == "nccl" and not torch.cuda.is_available():
            problems.append("backend is 'nccl', and this process has no CUDA device; use 'gloo'")
        return problems


class HostedStore:
    """The key-value store through which the members of a group meet. Keep it for as long as its groups live."""

    def __init__(self, store: c10d.Store, host: str, port: int) -> None:
        self._store: c10d.Store | None = store
        self.host = host
        self.port = port

    @classmethod
    async def listen(cls, host: str = "127.0.0.1", port: int = 0) -> HostedStore:
        """Listen on ``host`` only; port 0 takes a free one. Whoever reaches it can read and write it: keep it on loopback, or
        in a network that you trust.

        Raises:
            ConfigError: the address cannot be had.
        """
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError([f"cannot listen on {host}:{port}: {error}"]) from error
        port = listener.getsockname()[1]
        waiting, patience = False, timedelta(seconds=300)
        store = c10d.TCPStore(host, port, None, True, patience, waiting, master_listen_fd=listener.detach())
        return cls(store, host, port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._store = None


class _PatientStore(c10d.Store):
    """Another store, whose waits end when nobody wants them any more. The backend calls it from C++."""

    def __init__(self, store: c10d.Store, until: float, cancelled: threading.Event) -> None:
        super().__init__()
        self._store, self._until, self._cancelled = store, until, cancelled

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)  # type: ignore[arg-type] # bytes, too

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = self._until if timeout is None else min(self._until, time.monotonic() + timeout.total_seconds())
        while not self._store.check(list(keys)):
            if self._cancelled.wait(0.005):
                raise RuntimeError("nobody wants to join any more")
            if time.monotonic() > until:
                raise RuntimeError("the other members did not come in time")


def meet(place: Place, timeout_s: float, bind_host: str | None, cancelled: threading.Event) -> tuple[Any, c10d.Store]:
    """Blocks: for a thread of its own."""
    until = time.monotonic() + timeout_s
    where = f"group {place.name!r} at {place.host}:{place.port}, as rank {place.rank} of {place.world_size}"
    try:
        mine = _reach(place, until, cancelled)
        store = _worker_of(place, until, cancelled)
        left = timedelta(seconds=max(0.1, until - time.monotonic()))
        store.set_timeout(left)
        # The prefixes of `init_custom_process_group` and of torch's `_new_process_group_helper`.
        for prefix in (place.name, f"{place.name}/", f"{_DEVICE[place.backend]}/"):
            store = c10d.PrefixStore(prefix, store)
        if place.backend == "nccl":
            return _nccl(place, store, left), store
        patient = _PatientStore(store, until, cancelled)
        return dist.ProcessGroupGloo(patient, place.rank, place.world_size, _gloo_options(bind_host or mine, left)), patient
    except (RuntimeError, OSError) as error:
        raise TransportError(f"{where}: the members did not meet within {timeout_s:g} s: {gloo_text(error)}") from error


def _reach(place: Place, until: float, cancelled: threading.Event) -> str:
    """Wait until the store listens; returns this machine's address on the way there."""
    while True:
        left = until - time.monotonic()
        try:
            with socket.create_connection((place.host, place.port), timeout=max(0.1, left)) as probe:
                return str(probe.getsockname()[0])
        except OSError:
            if left <= 0 or cancelled.wait(_LOOK_AGAIN_S):
                raise


def _worker_of(place: Place, until: float, cancelled: threading.Event) -> c10d.Store:
    """A client of the store, as one of the workers that a store may wait for: rank 0's returns once all have said hello."""
    while True:
        left = until - time.monotonic()
        try:
            patience = timedelta(seconds=max(0.1, min(left, _TRY_AGAIN_S)))
            return c10d.TCPStore(place.host, place.port, place.world_size, False, patience)
        except RuntimeError:
            if left <= 0 or cancelled.wait(_LOOK_AGAIN_S):
                raise


def _gloo_options(bind_host: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - torch offers no other way to choose the address
    options._devices = [gloo.create_device(hostname=bind_host)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - one broadcast runs at a time
    return options


def _nccl(place: Place, store: c10d.Store, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout  # noqa: SLF001
    return nccl(store, place.rank, place.world_size, options)
