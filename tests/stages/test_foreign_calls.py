"""What CUDA's and NCCL's C functions are given: every argument in its full width, structs by value, streams of our own.

The libraries are stood for by callbacks whose addresses are called as symbols of a real library are: with nothing known of
their arguments but what the code itself says.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

import pytest
import torch

from syncline.stages import cudart, nccl
from syncline.stages.cudart import Cudart, OwnStreams, loaded_library
from syncline.stages.errors import TransportError
from syncline.stages.issuing import Message
from syncline.stages.lanes import HostDigests, Lane
from syncline.stages.watch import Watch

BIG = 0x7FFFDEADBEEF0010
FAR = 0x7F0123456789AB00


class Library(types.SimpleNamespace):
    """``add(name, result, *arguments)(function)``: a C function of that type, called as one of a shared library."""

    def __init__(self):
        super().__init__(calls=[], _kept=[])

    def add(self, name, *arguments, result=c_int):
        def take(function):
            callback = ctypes.CFUNCTYPE(result, *arguments)(function)
            self._kept.append(callback)
            setattr(self, name, ctypes.CDLL(None)._FuncPtr(ctypes.cast(callback, c_void_p).value))

        return take

    def plain(self, name, *arguments, code=0):
        """One that only notes its arguments."""

        def noted(*given):
            self.calls.append((name, *given))
            return code

        self.add(name, *arguments)(noted)


def put(address, kind, value):
    kind.from_address(address).value = value


@pytest.fixture
def runtime(monkeypatch):
    """A `Cudart` over a library that stands for libcudart and libcuda."""
    library = Library()
    library.busy, library.made = set(), 0

    @library.add("cudaStreamCreateWithFlags", c_void_p, c_uint)
    def create(where, flags):
        library.calls.append(("create", flags))
        put(where, c_void_p, BIG + 0x100 * library.made)
        library.made += 1
        return 0

    @library.add("cudaStreamQuery", c_void_p)
    def query(stream):
        library.calls.append(("query", stream))
        return 600 if stream in library.busy else 0

    @library.add("cudaIpcGetMemHandle", c_void_p, c_void_p)
    def get(where, address):
        library.calls.append(("get", address))
        ctypes.memmove(where, bytes(range(64)), 64)
        return 0

    @library.add("cudaIpcOpenMemHandle", c_void_p, cudart._MemHandle, c_uint)
    def opened(where, handle, flags):
        library.calls.append(("open", bytes(handle.reserved), flags))
        put(where, c_void_p, FAR)
        return 0

    library.plain("cudaIpcCloseMemHandle", c_void_p)
    library.plain("cudaGetLastError")
    here = threading.local()

    @library.add("cudaFree", c_void_p)
    def free(address):
        here.bound = address is None
        return 0

    library.add("cudaGetErrorString", c_int, result=c_void_p)(lambda _code: ctypes.cast(c_char_p(b"bad"), c_void_p).value)

    @library.add("cuMemGetAddressRange_v2", c_void_p, c_void_p, c_uint64)
    def extent(base, size, address):
        if not getattr(here, "bound", False):
            return 201  # CUDA_ERROR_INVALID_CONTEXT: a call of the driver, on a thread on which the runtime has done nothing
        if address == BIG:
            return 1  # CUDA_ERROR_INVALID_VALUE
        put(base, c_uint64, address - 16)
        put(size, c_size_t, 5_000_000_000)
        return 0

    @library.add("cuPointerGetAttribute", c_void_p, c_int, c_uint64)
    def attribute(where, which, address):
        library.calls.append(("attribute", which, address))
        put(where, c_int, 1)
        return 0

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(cudart, "load_runtime", lambda: library)
    with monkeypatch.context() as inside:
        inside.setattr(ctypes, "CDLL", lambda _name: library)
        made = Cudart()
    return made, library


def test_cuda_is_given_whole_addresses_and_handles(runtime):
    made, library = runtime
    assert made.address_range(FAR) == (FAR - 16, 5_000_000_000)
    assert made.can_share(FAR)
    handle = made.export_memory(FAR)
    assert handle == bytes(range(64))
    assert made.open_memory(handle) == FAR
    made.close_memory(FAR)
    assert made.make_stream() == BIG
    assert made.is_idle(BIG)
    assert library.calls == [
        ("attribute", 10, FAR), ("get", FAR), ("open", handle, 1), ("cudaIpcCloseMemHandle", FAR), ("create", 1),
        ("query", BIG),
    ]  # fmt: skip


def test_a_thread_may_ask_the_driver_before_anything_else(runtime):
    """To be on device 0 gives a thread no context: torch does nothing for a thread that is there already."""
    made, _ = runtime
    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(made.address_range, FAR).result(10) == (FAR - 16, 5_000_000_000)
        with pytest.raises(TransportError, match=r"no allocation .* error 1\)"):
            fresh.submit(made.address_range, BIG).result(10)


def test_what_cuda_refuses_is_told(runtime):
    made, library = runtime
    library.plain("cudaIpcCloseMemHandle", c_void_p, code=1)
    with pytest.raises(TransportError, match=r"could not close memory of another process: bad \(1\)"):
        made.close_memory(FAR)
    assert library.calls[-1] == ("cudaGetLastError",)


class Stream:
    def __init__(self, handle, device):
        self.handle, self.device = handle, device


@pytest.fixture
def streams(runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    return OwnStreams(runtime[0]), runtime[1]


def test_no_two_users_are_given_one_stream(streams):
    """torch's own would come again after 32."""
    own, library = streams
    device = torch.device("cuda", 0)
    held = [own.take(device) for _ in range(100)]
    assert len({stream.handle for stream in held}) == own.made == 100
    assert set(library.calls) == {("create", 1)}, "they do not wait for the default stream"


