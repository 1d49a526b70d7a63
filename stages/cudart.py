"""The few calls of the CUDA runtime and driver that torch does not offer, on the libraries that torch has loaded.

Nothing here needs a GPU to be imported; `CudaIpc` needs one to be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import TransportError
from .ipc import HANDLE_NBYTES, EventHandle, MemoryHandle
from .launched import Launched, both, failed

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NOT_READY = 600  # cudaErrorNotReady
_ALIGN = 256


def loaded_library(name: str, prefer: str = "") -> str | None:
    """The path of the shared library that this process has loaded under a name that begins so, or None.

    If several are loaded, that whose name begins with ``prefer``.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in lines if f"/{name}" in line)
    found = [path for path in paths if Path(path).name.startswith(name)]
    return next((path for path in found if Path(path).name.startswith(prefer)), found[0] if found else None)


def load_runtime() -> Any:
    """``libcudart`` as torch uses it, or None if torch was built against a static one."""
    major = (torch.version.cuda or "").partition(".")[0]
    path = loaded_library("libcudart", f"libcudart.so.{major}")
    return None if path is None else ctypes.CDLL(path)


def needs_cuda(what: str) -> None:
    """`TransportError` where there is no CUDA device."""
    if not torch.cuda.is_available():
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device is usable here"
        raise TransportError(f"{what} needs a CUDA device, and {build}; choose transport 'auto', 'shm' or 'gloo'")


@contextlib.contextmanager
def enough_memory(nbytes: int, device: torch.device) -> Iterator[None]:
    """`TransportError` if the device has no room for ``nbytes`` that are allocated within."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, whole = torch.cuda.mem_get_info(device)
        raise TransportError(
            f"{nbytes} bytes were needed on {device}, of whose {whole} bytes {free} are free: lower max_tmp_bytes, or choose "
            "landing 'streamed', which holds no second copy of the weights"
        ) from None


class _MemHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``: passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_NBYTES)]


class Cudart:
    """``libcudart`` and ``libcuda`` by ctypes, which lets other threads run during calls. `TransportError` on failure."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._runtime: Any = load_runtime()
        if self._runtime is None:
            raise TransportError("libcudart is not loaded: torch was built against a static one, which cannot be called")
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._runtime.cudaStreamCreateWithFlags.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
        self._runtime.cudaStreamQuery.argtypes = [ctypes.c_void_p]
        self._runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _MemHandle, ctypes.c_uint]
        self._runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_MemHandle), ctypes.c_void_p]
        self._runtime.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
        self._runtime.cudaFree.argtypes = [ctypes.c_void_p]

    def address_range(self, address: int) -> tuple[int, int]:
        """First address and size of the allocation of the current device that ``address`` lies in."""
        # Unlike the runtime, the driver takes no context by itself, and a thread may ask this before anything else. To be
        # "on" device 0 gives it none: torch leaves a thread alone that is there already.
        self._check(self._runtime.cudaFree(None), "be used on this thread")
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        query = self._driver.cuMemGetAddressRange_v2
        if code := query(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)):
            raise TransportError(f"no allocation of this device is known at {address:#x} (the driver's error {code})")
        return base.value, size.value

    def can_share(self, address: int) -> bool:
        """Whether the allocation can be exported: not if it was mapped piece by piece, as expandable segments are."""
        capable = ctypes.c_int()
        query = self._driver.cuPointerGetAttribute
        failed = query(ctypes.byref(capable), ctypes.c_int(_LEGACY_IPC_CAPABLE), ctypes.c_uint64(address))
        return not failed and bool(capable.value)

    def export_memory(self, address: int) -> bytes:
        handle = _MemHandle()
        self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address)), "export memory")
        return bytes(handle.reserved)

    def open_memory(self, handle: bytes) -> int:
        raw = _MemHandle.from_buffer_copy(handle)
        address = ctypes.c_void_p()
        code = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
        self._check(code, "open memory of another process (it must be another process, and alive)")
        return int(address.value or 0)

    def close_memory(self, address: int) -> None:
        self._check(self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)), "close memory of another process")

    def make_stream(self) -> int:
        """A stream of the current device that does not wait for the default one: its ``cudaStream_t``."""
        stream = ctypes.c_void_p()
        self._check(self._runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), _STREAM_NON_BLOCKING), "make a stream")
        return int(stream.value or 0)

    def is_idle(self, stream: int) -> bool:
        """Whether the device has done everything that the stream was given."""
        code = self._runtime.cudaStreamQuery(ctypes.c_void_p(stream))
        if code == _NOT_READY:
            self._runtime.cudaGetLastError()  # it is one, and would surface in the next launch of torch on this thread
            return False
        self._check(code, "ask for a stream")
        return True

    def _check(self, code: int, what: str) -> None:
        if code:
            self._runtime.cudaGetLastError()  # not sticky: it must not surface in the next call of torch
            raise TransportError(f"CUDA could not {what}: {self._runtime.cudaGetErrorString(code).decode()} ({code})")


