"""What checkpoint-engine asks of a GPU, done by this machine's memory: it has no CPU mode of its own.

Replaced are its device manager (gloo where it would take NCCL; nothing to synchronise or to empty), pinned memory (ordinary
memory), and CUDA IPC (a buffer in POSIX shared memory, which the worker maps). Its parameter server, buckets, broadcast,
handshake and worker loop run as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

_Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


def share(buffer: torch.Tensor) -> _Handle:
    """Moves a buffer into shared memory; a handle that can be sent, as ``reduce_tensor`` of a CUDA tensor returns."""
    return attach, buffer.untyped_storage()._share_filename_cpu_()


def attach(manager: bytes, handle: bytes, nbytes: int) -> torch.Tensor:
    """The buffer behind a handle of `share`, mapped."""
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, nbytes)  # noqa: SLF001 - as torch's own pickling
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Manager:
    """Stands in for ``checkpoint_engine.device_utils.DeviceManager``."""

    device_type = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.device_module = SimpleNamespace(
            device_count=lambda: os.cpu_count() or 1,
            set_device=_nothing,
            synchronize=_nothing,
            empty_cache=_nothing,
            ipc_collect=_nothing,
            memory_allocated=_zero,
            memory_reserved=_zero,
            mem_get_info=_memory,
        )


class _Torch:
    """torch without pinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, **how: Any) -> torch.Tensor:
        """As ``torch.empty``, never pinned."""
        return torch.empty(*size, **{**how, "pin_memory": False})


def install(identity: Callable[[], str]) -> None:
    """Put all of it in place, in this process. ``identity``: stands for the GPU's UUID."""
    from checkpoint_engine import pin_memory, ps, worker

    ps.DeviceManager = worker.DeviceManager = Manager
    ps._get_physical_gpu_id = lambda *_: identity()  # noqa: SLF001
    ps.reduce_tensor = share
    pin_memory.torch = _Torch()


def _nothing(*_: Any) -> None:
    return None


def _zero() -> int:
    return 0


def _memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