def test_a_stream_is_used_again_when_nobody_holds_it_and_it_is_idle(streams):
    own, library = streams
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    first = own.take(device)
    handle = first.handle
    del first
    gc.collect()
    assert own.take(other).handle != handle, "it belongs to its device"
    library.busy.add(handle)
    second = own.take(device)
    assert second.handle != handle, "what hangs on it would hold up the next user"
    busy = library.calls.index(("query", handle))
    assert library.calls[busy + 1] == ("cudaGetLastError",), "not ready is an error, too, for the next launch of torch to meet"
    library.busy.clear()
    assert own.take(device).handle == handle


class OneStream:
    """A device whose memory comes from the stream that is current, as CUDA's does."""

    device = torch.device("cpu")
    current = None

    def stream(self):
        return object()

    @contextlib.contextmanager
    def on(self, stream):
        OneStream.current, before = stream, OneStream.current
        yield
        OneStream.current = before

    def event(self):
        raise AssertionError

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)


async def test_memory_of_a_lane_is_allocated_on_its_stream(monkeypatch):
    """What was freed on another stream may be in use there: written here without order, it is corrupted."""
    allocated = []
    empty = torch.empty

    def noted(*size, **options):
        if options.get("device") is not None:
            allocated.append(OneStream.current)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", noted)
    lane = Lane(OneStream(), Watch())
    digests = HostDigests(lane)
    assert digests.spare() is None
    digest = digests.make()
    assert allocated == [lane.stream]
    digests.give_back(digest)
    assert digests.spare() is digest
    assert digests.spare() is None