class OwnStreams:
    """Streams that nothing else of this process is given. From any thread.

    torch deals its own streams out of 32 in turn: two users get the same one, and a receive that stalls holds up a trainer's
    side stream. A stream here that nobody holds any more is used again, and not destroyed: what torch's allocator keeps of
    memory that was freed on a stream can only be used on it.

    Args:
        cudart: makes them.

    Attributes:
        made: streams that exist.
    """

    def __init__(self, cudart: Cudart) -> None:
        self._cudart = cudart
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self.made = 0

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of ``device`` (with an index) that does not wait for the default stream, and that nobody else is given until
        the last reference to it is gone. `TransportError` if none can be made.
        """
        free = self._free[device.index]
        with torch.cuda.device(device), self._lock:
            handle = next((one for one in free if self._cudart.is_idle(one)), None)  # not one on which work hangs
            if handle is None:
                handle = self._cudart.make_stream()
                self.made += 1
            else:
                free.remove(handle)
        stream = torch.cuda.ExternalStream(handle, device=device)
        weakref.finalize(stream, free.append, handle).atexit = False
        return stream


_lock = threading.Lock()
_streams: list[OwnStreams] = []


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """See `OwnStreams.take`: of this process's."""
    with _lock:
        if not _streams:
            _streams.append(OwnStreams(Cudart()))
    return _streams[0].take(device)


class _Span:
    """Device memory as torch takes it: ``owner`` lives as long as the tensor made from it."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None,
        }  # fmt: skip


def device_uuid(device: torch.device) -> bytes:
    """The physical device's 16 bytes."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")).bytes


def ordinal_of(wanted: bytes) -> int | None:
    """The ordinal that this process knows a physical device by; None if it is not visible."""
    visible = range(torch.cuda.device_count())
    return next((i for i in visible if device_uuid(torch.device("cuda", i)) == wanted), None)


class CudaIpc:
    """Implements `syncline.stages.ipc.IpcRuntime`.

    Args:
        device: a CUDA device of this process.

    Raises:
        TransportError: there is none.
    """

    def __init__(self, device: torch.device) -> None:
        needs_cuda("transport 'cuda_ipc'")
        if device.type != "cuda":
            raise TransportError(f"transport 'cuda_ipc' moves device memory, and was given {device}; choose 'shm' or 'auto'")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.uuid = device_uuid(self.device)
        self._cudart = Cudart()
        self._stream = own_stream(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        # on a stream of our own: on the default one whatever a trainer or an engine waits for may be ahead
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), enough_memory(nbytes, self.device):
            memory = torch.zeros(nbytes + _ALIGN, dtype=torch.uint8, device=self.device)
            self._stream.synchronize()  # off the loop; once
        start = -memory.data_ptr() % _ALIGN
        return memory[start : start + nbytes]

    def allocation_of(self, memory: torch.Tensor) -> tuple[int, int]:
        if memory.device != self.device:
            raise TransportError(f"memory on {memory.device} was to be shared over links that were made on {self.device}")
        with torch.cuda.device(self.device):
            base, size = self._cudart.address_range(memory.data_ptr())
            if not self._cudart.can_share(memory.data_ptr()):
                raise TransportError(
                    f"{memory.numel() * memory.element_size()} bytes at {memory.data_ptr():#x} on {self.device} cannot be "
                    "shared between processes: the allocator maps them in expandable segments. Take "
                    "expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF, or choose transport 'nccl'"
                )
        return base, size

    def export(self, address: int) -> bytes:
        with torch.cuda.device(self.device):
            return self._cudart.export_memory(address)

    def open(self, handle: MemoryHandle) -> int:
        self._check_visible(handle.device)
        with torch.cuda.device(self.device):
            return self._cudart.open_memory(handle.handle)

    def close(self, address: int) -> None:
        with torch.cuda.device(self.device):
            self._cudart.close_memory(address)

    def view(self, owner: Any, address: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_Span(owner, address, nbytes), device=self._where(address))

    def _where(self, address: int) -> torch.device:
        """The GPU that memory lies on, which may be a neighbour of ours: on any other device torch would make a copy of it."""
        others = (torch.device("cuda", ordinal) for ordinal in range(torch.cuda.device_count()))
        for device in (self.device, *others):
            if torch.as_tensor(_Span(None, address, 1), device=device).data_ptr() == address:
                return device
        raise TransportError(
            f"torch does not look into the source's memory at {address:#x} from {self.device}, but copies it: choose "
            "transport 'nccl'"
        )

    def make_event(self) -> torch.cuda.Event:
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(interprocess=True)
            event.record(self._stream)
        return event

    def export_event(self, event: Any) -> bytes:
        return bytes(event.ipc_handle())

    def open_event(self, handle: EventHandle) -> torch.cuda.Event:
        ordinal = self._check_visible(handle.device)
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", ordinal), handle.handle)
        return event

    def record(self, event: Any) -> None:
        event.record(torch.cuda.current_stream(self.device))

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Launched:
        event = torch.cuda.Event()
        problem: Exception | None = None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                for destination, source in pairs:
                    destination.copy_(source, non_blocking=True)
            except Exception as error:  # noqa: BLE001 - told when what was started has ended
                problem = error
            event.record(self._stream)
        started = Launched(event, lambda: 0, pairs)
        # without the traceback, which would hold what was to be copied for longer than anybody looks at it
        return started if problem is None else both(started, failed(problem.with_traceback(None)))

    def _check_visible(self, wanted: bytes) -> int:
        ordinal = ordinal_of(wanted)
        if ordinal is None:
            raise TransportError(
                f"the source's memory is on GPU {uuid.UUID(bytes=wanted)}, which this process does not see: make it visible "
                "(CUDA_VISIBLE_DEVICES), or choose transport 'nccl'"
            )
        return ordinal
