"""NCCL by ctypes: the library that torch has loaded, with communicators that never block the calling thread.

Nothing here needs NCCL or a GPU to be imported; `CudaNccl` needs both to be made.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .cudart import loaded_library, needs_cuda, own_stream
from .errors import TransportError
from .issuing import Message

log = logging.getLogger("syncline.stages")

UNIQUE_ID_NBYTES = 128

_SUCCESS, _IN_PROGRESS, _UINT8 = 0, 7, 1
_OLDEST = 21400
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21700
"""The struct's version, not the library's: what later versions have added keeps its defaults."""


class _UniqueId(ctypes.Structure):
    """``ncclUniqueId``: passed by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_NBYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as NCCL 2.17 has it, with its defaults but for ``blocking``."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]

    @classmethod
    def non_blocking(cls) -> _Config:
        size = ctypes.sizeof(cls)
        return cls(size, _MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, None)


class _Communicator(NamedTuple):
    """A ``ncclComm_t``, and the stream that its work goes on."""

    handle: ctypes.c_void_p
    stream: torch.cuda.Stream


class CudaNccl:
    """Implements `syncline.stages.issuing.NcclRuntime`.

    Args:
        device: a CUDA device of this process.

    Raises:
        TransportError: there is none, or no NCCL of version 2.14 or later.
    """

    def __init__(self, device: torch.device) -> None:
        needs_cuda("transport 'nccl'")
        warn_of_one_connection()
        if device.type != "cuda":
            raise TransportError(f"transport 'nccl' moves device memory, and was given {device}; choose 'gloo' or 'auto'")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._nccl: Any = _library()
        version = ctypes.c_int()
        self._check(self._nccl.ncclGetVersion(ctypes.byref(version)), "tell its version")
        if version.value < _OLDEST:
            raise TransportError(f"NCCL {version.value} cannot be used without blocking; install 2.14 or later")

    def unique_id(self) -> bytes:
        made = _UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(made)), "make an identity")
        return bytes(made)

    def start(self, size: int, unique_id: bytes, rank: int) -> _Communicator:
        if len(unique_id) != UNIQUE_ID_NBYTES:
            raise TransportError(f"a NCCL identity has {UNIQUE_ID_NBYTES} bytes, not {len(unique_id)}")
        handle, config = ctypes.c_void_p(), _Config.non_blocking()
        identity = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(self.device):
            stream = own_stream(self.device)
            code = self._nccl.ncclCommInitRankConfig(
                ctypes.byref(handle), ctypes.c_int(size), identity, ctypes.c_int(rank), ctypes.byref(config)
            )
        self._check(code, "start a communicator")
        return _Communicator(handle, stream)

    def ready(self, communicator: _Communicator) -> bool:
        state = ctypes.c_int()
        self._check(self._nccl.ncclCommGetAsyncError(communicator.handle, ctypes.byref(state)), "tell its state")
        self._check(state.value, "go on", communicator)
        return state.value == _SUCCESS

    def group(self, communicator: _Communicator, messages: Sequence[Message]) -> None:
        handle, stream = communicator.handle, ctypes.c_void_p(communicator.stream.cuda_stream)
        with torch.cuda.device(self.device):
            self._check(self._nccl.ncclGroupStart(), "start a group")
            codes = []
            for message in messages:
                call = self._nccl.ncclSend if message.sends else self._nccl.ncclRecv
                address, count = ctypes.c_void_p(message.address), ctypes.c_size_t(message.nbytes)
                codes.append(call(address, count, ctypes.c_int(_UINT8), ctypes.c_int(message.peer), handle, stream))
            codes.append(self._nccl.ncclGroupEnd())
        for code in codes:
            self._check(code, "start messages", communicator)

    def mark(self, communicator: _Communicator) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(communicator.stream)
        return event

    def abort(self, communicator: _Communicator) -> None:
        with torch.cuda.device(self.device):
            self._nccl.ncclCommAbort(communicator.handle)
            communicator.stream.synchronize()  # its kernels have seen the abort; nothing else is on this stream

    def _check(self, code: int, what: str, communicator: _Communicator | None = None) -> None:
        if code in {_SUCCESS, _IN_PROGRESS}:
            return
        said = self._nccl.ncclGetErrorString(ctypes.c_int(code)).decode()
        last = b"" if communicator is None else self._nccl.ncclGetLastError(communicator.handle) or b""
        detail = f": {last.decode(errors='replace').strip()}" if last else ""
        raise TransportError(f"NCCL could not {what}: {said} ({code}){detail}")


@functools.cache
def warn_of_one_connection() -> None:
    """Say once that all streams of this process share one hardware queue, where they do."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue: NCCL transfers of weights and kernels of "
            "training wait for each other, and a peer that stalls holds up both until the push's deadline. Unset it if your "
            "training does not need it (see docs/trainers.md)"
        )


def _library() -> Any:
    try:
        library = ctypes.CDLL(loaded_library("libnccl.so") or "libnccl.so.2")
        library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
        ]  # fmt: skip
    except (OSError, AttributeError) as error:
        raise TransportError(f"transport 'nccl' needs libnccl.so.2 of version 2.14 or later: {error}") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library