@pytest.fixture
def communicators(monkeypatch):
    """A `CudaNccl` over a library that stands for NCCL."""
    library = Library()
    library.states = [7, 7, 0]
    library.add("ncclGetVersion", c_void_p)(lambda where: put(where, c_int, 22907) or 0)
    library.add("ncclGetUniqueId", c_void_p)(lambda where: (ctypes.memmove(where, bytes(range(128)), 128), 0)[1])

    @library.add("ncclCommInitRankConfig", c_void_p, c_int, nccl._UniqueId, c_int, c_void_p)
    def init(where, size, identity, rank, config):
        given = nccl._Config.from_address(config)
        library.calls.append(("init", size, bytes(identity), rank, given.size, given.magic, given.blocking))
        put(where, c_void_p, FAR)
        return 7

    @library.add("ncclCommGetAsyncError", c_void_p, c_void_p)
    def state(handle, where):
        library.calls.append(("state", handle))
        put(where, c_int, library.states.pop(0))
        return 0

    message = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    library.plain("ncclSend", *message)
    library.plain("ncclRecv", *message)
    library.plain("ncclGroupStart")
    library.plain("ncclGroupEnd", code=7)
    library.plain("ncclCommAbort", c_void_p)
    library.add("ncclGetErrorString", c_int, result=c_void_p)(lambda _code: None)
    library.add("ncclGetLastError", c_void_p, result=c_void_p)(lambda _handle: None)
    monkeypatch.setattr(nccl, "needs_cuda", lambda _what: None)
    monkeypatch.setattr(nccl, "loaded_library", lambda _name: "nccl")
    monkeypatch.setattr(nccl, "own_stream", lambda _device: types.SimpleNamespace(cuda_stream=BIG, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    with monkeypatch.context() as inside:
        inside.setattr(ctypes, "CDLL", lambda _name: library)
        made = nccl.CudaNccl(torch.device("cuda", 0))
    return made, library


def test_nccl_is_given_whole_addresses_counts_and_streams(communicators):
    made, library = communicators
    identity = made.unique_id()
    assert identity == bytes(range(128))
    communicator = made.start(2, identity, 1)
    assert [made.ready(communicator) for _ in range(3)] == [False, False, True]
    made.group(communicator, [Message(True, FAR + 1, 5_000_000_000, 1), Message(False, FAR + 2, 3, 0)])
    made.abort(communicator)
    assert library.calls == [
        ("init", 2, identity, 1, ctypes.sizeof(nccl._Config), 0xCAFEBEEF, 0),
        *[("state", FAR)] * 3,
        ("ncclGroupStart",),
        ("ncclSend", FAR + 1, 5_000_000_000, 1, 1, FAR, BIG),
        ("ncclRecv", FAR + 2, 3, 1, 0, FAR, BIG),
        ("ncclGroupEnd",),
        ("ncclCommAbort", FAR),
    ]


@pytest.mark.parametrize(("value", "warns"), [("1", True), ("8", False), (None, False)])
def test_one_hardware_queue_for_all_streams_is_told_once(communicators, monkeypatch, caplog, value, warns):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    nccl.warn_of_one_connection.cache_clear()
    monkeypatch.setattr(nccl, "_library", lambda: communicators[1])
    for _ in range(2):
        nccl.CudaNccl(torch.device("cuda", 0))
    assert caplog.text.count("one hardware queue") == warns
    nccl.warn_of_one_connection.cache_clear()


def test_of_several_libraries_the_one_that_torch_uses_is_taken(monkeypatch):
    lines = [
        "7f00-7f01 r-xp 00000000 08:01 1 /opt/a/libcudart.so.11.8",
        "7f02-7f03 r-xp 00000000 08:01 2 /opt/b/libcudart.so.12",
        "7f04-7f05 r-xp 00000000 08:01 3 /opt/c/libcudart_static.so.12",
    ]
    monkeypatch.setattr(cudart.Path, "read_text", lambda *_args, **_options: "\n".join(lines))
    assert loaded_library("libcudart", "libcudart.so.12") == "/opt/b/libcudart.so.12"
    assert loaded_library("libcudart", "libcudart.so.13") == "/opt/a/libcudart.so.11.8"
    assert loaded_library("libnccl") is None


def test_a_plugin_of_nccl_is_not_taken_for_nccl(monkeypatch):
    """NCCL loads them with its first communicator, and they may lie before it."""
    lines = [
        "7f00-7f01 r-xp 00000000 08:01 1 /opt/aws/libnccl-net.so",
        "7f02-7f03 r-xp 00000000 08:01 2 /opt/aws/libnccl-tuner-ofi.so",
        "7f04-7f05 r-xp 00000000 08:01 3 /opt/torch/libnccl.so.2",
    ]
    monkeypatch.setattr(cudart.Path, "read_text", lambda *_args, **_options: "\n".join(lines))
    loaded = []

    def load(path):
        loaded.append(path)
        raise OSError("not here")

    monkeypatch.setattr(nccl.ctypes, "CDLL", load)
    with pytest.raises(TransportError, match=r"libnccl\.so\.2"):
        nccl._library()
    assert loaded == ["/opt/torch/libnccl.so.2"]


@pytest.mark.cuda
def test_own_streams_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    held = [cudart.own_stream(device) for _ in range(40)]
    assert len({stream.cuda_stream for stream in held}) == 40
    with torch.cuda.stream(held[0]):
        memory = torch.zeros(10, device=device) + 1
    held[0].synchronize()
    assert int(memory.sum()) == 10
